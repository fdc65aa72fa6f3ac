//! The transaction that a handler in one-commit mode works in.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::attempt::Attempt;

/// A handler's hold on the transaction of its attempt, in one-commit mode: taken from the
/// [`Attempt`] by [`Attempt::transaction`], or extracted in axum (feature `axum`).
///
/// It gives whatever the store's connection gives by shared reference. What is done through it is
/// committed together with the outcome after the handler has returned, or rolled back: so do not
/// commit or roll back yourself. Savepoints are yours to use.
///
/// Drop it before the handler returns, at its end at the latest. Kept beyond that, in a task that was
/// spawned for instance, it keeps the transaction from being committed: the client gets a 503, and
/// everything is rolled back when it is dropped at last.
pub struct Transaction<C> {
    connection: Option<C>,
    slot: Arc<TransactionSlot<C>>,
}

/// Where the connection of an open transaction is while no handler holds it: for stores that
/// implement [`OneCommit`](crate::OneCommit).
pub struct TransactionSlot<C> {
    connection: Mutex<Slot<C>>,
}

enum Slot<C> {
    Here(C),
    Lent,
    /// Whatever comes back is dropped.
    Closed,
}

/// Why there is no transaction for a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// The attempt's engine is not in one-commit mode, or its store has another kind of connection.
    #[error("no such transaction: build the engine with `one_commit`, over this kind of database")]
    OtherMode,
    /// It is held already, by another part of the handler perhaps. There is one, and it has one holder
    /// at a time.
    #[error("the transaction is held by another part of the handler: hand it on by reference")]
    Held,
}

impl<C> TransactionSlot<C> {
    /// A connection on which a transaction is open. Dropping it has to end the transaction.
    pub fn new(connection: C) -> Arc<Self> {
        Arc::new(Self {
            connection: Mutex::new(Slot::Here(connection)),
        })
    }

    /// The connection, for good; `None` if a handler holds it still, and then it is dropped as soon as
    /// that one lets it go.
    pub fn take_back(&self) -> Option<C> {
        match self.replace(Slot::Closed) {
            Slot::Here(connection) => Some(connection),
            Slot::Lent | Slot::Closed => None,
        }
    }

    fn replace(&self, slot: Slot<C>) -> Slot<C> {
        // Nothing under the lock panics.
        let mut held = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *held, slot)
    }

    fn lend(self: Arc<Self>) -> Result<Transaction<C>, NoTransaction> {
        match self.replace(Slot::Lent) {
            Slot::Here(connection) => Ok(Transaction {
                connection: Some(connection),
                slot: self,
            }),
            Slot::Lent => Err(NoTransaction::Held),
            Slot::Closed => {
                drop(self.replace(Slot::Closed));
                Err(NoTransaction::Held)
            }
        }
    }

    fn give_back(&self, connection: C) {
        let mut held = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if matches!(*held, Slot::Lent) {
            *held = Slot::Here(connection);
        }
    }
}

impl Attempt {
    /// The transaction of this attempt, in one-commit mode: `PostgresTransaction` on PostgreSQL.
    ///
    /// # Errors
    ///
    /// [`NoTransaction`] if there is none of this kind, or it is held already.
    pub fn transaction<C: Send + 'static>(&self) -> Result<Transaction<C>, NoTransaction> {
        let slot = self.inner().slot().ok_or(NoTransaction::OtherMode)?;
        let slot = Arc::clone(slot) as Arc<dyn Any + Send + Sync>;
        let slot = slot.downcast::<TransactionSlot<C>>();
        slot.map_err(|_| NoTransaction::OtherMode)?.lend()
    }
}

impl<C: Deref> Deref for Transaction<C> {
    type Target = C::Target;

    #[expect(
        clippy::unreachable,
        reason = "nothing but `drop` takes the connection"
    )]
    fn deref(&self) -> &C::Target {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("only dropping takes it"),
        }
    }
}

impl<C> Drop for Transaction<C> {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.slot.give_back(connection);
        }
    }
}

impl<C> fmt::Debug for Transaction<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").finish_non_exhaustive()
    }
}

impl<C> fmt::Debug for TransactionSlot<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionSlot").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_one_holder_and_comes_back_from_it() {
        let slot = TransactionSlot::new(Box::new(7));
        let held = Arc::clone(&slot).lend().unwrap();
        assert_eq!(*held, 7);
        let other = Arc::clone(&slot).lend().unwrap_err();
        assert_eq!(other, NoTransaction::Held);
        drop(held);
        drop(Arc::clone(&slot).lend().unwrap());
        assert_eq!(slot.take_back(), Some(Box::new(7)));
        assert!(Arc::clone(&slot).lend().is_err());
    }

    #[test]
    fn a_connection_that_is_kept_too_long_is_dropped_when_it_comes_back() {
        let connection = Arc::new(7);
        let slot = TransactionSlot::new(Arc::clone(&connection));
        let held = Arc::clone(&slot).lend().unwrap();
        assert_eq!(slot.take_back(), None);
        assert_eq!(Arc::strong_count(&connection), 2);
        drop(held);
        assert_eq!(Arc::strong_count(&connection), 1);
        assert_eq!(slot.take_back(), None);
    }
}
