//! Workers as processes, two of which are killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tower_idempotency::{PostgresStore, StoreError};

use crate::queue::{self, BoxError};
use crate::work::{self, POINTS, Stop};

const ORDERS: [&str; 4] = ["order-1", "order-2", "order-3", "order-4"];

/// Whether every order got its points once.
pub async fn play(url: &str) -> Result<bool, BoxError> {
    // Its records live in the same database; those of yesterday are gone with the schema.
    let database = queue::connect(url).await?;
    database.batch_execute(queue::TABLES).await?;
    store(url).await?.migrate().await?;
    for order in ORDERS {
        let insert = "INSERT INTO orders (id) VALUES ($1)";
        database.execute(insert, &[&order]).await?;
    }
    // One order is asked for twice, by two jobs.
    for order in ORDERS.iter().chain(&["order-4"]) {
        let insert = "INSERT INTO jobs (order_id) VALUES ($1)";
        database.execute(insert, &[order]).await?;
    }

    for (name, stop, said) in [
        ("1", "before-commit", "before its transaction was committed"),
        ("2", "after-commit", "after its transaction was committed"),
    ] {
        let mut worker = start(url, name, stop)?;
        let order = first_line(&mut worker)?;
        // SIGKILL on Unix: it cannot say goodbye to anybody.
        worker.kill()?;
        worker.wait()?;
        println!("worker {name} was killed in the middle of {order}, {said}");
    }
    let workers = [start(url, "3", "never")?, start(url, "4", "never")?];
    for mut worker in workers {
        // In a thread that may block.
        let ended = tokio::task::spawn_blocking(move || worker.wait()).await??;
        if !ended.success() {
            return Err("a worker failed: see above".into());
        }
    }
    println!("workers 3 and 4 emptied the queue");

    let mut sound = queue::left(&database).await? == 0;
    for order in ORDERS {
        let count = "SELECT count(*), coalesce(sum(points), 0)::bigint FROM points \
                     WHERE order_id = $1";
        let row = database.query_one(count, &[&order]).await?;
        let (times, points): (i64, i64) = (row.get(0), row.get(1));
        println!("{order}: {points} points, added {times} time(s)");
        sound &= (times, points) == (1, POINTS);
    }
    Ok(sound)
}

/// Works until the queue is empty.
pub async fn worker(url: &str, name: &str, stop: &str) -> Result<(), BoxError> {
    let stop = match stop {
        "before-commit" => Stop::BeforeCommit,
        "after-commit" => Stop::AfterCommit,
        _ => Stop::Never,
    };
    let engine = work::engine(store(url).await?)?;
    let queue = queue::connect(url).await?;
    let database = Arc::new(Mutex::new(queue::connect(url).await?));
    while queue::left(&queue).await? > 0 {
        match queue::take(&queue).await? {
            Some(job) => {
                let done = work::handle(&engine, &queue, &database, &job, stop).await;
                done.map_err(|error| format!("worker {name}: {error}"))?;
            }
            // Others hide what is left.
            None => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    engine.drain().await;
    Ok(())
}

fn start(url: &str, name: &str, stop: &str) -> Result<Child, BoxError> {
    let this = std::env::current_exe()?;
    let args = ["--url", url, "--worker", name, "--stop", stop];
    let worker = Command::new(this)
        .args(args)
        .stdout(Stdio::piped())
        .spawn()?;
    Ok(worker)
}

fn first_line(worker: &mut Child) -> Result<String, BoxError> {
    let stdout = worker.stdout.take().ok_or("a worker without an output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    match line.trim() {
        "" => Err("a worker ended before it was in the middle of anything".into()),
        order => Ok(order.to_owned()),
    }
}

/// Its table lies beside those of the example.
async fn store(url: &str) -> Result<PostgresStore, StoreError> {
    let options = PostgresStore::options().schema("tower_idempotency_job_example");
    options.connect(url).await
}
