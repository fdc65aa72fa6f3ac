//! A row in the types of SQLite, and the checksum that tells a damaged one.

use bytes::{BufMut, Bytes};
use rusqlite::types::ValueRef;
use sha2::{Digest, Sha256};

use crate::claim::Owner;
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::Notes;
use crate::scope::ScopedKey;

use super::clock::Micros;
use super::error::{damaged, failed};
use super::row::{Row, Stage};

/// The columns that are read, in this order; [`Columns::read`] counts on it.
pub(super) const SELECTED: &str = "id, fingerprint, owner, attempt, state, status, lease_until, \
     created_at, completed_at, expires_at, retention, correlation, checkpoints, checksum, outcome";

/// What is written of a row besides its keys.
#[derive(Debug)]
pub(super) struct Columns<'a> {
    pub(super) fingerprint: &'a [u8],
    pub(super) owner: &'a [u8],
    pub(super) attempt: i64,
    pub(super) state: &'a [u8],
    pub(super) status: Option<i64>,
    pub(super) lease_until: Option<Micros>,
    pub(super) created_at: Micros,
    pub(super) completed_at: Option<Micros>,
    pub(super) expires_at: Micros,
    pub(super) retention: Micros,
    pub(super) correlation: Option<&'a [u8]>,
    pub(super) checkpoints: Option<&'a [u8]>,
    pub(super) outcome: Option<&'a [u8]>,
}

impl<'a> Columns<'a> {
    /// What is to be written. `checkpoints` are those of the row, encoded.
    pub(super) fn of(row: &'a Row, checkpoints: Option<&'a [u8]>) -> Self {
        let (state, lease_until, completed_at, outcome) = match &row.stage {
            Stage::Started { lease_until } => (STARTED, Some(*lease_until), None, None),
            Stage::Completed {
                outcome,
                completed_at,
            } => (COMPLETED, None, Some(*completed_at), Some(outcome)),
            Stage::Released => (RELEASED, None, None, None),
        };
        Self {
            fingerprint: row.fingerprint.as_bytes(),
            owner: row.owner.as_bytes(),
            attempt: i64::from(row.attempt),
            state,
            status: outcome.and_then(status),
            lease_until,
            created_at: row.created_at,
            completed_at,
            expires_at: row.expires_at,
            retention: row.retention,
            correlation: row.notes.correlation.as_deref().map(str::as_bytes),
            checkpoints,
            outcome: outcome.map(|outcome| &outcome.as_bytes()[..]),
        }
    }

    /// Reads [`SELECTED`], beginning with column `at`, and checks every bit of it.
    pub(super) fn read(
        row: &'a rusqlite::Row<'_>,
        at: usize,
        key: &ScopedKey,
    ) -> Result<Row, StoreError> {
        let column = |n| row.get_ref(at + n).map_err(failed);
        let mistyped = || damaged(key, "has a column of another type");
        let integer = |n| optional(column(n)?, as_integer).ok_or_else(mistyped);
        let bytes = |n| optional(column(n)?, as_bytes).ok_or_else(mistyped);
        let id = integer(0)?.ok_or_else(mistyped)?;
        let columns = Columns {
            fingerprint: bytes(1)?.ok_or_else(mistyped)?,
            owner: bytes(2)?.ok_or_else(mistyped)?,
            attempt: integer(3)?.ok_or_else(mistyped)?,
            state: bytes(4)?.ok_or_else(mistyped)?,
            status: integer(5)?,
            lease_until: integer(6)?,
            created_at: integer(7)?.ok_or_else(mistyped)?,
            completed_at: integer(8)?,
            expires_at: integer(9)?.ok_or_else(mistyped)?,
            retention: integer(10)?.ok_or_else(mistyped)?,
            correlation: bytes(11)?,
            checkpoints: bytes(12)?,
            outcome: bytes(14)?,
        };
        let checksum = bytes(13)?.ok_or_else(mistyped)?;
        match checksum.first() {
            Some(&VERSION) if checksum == columns.checksum(key) => {}
            Some(&VERSION) | None => return Err(damaged(key, "does not match its checksum")),
            Some(_) => {
                return Err(damaged(
                    key,
                    "was written in a version that is not known here",
                ));
            }
        }
        columns
            .decode(id)
            .map_err(|what| damaged(key, &format!("cannot be decoded: {what}")))
    }

    /// A checksum rather than trust in the disk: with one bit of a time or a state turned over, a
    /// payment that was made would be free to be made again.
    pub(super) fn checksum(&self, key: &ScopedKey) -> [u8; CHECKSUM] {
        let mut head = Vec::with_capacity(256 + key.as_bytes().len());
        head.put_u8(VERSION);
        // The key too: a row that is found under another one is not an answer to it.
        put_bytes(&mut head, Some(key.as_bytes()));
        put_bytes(&mut head, Some(self.fingerprint));
        put_bytes(&mut head, Some(self.owner));
        put_integer(&mut head, Some(self.attempt));
        put_bytes(&mut head, Some(self.state));
        put_integer(&mut head, self.status);
        put_integer(&mut head, self.lease_until);
        put_integer(&mut head, Some(self.created_at));
        put_integer(&mut head, self.completed_at);
        put_integer(&mut head, Some(self.expires_at));
        put_integer(&mut head, Some(self.retention));
        put_bytes(&mut head, self.correlation);
        put_bytes(&mut head, self.checkpoints);
        put_presence(&mut head, self.outcome.is_some());
        let mut hash = Sha256::new();
        hash.update(&head);
        // Last, and so without its length.
        hash.update(self.outcome.unwrap_or_default());
        let mut checksum = [VERSION; CHECKSUM];
        checksum[1..].copy_from_slice(&hash.finalize()[..CHECKSUM - 1]);
        checksum
    }

