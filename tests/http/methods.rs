//! Which requests are guarded.

use http::Method;
use tower_idempotency::{MissingKey, ProblemKind};

use crate::app::{App, ask, paid, pay, post};

#[tokio::test]
async fn post_and_patch_are_guarded_and_no_other_method() {
    for (method, guarded) in [
        ("POST", true),
        ("PATCH", true),
        ("GET", false),
        ("HEAD", false),
        ("OPTIONS", false),
        ("TRACE", false),
        ("QUERY", false),
        ("PUT", false),
        ("DELETE", false),
        ("CONNECT", false),
        ("BREW", false),
        // Methods are told apart by case (RFC 9110, section 9.1).
        ("post", false),
    ] {
        let app = App::with(|s| s.missing_key(MissingKey::Reject), paid);
        let missing = app.send(ask(method, "/pay")).await;
        assert_eq!(missing.status == 400, guarded, "{method}");
        app.send(ask(method, "/pay").key("k")).await;
        let again = app.send(ask(method, "/pay").key("k")).await;
        assert_eq!(again.is_replay(), guarded, "{method}");
        assert_eq!(app.runs(), if guarded { 1 } else { 3 }, "{method}");
    }
}

#[tokio::test]
async fn an_unguarded_method_passes_with_any_key_untouched() {
    let app = App::with(
        |s| s.missing_key(MissingKey::Reject),
        |call| async move {
            assert!(call.attempt().is_none());
            let sent = call.head.headers["idempotency-key"].as_bytes().to_vec();
            (sent, [("x-body", call.body.len().to_string())]).1
        },
    );
    let answer = app
        .send(ask("PUT", "/pay").key("\"broken").body("12345"))
        .await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-body"), "5");
    assert!(app.store().is_empty());
}

#[tokio::test]
async fn other_methods_can_be_guarded_instead() {
    let app = App::with(|s| s.methods([Method::PUT, Method::DELETE]), paid);
    for method in ["PUT", "DELETE"] {
        let first = app.send(ask(method, "/pay").key(method)).await;
        let retry = app.send(ask(method, "/pay").key(method)).await;
        retry.assert_replays(&first);
    }
    app.send(pay("k")).await;
    assert!(!app.send(pay("k")).await.is_replay());
}

#[tokio::test]
async fn a_method_of_ones_own_can_be_guarded() {
    let charge = Method::from_bytes(b"CHARGE").unwrap();
    let app = App::with(|s| s.methods([charge]), paid);
    let first = app.send(ask("CHARGE", "/pay").key("k")).await;
    app.send(ask("CHARGE", "/pay").key("k"))
        .await
        .assert_replays(&first);
}

#[tokio::test]
async fn post_and_patch_with_one_key_are_two_requests() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    let other = app
        .send(ask("PATCH", "/pay").key("k").body("100 THB"))
        .await;
    other.assert_problem(ProblemKind::KeyReused);
}

#[tokio::test]
async fn a_filter_leaves_requests_out() {
    let app = App::with(
        |s| {
            s.missing_key(MissingKey::Reject)
                .guard_if(|head| head.uri.path().starts_with("/pay"))
        },
        paid,
    );
    assert_eq!(app.send(post("/log")).await.status, 201);
    assert_eq!(app.send(post("/log").key("\"")).await.status, 201);
    app.send(post("/pay"))
        .await
        .assert_problem(ProblemKind::MissingKey);
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn the_filter_is_not_asked_about_methods_that_are_not_guarded() {
    let app = App::with(
        |s| s.guard_if(|head| head.method != Method::GET || panic!()),
        paid,
    );
    assert_eq!(app.send(ask("GET", "/pay").key("k")).await.status, 201);
}
