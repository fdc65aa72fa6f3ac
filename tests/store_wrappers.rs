//! Whatever is put round a store keeps the store contract.

#[cfg(all(feature = "encrypt", feature = "postgres"))]
#[path = "support/postgres.rs"]
mod postgres;
#[cfg(all(feature = "encrypt", feature = "redis"))]
#[path = "support/redis.rs"]
mod redis_server;
#[cfg(all(feature = "encrypt", feature = "sqlite-system"))]
#[path = "support/sqlite.rs"]
mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tower_idempotency::testing::{Calls, Fault, FaultyStore, Harness, Move};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Fenced, Fingerprint, IdempotencyKey, MemoryStore, Outcome,
    PrefixedStore, Record, Resolution, ScopedKey, Store, async_trait, store_conformance,
};
#[cfg(feature = "encrypt")]
use tower_idempotency::{EncryptedStore, Keyring};

/// A wrapped store, and the one inside that knows how to age a record.
struct Wrapped<S> {
    inside: MemoryStore,
    wrapped: S,
    /// The prefix that the wrapper puts before namespaces.
    prefix: &'static str,
}

impl<S> Wrapped<S> {
    fn by(wrap: impl FnOnce(MemoryStore) -> S) -> Self {
        Self::with_prefix("", wrap)
    }

    fn with_prefix(prefix: &'static str, wrap: impl FnOnce(MemoryStore) -> S) -> Self {
        let inside = MemoryStore::new();
        let wrapped = wrap(inside.clone());
        Self {
            inside,
            wrapped,
            prefix,
        }
    }
}

#[async_trait]
impl<S: Store + Clone> Harness for Wrapped<S> {
    type Store = S;

    fn store(&self) -> &S {
        &self.wrapped
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        let inside = key.with_namespace(&format!("{}{}", self.prefix, key.namespace()));
        assert!(self.inside.age(&inside, by), "no record of {key:?}");
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

mod with_a_prefix_beside_another_service {
    use super::*;
    store_conformance!({
        let harness = Wrapped::with_prefix("shop/", |store| PrefixedStore::new(store, "shop"));
        settle_a_neighbour(&harness.inside).await;
        harness
    });
}

#[cfg(feature = "encrypt")]
mod encrypted {
    use super::*;
    store_conformance!(Wrapped::by(sealed));
}

#[cfg(feature = "encrypt")]
mod encrypted_with_a_prefix_in_an_arc {
    use super::*;
    store_conformance!(Wrapped::with_prefix("shop/", |store| {
        Arc::new(PrefixedStore::new(sealed(store), "shop")) as Arc<dyn Store>
    }));
}

/// The same round the stores that a service would put it round.
#[cfg(all(feature = "encrypt", feature = "sqlite-system"))]
mod over_sqlite {
    use super::over::{Ages, Over};
    use super::*;
    use tower_idempotency::SqliteStore;

    struct Inside(SqliteStore, sqlite::Folder);

    #[async_trait]
    impl Ages for Inside {
        async fn age(&self, key: &ScopedKey, by: Duration) {
            assert!(self.0.age(key, by).await.unwrap(), "not in {}", self.1);
        }
    }

    store_conformance!({
        let folder = sqlite::Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        Over::new(store.clone(), Inside(store, folder))
    });
}

#[cfg(all(feature = "encrypt", feature = "postgres"))]
mod over_postgres {
    use super::over::{Ages, Over};
    use super::*;

    #[async_trait]
    impl Ages for postgres::Fresh {
        async fn age(&self, key: &ScopedKey, by: Duration) {
            Harness::age(self, key, by).await;
        }
    }

    store_conformance!({
        let fresh = postgres::Fresh::store().await;
        Over::new(fresh.store.clone(), fresh)
    });
}

#[cfg(all(feature = "encrypt", feature = "redis"))]
mod over_redis {
    use super::over::{Ages, Over};
    use super::*;
    use tower_idempotency::RedisStore;

    #[async_trait]
    impl Ages for RedisStore {
        async fn age(&self, key: &ScopedKey, by: Duration) {
            assert!(
                RedisStore::age(self, key, by).await.unwrap(),
                "no record of {key:?}"
            );
        }
    }

    store_conformance!({
        let store = redis_server::store_at(&redis_server::shared_url()).await;
        Over::new(store.clone(), store)
    });
}

#[cfg(all(
    feature = "encrypt",
    any(feature = "postgres", feature = "redis", feature = "sqlite-system")
))]
mod over {
    use super::*;

