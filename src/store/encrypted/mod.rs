//! A store that its own database cannot read.

mod error;
mod keyring;
mod seal;
mod text;

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::Outcome;
use crate::record::{Notes, Record, State};
use crate::scope::ScopedKey;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
    Transactional,
};

pub use self::error::UnsealError;
pub use self::keyring::Keyring;
use self::seal::Field;

/// Seals what handlers answered and noted before the store inside gets it, and opens it on the way
/// out.
///
/// Sealed are whole outcomes (status, headers, body, trailers), the data of checkpoints and the
/// correlation id: AES-256-GCM, under a key of its own for every record, which HKDF-SHA256 derives
/// from a key of the [`Keyring`] and the lookup key. A sealed field is bound to its record and to
/// what it is of the record, so that nothing can be moved from one record to another.
///
/// What was changed, moved, or sealed with a key that is not in the keyring reads as
/// [`StoreErrorKind::Corrupt`], with an [`UnsealError`] as its source: the layer answers 500
/// `record_unreadable`, nothing runs, and the record stays where it is. [`remove`](Store::remove)
/// works on it as on every record; [`abandoned`](Store::abandoned) leaves it out, because a
/// reconciler that does not see what a handler noted could come to the wrong conclusion.
///
/// # What the store inside still sees
///
/// * Namespace, scope, key, fingerprint, owner, attempt, state and times: it has to compare them. A
///   fingerprint is a hash of the request, and whoever can guess the whole request can confirm it.
/// * The names of checkpoints, and how long each field is, to the byte.
/// * Not the status. What a store keeps is the [value](Outcome::value) of no response, so that a
///   process that reads the store without this wrapper has nothing that it could send as an answer.
///   A status column stays empty.
///
/// # What it does not prevent
///
/// Whoever can write to the database can remove records, and can put back an *older* outcome of the
/// same key, or an older row as a whole.
///
/// # Order of wrappers
///
/// What is sealed is bound to the lookup key as this wrapper sees it. Put the prefix outside, so
/// that two services with one keyring cannot be handed each other's records, and keep the order for
/// as long as records live:
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use tower_idempotency::{EncryptedStore, Keyring, MemoryStore, PrefixedStore};
///
/// # let key = [7; 32];
/// let store = EncryptedStore::new(MemoryStore::new(), Keyring::new(1, key));
/// let store = PrefixedStore::new(store, "shop");
/// # let _ = store;
/// # }
/// ```
///
/// # Cost
///
/// A claim under [`OnAbandoned::Rerun`] that takes a record over asks the store inside twice; every
/// other move asks once. A sealed field is 36 bytes longer, and a correlation id is written in
/// hexadecimal digits.
#[derive(Clone, Debug)]
pub struct EncryptedStore<S> {
    inner: S,
    keyring: Keyring,
    unsealed: Unsealed,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Unsealed {
    Refuse,
    Accept,
}

impl<S> EncryptedStore<S> {
    /// Seals with the active key of this keyring, and refuses everything that is not sealed.
    pub fn new(inner: S, keyring: Keyring) -> Self {
        Self {
            inner,
            keyring,
            unsealed: Unsealed::Refuse,
        }
    }

    /// Reads records that are not sealed as well: for the retention after encryption was switched
    /// on. Without it, retries of requests from before get 500 `record_unreadable`.
    ///
    /// As long as it is set, whoever can write to the database can make an outcome up. Take it out
    /// when the retention of the last record from before is over.
    #[must_use]
    pub fn accept_unsealed(mut self) -> Self {
        self.unsealed = Unsealed::Accept;
        self
    }

    /// The store inside, with its records as they are sealed.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    fn seal(
        &self,
        record: &ScopedKey,
        field: Field<'_>,
        plain: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        let sealed = self.keyring.seal(record, field, plain);
        sealed.ok_or_else(|| {
            StoreError::new(StoreErrorKind::Other, "more than 64 GiB cannot be sealed")
        })
    }

