//! The statements.

use rusqlite::types::ValueRef;
use rusqlite::{Connection, Statement, params};

use crate::claim::{ClaimRequest, Claimed, Owner};
use crate::error::StoreError;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::{AbandonedPage, Cursor, Purged};

use super::clock::Micros;
use super::columns::{Columns, SELECTED, encode_checkpoints};
use super::error::{damaged, failed};
use super::row::{After, Row, Verdict};

/// What needs no write lock. Every method is one statement, and so sees one moment of the file.
pub(super) struct Reads<'c> {
    load: Statement<'c>,
    lease: Statement<'c>,
    abandoned: Statement<'c>,
    keys: Statement<'c>,
}

/// The moves. A move reads, decides, and writes with its last statement, so that one that fails has
/// changed nothing. They count on a transaction that holds the write lock round them.
pub(super) struct Table<'c> {
    pub(super) connection: &'c Connection,
    pub(super) reads: Reads<'c>,
    insert: Statement<'c>,
    update: Statement<'c>,
    update_with_expiry: Statement<'c>,
    delete: Statement<'c>,
    delete_by_id: Statement<'c>,
    due: Statement<'c>,
}

/// What one look for the keys of a scope met.
#[derive(Clone, Debug, Default)]
pub(super) struct Met {
    pub(super) keys: Vec<ScopedKey>,
    /// Records whose key cannot be read.
    pub(super) damaged: usize,
    /// Where to go on; `None` at the end.
    pub(super) next: Option<i64>,
}

/// How far a purge has got.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Swept {
    pub(super) purged: Purged,
    /// Records that are due and cannot be read.
    pub(super) damaged: usize,
    /// Where to go on; `None` at the end.
    pub(super) next: Option<(Micros, i64)>,
}

impl<'c> Reads<'c> {
    pub(super) fn prepare(connection: &'c Connection) -> Result<Self, StoreError> {
        let prepare = |sql: &str| connection.prepare(sql).map_err(failed);
        Ok(Self {
            load: prepare(&format!(
                "SELECT {SELECTED} FROM idempotency_records WHERE lookup_key = ?1"
            ))?,
            lease: prepare(LEASE)?,
            abandoned: prepare(&abandoned_sql())?,
            keys: prepare(KEYS)?,
        })
    }

    pub(super) fn load(&mut self, key: &ScopedKey) -> Result<Option<Row>, StoreError> {
        let mut rows = self.load.query([key.as_bytes()]).map_err(failed)?;
        match rows.next().map_err(failed)? {
            Some(row) => Columns::read(row, 0, key).map(Some),
            None => Ok(None),
        }
    }

    /// The record, if there is one that is not expired.
    pub(super) fn lookup(
        &mut self,
        key: &ScopedKey,
        now: Micros,
    ) -> Result<Option<Record>, StoreError> {
        let row = self.load(key)?.filter(|row| !row.is_expired(now));
        Ok(row.map(|row| row.into_record(key.clone(), now)))
    }

    /// The record that stands in the way of this claim, if one does.
    pub(super) fn standing(
        &mut self,
        request: &ClaimRequest,
        now: Micros,
    ) -> Result<Option<Record>, StoreError> {
        let row = self.load(&request.key)?;
        let standing = row.filter(|row| matches!(row.judge(request, now), Verdict::Existing));
        Ok(standing.map(|row| row.into_record(request.key.clone(), now)))
    }

    /// When the live claim of this owner ends, if it stands. Not checked: a waiter that is misled
    /// looks again.
    pub(super) fn live_until(
        &mut self,
        key: &ScopedKey,
        owner: &Owner,
        now: Micros,
    ) -> Result<Option<Micros>, StoreError> {
        let mut rows = self
            .lease
            .query(params![key.as_bytes(), &owner.as_bytes()[..]])
            .map_err(failed)?;
        let Some(row) = rows.next().map_err(failed)? else {
            return Ok(None);
        };
        let lease_until: Option<Micros> = row.get(0).map_err(failed)?;
        Ok(lease_until.filter(|lease_until| now < *lease_until))
    }

    /// One page of abandoned records, in the order of their ids, which never change.
    pub(super) fn abandoned(
        &mut self,
        after: i64,
        limit: usize,
        now: Micros,
    ) -> Result<AbandonedPage, StoreError> {
        let limit = limit.min(LONGEST_PAGE);
        let mut records = Vec::new();
        let mut looked_at = 0;
        let mut last = after;
        let mut rows = self
            .abandoned
            .query(params![
                now,
                after,
                i64::try_from(limit).unwrap_or(i64::MAX)
            ])
            .map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            looked_at += 1;
            last = row.get(0).map_err(failed)?;
            // A damaged record must not keep the others from being closed: it is left out here, and
            // reported to whoever claims its key and by the purge.
            if let Ok((key, row)) = read_with_key(row) {
                records.push(row.into_record(key, now));
            }
        }
        let next = (looked_at == limit && limit > 0).then(|| cursor(last));
        Ok(AbandonedPage::new(records, next))
    }

    /// The keys of a scope among the next records, in the order of their ids, which never change. There
    /// is no index on the scope: every claim would have to write to it.
    pub(super) fn keys_of(
        &mut self,
        within: &str,
        scope: &str,
        after: i64,
    ) -> Result<Met, StoreError> {
        let mut met = Met::default();
        let mut looked_at = 0;
        let mut last = after;
        let mut rows = self
            .keys
            .query(params![after, KEYS_PER_LOOK])
            .map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            looked_at += 1;
            last = row.get(0).map_err(failed)?;
            // Not by the columns `namespace` and `scope`, which are for people.
            let key = match row.get_ref(1).map_err(failed)? {
                ValueRef::Blob(key) => ScopedKey::from_bytes(key),
                _ => None,
            };
            match key {
                Some(key) if key.scope() == scope && key.namespace().starts_with(within) => {
                    met.keys.push(key);
                }
                Some(_) => {}
                None => met.damaged += 1,
            }
        }
        met.next = (looked_at == KEYS_PER_LOOK).then_some(last);
        Ok(met)
    }
}

