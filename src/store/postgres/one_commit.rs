//! One-commit mode: the claim is an advisory lock of the handler's own transaction.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::Pool;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::SimpleQueryMessage;

use crate::claim::ClaimRequest;
use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::Outcome;
use crate::record::{Record, State};
use crate::store::{Begun, Committed, OneCommit, OpenTransaction, Store};
use crate::transaction::{Transaction, TransactionSlot};

use super::PostgresStore;
use super::client::{Client, Lent, Parameter, Prepared};
use super::error::{Remedy, failed};
use super::moves::status;
use super::options::PreparedStatements;
use super::row::{Move, Standing, claim_sum, get, outcome_sum};
use super::text::escape;
use super::time::{Instant as ServerTime, Interval};

/// Transactions in which handlers write their rows and the layer the outcome; made by
/// [`PostgresStore::one_commit`].
#[derive(Clone)]
pub struct PostgresOneCommit {
    store: PostgresStore,
    client: Arc<Client>,
}

/// The connection of a [`PostgresTransaction`]: what a `tokio_postgres::Client` does by shared
/// reference.
pub struct PostgresConnection(Lent);

/// A handler's transaction on PostgreSQL, in one-commit mode. `&*transaction` is a
/// `&tokio_postgres::Client`, which is a `GenericClient`.
pub type PostgresTransaction = Transaction<PostgresConnection>;

impl PostgresStore {
    /// One-commit mode on connections of this pool, which leads to the store's database. Hand it to
    /// [`IdempotencyBuilder::one_commit`](crate::IdempotencyBuilder::one_commit).
    ///
    /// Every attempt holds one of its connections from before its handler begins until the outcome is
    /// committed, so it should be a pool for this purpose: as large as the number of attempts that may
    /// run at once. When none becomes free within the pool's own limit or the
    /// [store's](super::PostgresOptions::time_limit), the request gets a 503 and its handler does not run.
    ///
    /// ```no_run
    /// # use tower_idempotency::{Idempotency, IdempotencyLayer, PostgresStore};
    /// # async fn start(pool: deadpool_postgres::Pool) -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_idempotency::PostgresTransaction;
    ///
    /// let store = PostgresStore::connect("postgres://shop@db.internal/shop").await?;
    /// let one_commit = store.one_commit(pool);
    /// let idempotency = Idempotency::builder(store).one_commit(one_commit).build()?;
    /// let layer = IdempotencyLayer::builder(idempotency).namespace("charges").build()?;
    ///
    /// // An extractor in axum, with the feature `axum`.
    /// async fn charge(transaction: PostgresTransaction) -> Result<&'static str, String> {
    ///     let insert = "INSERT INTO charges (amount) VALUES (1000)";
    ///     let inserted = transaction.execute(insert, &[]).await;
    ///     inserted.map(|_| "charged").map_err(|error| error.to_string())
    /// }
    /// # let _ = (layer, charge);
    /// # Ok(()) }
    /// ```
    ///
    /// # Cost
    ///
    /// One commit for a first request, and one transaction id. Everything else only reads.
    ///
    /// # Isolation
    ///
    /// Transactions have the database's default level. Above READ COMMITTED a request that meets the
    /// end of another one of the same key may run its handler in vain: its insert finds the record, all
    /// is rolled back, and the client gets what stands.
    ///
    /// # What a handler may set
    ///
    /// The outcome is added by the handler's role and with its `search_path`, as they are when it
    /// returns. Where handlers set the path, give the store a [schema](super::PostgresOptions::schema),
    /// or the outcome goes to another table of the same name; a role of theirs needs SELECT, INSERT
    /// and UPDATE on the store's table. Use `SET LOCAL`: what is set for the session stays on the
    /// connection.
    pub fn one_commit(&self, pool: Pool) -> PostgresOneCommit {
        let own = &self.inner.client;
        let client = Client {
            pool,
            tls: own.tls.clone(),
            prepared: Prepared::new(PreparedStatements::Never),
            limit: own.limit,
        };
        PostgresOneCommit {
            store: self.clone(),
            client: Arc::new(client),
        }
    }
}

/// An open transaction, and what is to be added to it.
struct Open {
    one_commit: PostgresOneCommit,
    slot: Arc<TransactionSlot<PostgresConnection>>,
    request: ClaimRequest,
    attempt: u32,
    begun: ServerTime,
}

/// What a transaction sees that has just begun.
enum Seen {
    /// Nothing that would be in the way of this attempt.
    Free {
        attempt: u32,
        begun: ServerTime,
    },
    Existing(Box<Record>),
    Held,
}

#[async_trait]
impl OneCommit for PostgresOneCommit {
    type Store = PostgresStore;

