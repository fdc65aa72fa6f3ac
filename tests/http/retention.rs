//! Which outcomes are kept, by preset, by rule and by the handler's own word.

use std::time::Duration;

use axum::body::Body;
use http::{Response, StatusCode};
use tower_idempotency::{Disposition, ProblemKind, RetentionOverride, RetentionPolicy, State};

use crate::app::{App, pay};

fn answer(status: u16, word: Option<RetentionOverride>) -> Response<Body> {
    let mut response = Response::new(Body::from("body"));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(word) = word {
        response.extensions_mut().insert(word);
    }
    response
}

fn app(policy: RetentionPolicy, status: u16, word: Option<RetentionOverride>) -> App {
    App::with(
        |s| s.retention(policy),
        move |_| async move { answer(status, word) },
    )
}

/// The final statuses that a handler may come up with, registered or not.
fn statuses() -> impl Iterator<Item = u16> {
    200..600
}

#[tokio::test]
async fn each_preset_keeps_what_it_says_and_frees_the_key_of_the_rest() {
    let server_error = |status: u16| status >= 500;
    type Freed = Box<dyn Fn(u16) -> bool>;
    let presets: [(RetentionPolicy, Freed); 3] = [
        (
            RetentionPolicy::standard(),
            Box::new(move |status| {
                server_error(status) || [401, 403, 407, 408, 425, 429].contains(&status)
            }),
        ),
        (RetentionPolicy::draft(), Box::new(|_| false)),
        (
            RetentionPolicy::stripe(),
            Box::new(|status| [401, 403, 407, 409, 429].contains(&status)),
        ),
    ];
    for (policy, freed) in presets {
        for status in statuses() {
            let app = app(policy.clone(), status, None);
            assert_eq!(app.send(pay("k")).await.status, status);
            let retry = app.send(pay("k")).await;
            assert_eq!(retry.status, status);
            let expected = if freed(status) { 2 } else { 1 };
            assert_eq!(app.runs(), expected, "{policy:?} {status}");
            assert_eq!(retry.is_replay(), expected == 1);
        }
    }
}

#[tokio::test]
async fn a_freed_key_takes_another_request() {
    let app = app(RetentionPolicy::standard(), 503, None);
    app.send(pay("k")).await;
    assert_eq!(app.record("k").await.unwrap().state, State::Released);
    assert_eq!(app.send(pay("k").body("1 THB")).await.status, 503);
    assert_eq!(app.runs(), 2);
}

#[tokio::test]
async fn a_rule_of_ones_own_decides_by_status_and_headers() {
    let policy = RetentionPolicy::from_fn("by-header", |head| {
        if head.headers.contains_key("x-final") {
            Disposition::Keep
        } else if head.status == 500 {
            Disposition::LeaveUnknown
        } else {
            Disposition::Release
        }
    });
    let app = App::with(
        |s| s.retention(policy),
        |call| async move {
            let mut response = answer(200, None);
            match call.head.uri.path() {
                "/final" => {
                    let value = http::HeaderValue::from_static("1");
                    response.headers_mut().insert("x-final", value);
                }
                "/broken" => *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR,
                _ => {}
            }
            response
        },
    );
    let ask = |path: &str| crate::app::post(path).key(path);
    for path in ["/final", "/broken", "/other"] {
        app.send(ask(path)).await;
    }
    assert!(app.send(ask("/final")).await.is_replay());
    app.send(ask("/broken"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert!(!app.send(ask("/other")).await.is_replay());
    assert_eq!(app.runs(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_rule_can_keep_an_outcome_for_a_time_of_its_own() {
    let minute = Duration::from_secs(60);
    let policy = RetentionPolicy::from_fn("short", move |_| Disposition::KeepFor(minute));
    let app = app(policy, 402, None);
    app.send(pay("k")).await;
    tokio::time::advance(minute - Duration::from_millis(1)).await;
    assert!(app.send(pay("k")).await.is_replay());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(!app.send(pay("k")).await.is_replay());
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_endless_time_of_ones_own_is_cut_and_overflows_nothing() {
    let policy = RetentionPolicy::from_fn("long", |_| Disposition::KeepFor(Duration::MAX));
    let app = app(policy, 200, None);
    app.send(pay("k")).await;
    tokio::time::advance(Duration::from_secs(365 * 24 * 60 * 60)).await;
    assert!(app.send(pay("k")).await.is_replay());
}

// The handler's word is stronger than every policy.

#[tokio::test]
async fn not_executed_frees_the_key_whatever_the_status() {
    for policy in [RetentionPolicy::standard(), RetentionPolicy::draft()] {
        for status in [200, 400, 422, 500] {
            let app = app(policy.clone(), status, Some(RetentionOverride::NotExecuted));
            assert_eq!(app.send(pay("k")).await.status, status);
            // The corrected request may use the same key.
            assert_eq!(app.send(pay("k").body("1 THB")).await.status, status);
            assert_eq!(app.runs(), 2);
        }
    }
}

#[tokio::test]
async fn keep_pins_an_error_that_came_after_the_effect() {
    for status in [401, 429, 500, 503] {
        let app = app(
            RetentionPolicy::standard(),
            status,
            Some(RetentionOverride::Keep),
        );
        let first = app.send(pay("k")).await;
        app.send(pay("k")).await.assert_replays(&first);
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test]
async fn leave_unknown_holds_the_key_until_it_is_reconciled() {
    for status in [200, 504] {
        let app = app(
            RetentionPolicy::draft(),
            status,
            Some(RetentionOverride::LeaveUnknown),
        );
        assert_eq!(app.send(pay("k")).await.status, status);
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::OutcomeUnknown);
        assert_eq!(app.runs(), 1);
        assert!(app.record("k").await.unwrap().is_abandoned());
    }
}

#[tokio::test]
async fn live_keeps_a_tombstone_of_the_status() {
    let app = app(
        RetentionPolicy::standard(),
        503,
        Some(RetentionOverride::Live),
    );
    assert_eq!(app.send(pay("k")).await.status, 503);
    let retry = app.send(pay("k")).await;
    retry.assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(retry.json()["original_status"], 503);
    assert_eq!(app.runs(), 1);
}
