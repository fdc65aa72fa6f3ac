//! Records in PostgreSQL.

mod claiming;
mod client;
mod direct;
mod error;
mod moves;
mod names;
mod one_commit;
mod options;
mod recording;
mod row;
mod schema;
mod seen;
mod sql;
mod text;
mod time;
mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use deadpool_postgres::Pool;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::watchers::Watchers;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};

use self::client::{Client, Parameter};
pub use self::error::PostgresSchemaError;
use self::names::Names;
pub use self::one_commit::{PostgresConnection, PostgresOneCommit, PostgresTransaction};
pub use self::options::{PostgresOptions, PreparedStatements};
pub use self::recording::PostgresRecording;
use self::seen::Seen;
use self::sql::{Statement, Statements};

/// Remembers keys in PostgreSQL, 12 or newer: durable, and shared by every process that uses the
/// same table.
///
/// Clones share one pool.
///
/// # Example
///
/// ```no_run
/// # async fn start() -> Result<(), tower_idempotency::StoreError> {
/// use tower_idempotency::PostgresStore;
///
/// let url = "postgres://shop:secret@db.internal/shop?sslmode=require";
/// let store = PostgresStore::connect(url).await?;
/// // Every instance may do so at its start; or run the files of migrations/postgres by hand.
/// store.migrate().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Cost
///
/// A first request takes two round trips and two small transactions, the claim and the completion.
/// A replay, a duplicate in flight and a mismatch take one round trip and only read: they write no
/// row version and nothing to the write-ahead log. A claim takes a second round trip where it lost a
/// race, and where the key was released, is expired, is taken over, or is asked for again by its
/// owner. No connection is held while a handler runs.
///
/// For a key that this process has met lately the claim reads before it tries to insert, which costs
/// the server half as much; if the record is gone since, that is a round trip more.
///
/// # Transactions
///
/// Every move is one statement in a transaction of its own, and right under each
/// `default_transaction_isolation`. It takes no lock of a session, listens to nothing and keeps
/// nothing in temporary tables, so that it works through a pooler in transaction mode;
/// [`PreparedStatements`] says what is done about prepared statements.
///
/// While another transaction inserts the same key and neither commits nor rolls back, a claim waits
/// for it, up to the [time limit](PostgresOptions::time_limit).
///
/// # Rows
///
/// Namespace, scope, key, state, status, attempt and times are columns of their own, for people.
/// Outcomes are bytes, with a checksum: a row whose bytes were changed, or that belongs to another
/// key, reads as [`Corrupt`](crate::StoreErrorKind::Corrupt) and is left where it is. Only
/// [`abandoned`](Store::abandoned) passes over such rows.
///
/// Fingerprint, owner and attempt are under another checksum; *times are under none*. The server makes
/// them, after the caller has made its sums, and later moves set them anew. A bit of `expires_at` or
/// `lease_until` that turns on a disk could end a kept result or a lease too early: run the server with
/// `data_checksums`, which finds every damaged page (the default of PostgreSQL 18 and of most hosts;
/// `pg_checksums --enable` for others).
///
/// # Waiting
///
/// [`changed`](Store::changed) looks again and again, up to twice a second, with jitter and without a
/// connection in between. What this process changes wakes its waiters at once.
///
/// # Logs
///
/// The driver logs the parameters of statements, keys and scopes among them, at its level `debug`:
/// leave the target `tokio_postgres` above that where they are personal data.
///
/// # Purging
///
/// Nothing is removed unless [`purge`](Store::purge) is called: every few minutes, by one process or
/// by all of them. Rows go in batches of 1,000, each in a transaction of its own.
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    names: Names,
    client: Client,
    statements: Statements,
    watchers: Watchers<[u8; 32]>,
    seen: Seen,
    checked: OnceCell<()>,
}

