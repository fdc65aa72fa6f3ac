//! Jobs, events, and every other piece of work that is no HTTP request.

use std::future::Future;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::admission::{Admission, AdmitError, Settled};
use crate::attempt::{Attempt, AttemptGuard};
use crate::detach::{Detachable, catch_panic};
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::idempotency::{Closing, Idempotency};
use crate::outcome::Outcome;
use crate::scope::ScopedKey;
use crate::store::Store;
use crate::telemetry::{self, Answered, RequestSpan};
use crate::time_limit::{TimedOut, within_if_any};

impl<S: Store> Idempotency<S> {
    /// Does `work` once per key: the first call runs it, every later one with the same fingerprint
    /// gets the value that it returned.
    ///
    /// The work must say what its failures mean, because only it knows: see [`Failure`]. Dropping
    /// the future does not stop work that has begun; it goes on in a task of its own. Value and error
    /// are kept as JSON.
    ///
    /// ```
    /// use tower_idempotency::{Failure, Fingerprint, Idempotency, IdempotencyKey, MemoryStore, Ran};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let idempotency = Idempotency::new(MemoryStore::new());
    /// let key = IdempotencyKey::new("order-4711")?.scoped("points");
    /// let payload = br#"{"order":4711,"points":100}"#;
    ///
    /// for expected in [Ran::First(100), Ran::Repeat(100)] {
    ///     let ran = idempotency
    ///         .run(&key, Fingerprint::of(&[payload]), |_attempt| async {
    ///             // … add the points …
    ///             Ok::<i64, Failure<String>>(100)
    ///         })
    ///         .await?;
    ///     assert_eq!(ran, expected);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RunError`]; its [`advice`](RunError::advice) says what to do with the message.
    ///
    /// # Panics
    ///
    /// If the work panics, after its key was abandoned.
    pub async fn run<T, E, W, F>(
        &self,
        key: &ScopedKey,
        fingerprint: Fingerprint,
        work: W,
    ) -> Result<Ran<T>, RunError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + DeserializeOwned + Send + 'static,
        W: FnOnce(Attempt) -> F + Send + 'static,
        F: Future<Output = Result<T, Failure<E>>> + Send + 'static,
    {
        let engine = Arc::clone(&self.engine);
        let tracker = Arc::clone(&engine.tracker);
        let span = RequestSpan::new(engine.store_name, key);
        let recorder = span.clone();
        let key = key.clone();
        let job = async move {
            let admission = engine.admit(&key, fingerprint).await;
            let answer = answered(&admission);
            telemetry::answered(answer, engine.store_name);
            recorder.record(answer);
            match admission {
                Ok(Admission::First(attempt)) => first(attempt, work).await,
                Ok(Admission::Replay(replay)) => stored(&replay.outcome),
                Ok(Admission::InFlight(holder)) => Err(RunError::InFlight {
                    lease_left: holder.lease_left(),
                }),
                Ok(Admission::Mismatch { .. }) => Err(RunError::Mismatch),
                Ok(Admission::OutcomeUnknown) => Err(RunError::OutcomeUnknown),
                Err(AdmitError::Overloaded) => Err(RunError::Overloaded),
                Err(AdmitError::Store(error)) => Err(RunError::Store(error)),
            }
        };
        Detachable::new(tracker, span, job).await
    }
}

/// The value of a piece of work that is done, and who did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran<T> {
    /// This call did the work.
    First(T),
    /// An earlier call did it; this is the value that it returned.
    Repeat(T),
}

impl<T> Ran<T> {
    /// The value, whoever did the work.
    pub fn into_inner(self) -> T {
        match self {
            Self::First(value) | Self::Repeat(value) => value,
        }
    }
}

/// What a failure of the work means for its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure<E> {
    /// It will fail again, however often it is tried (a declined card). Kept: every repetition gets
    /// the same error.
    Terminal(E),
    /// Nothing was done (a connection refused). The key is free: a retry runs the work again.
    Transient(E),
    /// It may have been done (a timeout while waiting for an answer). The key is held until it is
    /// reconciled.
    Unknown(E),
}

/// Why [`Idempotency::run`] has no value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work failed for good.
    #[error("the work failed for good")]
    Terminal {
        /// What the work returned, now or when it ran.
        error: E,
        /// Whether an earlier call ran it.
        repeat: bool,
    },
    /// The work failed without an effect; it may be tried again.
    #[error("the work failed without an effect: try again")]
    Transient(E),
    /// The work failed, and may have had its effect.
    #[error("the work failed and may have had its effect: reconcile the key")]
    Unknown(E),
    /// Another call is doing the work right now.
    #[error("the work is being done by another call: try again later")]
    InFlight {
        /// How long that call holds the key if it dies.
        lease_left: Duration,
    },
    /// The key was used for other work.
    #[error("the key was used for other work")]
    Mismatch,
    /// An earlier call began the work, and nobody knows how it ended.
    #[error("an earlier call began the work and nobody knows how it ended: reconcile the key")]
    OutcomeUnknown,
    /// The work took so long, or the store was away so long, that another call took the key over.
    #[error("another call took the key over while the work ran")]
    ClaimLost,
    /// In one-commit mode: all that the work wrote was rolled back, because the store did not commit it
    /// or it took longer than the attempt limit.
    #[error("the work was rolled back: try again later")]
    Undone,
    /// Too many attempts are running without a caller. The work was not begun.
    #[error("too many attempts are running without a caller: try again later")]
    Overloaded,
    /// The store did not answer. The work was not begun.
    #[error("the idempotency store did not answer: try again later")]
    Store(#[source] StoreError),
    /// The value cannot be written, or the stored one cannot be read as this type.
    #[error("the value of the work cannot be written or read")]
    Value(#[source] serde_json::Error),
    /// The record holds something else than the value of a piece of work.
    #[error("the record holds no value: it was made by something else than `run`")]
    NotAValue,
}

/// What a queue's worker does with its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Acknowledge it: there is nothing left to do.
    Acknowledge,
    /// Give it back and let it come again after this long.
    RetryAfter(Duration),
    /// Put it aside for a person: no retry can help.
    DeadLetter,
}

