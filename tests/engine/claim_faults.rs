//! Claims that fail, that are applied although they fail, and that arrive late.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{AdmitError, Settled, State, StoreError, StoreErrorKind};

use crate::engine::*;
use crate::odd::Odd;

async fn refused(engine: &Engine) -> StoreError {
    match engine.admit(&key("k"), request("r")).await {
        Err(AdmitError::Store(error)) => error,
        other => panic!("not refused: {other:?}"),
    }
}

async fn is_released(engine: &Engine) -> bool {
    record(engine)
        .await
        .is_some_and(|record| record.state == State::Released)
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_not_applied_is_asked_for_again() {
    let engine = engine();
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(3), Fault::Fail);
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 1);
    assert_eq!(store.calls(Move::Claim), 4);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    sleep(LEASE).await;
    assert_eq!(store.calls(Move::Release), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_was_lost_is_recognised_as_ones_own() {
    let engine = engine();
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(3), Fault::LoseReply);
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 1);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    sleep(LEASE).await;
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
    assert_eq!(store.calls(Move::Release), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fails_for_good_is_refused_and_its_key_is_freed() {
    for fault in [Fault::Fail, Fault::LoseReply] {
        let engine = engine();
        let store = engine.store();
        store.inject(Move::Claim, Calls::Next(4), fault);
        let error = refused(&engine).await;
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert_eq!(store.calls(Move::Claim), 4);
        let was_applied = fault == Fault::LoseReply;
        assert_eq!(record(&engine).await.is_some(), was_applied);

        sleep(Duration::from_millis(1)).await;
        assert_eq!(is_released(&engine).await, was_applied);
        let attempt = begin(&engine).await;
        assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_is_freed_as_soon_as_the_store_is_back() {
    let engine = engine();
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(4), Fault::LoseReply);
    store.inject(Move::Release, Calls::Every, Fault::Fail);
    refused(&engine).await;
    sleep(LEASE / 2).await;
    assert!(lease_left(&admit(&engine).await) > Duration::ZERO);
    store.heal();
    // The pauses between two tries do not grow beyond this.
    sleep(2 * SECOND).await;
    assert!(is_released(&engine).await);
    assert!(engine.drain().await);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_cannot_be_freed_ages_into_an_unknown_outcome() {
    #[cfg(feature = "tracing")]
    let events = crate::events::Events::listen();
    let engine = engine();
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(4), Fault::LoseReply);
    store.inject(Move::Release, Calls::Every, Fault::Fail);
    refused(&engine).await;
    sleep(LEASE + SECOND).await;
    // It is tried no more, and nothing waits for it.
    assert_eq!(engine.running(), 0);
    let tries = store.calls(Move::Release);
    store.heal();
    sleep(LEASE).await;
    assert_eq!(store.calls(Move::Release), tries);
    assert_unknown(&admit(&engine).await);
    #[cfg(feature = "tracing")]
    assert_eq!(events.errors(), ["unreleased"]);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_takes_longer_than_the_store_may_take_is_refused() {
    for fault in [Fault::Hang, Fault::DelayReply(LEASE), Fault::Delay(LEASE)] {
        let engine = engine();
        engine.store().inject(Move::Claim, Calls::Next(1), fault);
        let asked = Instant::now();
        assert_eq!(refused(&engine).await.kind(), StoreErrorKind::Unavailable);
        assert!(asked.elapsed() - 5 * SECOND < Duration::from_millis(2));
        assert_eq!(engine.store().calls(Move::Claim), 1);
        sleep(Duration::from_millis(1)).await;
        let _ = begin(&engine).await;
    }
}

#[tokio::test(start_paused = true)]
async fn claim_retries_end_with_the_time_limit_of_the_store() {
    let engine = engine_with(|settings| settings.claim_retries(u32::MAX));
    let store = engine.store();
    store.inject(Move::Claim, Calls::Every, Fault::Fail);
    let asked = Instant::now();
    refused(&engine).await;
    assert!(asked.elapsed() <= 5 * SECOND);
    assert!(store.calls(Move::Claim) > 4);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_its_claim_leaves_no_claim() {
    let engine = engine();
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(1), Fault::DelayReply(2 * SECOND));
    let (key, request) = (key("k"), request("r"));
    let admission = engine.admit(&key, request);
    assert!(timeout(SECOND, admission).await.is_err());
    assert!(record(&engine).await.is_some());
    sleep(Duration::from_millis(1)).await;
    assert!(is_released(&engine).await);
    assert!(engine.drain().await);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_after_it_was_freed_is_freed_again() {
    let engine = engine();
    let store = engine.store();
    store
        .inner()
        .set(Move::Claim, Odd::Late(5 * SECOND + 2 * SECOND));
    refused(&engine).await;
    store.inner().heal();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(store.calls(Move::Release), 1);
    assert!(record(&engine).await.is_none());
    sleep(3 * SECOND).await;
    assert!(lease_left(&admit(&engine).await) > Duration::ZERO);
    sleep(3 * SECOND).await;
    assert_eq!(store.calls(Move::Release), 2);
    let attempt = begin(&engine).await;
    // And no more, now that somebody else has the key.
    sleep(2 * LEASE).await;
    assert_eq!(store.calls(Move::Release), 2);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn a_try_that_arrives_after_its_attempt_was_released_is_freed_again() {
    let engine = engine();
    let store = engine.store();
    store
        .inner()
        .set(Move::Claim, Odd::FailedAndLate(3 * SECOND));
    let attempt = begin(&engine).await;
    assert_eq!(attempt.release().await, Settled::Recorded);
    sleep(4 * SECOND).await;
    assert!(lease_left(&admit(&engine).await) > Duration::ZERO);
    sleep(2 * SECOND).await;
    assert!(is_released(&engine).await);
    let attempt = begin(&engine).await;
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    sleep(LEASE).await;
    assert_eq!(store.calls(Move::Release), 2);
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn the_key_of_somebody_else_is_not_freed() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let store = engine.store();
    store.inject(Move::Claim, Calls::Next(4), Fault::LoseReply);
    refused(&engine).await;
    sleep(LEASE).await;
    assert!(store.calls(Move::Release) > 0);
    assert!(lease_left(&admit(&engine).await) > Duration::ZERO);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn a_takeover_without_reply_forgets_no_checkpoint() {
    let engine = rerunning_engine();
    let attempt = begin(&engine).await;
    attempt.attempt().checkpoint("charged", b"1").await.unwrap();
    let _ = attempt.abandon().await;
    engine
        .store()
        .inject(Move::Claim, Calls::Next(4), Fault::LoseReply);
    refused(&engine).await;
    sleep(Duration::from_millis(1)).await;
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 3);
    assert!(attempt.attempt().finished("charged").is_some());
}

#[tokio::test(start_paused = true)]
async fn what_no_retry_can_mend_is_not_asked_for_again() {
    for kind in [StoreErrorKind::Other, StoreErrorKind::Corrupt] {
        #[cfg(feature = "tracing")]
        let events = crate::events::Events::listen();
        let engine = engine();
        let store = engine.store();
        store.inner().set(Move::Claim, Odd::Error(kind));
        assert_eq!(refused(&engine).await.kind(), kind);
        assert!(engine.drain().await);
        assert_eq!(store.calls(Move::Claim), 1);
        // A record that cannot be read is left as it is.
        let releases = if kind == StoreErrorKind::Corrupt {
            0
        } else {
            2
        };
        assert_eq!(store.calls(Move::Release), releases);
        #[cfg(feature = "tracing")]
        assert_eq!(events.errors(), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_leaves_no_claim() {
    let engine = engine();
    engine.store().inner().set(Move::Claim, Odd::Panic);
    let asking = engine.clone();
    let panicked = tokio::spawn(async move { admit(&asking).await }).await;
    assert!(panicked.unwrap_err().is_panic());
    assert!(engine.drain().await);
    assert!(engine.store().calls(Move::Release) > 0);
}
