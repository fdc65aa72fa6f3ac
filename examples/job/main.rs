//! A queue in PostgreSQL, workers that are killed in the middle, and work that is done once all the same.
//!
//! ```text
//! cargo run --example job --features postgres -- --url postgres://user@localhost/database
//! ```
//!
//! The queue is a table: a worker takes a job with `FOR UPDATE SKIP LOCKED` and hides it for a while.
//! If the worker dies, the job is seen again: **a queue delivers at least once**. What makes the work
//! happen once are two things, both in `work.rs`: a record under the name of the *operation*, and a
//! look at the state of the row under its lock.
//!
//! The program makes its tables anew in the schema `tower_idempotency_job_example`, puts jobs into the
//! queue, starts workers as processes of their own, kills two of them at the worst moments, and exits
//! with 0 only if every order has its points once.

#[cfg(feature = "postgres")]
mod play;
#[cfg(feature = "postgres")]
mod queue;
#[cfg(feature = "postgres")]
mod work;

use std::process::ExitCode;

const USAGE: &str = "\
give a PostgreSQL database, in which a schema for this example may be made:
  cargo run --example job --features postgres -- --url postgres://user@localhost/database";

#[cfg(feature = "postgres")]
#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["--url", url] => play::play(url).await,
        // What `play` starts.
        ["--url", url, "--worker", name, "--stop", stop] => {
            play::worker(url, name, stop).await.map(|()| true)
        }
        _ => {
            eprintln!("job: {USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("job: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(feature = "postgres"))]
fn main() -> ExitCode {
    eprintln!("job: {USAGE}");
    ExitCode::from(2)
}
