//! Requests whose key is being worked on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use http::StatusCode;
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep};
use tower_idempotency::{InFlight, OnAbandoned, ProblemKind};

use crate::app::{Answer, App, Gate, Settings, paid, pay};

/// An app whose handlers wait at the gate.
fn app_with_gate(settings: impl FnOnce(Settings) -> Settings) -> (App, Gate) {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::with(settings, move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    (app, gate)
}

fn waiting(settings: Settings) -> Settings {
    settings.in_flight(InFlight::Wait(Duration::from_secs(2)))
}

/// An app that waits for twins and whose handler takes this long.
fn slow_app(took: Duration) -> App {
    App::with(waiting, move |call| async move {
        sleep(took).await;
        paid(call).await
    })
}

#[tokio::test]
async fn a_twin_is_refused_at_once_and_may_come_back() {
    let (app, gate) = app_with_gate(|s| s);
    let twin = async {
        gate.entered().await;
        let refused = app.send(pay("k")).await;
        refused.assert_problem(ProblemKind::InProgress);
        assert_eq!(refused.header("retry-after"), "1");
        gate.open();
    };
    let (first, ()) = join(app.send(pay("k")), twin).await;
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_twin_with_another_body_is_a_mismatch_and_not_in_flight() {
    for settings in [|s| s, waiting] {
        let (app, gate) = app_with_gate(settings);
        let twin = async {
            gate.entered().await;
            let refused = app.send(pay("k").body("1 THB")).await;
            refused.assert_problem(ProblemKind::KeyReused);
            gate.open();
        };
        join(app.send(pay("k")), twin).await;
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test]
async fn other_keys_are_not_held_up() {
    let (app, gate) = app_with_gate(|s| s);
    let other = async {
        gate.entered().await;
        let other = app.send(pay("other"));
        gate.open();
        gate.open();
        assert_eq!(other.await.status, StatusCode::CREATED);
    };
    join(app.send(pay("k")), other).await;
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_twin_that_waits_gets_the_first_answer() {
    let app = slow_app(Duration::from_millis(500));
    let (first, twin) = join(app.send(pay("k")), app.send(pay("k"))).await;
    twin.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn fifty_twins_that_wait_all_get_the_answer_of_one_run() {
    let app = slow_app(Duration::from_millis(500));
    let mut answers = join_all((0..51).map(|_| app.send(pay("k")))).await;
    let first = answers.iter().position(|answer| !answer.is_replay());
    let first = answers.swap_remove(first.unwrap());
    for twin in answers {
        twin.assert_replays(&first);
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_twin_waits_no_longer_than_it_is_set() {
    let app = slow_app(Duration::from_secs(10));
    let began = Instant::now();
    let twin = async {
        let twin = app.send(pay("k")).await;
        twin.assert_problem(ProblemKind::InProgress);
        assert_eq!(twin.header("retry-after"), "1");
        assert_eq!(began.elapsed(), Duration::from_secs(2));
    };
    join(app.send(pay("k")), twin).await;
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_twin_that_waits_runs_when_the_first_frees_the_key() {
    let app = App::with(waiting, |call| async move {
        sleep(Duration::from_millis(500)).await;
        match call.run {
            1 => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::CREATED,
        }
    });
    let (first, twin) = join(app.send(pay("k")), app.send(pay("k"))).await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(twin.status, StatusCode::CREATED);
    assert!(!twin.is_replay());
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_twin_that_waits_is_told_at_once_when_nobody_knows_the_outcome() {
    use tower_idempotency::RetentionOverride;
    let app = App::with(waiting, |_| async {
        sleep(Duration::from_millis(500)).await;
        let mut response = http::Response::new(axum::body::Body::empty());
        let word = RetentionOverride::LeaveUnknown;
        response.extensions_mut().insert(word);
        response
    });
    let began = Instant::now();
    let (_, twin) = join(app.send(pay("k")), app.send(pay("k"))).await;
    twin.assert_problem(ProblemKind::OutcomeUnknown);
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn of_many_that_wait_for_an_abandoned_key_one_takes_over() {
    let app = App::with_engine(
        |engine| engine.on_abandoned(OnAbandoned::Rerun),
        waiting,
        |call| async move {
            sleep(Duration::from_millis(500)).await;
            assert_ne!(call.run, 1, "the first run fails");
            paid(call).await
        },
    );
    let first = tokio::spawn({
        let app = app.clone();
        async move { app.send(pay("k")).await }
    });
    sleep(Duration::from_millis(1)).await;
    let twins = join_all((0..10).map(|_| app.send(pay("k")))).await;
    assert!(first.await.is_err());
    assert!(twins.iter().all(|twin| twin.text() == "run 2"));
    assert_eq!(twins.iter().filter(|twin| !twin.is_replay()).count(), 1);
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_twin_that_leaves_while_it_waits_leaves_nothing_behind() {
    let (app, gate) = app_with_gate(|s| s.in_flight(InFlight::Wait(Duration::from_secs(60))));
    let first = tokio::spawn({
        let app = app.clone();
        async move { app.send(pay("k")).await }
    });
    gate.entered().await;
    let before = app.store().bytes();
    for _ in 0..10 {
        let twin = app.call(pay("k"));
        // Deep in its wait: past the pauses between two looks.
        let waited = tokio::time::timeout(Duration::from_secs(5), twin).await;
        assert!(waited.is_err());
    }
    assert_eq!(app.store().bytes(), before);
    assert_eq!(
        (app.idempotency.running(), app.idempotency.detached()),
        (1, 0)
    );
    gate.open();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(app.idempotency.running(), 0);
}

/// `count` requests with one key, released at once from tasks of their own on several threads.
async fn stampede(app: &App, count: usize) -> Vec<Answer> {
    let start = Arc::new(Barrier::new(count));
    let tasks = (0..count).map(|_| {
        let (app, start) = (app.clone(), Arc::clone(&start));
        tokio::spawn(async move {
            start.wait().await;
            app.send(pay("k")).await
        })
    });
    let answers = join_all(tasks.collect::<Vec<_>>()).await;
    answers.into_iter().map(Result::unwrap).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_requests_at_once_one_runs() {
    for count in [64, 200] {
        for _ in 0..5 {
            let app = App::new(|call| async move {
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                paid(call).await
            });
            let answers = stampede(&app, count).await;
            assert_eq!(app.runs(), 1);
            let first = answers
                .iter()
                .filter(|answer| answer.status == StatusCode::CREATED && !answer.is_replay());
            assert_eq!(first.count(), 1);
            for answer in answers {
                match answer.status {
                    StatusCode::CREATED => assert_eq!(answer.text(), "run 1"),
                    _ => answer.assert_problem(ProblemKind::InProgress),
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_that_wait_at_once_one_runs_and_all_are_answered() {
    let app = App::with(waiting, |call| async move {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        paid(call).await
    });
    for answer in stampede(&app, 200).await {
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(answer.text(), "run 1");
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_hint_never_points_beyond_what_is_left_of_the_lease() {
    let app = App::with_engine(
        |engine| {
            engine
                .lease(Duration::from_secs(30))
                .attempt_limit(Duration::from_secs(30))
        },
        |s| s.retry_after(Duration::from_secs(60)),
        |call| async move {
            sleep(Duration::from_secs(3_600)).await;
            paid(call).await
        },
    );
    let first = tokio::spawn({
        let app = app.clone();
        async move { app.send(pay("k")).await }
    });
    sleep(Duration::from_millis(1)).await;
    let hint = async || {
        let refused = app.send(pay("k")).await;
        refused.assert_problem(ProblemKind::InProgress);
        refused.header("retry-after").to_owned()
    };
    assert_eq!(hint().await, "30");
    // Renewed at 10 s and at 20 s, and from the limit on no more.
    sleep(Duration::from_secs(45)).await;
    assert_eq!(hint().await, "5");
    first.abort();
}
