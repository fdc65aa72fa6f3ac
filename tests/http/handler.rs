//! What a handler can learn of its attempt, and leave for later ones.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use http::{Extensions, StatusCode};
use tower_idempotency::{Attempt, OnAbandoned, Scope};

use crate::app::{App, Call, EngineSettings, ask, pay, post};

const SECRET: &[u8] = b"0123456789abcdef";

fn attempt(extensions: &Extensions) -> &Attempt {
    extensions.get().expect("a guarded request")
}

#[tokio::test]
async fn it_sees_the_lookup_key_and_the_number_of_its_attempt() {
    let app = App::with(
        |s| s.scope(Scope::from_fn(|_| Some("alice".to_owned()))),
        |call| async move {
            let attempt = attempt(&call.head.extensions);
            let key = attempt.key();
            assert_eq!(attempt.idempotency_key().as_str(), key.key());
            let parts = [key.namespace(), key.scope(), key.key()];
            format!("{} {}", parts.join("/"), attempt.number())
        },
    );
    assert_eq!(app.send(pay("\"k 1\"")).await.text(), "http/alice/k 1 1");
}

#[tokio::test]
async fn it_sees_none_where_the_request_is_not_guarded() {
    let app = App::new(|call| async move { call.attempt().is_none().to_string() });
    assert_eq!(app.send(post("/pay")).await.text(), "true");
    assert_eq!(app.send(ask("GET", "/").key("k")).await.text(), "true");
}

#[tokio::test]
async fn the_request_is_passed_on_as_it_came() {
    let app = App::new(|call| async move {
        let head = call.head;
        assert_eq!(head.method, "POST");
        assert_eq!(head.uri, "/a%2Fb/../c?x=1&x=2");
        assert_eq!(head.headers["idempotency-key"], "\"k\";v=1");
        let repeated: Vec<_> = head.headers.get_all("x-a").iter().collect();
        assert_eq!(repeated, ["1", "2"]);
        assert_eq!(head.extensions.get::<u8>(), Some(&7));
        call.body
    });
    let request = post("/a%2Fb/../c?x=1&x=2")
        .key("\"k\";v=1")
        .header("x-a", "1")
        .header("x-a", "2")
        .extension(7_u8)
        .body("bytes");
    assert_eq!(app.send(request).await.text(), "bytes");
}

fn rerun(engine: EngineSettings) -> EngineSettings {
    engine.on_abandoned(OnAbandoned::Rerun)
}

#[tokio::test]
async fn what_it_notes_is_there_for_the_next_attempt() {
    let app = App::with_engine(
        rerun,
        |s| s,
        |call| async move {
            let attempt = attempt(&call.head.extensions);
            if call.run == 1 {
                assert_eq!(attempt.correlation(), None);
                attempt.annotate("order-1").await.unwrap();
                attempt.checkpoint("charged", b"ch_1").await.unwrap();
                panic!("after the charge");
            }
            let charged = attempt.finished("charged").unwrap();
            let charged = String::from_utf8(charged.to_vec()).unwrap();
            assert_eq!(attempt.finished("mailed"), None);
            format!(
                "{} {charged} {}",
                attempt.correlation().unwrap(),
                attempt.number()
            )
        },
    );
    let first = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
    assert!(first.is_err());
    let record = app.record("k").await.unwrap();
    assert_eq!(record.notes.correlation.as_deref(), Some("order-1"));
    assert_eq!(app.send(pay("k")).await.text(), "order-1 ch_1 2");
}

#[tokio::test]
async fn attempts_are_numbered_on_through_releases() {
    let app = App::new(|call| async move {
        let number = attempt(&call.head.extensions).number();
        (StatusCode::SERVICE_UNAVAILABLE, number.to_string())
    });
    for number in ["1", "2", "3"] {
        assert_eq!(app.send(pay("k")).await.text(), number);
    }
}

async fn derived(call: Call) -> (StatusCode, String) {
    let attempt = attempt(&call.head.extensions);
    let keys = ["charge", "mail"].map(|step| attempt.derive(step).unwrap().as_str().to_owned());
    (StatusCode::SERVICE_UNAVAILABLE, keys.join(" "))
}

#[tokio::test]
async fn downstream_keys_are_the_same_on_every_attempt_and_another_for_all_else() {
    let scope =
        || Scope::from_fn(|head| Some(head.headers.get("x-user")?.to_str().ok()?.to_owned()));
    let app = |secret: &'static [u8], namespace: &'static str| {
        App::with_engine(
            move |engine| engine.secret(secret),
            |s| s.scope(scope()).namespace(namespace),
            derived,
        )
    };
    let one = app(SECRET, "http");
    let by = |user: &str, key: &str| pay(key).header("x-user", user);
    let keys = one.send(by("alice", "k")).await;
    assert_eq!(one.send(by("alice", "k")).await.text(), keys.text());
    assert_eq!(one.runs(), 2);
    // The same in another process with the same secret.
    let twin = app(SECRET, "http").send(by("alice", "k")).await;
    assert_eq!(twin.text(), keys.text());

    let mut seen: Vec<String> = keys.text().split(' ').map(str::to_owned).collect();
    for others in [
        one.send(by("bob", "k")).await,
        one.send(by("alice", "l")).await,
        app(SECRET, "jobs").send(by("alice", "k")).await,
        app(b"fedcba9876543210", "http")
            .send(by("alice", "k"))
            .await,
    ] {
        seen.extend(others.text().split(' ').map(str::to_owned));
    }
    for (at, key) in seen.iter().enumerate() {
        assert_eq!(key.len(), 36, "{key}");
        assert!(!seen[..at].contains(key), "{key} twice");
    }
}

#[tokio::test]
async fn without_a_secret_nothing_is_derived() {
    let app = App::new(|call| async move {
        let error = attempt(&call.head.extensions).derive("charge").unwrap_err();
        error.to_string()
    });
    let said = app.send(pay("k")).await;
    assert!(said.text().contains("secret"), "{}", said.text());
}
