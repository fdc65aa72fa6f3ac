//! Whose key it is: callers never get each other's answers.

use std::fmt;

use http::{HeaderName, StatusCode};
use tower_idempotency::{ProblemKind, Scope};

use crate::app::{App, Ask, Call, paid, pay};

#[derive(Clone)]
struct User(&'static str);

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

const ACCOUNT: HeaderName = HeaderName::from_static("x-account");

fn as_user(user: &'static str) -> Ask {
    pay("k").extension(User(user))
}

fn with_token(token: &str) -> Ask {
    pay("k").header("authorization", format!("Bearer {token}"))
}

async fn statement(call: Call) -> String {
    let user = call.head.extensions.get::<User>();
    format!("run {}, balance of {}", call.run, user.unwrap().0)
}

#[tokio::test]
async fn two_callers_with_one_key_run_twice_and_get_their_own_answers() {
    let app = App::with(|s| s.scope(Scope::extension::<User>()), statement);
    let alice = app.send(as_user("alice")).await;
    let bob = app.send(as_user("bob")).await;
    assert_eq!(alice.text(), "run 1, balance of alice");
    assert_eq!(bob.text(), "run 2, balance of bob");
    app.send(as_user("alice")).await.assert_replays(&alice);
    app.send(as_user("bob")).await.assert_replays(&bob);
    assert_eq!(app.runs(), 2);
}

#[tokio::test]
async fn a_key_of_another_scope_looks_like_one_that_was_never_used() {
    let app = App::with(
        |s| s.scope(Scope::extension::<User>()),
        |_| async { "paid" },
    );
    app.send(as_user("alice")).await;
    // With another body, which in the scope of alice would be a mismatch.
    let used = app.send(as_user("bob").body("1 THB")).await;
    let unused = app.send(pay("unused").extension(User("bob"))).await;
    assert_eq!(used.status, 200);
    assert_eq!(used.status, unused.status);
    assert_eq!(used.headers, unused.headers);
    assert_eq!(used.body, unused.body);
}

#[tokio::test]
async fn a_header_of_a_trusted_proxy_can_be_the_scope() {
    let app = App::with(|s| s.scope(Scope::header(ACCOUNT)), paid);
    let first = app.send(pay("k").header("x-account", "1")).await;
    let other = app.send(pay("k").header("x-account", "2")).await;
    assert!(!other.is_replay());
    app.send(pay("k").header("x-account", "1"))
        .await
        .assert_replays(&first);
}

#[tokio::test]
async fn a_function_can_join_the_user_and_the_organisation() {
    let scope = Scope::from_fn(|head| {
        let user = head.extensions.get::<User>()?;
        let organisation = head.headers.get("x-organisation")?.to_str().ok()?;
        Some(format!("{}:{user}:{organisation}", user.0.len()))
    });
    let app = App::with(|s| s.scope(scope), paid);
    let ask = |organisation: &str| as_user("alice").header("x-organisation", organisation);
    app.send(ask("north")).await;
    assert!(!app.send(ask("south")).await.is_replay());
    assert!(app.send(ask("north")).await.is_replay());
}

#[tokio::test]
async fn one_scope_for_everybody_has_to_be_asked_for() {
    let app = App::with(|s| s.scope(Scope::everybody()), paid);
    let first = app.send(with_token("alice")).await;
    app.send(with_token("bob")).await.assert_replays(&first);
}

#[tokio::test]
async fn a_request_without_a_scope_is_refused_and_nothing_runs() {
    for scope in [
        Scope::extension::<User>(),
        Scope::header(ACCOUNT),
        Scope::from_fn(|_| None),
    ] {
        let app = App::with(|s| s.scope(scope), paid);
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::ScopeUnavailable);
        assert_eq!(app.runs(), 0);
        assert!(app.store().is_empty());
    }
}

#[tokio::test]
async fn an_empty_scope_is_none_since_it_would_be_everybodys() {
    for (scope, request) in [
        (Scope::extension::<User>(), as_user("")),
        (Scope::header(ACCOUNT), pay("k").header("x-account", "")),
        (Scope::from_fn(|_| Some(String::new())), pay("k")),
    ] {
        let app = App::with(|s| s.scope(scope), paid);
        app.send(request)
            .await
            .assert_problem(ProblemKind::ScopeUnavailable);
        assert_eq!(app.runs(), 0);
    }
}

#[tokio::test]
async fn a_scope_header_that_came_twice_or_is_no_text_is_none() {
    let app = App::with(|s| s.scope(Scope::header(ACCOUNT)), paid);
    let twice = pay("k").header("x-account", "1").header("x-account", "1");
    app.send(twice)
        .await
        .assert_problem(ProblemKind::ScopeUnavailable);
    let bytes = pay("k").header("x-account", b"\xff");
    app.send(bytes)
        .await
        .assert_problem(ProblemKind::ScopeUnavailable);
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn a_missing_scope_can_be_a_401() {
    let app = App::with(
        |s| {
            s.scope(Scope::extension::<User>()).problems(|problem| {
                if problem.kind == ProblemKind::ScopeUnavailable {
                    problem.status = StatusCode::UNAUTHORIZED;
                }
            })
        },
        paid,
    );
    let answer = app.send(pay("k")).await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    assert_eq!(answer.header("idempotency-error"), "scope_unavailable");
}

#[tokio::test]
async fn a_request_without_a_key_needs_no_scope() {
    let app = App::with(|s| s.scope(Scope::extension::<User>()), paid);
    assert_eq!(app.send(crate::app::post("/pay")).await.status, 201);
}

#[tokio::test]
async fn without_a_scope_another_caller_is_refused_and_never_answered() {
    let app = App::new(|_| async { "secret of alice" });
    let first = app.send(with_token("alice")).await;
    for other in [
        with_token("bob"),
        pay("k"),
        pay("k").header("cookie", "session=bob"),
        with_token("alice").header("cookie", "session=1"),
        with_token("alice").header("authorization", "Bearer alice"),
    ] {
        let answer = app.send(other).await;
        answer.assert_problem(ProblemKind::CallerChanged);
        assert!(!answer.text().contains("alice"));
    }
    app.send(with_token("alice")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn another_caller_with_another_body_is_told_of_the_body_only() {
    let app = App::new(paid);
    app.send(with_token("alice")).await;
    let answer = app.send(with_token("bob").body("1 THB")).await;
    answer.assert_problem(ProblemKind::KeyReused);
}

#[tokio::test]
async fn with_a_scope_renewed_credentials_are_the_same_caller() {
    let app = App::with(|s| s.scope(Scope::extension::<User>()), paid);
    let old = as_user("alice").header("authorization", "Bearer old");
    let new = as_user("alice").header("authorization", "Bearer new");
    let first = app.send(old).await;
    app.send(new).await.assert_replays(&first);
}
