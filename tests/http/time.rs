//! Retention, leases and limits, by tokio's paused clock.

use std::time::Duration;

use http::StatusCode;
use tokio::time::{advance, sleep};
use tower_idempotency::{OnAbandoned, ProblemKind, State};

use crate::app::{Answer, App, EngineSettings, Gate, paid, pay};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// An app whose handler takes this long.
fn app_that_takes(took: Duration, engine: impl FnOnce(EngineSettings) -> EngineSettings) -> App {
    App::with_engine(
        engine,
        |settings| settings,
        move |call| async move {
            sleep(took).await;
            paid(call).await
        },
    )
}

fn begin(app: &App) -> tokio::task::JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { app.send(pay("k")).await })
}

// Retention

#[tokio::test(start_paused = true)]
async fn a_result_is_kept_for_a_day_counted_from_its_claim() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    advance(DAY - SECOND).await;
    app.send(pay("k")).await.assert_replays(&first);
    // Replaying does not prolong it.
    advance(2 * SECOND).await;
    let again = app.send(pay("k")).await;
    assert!(!again.is_replay());
    assert_eq!(again.text(), "run 2");
    advance(DAY - SECOND).await;
    app.send(pay("k")).await.assert_replays(&again);
}

#[tokio::test(start_paused = true)]
async fn an_expired_key_takes_any_request_purged_or_not() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    advance(DAY).await;
    assert_eq!(app.store().len(), 1, "still there");
    let other = app.send(pay("k").body("1 THB")).await;
    assert_eq!(other.text(), "run 2");

    advance(DAY).await;
    assert_eq!(app.idempotency.purge(10).await.unwrap().removed, 1);
    assert_eq!(app.send(pay("k")).await.text(), "run 3");
}

#[tokio::test(start_paused = true)]
async fn another_retention_can_be_set() {
    let week = 7 * DAY;
    let app = app_that_takes(Duration::ZERO, |engine| engine.retention(week));
    app.send(pay("k")).await;
    advance(week - SECOND).await;
    assert!(app.send(pay("k")).await.is_replay());
    advance(SECOND).await;
    assert!(!app.send(pay("k")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_outlives_the_retention_keeps_its_key_and_its_result() {
    let app = app_that_takes(100 * SECOND, |engine| {
        engine.lease(10 * SECOND).retention(60 * SECOND)
    });
    let first = begin(&app);
    sleep(90 * SECOND).await;
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::InProgress);
    let first = first.await.unwrap();
    // The retention runs once more, from the completion.
    sleep(59 * SECOND).await;
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_lasts_as_long_as_its_record_and_is_reported_when_it_goes() {
    use tower_idempotency::RetentionOverride;
    let app = App::new(|_| async {
        let mut response = http::Response::new(axum::body::Body::empty());
        let word = RetentionOverride::LeaveUnknown;
        response.extensions_mut().insert(word);
        response
    });
    app.send(pay("k")).await;
    advance(DAY - SECOND).await;
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    advance(SECOND).await;
    let purged = app.idempotency.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (1, 1));
}

// Leases

#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_longer_than_its_lease_stays_alone() {
    let app = app_that_takes(45 * SECOND, |engine| engine);
    let first = begin(&app);
    sleep(SECOND / 2).await;
    for _ in 0..44 {
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::InProgress);
        sleep(SECOND).await;
    }
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(!first.headers.contains_key("idempotency-result"));
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_handler_is_not_taken_over_even_where_that_is_set() {
    let app = app_that_takes(45 * SECOND, |engine| {
        engine.on_abandoned(OnAbandoned::Rerun)
    });
    let first = begin(&app);
    for _ in 0..44 {
        sleep(SECOND).await;
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::InProgress);
    }
    first.await.unwrap();
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn past_the_attempt_limit_a_hung_handler_blocks_its_key_for_one_lease_and_no_longer() {
    let app = app_that_takes(10 * DAY, |engine| engine);
    let hung = begin(&app);
    sleep(15 * 60 * SECOND).await;
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::InProgress);
    sleep(30 * SECOND).await;
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(app.runs(), 1);
    hung.abort();
}

