//! Section 2.5: what clients and resources owe each other.

use http::StatusCode;
use serde_json::Value;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, MissingKey, ProblemKind, RetentionPolicy, State,
};

use crate::app::{App, Gate, ask, paid, pay, post};

fn policy(layer: &IdempotencyLayer<MemoryStore>) -> Value {
    serde_json::to_value(layer.policy()).unwrap()
}

/// Section 2.5.1: a client should learn the rules and make its keys accordingly. All that it needs is
/// in one document for programs.
#[tokio::test]
async fn the_rules_for_keys_are_told_in_one_document_for_programs() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let policy = policy(&layer);
    let longest = policy["key_max_bytes"].as_u64().unwrap();
    let header = policy["header"].as_str().unwrap();
    let app = App::behind(&layer, paid);
    let key = |length: u64| "k".repeat(length.try_into().unwrap());
    let kept = app.send(post("/pay").header(header, key(longest))).await;
    assert_eq!(kept.status, StatusCode::CREATED);
    let refused = app
        .send(post("/pay").header(header, key(longest + 1)))
        .await;
    refused.assert_problem(ProblemKind::InvalidKey);
}

/// Section 2.5.1: a client may attach a key anywhere, and cannot assume that it is honoured.
#[tokio::test]
async fn a_key_where_none_is_honoured_does_no_harm() {
    let app = App::with(
        |s| {
            s.missing_key(MissingKey::Reject)
                .guard_if(|head| head.uri.path() == "/pay")
        },
        paid,
    );
    for request in [ask("GET", "/pay"), ask("DELETE", "/pay"), post("/log")] {
        for _ in 0..2 {
            let answer = app.send(request.clone().key("k")).await;
            assert_eq!(answer.status, StatusCode::CREATED);
            // Nothing claims that the key was honoured.
            assert!(!answer.is_replay());
        }
    }
    assert!(app.store().is_empty());
}

/// Section 2.5.2: a resource must publish a specification of its idempotency.
#[test]
fn a_layer_says_what_it_enforces() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let json = policy(&layer);
    for member in [
        "header",
        "syntax",
        "key_format",
        "key_max_bytes",
        "scope",
        "fingerprint",
        "methods",
        "required",
        "retention_seconds",
        "kept",
        "released_statuses",
        "replay_marker",
        "max_request_bytes",
        "max_response_bytes",
        "problems",
    ] {
        assert!(!json[member].is_null(), "{member}");
    }
    let text = layer.policy().to_markdown();
    for word in [
        "Idempotency-Key",
        "POST, PATCH",
        "255",
        "86400",
        "method, path, query",
    ] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
}

/// Section 2.5.2: the specification includes the expiry policy.
#[test]
fn no_policy_is_without_its_expiry() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    assert!(policy(&layer)["retention_seconds"].as_f64().unwrap() > 0.0);
    assert!(
        layer
            .policy()
            .to_markdown()
            .contains("results are kept for")
    );
}

/// Section 2.5.2: the resource manages the life of the key, from its claim to its end.
#[tokio::test(start_paused = true)]
async fn a_key_is_started_then_completed_then_gone() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let watch = async {
        assert!(app.record("k").await.is_none());
        gate.entered().await;
        let state = app.record("k").await.unwrap().state;
        assert!(matches!(state, State::Started { .. }));
        gate.open();
    };
    let (watched, _) = tokio::join!(watch, app.send(pay("k")));
    let () = watched;
    let state = app.record("k").await.unwrap().state;
    assert!(matches!(state, State::Completed { .. }));
    tokio::time::advance(std::time::Duration::from_secs(86_400)).await;
    assert!(app.record("k").await.is_none());
}

/// Section 2.5.2: the server takes the key from the field on each request.
#[tokio::test]
async fn the_key_is_taken_from_the_field_on_each_request() {
    let app = App::new(|call| async move {
        let attempt = call.attempt().unwrap();
        attempt.key().key().to_owned()
    });
    for key in ["a", "b", "c"] {
        assert_eq!(app.send(pay(key)).await.text(), key);
    }
}

/// Section 2.5.2: the server computes the fingerprint, within the limit that it has for that.
#[tokio::test]
async fn the_fingerprint_is_taken_of_bodies_up_to_a_limit() {
    let app = App::with(|s| s.request_limit(4), paid);
    assert_eq!(app.send(pay("a").body("1234")).await.status, 201);
    app.send(pay("b").body("12345"))
        .await
        .assert_problem(ProblemKind::BodyTooLarge);
}

/// Section 2.5.2: the server enforces idempotency.
#[tokio::test]
async fn ten_requests_with_one_key_have_one_effect() {
    let app = App::new(paid);
    for _ in 0..10 {
        assert_eq!(app.send(pay("k")).await.text(), "run 1");
    }
    assert_eq!(app.runs(), 1);
}

/// Section 2.7 sends clients to the documentation of the resource for 401, 403, 429, 500, 502, 503
/// and 504: it says of each whether the response is kept or the same key runs again.
#[tokio::test]
async fn the_policy_says_of_every_status_whether_a_retry_runs_again() {
    for preset in [
        RetentionPolicy::standard(),
        RetentionPolicy::draft(),
        RetentionPolicy::stripe(),
    ] {
        for status in [
            401_u16, 403, 429, 500, 502, 503, 504, 200, 400, 402, 409, 422,
        ] {
            let layer = IdempotencyLayer::builder(MemoryStore::new()).retention(preset.clone());
            let layer = layer.build().unwrap();
            let told = layer.policy().released_statuses.unwrap();
            let app = App::behind(&layer, move |_| async move {
                StatusCode::from_u16(status).unwrap()
            });
            app.send(pay("k")).await;
            app.send(pay("k")).await;
            assert_eq!(
                app.runs() == 2,
                told.contains(&status),
                "{preset:?} {status}"
            );
        }
    }
}
