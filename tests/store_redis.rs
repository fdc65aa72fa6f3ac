//! The Redis store keeps the store contract, on one server and on a cluster.

#[path = "support/redis.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::testing::Harness;
use tower_idempotency::{RedisStore, ScopedKey, Store, async_trait, store_conformance};

struct Redis<S>(S, RedisStore);

async fn redis<S>(url: &str, wrap: impl FnOnce(RedisStore) -> S) -> Redis<S> {
    let store = support::store_at(url).await;
    Redis(wrap(store.clone()), store)
}

#[async_trait]
impl<S: Store + Clone> Harness for Redis<S> {
    type Store = S;

    fn store(&self) -> &S {
        &self.0
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        assert!(self.1.age(key, by).await.unwrap(), "no record of {key:?}");
    }
}

store_conformance!(redis(&support::shared_url(), |store| store).await);

mod in_an_arc {
    use super::*;
    store_conformance!(redis(&support::shared_url(), |s| Arc::new(s) as Arc<dyn Store>).await);
}

mod on_a_cluster {
    use super::*;
    store_conformance!(redis(&support::shared_cluster().url(), |store| store).await);
}
