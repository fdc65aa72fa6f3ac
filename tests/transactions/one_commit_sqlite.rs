//! One-commit mode on SQLite: the writer does the handler's work together with the record.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use http::StatusCode;
use rusqlite::Connection;
use tower_idempotency::{
    Failure, Idempotency, IdempotencyLayer, NoTransaction, ProblemKind, Ran, SqliteStore,
    SqliteTransaction, SqliteWork, Store,
};

use crate::app::{App, Call, Gate, pay};
use crate::claims::{acquire, fingerprint, finish, key, request};
use crate::database::{Database, Sqlite, charged};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_request_is_one_commit_and_a_retry_replays_it() {
    let database = Sqlite::new().await;
    let app = app(&database, charge);
    let before = database.store().commits();
    let first = app.send(pay("k")).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "run 1"));
    assert_eq!(database.store().commits() - before, 1);
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(database.store().commits() - before, 1);
    let other = app.send(pay("k").body("200 THB")).await;
    other.assert_problem(ProblemKind::KeyReused);
    assert_eq!((app.runs(), database.charges().await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_frees_the_key_writes_nothing() {
    let database = Sqlite::new().await;
    let app = app(&database, |call: Call| async move {
        let run = call.run;
        let charged = charge(call).await;
        match run {
            1 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            2 => panic!("as ordered"),
            _ => charged,
        }
    });
    let freed = app.send(pay("k")).await;
    assert_eq!(freed.status, StatusCode::SERVICE_UNAVAILABLE);
    let panicked = tokio::spawn(app.call(pay("k"))).await;
    assert!(panicked.unwrap_err().is_panic());
    assert_eq!(database.charges().await, 0);
    assert!(app.record("k").await.is_none());
    assert_eq!(app.send(pay("k")).await.text(), "run 3");
    assert_eq!(database.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_or_panics_takes_its_own_request_back_and_no_other() {
    let database = Sqlite::new().await;
    let app = app(&database, |call: Call| async move {
        let attempt = call.attempt().unwrap();
        let transaction: SqliteTransaction = attempt.transaction().unwrap();
        transaction.write(insert);
        match &call.body[..] {
            b"fails" => transaction.write(|_| Err("as ordered".into())),
            b"panics" => transaction.write(|_| panic!("as ordered")),
            _ => {}
        }
        StatusCode::CREATED
    });
    // Many at once, so that they share a commit.
    let asked = (0..30).map(|n| {
        let app = app.clone();
        let body = ["fails", "charges", "panics"][n % 3];
        async move { (body, app.send(pay(&format!("k{n}")).body(body)).await) }
    });
    for (body, answer) in join_all(asked).await {
        match body {
            "charges" => assert_eq!(answer.status, StatusCode::CREATED),
            _ => answer.assert_problem(ProblemKind::StoreUnavailable),
        }
    }
    assert_eq!(database.charges().await, 10);
    // Nothing of them is left.
    let again = app.send(pay("k0").body("charges")).await;
    assert_eq!(again.status, StatusCode::CREATED);
    assert!(!again.is_replay());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_ends_the_transaction_is_no_success() {
    for (end, kind) in [
        // Its rows stand and there is no outcome: nobody knows.
        ("COMMIT", ProblemKind::OutcomeUnknown),
        ("ROLLBACK", ProblemKind::StoreUnavailable),
        ("ROLLBACK TO one_commit", ProblemKind::StoreUnavailable),
        (
            "INSERT OR ROLLBACK INTO charges VALUES (1000)",
            ProblemKind::StoreUnavailable,
        ),
    ] {
        for fails in [false, true] {
            let database = Sqlite::new().await;
            let app = app(&database, move |call: Call| async move {
                let attempt = call.attempt().unwrap();
                let transaction: SqliteTransaction = attempt.transaction().unwrap();
                transaction.write(move |connection| {
                    connection.execute_batch("CREATE UNIQUE INDEX once ON charges (amount)")?;
                    insert(connection)?;
                    let _ = connection.execute_batch(end);
                    if fails {
                        Err("as ordered".into())
                    } else {
                        Ok(())
                    }
                });
                transaction.write(|connection| {
                    connection.execute("INSERT INTO charges VALUES (7)", [])?;
                    Ok(())
                });
                StatusCode::CREATED
            });
            let answer = app.send(pay("k")).await;
            assert_eq!(
                answer.header("idempotency-error"),
                kind.code(),
                "{end} {fails}"
            );
            let committed = i64::from(end == "COMMIT");
            assert_eq!(database.charges().await, committed, "{end} {fails}");
            assert_eq!(
                app.record("k").await.is_some(),
                committed == 1,
                "{end} {fails}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_one_in_this_process_is_in_flight() {
    let database = Sqlite::new().await;
    let gate = Gate::new();
    let held = gate.clone();
    let app = app(&database, move |call| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            charge(call).await
        }
    });
    let first = tokio::spawn(app.call(pay("k")));
    gate.entered().await;
    let second = app.send(pay("k")).await;
    second.assert_problem(ProblemKind::InProgress);
    gate.open();
    first.await.unwrap().unwrap();
    assert!(app.send(pay("k")).await.is_replay());
    assert_eq!((app.runs(), database.charges().await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_one_in_another_process_answers_what_stands_and_writes_nothing() {
    let database = Sqlite::new().await;
    let gate = Gate::new();
    let held = gate.clone();
    let slow = app(&database, move |call| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            charge(call).await
        }
    });
    // Another store on the file, as another process has it.
    let other = SqliteStore::open(database.file()).unwrap();
    let quick = over(other, |_| async { "quick" });
    let first = tokio::spawn(slow.call(pay("k")));
    gate.entered().await;
    assert_eq!(quick.send(pay("k")).await.text(), "quick");
    gate.open();
    let first = crate::app::Answer::of(first.await.unwrap().unwrap()).await;
    assert_eq!(first.text(), "quick");
    assert_eq!(database.charges().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_the_handler_keeps_is_not_committed() {
    let database = Sqlite::new().await;
    let app = app(&database, |call: Call| async move {
        let attempt = call.attempt().unwrap();
        let transaction: SqliteTransaction = attempt.transaction().unwrap();
        let taken = attempt.transaction::<Box<SqliteWork>>().unwrap_err();
        assert_eq!(taken, NoTransaction::Held);
        transaction.write(insert);
        std::mem::forget(transaction);
        StatusCode::CREATED
    });
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::StoreUnavailable);
    assert_eq!(database.charges().await, 0);
    assert!(app.record("k").await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_hands_its_work_over_too() {
    let database = Sqlite::new().await;
    let idempotency = engine(database.store().clone());
    let steps = Arc::new(AtomicUsize::new(0));
    for expected in [Ran::First(100), Ran::Repeat(100)] {
        let steps = Arc::clone(&steps);
        let points = key("points");
        let running = idempotency.run(&points, fingerprint(), |attempt| async move {
            let transaction: SqliteTransaction = attempt.transaction().unwrap();
            transaction.write(move |connection| {
                steps.fetch_add(1, Ordering::SeqCst);
                insert(connection)
            });
            drop(transaction);
            Ok::<u32, Failure<()>>(100)
        });
        assert_eq!(running.await.unwrap(), expected);
    }
    assert_eq!(steps.load(Ordering::SeqCst), 1);
    assert_eq!(database.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_of_a_record_that_was_there_are_counted_on() {
    let database = Sqlite::new().await;
    let store = database.store();
    let claim = acquire(store, &request("k")).await;
    let _ = store.release(&claim).await.unwrap();
    let idempotency = engine(store.clone());
    let k = key("k");
    let running = idempotency.run(&k, fingerprint(), |attempt| async move {
        assert_eq!(attempt.number(), 2);
        Ok::<u32, Failure<()>>(7)
    });
    assert_eq!(running.await.unwrap(), Ran::First(7));
    assert_eq!(store.lookup(&k).await.unwrap().unwrap().attempt, 2);
    // And what another mode has completed is replayed.
    let done = acquire(store, &request("done")).await;
    finish(store, &done, &charged("1")).await;
    let done = key("done");
    let running = idempotency.run(&done, fingerprint(), |_| async {
        panic!("it ran again");
        #[allow(unreachable_code, reason = "it says the type")]
        Ok::<u32, Failure<()>>(7)
    });
    running.await.unwrap_err();
}

fn insert(connection: &Connection) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    connection.execute("INSERT INTO charges VALUES (1000)", [])?;
    Ok(())
}

async fn charge(call: Call) -> Response {
    let transaction: SqliteTransaction = call.attempt().unwrap().transaction().unwrap();
    transaction.write(insert);
    (StatusCode::CREATED, format!("run {}", call.run)).into_response()
}

fn engine(store: SqliteStore) -> Idempotency<SqliteStore> {
    let one_commit = store.one_commit();
    let builder = Idempotency::builder(store).one_commit(one_commit);
    builder.build().unwrap()
}

fn app<H, F, R>(database: &Sqlite, handler: H) -> App<SqliteStore>
where
    H: Fn(Call) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = R> + Send + 'static,
    R: IntoResponse,
{
    over(database.store().clone(), handler)
}

fn over<H, F, R>(store: SqliteStore, handler: H) -> App<SqliteStore>
where
    H: Fn(Call) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = R> + Send + 'static,
    R: IntoResponse,
{
    App::behind(&IdempotencyLayer::new(engine(store)), handler)
}