impl<E> RunError<E> {
    /// What to do with the message that asked for the work.
    ///
    /// After [`Unknown`](Self::Unknown) and [`OutcomeUnknown`](Self::OutcomeUnknown) the wait is 30 s, the default of
    /// the [`sweep_interval`](crate::IdempotencyBuilder::sweep_interval), and does not follow that setting as
    /// HTTP's `Retry-After` does: an error knows no engine. Where you sweep less often, wait longer.
    pub fn advice(&self) -> Advice {
        match self {
            Self::Terminal { .. } => Advice::Acknowledge,
            Self::Transient(_) | Self::Overloaded | Self::ClaimLost | Self::Undone => {
                Advice::RetryAfter(Duration::from_secs(1))
            }
            Self::InFlight { lease_left } => {
                Advice::RetryAfter((*lease_left).min(Duration::from_secs(1)))
            }
            Self::Store(error) if error.is_transient() => {
                Advice::RetryAfter(Duration::from_secs(1))
            }
            // Later, when somebody has reconciled the key.
            Self::Unknown(_) | Self::OutcomeUnknown => Advice::RetryAfter(Duration::from_secs(30)),
            Self::Store(_) | Self::Mismatch | Self::Value(_) | Self::NotAValue => {
                Advice::DeadLetter
            }
        }
    }
}

fn answered(admission: &Result<Admission, AdmitError>) -> Answered {
    match admission {
        Ok(Admission::First(_)) => Answered::Executed,
        Ok(Admission::Replay(_)) => Answered::Replayed,
        Ok(Admission::InFlight(_)) => Answered::InFlight,
        Ok(Admission::Mismatch { .. }) => Answered::Mismatch,
        Ok(Admission::OutcomeUnknown) => Answered::OutcomeUnknown,
        Err(_) => Answered::StoreError,
    }
}

async fn first<T, E, F>(
    attempt: AttemptGuard,
    work: impl FnOnce(Attempt) -> F,
) -> Result<Ran<T>, RunError<E>>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
    F: Future<Output = Result<T, Failure<E>>>,
{
    let given = attempt.attempt().clone();
    let working = within_if_any(
        attempt.time_left(),
        catch_panic(async { work(given).await }),
    );
    let result = match working.await {
        Ok(Ok(result)) => result,
        Err(TimedOut) => {
            attempt.give_up();
            return Err(RunError::Undone);
        }
        Ok(Err(panic)) => {
            let _ = attempt.abandon().await;
            resume_unwind(panic)
        }
    };
    let kept = match &result {
        Ok(value) => Outcome::of_value(value),
        Err(Failure::Terminal(error)) => Outcome::of_error(error),
        Err(Failure::Transient(_)) => {
            let settled = attempt.release().await;
            return conclude(settled, result);
        }
        Err(Failure::Unknown(_)) => {
            let settled = attempt.abandon().await;
            return conclude(settled, result);
        }
    };
    // What cannot be read back (a float that is no number becomes `null`) would be an error for every
    // repetition.
    let kept = kept.and_then(|outcome| {
        let _: Result<T, E> = serde_json::from_slice(&outcome.body())?;
        Ok(outcome)
    });
    match kept {
        Ok(outcome) => {
            let closing = Closing::Complete {
                outcome,
                retention: None,
            };
            conclude(attempt.close(closing).await, result)
        }
        Err(error) => {
            // The work is done and its value cannot be told again: only a person can close this.
            let _ = attempt.abandon().await;
            Err(RunError::Value(error))
        }
    }
}

fn conclude<T, E>(settled: Settled, result: Result<T, Failure<E>>) -> Result<Ran<T>, RunError<E>>
where
    T: DeserializeOwned,
    E: DeserializeOwned,
{
    match settled {
        Settled::Standing(outcome) => return stored(&outcome),
        Settled::ClaimLost => return Err(RunError::ClaimLost),
        Settled::Undone => return Err(RunError::Undone),
        Settled::Unknown => return Err(RunError::OutcomeUnknown),
        // Not saved yet: the engine goes on trying, and a repetition finds the key held.
        Settled::Recorded | Settled::NotSaved => {}
    }
    match result {
        Ok(value) => Ok(Ran::First(value)),
        Err(Failure::Terminal(error)) => Err(RunError::Terminal {
            error,
            repeat: false,
        }),
        Err(Failure::Transient(error)) => Err(RunError::Transient(error)),
        Err(Failure::Unknown(error)) => Err(RunError::Unknown(error)),
    }
}

fn stored<T, E>(outcome: &Outcome) -> Result<Ran<T>, RunError<E>>
where
    T: DeserializeOwned,
    E: DeserializeOwned,
{
    if outcome.is_tombstone() || outcome.status().is_some() {
        return Err(RunError::NotAValue);
    }
    match serde_json::from_slice::<Result<T, E>>(&outcome.body()) {
        Ok(Ok(value)) => Ok(Ran::Repeat(value)),
        Ok(Err(error)) => Err(RunError::Terminal {
            error,
            repeat: true,
        }),
        Err(error) => Err(RunError::Value(error)),
    }
}
