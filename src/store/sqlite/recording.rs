//! An outcome in a transaction of the application, on a connection of its own.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;

use crate::claim::Claim;
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::store::{Completion, RecordingError, Transactional};

use super::SqliteStore;
use super::error::is_busy;
use super::table::Table;

/// One fenced UPDATE that records an outcome in a transaction of the application on the same file;
/// made by [`Idempotency::recording`](crate::Idempotency::recording).
///
/// It is owned, so that it can go where the connection is: into `spawn_blocking`, or a thread that
/// keeps one.
///
/// ```no_run
/// # use tower_idempotency::{Attempt, Idempotency, Outcome, SqliteStore};
/// # type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// use rusqlite::{Connection, TransactionBehavior};
///
/// async fn charge(
///     mut connection: Connection,
///     idempotency: &Idempotency<SqliteStore>,
///     attempt: &Attempt,
///     answer: &Outcome,
/// ) -> Result<(), BoxError> {
///     let recording = idempotency.recording(attempt, answer)?;
///     tokio::task::spawn_blocking(move || {
///         let behavior = TransactionBehavior::Immediate;
///         let transaction = connection.transaction_with_behavior(behavior)?;
///         transaction.execute("INSERT INTO charges (amount) VALUES (1000)", [])?;
///         recording.complete_in(&transaction)?;
///         transaction.commit()?;
///         Ok(())
///     })
///     .await?
/// }
/// ```
///
/// # The connection
///
/// It has to have the store's file open as its main database, not as an attached one: in WAL mode
/// SQLite does not commit several files together when the power goes. Let it be `IMMEDIATE`: a
/// transaction that reads first and finds the file changed when it wants to write can only begin anew.
/// Give it a busy timeout, and leave `PRAGMA synchronous` at `FULL`, which is what the store promises.
///
/// The store's own moves wait while the transaction holds the file's write lock, so keep it short.
#[derive(Clone, Debug)]
#[must_use = "nothing is recorded until `complete_in` is called"]
pub struct SqliteRecording {
    store: SqliteStore,
    claim: Claim,
    outcome: Outcome,
    retention: Option<Duration>,
}

impl SqliteRecording {
    /// How long the outcome is kept, counted from its recording. Default: what the claim asked for.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Records the outcome in the transaction that is open on this connection (a `Transaction` and a
    /// `Savepoint` of rusqlite are taken as well). It stands when that is committed. Blocks as every
    /// statement does.
    ///
    /// # Errors
    ///
    /// [`RecordingError::ClaimLost`] if the record is not a started one of this attempt;
    /// [`Misplaced`](RecordingError::Misplaced) if no transaction is open or the connection's file is
    /// another one; [`Conflict`](RecordingError::Conflict) if the file is locked, or was changed since
    /// the transaction read it; [`Store`](RecordingError::Store) if a statement failed otherwise.
    pub fn complete_in(&self, connection: &Connection) -> Result<(), RecordingError> {
        if connection.is_autocommit() {
            return Err(RecordingError::Misplaced(
                "no transaction is open on the connection",
            ));
        }
        let inner = &self.store.inner;
        if !is_same_file(connection, &inner.path) {
            return Err(RecordingError::Misplaced(
                "the connection has another file open than the store: keep both in one file",
            ));
        }
        let now = inner.shared.clock.now();
        let mut table = Table::prepare(connection).map_err(refused)?;
        let completed = table.change(self.claim.key(), |row| {
            row.complete(self.claim.owner(), &self.outcome, self.retention, now)
        });
        match completed.map_err(refused)? {
            Some(Completion::Recorded) => Ok(()),
            Some(Completion::Standing(_) | Completion::ClaimLost) | None => {
                Err(RecordingError::ClaimLost)
            }
        }
    }
}

impl Transactional for SqliteStore {
    type Recording = SqliteRecording;

    fn recording(&self, claim: &Claim, outcome: &Outcome) -> Result<SqliteRecording, StoreError> {
        Ok(SqliteRecording {
            store: self.clone(),
            claim: claim.clone(),
            outcome: outcome.clone(),
            retention: None,
        })
    }
}

fn is_same_file(connection: &Connection, file: &Path) -> bool {
    let own = connection.path().map(Path::new).map(Path::canonicalize);
    matches!((own, file.canonicalize()), (Some(Ok(own)), Ok(file)) if own == file)
}

fn refused(error: StoreError) -> RecordingError {
    let driver = error.source().and_then(<dyn Error>::downcast_ref);
    match driver.is_some_and(|driver: &Arc<rusqlite::Error>| is_busy(driver)) {
        true => RecordingError::Conflict(error),
        false => RecordingError::Store(error),
    }
}
