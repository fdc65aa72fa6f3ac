//! Sections 2.1, 2.2, 3.1 and 6: the field, its value and its uniqueness.

use http::HeaderValue;
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, KeyFormat, KeySyntax, MemoryStore, ProblemKind, Scope,
};

use crate::app::{App, paid, pay, post};

fn strict() -> App {
    App::with(|s| s.key_syntax(KeySyntax::Strict), paid)
}

/// Section 2.1: the field is an Item Structured Header whose value is a String.
#[tokio::test]
async fn the_value_is_a_structured_field_item_of_the_type_string() {
    let app = strict();
    let first = app.send(pay("\"k\"")).await;
    assert_eq!(first.status, 201);
    // Parameters are legal on an Item, and none is defined: they are ignored.
    for same in ["\"k\";a", "\"k\"; b=1", "\"k\";c=?0;d=\"e\"", "  \"k\"  "] {
        app.send(pay(same)).await.assert_replays(&first);
    }
    for other in [
        "k",
        "1",
        "1.5",
        "?1",
        ":YWJj:",
        "(\"k\")",
        "\"k\", \"k\"",
        "\"k",
    ] {
        let answer = app.send(pay(other)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 1);
}

/// Section 2.2: the owner of the resource says what "unique" means.
#[tokio::test]
async fn the_owner_says_among_whom_keys_are_unique_and_the_policy_tells_it() {
    let layer = |scope: Option<Scope>| {
        let builder = IdempotencyLayer::builder(MemoryStore::new());
        match scope {
            Some(scope) => builder.scope(scope),
            None => builder,
        }
        .build()
        .unwrap()
    };
    let per_caller = Scope::from_fn(|head| {
        let caller = head.headers.get("x-caller")?;
        Some(caller.to_str().ok()?.to_owned())
    });
    for (scope, told, runs) in [
        (Some(per_caller), "one per authenticated caller", 2),
        (Some(Scope::everybody()), "shared by all callers", 1),
    ] {
        let layer = layer(scope);
        assert_eq!(layer.policy().scope, told);
        let app = App::behind(&layer, paid);
        for caller in ["alice", "bob"] {
            app.send(pay("k").header("x-caller", caller)).await;
        }
        assert_eq!(app.runs(), runs);
    }
    // Nobody shares a space of keys without having asked for it.
    assert_eq!(layer(None).policy().scope, "by the caller's credentials");
}

/// Section 2.2: a UUID or a comparable random value is recommended.
#[tokio::test]
async fn keys_that_are_made_here_are_random_uuids_and_a_service_can_demand_uuids() {
    let format = KeyFormat::new().uuid();
    let app = App::with(|s| s.key_format(format), paid);
    for run in 1..=3 {
        let key = IdempotencyKey::random();
        assert_eq!(&key.as_str()[14..15], "4", "version 4");
        let answer = app.send(pay(key.as_str())).await;
        assert_eq!(answer.text(), format!("run {run}"));
    }
    let answer = app.send(pay("order-1")).await;
    answer.assert_problem(ProblemKind::InvalidKey);
}

/// Section 3.1: the field is named `Idempotency-Key`.
#[tokio::test]
async fn the_field_is_idempotency_key_in_any_case() {
    let app = App::new(paid);
    let first = app
        .send(post("/pay").header("Idempotency-Key", "\"k\""))
        .await;
    for name in ["idempotency-key", "IDEMPOTENCY-KEY", "iDeMpOtEnCy-KeY"] {
        let retry = app.send(post("/pay").header(name, "\"k\"")).await;
        retry.assert_replays(&first);
    }
    for other in ["idempotency_key", "x-idempotency-key", "idempotencykey"] {
        let passed = app.send(post("/pay").header(other, "\"k\"")).await;
        assert!(!passed.is_replay());
    }
}

/// Section 6: the examples, a UUID of version 4 and a string of 32 random letters.
#[tokio::test]
async fn the_examples_of_the_draft_are_taken() {
    for example in [
        "\"8e03978e-40d5-43e8-bc93-6894a57f9324\"",
        "\"clkyoesmbgybucifusbbtdsbohtyuuwz\"",
    ] {
        for app in [strict(), App::new(paid)] {
            let first = app.send(pay(example)).await;
            assert_eq!(first.status, 201);
            app.send(pay(example)).await.assert_replays(&first);
            let key = IdempotencyKey::new(example.trim_matches('"')).unwrap();
            assert_eq!(key.to_sf_string(), HeaderValue::from_static(example));
        }
    }
}
