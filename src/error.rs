//! What can go wrong with a store, and whether asking again makes sense.

use std::error::Error;
use std::fmt;

/// A store call that did not answer.
///
/// A failed call means *unknown*: the move may have been applied or not. Nothing may be concluded
/// from it except that asking again is safe, because every move of [`Store`](crate::Store) may be
/// repeated. An expected conflict (a key that is taken, a claim that was lost) is an answer and
/// never an error.
///
/// `Display` prints this level only; the driver's own error is the [`source`](Error::source).
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl StoreError {
    /// An error of the given kind. `message` says what to do, and holds no key and no secret.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// The store cannot be reached, is full, or did not answer in time.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unavailable, message)
    }

    /// A stored record cannot be read.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Corrupt, message)
    }

    /// Attaches the driver's error, for logs.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the same call may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            StoreErrorKind::Unavailable => "idempotency store unavailable",
            StoreErrorKind::Corrupt => "idempotency record unreadable",
            StoreErrorKind::Other => "idempotency store failed",
        };
        write!(f, "{kind}: {}", self.message)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// The kinds of [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Not reachable, full, or too slow. The same call may succeed later.
    Unavailable,
    /// The record exists and cannot be decoded. It is left where it is.
    Corrupt,
    /// Everything else: a missing table, an older schema, a permission. Repeating does not help.
    Other,
}

/// A setting that cannot work, found when the engine or the layer is built.
///
/// The setting's name is in the text, so that the line of code to change is easy to find.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{setting}` {problem}")]
pub struct ConfigError {
    setting: &'static str,
    problem: String,
}

impl ConfigError {
    pub(crate) fn new(setting: &'static str, problem: impl Into<String>) -> Self {
        Self {
            setting,
            problem: problem.into(),
        }
    }

    /// The name of the setter whose value was refused.
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}
