//! For authors of stores, and for tests of services: the store contract as tests, and faults on
//! demand.
//!
//! A store keeps the contract of [`Store`] when every function of [`conformance`] returns.
//! [`store_conformance!`](crate::store_conformance) makes a test of each of them, from one expression
//! that makes a [`Harness`]:
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_idempotency::testing::Harness;
//! use tower_idempotency::{MemoryStore, ScopedKey, async_trait, store_conformance};
//!
//! struct Memory(MemoryStore);
//!
//! #[async_trait]
//! impl Harness for Memory {
//!     type Store = MemoryStore;
//!
//!     fn store(&self) -> &MemoryStore {
//!         &self.0
//!     }
//!
//!     async fn age(&self, key: &ScopedKey, by: Duration) {
//!         self.0.age(key, by);
//!     }
//! }
//!
//! store_conformance!(Memory(MemoryStore::new()));
//! # fn main() {}
//! ```
//!
//! The crate of the store needs `tokio` with the features `macros` and `rt-multi-thread` as a
//! dev-dependency, and this crate with the feature `testing`.
//!
//! [`FaultyStore`] wraps any store and lets chosen calls fail, answer late or lose their reply.

pub mod conformance;
mod fault;

use std::time::Duration;

use async_trait::async_trait;

pub use self::fault::{Calls, Fault, FaultyStore, Move};
use crate::scope::ScopedKey;
use crate::store::Store;

/// What the conformance list needs of a store under test.
///
/// Rules run side by side, each with a harness of its own. A shared server is fine, as long as the
/// store of one harness does not see the records of another one: give each a table, a schema, a
/// prefix or a file of its own, because [`Store::purge`] and [`Store::abandoned`] speak of all
/// records.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The store under test. `Clone` because rules hand it to concurrent tasks; an `Arc` of a store
    /// is a store too.
    type Store: Store + Clone;

    /// The store under test, with no record in it when the rule begins.
    fn store(&self) -> &Self::Store;

    /// Makes the record of `key` look as if it had been written `by` earlier: moves its creation, the
    /// end of its lease, its completion and its expiry into the past, all by the same amount, and
    /// nothing else. Removes nothing, even what is expired then.
    ///
    /// This is how rules meet an old record without waiting for it; the amounts are hours.
    ///
    /// # Panics
    ///
    /// May panic if there is no such record or the store does not answer.
    async fn age(&self, key: &ScopedKey, by: Duration);
}

/// Makes one test of each function of
/// [`testing::conformance`](crate::testing::conformance), named as it is.
///
/// The argument is an expression that makes a [`Harness`](crate::testing::Harness). It is evaluated
/// once per test, inside of the test's runtime, and may `.await`. See [`testing`](crate::testing) for
/// an example and for the dev-dependencies.
#[macro_export]
macro_rules! store_conformance {
    ($harness:expr $(,)?) => {
        $crate::__for_each_rule! { [$crate::__test_of_a_rule] ($harness) }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __test_of_a_rule {
    (($harness:expr) $($rule:ident)*) => {$(
        // Several threads, because some rules are about races.
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $rule() {
            let harness = $harness;
            $crate::testing::conformance::$rule(&harness).await;
        }
    )*};
}
