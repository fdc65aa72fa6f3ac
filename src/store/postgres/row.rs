//! Reads what a row says, and believes none of it that does not add up.

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::claim::{ClaimRequest, OnAbandoned, Owner};
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::{Notes, Record, State};
use crate::scope::ScopedKey;

use super::error::unreadable;
use super::text::unescape;
use super::time::Instant;

/// One row, with the server's time at which it was read. Columns are decoded when they are asked
/// for, so that an expired record can be claimed whatever it holds.
pub(super) struct Standing<'a> {
    row: &'a Row,
    state: Stored,
    expires_at: Instant,
    lease_until: Instant,
    now: Instant,
}

/// What a claim may try with a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// It is released or expired.
    Afresh,
    /// It is our own: the reply of an earlier claim was lost.
    Again,
    TakeOver,
    /// Show it.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Started,
    Completed,
    Released,
}

impl<'a> Standing<'a> {
    /// `None` if the row holds no record, but the answer that a new one was inserted.
    pub(super) fn read(row: &'a Row) -> Result<Option<Self>, StoreError> {
        let Some(state) = get::<Option<&str>>(row, column::STATE)? else {
            return Ok(None);
        };
        let state = match state {
            "started" => Stored::Started,
            "completed" => Stored::Completed,
            "released" => Stored::Released,
            _ => {
                return Err(corrupt(
                    "its state is unknown, perhaps that of a newer release",
                ));
            }
        };
        Ok(Some(Self {
            row,
            state,
            expires_at: get(row, column::EXPIRES_AT)?,
            lease_until: get(row, column::LEASE_UNTIL)?,
            now: get(row, column::NOW)?,
        }))
    }

    pub(super) fn is_expired(&self) -> bool {
        let live = self.state == Stored::Started && self.now < self.lease_until;
        self.expires_at <= self.now && !live
    }

    pub(super) fn is_released_by(&self, owner: &Owner) -> Result<bool, StoreError> {
        let (stands, _) = self.holder()?;
        Ok(self.state == Stored::Released && stands == owner.as_bytes())
    }

    /// Rules 2 to 5, in this order.
    pub(super) fn judge(
        &self,
        request: &ClaimRequest,
        digest: &[u8; 32],
    ) -> Result<Move, StoreError> {
        if self.state == Stored::Released || self.is_expired() {
            return Ok(Move::Afresh);
        }
        let (fingerprint, owner, _) = self.claimed(digest)?;
        let started = self.state == Stored::Started;
        Ok(if !started || fingerprint != request.fingerprint {
            Move::Leave
        } else if owner == request.owner {
            Move::Again
        } else if self.lease_until <= self.now && request.on_abandoned == OnAbandoned::Rerun {
            Move::TakeOver
        } else {
            Move::Leave
        })
    }

    /// The owner and the attempt as they are stored, to compare with.
    pub(super) fn holder(&self) -> Result<(&'a [u8], i64), StoreError> {
        Ok((
            get(self.row, column::OWNER)?,
            get(self.row, column::ATTEMPT)?,
        ))
    }

    /// The fingerprint, the owner and the attempt, if they are those that were written.
    fn claimed(&self, digest: &[u8; 32]) -> Result<(Fingerprint, Owner, u32), StoreError> {
        let format: i16 = get(self.row, column::FORMAT)?;
        if format != FORMAT {
            return Err(corrupt("a newer release wrote it: deploy that release"));
        }
        let fingerprint: &[u8] = get(self.row, column::FINGERPRINT)?;
        let (owner, attempt) = self.holder()?;
        let sum: i32 = get(self.row, column::CLAIM_SUM)?;
        let fingerprint = fingerprint.try_into().map(Fingerprint::from_bytes);
        let owner = owner.try_into().map(Owner::from_bytes);
        match (fingerprint, owner, u32::try_from(attempt)) {
            (Ok(fingerprint), Ok(owner), Ok(attempt))
                if sum == claim_sum(digest, &fingerprint, &owner, attempt) =>
            {
                Ok((fingerprint, owner, attempt))
            }
            _ => Err(corrupt(
                "its fingerprint, owner and attempt do not belong together",
            )),
        }
    }

    pub(super) fn attempt(&self, digest: &[u8; 32]) -> Result<u32, StoreError> {
        self.claimed(digest).map(|(_, _, attempt)| attempt)
    }

    pub(super) fn notes(&self) -> Result<Notes, StoreError> {
        let mut notes = Notes::default();
        let plain = |text: &str| unescape(text).ok_or_else(|| corrupt("a note is no text of ours"));
        let correlation: Option<&str> = get(self.row, column::CORRELATION)?;
        notes.correlation = correlation.map(plain).transpose()?;
        let names: Option<Vec<&str>> = get(self.row, column::CHECKPOINT_NAMES)?;
        let data: Option<Vec<&[u8]>> = get(self.row, column::CHECKPOINT_DATA)?;
        let (names, data) = (names.unwrap_or_default(), data.unwrap_or_default());
        if names.len() != data.len() {
            return Err(corrupt(
                "it has more names of checkpoints than data, or fewer",
            ));
        }
        for (name, data) in names.into_iter().zip(data) {
            notes.set_checkpoint(&plain(name)?, Bytes::copy_from_slice(data));
        }
        Ok(notes)
    }