impl<'c> Table<'c> {
    pub(super) fn prepare(connection: &'c Connection) -> Result<Self, StoreError> {
        let prepare = |sql: &str| connection.prepare(sql).map_err(failed);
        Ok(Self {
            connection,
            reads: Reads::prepare(connection)?,
            insert: prepare(INSERT)?,
            update: prepare(&update_sql())?,
            update_with_expiry: prepare(&update_with_expiry_sql())?,
            delete: prepare("DELETE FROM idempotency_records WHERE lookup_key = ?1")?,
            delete_by_id: prepare("DELETE FROM idempotency_records WHERE id = ?1")?,
            due: prepare(&due_sql())?,
        })
    }

    pub(super) fn claim(
        &mut self,
        request: &ClaimRequest,
        now: Micros,
    ) -> Result<Claimed, StoreError> {
        let key = &request.key;
        // Most claims that come here are of new keys: for them this is the only statement.
        let new = Row::new(request, now);
        if self.insert(key, &new)? {
            return Ok(new.acquired(key));
        }
        let Some(mut row) = self.reads.load(key)? else {
            return Err(damaged(key, "is in the index and not in the table"));
        };
        let Verdict::Grant(grant) = row.judge(request, now) else {
            return Ok(Claimed::Existing(row.into_record(key.clone(), now)));
        };
        row.grant(grant, request, now);
        self.save(key, &row, true)?;
        Ok(row.acquired(key))
    }

    /// Changes the row of a key; `None` if it has none.
    pub(super) fn change<T>(
        &mut self,
        key: &ScopedKey,
        change: impl FnOnce(&mut Row) -> After<T>,
    ) -> Result<Option<T>, StoreError> {
        let Some(mut row) = self.reads.load(key)? else {
            return Ok(None);
        };
        let expires_at = row.expires_at;
        match change(&mut row) {
            After::Unchanged(reply) => Ok(Some(reply)),
            After::Changed(reply) => {
                self.save(key, &row, row.expires_at != expires_at)?;
                Ok(Some(reply))
            }
        }
    }

    /// Unread, so that a damaged record can be removed too.
    pub(super) fn remove(&mut self, key: &ScopedKey) -> Result<bool, StoreError> {
        let removed = self.delete.execute([key.as_bytes()]).map_err(failed)?;
        Ok(removed > 0)
    }

    /// Removes expired records, at most `limit`, from the one after `from` on. Ends early when
    /// `enough` says so.
    pub(super) fn purge(
        &mut self,
        from: (Micros, i64),
        limit: usize,
        now: Micros,
        mut enough: impl FnMut() -> bool,
    ) -> Result<Swept, StoreError> {
        let mut swept = Swept {
            next: Some(from),
            ..Swept::default()
        };
        while let Some(from) = swept.next
            && swept.purged.removed < limit
        {
            let left = (limit - swept.purged.removed).min(ROWS_PER_LOOK);
            let found = self.find_due(from, left, now, &mut swept)?;
            for (id, unresolved) in found {
                self.delete_by_id.execute([id]).map_err(failed)?;
                swept.purged.removed += 1;
                swept.purged.unresolved += usize::from(unresolved);
            }
            if enough() {
                break;
            }
        }
        Ok(swept)
    }

