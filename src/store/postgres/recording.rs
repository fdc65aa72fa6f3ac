//! An outcome in a transaction of the application.

use std::time::Duration;

use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use crate::claim::{Claim, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::store::{RecordingError, Transactional};

use super::PostgresStore;
use super::client::Parameter;
use super::error::failed;
use super::moves::status;
use super::row::outcome_sum;
use super::time::Interval;

/// One fenced UPDATE that records an outcome in a transaction of the application on the same
/// database; made by [`Idempotency::recording`](crate::Idempotency::recording).
///
/// ```no_run
/// # use tower_idempotency::{Attempt, Idempotency, Outcome, PostgresStore};
/// # type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// async fn charge(
///     pool: &deadpool_postgres::Pool,
///     idempotency: &Idempotency<PostgresStore>,
///     attempt: &Attempt,
///     answer: &Outcome,
/// ) -> Result<(), BoxError> {
///     let mut client = pool.get().await?;
///     let transaction = client.transaction().await?;
///     let insert = "INSERT INTO charges (amount) VALUES (1000)";
///     transaction.execute(insert, &[]).await?;
///     idempotency.recording(attempt, answer)?.complete_in(&transaction).await?;
///     transaction.commit().await?;
///     Ok(())
/// }
/// ```
///
/// # The transaction
///
/// It may be one of tokio-postgres or of deadpool-postgres, a savepoint, behind a pooler in
/// transaction mode, and of every isolation level. The statement is not prepared. Its user needs
/// SELECT and UPDATE on the store's table, and the same `search_path` as the store unless a schema
/// was set.
///
/// Once it ran, the record is locked until the transaction ends, and the renewals of the lease wait
/// for that: run it last. Dropping a `Transaction` rolls it back, in a handler that panics or is
/// dropped as well.
#[derive(Clone, Debug)]
#[must_use = "nothing is recorded until `complete_in` is called"]
pub struct PostgresRecording {
    store: PostgresStore,
    digest: [u8; 32],
    owner: Owner,
    outcome: Outcome,
    retention: Option<Duration>,
}

impl PostgresRecording {
    /// How long the outcome is kept, counted from its recording. Default: what the claim asked for.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Records the outcome. It stands when the transaction is committed.
    ///
    /// # Errors
    ///
    /// [`RecordingError::ClaimLost`] if the record is not a started one of this attempt;
    /// [`Conflict`](RecordingError::Conflict) under REPEATABLE READ and SERIALIZABLE, if it was changed since
    /// the transaction began; [`Store`](RecordingError::Store) if the statement failed otherwise. The
    /// server has ended the transaction after the last two.
    pub async fn complete_in(&self, transaction: &Transaction<'_>) -> Result<(), RecordingError> {
        let frame = self.outcome.as_bytes();
        let parameters: [Parameter<'_>; 6] = [
            &&self.digest[..],
            &&self.owner.as_bytes()[..],
            &status(&self.outcome),
            &&frame[..],
            &outcome_sum(&self.digest, &self.owner, frame),
            &self.retention.map(Interval::of),
        ];
        let statement = &self.store.inner.statements.complete;
        let typed = statement.typed(&parameters);
        let recorded = transaction.query_typed(&statement.text, &typed);
        match recorded.await {
            Ok(rows) if rows.is_empty() => Err(RecordingError::ClaimLost),
            Ok(_) => Ok(()),
            Err(error) => Err(refused(error)),
        }
    }
}

impl Transactional for PostgresStore {
    type Recording = PostgresRecording;

    fn recording(&self, claim: &Claim, outcome: &Outcome) -> Result<PostgresRecording, StoreError> {
        Ok(PostgresRecording {
            store: self.clone(),
            digest: claim.key().digest(),
            owner: *claim.owner(),
            outcome: outcome.clone(),
            retention: None,
        })
    }
}

fn refused(error: tokio_postgres::Error) -> RecordingError {
    let lost = [
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::T_R_DEADLOCK_DETECTED,
        SqlState::LOCK_NOT_AVAILABLE,
    ];
    match error.code() {
        Some(code) if lost.contains(code) => RecordingError::Conflict(failed(error)),
        _ => RecordingError::Store(failed(error)),
    }
}
