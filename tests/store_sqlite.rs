//! The SQLite store keeps the store contract.

#[path = "support/sqlite.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::testing::Harness;
use tower_idempotency::{SqliteStore, Store, async_trait, store_conformance};

struct Sqlite<S>(S, SqliteStore, support::Folder);

fn sqlite<S>(wrap: impl FnOnce(SqliteStore) -> S) -> Sqlite<S> {
    let folder = support::Folder::new();
    let store = SqliteStore::open(folder.file()).expect("a new file");
    Sqlite(wrap(store.clone()), store, folder)
}

#[async_trait]
impl<S: Store + Clone> Harness for Sqlite<S> {
    type Store = S;

    fn store(&self) -> &S {
        &self.0
    }

    async fn age(&self, key: &tower_idempotency::ScopedKey, by: Duration) {
        assert!(self.1.age(key, by).await.unwrap(), "not in {}", self.2);
    }
}

store_conformance!(sqlite(|store| store));

mod in_an_arc {
    use super::*;
    store_conformance!(sqlite(|store| Arc::new(store) as Arc<dyn Store>));
}
