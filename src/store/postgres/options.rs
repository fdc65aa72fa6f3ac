//! What can be set about the store.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::{StoreError, StoreErrorKind};

use super::PostgresStore;
use super::client::{Client, Prepared};
use super::names::{DEFAULT_TABLE, Names};
use super::tls::Target;

/// Settings of a [`PostgresStore`]; made by [`PostgresStore::options`].
///
/// ```no_run
/// # async fn connect() -> Result<(), tower_idempotency::StoreError> {
/// use tower_idempotency::PostgresStore;
///
/// let store = PostgresStore::options()
///     .schema("payments")
///     .table("request_keys")
///     .pool_size(8)
///     .connect("postgres://payments@db.internal/shop?sslmode=require")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings do nothing until they are given a URL or a pool"]
pub struct PostgresOptions {
    schema: Option<String>,
    table: String,
    pool_size: usize,
    time_limit: Duration,
    prepared_statements: PreparedStatements,
}

/// Whether statements are prepared on the server: then it plans each of them once per connection
/// instead of once per call, which is most of the work of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PreparedStatements {
    /// On connections that lead straight to one server process. Behind a pooler (PgBouncer, a
    /// proxy of a cloud) they are not prepared. The store tells one from the other by the process
    /// id that the other end gave when the connection was made.
    #[default]
    WhereDirect,
    /// Always. Behind a pooler that shares server processes between clients this needs one that
    /// keeps their statements apart, such as PgBouncer 1.21 with `max_prepared_statements` set.
    /// Behind any other one a move may fail, or run another client's statement.
    Always,
    /// Never.
    Never,
}

impl PostgresOptions {
    pub(super) fn new() -> Self {
        Self {
            schema: None,
            table: DEFAULT_TABLE.to_owned(),
            pool_size: POOL_SIZE,
            time_limit: TIME_LIMIT,
            prepared_statements: PreparedStatements::default(),
        }
    }

    /// The schema of the tables. Default: the first one of the connection's `search_path`.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = Some(name.into());
        self
    }

    /// The table of records; the one that says which migrations were applied is named after it, with
    /// `_schema` at its end. Default: `idempotency_keys`. The names are case-sensitive.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// How many connections [`connect`](Self::connect) opens at most. Default: 8.
    ///
    /// A call holds one for as long as its statement runs, and a request holds none while its
    /// handler runs.
    pub fn pool_size(mut self, connections: usize) -> Self {
        self.pool_size = connections;
        self
    }

    /// How long one call may take, waiting for a connection included. Default: 3 s.
    ///
    /// After that the statement is cancelled and the call fails with
    /// [`StoreErrorKind::Unavailable`]. Let it be less than the engine's own limit for store calls,
    /// so that there is time to ask again.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// Whether statements are prepared. Default: [`PreparedStatements::WhereDirect`].
    pub fn prepared_statements(mut self, prepared: PreparedStatements) -> Self {
        self.prepared_statements = prepared;
        self
    }

    /// Connects to the server that a URL names; see [`PostgresStore::connect`].
    ///
    /// # Errors
    ///
    /// As [`PostgresStore::connect`]; also `Other` for a name that cannot be a table's or a schema's,
    /// and for a pool of no connections.
    pub async fn connect(self, url: &str) -> Result<PostgresStore, StoreError> {
        let names = Names::new(self.schema.as_deref(), &self.table)?;
        let target = Target::read(url)?;
        if self.pool_size == 0 {
            let message = "`pool_size` is 0: the store needs at least one connection";
            return Err(StoreError::new(StoreErrorKind::Other, message));
        }
        let recycling = ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        };
        let manager = Manager::from_config(target.config, target.tls.clone(), recycling);
        let pool = Pool::builder(manager).max_size(self.pool_size).build();
        let pool = pool.map_err(|error| {
            StoreError::new(StoreErrorKind::Other, "the pool cannot be built").with_source(error)
        })?;
        let store = self.in_pool(names, pool, Some(target.tls));
        store.reach().await?;
        Ok(store)
    }

    /// Uses a pool of the application. Nothing is asked of the server yet.
    ///
    /// # Errors
    ///
    /// `Other` for a name that cannot be a table's or a schema's.
    pub fn from_pool(self, pool: Pool) -> Result<PostgresStore, StoreError> {
        let names = Names::new(self.schema.as_deref(), &self.table)?;
        Ok(self.in_pool(names, pool, None))
    }

    pub(super) fn in_pool(
        self,
        names: Names,
        pool: Pool,
        tls: Option<MakeRustlsConnect>,
    ) -> PostgresStore {
        let client = Client {
            pool,
            tls,
            prepared: Prepared::new(self.prepared_statements),
            limit: self.time_limit,
        };
        PostgresStore::new(names, client)
    }
}

const POOL_SIZE: usize = 8;
const TIME_LIMIT: Duration = Duration::from_secs(3);
