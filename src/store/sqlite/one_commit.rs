//! One-commit mode: the handler says what to write, and the writer does it together with the record.

use std::any::Any;
use std::collections::HashSet;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::Connection;

use crate::claim::{ClaimRequest, Claimed, OnAbandoned};
use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::Outcome;
use crate::record::State;
use crate::scope::ScopedKey;
use crate::store::{Begun, Committed, Completion, OneCommit, OpenTransaction, Store};
use crate::transaction::{Transaction, TransactionSlot};

use super::SqliteStore;
use super::error::failed;
use super::row::Verdict;
use super::table::Table;

type BoxError = Box<dyn Error + Send + Sync>;
type Step = Box<dyn FnMut(&Connection) -> Result<(), BoxError> + Send>;

/// Transactions of the store's writer to which handlers add their rows; made by
/// [`SqliteStore::one_commit`].
#[derive(Clone, Debug)]
pub struct SqliteOneCommit {
    store: SqliteStore,
    held: Arc<Mutex<HashSet<ScopedKey>>>,
}

/// What a handler wants to be written together with its outcome.
#[derive(Default)]
pub struct SqliteWork {
    steps: Mutex<Vec<Step>>,
}

/// A handler's part in the transaction on SQLite, in one-commit mode.
pub type SqliteTransaction = Transaction<Box<SqliteWork>>;

impl SqliteStore {
    /// One-commit mode in the store's own file. Hand it to
    /// [`IdempotencyBuilder::one_commit`](crate::IdempotencyBuilder::one_commit).
    ///
    /// SQLite has one writer at a time, so the handler does not hold a transaction open: it hands over
    /// what it wants to be written, and when it has returned, the store's writer does that and adds the
    /// record, in one commit that other moves may share.
    ///
    /// ```no_run
    /// # use tower_idempotency::{Idempotency, IdempotencyLayer, SqliteStore};
    /// # fn start() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_idempotency::SqliteTransaction;
    ///
    /// let store = SqliteStore::open("shop.db")?;
    /// let one_commit = store.one_commit();
    /// let idempotency = Idempotency::builder(store).one_commit(one_commit).build()?;
    /// let layer = IdempotencyLayer::builder(idempotency).namespace("charges").build()?;
    ///
    /// // An extractor in axum, with the feature `axum`.
    /// async fn charge(transaction: SqliteTransaction) -> &'static str {
    ///     transaction.write(|connection| {
    ///         connection.execute("INSERT INTO charges (amount) VALUES (1000)", [])?;
    ///         Ok(())
    ///     });
    ///     "charged"
    /// }
    /// # let _ = (layer, charge);
    /// # Ok(()) }
    /// ```
    ///
    /// Of two requests with one key at once, the second gets 409 in the same process. In another one its
    /// handler may run as well, but what it wants to be written is not: it answers what stands.
    pub fn one_commit(&self) -> SqliteOneCommit {
        SqliteOneCommit {
            store: self.clone(),
            held: Arc::default(),
        }
    }
}

impl SqliteWork {
    /// Adds a step. All steps are done in their order, on the store's writer, within one transaction;
    /// an error or a panic takes all of them back, nothing is recorded, and the client gets a 503.
    ///
    /// Every move of the store waits while a step runs, so keep it to statements. It may be called
    /// again where its transaction was taken back for another reason. It must not begin, commit or roll
    /// back.
    pub fn write(&self, step: impl FnMut(&Connection) -> Result<(), BoxError> + Send + 'static) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.push(Box::new(step));
    }

