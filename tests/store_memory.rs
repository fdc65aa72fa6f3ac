//! The in-process store keeps the store contract.

use std::time::Duration;

use tower_idempotency::testing::Harness;
use tower_idempotency::{MemoryStore, ScopedKey, async_trait, store_conformance};

struct Memory(MemoryStore);

#[async_trait]
impl Harness for Memory {
    type Store = MemoryStore;

    fn store(&self) -> &MemoryStore {
        &self.0
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        assert!(self.0.age(key, by), "no record of {key:?}");
    }
}

store_conformance!(Memory(MemoryStore::new()));
