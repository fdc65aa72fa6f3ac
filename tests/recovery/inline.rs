//! A retry that meets an abandoned key asks at once.

use std::time::Duration;

use tokio::time::{Instant, advance, sleep};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Admission, AdmitError, Failure, IdempotencyLayer, OnAbandoned, ProblemKind, Ran, RunError,
    Settled, Store,
};

use crate::app::{App, EngineSettings, paid, pay};
use crate::engine::*;
use crate::gateway::*;

/// The default of `reconcile_timeout`.
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test(start_paused = true)]
async fn work_that_happened_is_replayed_by_the_retry_that_asks() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    for _ in 0..3 {
        assert_eq!(replayed(admit(&engine).await), outcome("paid"));
    }
    assert_eq!(gateway.questions(), 1);
}

#[tokio::test(start_paused = true)]
async fn work_that_did_not_happen_is_done_by_the_retry_that_asks() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 2);
    assert_eq!(attempt.complete(outcome("2")).await, Settled::Recorded);
    assert_eq!(replayed(admit(&engine).await), outcome("2"));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_told_in_time_stays_unknown() {
    for says in [
        Says::Unknown,
        Says::Fails,
        Says::Panics,
        Says::PanicsAtOnce,
        Says::Hangs,
    ] {
        let gateway = Gateway::that(says.clone());
        let engine = asking(&gateway);
        leave(&engine, "k").await;
        let asked = Instant::now();
        assert_unknown(&admit(&engine).await);
        assert!(
            asked.elapsed() <= LIMIT + Duration::from_millis(1),
            "{says:?}"
        );
        assert_eq!(gateway.questions(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_for_an_answer_can_be_set() {
    let gateway = Gateway::that(Says::Hangs);
    let engine = engine_with(|settings| gateway.asked_by(settings).reconcile_timeout(SECOND));
    leave(&engine, "k").await;
    let asked = Instant::now();
    assert_unknown(&admit(&engine).await);
    assert!(asked.elapsed() <= SECOND + Duration::from_millis(1));
}

#[tokio::test(start_paused = true)]
async fn another_request_with_the_key_asks_nobody() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let other = engine.admit(&key("k"), request("other")).await.unwrap();
    assert!(matches!(other, Admission::Mismatch { .. }));
    assert_eq!(gateway.questions(), 0);
    assert!(record(&engine).await.unwrap().is_abandoned());
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_while_the_attempt_lives() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    let running = begin(&engine).await;
    sleep(10 * LEASE).await;
    let _ = lease_left(&admit(&engine).await);
    assert_eq!(gateway.questions(), 0);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_where_abandoned_work_is_run_again() {
    let gateway = Gateway::that(Says::Unknown);
    let engine =
        engine_with(|settings| gateway.asked_by(settings).on_abandoned(OnAbandoned::Rerun));
    leave(&engine, "k").await;
    assert_eq!(begin(&engine).await.attempt().number(), 2);
    assert_eq!(gateway.questions(), 0);
}

#[tokio::test(start_paused = true)]
async fn of_many_retries_one_asks_and_one_does_the_work() {
    let says = Says::Later(SECOND, Box::new(Says::NotHappened));
    let gateway = Gateway::that(says);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let retries: Vec<_> = (0..100)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move { admit(&engine).await })
        })
        .collect();
    let mut running = Vec::new();
    for retry in retries {
        match retry.await.unwrap() {
            Admission::First(attempt) => running.push(attempt),
            Admission::InFlight(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((running.len(), gateway.questions()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn of_many_retries_one_asks_and_all_get_the_outcome() {
    let says = Says::Later(SECOND, Box::new(Says::Happened(outcome("paid"))));
    let gateway = Gateway::that(says);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let retries: Vec<_> = (0..100)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move { admit(&engine).await })
        })
        .collect();
    for retry in retries {
        assert_eq!(replayed(retry.await.unwrap()), outcome("paid"));
    }
    assert_eq!(gateway.questions(), 1);
}

#[tokio::test(start_paused = true)]
async fn retries_that_come_fast_do_not_become_as_many_questions() {
    for says in [Says::Unknown, Says::Fails] {
        let gateway = Gateway::that(says.clone());
        let engine = asking(&gateway);
        leave(&engine, "k").await;
        for _ in 0..600 {
            assert_unknown(&admit(&engine).await);
            advance(SECOND / 10).await;
        }
        assert!(
            (3..=12).contains(&gateway.questions()),
            "{says:?}: {}",
            gateway.questions()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_comes_when_it_was_told_to_finds_the_next_answer() {
    let gateway = Gateway::that(Says::Unknown);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    for questions in 1..10 {
        assert_unknown(&admit(&engine).await);
        assert_eq!(gateway.questions(), questions);
        // Retry-After: the interval, which is the lease.
        advance(LEASE).await;
    }
    gateway.says(Says::Happened(outcome("paid")));
    assert_eq!(replayed(admit(&engine).await), outcome("paid"));
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_is_given_up_leaves_the_question_to_the_next_one() {
    let gateway = Gateway::that(Says::Hangs);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let given_up = tokio::time::timeout(SECOND, admit(&engine)).await;
    assert!(given_up.is_err());
    gateway.says(Says::NotHappened);
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_retry_and_a_sweeper_do_not_ask_twice() {
    let says = Says::Later(SECOND, Box::new(Says::Happened(outcome("paid"))));
    let gateway = Gateway::that(says);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let mut sweeper = engine.sweeper();
    let (swept, admission) = tokio::join!(sweeper.sweep(), admit(&engine));
    assert_eq!(replayed(admission), outcome("paid"));
    let swept = swept.unwrap();
    assert_eq!(swept.happened + swept.deferred, 1);
    assert_eq!(gateway.questions(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_take_the_answer_leaves_the_key_unknown() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    engine
        .store()
        .inject(Move::Resolve, Calls::Every, Fault::Fail);
    assert_unknown(&admit(&engine).await);
    engine.store().heal();
    engine
        .store()
        .inject(Move::Claim, Calls::Nth(2), Fault::Hang);
    advance(LEASE).await;
    let failed = engine.admit(&key("k"), request("r")).await;
    // The claim that hung may stand; it is freed in the background.
    assert!(matches!(
        failed,
        Err(AdmitError::Store(_)) | Ok(Admission::First(_))
    ));
}

fn guarded(gateway: &Gateway) -> App {
    guarded_with(gateway, |engine| engine)
}

fn guarded_with(gateway: &Gateway, settings: impl FnOnce(EngineSettings) -> EngineSettings) -> App {
    App::with_engine(
        |engine| settings(gateway.asked_by(engine)),
        |layer| layer,
        |call| async move {
            assert!(call.run > 1, "the first one dies");
            paid(call).await
        },
    )
}

async fn die(app: &App) {
    let died = tokio::spawn(app.call(pay("k"))).await;
    assert!(died.unwrap_err().is_panic());
}

#[tokio::test(start_paused = true)]
async fn over_http_work_that_happened_is_replayed() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let app = guarded(&gateway);
    die(&app).await;
    for _ in 0..2 {
        let retry = app.send(pay("k")).await;
        assert!(retry.is_replay());
        assert_eq!((retry.status.as_u16(), retry.text()), (201, "paid"));
    }
    assert_eq!((app.runs(), gateway.questions()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn over_http_work_that_did_not_happen_is_done() {
    let gateway = Gateway::that(Says::NotHappened);
    let app = guarded(&gateway);
    die(&app).await;
    let retry = app.send(pay("k")).await;
    assert_eq!((retry.status.as_u16(), retry.text()), (201, "run 2"));
    assert!(!retry.is_replay());
    app.send(pay("k")).await.assert_replays(&retry);
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn over_http_what_nobody_knows_is_refused_until_somebody_looks_again() {
    for (interval, retry_after) in [(None, "30"), (Some(Duration::from_secs(7)), "7")] {
        let gateway = Gateway::that(Says::Unknown);
        let app = guarded_with(&gateway, |engine| match interval {
            Some(interval) => engine.sweep_interval(interval),
            None => engine,
        });
        die(&app).await;
        let retry = app.send(pay("k")).await;
        retry.assert_problem(ProblemKind::OutcomeUnknown);
        assert_eq!(retry.header("retry-after"), retry_after);
        app.send(pay("k").body("200 THB"))
            .await
            .assert_problem(ProblemKind::KeyReused);
        assert_eq!((app.runs(), gateway.questions()), (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn over_http_a_client_that_leaves_while_the_gateway_thinks_loses_nothing() {
    let says = Says::Later(3 * SECOND, Box::new(Says::NotHappened));
    let gateway = Gateway::that(says);
    let app = guarded(&gateway);
    die(&app).await;
    let left = tokio::time::timeout(SECOND, app.send(pay("k"))).await;
    assert!(left.is_err());
    assert!(app.idempotency.drain().await);
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "run 2");
}

#[tokio::test(start_paused = true)]
async fn a_layer_takes_the_engines_reconciler() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    let layer = IdempotencyLayer::builder(engine.clone())
        .namespace("engine")
        .build();
    let app = App::behind(&layer.unwrap(), |call| async move {
        assert!(call.run > 1, "the first one dies");
        paid(call).await
    });
    let died = tokio::spawn(app.call(pay("k"))).await;
    assert!(died.unwrap_err().is_panic());
    assert_eq!(engine.sweeper().sweep().await.unwrap().not_happened, 1);
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
}

type Job = Result<u32, Failure<String>>;

async fn job<S: Store>(
    engine: &tower_idempotency::Idempotency<S>,
    result: Job,
) -> Result<Ran<u32>, RunError<String>> {
    engine
        .run(&key("k"), request("r"), |_| async { result })
        .await
}

#[tokio::test(start_paused = true)]
async fn a_job_that_did_not_happen_is_done() {
    let engine = asking(&Gateway::that(Says::NotHappened));
    let lost = job(&engine, Err(Failure::Unknown("timeout".to_owned()))).await;
    assert!(matches!(lost, Err(RunError::Unknown(_))));
    assert_eq!(job(&engine, Ok(7)).await.unwrap(), Ran::First(7));
    assert_eq!(job(&engine, Ok(8)).await.unwrap(), Ran::Repeat(7));
}

#[tokio::test(start_paused = true)]
async fn a_job_of_which_nobody_knows_stays_unknown() {
    let engine = asking(&Gateway::that(Says::Unknown));
    let _ = job(&engine, Err(Failure::Unknown("timeout".to_owned()))).await;
    let repeated = job(&engine, Ok(7)).await;
    assert!(matches!(repeated, Err(RunError::OutcomeUnknown)));
}

#[test]
fn times_that_cannot_work_are_refused() {
    let builder = || tower_idempotency::Idempotency::builder(tower_idempotency::MemoryStore::new());
    let error = builder()
        .reconcile_timeout(Duration::ZERO)
        .build()
        .unwrap_err();
    assert_eq!(error.setting(), "reconcile_timeout");
    let error = builder()
        .sweep_interval(Duration::ZERO)
        .build()
        .unwrap_err();
    assert_eq!(error.setting(), "sweep_interval");
}