#[tokio::test(start_paused = true)]
async fn a_handler_past_its_limit_still_completes_while_nobody_took_its_key() {
    let app = app_that_takes(3_600 * SECOND, |engine| engine);
    let slow = begin(&app);
    sleep(3_000 * SECOND).await;
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    let slow = slow.await.unwrap();
    assert!(!slow.headers.contains_key("idempotency-result"));
    app.send(pay("k")).await.assert_replays(&slow);
}

/// An app whose first run hangs past its limit, and whose later runs wait at the gate.
fn app_that_is_taken_over(gate: &Gate) -> App {
    let held = gate.clone();
    App::with_engine(
        |engine| {
            engine
                .on_abandoned(OnAbandoned::Rerun)
                .attempt_limit(60 * SECOND)
        },
        |settings| settings,
        move |call| {
            let held = held.clone();
            async move {
                match call.run {
                    1 => call.attempt().unwrap().claim_lost().await,
                    _ => held.pass().await,
                }
                paid(call).await
            }
        },
    )
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_taken_over_gets_the_result_that_stands() {
    let gate = Gate::new();
    gate.open();
    let app = app_that_is_taken_over(&gate);
    let call = app.call(pay("k"));
    tokio::pin!(call);
    // Held up here, so that the heartbeat cannot let it know before the takeover is complete.
    assert!(futures_util::poll!(call.as_mut()).is_pending());
    sleep(200 * SECOND).await;
    let second = app.send(pay("k")).await;
    assert_eq!(second.text(), "run 2");

    let first = Answer::of(call.await.unwrap()).await;
    assert!(first.is_replay());
    assert_eq!((first.status, first.text()), (second.status, second.text()));
    assert_eq!(first.header("location"), second.header("location"));
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_taken_over_and_has_no_result_to_give_says_so() {
    let gate = Gate::new();
    let app = app_that_is_taken_over(&gate);
    let call = app.call(pay("k"));
    tokio::pin!(call);
    assert!(futures_util::poll!(call.as_mut()).is_pending());
    sleep(200 * SECOND).await;
    let second = begin(&app);
    gate.entered().await;

    let first = Answer::of(call.await.unwrap()).await;
    assert_eq!(first.text(), "run 1");
    assert_eq!(first.header("idempotency-result"), "claim-lost");
    assert!(!first.is_replay());

    gate.open();
    let second = second.await.unwrap();
    app.send(pay("k")).await.assert_replays(&second);
}

// Refusals

#[tokio::test(start_paused = true)]
async fn a_refused_request_leaves_the_record_as_it_was() {
    let app = App::with(|s| s.request_limit(8), paid);
    let credentials = |ask: crate::app::Ask| ask.header("authorization", "Bearer alice");
    let first = app.send(credentials(pay("k"))).await;
    advance(SECOND).await;
    let before = app.record("k").await.unwrap();
    for (refused, status) in [
        (credentials(pay("k").body("1 THB")), 422),
        (pay("k"), 422),
        (credentials(pay("k").body("1,000 THB")), 413),
        (credentials(pay("k").key("k")), 400),
    ] {
        assert_eq!(app.send(refused).await.status, status);
        assert_eq!(app.record("k").await.unwrap(), before);
    }
    app.send(credentials(pay("k"))).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn refusing_a_twin_in_flight_does_not_prolong_its_lease() {
    let app = app_that_takes(5 * SECOND, |engine| engine);
    let first = begin(&app);
    sleep(SECOND).await;
    let lease_until = async || match app.record("k").await.unwrap().state {
        State::Started { lease_until, .. } => lease_until,
        other => panic!("{other:?}"),
    };
    let before = lease_until().await;
    for request in [pay("k"), pay("k").body("1 THB")] {
        assert!(app.send(request).await.status.is_client_error());
        assert_eq!(lease_until().await, before);
    }
    first.await.unwrap();
}
