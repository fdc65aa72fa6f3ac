//! Which key a request gets.

use std::collections::HashSet;

use http::{HeaderName, Method};
use tower_idempotency::client::{
    ClientError, ClientLayer, KeyForm, OperationName, SetIdempotencyKeyLayer,
};
use tower_idempotency::{IdempotencyKey, KeyFormat};

use crate::script::{Script, Step, answered, exact, pay, request, status, with};

fn keyed(key: SetIdempotencyKeyLayer) -> ClientLayer {
    ClientLayer::new().key(key).retry(exact())
}

#[tokio::test(start_paused = true)]
async fn all_tries_have_one_key_and_two_operations_have_two() {
    let mut keys = HashSet::new();
    for _ in 0..50 {
        let script = Script::new([
            Step::Reset,
            status(503),
            Step::Silence,
            status(429),
            status(201),
        ]);
        answered(script.ask(&with(exact()), pay()).await, 201);
        let of_one: HashSet<_> = script
            .seen()
            .iter()
            .map(|seen| seen.key().to_owned())
            .collect();
        assert_eq!((script.tries(), of_one.len()), (5, 1));
        let key = of_one.into_iter().next().unwrap();
        let key = key
            .strip_prefix('"')
            .unwrap()
            .strip_suffix('"')
            .unwrap()
            .to_owned();
        assert!(KeyFormat::new().uuid().validate(&key).is_ok(), "{key}");
        assert_eq!(&key[14..15], "4");
        assert!(keys.insert(key));
    }
}

#[tokio::test(start_paused = true)]
async fn post_and_patch_get_a_key_and_other_methods_only_if_one_is_given() {
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "POST", "PATCH", "LOCK"] {
        let script = Script::new([status(200)]);
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let sent = request(method.clone());
        answered(script.ask(&with(exact()), sent).await, 200);
        let has_key = !script.seen()[0].key().is_empty();
        assert_eq!(
            has_key,
            matches!(method.as_str(), "POST" | "PATCH"),
            "{method}"
        );
        let mut given = request(method);
        given
            .extensions_mut()
            .insert(IdempotencyKey::new("mine").unwrap());
        answered(script.ask(&with(exact()), given).await, 200);
        assert_eq!(script.seen()[1].key(), "\"mine\"");
    }
}

#[tokio::test(start_paused = true)]
async fn a_header_that_is_there_is_never_overwritten() {
    for header in ["\"of-the-order\"", "of-the-order", " of-the-order "] {
        let mut given = pay();
        given
            .headers_mut()
            .insert("idempotency-key", header.parse().unwrap());
        given
            .extensions_mut()
            .insert(IdempotencyKey::new("another").unwrap());
        let script = Script::new([Step::Reset, status(201)]);
        answered(script.ask(&with(exact()), given).await, 201);
        for seen in script.seen() {
            assert_eq!(seen.headers.get_all("idempotency-key").iter().count(), 1);
            assert_eq!(seen.key(), header);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_header_that_no_server_would_take_is_refused_before_it_is_sent() {
    let script = Script::new([status(201)]);
    let mut several = pay();
    several
        .headers_mut()
        .append("idempotency-key", "a".parse().unwrap());
    several
        .headers_mut()
        .append("idempotency-key", "b".parse().unwrap());
    let mut broken = pay();
    broken
        .headers_mut()
        .insert("idempotency-key", "\"canary".parse().unwrap());
    for wrong in [several, broken] {
        let told = script.ask(&with(exact()), wrong).await.unwrap_err();
        assert!(matches!(told, ClientError::InvalidKey(_)), "{told:?}");
        assert!(!format!("{told} {told:?}").contains("canary"));
    }
    assert_eq!(script.tries(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_name_and_the_form_of_the_header_can_be_set() {
    let name = HeaderName::from_static("paypal-request-id");
    let layer = SetIdempotencyKeyLayer::new()
        .header(name)
        .form(KeyForm::Bare);
    let mut given = pay();
    given
        .extensions_mut()
        .insert(IdempotencyKey::new("order-17").unwrap());
    let script = Script::new([status(503), status(201)]);
    answered(script.ask(&keyed(layer), given).await, 201);
    assert_eq!(script.tries(), 2);
    for seen in script.seen() {
        assert_eq!(seen.headers["paypal-request-id"], "order-17");
        assert!(seen.key().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_bare_key_that_would_be_read_as_another_is_refused() {
    let layer = keyed(SetIdempotencyKeyLayer::new().form(KeyForm::Bare));
    let script = Script::new([status(201)]);
    for key in [" a", "a ", "a b", "a,b", "a;b", "\"a\"", "a\\b"] {
        let mut given = pay();
        given
            .extensions_mut()
            .insert(IdempotencyKey::new(key).unwrap());
        let told = script.ask(&layer, given).await;
        assert!(
            matches!(told, Err(ClientError::InvalidKey(_))),
            "{key}: {told:?}"
        );
    }
    assert_eq!(script.tries(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_operation_with_a_name_and_no_journal_is_refused() {
    let script = Script::new([status(201)]);
    let mut named = pay();
    named
        .extensions_mut()
        .insert(OperationName::new("order-17"));
    let told = script.ask(&with(exact()), named).await;
    assert!(matches!(told, Err(ClientError::Journal(_))), "{told:?}");
    assert_eq!(script.tries(), 0);
}
