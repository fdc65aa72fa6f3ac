//! Whatever is put round a store keeps the store contract.

#![cfg(all(feature = "memory", feature = "testing"))]

use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::testing::{FaultyStore, Harness};
use tower_idempotency::{MemoryStore, ScopedKey, Store, async_trait, store_conformance};

/// A wrapped store, and the one inside that knows how to age a record.
struct Wrapped<S> {
    inside: MemoryStore,
    wrapped: S,
}

impl<S> Wrapped<S> {
    fn by(wrap: impl FnOnce(MemoryStore) -> S) -> Self {
        let inside = MemoryStore::new();
        let wrapped = wrap(inside.clone());
        Self { inside, wrapped }
    }
}

#[async_trait]
impl<S: Store + Clone> Harness for Wrapped<S> {
    type Store = S;

    fn store(&self) -> &S {
        &self.wrapped
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        assert!(self.inside.age(key, by), "no record of {key:?}");
    }
}

mod in_an_arc {
    use super::*;
    store_conformance!(Wrapped::by(|store| Arc::new(store) as Arc<dyn Store>));
}

mod in_a_box {
    use super::*;
    // A box cannot be cloned; an `Arc` round it can, and calls through it.
    store_conformance!(Wrapped::by(|store| Arc::new(
        Box::new(store) as Box<dyn Store>
    )));
}

mod in_a_faulty_store_without_faults {
    use super::*;
    store_conformance!(Wrapped::by(FaultyStore::new));
}
