//! Callers who got what was not theirs.

use std::fmt;

use axum::body::Body;
use http::{Response, StatusCode};
use tower_idempotency::{OnNoStore, ProblemKind, Scope, State};

use crate::app::{App, Ask, paid, pay, post};

#[derive(Clone)]
struct Principal(&'static str);

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

fn by(principal: &'static str) -> Ask {
    pay("k").extension(Principal(principal))
}

fn scoped() -> Scope {
    Scope::extension::<Principal>()
}

/// Everybody without an identity shared the scope "anonymous".
/// <https://github.com/KanishJebaMathewM/Truxify/issues/2382>
#[tokio::test]
async fn there_is_no_bucket_that_strangers_share_by_accident() {
    let app = App::with(|s| s.scope(scoped()), paid);
    for request in [pay("k"), by("")] {
        app.send(request)
            .await
            .assert_problem(ProblemKind::ScopeUnavailable);
    }
    assert_eq!(app.runs(), 0);
}

/// The scope was one constant for all who were authenticated.
/// <https://github.com/nensii21/devlink/issues/773>
#[tokio::test]
async fn two_principals_are_two_runs_and_two_bodies() {
    let app = App::with(
        |s| s.scope(scoped()),
        |call| async move { call.head.extensions.get::<Principal>().unwrap().0 },
    );
    for principal in ["alice", "bob"] {
        assert_eq!(app.send(by(principal)).await.text(), principal);
    }
    assert_eq!(app.runs(), 2);
}

/// Credentials were stored in clear and replayed to another principal.
/// <https://github.com/apache/polaris/pull/3803>
#[tokio::test]
async fn credentials_in_an_answer_reach_nobody_else_and_can_be_kept_out_of_the_store() {
    let app = App::with(
        |s| s.on_no_store(OnNoStore::Tombstone),
        |_| async { ([("cache-control", "no-store")], "secret-token") },
    );
    let ask = |token: &str| pay("k").header("authorization", token);
    assert_eq!(app.send(ask("alice")).await.text(), "secret-token");
    let other = app.send(ask("bob")).await;
    other.assert_problem(ProblemKind::CallerChanged);
    assert!(!other.text().contains("secret"));
    app.send(ask("alice"))
        .await
        .assert_problem(ProblemKind::ResponseNotKept);
    let State::Completed { outcome, .. } = app.record("k").await.unwrap().state else {
        panic!("not completed");
    };
    let stored = String::from_utf8_lossy(outcome.as_bytes());
    assert!(!stored.contains("secret"), "{stored}");
    assert_eq!(app.runs(), 1);
}

/// Cookies and challenges were replayed; answers too large were run again; keys had no bound.
/// <https://github.com/granit-fx/granit-dotnet/pull/1151>,
/// <https://github.com/ujeenet/rustango/pull/1259>
#[tokio::test]
async fn replays_are_clean_large_answers_run_once_and_keys_are_bounded() {
    let app = App::new(|_| async {
        [
            ("set-cookie", "session=1"),
            ("www-authenticate", "Basic"),
            ("etag", "1"),
        ]
    });
    app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    assert!(!retry.headers.contains_key("set-cookie"));
    assert!(!retry.headers.contains_key("www-authenticate"));
    assert_eq!(retry.header("etag"), "1");

    let app = App::with(|s| s.response_limit(4), |_| async { "12345" });
    assert_eq!(app.send(pay("k")).await.text(), "12345");
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(app.runs(), 1);

    let app = App::new(paid);
    app.send(pay(&"k".repeat(257)))
        .await
        .assert_problem(ProblemKind::InvalidKey);
    assert!(app.store().is_empty());
}

/// A replay took no notice of a right that had been revoked meanwhile.
/// <https://github.com/margince/margince/issues/5315>
#[tokio::test]
async fn a_right_that_was_revoked_meanwhile_is_noticed() {
    let app = App::with(
        |s| {
            s.authorize_replay(|head, _| {
                let revoked = head.headers.contains_key("x-revoked");
                async move {
                    let mut refused = Response::new(bytes::Bytes::new());
                    *refused.status_mut() = StatusCode::FORBIDDEN;
                    if revoked { Err(refused) } else { Ok(()) }
                }
            })
        },
        paid,
    );
    let first = app.send(pay("k")).await;
    assert_eq!(
        app.send(pay("k").header("x-revoked", "1")).await.status,
        403
    );
    app.send(pay("k")).await.assert_replays(&first);
}

/// Switching the organisation replayed the answer of the one before.
/// <https://github.com/chuanghiduoc/nestjs-fastify-nx/pull/168>
#[tokio::test]
async fn one_user_in_two_organisations_is_two_callers() {
    let scope = Scope::from_fn(|head| {
        let user = head.extensions.get::<Principal>()?.0;
        let organisation = head.headers.get("x-organisation")?.to_str().ok()?;
        Some(format!("{user}/{organisation}"))
    });
    let app = App::with(|s| s.scope(scope), paid);
    for organisation in ["north", "south"] {
        let answer = app
            .send(by("alice").header("x-organisation", organisation))
            .await;
        assert!(!answer.is_replay());
    }
    assert_eq!(app.runs(), 2);
}

/// The template of the route was taken for the resource: two tickets were one operation.
/// <https://github.com/fullstackhero/docs/pull/240>
#[tokio::test]
async fn two_resources_of_one_route_are_two_operations() {
    let app = App::new(|call| async move { Body::from(call.head.uri.path().to_owned()) });
    assert_eq!(app.send(post("/t/1").key("k")).await.text(), "/t/1");
    for other in ["/t/2", "/t/1/", "/t%2F1", "/t/x/../1", "/T/1"] {
        let answer = app.send(post(other).key("k")).await;
        answer.assert_problem(ProblemKind::KeyReused);
    }
    assert_eq!(app.runs(), 1);
}
