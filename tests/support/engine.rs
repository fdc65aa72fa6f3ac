//! An engine over a store that fails on demand.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use tower_idempotency::testing::FaultyStore;
use tower_idempotency::{
    Admission, AttemptGuard, Fingerprint, Idempotency, IdempotencyBuilder, IdempotencyKey,
    OnAbandoned, Outcome, Record, ScopedKey, Store,
};

use super::odd::OddStore;

pub type TestStore = FaultyStore<OddStore>;
pub type Engine = Idempotency<TestStore>;

/// The default lease.
pub const LEASE: Duration = Duration::from_secs(30);
pub const SECOND: Duration = Duration::from_secs(1);

pub fn engine() -> Engine {
    engine_with(|settings| settings)
}

/// An engine whose abandoned keys are run again.
pub fn rerunning_engine() -> Engine {
    engine_with(|settings| settings.on_abandoned(OnAbandoned::Rerun))
}

pub fn engine_with(
    settings: impl FnOnce(IdempotencyBuilder<TestStore>) -> IdempotencyBuilder<TestStore>,
) -> Engine {
    let store = FaultyStore::new(OddStore::default());
    settings(Idempotency::builder(store)).build().unwrap()
}

/// Another process that shares the store of this one: another heartbeat, other attempts.
pub fn another_engine(
    engine: &Engine,
    settings: impl FnOnce(IdempotencyBuilder<TestStore>) -> IdempotencyBuilder<TestStore>,
) -> Engine {
    let builder = Idempotency::builder(engine.store().clone());
    settings(builder).build().unwrap()
}

pub fn key(text: &str) -> ScopedKey {
    IdempotencyKey::new(text).unwrap().scoped("engine")
}

pub fn request(text: &str) -> Fingerprint {
    Fingerprint::of(&[text.as_bytes()])
}

pub fn outcome(body: &str) -> Outcome {
    let headers = HeaderMap::new();
    Outcome::response(StatusCode::CREATED, &headers, &[body.as_bytes()], None)
}

/// Claims `k` for the request `r`.
pub async fn admit<S: Store>(engine: &Idempotency<S>) -> Admission {
    engine.admit(&key("k"), request("r")).await.unwrap()
}

/// Claims `k` for the request `r`, which nobody did before.
pub async fn begin<S: Store>(engine: &Idempotency<S>) -> AttemptGuard {
    first(admit(engine).await)
}

pub fn first(admission: Admission) -> AttemptGuard {
    match admission {
        Admission::First(attempt) => attempt,
        other => panic!("not the first: {other:?}"),
    }
}

pub fn replayed(admission: Admission) -> Outcome {
    match admission {
        Admission::Replay(replay) => replay.outcome,
        other => panic!("not a replay: {other:?}"),
    }
}

/// What is left of the lease of the attempt that holds the key.
pub fn lease_left(admission: &Admission) -> Duration {
    match admission {
        Admission::InFlight(holder) => holder.lease_left(),
        other => panic!("not in flight: {other:?}"),
    }
}

/// Returns when the claim is lost.
pub async fn lost(attempt: &AttemptGuard) {
    let lost = tokio::time::timeout(100 * LEASE, attempt.attempt().claim_lost()).await;
    lost.expect("the claim is never lost");
}

#[track_caller]
pub fn assert_unknown(admission: &Admission) {
    assert!(
        matches!(admission, Admission::OutcomeUnknown),
        "{admission:?}"
    );
}

/// What the store holds of `k`, past all faults.
pub async fn record(engine: &Engine) -> Option<Record> {
    let store = engine.store().inner().memory();
    store.lookup(&key("k")).await.unwrap()
}

/// How many tasks the runtime has.
pub fn tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}
