//! The moves as tests make them: with an answer that must be one of a kind.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::fmt::Debug;
use std::time::Duration;

use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, OnAbandoned, Outcome,
    Record, ScopedKey, State, Store, StoreError, StoreErrorKind,
};

pub const LEASE: Duration = Duration::from_secs(600);

pub fn key(name: &str) -> ScopedKey {
    ScopedKey::new("tests", "", &IdempotencyKey::new(name).unwrap())
}

pub fn fingerprint() -> Fingerprint {
    Fingerprint::of(&[b"tests"])
}

/// By a new owner.
pub fn request(name: &str) -> ClaimRequest {
    let mut request = ClaimRequest::new(key(name), fingerprint());
    request.lease = LEASE;
    request
}

/// By a new owner who would take over.
pub fn rerun(name: &str) -> ClaimRequest {
    let mut request = request(name);
    request.on_abandoned = OnAbandoned::Rerun;
    request
}

pub async fn acquire(store: &impl Store, request: &ClaimRequest) -> Claim {
    match store.claim(request).await.unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("the claim was not acquired: {record:?}"),
    }
}

pub async fn existing(store: &impl Store, request: &ClaimRequest) -> Record {
    match store.claim(request).await.unwrap() {
        Claimed::Existing(record) => record,
        Claimed::Acquired { claim, .. } => panic!("the claim was acquired: {claim:?}"),
    }
}

pub async fn finish(store: &impl Store, claim: &Claim, outcome: &Outcome) {
    let completion = store.complete(claim, outcome, None).await.unwrap();
    assert_eq!(completion, Completion::Recorded);
}

pub fn outcome(record: &Record) -> &Outcome {
    match &record.state {
        State::Completed { outcome, .. } => outcome,
        _ => panic!("not completed: {record:?}"),
    }
}

#[track_caller]
pub fn unavailable<T: Debug>(reply: Result<T, StoreError>) -> StoreError {
    of_kind(StoreErrorKind::Unavailable, reply)
}

#[track_caller]
pub fn of_kind<T: Debug>(kind: StoreErrorKind, reply: Result<T, StoreError>) -> StoreError {
    let error = reply.expect_err("it must not succeed");
    assert_eq!(error.kind(), kind, "{error:?}");
    error
}
