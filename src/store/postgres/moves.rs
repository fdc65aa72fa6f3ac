//! Every move but the claim.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use crate::claim::{Claim, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::record::{Record, State};
use crate::scope::ScopedKey;
use crate::store::{AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution};

use super::Inner;
use super::client::Parameter;
use super::row::{Standing, corrupt, get, outcome_sum};
use super::sql::Statement;
use super::text::{escape, unescape};
use super::time::{Instant as ServerTime, Interval};

impl Inner {
    pub(super) async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        let lease = Interval::of(lease);
        self.fenced(&self.statements.renew, claim, &[&lease]).await
    }

    pub(super) async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let deadline = self.begin().await?;
        let digest = claim.key().digest();
        let owner = &claim.owner().as_bytes()[..];
        let others: [Parameter<'_>; 5] = [
            &owner,
            &status(outcome),
            &&outcome.as_bytes()[..],
            &outcome_sum(&digest, claim.owner(), outcome.as_bytes()),
            &retention.map(Interval::of),
        ];
        let recorded = self
            .row(&self.statements.complete, &digest, &others, deadline)
            .await?;
        if recorded.is_some() {
            self.watchers.wake(&digest);
            return Ok(Completion::Recorded);
        }
        // Recorded in a transaction of the application, perhaps, of which nobody has told the waiters.
        self.watchers.wake(&digest);
        let row = self.find(&digest, deadline).await?;
        let outcome = match standing(&row)? {
            Some(standing) => standing.outcome(&digest)?,
            None => None,
        };
        Ok(outcome.map_or(Completion::ClaimLost, Completion::Standing))
    }

    pub(super) async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let released = self.fenced(&self.statements.release, claim, &[]).await?;
        let digest = claim.key().digest();
        if released == Fenced::Applied {
            self.watchers.wake(&digest);
            return Ok(released);
        }
        let row = self.find(&digest, self.client.deadline()).await?;
        Ok(match standing(&row)? {
            Some(standing) if !standing.is_released_by(claim.owner())? => Fenced::ClaimLost,
            Some(_) | None => Fenced::Applied,
        })
    }

    pub(super) async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let abandoned = self.fenced(&self.statements.abandon, claim, &[]).await?;
        self.watchers.wake(&claim.key().digest());
        Ok(abandoned)
    }

    pub(super) async fn annotate(
        &self,
        claim: &Claim,
        correlation: &str,
    ) -> Result<Fenced, StoreError> {
        let others: [Parameter<'_>; 1] = [&escape(correlation)];
        self.fenced(&self.statements.annotate, claim, &others).await
    }

    pub(super) async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let others: [Parameter<'_>; 2] = [&escape(name), &&data[..]];
        self.fenced(&self.statements.checkpoint, claim, &others)
            .await
    }

    pub(super) async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let State::Started { lease_until, .. } = record.state else {
            return Ok(Fenced::ClaimLost);
        };
        let deadline = self.begin().await?;
        let digest = record.key.digest();
        let owner = &record.owner.as_bytes()[..];
        let seen = ServerTime::of(lease_until);
        let resolved = match resolution {
            Resolution::Completed(outcome) => {
                let others: [Parameter<'_>; 5] = [
                    &owner,
                    &seen,
                    &status(outcome),
                    &&outcome.as_bytes()[..],
                    &outcome_sum(&digest, &record.owner, outcome.as_bytes()),
                ];
                let statement = &self.statements.resolve_completed;
                self.row(statement, &digest, &others, deadline).await?
            }
            Resolution::Released => {
                let statement = &self.statements.resolve_released;
                self.row(statement, &digest, &[&owner, &seen], deadline)
                    .await?
            }
        };
        self.watchers.wake(&digest);
        Ok(applied(resolved))
    }

    pub(super) async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let deadline = self.begin().await?;
        let digest = key.digest();
        let row = self.find(&digest, deadline).await?;
        standing(&row)?
            .filter(|standing| !standing.is_expired())
            .map(|standing| standing.record(key, &digest))
            .transpose()
    }

    pub(super) async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        let deadline = self.begin().await?;
        let digest = key.digest();
        let removed = self
            .row(&self.statements.remove, &digest, &[], deadline)
            .await?;
        self.watchers.wake(&digest);
        Ok(removed.is_some())
    }

    pub(super) async fn erase(
        &self,
        within: &str,
        scope: &str,
        limit: usize,
    ) -> Result<usize, StoreError> {
        let (within, scope) = (escape(within), escape(scope));
        let mut erased = 0;
        let mut after = Vec::new();
        // Each step is a transaction of its own, under a time limit of its own.
        while erased < limit {
            let deadline = self.begin().await?;
            let most = signed(limit - erased);
            let parameters: [Parameter<'_>; 5] = [&after, &LOOKS, &within, &scope, &most];
            let rows = self
                .client
                .rows_or_error(&self.statements.erase, &parameters, deadline)
                .await?;
            let Some(row) = rows.first() else {
                break;
            };
            let (looks, last): (i64, Option<Vec<u8>>) = (get(row, 0)?, get(row, 1)?);
            let gone: Vec<&[u8]> = get(row, 2)?;
            erased += gone.len();
            for id in gone {
                if let Ok(digest) = id.try_into() {
                    self.watchers.wake(&digest);
                }
            }
            match last {
                Some(last) if looks == LOOKS => after = last,
                _ => break,
            }
        }
        Ok(erased)
    }

    pub(super) async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        let mut purged = Purged::default();
        while purged.removed < limit {
            let batch = match self.purge_batch(BATCH.min(limit - purged.removed)).await {
                Ok(batch) => batch,
                // What is gone has to be told of: nobody can count it again.
                Err(_) if purged.removed > 0 => break,
                Err(error) => return Err(error),
            };
            purged.removed += batch.removed;
            purged.unresolved += batch.unresolved;
            // A batch that is not full may have left out what another purge is at work on.
            if batch.removed == 0 {
                break;
            }
        }
        Ok(purged)
    }

    async fn purge_batch(&self, limit: usize) -> Result<Purged, StoreError> {
        let deadline = self.begin().await?;
        let parameters: [Parameter<'_>; 1] = [&signed(limit)];
        let rows = self
            .client
            .rows_or_error(&self.statements.purge, &parameters, deadline)
            .await?;
        let Some(row) = rows.first() else {
            return Ok(Purged::default());
        };
        let count = |column: usize| -> Result<usize, StoreError> {
            let count: i64 = get(row, column)?;
            Ok(usize::try_from(count).unwrap_or(0))
        };
        Ok(Purged::new(count(0)?, count(1)?))
    }

    pub(super) async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let mut records = Vec::new();
        if limit == 0 {
            return Ok(AbandonedPage::new(records, None));
        }
        let deadline = self.begin().await?;
        let after = after.map_or(&[][..], Cursor::as_bytes);
        let parameters: [Parameter<'_>; 3] = [&after, &LOOKS, &signed(limit)];
        let rows = self
            .client
            .rows(&self.statements.abandoned, &parameters, deadline)
            .await?;
        let Some(first) = rows.first() else {
            return Ok(AbandonedPage::new(records, None));
        };
        let looks: i64 = get(first, column::LOOKS)?;
        let mut next: Option<&[u8]> = match looks < LOOKS {
            true => None,
            false => get(first, column::LAST)?,
        };
        let mut found = 0;
        for row in &rows {
            let Some(standing) = Standing::read(row)? else {
                continue;
            };
            found += 1;
            if found == limit {
                next = Some(get(row, column::ID)?);
            }
            // One that cannot be read must not hide those behind it from the sweeper. It shows
            // itself to whoever asks for its key, and to the purge.
            if let Ok(record) = listed(&standing, row) {
                records.push(record);
            }
        }
        let next = next.map(|id| Cursor::new(Bytes::copy_from_slice(id)));
        Ok(AbandonedPage::new(records, next))
    }

    pub(super) async fn changed(
        &self,
        digest: &[u8; 32],
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let begun = Instant::now();
        // A time that the clock cannot express is a time that nobody waits for.
        let end = begun.checked_add(max).unwrap_or(begun + LONG);
        let watch = self.watchers.watch(digest);
        let mut pause = FIRST_PAUSE;
        while Instant::now() < end {
            let changed = watch.next();
            let deadline = self.begin().await?;
            let row = self
                .row(&self.statements.watch, digest, &[], deadline)
                .await?;
            let Some(left) = lease_left(row.as_ref(), seen)? else {
                return Ok(());
            };
            // Between a half and the whole, so that many that began together spread out.
            let jittered = pause.mul_f64(0.5 + 0.5 * rand::random::<f64>());
            let look = Instant::now() + jittered.min(left.max(SHORTEST_PAUSE));
            if timeout_at(look.min(end), changed).await.is_ok() {
                return Ok(());
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    async fn fenced(
        &self,
        statement: &Statement,
        claim: &Claim,
        others: &[Parameter<'_>],
    ) -> Result<Fenced, StoreError> {
        let deadline = self.begin().await?;
        let owner = &claim.owner().as_bytes()[..];
        let owner: Parameter<'_> = &owner;
        let others: Vec<Parameter<'_>> = std::iter::once(owner)
            .chain(others.iter().copied())
            .collect();
        let digest = claim.key().digest();
        let row = self.row(statement, &digest, &others, deadline).await?;
        Ok(applied(row))
    }

    pub(super) async fn find(
        &self,
        digest: &[u8; 32],
        deadline: Instant,
    ) -> Result<Option<Row>, StoreError> {
        self.row(&self.statements.lookup, digest, &[], deadline)
            .await
    }
}

fn applied(row: Option<Row>) -> Fenced {
    match row {
        Some(_) => Fenced::Applied,
        None => Fenced::ClaimLost,
    }
}

fn standing(row: &Option<Row>) -> Result<Option<Standing<'_>>, StoreError> {
    row.as_ref()
        .map(Standing::read)
        .transpose()
        .map(Option::flatten)
}

/// The status as PostgreSQL's `smallint`; none for the value of a job.
pub(super) fn status(outcome: &Outcome) -> Option<i16> {
    let status = outcome.status()?.as_u16();
    i16::try_from(status).ok()
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A record of the walk through abandoned ones, whose key is read from the row as well.
fn listed(standing: &Standing<'_>, row: &Row) -> Result<Record, StoreError> {
    let part = |index: usize| -> Result<String, StoreError> {
        let text: &str = get(row, index)?;
        unescape(text).ok_or_else(|| corrupt("its key is no text of ours"))
    };
    let (namespace, scope, key) = (
        part(column::NAMESPACE)?,
        part(column::SCOPE)?,
        part(column::KEY)?,
    );
    let length = |part: &str| u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes();
    let lengths = [length(&namespace), length(&scope)];
    let joined = [
        lengths.as_flattened(),
        namespace.as_bytes(),
        scope.as_bytes(),
        key.as_bytes(),
    ]
    .concat();
    let id: &[u8] = get(row, column::ID)?;
    // The digest shows whether these three are the ones that were joined, and in this way.
    let key = ScopedKey::from_bytes(&joined).filter(|key| key.digest()[..] == *id);
    let key = key.ok_or_else(|| corrupt("its id is not that of its key"))?;
    standing.record(&key, &key.digest())
}

/// What is left of the live lease of `seen`, if it stands.
fn lease_left(row: Option<&Row>, seen: &Owner) -> Result<Option<Duration>, StoreError> {
    let Some(row) = row else {
        return Ok(None);
    };
    let (state, owner): (&str, &[u8]) = (get(row, 0)?, get(row, 1)?);
    let (lease_until, now): (ServerTime, ServerTime) = (get(row, 2)?, get(row, 3)?);
    let left = lease_until.ahead_of(now);
    let stands = state == "started" && owner == seen.as_bytes() && !left.is_zero();
    Ok(stands.then_some(left))
}

/// The columns of `sql::ABANDONED` behind those of a record.
mod column {
    pub(super) const LOOKS: usize = 16;
    pub(super) const LAST: usize = 17;
    pub(super) const ID: usize = 18;
    pub(super) const NAMESPACE: usize = 19;
    pub(super) const SCOPE: usize = 20;
    pub(super) const KEY: usize = 21;
}

/// How many rows one transaction of a purge removes: some milliseconds of work.
const BATCH: usize = 1_000;
/// How many records one page of the walk looks at.
const LOOKS: i64 = 10_000;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// So that the last moment of a lease is not spent with looking.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const LONG: Duration = Duration::from_secs(365 * 24 * 60 * 60);