    async fn begin(&self, request: &ClaimRequest) -> Result<Begun, StoreError> {
        // Whether the tables are there.
        let _ = self.store.inner.begin().await?;
        let deadline = self.client.deadline();
        let mut tries = 0;
        loop {
            let connection = self.lend(deadline).await?;
            let looking = self.look(&connection, request);
            let Ok(seen) = timeout_at(deadline, looking).await else {
                return Err(self.client.too_slow());
            };
            return match seen {
                Ok(Seen::Free { attempt, begun }) => Ok(Begun::Open(Box::new(Open {
                    one_commit: self.clone(),
                    slot: TransactionSlot::new(connection),
                    request: request.clone(),
                    attempt,
                    begun,
                }))),
                Ok(Seen::Existing(record)) => {
                    self.roll_back(connection).await;
                    Ok(Begun::Existing(*record))
                }
                Ok(Seen::Held) => {
                    self.roll_back(connection).await;
                    Ok(Begun::Held)
                }
                // A connection that died in the pool. Nothing was begun.
                Err(Failed::Statement(error))
                    if tries < MOST_RECONNECTIONS && Remedy::of(&error) == Remedy::Reconnect =>
                {
                    tries += 1;
                    continue;
                }
                Err(Failed::Statement(error)) => Err(failed(error)),
                Err(Failed::Record(error)) => {
                    self.roll_back(connection).await;
                    Err(error)
                }
            };
        }
    }
}

/// Why a look failed.
enum Failed {
    Statement(tokio_postgres::Error),
    Record(StoreError),
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Statement(error)
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Record(error)
    }
}

impl PostgresOneCommit {
    async fn lend(&self, deadline: Instant) -> Result<PostgresConnection, StoreError> {
        let lent = self.client.lend(deadline).await?;
        Ok(PostgresConnection(lent.closed_unless_returned()))
    }

    /// Begins a transaction, tries for the lock of the key, and reads its record.
    ///
    /// The lock is not waited for: a waiter would hold a connection. It is one of the transaction, so
    /// that it works behind a pooler and ends with whatever ends the transaction.
    async fn look(
        &self,
        connection: &PostgresConnection,
        request: &ClaimRequest,
    ) -> Result<Seen, Failed> {
        let inner = &self.store.inner;
        let digest = request.key.digest();
        let lock = lock(&inner.names.table(), &digest);
        let begin = format!("BEGIN; SELECT pg_try_advisory_xact_lock({lock})");
        let replies = connection.simple_query(&begin).await?;
        let is_ours = replies
            .iter()
            .any(|reply| matches!(reply, SimpleQueryMessage::Row(row) if row.get(0) == Some("t")));
        if !is_ours {
            return Ok(Seen::Held);
        }
        // A statement of its own, because a snapshot from before the lock would not show what the last
        // holder committed.
        let statement = &inner.statements.look;
        let id = &digest[..];
        let typed = statement.typed(&[&id]);
        let row = connection.query_typed_one(&statement.text, &typed).await?;
        let begun = get(&row, BEGUN)?;
        let Some(standing) = Standing::read(&row)? else {
            return Ok(Seen::Free { attempt: 1, begun });
        };
        match standing.judge(request, &digest)? {
            Move::Afresh => {
                let (_, last) = standing.holder()?;
                let attempt = u32::try_from(last).map_or(1, |last| last.saturating_add(1));
                Ok(Seen::Free { attempt, begun })
            }
            Move::Leave | Move::Again | Move::TakeOver => {
                let record = standing.record(&request.key, &digest)?;
                Ok(Seen::Existing(Box::new(record)))
            }
        }
    }

    /// Takes everything back. If that cannot be acknowledged, the connection is closed, which comes to
    /// the same.
    async fn roll_back(&self, connection: PostgresConnection) {
        let rolling_back = connection.batch_execute("ROLLBACK");
        if let Ok(Ok(())) = timeout_at(self.client.deadline(), rolling_back).await {
            connection.0.give_back();
        }
    }

    /// What stands of a request whose own transaction came to nothing.
    async fn standing(&self, request: &ClaimRequest) -> Committed {
        match self.store.lookup(&request.key).await {
            Ok(Some(record)) => Committed::instead(record, &request.fingerprint),
            Ok(None) | Err(_) => Committed::Neither,
        }
    }

    /// The reply to a COMMIT was lost. Under the same lock nobody else is at work on the key, the
    /// transaction that it was about included: then what the record says is final.
    async fn ask_again(&self, request: &ClaimRequest) -> Committed {
        let deadline = self.client.deadline();
        let asking = async {
            loop {
                if let Ok(connection) = self.lend(deadline).await {
                    let seen = self.look(&connection, request).await;
                    self.roll_back(connection).await;
                    match seen {
                        Ok(Seen::Free { .. }) => return Committed::Neither,
                        Ok(Seen::Existing(record)) if record.owner == request.owner => {
                            return Committed::Both;
                        }
                        Ok(Seen::Existing(record)) => {
                            return Committed::instead(*record, &request.fingerprint);
                        }
                        // The server has not noticed yet that the connection broke.
                        Ok(Seen::Held) | Err(_) => {}
                    }
                }
                sleep(PAUSE).await;
            }
        };
        let asked = timeout_at(deadline, asking).await;
        asked.unwrap_or(Committed::Unknown)
    }
}

