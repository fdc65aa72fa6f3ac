//! The Redis store against servers that fail, networks that break, and values that are damaged.

#[path = "../support/redis_proxy.rs"]
mod proxy;
#[path = "../support/redis.rs"]
mod support;

mod costs;
mod crashes;
mod expiry;
mod processes;
mod replicas;
mod startup;
mod tls;
mod values;
mod wire;

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Fingerprint, IdempotencyKey, Outcome, Record, RedisStore,
    ScopedKey, Store, StoreError, StoreErrorKind,
};

fn key(name: &str) -> ScopedKey {
    ScopedKey::new("test", "scope", &IdempotencyKey::new(name).unwrap())
}

fn request(name: &str) -> ClaimRequest {
    ClaimRequest::new(key(name), Fingerprint::of(&[b"the same for all"]))
}

/// The same claim by a new owner.
fn another(of: &ClaimRequest) -> ClaimRequest {
    ClaimRequest::new(of.key.clone(), of.fingerprint)
}

fn outcome(body: &[u8]) -> Outcome {
    Outcome::response(StatusCode::CREATED, &HeaderMap::new(), &[body], None)
}

fn large_outcome() -> Outcome {
    let body: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
    outcome(&body)
}

async fn acquire(store: &RedisStore, request: &ClaimRequest) -> Claim {
    match store.claim(request).await {
        Ok(Claimed::Acquired { claim, .. }) => claim,
        other => panic!("not acquired: {other:?}"),
    }
}

async fn existing(store: &RedisStore, request: &ClaimRequest) -> Record {
    match store.claim(request).await {
        Ok(Claimed::Existing(record)) => record,
        other => panic!("not shown: {other:?}"),
    }
}

async fn record(store: &RedisStore, key: &ScopedKey) -> Record {
    store.lookup(key).await.unwrap().expect("a record")
}

fn outcome_of(record: &Record) -> &Outcome {
    match &record.state {
        tower_idempotency::State::Completed { outcome, .. } => outcome,
        other => panic!("not completed: {other:?}"),
    }
}

#[track_caller]
fn unavailable<T: std::fmt::Debug>(result: Result<T, StoreError>) -> StoreError {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    error
}

const HOUR: Duration = Duration::from_secs(60 * 60);
