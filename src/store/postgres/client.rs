//! Runs one statement: on a connection of the pool, within the time limit, again where that is safe
//! and helps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_postgres::{ClientWrapper, Object, Pool, PoolError};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::StoreError;

use super::direct::told_process_id;
use super::error::{Remedy, failed, no_connection, pool_exhausted, too_slow};
use super::options::PreparedStatements;
use super::sql::Statement;

pub(super) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// The pool, and how statements are run on its connections.
pub(super) struct Client {
    pub(super) pool: Pool,
    /// To cancel statements that nobody waits for any more; a pool of the application's own keeps
    /// its connector to itself.
    pub(super) tls: Option<MakeRustlsConnect>,
    pub(super) prepared: Prepared,
    pub(super) limit: Duration,
}

/// How one call goes on after a failure.
#[derive(Clone, Copy, Default)]
struct Tries {
    lost: u32,
    reconnected: u32,
    unprepared: bool,
}

impl Client {
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    pub(super) fn too_slow(&self) -> StoreError {
        too_slow(self.limit)
    }

    /// The rows that a statement returns.
    ///
    /// Every statement of the store may be repeated, so that one whose reply was lost with its
    /// connection, or that lost against another transaction, is tried again here.
    pub(super) async fn rows(
        &self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, StoreError> {
        self.rows_after(Tries::default(), statement, parameters, deadline)
            .await
    }

    /// The same for a statement whose answer counts even where its repetition does no harm: it is not
    /// tried again once it may have been applied.
    pub(super) async fn rows_or_error(
        &self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, StoreError> {
        let tries = Tries {
            reconnected: MOST_RECONNECTIONS,
            ..Tries::default()
        };
        self.rows_after(tries, statement, parameters, deadline)
            .await
    }

    async fn rows_after(
        &self,
        mut tries: Tries,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, StoreError> {
        loop {
            let mut lent = self.lend(deadline).await?;
            lent.end = End::Cancel;
            let running = self.run(lent.client(), statement, parameters, tries);
            let Ok(result) = timeout_at(deadline, running).await else {
                return Err(self.too_slow());
            };
            let error = match result {
                Ok(rows) => {
                    lent.end = End::Return;
                    return Ok(rows);
                }
                Err(error) => error,
            };
            let remedy = Remedy::of(&error);
            lent.end = match remedy {
                Remedy::Reconnect | Remedy::Elsewhere => End::Close,
                // After anything but an error of the server itself, nobody knows what comes next on
                // this connection.
                _ if error.code().is_none() => End::Close,
                _ => End::Return,
            };
            match remedy {
                Remedy::Isolate if tries.lost < MOST_LOSSES => {
                    tries.lost += 1;
                    drop(lent);
                    sleep(PAUSE.mul_f64(rand::random::<f64>() * f64::from(tries.lost))).await;
                }
                Remedy::Unprepared if !tries.unprepared => {
                    tries.unprepared = true;
                    let Statement { text, types } = statement;
                    lent.client().statement_cache.remove(text, types);
                }
                Remedy::Reconnect if tries.reconnected < MOST_RECONNECTIONS => {
                    tries.reconnected += 1;
                }
                _ => return Err(failed(error)),
            }
        }
    }

    /// The only row, or none.
    pub(super) async fn row(
        &self,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Option<Row>, StoreError> {
        let rows = self.rows(statement, parameters, deadline).await?;
        Ok(rows.into_iter().next())
    }

    /// A connection, which goes back to the pool unless it is busy when it is dropped.
    pub(super) async fn lend(&self, deadline: Instant) -> Result<Lent, StoreError> {
        match timeout_at(deadline, self.get()).await {
            Ok(Some(Ok(client))) => Ok(Lent {
                client: Some(client),
                tls: self.tls.clone(),
                end: End::Return,
            }),
            Ok(Some(Err(error))) => Err(no_connection(error)),
            Ok(None) | Err(_) => Err(pool_exhausted(self.limit)),
        }
    }

    /// Where no connection is idle, one may have to be made, and that is done to its end whoever gives
    /// up meanwhile: if every call began anew, a server that is slow to accept would be flooded with
    /// connections that nobody wants any more, and never catch up.
    async fn get(&self) -> Option<Result<Object, PoolError>> {
        match Handle::try_current() {
            Ok(runtime) if self.pool.status().available == 0 => {
                let (pool, limit) = (self.pool.clone(), MOST_LIMITS * self.limit);
                let getting = runtime.spawn(async move { timeout(limit, pool.get()).await.ok() });
                getting.await.ok().flatten()
            }
            _ => Some(self.pool.get().await),
        }
    }

    /// Finds out whether a pooler stands between, where that matters.
    pub(super) async fn examine(&self, deadline: Instant) -> Result<(), StoreError> {
        let lent = self.lend(deadline).await?.closed_unless_returned();
        match timeout_at(deadline, self.prepared.examine(lent.client())).await {
            Ok(Ok(())) => {
                lent.give_back();
                Ok(())
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(self.too_slow()),
        }
    }

    async fn run(
        &self,
        client: &ClientWrapper,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        tries: Tries,
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        if tries.lost == 0 {
            return self.ask(client, statement, parameters, tries).await;
        }
        // What lost under the default isolation level cannot lose under this one, where a statement
        // that waited for another transaction goes on with what that one left.
        client
            .batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            .await?;
        match self.ask(client, statement, parameters, tries).await {
            Ok(rows) => client.batch_execute("COMMIT").await.map(|()| rows),
            Err(error) => {
                if error.code().is_some() {
                    client.batch_execute("ROLLBACK").await?;
                }
                Err(error)
            }
        }
    }

    async fn ask(
        &self,
        client: &ClientWrapper,
        statement: &Statement,
        parameters: &[Parameter<'_>],
        tries: Tries,
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        if !tries.unprepared && self.prepared.on(client).await? {
            let Statement { text, types } = statement;
            let prepared = client.prepare_typed_cached(text, types).await?;
            return client.query(&prepared, parameters).await;
        }
        let typed = statement.typed(parameters);
        client.query_typed(&statement.text, &typed).await
    }
}

/// Whether statements are prepared, which saves the server most of its work with them.
#[derive(Debug)]
pub(super) struct Prepared {
    wanted: PreparedStatements,
    pooled: AtomicBool,
}

impl Prepared {
    pub(super) fn new(wanted: PreparedStatements) -> Self {
        Self {
            wanted,
            pooled: AtomicBool::new(false),
        }
    }

    /// Looks at a connection. A pooler that was seen once is believed in for good.
    pub(super) async fn examine(
        &self,
        client: &ClientWrapper,
    ) -> Result<(), tokio_postgres::Error> {
        if self.wanted != PreparedStatements::WhereDirect {
            return Ok(());
        }
        let told = told_process_id(client).await;
        let row = client
            .query_typed_one("SELECT pg_backend_pid()", &[])
            .await?;
        if told != Some(row.try_get(0)?) {
            self.pooled.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn on(&self, client: &ClientWrapper) -> Result<bool, tokio_postgres::Error> {
        match self.wanted {
            PreparedStatements::Always => Ok(true),
            PreparedStatements::Never => Ok(false),
            PreparedStatements::WhereDirect => {
                let is_new = client.statement_cache.size() == 0;
                if is_new && !self.pooled.load(Ordering::Relaxed) {
                    // Somebody may have put a pooler there since the last connection was made.
                    self.examine(client).await?;
                }
                Ok(!self.pooled.load(Ordering::Relaxed))
            }
        }
    }
}

/// A connection of the pool, and what becomes of it when it is dropped.
pub(super) struct Lent {
    client: Option<Object>,
    tls: Option<MakeRustlsConnect>,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Return,
    Close,
    /// Whoever came next would have to wait for a statement that nobody wants any more, and a claim
    /// that waits for a lock would be granted to nobody.
    Cancel,
}

impl Lent {
    pub(super) fn closed_unless_returned(mut self) -> Self {
        self.end = End::Cancel;
        self
    }

    pub(super) fn give_back(mut self) {
        self.end = End::Return;
    }

    /// Closes it without cancelling what it is doing.
    pub(super) fn close(mut self) {
        self.end = End::Close;
    }

    #[expect(
        clippy::unreachable,
        reason = "nothing but `drop` takes the connection"
    )]
    pub(super) fn client(&self) -> &ClientWrapper {
        match &self.client {
            Some(client) => client,
            None => unreachable!("only dropping takes it"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else {
            return;
        };
        if self.end == End::Return {
            return;
        }
        let client = Object::take(client);
        let Some(tls) = self.tls.take() else {
            return;
        };
        if self.end == End::Close || client.is_closed() {
            return;
        }
        // Without a runtime the connection is closed all the same.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                // The connection stays open until then: a pooler knows it no more afterwards.
                let _ = timeout(CANCEL, client.cancel_token().cancel_query(tls)).await;
            });
        }
    }
}

/// Under READ COMMITTED only deadlocks are left to lose against.
const MOST_LOSSES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(10);
/// How long a connection may take to be made, in time limits of calls. No longer, because one that got
/// lost on the network keeps a place in the pool.
const MOST_LIMITS: u32 = 3;
/// More than one, because several connections of the pool may have died together.
const MOST_RECONNECTIONS: u32 = 3;
const CANCEL: Duration = Duration::from_secs(5);
