//! Section 5: security considerations.

use tower_idempotency::{IdempotencyLayer, KeyFormat, MemoryStore, ProblemKind, Scope};

use crate::app::{App, Ask, broken, paid, pay, steps};

/// Section 5: keys that were not validated are injected into a lookup.
#[tokio::test]
async fn keys_are_data_and_never_patterns_paths_or_statements() {
    let app = App::new(paid);
    let keys = [
        "%",
        "_",
        "*",
        "?",
        "k*",
        "../../etc/passwd",
        "' OR '1'='1",
        "1; DROP TABLE keys--",
        "{k}",
        "[a-z]",
        "$gt",
        "${jndi:x}",
        "http:k",
        "k",
        "%00",
        "|k",
    ];
    for (before, key) in keys.iter().enumerate() {
        let quoted = format!("\"{key}\"");
        let first = app.send(pay(&quoted)).await;
        assert!(!first.is_replay(), "{key} matched another key");
        assert_eq!(app.runs(), before + 1);
        app.send(pay(&quoted)).await.assert_replays(&first);
    }
    assert_eq!(app.store().len(), keys.len());
}

fn scoped() -> App {
    let scope = Scope::from_fn(|head| head.extensions.get::<&str>().map(|user| (*user).to_owned()));
    App::with(|s| s.scope(scope), |_| async { "balance of this caller" })
}

fn by(user: &'static str, ask: Ask) -> Ask {
    ask.extension(user)
}

/// Section 5: keys of low entropy let a client read the answers of others.
#[tokio::test]
async fn a_guessed_key_of_another_caller_looks_like_an_unused_one() {
    let app = scoped();
    app.send(by("victim", pay("1"))).await;
    let guessed = app
        .send(by("attacker", pay("1").body("another body")))
        .await;
    let unused = app
        .send(by("attacker", pay("2").body("another body")))
        .await;
    assert_eq!(guessed.status, unused.status);
    assert_eq!(guessed.headers, unused.headers);
    assert_eq!(guessed.body, unused.body);
    assert_eq!(app.runs(), 3);
}

/// Section 5: a format should be fixed and published.
#[tokio::test]
async fn a_format_can_be_fixed_and_is_published() {
    let format = KeyFormat::new().uuid();
    let layer = IdempotencyLayer::builder(MemoryStore::new()).key_format(format);
    let layer = layer.build().unwrap();
    assert_eq!(layer.policy().key_format, "uuid");
    assert!(layer.policy().to_markdown().contains("format: uuid"));
    let answer = App::behind(&layer, paid).send(pay("1")).await;
    answer.assert_problem(ProblemKind::InvalidKey);
}

/// Section 5: a key is validated before anything is processed.
#[tokio::test]
async fn a_key_is_validated_before_the_scope_the_body_and_the_store() {
    let scope = Scope::from_fn(|_| panic!("the scope was asked for"));
    let app = App::with(|s| s.scope(scope), paid);
    let unread = pay("\"1").stream(steps([broken()]));
    app.send(unread)
        .await
        .assert_problem(ProblemKind::InvalidKey);
    assert!(app.store().is_empty());
    assert_eq!(app.runs(), 0);
}

/// Section 5: the lookup key is composed of the client's key and of what only the resource knows.
#[tokio::test]
async fn the_lookup_key_has_a_part_that_comes_from_authenticated_state() {
    let app = scoped();
    app.send(by("alice", pay("k"))).await;
    let record = app.record_of("alice", "k").await.unwrap();
    assert_eq!((record.key.scope(), record.key.key()), ("alice", "k"));
    assert!(app.record_of("", "k").await.is_none());
    // What the client says of itself is no part of it.
    let claimed = by("bob", pay("k")).header("x-user", "alice");
    assert!(!app.send(claimed).await.is_replay());
    // Parts that run into each other are two keys all the same.
    let app = scoped();
    app.send(by("a", pay("bc"))).await;
    assert!(!app.send(by("ab", pay("c"))).await.is_replay());
}
