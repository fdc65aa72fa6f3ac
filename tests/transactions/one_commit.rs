//! One-commit mode on PostgreSQL: what the handler wrote and its outcome are one commit.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use deadpool_postgres::{Manager, Pool, Runtime};
use futures_util::future::join_all;
use http::StatusCode;
use tokio::time::sleep;
use tokio_postgres::NoTls;
use tower_idempotency::{
    Admission, Failure, Idempotency, IdempotencyBuilder, IdempotencyKey, IdempotencyLayer,
    InFlight, NoTransaction, PostgresConnection, PostgresOneCommit, PostgresStore,
    PostgresTransaction, ProblemKind, Ran, RunError, ScopedKey, State, Store,
};

use crate::app::{App, Call, Gate, pay, send};
use crate::child;
use crate::claims::{acquire, fingerprint, key, outcome, request};
use crate::database::{Database, Postgres, PostgresTill};
use crate::patience::patient;
use crate::postgres::{Server, bouncer, database_with_isolation, shared};
use crate::proxy::{CommitLoses, Mode, Proxy};

type Engine = IdempotencyBuilder<PostgresStore>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_answer_is_recorded_and_a_retry_replays_it() {
    let service = Service::new().await;
    let app = service.app(charge);
    let first = app.send(pay("k")).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "run 1"));
    app.send(pay("k")).await.assert_replays(&first);
    let other = app.send(pay("k").body("200 THB")).await;
    other.assert_problem(ProblemKind::KeyReused);
    assert_eq!((app.runs(), service.charges().await), (1, 1));
    assert_eq!(app.record("k").await.unwrap().attempt, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_request_is_exactly_one_commit() {
    // Of its own: what another test commits would be counted.
    let server = Server::start();
    let database = Postgres::at(server.url()).await;
    let store = database.store().clone();
    let one_commit = Service::over(server.url(), database, |engine| engine);
    let app = one_commit.app(charge);
    let raw = crate::postgres::raw(server.url()).await;
    // Every transaction that writes is given an id.
    let commits = async || -> i64 {
        let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
        raw.query_one(next, &[]).await.unwrap().get(0)
    };
    let before = commits().await;
    for n in 0..20 {
        let first = app.send(pay(&format!("k{n}"))).await;
        assert_eq!(first.status, StatusCode::CREATED);
    }
    assert_eq!(commits().await - before, 20);
    // A replay, and what is rolled back before it wrote, is none.
    for n in 0..20 {
        assert!(app.send(pay(&format!("k{n}"))).await.is_replay());
    }
    assert_eq!(commits().await - before, 20);
    // And the measure sees the claims and completions of the other mode.
    let before = commits().await;
    let other = App::behind(&IdempotencyLayer::new(store), crate::app::paid);
    other.send(pay("another")).await;
    assert_eq!(commits().await - before, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_one_runs_and_the_others_are_told_so() {
    let service = Service::new().await;
    let gate = Gate::new();
    let held = gate.clone();
    let app = service.app(move |call| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            charge(call).await
        }
    });
    let first = tokio::spawn(app.call(pay("k")));
    gate.entered().await;
    for answer in join_all((0..5).map(|_| app.send(pay("k")))).await {
        answer.assert_problem(ProblemKind::InProgress);
    }
    // No record stands that could tell another request from the same one.
    let other = app.send(pay("k").body("other")).await;
    other.assert_problem(ProblemKind::InProgress);
    assert!(app.record("k").await.is_none());
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_eq!(first.status(), StatusCode::CREATED);
    assert!(app.send(pay("k")).await.is_replay());
    assert_eq!((app.runs(), service.charges().await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_wait_get_the_first_result() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let url = database_with_isolation(level).await;
        let database = Postgres::at(&url).await;
        let service = Service::over(&url, database, |engine| engine);
        let layer = IdempotencyLayer::builder(service.idempotency.clone())
            .in_flight(InFlight::Wait(Duration::from_secs(60)))
            .build()
            .unwrap();
        let app = service.behind(&layer, charge);
        for round in 1..=5 {
            let key = format!("k{round}");
            let answers = join_all((0..4).map(|_| app.send(pay(&key)))).await;
            for answer in &answers {
                assert_eq!(answer.status, StatusCode::CREATED, "{level}: {answer:?}");
                assert_eq!(answer.body, answers[0].body, "{level}");
            }
            assert_eq!(service.charges().await, round, "{level}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_frees_the_key_takes_the_rows_back() {
    let service = Service::new().await;
    let app = service.app(|call: Call| async move {
        let run = call.run;
        let charged = charge(call).await;
        match run {
            1 => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            _ => charged,
        }
    });
    let undone = app.send(pay("k")).await;
    assert_eq!(undone.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(service.charges().await, 0);
    assert!(app.record("k").await.is_none());
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_takes_the_rows_back_and_frees_the_key() {
    let service = Service::new().await;
    let app = service.app(|call: Call| async move {
        let run = call.run;
        let charged = charge(call).await;
        assert_ne!(run, 1, "as ordered");
        charged
    });
    let sent = tokio::spawn(app.call(pay("k"))).await;
    assert!(sent.unwrap_err().is_panic());
    assert_eq!(service.charges().await, 0);
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_does_not_take_the_transaction_along() {
    let service = Service::new().await;
    let gate = Gate::new();
    let held = gate.clone();
    let app = service.app(move |call| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            charge(call).await
        }
    });
    let left = tokio::spawn(app.call(pay("k")));
    gate.entered().await;
    left.abort();
    let _ = left.await;
    gate.open();
    assert!(app.idempotency.drain().await);
    assert!(app.send(pay("k")).await.is_replay());
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_the_handler_keeps_is_not_committed() {
    let service = Service::new().await;
    let kept = Arc::new(std::sync::Mutex::new(None));
    let keeping = Arc::clone(&kept);
    let app = service.app(move |call: Call| {
        let keeping = Arc::clone(&keeping);
        async move {
            let transaction = insert(&call).await;
            if call.run == 1 {
                *keeping.lock().unwrap() = Some(transaction);
            }
            StatusCode::CREATED
        }
    });
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::StoreUnavailable);
    // It is held until it is dropped, and then all is taken back.
    let held = app.send(pay("k")).await;
    held.assert_problem(ProblemKind::InProgress);
    kept.lock().unwrap().take();
    service.until_free(&http_key("k")).await;
    assert_eq!(service.charges().await, 0);
    assert_eq!(app.send(pay("k")).await.status, StatusCode::CREATED);
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_the_handler_ended_or_broke_records_nothing() {
    let service = Service::new().await;
    for (bad, kind) in [
        // Whether what it wrote was committed is the handler's secret.
        ("COMMIT", ProblemKind::OutcomeUnknown),
        ("ROLLBACK", ProblemKind::OutcomeUnknown),
        ("SELECT 1/0", ProblemKind::StoreUnavailable),
    ] {
        let app = service.app(move |call: Call| async move {
            let _ = transaction(&call).batch_execute(bad).await;
            StatusCode::CREATED
        });
        let answer = app.send(pay("k")).await;
        answer.assert_problem(kind);
        assert!(app.record("k").await.is_none(), "{bad}");
    }
    // And the connection is clean.
    let app = service.app(charge);
    assert_eq!(app.send(pay("k")).await.status, StatusCode::CREATED);
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_free_connection_the_handler_does_not_run() {
    let database = Postgres::new().await;
    let manager = Manager::new(shared().url().parse().unwrap(), NoTls);
    let pool = Pool::builder(manager)
        .max_size(1)
        .wait_timeout(Some(Duration::ZERO))
        .runtime(Runtime::Tokio1);
    let one_commit = database.store().one_commit(pool.build().unwrap());
    let service = Service::with(database, one_commit, |engine| engine);
    let gate = Gate::new();
    let held = gate.clone();
    let app = service.app(move |call| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            charge(call).await
        }
    });
    let first = tokio::spawn(app.call(pay("k")));
    gate.entered().await;
    let refused = app.send(pay("other")).await;
    refused.assert_problem(ProblemKind::StoreUnavailable);
    assert_eq!(app.runs(), 1);
    gate.open();
    first.await.unwrap().unwrap();
    gate.open();
    let second = app.send(pay("other")).await;
    assert_eq!(second.status, StatusCode::CREATED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_the_attempt_limit_everything_is_rolled_back() {
    let service = Service::with_engine(|engine| {
        let limit = Duration::from_millis(100);
        engine.lease(limit).attempt_limit(limit)
    })
    .await;
    for stuck in ["SELECT 1", "SELECT pg_sleep(3600)"] {
        let app = service.app(move |call: Call| async move {
            let transaction = insert(&call).await;
            transaction.batch_execute(stuck).await.unwrap();
            std::future::pending::<Response>().await
        });
        let answer = app.send(pay("k")).await;
        answer.assert_problem(ProblemKind::StoreUnavailable);
        service.until_free(&http_key("k")).await;
        assert_eq!(service.charges().await, 0, "{stuck}");
        let insert = service.insert();
        let job = key("job");
        let work = service
            .idempotency
            .run(&job, fingerprint(), |attempt| async move {
                let transaction: PostgresTransaction = attempt.transaction().unwrap();
                transaction.batch_execute(&insert).await.unwrap();
                std::future::pending::<Result<(), Failure<()>>>().await
            });
        assert!(matches!(work.await, Err(RunError::Undone)));
        assert_eq!(service.charges().await, 0, "{stuck}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_to_the_commit_is_asked_for_again() {
    for (what, expected) in [
        (CommitLoses::Reply, None),
        (CommitLoses::Request, Some(ProblemKind::StoreUnavailable)),
        (CommitLoses::EveryReply, Some(ProblemKind::OutcomeUnknown)),
    ] {
        let fresh = crate::postgres::Fresh::with(shared().url(), |options| {
            options.time_limit(Duration::from_secs(1))
        });
        let database = Postgres::of(fresh.await).await;
        let proxy = Proxy::before(shared().address().1).await;
        let url = shared().url_through(proxy.port());
        let service = Service::over(&url, database, |engine| engine);
        let app = service.app(charge);
        assert_eq!(app.send(pay("before")).await.text(), "run 1");
        proxy.set(Mode::OnceCommitted(what));
        let answer = app.send(pay("k")).await;
        match expected {
            None => {
                assert_eq!(
                    (answer.status, answer.is_replay()),
                    (StatusCode::CREATED, false)
                );
            }
            Some(kind) => answer.assert_problem(kind),
        }
        proxy.set(Mode::Pass);
        service.until_free(&http_key("k")).await;
        let again = app.send(pay("k")).await;
        assert_eq!(again.status, StatusCode::CREATED);
        let was_committed = what != CommitLoses::Request;
        assert_eq!(again.is_replay(), was_committed, "{what:?}");
        assert_eq!(service.charges().await, 2, "{what:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_no_replica_has_is_no_success() {
    let server = Server::start_with(&[
        "wal_level=replica",
        "max_wal_senders=1",
        "synchronous_standby_names=nobody",
        "synchronous_commit=local",
    ]);
    let fresh = crate::postgres::Fresh::with(server.url(), |options| {
        options.time_limit(Duration::from_secs(1))
    });
    let database = Postgres::of(fresh.await).await;
    let waiting = format!("{}?options=-c%20synchronous_commit%3Don", server.url());
    let service = Service::over(&waiting, database, |engine| engine);
    let answer = service.app(charge).send(pay("k")).await;
    answer.assert_problem(ProblemKind::OutcomeUnknown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_leaves_nothing_behind() {
    let service = Service::new().await;
    let address = service.database.address();
    tokio::task::spawn_blocking(move || child::charge_and_die(&address, child::IN_ONE_COMMIT))
        .await
        .unwrap();
    service.until_free(&key("k")).await;
    assert_eq!(service.charges().await, 0);
    assert!(
        service
            .database
            .store()
            .lookup(&key("k"))
            .await
            .unwrap()
            .is_none()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_behind_a_pooler_in_transaction_mode() {
    let database = Postgres::at(bouncer().url()).await;
    let service = Service::over(bouncer().url(), database, |engine| engine);
    let app = service.app(charge);
    let answers = join_all((0..20).map(|n| {
        let app = app.clone();
        async move { app.send(pay(&format!("k{}", n % 10))).await }
    }));
    for answer in answers.await {
        assert!([StatusCode::CREATED, StatusCode::CONFLICT].contains(&answer.status));
    }
    assert_eq!(service.charges().await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_the_other_mode_is_judged_as_ever() {
    let service = Service::new().await;
    let store = service.database.store();
    let work = async |name: &'static str| {
        let key = key(name);
        let working = service
            .idempotency
            .run(&key, fingerprint(), |_| async { Ok::<u32, Failure<()>>(7) });
        working.await
    };
    let claim = acquire(store, &request("started")).await;
    assert!(matches!(
        work("started").await,
        Err(RunError::InFlight { .. })
    ));
    service
        .database
        .age(claim.key(), Duration::from_secs(3600))
        .await;
    assert!(matches!(
        work("started").await,
        Err(RunError::OutcomeUnknown)
    ));
    // What is in nobody's way is taken over, and its attempts are counted on.
    let _ = store.release(&claim).await.unwrap();
    assert_eq!(work("started").await.unwrap(), Ran::First(7));
    let record = store.lookup(&key("started")).await.unwrap().unwrap();
    assert_eq!(record.attempt, 2);
    assert!(matches!(record.state, State::Completed { .. }));
    service
        .database
        .age(&key("started"), Duration::from_secs(48 * 3600))
        .await;
    assert_eq!(work("started").await.unwrap(), Ran::First(7));
    let record = store.lookup(&key("started")).await.unwrap().unwrap();
    assert_eq!(record.attempt, 3);
    assert_eq!(outcome(&record).status(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_works_in_a_transaction_too() {
    let service = Service::new().await;
    let run = async |fails: bool| {
        let insert = service.insert();
        let points = key("points");
        let working = service
            .idempotency
            .run(&points, fingerprint(), move |attempt| async move {
                let transaction: PostgresTransaction = attempt.transaction().unwrap();
                let taken = attempt.transaction::<PostgresConnection>().unwrap_err();
                assert_eq!(taken, NoTransaction::Held);
                transaction.batch_execute(&insert).await.unwrap();
                attempt.annotate("ignored").await.unwrap();
                match fails {
                    true => Err(Failure::Unknown(())),
                    false => Ok::<u32, Failure<()>>(100),
                }
            });
        working.await
    };
    // Nothing that was done in the transaction is unknown.
    assert!(matches!(run(true).await, Err(RunError::Unknown(()))));
    assert_eq!(service.charges().await, 0);
    assert_eq!(run(false).await.unwrap(), Ran::First(100));
    assert_eq!(run(false).await.unwrap(), Ran::Repeat(100));
    assert_eq!(service.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn axum_extracts_the_transaction() {
    let service = Service::new().await;
    let insert = service.insert();
    let handler = async move |transaction: PostgresTransaction| {
        transaction.batch_execute(&insert).await.unwrap();
        (StatusCode::CREATED, "paid")
    };
    let layer = IdempotencyLayer::new(service.idempotency.clone());
    let app = Router::new()
        .route("/pay", post(handler.clone()))
        .layer(layer);
    for is_replay in [false, true] {
        let answer = send(&app, pay("k")).await;
        assert_eq!((answer.text(), answer.is_replay()), ("paid", is_replay));
    }
    assert_eq!(service.charges().await, 1);
    // In the other mode there is none.
    let layer = IdempotencyLayer::new(service.database.store().clone());
    let app = Router::new().route("/pay", post(handler)).layer(layer);
    let answer = send(&app, pay("other")).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(service.charges().await, 1);
}

struct Service {
    database: Postgres,
    idempotency: Idempotency<PostgresStore>,
}

impl Service {
    async fn new() -> Self {
        Self::with_engine(|engine| engine).await
    }

    async fn with_engine(settings: impl FnOnce(Engine) -> Engine) -> Self {
        Self::over(shared().url(), Postgres::new().await, settings)
    }

    /// On connections of this URL.
    fn over(url: &str, database: Postgres, settings: impl FnOnce(Engine) -> Engine) -> Self {
        let till = PostgresTill::new(url, &database.0.schema, 16);
        let one_commit = database.store().one_commit(till.pool);
        Self::with(database, one_commit, settings)
    }

    fn with(
        database: Postgres,
        one_commit: PostgresOneCommit,
        settings: impl FnOnce(Engine) -> Engine,
    ) -> Self {
        let engine = Idempotency::builder(database.store().clone()).one_commit(one_commit);
        Self {
            idempotency: settings(engine).build().unwrap(),
            database,
        }
    }

    fn app<H, F, R>(&self, handler: H) -> App<PostgresStore>
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        let layer = IdempotencyLayer::new(self.idempotency.clone());
        self.behind(&layer, handler)
    }

    /// The handler finds its till in the request's extensions.
    fn behind<H, F, R>(
        &self,
        layer: &IdempotencyLayer<PostgresStore>,
        handler: H,
    ) -> App<PostgresStore>
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        let insert = self.insert();
        App::behind(layer, move |mut call: Call| {
            call.head.extensions.insert(Insert(insert.clone()));
            handler(call)
        })
    }

    fn insert(&self) -> String {
        format!(
            "INSERT INTO {}.charges VALUES (1000)",
            self.database.0.schema
        )
    }

    async fn charges(&self) -> i64 {
        self.database.charges().await
    }

    /// Waits until the server has noticed that whoever held the key is gone.
    async fn until_free(&self, key: &ScopedKey) {
        let waiting = async {
            loop {
                match self.idempotency.admit(key, fingerprint()).await.unwrap() {
                    Admission::InFlight(_) => sleep(Duration::from_millis(20)).await,
                    Admission::First(guard) => {
                        let _ = guard.release().await;
                        return;
                    }
                    _ => return,
                }
            }
        };
        patient("the end of a dead transaction", waiting).await;
    }
}

/// The statement that charges.
#[derive(Clone)]
struct Insert(String);

fn http_key(name: &str) -> ScopedKey {
    ScopedKey::new("http", "", &IdempotencyKey::new(name).unwrap())
}

fn transaction(call: &Call) -> PostgresTransaction {
    call.attempt().unwrap().transaction().unwrap()
}

async fn insert(call: &Call) -> PostgresTransaction {
    let transaction = transaction(call);
    let Insert(insert) = call.head.extensions.get().unwrap();
    transaction.batch_execute(insert).await.unwrap();
    transaction
}

async fn charge(call: Call) -> Response {
    insert(&call).await;
    (StatusCode::CREATED, format!("run {}", call.run)).into_response()
}