    fn into_steps(self) -> Vec<Step> {
        self.steps
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

struct Open {
    store: SqliteStore,
    slot: Arc<TransactionSlot<Box<SqliteWork>>>,
    request: ClaimRequest,
    attempt: u32,
    // Frees the key in this process.
    _held: Held,
}

/// A key that is at work in this process.
struct Held {
    keys: Arc<Mutex<HashSet<ScopedKey>>>,
    key: ScopedKey,
}

impl Held {
    fn take(keys: &Arc<Mutex<HashSet<ScopedKey>>>, key: &ScopedKey) -> Option<Self> {
        lock(keys).insert(key.clone()).then(|| Self {
            keys: Arc::clone(keys),
            key: key.clone(),
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        lock(&self.keys).remove(&self.key);
    }
}

#[async_trait]
impl OneCommit for SqliteOneCommit {
    type Store = SqliteStore;

    async fn begin(&self, request: &ClaimRequest) -> Result<Begun, StoreError> {
        let mut request = request.clone();
        // What another mode left unknown is none of this one's business.
        request.on_abandoned = OnAbandoned::Hold;
        let Some(held) = Held::take(&self.held, &request.key) else {
            return Ok(Begun::Held);
        };
        let looking = request.clone();
        let seen = self.store.look(move |reads, now| {
            let Some(row) = reads.load(&looking.key)? else {
                return Ok(Ok(1));
            };
            Ok(match row.judge(&looking, now) {
                Verdict::Grant(_) => Ok(row.attempt.saturating_add(1)),
                Verdict::Existing => Err(Box::new(row.into_record(looking.key.clone(), now))),
            })
        });
        match seen.await? {
            Ok(attempt) => Ok(Begun::Open(Box::new(Open {
                store: self.store.clone(),
                slot: TransactionSlot::new(Box::default()),
                request,
                attempt,
                _held: held,
            }))),
            Err(record) => Ok(Begun::Existing(*record)),
        }
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
        let Some(work) = self.slot.take_back() else {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "the handler kept its transaction, so nothing is written: it has to drop it before it \
                 returns",
            ));
        };
        let mut steps = work.into_steps();
        let (request, outcome) = (self.request.clone(), outcome.clone());
        let written = self.store.make(Some(&self.request.key), move |table, now| {
            table.all_or_nothing(|table| {
                if let Claimed::Existing(record) = table.claim(&request, now)? {
                    return Ok(Committed::instead(record, &request.fingerprint));
                }
                take(&mut steps, table)?;
                let completed = table.change(&request.key, |row| {
                    row.complete(&request.owner, &outcome, retention, now)
                });
                match completed? {
                    Some(Completion::Recorded) => Ok(Committed::Both),
                    // A step has taken the claim back.
                    _ => Err(refused(ENDED)),
                }
            })
        });
        let error = match written.await {
            Ok(committed) => return Ok(committed),
            Err(error) => error,
        };
        // A commit that failed, or was never tried: the file knows.
        match self.store.lookup(&self.request.key).await {
            Ok(Some(record)) if record.owner == self.request.owner => Ok(match record.state {
                State::Completed { .. } => Committed::Both,
                // A step has committed by itself.
                State::Started { .. } | State::Released => Committed::Unknown,
            }),
            Ok(Some(record)) => Ok(Committed::instead(record, &self.request.fingerprint)),
            Ok(None) => Err(error),
            Err(_) => Ok(Committed::Unknown),
        }
    }

    async fn roll_back(self: Box<Self>) {
        // Nothing was written yet, and what was to be is dropped.
        let _ = self.slot.take_back();
    }
}

/// A step is the application's code, and a panic in it is no reason to lose the moves of others.
fn take(steps: &mut [Step], table: &Table<'_>) -> Result<(), StoreError> {
    for step in steps {
        let taken = catch_unwind(AssertUnwindSafe(|| step(table.connection)));
        match taken {
            // What further steps write would stand, whatever becomes of the record.
            Ok(Ok(())) if table.connection.is_autocommit() => return Err(refused(ENDED)),
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                return Err(
                    refused("a step of the handler's transaction failed").with_source(error)
                );
            }
            Err(_) => return Err(refused("a step of the handler's transaction panicked")),
        }
    }
    Ok(())
}

fn refused(message: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Other, message)
}

const ENDED: &str = "a step of the handler's transaction has committed or rolled back";

impl Table<'_> {
    /// Takes back what `act` did if it fails, and nothing else of the transaction.
    fn all_or_nothing<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let connection = self.connection;
        connection
            .execute_batch("SAVEPOINT one_commit")
            .map_err(failed)?;
        let done = act(self);
        let end = match done {
            Ok(_) => "RELEASE one_commit",
            // Some failures take the whole transaction along, savepoints and all.
            Err(_) if connection.is_autocommit() => return done,
            Err(_) => "ROLLBACK TO one_commit; RELEASE one_commit",
        };
        connection.execute_batch(end).map_err(failed)?;
        done
    }
}

fn lock(keys: &Mutex<HashSet<ScopedKey>>) -> MutexGuard<'_, HashSet<ScopedKey>> {
    keys.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for SqliteWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteWork").finish_non_exhaustive()
    }
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open")
            .field("key", &self.request.key)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