impl PostgresStore {
    /// Connects to the server that a URL names, with the default settings.
    ///
    /// The URL is one of tokio-postgres: `postgres://user:password@host:port/database?option=value`.
    /// TLS is used as its `sslmode` says: `disable`, `prefer` (the default: if the server offers it)
    /// or `require`. Where it is used, the server's certificate and its name are always verified:
    /// against the file that `sslrootcert` names, or else against the roots of the operating system.
    /// `verify-ca` and `verify-full` therefore mean `require`.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable) if the server does not answer within the
    /// time limit. [`Other`](crate::StoreErrorKind::Other) if the URL cannot be read, if the server
    /// refuses the user, if TLS cannot be agreed on, or if the server is too old or its database is
    /// not in UTF-8. No error shows the password.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Uses a pool of the application, with the default settings.
    ///
    /// The store takes a connection for each of its statements, so that it competes with whatever
    /// else the pool is for; a limit for waiting that is set on the pool holds as well as the
    /// store's own. Statements that take too long are abandoned with their connection, but not
    /// cancelled on the server, because a pool keeps to itself how it connects.
    pub fn from_pool(pool: Pool) -> Self {
        Self::options().in_pool(Names::default(), pool, None)
    }

    /// Settings, for a store that is not the default one.
    pub fn options() -> PostgresOptions {
        PostgresOptions::new()
    }

    /// Makes the tables, or brings them up to date. Many instances may do so at once; where nothing
    /// is missing, only SELECT is needed.
    ///
    /// The statements are those of the folder migrations/postgres, with the names that were set. A
    /// schema that was set is made if it is missing.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check), and [`Other`](crate::StoreErrorKind::Other) if the user may not
    /// make tables.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let inner = &*self.inner;
        schema::migrate(&inner.client, &inner.statements, &inner.names).await?;
        let _ = inner.checked.set(());
        Ok(())
    }

    /// Whether the server can be reached and the tables are those that this release works with. The
    /// first move does the same.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable) if the server does not answer in time;
    /// [`Other`](crate::StoreErrorKind::Other) with a [`PostgresSchemaError`] as its source if
    /// the tables are missing, older, too new or somebody else's.
    pub async fn check(&self) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let deadline = inner.client.deadline();
        schema::check(&inner.client, &inner.statements, deadline).await?;
        let _ = inner.checked.set(());
        Ok(())
    }

    fn new(names: Names, client: Client) -> Self {
        let statements = Statements::new(&names);
        Self {
            inner: Arc::new(Inner {
                names,
                client,
                statements,
                watchers: Watchers::default(),
                seen: Seen::default(),
                checked: OnceCell::new(),
            }),
        }
    }

    /// Whether the server can be reached at all.
    async fn reach(&self) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let deadline = inner.client.deadline();
        schema::check_server(&inner.client, &inner.statements, deadline).await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("table", &self.inner.names.table())
            .field("pool", &self.inner.client.pool.status())
            .finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for PostgresStore {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("postgres", true, true)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.inner.claim(request).await
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.inner.renew(claim, lease).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        self.inner.complete(claim, outcome, retention).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.release(claim).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.abandon(claim).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        self.inner.annotate(claim, correlation).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        self.inner.checkpoint(claim, name, data).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.inner.abandoned(after, limit).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        self.inner.resolve(record, resolution).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        self.inner.lookup(key).await
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.remove(key).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.inner.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.inner.changed(&key.digest(), seen, max).await
    }
}

impl Inner {
    /// When the call that begins now has to be over. The first one also checks the tables.
    async fn begin(&self) -> Result<Instant, StoreError> {
        let deadline = self.client.deadline();
        if !self.checked.initialized() {
            let check = || schema::check(&self.client, &self.statements, deadline);
            // One call checks and the others wait for it, each as long as it may.
            let checked = timeout_at(deadline, self.checked.get_or_try_init(check)).await;
            checked.map_err(|_| self.client.too_slow())??;
        }
        Ok(deadline)
    }

    /// The row that a statement returns for this record and these other parameters.
    async fn row(
        &self,
        statement: &Statement,
        digest: &[u8; 32],
        others: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Option<Row>, StoreError> {
        let digest = &digest[..];
        let first: Parameter<'_> = &digest;
        let parameters: Vec<Parameter<'_>> = std::iter::once(first)
            .chain(others.iter().copied())
            .collect();
        self.client.row(statement, &parameters, deadline).await
    }
}