    /// An encrypted store with a prefix in an `Arc`, and what ages a record inside of it.
    pub struct Over<I> {
        wrapped: Arc<dyn Store>,
        inside: I,
    }

    #[async_trait]
    pub trait Ages {
        async fn age(&self, key: &ScopedKey, by: Duration);
    }

    impl<I> Over<I> {
        pub fn new(store: impl Store, inside: I) -> Self {
            let wrapped = Arc::new(PrefixedStore::new(sealed(store), "shop"));
            Self { wrapped, inside }
        }
    }

    #[async_trait]
    impl<I: Ages + Send + Sync + 'static> Harness for Over<I> {
        type Store = Arc<dyn Store>;

        fn store(&self) -> &Arc<dyn Store> {
            &self.wrapped
        }

        async fn age(&self, key: &ScopedKey, by: Duration) {
            let inside = key.with_namespace(&format!("shop/{}", key.namespace()));
            self.inside.age(&inside, by).await;
        }
    }
}

#[cfg(feature = "encrypt")]
fn sealed<S>(store: S) -> EncryptedStore<S> {
    EncryptedStore::new(store, Keyring::new(1, [1; 32]))
}

/// Unexpired records of another service in every state: what this one must not see.
async fn settle_a_neighbour(inside: &MemoryStore) {
    let store = PrefixedStore::new(inside.clone(), "shop2");
    for (n, namespace) in ["conformance", "http", ""].into_iter().enumerate() {
        let key = |state: &str| key(namespace, &format!("{state}-{n}"));
        let _ = acquire(&store, &key("live")).await;
        let stalled = acquire(&store, &key("abandoned")).await;
        assert_eq!(store.abandon(&stalled).await.unwrap(), Fenced::Applied);
        let done = acquire(&store, &key("completed")).await;
        let outcome = Outcome::value(b"paid");
        let _ = store.complete(&done, &outcome, None).await.unwrap();
        let free = acquire(&store, &key("released")).await;
        assert_eq!(store.release(&free).await.unwrap(), Fenced::Applied);
    }
}

#[tokio::test]
async fn two_prefixes_do_not_see_each_other() {
    let inside = MemoryStore::new();
    let shop = PrefixedStore::new(inside.clone(), "shop");
    let billing = PrefixedStore::new(inside.clone(), "billing");
    let key = key("http", "order-1");
    let claim = acquire(&shop, &key).await;
    let _ = shop
        .complete(&claim, &Outcome::value(b"shop"), None)
        .await
        .unwrap();

    assert_eq!(billing.lookup(&key).await.unwrap(), None);
    assert!(!billing.remove(&key).await.unwrap());
    assert_eq!(billing.erase("", key.scope(), 10).await.unwrap(), 0);
    assert_eq!(acquire(&billing, &key).await.attempt(), 1);
    assert!(billing.remove(&key).await.unwrap());
    assert!(shop.lookup(&key).await.unwrap().is_some());
    assert_eq!(inside.lookup(&key).await.unwrap(), None);
    let filed = inside.lookup(&shop.inner_key(&key)).await.unwrap().unwrap();
    assert_eq!(filed.key.namespace(), "shop/http");
    assert_eq!(shop.erase("web", key.scope(), 10).await.unwrap(), 0);
    assert_eq!(shop.erase("ht", key.scope(), 10).await.unwrap(), 1);
    assert!(inside.is_empty());
}

