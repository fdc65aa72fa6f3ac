//! What the two databases have in common: a table of the application's own, beside the store's.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use http::{HeaderMap, HeaderValue, StatusCode};
use rusqlite::{Connection, TransactionBehavior};
use tokio_postgres::NoTls;
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    Attempt, Idempotency, Outcome, PostgresRecording, PostgresStore, RecordingError, ScopedKey,
    SqliteRecording, SqliteStore, Transactional,
};

use crate::postgres::{Fresh, shared};
use crate::sqlite::Folder;

pub trait Database: Send + Sync + 'static {
    type Store: Transactional<Recording = Self::Recording> + Clone;
    type Recording: Send + 'static;

    fn new() -> impl Future<Output = Self> + Send;

    fn store(&self) -> &Self::Store;

    /// What a child needs to open the same database.
    fn address(&self) -> String;

    fn age(&self, key: &ScopedKey, by: Duration) -> impl Future<Output = ()> + Send;

    /// A handler's way to its own rows.
    fn till(&self) -> impl Till<Recording = Self::Recording>;

    fn charges(&self) -> impl Future<Output = i64> + Send;
}

/// Where the application keeps its charges, on connections of its own.
pub trait Till: Clone + Send + Sync + 'static {
    type Recording;

    /// A row and the outcome in one transaction. `at` hears of `rows`, `recorded` and `committed`.
    fn charge<S>(
        &self,
        idempotency: &Idempotency<S>,
        attempt: &Attempt,
        outcome: Outcome,
        at: impl Fn(&str) + Send + Sync + 'static,
    ) -> impl Future<Output = Result<(), RecordingError>> + Send
    where
        S: Transactional<Recording = Self::Recording>;
}

pub struct Postgres(pub Fresh);

#[derive(Clone)]
pub struct PostgresTill {
    pub pool: Pool,
    pub schema: String,
}

impl Postgres {
    /// On whatever the URL leads to.
    pub async fn at(url: &str) -> Self {
        Self::of(Fresh::with(url, |options| options).await).await
    }

    /// Beside this store.
    pub async fn of(fresh: Fresh) -> Self {
        let table = format!("CREATE TABLE {}.charges (amount integer)", fresh.schema);
        fresh.raw.batch_execute(&table).await.unwrap();
        Self(fresh)
    }
}

impl Database for Postgres {
    type Store = PostgresStore;
    type Recording = PostgresRecording;

    async fn new() -> Self {
        Self::at(shared().url()).await
    }

    fn store(&self) -> &PostgresStore {
        &self.0.store
    }

    fn address(&self) -> String {
        format!("{} {}", shared().url(), self.0.schema)
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        Harness::age(&self.0, key, by).await;
    }

    fn till(&self) -> impl Till<Recording = PostgresRecording> {
        PostgresTill::new(shared().url(), &self.0.schema, 8)
    }

    async fn charges(&self) -> i64 {
        let count = format!("SELECT count(*) FROM {}.charges", self.0.schema);
        self.0.raw.query_one(&count, &[]).await.unwrap().get(0)
    }
}

impl PostgresTill {
    pub fn new(url: &str, schema: &str, connections: usize) -> Self {
        let manager = Manager::new(url.parse().unwrap(), NoTls);
        let pool = Pool::builder(manager).max_size(connections);
        Self {
            pool: pool.build().unwrap(),
            schema: schema.to_owned(),
        }
    }

    pub fn insert(&self) -> String {
        format!("INSERT INTO {}.charges VALUES (1000)", self.schema)
    }
}

impl Till for PostgresTill {
    type Recording = PostgresRecording;

    async fn charge<S>(
        &self,
        idempotency: &Idempotency<S>,
        attempt: &Attempt,
        outcome: Outcome,
        at: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<(), RecordingError>
    where
        S: Transactional<Recording = PostgresRecording>,
    {
        let mut client = self.pool.get().await.unwrap();
        let transaction = client.transaction().await.unwrap();
        transaction.batch_execute(&self.insert()).await.unwrap();
        at("rows");
        let recording = idempotency.recording(attempt, &outcome)?;
        recording.complete_in(&transaction).await?;
        at("recorded");
        transaction.commit().await.unwrap();
        at("committed");
        Ok(())
    }
}

pub struct Sqlite {
    store: SqliteStore,
    folder: Arc<Folder>,
}

#[derive(Clone)]
pub struct SqliteTill(pub PathBuf);

impl Sqlite {
    pub fn file(&self) -> PathBuf {
        self.folder.file()
    }
}

impl Database for Sqlite {
    type Store = SqliteStore;
    type Recording = SqliteRecording;

    async fn new() -> Self {
        let folder = Arc::new(Folder::new());
        let store = SqliteStore::open(folder.file()).unwrap();
        let table = "CREATE TABLE charges (amount INTEGER)";
        let connection = Connection::open(folder.file()).unwrap();
        connection.execute_batch(table).unwrap();
        Self { store, folder }
    }

    fn store(&self) -> &SqliteStore {
        &self.store
    }

    fn address(&self) -> String {
        self.file().display().to_string()
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        assert!(self.store.age(key, by).await.unwrap());
    }

    fn till(&self) -> impl Till<Recording = SqliteRecording> {
        SqliteTill(self.file())
    }

    async fn charges(&self) -> i64 {
        let connection = Connection::open(self.file()).unwrap();
        let count = "SELECT count(*) FROM charges";
        connection.query_row(count, [], |row| row.get(0)).unwrap()
    }
}

impl Till for SqliteTill {
    type Recording = SqliteRecording;

    async fn charge<S>(
        &self,
        idempotency: &Idempotency<S>,
        attempt: &Attempt,
        outcome: Outcome,
        at: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<(), RecordingError>
    where
        S: Transactional<Recording = SqliteRecording>,
    {
        let recording = idempotency.recording(attempt, &outcome)?;
        let file = self.0.clone();
        let charged = tokio::task::spawn_blocking(move || {
            let mut connection = Connection::open(file).unwrap();
            let behavior = TransactionBehavior::Immediate;
            let transaction = connection.transaction_with_behavior(behavior).unwrap();
            let insert = "INSERT INTO charges VALUES (1000)";
            transaction.execute_batch(insert).unwrap();
            at("rows");
            recording.complete_in(&transaction)?;
            at("recorded");
            transaction.commit().unwrap();
            at("committed");
            Ok(())
        });
        match charged.await {
            Ok(charged) => charged,
            Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
        }
    }
}

/// What a child was told by [`Database::address`].
pub async fn at_address(address: &str) -> Either {
    match address.split_once(' ') {
        Some((url, schema)) => {
            let store = PostgresStore::options().schema(schema);
            let store = store.connect(url).await.unwrap();
            Either::Postgres(store, PostgresTill::new(url, schema, 8))
        }
        None => {
            let store = SqliteStore::open(address).unwrap();
            Either::Sqlite(store, SqliteTill(Path::new(address).to_owned()))
        }
    }
}

pub enum Either {
    Postgres(PostgresStore, PostgresTill),
    Sqlite(SqliteStore, SqliteTill),
}

/// An answer with a header, as an application makes it.
pub fn charged(text: &str) -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("text/plain"));
    Outcome::response(StatusCode::CREATED, &headers, &[text.as_bytes()], None)
}