    /// As a valid outcome, so that every store keeps it as any other.
    fn seal_outcome(&self, record: &ScopedKey, outcome: &Outcome) -> Result<Outcome, StoreError> {
        let sealed = self.seal(record, Field::Outcome, outcome.as_bytes())?;
        Ok(Outcome::value(&sealed))
    }

    fn open_outcome(&self, record: &ScopedKey, outcome: Outcome) -> Result<Outcome, StoreError> {
        let opened = match outcome.status() {
            None => self.keyring.open(record, Field::Outcome, &outcome.body()),
            Some(_) => Err(UnsealError::NotSealed),
        };
        match opened {
            Ok(plain) => Outcome::decode(plain.into()).map_err(|error| {
                let message = "its outcome was opened and cannot be decoded";
                StoreError::corrupt(message).with_source(error)
            }),
            Err(UnsealError::NotSealed) if self.unsealed == Unsealed::Accept => Ok(outcome),
            Err(error) => Err(unreadable("outcome", error)),
        }
    }

    fn open_notes(&self, record: &ScopedKey, mut notes: Notes) -> Result<Notes, StoreError> {
        if let Some(correlation) = &mut notes.correlation {
            let opened = match text::decode(correlation) {
                Some(sealed) => self.keyring.open(record, Field::Correlation, &sealed),
                None => Err(UnsealError::NotSealed),
            };
            let opened = opened
                .and_then(|plain| String::from_utf8(plain).map_err(|_| UnsealError::NotAuthentic));
            match opened {
                Ok(opened) => *correlation = opened,
                Err(UnsealError::NotSealed) if self.unsealed == Unsealed::Accept => {}
                Err(error) => return Err(unreadable("correlation", error)),
            }
        }
        for (name, data) in &mut notes.checkpoints {
            match self.keyring.open(record, Field::Checkpoint(name), data) {
                Ok(opened) => *data = opened.into(),
                Err(UnsealError::NotSealed) if self.unsealed == Unsealed::Accept => {}
                Err(error) => return Err(unreadable("checkpoint", error)),
            }
        }
        Ok(notes)
    }

    fn open_record(&self, mut record: Record) -> Result<Record, StoreError> {
        record.notes = self.open_notes(&record.key, record.notes)?;
        if let State::Completed {
            outcome,
            completed_at,
        } = record.state
        {
            record.state = State::Completed {
                outcome: self.open_outcome(&record.key, outcome)?,
                completed_at,
            };
        }
        Ok(record)
    }

