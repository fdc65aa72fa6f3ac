//! What a store needs so that a claim can be an open transaction instead of a record.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::claim::ClaimRequest;
use crate::error::StoreError;
use crate::fingerprint::{Fingerprint, FingerprintMatch};
use crate::outcome::Outcome;
use crate::record::{Record, State};

use super::Store;

/// Opens the transactions of one-commit mode: see
/// [`IdempotencyBuilder::one_commit`](crate::IdempotencyBuilder::one_commit).
#[async_trait]
pub trait OneCommit: fmt::Debug + Send + Sync + 'static {
    /// The store in whose records the outcomes lie.
    type Store: Store;

    /// Opens a transaction that holds the key, or shows the record that stands in the way. A record
    /// that is released or expired is in nobody's way.
    async fn begin(&self, request: &ClaimRequest) -> Result<Begun, StoreError>;
}

/// The answer to [`OneCommit::begin`].
#[derive(Debug)]
#[must_use]
pub enum Begun {
    /// The key is ours until this ends.
    Open(Box<dyn OpenTransaction>),
    /// The key has a record; this is it.
    Existing(Record),
    /// Another transaction holds the key.
    Held,
}

/// An open transaction that holds a key. Dropped, it is rolled back.
#[async_trait]
pub trait OpenTransaction: fmt::Debug + Send + Sync {
    /// The fencing token: 1, or the last attempt of a record that was there and one more.
    fn attempt(&self) -> u32;

    /// The [`TransactionSlot`](crate::TransactionSlot) from which the handler takes the transaction.
    fn slot(&self) -> Arc<dyn Any + Send + Sync>;

    /// Adds the completed record and commits. `retention`, if given, replaces that of the request.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if nothing was committed, for a reason that an operator should hear.
    async fn commit(
        self: Box<Self>,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Committed, StoreError>;

    /// Takes everything back and frees the key.
    async fn roll_back(self: Box<Self>);
}

/// The answer to [`OpenTransaction::commit`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Committed {
    /// The rows and the outcome.
    Both,
    /// Nothing, because an outcome stands already.
    Standing(Outcome),
    /// Nothing.
    Neither,
    /// The reply to the COMMIT was lost, and whether there is a record could not be asked; or the
    /// handler has ended the transaction itself, against the rules.
    Unknown,
}

impl Committed {
    /// What becomes of a request of this fingerprint that found this record when it wanted to add its
    /// own.
    pub fn instead(record: Record, fingerprint: &Fingerprint) -> Self {
        let is_same = record.fingerprint.compare(fingerprint) == FingerprintMatch::Same;
        match record.state {
            State::Completed { outcome, .. } if is_same => Self::Standing(outcome),
            _ => Self::Neither,
        }
    }
}
