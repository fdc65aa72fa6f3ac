//! What the engine decides about a request, and why it could not decide.

use std::time::{Duration, SystemTime};

use crate::attempt::AttemptGuard;
use crate::claim::Owner;
use crate::error::StoreError;
use crate::outcome::Outcome;

/// The engine's judgement of one request.
#[derive(Debug)]
#[must_use]
pub enum Admission {
    /// Nobody did this yet: do it, then say how it ended.
    First(AttemptGuard),
    /// It was done: answer this.
    Replay(Replay),
    /// Somebody is doing it right now.
    InFlight(Holder),
    /// The key was used for another request.
    Mismatch {
        /// The request is the same and only the credentials differ. Another key would repeat the
        /// operation, so the client must not mint one.
        caller_changed: bool,
    },
    /// It was begun, and nobody knows how it ended.
    OutcomeUnknown,
}

/// A kept outcome, and when it was recorded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Replay {
    /// What the first request got.
    pub outcome: Outcome,
    /// When that was, by the store's clock.
    pub completed_at: SystemTime,
}

impl Replay {
    pub(crate) fn new(outcome: Outcome, completed_at: SystemTime) -> Self {
        Self {
            outcome,
            completed_at,
        }
    }
}

/// The attempt that holds a key, for [`Idempotency::wait`](crate::Idempotency::wait).
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    pub(crate) owner: Owner,
    pub(crate) lease_left: Duration,
}

impl Holder {
    /// How long the holder's lease lasts if it is not renewed.
    pub fn lease_left(&self) -> Duration {
        self.lease_left
    }
}

/// Why the engine could not judge. The work was not begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// Too many attempts go on without their clients; see
    /// [`detached_limit`](crate::IdempotencyBuilder::detached_limit).
    #[error("too many attempts are running without a client: retry with the same key")]
    Overloaded,
    /// The store did not answer. Retry with the same key.
    #[error("the idempotency store did not answer: retry with the same key")]
    Store(#[source] StoreError),
}

/// What stands after an attempt said how it ended.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Settled {
    /// What was asked for is recorded.
    Recorded,
    /// Another outcome stands for this key and is what every request gets.
    Standing(Outcome),
    /// The claim was lost, and no outcome stands.
    ClaimLost,
    /// The store did not acknowledge in time. The engine goes on trying in the background until the
    /// lease ends, unless the store refused for a reason that no repetition mends.
    NotSaved,
    /// In one-commit mode: nothing was committed, neither the outcome nor the handler's rows.
    Undone,
    /// In one-commit mode: the reply to the COMMIT was lost, and the store could not be asked again.
    Unknown,
}
