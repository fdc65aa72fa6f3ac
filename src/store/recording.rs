//! What a store needs so that an outcome can be recorded in the application's own transaction.

use std::sync::Arc;

use crate::claim::Claim;
use crate::error::StoreError;
use crate::outcome::Outcome;

use super::Store;

/// A store in a database that keeps the application's own rows too, so that one transaction of the
/// application can hold both. Use it through [`Idempotency::recording`](crate::Idempotency::recording).
///
/// Wrappers implement it where the store inside does, and do to the claim and the outcome what they
/// do in [`Store::complete`].
pub trait Transactional: Store {
    /// One fenced statement that is not run yet.
    type Recording: Send + 'static;

    /// Prepares the statement that records `outcome` for `claim`. Nothing is asked of the database.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store cannot keep such an outcome.
    fn recording(&self, claim: &Claim, outcome: &Outcome) -> Result<Self::Recording, StoreError>;
}

/// Why an outcome was not recorded in the application's transaction. Roll it back, whichever it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// Another attempt took the key over, the record was erased, or an outcome of this attempt stands
    /// already: the transaction was committed before, and only the reply to its COMMIT was lost.
    /// Whatever the handler answers then, the layer sends what stands.
    #[error("the claim was lost or is completed already: roll the transaction back")]
    ClaimLost,
    /// Another transaction holds the record, or has changed it since this one took its snapshot: the
    /// renewal of the lease does so every few seconds. Roll back and do the whole transaction again.
    #[error("another transaction changed the record: roll back, then do the transaction again")]
    Conflict(#[source] StoreError),
    /// The outcome would not have been part of the transaction, so nothing was written.
    #[error("the outcome would not be part of the transaction: {0}")]
    Misplaced(&'static str),
    /// The statement failed, and the transaction with it.
    #[error("the outcome could not be recorded: roll the transaction back")]
    Store(#[source] StoreError),
}

macro_rules! forward_to_inner {
    ($($pointer:ident),*) => {$(
        impl<S: Transactional> Transactional for $pointer<S> {
            type Recording = S::Recording;

            fn recording(
                &self,
                claim: &Claim,
                outcome: &Outcome,
            ) -> Result<S::Recording, StoreError> {
                (**self).recording(claim, outcome)
            }
        }
    )*};
}

forward_to_inner!(Arc, Box);
