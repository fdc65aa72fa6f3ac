//! What a caller is told when there is no answer.

use std::fmt;
use std::time::Duration;

use http::StatusCode;
use tower::BoxError;

use crate::http::ProblemKind;
use crate::key::{IdempotencyKey, KeyError};

/// Why there is no answer that decides the operation.
///
/// No text in it repeats a key, a header or a body.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The key that the application gave cannot be sent. Nothing was sent.
    #[error("the Idempotency-Key of the request cannot be sent; nothing was sent")]
    InvalidKey(#[source] KeyError),
    /// The key could not be saved, so that it would have been lost with the process. Nothing was
    /// sent.
    #[error("the key of the operation could not be saved; nothing was sent")]
    Journal(#[source] BoxError),
    /// The operation may have happened or not. Ask for its state, or send it again later **with the
    /// same key**; never with a new one.
    #[error(transparent)]
    OutcomeUnknown(Box<OutcomeUnknown>),
    /// One try: the connection failed before the whole answer was there. The request may have
    /// arrived.
    ///
    /// [`RetryPolicy`](super::RetryPolicy) retries it; it is returned only for requests that are
    /// idempotent by their method and have no key.
    #[error("the connection failed before the whole answer was there")]
    Transport(#[source] BoxError),
    /// One try: there was no whole answer in time. The request may have arrived. Otherwise as
    /// [`Transport`](Self::Transport).
    #[error("there was no whole answer within {limit:?}")]
    TimedOut {
        /// The time limit of the try.
        limit: Duration,
    },
    /// One try: the answer is longer than the client takes. It is not retried.
    #[error("the answer ({status}) is longer than {limit} bytes")]
    AnswerTooLong {
        /// The answer's status.
        status: StatusCode,
        /// In bytes.
        limit: usize,
    },
}

impl ClientError {
    /// A failure of the connection, for `map_err` around a service of another kind. What is a
    /// `ClientError` already stays as it is.
    pub fn transport(error: impl Into<BoxError>) -> Self {
        match error.into().downcast() {
            Ok(own) => *own,
            Err(error) => Self::Transport(error),
        }
    }

    /// The operation whose outcome nobody knows, if this is that case.
    pub fn outcome_unknown(&self) -> Option<&OutcomeUnknown> {
        match self {
            Self::OutcomeUnknown(unknown) => Some(unknown),
            _ => None,
        }
    }
}

/// The operation may have happened or not.
#[derive(Debug)]
pub struct OutcomeUnknown {
    pub(super) why: GaveUp,
    pub(super) key: Option<IdempotencyKey>,
    pub(super) tries: u32,
    pub(super) status: Option<StatusCode>,
    pub(super) problem: Option<ProblemKind>,
    pub(super) retry_after: Option<Duration>,
    pub(super) source: Option<ClientError>,
}

impl OutcomeUnknown {
    /// Why it was not tried again.
    pub fn why(&self) -> GaveUp {
        self.why
    }

    /// The key to send the operation again with. `None` only for a request without a key.
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.key.as_ref()
    }

    /// How often the request was sent by this call; 0 if it was too late before the first try.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// The status of the last try; `None` if it had no answer.
    pub fn status(&self) -> Option<StatusCode> {
        self.status
    }

    /// What the server's layer said in the last try. [`ProblemKind::KeyReused`] for an operation that the
    /// journal knew: the body was changed, or the name is another operation's.
    pub fn problem(&self) -> Option<ProblemKind> {
        self.problem
    }

    /// How long the server wants to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl fmt::Display for OutcomeUnknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the outcome of the operation is unknown: {}", self.why)?;
        if let Some(status) = self.status {
            write!(f, " (last status {})", status.as_u16())?;
        }
        if let Some(problem) = self.problem {
            write!(f, " (`{}`)", problem.code())?;
        }
        f.write_str("; ask for its state, or send it again later with the same key")
    }
}

impl std::error::Error for OutcomeUnknown {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

impl From<OutcomeUnknown> for ClientError {
    fn from(unknown: OutcomeUnknown) -> Self {
        Self::OutcomeUnknown(Box::new(unknown))
    }
}

/// Why an operation was not tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GaveUp {
    /// The last answer says that a retry would not tell more:
    /// [`status`](OutcomeUnknown::status) and [`problem`](OutcomeUnknown::problem) say what it was.
    Answer,
    /// All retries are used up.
    Retries,
    /// The next try would begin after the deadline of the operation.
    Deadline,
    /// Too many retries to this host did not help. See
    /// [`RetryPolicy::budget`](super::RetryPolicy::budget).
    Budget,
    /// The server may have forgotten the key, and would take a retry for a new operation.
    KeyExpired,
    /// The method is not idempotent and the request has no key: a retry could repeat the operation.
    NoKey,
}

impl fmt::Display for GaveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Answer => "the answer does not tell it",
            Self::Retries => "all retries are used up",
            Self::Deadline => "the deadline is over",
            Self::Budget => "too many retries to this host did not help",
            Self::KeyExpired => "the key is too old to be sent again",
            Self::NoKey => "without a key a retry could repeat the operation",
        })
    }
}