    pub(super) fn outcome(&self, digest: &[u8; 32]) -> Result<Option<Outcome>, StoreError> {
        if self.state != Stored::Completed {
            return Ok(None);
        }
        let (_, owner, _) = self.claimed(digest)?;
        let frame: &[u8] = get(self.row, column::OUTCOME)?;
        let sum: i32 = get(self.row, column::OUTCOME_SUM)?;
        if sum != outcome_sum(digest, &owner, frame) {
            return Err(corrupt("its outcome is not the one that was written"));
        }
        Outcome::decode(Bytes::copy_from_slice(frame))
            .map(Some)
            .map_err(|error| corrupt("its outcome cannot be decoded").with_source(error))
    }

    pub(super) fn record(&self, key: &ScopedKey, digest: &[u8; 32]) -> Result<Record, StoreError> {
        let (fingerprint, owner, attempt) = self.claimed(digest)?;
        let state = match (self.state, self.outcome(digest)?) {
            (_, Some(outcome)) => State::Completed {
                outcome,
                completed_at: get::<Instant>(self.row, column::COMPLETED_AT)?.timestamp(),
            },
            (Stored::Released, None) => State::Released,
            (_, None) => State::Started {
                lease_until: self.lease_until.timestamp(),
                lease_left: self.lease_until.ahead_of(self.now),
            },
        };
        let created_at: Instant = get(self.row, column::CREATED_AT)?;
        Ok(Record::new(
            key.clone(),
            fingerprint,
            owner,
            attempt,
            state,
            self.notes()?,
            created_at.timestamp(),
            self.expires_at.timestamp(),
        ))
    }
}

/// Detects a changed byte, and a row whose parts come from two.
pub(super) fn claim_sum(
    digest: &[u8; 32],
    fingerprint: &Fingerprint,
    owner: &Owner,
    attempt: u32,
) -> i32 {
    sum(&[
        digest,
        fingerprint.as_bytes(),
        owner.as_bytes(),
        &attempt.to_be_bytes(),
    ])
}

pub(super) fn outcome_sum(digest: &[u8; 32], owner: &Owner, frame: &[u8]) -> i32 {
    sum(&[digest, owner.as_bytes(), frame])
}

pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, column: usize) -> Result<T, StoreError> {
    row.try_get(column).map_err(unreadable)
}

pub(super) fn corrupt(what: &'static str) -> StoreError {
    StoreError::corrupt(format!(
        "{what}; the row is left as it is: repair or remove it"
    ))
}

fn sum(parts: &[&[u8]]) -> i32 {
    let mut crc = crc32fast::Hasher::new();
    for part in parts {
        crc.update(part);
    }
    crc.finalize().cast_signed()
}

/// The encoding of a row that this release writes and reads.
const FORMAT: i16 = 1;

/// The columns of `sql::RECORD`, in their order.
pub(super) mod column {
    pub(super) const STATE: usize = 0;
    pub(super) const FORMAT: usize = 1;
    pub(super) const FINGERPRINT: usize = 2;
    pub(super) const OWNER: usize = 3;
    pub(super) const ATTEMPT: usize = 4;
    pub(super) const CLAIM_SUM: usize = 5;
    pub(super) const CREATED_AT: usize = 6;
    pub(super) const EXPIRES_AT: usize = 7;
    pub(super) const LEASE_UNTIL: usize = 8;
    pub(super) const COMPLETED_AT: usize = 9;
    pub(super) const CORRELATION: usize = 10;
    pub(super) const CHECKPOINT_NAMES: usize = 11;
    pub(super) const CHECKPOINT_DATA: usize = 12;
    pub(super) const OUTCOME: usize = 13;
    pub(super) const OUTCOME_SUM: usize = 14;
    pub(super) const NOW: usize = 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_changes_with_every_byte_and_with_the_place_of_every_part() {
        let digest = [7; 32];
        let owner = Owner::from_bytes([1; 16]);
        let frame = Outcome::value(b"paid");
        let sum = outcome_sum(&digest, &owner, frame.as_bytes());
        for at in 0..frame.as_bytes().len() {
            let mut changed = frame.as_bytes().to_vec();
            changed[at] ^= 1;
            assert_ne!(outcome_sum(&digest, &owner, &changed), sum);
        }
        let other_row = outcome_sum(&[8; 32], &owner, frame.as_bytes());
        let other_owner = outcome_sum(&digest, &Owner::from_bytes([2; 16]), frame.as_bytes());
        assert!(other_row != sum && other_owner != sum);
    }

    #[test]
    fn the_sums_are_stable() {
        // Rows keep them; a change of what goes in needs another format.
        let owner = Owner::from_bytes([2; 16]);
        let fingerprint = Fingerprint::from_bytes([3; Fingerprint::LEN]);
        assert_eq!(claim_sum(&[1; 32], &fingerprint, &owner, 4), 295077953);
        assert_eq!(outcome_sum(&[1; 32], &owner, b"frame"), 393224595);
    }
}
