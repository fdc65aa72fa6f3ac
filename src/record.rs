//! What a store hands back about a key.

use std::fmt;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::claim::Owner;
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::scope::ScopedKey;

/// An instant on the *store's* clock, in microseconds since the Unix epoch.
///
/// Callers never compute with it: they hand durations in and get durations back. It exists so that
/// an operator can read when something happened, and so that [`Store::resolve`] can compare a lease
/// with the one that was seen.
///
/// [`Store::resolve`]: crate::Store::resolve
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The instant this many microseconds after the Unix epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The same instant as a wall-clock time.
    pub fn to_system_time(self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_micros(self.0)
    }
}

/// One key's whole story, as the store knows it at the moment of reading.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Record {
    /// Namespace, scope and key.
    pub key: ScopedKey,
    /// What the claiming request asked for.
    pub fingerprint: Fingerprint,
    /// Who claimed last.
    pub owner: Owner,
    /// How often the record has been claimed; the fencing token of the last claim.
    pub attempt: u32,
    /// Where the record stands.
    pub state: State,
    /// What the handler attached.
    pub notes: Notes,
    /// When it was claimed afresh: a takeover keeps it, a claim of a released or expired record
    /// does not.
    pub created_at: Timestamp,
    /// When it may be forgotten.
    pub expires_at: Timestamp,
}

impl Record {
    /// Everything a store knows of a key.
    #[allow(clippy::too_many_arguments, reason = "one argument per stored field")]
    pub fn new(
        key: ScopedKey,
        fingerprint: Fingerprint,
        owner: Owner,
        attempt: u32,
        state: State,
        notes: Notes,
        created_at: Timestamp,
        expires_at: Timestamp,
    ) -> Self {
        Self {
            key,
            fingerprint,
            owner,
            attempt,
            state,
            notes,
            created_at,
            expires_at,
        }
    }

    /// Whether nobody knows how the last attempt ended: it is started and its lease is over.
    pub fn is_abandoned(&self) -> bool {
        matches!(self.state, State::Started { lease_left, .. } if lease_left.is_zero())
    }
}

/// Where a record stands.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum State {
    /// An attempt holds the key, or held it and stopped renewing.
    Started {
        /// When the lease ends or ended; compared by [`Store::resolve`](crate::Store::resolve).
        lease_until: Timestamp,
        /// How much of the lease was left when the record was read. Zero: abandoned.
        lease_left: Duration,
    },
    /// The outcome stands and is final.
    Completed {
        /// What every later request gets.
        outcome: Outcome,
        /// When it was recorded.
        completed_at: Timestamp,
    },
    /// The attempt did nothing that lasts; the next claim starts afresh.
    Released,
}

/// What a handler attached to its claim while it ran.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notes {
    /// An id under which another system knows the work, for the reconciler.
    pub correlation: Option<String>,
    /// Finished phases in the order in which they were recorded: name and data.
    pub checkpoints: Vec<(String, Bytes)>,
}

impl Notes {
    /// The data of the named checkpoint, if that phase was finished.
    pub fn checkpoint(&self, name: &str) -> Option<&Bytes> {
        self.checkpoints
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, data)| data)
    }

    /// Records a finished phase; a repeated name replaces its data.
    pub fn set_checkpoint(&mut self, name: &str, data: Bytes) {
        match self.checkpoints.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = data,
            None => self.checkpoints.push((name.to_owned(), data)),
        }
    }

    /// Whether nothing was attached.
    pub fn is_empty(&self) -> bool {
        self.correlation.is_none() && self.checkpoints.is_empty()
    }
}

impl fmt::Debug for Notes {
    /// Shows which phases were finished, and neither their data nor the correlation id: they belong
    /// to a customer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases = self.checkpoints.iter().map(|(name, _)| name);
        f.debug_struct("Notes")
            .field("correlated", &self.correlation.is_some())
            .field("checkpoints", &phases.collect::<Vec<_>>())
            .finish()
    }
}
