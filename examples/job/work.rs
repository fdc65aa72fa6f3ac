//! The work: points for an order, added once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_postgres::Client;
use tower_idempotency::{
    Advice, ConfigError, Failure, Fingerprint, Idempotency, IdempotencyKey, OnAbandoned,
    PostgresStore,
};

use crate::queue::{self, BoxError, Job};

pub const POINTS: i64 = 100;

pub fn engine(store: PostgresStore) -> Result<Idempotency<PostgresStore>, ConfigError> {
    Idempotency::builder(store)
        // Short, because this example waits for it.
        .lease(Duration::from_secs(2))
        // Allowed here, because all that the work does is one transaction that looks first: a second
        // run finds the first one's rows or nothing of it. Work that calls a gateway wants `Hold`,
        // the default.
        .on_abandoned(OnAbandoned::Rerun)
        .build()
}

/// Where a worker stops for ever, to be killed there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    Never,
    BeforeCommit,
    AfterCommit,
}

/// Does one job and tells the queue what came of it.
pub async fn handle(
    engine: &Idempotency<PostgresStore>,
    queue: &Client,
    database: &Arc<Mutex<Client>>,
    job: &Job,
    stop: Stop,
) -> Result<(), BoxError> {
    // The name of the operation, not of the job: two jobs about one order are one operation.
    let key = IdempotencyKey::new(&job.order_id)?.scoped("points");
    let payload = Fingerprint::of(&[job.order_id.as_bytes()]);
    let (database, order) = (Arc::clone(database), job.order_id.clone());
    let work = move |_attempt| async move {
        match add_points(&mut *database.lock().await, &order, stop).await {
            Ok(points) => Ok(points),
            // Asked for an order that is not there: no retry makes it.
            Err(AddError::NoSuchOrder) => Err(Failure::Terminal("no such order".to_owned())),
            // The commit may have been lost on the way. Looking again is safe: see above.
            Err(AddError::Database(error)) => Err(Failure::Transient(error.to_string())),
        }
    };
    let advice = match engine.run(&key, payload, work).await {
        Ok(_) => Advice::Acknowledge,
        Err(error) => error.advice(),
    };
    match advice {
        Advice::Acknowledge => queue::acknowledge(queue, job).await,
        Advice::RetryAfter(after) => queue::give_back(queue, job, after).await,
        // Put aside for a person.
        _ => Err(format!("the job for {} needs a look", job.order_id).into()),
    }
}

#[derive(Debug)]
enum AddError {
    NoSuchOrder,
    Database(tokio_postgres::Error),
}

impl From<tokio_postgres::Error> for AddError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error)
    }
}

/// Locks the row, looks at it *under the lock*, and changes it together with what hangs on it.
async fn add_points(database: &mut Client, order: &str, stop: Stop) -> Result<i64, AddError> {
    let transaction = database.transaction().await?;
    // Not the order that somebody loaded before: that copy may be old.
    let locked = "SELECT points_added_at IS NOT NULL FROM orders WHERE id = $1 FOR UPDATE";
    let row = transaction.query_opt(locked, &[&order]).await?;
    let is_done: bool = row.ok_or(AddError::NoSuchOrder)?.get(0);
    if !is_done {
        let set = "UPDATE orders SET points_added_at = now() WHERE id = $1";
        transaction.execute(set, &[&order]).await?;
        let add = "INSERT INTO points (order_id, points) VALUES ($1, $2)";
        transaction.execute(add, &[&order, &POINTS]).await?;
    }
    stop_at(Stop::BeforeCommit, stop, order).await;
    transaction.commit().await?;
    stop_at(Stop::AfterCommit, stop, order).await;
    Ok(POINTS)
}

async fn stop_at(here: Stop, stop: Stop, order: &str) {
    if here == stop {
        println!("{order}");
        std::future::pending::<()>().await;
    }
}