    fn open_claimed(&self, claimed: Claimed) -> Result<Claimed, StoreError> {
        Ok(match claimed {
            Claimed::Acquired { claim, notes } => {
                let notes = self.open_notes(claim.key(), notes)?;
                Claimed::Acquired { claim, notes }
            }
            Claimed::Existing(record) => Claimed::Existing(self.open_record(record)?),
        })
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for EncryptedStore<S> {
    fn properties(&self) -> StoreProperties {
        self.inner.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        if request.on_abandoned == OnAbandoned::Hold {
            return self.open_claimed(self.inner.claim(request).await?);
        }
        // A takeover hands the notes of the attempt before it over. They are opened before the
        // claim is asked for: one that was granted and then fails is given up by its caller, and
        // with it the notes would go. It is still the second claim alone whose result decides.
        let mut hold = request.clone();
        hold.on_abandoned = OnAbandoned::Hold;
        match self.open_claimed(self.inner.claim(&hold).await?)? {
            Claimed::Existing(record)
                if record.is_abandoned() && record.fingerprint == request.fingerprint =>
            {
                self.open_claimed(self.inner.claim(request).await?)
            }
            claimed => Ok(claimed),
        }
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.inner.renew(claim, lease).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let sealed = self.seal_outcome(claim.key(), outcome)?;
        Ok(
            match self.inner.complete(claim, &sealed, retention).await? {
                // Sealed twice, an outcome has other bytes each time; opened, it is itself again.
                // So a caller who asks again after a lost reply recognises its own.
                Completion::Standing(outcome) => {
                    Completion::Standing(self.open_outcome(claim.key(), outcome)?)
                }
                completion @ (Completion::Recorded | Completion::ClaimLost) => completion,
            },
        )
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.release(claim).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.abandon(claim).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let sealed = self.seal(claim.key(), Field::Correlation, correlation.as_bytes())?;
        self.inner.annotate(claim, &text::encode(&sealed)).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let sealed = self.seal(claim.key(), Field::Checkpoint(name), data)?;
        self.inner.checkpoint(claim, name, &sealed.into()).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let mut page = self.inner.abandoned(after, limit).await?;
        // One record that cannot be opened must not keep the others from being reconciled.
        page.records = page
            .records
            .into_iter()
            .filter_map(|record| self.open_record(record).ok())
            .collect();
        Ok(page)
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let sealed = match resolution {
            Resolution::Completed(outcome) => {
                Resolution::Completed(self.seal_outcome(&record.key, outcome)?)
            }
            Resolution::Released => Resolution::Released,
        };
        self.inner.resolve(&without_content(record), &sealed).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let record = self.inner.lookup(key).await?;
        record.map(|record| self.open_record(record)).transpose()
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.remove(key).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.inner.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.inner.changed(key, seen, max).await
    }
}

impl<S: Transactional> Transactional for EncryptedStore<S> {
    type Recording = S::Recording;

    fn recording(&self, claim: &Claim, outcome: &Outcome) -> Result<S::Recording, StoreError> {
        let sealed = self.seal_outcome(claim.key(), outcome)?;
        self.inner.recording(claim, &sealed)
    }
}

/// The record that was seen, for a store that compares it with what it has: owner and lease are
/// enough for that, and what was opened stays out here.
fn without_content(record: &Record) -> Record {
    let mut record = record.clone();
    record.notes = Notes::default();
    if let State::Completed { outcome, .. } = &mut record.state {
        *outcome = Outcome::value(&[]);
    }
    record
}

fn unreadable(field: &str, error: UnsealError) -> StoreError {
    StoreError::corrupt(format!("its {field} cannot be opened")).with_source(error)
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;
    use crate::outcome::DecodeError;

    #[test]
    fn an_outcome_of_a_newer_version_is_corrupt_when_it_is_opened() {
        let store = EncryptedStore::new((), Keyring::new(1, [1; 32]));
        let key = ScopedKey::join("http", "", "k");
        let newer = b"\x02\x00\xc8\x00\x00\x00\x00";
        let sealed = store.seal(&key, Field::Outcome, newer).unwrap();
        let error = store
            .open_outcome(&key, Outcome::value(&sealed))
            .unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
        let source = error.source().and_then(|source| source.downcast_ref());
        assert_eq!(source, Some(&DecodeError::UnknownVersion(2)));
    }

    #[test]
    fn what_a_reconciler_saw_of_a_record_is_not_handed_to_the_store_inside() {
        let time = crate::record::Timestamp::from_micros(1);
        let notes = Notes {
            correlation: Some("pi_1".to_owned()),
            ..Notes::default()
        };
        let state = State::Completed {
            outcome: Outcome::value(b"paid"),
            completed_at: time,
        };
        let key = ScopedKey::join("http", "", "k");
        let fingerprint = crate::fingerprint::Fingerprint::of(&[]);
        let owner = Owner::random();
        let record = Record::new(key, fingerprint, owner, 1, state, notes, time, time);
        let stripped = without_content(&record);
        assert!(stripped.notes.is_empty());
        assert!(
            matches!(stripped.state, State::Completed { outcome, .. } if outcome.body().is_empty())
        );
        assert_eq!(stripped.owner, owner);
    }
}