    /// The next few expired records, and whether their attempts are unresolved.
    fn find_due(
        &mut self,
        (time, id): (Micros, i64),
        limit: usize,
        now: Micros,
        swept: &mut Swept,
    ) -> Result<Vec<(i64, bool)>, StoreError> {
        let mut found = Vec::with_capacity(limit);
        let mut looked_at = 0;
        let mut rows = self
            .due
            .query(params![
                now,
                time,
                id,
                i64::try_from(limit).unwrap_or(i64::MAX)
            ])
            .map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            looked_at += 1;
            let id = row.get(0).map_err(failed)?;
            swept.next = Some((row.get(EXPIRES_AT).map_err(failed)?, id));
            match read_with_key(row) {
                Ok((_, row)) if row.is_expired(now) => found.push((id, row.is_unresolved())),
                // A live claim that outlived its retention.
                Ok(_) => {}
                Err(_) => swept.damaged += 1,
            }
        }
        if looked_at < limit {
            swept.next = None;
        }
        Ok(found)
    }

    fn insert(&mut self, key: &ScopedKey, row: &Row) -> Result<bool, StoreError> {
        let columns = Columns::of(row, None);
        let inserted = self.insert.execute(params![
            key.as_bytes(),
            key.namespace(),
            key.scope(),
            key.key(),
            text(columns.state),
            columns.attempt,
            columns.owner,
            columns.fingerprint,
            columns.lease_until,
            columns.created_at,
            columns.expires_at,
            columns.retention,
            &columns.checksum(key)[..],
        ]);
        Ok(inserted.map_err(failed)? > 0)
    }

    fn save(&mut self, key: &ScopedKey, row: &Row, expiry: bool) -> Result<(), StoreError> {
        let checkpoints = encode_checkpoints(&row.notes);
        let columns = Columns::of(row, checkpoints.as_deref());
        let checksum = columns.checksum(key);
        let values = params![
            row.id,
            text(columns.state),
            columns.status,
            columns.attempt,
            columns.owner,
            columns.fingerprint,
            columns.lease_until,
            columns.created_at,
            columns.completed_at,
            columns.retention,
            columns.correlation.map(text),
            columns.checkpoints,
            &checksum[..],
            columns.outcome,
            columns.expires_at,
        ];
        // SQLite rewrites the entries of every index whose columns are named, changed or not.
        let saved = if expiry {
            self.update_with_expiry.execute(values)
        } else {
            self.update.execute(&values[..values.len() - 1])
        };
        match saved.map_err(failed)? {
            1 => Ok(()),
            _ => Err(damaged(key, "was found and could not be written")),
        }
    }
}

/// The position of a cursor: the last id that was seen.
pub(super) fn position(cursor: &Cursor) -> Option<i64> {
    cursor.as_bytes().try_into().ok().map(i64::from_be_bytes)
}

fn cursor(last: i64) -> Cursor {
    Cursor::new(last.to_be_bytes().to_vec())
}

/// A row of a statement that selects `SELECTED` and then the lookup key.
fn read_with_key(row: &rusqlite::Row<'_>) -> Result<(ScopedKey, Row), StoreError> {
    let unreadable = || StoreError::corrupt("the key of a record cannot be read");
    let ValueRef::Blob(key) = row.get_ref(LOOKUP_KEY).map_err(failed)? else {
        return Err(unreadable());
    };
    let key = ScopedKey::from_bytes(key).ok_or_else(unreadable)?;
    let row = Columns::read(row, 0, &key)?;
    Ok((key, row))
}

/// Bound as TEXT. What comes here was a `str`.
fn text(bytes: &[u8]) -> rusqlite::types::ToSqlOutput<'_> {
    rusqlite::types::ToSqlOutput::Borrowed(ValueRef::Text(bytes))
}

pub(super) fn abandoned_sql() -> String {
    format!(
        "SELECT {SELECTED}, lookup_key FROM idempotency_records \
         INDEXED BY idempotency_records_started \
         WHERE state = 'started' AND lease_until <= ?1 AND id > ?2 ORDER BY id LIMIT ?3"
    )
}

pub(super) fn due_sql() -> String {
    format!(
        "SELECT {SELECTED}, lookup_key FROM idempotency_records \
         INDEXED BY idempotency_records_expiry \
         WHERE expires_at <= ?1 AND (expires_at, id) > (?2, ?3) ORDER BY expires_at, id LIMIT ?4"
    )
}

pub(super) fn update_sql() -> String {
    format!("UPDATE idempotency_records SET {CHANGED} WHERE id = ?1")
}

pub(super) fn update_with_expiry_sql() -> String {
    format!("UPDATE idempotency_records SET {CHANGED}, expires_at = ?15 WHERE id = ?1")
}

const LEASE: &str = "SELECT lease_until FROM idempotency_records \
     WHERE lookup_key = ?1 AND owner = ?2 AND state = 'started'";

const KEYS: &str =
    "SELECT id, lookup_key FROM idempotency_records WHERE id > ?1 ORDER BY id LIMIT ?2";

const INSERT: &str = "INSERT INTO idempotency_records (lookup_key, namespace, scope, key, state, \
     attempt, owner, fingerprint, lease_until, created_at, expires_at, retention, checksum) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13) \
     ON CONFLICT (lookup_key) DO NOTHING";

const CHANGED: &str = "state = ?2, status = ?3, attempt = ?4, owner = ?5, fingerprint = ?6, \
     lease_until = ?7, created_at = ?8, completed_at = ?9, retention = ?10, correlation = ?11, \
     checkpoints = ?12, checksum = ?13, outcome = ?14";

/// Where `SELECTED` has the expiry, and what is selected behind it.
const EXPIRES_AT: usize = 9;
const LOOKUP_KEY: usize = 15;

/// No read takes long, whatever limit was asked for.
const LONGEST_PAGE: usize = 256;
const ROWS_PER_LOOK: usize = 64;
const KEYS_PER_LOOK: i64 = 1_024;