    fn decode(&self, id: i64) -> Result<Row, &'static str> {
        let not_negative = |time: Micros| (time >= 0).then_some(time).ok_or("a time is negative");
        let stage = match (
            self.state,
            self.lease_until,
            self.completed_at,
            self.outcome,
        ) {
            (STARTED, Some(lease_until), None, None) => Stage::Started {
                lease_until: not_negative(lease_until)?,
            },
            (COMPLETED, None, Some(completed_at), Some(frame)) => Stage::Completed {
                outcome: Outcome::decode(Bytes::copy_from_slice(frame))
                    .map_err(|_| "its outcome is none")?,
                completed_at: not_negative(completed_at)?,
            },
            (RELEASED, None, None, None) => Stage::Released,
            _ => return Err("its state and its other columns do not agree"),
        };
        let mut notes = decode_checkpoints(self.checkpoints.unwrap_or_default())
            .ok_or("its checkpoints are cut off")?;
        let correlation = self.correlation.map(std::str::from_utf8).transpose();
        notes.correlation = correlation
            .map_err(|_| "its correlation is no text")?
            .map(str::to_owned);
        Ok(Row {
            id,
            fingerprint: Fingerprint::from_bytes(array(self.fingerprint)?),
            owner: Owner::from_bytes(array(self.owner)?),
            attempt: u32::try_from(self.attempt).map_err(|_| "its attempt is out of range")?,
            stage,
            notes,
            created_at: not_negative(self.created_at)?,
            expires_at: not_negative(self.expires_at)?,
            retention: not_negative(self.retention)?,
        })
    }
}

/// The checkpoints of a row as they are stored; `None` if there are none.
pub(super) fn encode_checkpoints(notes: &Notes) -> Option<Vec<u8>> {
    if notes.checkpoints.is_empty() {
        return None;
    }
    let mut encoded = Vec::new();
    for (name, data) in &notes.checkpoints {
        for part in [name.as_bytes(), data] {
            // SQLite takes no value of 2 GiB, so a longer one fails there.
            encoded.put_u32(u32::try_from(part.len()).unwrap_or(u32::MAX));
            encoded.put_slice(part);
        }
    }
    Some(encoded)
}

fn decode_checkpoints(mut encoded: &[u8]) -> Option<Notes> {
    let mut part = || -> Option<Option<&[u8]>> {
        if encoded.is_empty() {
            return Some(None);
        }
        let (length, rest) = encoded.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (part, rest) = rest.split_at_checked(length)?;
        encoded = rest;
        Some(Some(part))
    };
    let mut notes = Notes::default();
    while let Some(name) = part()? {
        let name = std::str::from_utf8(name).ok()?;
        notes.set_checkpoint(name, Bytes::copy_from_slice(part()??));
    }
    Some(notes)
}

fn status(outcome: &Outcome) -> Option<i64> {
    outcome.status().map(|status| i64::from(status.as_u16()))
}

fn optional<'a, T>(
    value: ValueRef<'a>,
    read: impl FnOnce(ValueRef<'a>) -> Option<T>,
) -> Option<Option<T>> {
    match value {
        ValueRef::Null => Some(None),
        value => read(value).map(Some),
    }
}

fn as_integer(value: ValueRef<'_>) -> Option<i64> {
    match value {
        ValueRef::Integer(integer) => Some(integer),
        _ => None,
    }
}

fn as_bytes(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes),
        _ => None,
    }
}

fn array<const N: usize>(bytes: &[u8]) -> Result<[u8; N], &'static str> {
    bytes.try_into().map_err(|_| "a column has another length")
}

fn put_presence(head: &mut Vec<u8>, present: bool) {
    head.put_u8(u8::from(present));
}

fn put_integer(head: &mut Vec<u8>, integer: Option<i64>) {
    put_presence(head, integer.is_some());
    head.put_i64(integer.unwrap_or_default());
}

fn put_bytes(head: &mut Vec<u8>, bytes: Option<&[u8]>) {
    put_presence(head, bytes.is_some());
    let bytes = bytes.unwrap_or_default();
    head.put_u64(bytes.len() as u64);
    head.put_slice(bytes);
}

const STARTED: &[u8] = b"started";
const COMPLETED: &[u8] = b"completed";
const RELEASED: &[u8] = b"released";

