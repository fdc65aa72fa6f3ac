//! The example `job` on a real queue, with workers that are killed.

#![cfg(all(feature = "postgres", feature = "testing"))]

#[path = "support/example.rs"]
mod example;
#[path = "support/postgres.rs"]
mod postgres;

use std::process::{Command, Output};

fn job(args: &[&str]) -> Output {
    let run = Command::new(example::example("job")).args(args).output();
    run.expect("the example runs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_whose_workers_are_killed_are_finished_once_by_others() {
    let database = postgres::unused_name();
    let raw = postgres::raw(postgres::shared().url()).await;
    let create = format!("CREATE DATABASE \"{database}\"");
    raw.batch_execute(&create).await.expect("a database");
    let _leftovers = postgres::Leftovers::database(&database);
    let url = postgres::shared().url_of(&database);
    // Twice, because what the first one left must not answer for the second.
    for _ in 0..2 {
        let output = job(&["--url", &url]);
        let said = String::from_utf8_lossy(&output.stdout);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}{complained}");
        assert_eq!(
            said,
            "worker 1 was killed in the middle of order-1, before its transaction was committed\n\
             worker 2 was killed in the middle of order-2, after its transaction was committed\n\
             workers 3 and 4 emptied the queue\n\
             order-1: 100 points, added 1 time(s)\n\
             order-2: 100 points, added 1 time(s)\n\
             order-3: 100 points, added 1 time(s)\n\
             order-4: 100 points, added 1 time(s)\n"
        );
    }
}

#[test]
fn without_a_database_it_says_what_to_give() {
    let output = job(&[]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--url postgres://"), "{said}");
}

#[test]
fn a_database_that_is_not_there_is_one_line_and_no_panic() {
    let output = job(&["--url", "postgres://nobody@127.0.0.1:1/none"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
}