#[tokio::test]
async fn a_walk_shows_own_abandoned_records_under_their_own_keys() {
    let inside = MemoryStore::new();
    let shop = PrefixedStore::new(inside.clone(), "shop");
    // Alike in all but where the prefix ends.
    let others =
        ["", "shop2", "sho", "shop/x"].map(|prefix| PrefixedStore::new(inside.clone(), prefix));
    for n in 0..5 {
        let key = key("p/http", &format!("order-{n}"));
        for store in [&shop].into_iter().chain(&others) {
            let claim = acquire(store, &key).await;
            assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        }
    }
    let walked = walk(&shop, 3).await;
    let mut keys: Vec<_> = walked.iter().map(|record| record.key.key()).collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        ["order-0", "order-1", "order-2", "order-3", "order-4"]
    );
    for record in walked {
        assert_eq!(record.key.namespace(), "p/http");
        let resolved = shop.resolve(&record, &Resolution::Released).await;
        assert_eq!(resolved.unwrap(), Fenced::Applied);
    }
    assert_eq!(walk(&shop, 3).await, []);
    assert_eq!(walk(&others[1], 3).await.len(), 5);
}

/// However many records of others lie between two own ones.
#[tokio::test]
async fn a_page_asks_the_store_inside_for_one_page() {
    let inside = FaultyStore::new(MemoryStore::new());
    let other = PrefixedStore::new(inside.clone(), "other");
    for n in 0..50 {
        let claim = acquire(&other, &key("http", &n.to_string())).await;
        assert_eq!(other.abandon(&claim).await.unwrap(), Fenced::Applied);
    }
    let shop = PrefixedStore::new(inside.clone(), "shop");
    let page = shop.abandoned(None, 10).await.unwrap();
    assert!(page.records.is_empty());
    assert!(page.next.is_some(), "a short page is not the last one");
    assert_eq!(inside.calls(Move::Abandoned), 1);
}

#[tokio::test]
async fn one_service_purges_for_all() {
    let inside = MemoryStore::new();
    let shop = PrefixedStore::new(inside.clone(), "shop");
    let billing = PrefixedStore::new(inside.clone(), "billing");
    let key = key("http", "order-1");
    let _ = acquire(&shop, &key).await;
    assert!(inside.age(&shop.inner_key(&key), Duration::from_secs(7 * 24 * 60 * 60)));
    let purged = billing.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (1, 1));
}

#[tokio::test]
async fn an_error_of_the_store_inside_comes_through() {
    let inside = FaultyStore::new(MemoryStore::new());
    let shop = PrefixedStore::new(inside.clone(), "shop");
    inside.inject(Move::Claim, Calls::Every, Fault::Fail);
    let request = ClaimRequest::new(key("http", "order-1"), Fingerprint::of(&[]));
    assert!(shop.claim(&request).await.unwrap_err().is_transient());
}

proptest! {
    #[test]
    fn prefixed_keys_are_equal_exactly_when_prefix_and_namespace_are(
        left in ("[ab/%]{0,3}", "[ab/%]{0,3}"),
        right in ("[ab/%2F]{0,4}", "[ab/%]{0,3}"),
    ) {
        let filed = |(prefix, namespace): &(String, String)| {
            let store = PrefixedStore::new(MemoryStore::new(), prefix);
            store.inner_key(&key(namespace, "k"))
        };
        prop_assert_eq!(left == right, filed(&left) == filed(&right));
    }
}

async fn walk(store: &impl Store, limit: usize) -> Vec<Record> {
    let mut records = Vec::new();
    let mut after = None;
    loop {
        let page = store.abandoned(after.as_ref(), limit).await.unwrap();
        records.extend(page.records);
        after = page.next;
        if after.is_none() {
            return records;
        }
    }
}

async fn acquire(store: &impl Store, key: &ScopedKey) -> Claim {
    let request = ClaimRequest::new(key.clone(), Fingerprint::of(&[b"pay"]));
    match store.claim(&request).await.unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("the key is taken: {record:?}"),
    }
}

fn key(namespace: &str, key: &str) -> ScopedKey {
    IdempotencyKey::new(key).unwrap().scoped(namespace)
}
