//! Every store of the crate, each with what makes a record in it look older.

use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::testing::Harness;
use tower_idempotency::{MemoryStore, ScopedKey, Store, async_trait};

/// A store, whatever it is, and how its records are aged.
pub struct Place {
    pub store: Arc<dyn Store>,
    ages: Box<dyn Ages>,
}

#[async_trait]
pub trait Ages: Send + Sync + 'static {
    async fn age(&self, key: &ScopedKey, by: Duration);
}

impl Place {
    pub fn new(store: impl Store, ages: impl Ages) -> Self {
        Self {
            store: Arc::new(store),
            ages: Box::new(ages),
        }
    }
}

#[async_trait]
impl Harness for Place {
    type Store = Arc<dyn Store>;

    fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        self.ages.age(key, by).await;
    }
}

/// In the process.
pub async fn memory() -> Place {
    let store = MemoryStore::new();
    Place::new(store.clone(), store)
}

#[async_trait]
impl Ages for MemoryStore {
    async fn age(&self, key: &ScopedKey, by: Duration) {
        assert!(Self::age(self, key, by), "no record of {key:?}");
    }
}

/// In the process, sealed, and with a prefix.
#[cfg(feature = "encrypt")]
pub async fn wrapped() -> Place {
    use tower_idempotency::{EncryptedStore, Keyring, PrefixedStore};

    struct Inside(MemoryStore);

    #[async_trait]
    impl Ages for Inside {
        async fn age(&self, key: &ScopedKey, by: Duration) {
            let inside = key.with_namespace(&format!("shop/{}", key.namespace()));
            assert!(self.0.age(&inside, by), "no record of {key:?}");
        }
    }

    let inside = MemoryStore::new();
    let sealed = EncryptedStore::new(inside.clone(), Keyring::new(1, [1; 32]));
    Place::new(PrefixedStore::new(sealed, "shop"), Inside(inside))
}

/// In a file.
#[cfg(feature = "sqlite-system")]
pub async fn sqlite() -> Place {
    use crate::sqlite_file::Folder;
    use tower_idempotency::SqliteStore;

    struct Inside(SqliteStore, Folder);

    #[async_trait]
    impl Ages for Inside {
        async fn age(&self, key: &ScopedKey, by: Duration) {
            let aged = self.0.age(key, by).await.expect("the file is there");
            assert!(aged, "no record of {key:?} in {}", self.1);
        }
    }

    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).expect("a new file");
    Place::new(store.clone(), Inside(store, folder))
}

/// In a schema of its own on a real server.
#[cfg(feature = "postgres")]
pub async fn postgres() -> Place {
    use crate::postgres_server::Fresh;

    let fresh = Fresh::store().await;
    Place::new(fresh.store.clone(), fresh)
}

/// Under a prefix of its own on a real server.
#[cfg(feature = "redis")]
pub async fn redis() -> Place {
    let store = crate::redis_server::store_at(&crate::redis_server::shared_url()).await;
    Place::new(store.clone(), store)
}

#[cfg(feature = "postgres")]
#[async_trait]
impl Ages for crate::postgres_server::Fresh {
    async fn age(&self, key: &ScopedKey, by: Duration) {
        Harness::age(self, key, by).await;
    }
}

#[cfg(feature = "redis")]
#[async_trait]
impl Ages for tower_idempotency::RedisStore {
    async fn age(&self, key: &ScopedKey, by: Duration) {
        let aged = Self::age(self, key, by).await.expect("the server is there");
        assert!(aged, "no record of {key:?}");
    }
}

/// Makes a test of each of these functions over each store.
macro_rules! over_every_store {
    ($($test:ident)*) => {
        over_every_store!(@ memory: $($test)*);
        #[cfg(feature = "encrypt")]
        over_every_store!(@ wrapped: $($test)*);
        #[cfg(feature = "sqlite-system")]
        over_every_store!(@ sqlite: $($test)*);
        #[cfg(feature = "postgres")]
        over_every_store!(@ postgres: $($test)*);
        #[cfg(feature = "redis")]
        over_every_store!(@ redis: $($test)*);
    };
    (@ $place:ident: $($test:ident)*) => {
        mod $place {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let place = crate::places::$place().await;
                    crate::patience::patient(stringify!($test), super::$test(&place)).await;
                }
            )*
        }
    };
}
pub(crate) use over_every_store;