impl Open {
    /// Whether the completed record was added.
    async fn insert(
        &self,
        connection: &PostgresConnection,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<bool, tokio_postgres::Error> {
        let Self { request, .. } = self;
        let key = &request.key;
        let digest = key.digest();
        let frame = outcome.as_bytes();
        let sum = claim_sum(&digest, &request.fingerprint, &request.owner, self.attempt);
        let parameters: [Parameter<'_>; 13] = [
            &&digest[..],
            &escape(key.namespace()),
            &escape(key.scope()),
            &escape(key.key()),
            &status(outcome),
            &i64::from(self.attempt),
            &&request.fingerprint.as_bytes()[..],
            &&request.owner.as_bytes()[..],
            &sum,
            &Interval::of(retention.unwrap_or(request.retention)),
            &&frame[..],
            &outcome_sum(&digest, &request.owner, frame),
            &self.begun,
        ];
        let statement = &self.one_commit.store.inner.statements.insert_completed;
        let typed = statement.typed(&parameters);
        let rows = connection.query_typed(&statement.text, &typed).await?;
        Ok(!rows.is_empty())
    }
}

#[async_trait]
impl OpenTransaction for Open {
    fn attempt(&self) -> u32 {
        self.attempt
    }

    fn slot(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.slot) as Arc<dyn Any + Send + Sync>
    }

    async fn commit(
        self: Box<Self>,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Committed, StoreError> {
        let Self {
            one_commit,
            request,
            ..
        } = &*self;
        let client = &one_commit.client;
        let Some(connection) = self.slot.take_back() else {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "the handler kept its transaction, which is rolled back for that: it has to drop it \
                 before it returns",
            ));
        };
        let inserting = self.insert(&connection, outcome, retention);
        match timeout_at(client.deadline(), inserting).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => {
                one_commit.roll_back(connection).await;
                return Ok(match one_commit.store.lookup(&request.key).await {
                    Ok(Some(record)) if record.state != State::Released => {
                        Committed::instead(record, &request.fingerprint)
                    }
                    // Nobody's record is in the way, so the transaction was another one: the handler
                    // has ended its own, and may have committed.
                    Ok(_) => Committed::Unknown,
                    Err(_) => Committed::Neither,
                });
            }
            Ok(Err(error)) if error.code().is_some() => {
                one_commit.roll_back(connection).await;
                return match one_commit.standing(request).await {
                    Committed::Neither => Err(failed(error)),
                    standing => Ok(standing),
                };
            }
            // Nobody has asked to commit, so that nothing was. The connection is closed.
            Ok(Err(error)) => return Err(failed(error)),
            Err(_) => return Err(client.too_slow()),
        }
        let committing = connection.batch_execute("COMMIT");
        let committed = match timeout_at(client.deadline(), committing).await {
            Ok(Ok(())) => {
                connection.0.give_back();
                Committed::Both
            }
            Ok(Err(error)) if Remedy::of(&error) != Remedy::Reconnect && error.code().is_some() => {
                one_commit.roll_back(connection).await;
                return match one_commit.standing(request).await {
                    Committed::Neither => Err(failed(error)),
                    standing => Ok(standing),
                };
            }
            Ok(Err(_)) | Err(_) => {
                // Not cancelled: a COMMIT that is while it waits for a replica stands, on one server.
                connection.0.close();
                one_commit.ask_again(request).await
            }
        };
        let inner = &one_commit.store.inner;
        inner.watchers.wake(&request.key.digest());
        Ok(committed)
    }

    async fn roll_back(self: Box<Self>) {
        // Held by the handler still, it is closed when it comes back.
        if let Some(connection) = self.slot.take_back() {
            self.one_commit.roll_back(connection).await;
        }
    }
}

impl Deref for PostgresConnection {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &tokio_postgres::Client {
        self.0.client()
    }
}

impl std::fmt::Debug for PostgresConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresConnection").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for PostgresOneCommit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresOneCommit")
            .field("store", &self.store)
            .field("pool", &self.client.pool.status())
            .finish()
    }
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open")
            .field("key", &self.request.key)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// One lock for each key of each table. Two that share one only wait for each other.
fn lock(table: &str, digest: &[u8; 32]) -> i64 {
    let mut hash = Sha256::new();
    hash.update(digest);
    hash.update(table);
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// The column of `sql::LOOK` behind those of a record.
const BEGUN: usize = 16;
const MOST_RECONNECTIONS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(50);
