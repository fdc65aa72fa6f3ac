//! Keys that outlive the process that minted them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tower::BoxError;

use crate::key::IdempotencyKey;

/// Where keys are kept from before their first use until the application has stored the answer.
///
/// [`SetIdempotencyKeyLayer`](super::SetIdempotencyKeyLayer) calls [`begin`](Self::begin) for every
/// request that has an [`OperationName`]. It never calls [`forget`](Self::forget): between an answer
/// and its place in the application's own records the process may end, and an operation whose key
/// is gone would be done twice. **Store the answer, then forget the name.** Whoever forgets too late
/// gets a replay; whoever forgets too soon pays again.
///
/// An application with a database keeps the key in the row of its order, and writes this trait in one
/// `INSERT … ON CONFLICT DO NOTHING` and one `SELECT`.
#[async_trait]
pub trait KeyJournal: fmt::Debug + Send + Sync + 'static {
    /// Saves `fresh` for this operation, in one atomic step and durably before it returns; or gives
    /// back what was saved for it before.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from saving. Nothing is sent then.
    async fn begin(&self, operation: &str, fresh: &IdempotencyKey) -> Result<SavedKey, BoxError>;

    /// Removes the operation's key, so that the next operation of this name gets another. For an
    /// operation that is not there it does nothing.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from removing.
    async fn forget(&self, operation: &str) -> Result<(), BoxError>;
}

/// What a journal has for an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SavedKey {
    /// The fresh key was saved.
    Fresh,
    /// An earlier call saved this key, and may have sent it.
    Earlier {
        /// The key to send.
        key: IdempotencyKey,
        /// How long ago it was saved.
        age: Duration,
    },
}

/// The name of an operation, in a request's extensions: what the application calls the thing that is
/// to happen once, such as `order-17/charge`. Only with a [`KeyJournal`].
///
/// Two calls with one name are one operation, in this process or after a restart, until the name is
/// forgotten.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OperationName(Arc<str>);

impl OperationName {
    /// A name. It is not sent.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Keys in memory: for calls that the same process repeats, and for tests. A restart loses them;
/// [`FileJournal`](super::FileJournal) does not.
///
/// Clones share their keys. It grows with each operation that nobody forgets.
#[derive(Clone, Debug, Default)]
pub struct MemoryJournal {
    keys: Arc<Mutex<HashMap<String, (IdempotencyKey, Instant)>>>,
}

impl MemoryJournal {
    /// An empty journal.
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl KeyJournal for MemoryJournal {
    async fn begin(&self, operation: &str, fresh: &IdempotencyKey) -> Result<SavedKey, BoxError> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((key, saved)) = keys.get(operation) {
            return Ok(SavedKey::Earlier {
                key: key.clone(),
                age: saved.elapsed(),
            });
        }
        keys.insert(operation.to_owned(), (fresh.clone(), Instant::now()));
        Ok(SavedKey::Fresh)
    }

    async fn forget(&self, operation: &str) -> Result<(), BoxError> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.remove(operation);
        Ok(())
    }
}

#[async_trait]
impl<J: KeyJournal + ?Sized> KeyJournal for Arc<J> {
    async fn begin(&self, operation: &str, fresh: &IdempotencyKey) -> Result<SavedKey, BoxError> {
        (**self).begin(operation, fresh).await
    }

    async fn forget(&self, operation: &str) -> Result<(), BoxError> {
        (**self).forget(operation).await
    }
}
