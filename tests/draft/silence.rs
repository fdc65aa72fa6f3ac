//! Points on which the draft is silent, and what this crate does.

use std::time::Duration;

use http::StatusCode;
use tokio::time::advance;
use tower_idempotency::{
    IdempotencyLayer, InFlight, MemoryStore, ProblemKind, RetentionOverride, RetentionPolicy, Scope,
};

use crate::app::{App, Gate, Settings, ask, paid, pay, post};

/// A refusal of a twin while the handler of the first request is held up.
async fn twin_of(settings: impl FnOnce(Settings) -> Settings) -> crate::app::Answer {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::with(settings, move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let twin = async {
        gate.entered().await;
        let answer = app.send(pay("k")).await;
        gate.open();
        answer
    };
    tokio::join!(app.send(pay("k")), twin).1
}

/// When to come back after a 409: in whole seconds, one at least, and never beyond the lease.
#[tokio::test(start_paused = true)]
async fn a_conflict_says_when_to_come_back() {
    assert_eq!(twin_of(|s| s).await.header("retry-after"), "1");
    for (set, told) in [(7, "7"), (300, "30")] {
        let answer = twin_of(|s| s.retry_after(Duration::from_secs(set))).await;
        assert_eq!(answer.header("retry-after"), told);
    }
    let waited = twin_of(|s| s.in_flight(InFlight::Wait(Duration::from_secs(2)))).await;
    assert_eq!(waited.status, StatusCode::CONFLICT);
}

/// What an error of the server does to the key: it frees it, unless a preset says otherwise.
#[tokio::test]
async fn an_error_of_the_server_frees_the_key_or_is_kept_by_preset() {
    for (preset, runs) in [
        (RetentionPolicy::standard(), 2),
        (RetentionPolicy::stripe(), 1),
        (RetentionPolicy::draft(), 1),
    ] {
        let app = App::with(
            |s| s.retention(preset),
            |_| async { StatusCode::INTERNAL_SERVER_ERROR },
        );
        app.send(pay("k")).await;
        app.send(pay("k")).await;
        assert_eq!(app.runs(), runs);
    }
}

/// How a client can tell a replay.
#[tokio::test]
async fn replays_and_only_replays_are_marked() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    assert!(!first.headers.contains_key("idempotency-replayed"));
    let retry = app.send(pay("k")).await;
    assert_eq!(retry.header("idempotency-replayed"), "true");

    let other = App::with(|s| s.replay_marker("Idempotent-Replayed"), paid);
    other.send(pay("k")).await;
    let retry = other.send(pay("k")).await;
    assert_eq!(retry.header("idempotent-replayed"), "true");
}

/// A malformed value is a 400, and never ignored: the request would run unprotected.
#[tokio::test]
async fn a_malformed_key_is_a_400_and_nothing_runs() {
    let app = App::new(paid);
    for value in ["\"k", "k k", "k;v=1", "\"k\"k"] {
        let answer = app.send(pay(value)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 0);
}

/// An empty String, a key of more than 255 bytes, and several field lines are 400s.
#[tokio::test]
async fn empty_long_and_repeated_keys_are_400s() {
    let app = App::new(paid);
    let long = "k".repeat(256);
    for request in [
        pay("\"\""),
        pay(""),
        pay(&long),
        pay("k").key("k"),
        pay("\"a").key("b\""),
    ] {
        let answer = app.send(request).await;
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 0);
    assert_eq!(app.send(pay(&"k".repeat(255))).await.status, 201);
}

/// An expired key is one that was never used.
#[tokio::test(start_paused = true)]
async fn an_expired_key_begins_a_first_request() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    advance(Duration::from_secs(86_400 - 1)).await;
    assert!(app.send(pay("k")).await.is_replay());
    advance(Duration::from_secs(2)).await;
    let again = app.send(pay("k").body("1 THB")).await;
    assert_eq!(again.text(), "run 2");
}

/// The same key on another resource or with another method is never answered from the first one.
#[tokio::test]
async fn the_answer_of_one_operation_is_never_given_to_another() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    for other in [
        post("/refund").key("k").body("100 THB"),
        post("/pay/").key("k").body("100 THB"),
        post("/pay?again").key("k").body("100 THB"),
        ask("PATCH", "/pay").key("k").body("100 THB"),
    ] {
        let answer = app.send(other).await;
        answer.assert_problem(ProblemKind::KeyReused);
    }
    assert_eq!(app.runs(), 1);
}

/// A result that is too large to be kept is given once; a retry learns that it is done, and how.
#[tokio::test]
async fn a_result_too_large_to_keep_runs_once_and_is_never_replayed_empty() {
    let app = App::with(
        |s| s.response_limit(10),
        |_| async { (StatusCode::CREATED, "more than ten bytes") },
    );
    assert_eq!(app.send(pay("k")).await.text(), "more than ten bytes");
    let retry = app.send(pay("k")).await;
    retry.assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(retry.json()["original_status"], 201);
    assert_eq!(app.runs(), 1);
}

/// A mismatch leaves the record as it was.
#[tokio::test]
async fn a_mismatch_does_no_harm_to_the_first_request() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    let record = app.record("k").await;
    let mismatch = app.send(pay("k").body("1 THB")).await;
    mismatch.assert_problem(ProblemKind::KeyReused);
    assert_eq!(app.record("k").await, record);
    app.send(pay("k")).await.assert_replays(&first);
}

/// Every problem has a code for programs, in the document and in a header.
#[tokio::test]
async fn a_problem_can_be_told_by_programs_without_reading_its_texts() {
    let answer = App::new(paid).send(pay("\"")).await;
    assert_eq!(answer.json()["code"], "invalid_key");
    assert_eq!(answer.header("idempotency-error"), "invalid_key");
    let mut codes: Vec<_> = ProblemKind::ALL.iter().map(|kind| kind.code()).collect();
    codes.sort_unstable();
    codes.dedup();
    assert_eq!(codes.len(), ProblemKind::ALL.len());
}

/// What failed before the handler began is not kept, by whatever layer it failed; a handler says so
/// of its own checks.
#[tokio::test]
async fn a_request_that_failed_before_its_work_began_may_use_its_key_again() {
    // In a layer inside this one, by its status.
    for status in [401_u16, 403, 429, 503] {
        let app = App::new(move |call| async move {
            match call.run {
                1 => StatusCode::from_u16(status).unwrap(),
                _ => StatusCode::CREATED,
            }
        });
        assert_eq!(app.send(pay("k")).await.status, status);
        assert_eq!(app.send(pay("k")).await.status, 201);
    }
    // In the handler, by its word.
    let app = App::new(|call| async move {
        let mut response = http::Response::new(axum::body::Body::empty());
        if call.body.as_ref() == b"no amount" {
            *response.status_mut() = StatusCode::BAD_REQUEST;
            let word = RetentionOverride::NotExecuted;
            response.extensions_mut().insert(word);
        }
        response
    });
    assert_eq!(app.send(pay("k").body("no amount")).await.status, 400);
    assert_eq!(app.send(pay("k").body("100 THB")).await.status, 200);
    // In this layer, before the claim.
    let scope = Scope::from_fn(|head| head.extensions.get::<String>().cloned());
    let layer = IdempotencyLayer::builder(MemoryStore::new()).scope(scope);
    let app = App::behind(&layer.build().unwrap(), paid);
    assert_eq!(app.send(pay("k")).await.status, 500);
    let known = pay("k").extension("alice".to_owned());
    assert_eq!(app.send(known).await.status, 201);
}