/// The version of what a row means. A release that writes rows which this one must not judge gives
/// them another.
const VERSION: u8 = 1;
/// The version, and 128 bits.
const CHECKSUM: usize = 17;

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use proptest::prelude::*;

    use super::*;
    use crate::key::IdempotencyKey;

    fn key(text: &str) -> ScopedKey {
        ScopedKey::new("http", "alice", &IdempotencyKey::new(text).unwrap())
    }

    fn stage() -> impl Strategy<Value = Stage> {
        let time = 0..Micros::MAX;
        prop_oneof![
            time.clone()
                .prop_map(|lease_until| Stage::Started { lease_until }),
            (time, proptest::collection::vec(any::<u8>(), 0..20)).prop_map(
                |(completed_at, body)| Stage::Completed {
                    outcome: Outcome::value(&body),
                    completed_at,
                }
            ),
            Just(Stage::Released),
        ]
    }

    prop_compose! {
        fn row()(
            fingerprint: [u8; Fingerprint::LEN],
            owner: [u8; 16],
            attempt: u32,
            stage in stage(),
            correlation in proptest::option::of(".{0,9}"),
            checkpoints in proptest::collection::vec((".{0,9}", ".{0,9}"), 0..4),
            times in (0..Micros::MAX, 0..Micros::MAX, 0..Micros::MAX),
        ) -> Row {
            let mut notes = Notes::default();
            for (name, data) in checkpoints {
                notes.set_checkpoint(&name, Bytes::from(data));
            }
            notes.correlation = correlation;
            Row {
                id: 7,
                fingerprint: Fingerprint::from_bytes(fingerprint),
                owner: Owner::from_bytes(owner),
                attempt,
                stage,
                notes,
                created_at: times.0,
                expires_at: times.1,
                retention: times.2,
            }
        }
    }

    proptest! {
        #[test]
        fn a_row_comes_back_as_it_was(row in row()) {
            let checkpoints = encode_checkpoints(&row.notes);
            let columns = Columns::of(&row, checkpoints.as_deref());
            prop_assert_eq!(columns.decode(7), Ok(row.clone()));
        }

        #[test]
        fn rows_that_differ_have_other_checksums(one in row(), other in row()) {
            let checksum = |row: &Row, text| {
                let checkpoints = encode_checkpoints(&row.notes);
                Columns::of(row, checkpoints.as_deref()).checksum(&key(text))
            };
            prop_assert_eq!(checksum(&one, "k"), checksum(&one, "k"));
            prop_assert_eq!(one == other, checksum(&one, "k") == checksum(&other, "k"));
            prop_assert_ne!(checksum(&one, "k"), checksum(&one, "l"));
        }

        #[test]
        fn checkpoints_that_were_cut_are_refused(row in row()) {
            let whole = encode_checkpoints(&row.notes).unwrap_or_default();
            let ends: Vec<_> = (0..=whole.len())
                .filter(|end| decode_checkpoints(&whole[..*end]).is_some())
                .collect();
            // Cut between two of them, the fewer that are left are checkpoints still: that is what
            // the checksum is for.
            prop_assert_eq!(ends.len(), row.notes.checkpoints.len() + 1);
        }
    }

    #[test]
    fn the_checksum_is_stable() {
        // Files keep it: a change makes every stored record unreadable, and needs another version.
        let row = Row {
            id: 1,
            fingerprint: Fingerprint::from_bytes([1; Fingerprint::LEN]),
            owner: Owner::from_bytes([2; 16]),
            attempt: 3,
            stage: Stage::Completed {
                outcome: Outcome::tombstone(StatusCode::CREATED),
                completed_at: 4,
            },
            notes: Notes::default(),
            created_at: 5,
            expires_at: 6,
            retention: 7,
        };
        let checksum = Columns::of(&row, None).checksum(&key("k"));
        let hex: String = checksum.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "01835a8950c37f28ded5c8722ad36ca881");
    }

    #[test]
    fn columns_that_do_not_agree_are_refused() {
        let released = Row {
            id: 1,
            fingerprint: Fingerprint::from_bytes([1; Fingerprint::LEN]),
            owner: Owner::from_bytes([2; 16]),
            attempt: 3,
            stage: Stage::Released,
            notes: Notes::default(),
            created_at: 5,
            expires_at: 6,
            retention: 7,
        };
        let refused = |change: fn(&mut Columns<'_>)| {
            let mut columns = Columns::of(&released, None);
            change(&mut columns);
            columns.decode(1).unwrap_err();
        };
        refused(|columns| columns.state = b"Released");
        refused(|columns| columns.state = STARTED);
        refused(|columns| columns.state = COMPLETED);
        refused(|columns| columns.lease_until = Some(1));
        refused(|columns| columns.outcome = Some(b"\x01\x01\xc8\x00\x00\x00\x00"));
        refused(|columns| columns.owner = &[2; 15]);
        refused(|columns| columns.fingerprint = &[1; Fingerprint::LEN + 1]);
        refused(|columns| columns.attempt = -1);
        refused(|columns| columns.attempt = 1 << 32);
        refused(|columns| columns.created_at = -1);
        refused(|columns| columns.correlation = Some(b"\xff"));
        refused(|columns| columns.checkpoints = Some(b"\0\0\0\x01"));
    }
}
