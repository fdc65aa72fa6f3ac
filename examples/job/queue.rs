//! The queue: a table, and the statements of a worker.

use std::time::Duration;

use tokio_postgres::{Client, NoTls};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The tables of the example, made anew.
pub const TABLES: &str = "
    DROP SCHEMA IF EXISTS tower_idempotency_job_example CASCADE;
    CREATE SCHEMA tower_idempotency_job_example;
    SET search_path = tower_idempotency_job_example;
    CREATE TABLE jobs (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        order_id text NOT NULL,
        -- From when on a worker may take it: later, while one works on it.
        due_at timestamptz NOT NULL DEFAULT now(),
        tries integer NOT NULL DEFAULT 0
    );
    CREATE TABLE orders (
        id text PRIMARY KEY,
        points_added_at timestamptz
    );
    CREATE TABLE points (
        order_id text NOT NULL REFERENCES orders,
        points bigint NOT NULL
    );
";

/// How long a job is hidden from other workers. A worker that needs longer meets its own twin, and the
/// record tells them apart.
const HIDDEN_FOR: &str = "2 seconds";

/// A connection of its own, with the tables in its path.
pub async fn connect(url: &str) -> Result<Client, BoxError> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    // Ends with the client; an error shows in what the client is asked next.
    tokio::spawn(connection);
    let path = "SET search_path = tower_idempotency_job_example";
    client.batch_execute(path).await?;
    Ok(client)
}

pub struct Job {
    id: i64,
    pub order_id: String,
}

/// Takes a job that is due. No two workers get the same one at once, and none waits for another.
pub async fn take(queue: &Client) -> Result<Option<Job>, BoxError> {
    let taken = queue
        .query_opt(
            &format!(
                "UPDATE jobs SET due_at = now() + interval '{HIDDEN_FOR}', tries = tries + 1
                 WHERE id = (
                     SELECT id FROM jobs WHERE due_at <= now()
                     ORDER BY due_at, id FOR UPDATE SKIP LOCKED LIMIT 1
                 )
                 RETURNING id, order_id"
            ),
            &[],
        )
        .await?;
    Ok(taken.map(|row| Job {
        id: row.get(0),
        order_id: row.get(1),
    }))
}

/// There is nothing left to do.
pub async fn acknowledge(queue: &Client, job: &Job) -> Result<(), BoxError> {
    let delete = "DELETE FROM jobs WHERE id = $1";
    queue.execute(delete, &[&job.id]).await?;
    Ok(())
}

/// Let it come again after this long.
pub async fn give_back(queue: &Client, job: &Job, after: Duration) -> Result<(), BoxError> {
    let later = "UPDATE jobs SET due_at = now() + $2 * interval '1 second' WHERE id = $1";
    queue
        .execute(later, &[&job.id, &after.as_secs_f64()])
        .await?;
    Ok(())
}

/// How many jobs are left, due or not.
pub async fn left(queue: &Client) -> Result<i64, BoxError> {
    let row = queue.query_one("SELECT count(*) FROM jobs", &[]).await?;
    Ok(row.get(0))
}
