//! How claims are kept while their attempts run, and how attempts learn that one is lost.

use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep, sleep_until};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Admission, AttemptGuard, Idempotency, MemoryStore, Settled, Store, StoreErrorKind,
};

use crate::engine::*;
use crate::odd::Odd;

/// Timers are as fine as a millisecond.
const TICK: Duration = Duration::from_millis(2);

async fn claim(engine: &Engine, text: &str) -> AttemptGuard {
    first(engine.admit(&key(text), request("r")).await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_handler_of_many_leases_keeps_its_key() {
    let engine = engine();
    let attempt = begin(&engine).await;
    for _ in 0..50 {
        sleep(LEASE / 2).await;
        let left = lease_left(&admit(&engine).await);
        assert!(left >= LEASE / 2, "{left:?} left");
    }
    assert!(!attempt.attempt().is_claim_lost());
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_at_every_third_of_it() {
    let engine = engine();
    let _attempt = begin(&engine).await;
    let begun = Instant::now();
    for renewals in 0..30 {
        let due = begun + LEASE / 3 * (renewals + 1);
        sleep_until(due - TICK).await;
        assert_eq!(engine.store().calls(Move::Renew), renewals as usize);
        sleep_until(due + TICK).await;
        assert_eq!(engine.store().calls(Move::Renew), renewals as usize + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn quick_attempts_meet_no_renewal() {
    let engine = engine();
    for n in 0..1_000 {
        let attempt = claim(&engine, &n.to_string()).await;
        let _ = attempt.complete(outcome("1")).await;
    }
    sleep(10 * LEASE).await;
    assert_eq!(engine.store().calls(Move::Renew), 0);
}

#[tokio::test(start_paused = true)]
async fn one_task_renews_all_attempts_and_ends_after_the_last() {
    let engine = engine();
    assert_eq!(tasks(), 0);
    let mut attempts = Vec::new();
    for n in 0..200 {
        attempts.push(claim(&engine, &n.to_string()).await);
        assert_eq!(tasks(), 1);
    }
    sleep(LEASE - TICK).await;
    assert_eq!(tasks(), 1);
    assert_eq!(engine.store().calls(Move::Renew), 400);
    for attempt in attempts {
        let _ = attempt.complete(outcome("1")).await;
    }
    sleep(LEASE).await;
    assert_eq!(tasks(), 0);

    let _another = claim(&engine, "another").await;
    assert_eq!(tasks(), 1);
    sleep(LEASE / 3 + TICK).await;
    assert_eq!(engine.store().calls(Move::Renew), 401);
}

#[tokio::test(start_paused = true)]
async fn the_heartbeat_ends_with_its_engine() {
    let engine = engine();
    let store = engine.store().inner().token();
    let attempt = begin(&engine).await;
    drop(engine);
    sleep(LEASE).await;
    assert_eq!((tasks(), store.upgrade().is_some()), (1, true));
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    assert!(store.upgrade().is_none(), "the engine is still held");
    sleep(LEASE).await;
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_kept_when_renewals_fail_for_a_while() {
    let engine = engine();
    let attempt = begin(&engine).await;
    // Ten seconds, then one try a second.
    engine
        .store()
        .inject(Move::Renew, Calls::Next(15), Fault::Fail);
    sleep(LEASE).await;
    assert_eq!(engine.store().calls(Move::Renew), 16);
    assert!(!attempt.attempt().is_claim_lost());
    assert!(lease_left(&admit(&engine).await) > LEASE / 2);
}

#[tokio::test(start_paused = true)]
async fn a_claim_counts_as_lost_when_no_renewal_gets_through_for_a_lease() {
    for fault in [Fault::Fail, Fault::Hang, Fault::Delay(LEASE)] {
        let engine = engine();
        let attempt = begin(&engine).await;
        sleep(5 * LEASE).await;
        let held_until = Instant::now() + lease_left(&admit(&engine).await);
        engine.store().inject(Move::Renew, Calls::Every, fault);
        lost(&attempt).await;
        assert!(attempt.attempt().is_claim_lost());
        // Not before the store's lease is over, and no later than a timer can tell.
        assert!(Instant::now() >= held_until, "{fault:?}");
        assert!(Instant::now() - held_until < TICK, "{fault:?}");
        assert_unknown(&admit(&engine).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_claim_is_renewed_all_the_same_as_long_as_it_stands() {
    let engine = engine();
    let attempt = begin(&engine).await;
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    lost(&attempt).await;
    assert_unknown(&admit(&engine).await);
    engine.store().heal();
    sleep(2 * SECOND).await;
    assert!(lease_left(&admit(&engine).await) > LEASE / 2);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_hears_of_it_when_its_renewal_is_refused() {
    let engine = engine();
    let attempt = begin(&engine).await;
    sleep(SECOND).await;
    engine.store().remove(&key("k")).await.unwrap();
    let removed = Instant::now();
    lost(&attempt).await;
    assert!(removed.elapsed() <= LEASE / 3);
    // Nothing is left to renew.
    let renewals = engine.store().calls(Move::Renew);
    sleep(10 * LEASE).await;
    assert_eq!(engine.store().calls(Move::Renew), renewals);
}

#[tokio::test(start_paused = true)]
async fn everybody_who_waits_hears_of_a_lost_claim_also_afterwards() {
    let engine = engine();
    let attempt = begin(&engine).await;
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let attempt = attempt.attempt().clone();
        waiting.spawn(async move { attempt.claim_lost().await });
    }
    assert_eq!(waiting.join_all().await.len(), 10);
    lost(&attempt).await;
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_hangs_holds_up_no_other() {
    let engine = engine();
    let stuck = claim(&engine, "stuck").await;
    sleep(SECOND).await;
    let sound = claim(&engine, "sound").await;
    // Every renewal of the first attempt, for as long as it is tried.
    engine
        .store()
        .inject(Move::Renew, Calls::Nth(1), Fault::Hang);
    sleep(LEASE / 3 + TICK).await;
    assert_eq!(engine.store().calls(Move::Renew), 2);
    let left = lease_left(&engine.admit(&key("sound"), request("r")).await.unwrap());
    assert!(left > LEASE - SECOND, "{left:?} left");
    assert!(!stuck.attempt().is_claim_lost() && !sound.attempt().is_claim_lost());
    // The hung one is given up after the store's time limit, and asked again.
    sleep(LEASE / 3 - SECOND).await;
    let left = lease_left(&engine.admit(&key("stuck"), request("r")).await.unwrap());
    assert!(left > LEASE / 2, "{left:?} left");
}

#[tokio::test(start_paused = true)]
async fn more_attempts_than_go_at_once_are_renewed_in_time() {
    let engine = engine();
    let mut attempts = Vec::new();
    for n in 0..500 {
        attempts.push(claim(&engine, &n.to_string()).await);
    }
    // Eight rounds of a second each, after ten seconds.
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Delay(SECOND));
    sleep(20 * LEASE).await;
    assert!(
        attempts
            .iter()
            .all(|attempt| !attempt.attempt().is_claim_lost())
    );
    for (n, attempt) in attempts.into_iter().enumerate() {
        let _ = lease_left(
            &engine
                .admit(&key(&n.to_string()), request("r"))
                .await
                .unwrap(),
        );
        assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    }
}

#[tokio::test(start_paused = true)]
async fn past_the_attempt_limit_nothing_is_renewed_and_the_key_is_unknown() {
    let limit = 4 * LEASE;
    let engine = engine_with(|settings| settings.attempt_limit(limit));
    let begun = Instant::now();
    let attempt = begin(&engine).await;
    sleep(limit - TICK).await;
    let _ = lease_left(&admit(&engine).await);
    let renewals = engine.store().calls(Move::Renew);
    lost(&attempt).await;
    assert!(begun.elapsed() > limit && begun.elapsed() <= limit + LEASE + TICK);
    assert_eq!(engine.store().calls(Move::Renew), renewals);
    assert_unknown(&admit(&engine).await);
    // What is late is still recorded while nobody may take the key over.
    sleep(10 * LEASE).await;
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn past_the_attempt_limit_another_attempt_may_run() {
    let engine = rerunning_engine();
    let stuck = begin(&engine).await;
    lost(&stuck).await;
    let second = begin(&engine).await;
    assert_eq!(second.attempt().number(), 2);
    assert!(!second.attempt().is_claim_lost());
    sleep(5 * LEASE).await;
    let _ = lease_left(&admit(&engine).await);
    assert_eq!(second.complete(outcome("2")).await, Settled::Recorded);
    assert_eq!(
        stuck.complete(outcome("1")).await,
        Settled::Standing(outcome("2"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_or_refuses_for_good_is_asked_again_once_a_second() {
    for odd in [Odd::Panic, Odd::Error(StoreErrorKind::Other)] {
        let engine = engine();
        let attempt = begin(&engine).await;
        engine.store().inner().set(Move::Renew, odd);
        sleep(LEASE / 2 + TICK).await;
        let renewals = engine.store().calls(Move::Renew);
        assert!((5..=6).contains(&renewals), "{renewals} renewals: {odd:?}");
        engine.store().inner().heal();
        sleep(LEASE).await;
        assert!(!attempt.attempt().is_claim_lost());
        let _ = lease_left(&admit(&engine).await);
    }
}

#[cfg(feature = "tracing")]
#[tokio::test(start_paused = true)]
async fn a_renewal_that_comes_after_the_outcome_is_no_lost_claim() {
    let events = crate::events::Events::listen();
    let engine = engine();
    let attempt = begin(&engine).await;
    let watching = attempt.attempt().clone();
    sleep(LEASE / 3 - SECOND).await;
    // Applied at once and answered when the next renewal has been refused.
    engine
        .store()
        .inject(Move::Complete, Calls::Nth(1), Fault::DelayReply(3 * SECOND));
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    assert_eq!(engine.store().calls(Move::Renew), 1);
    assert!(!watching.is_claim_lost());
    assert_eq!(events.errors(), [""; 0]);
}

#[test]
fn renewals_begin_again_on_another_runtime() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let engine = engine();
    let gone = runtime();
    let old = gone.block_on(async {
        let attempt = claim(&engine, "old").await;
        engine
            .store()
            .inject(Move::Renew, Calls::Nth(1), Fault::Hang);
        sleep(LEASE / 3 + SECOND).await;
        assert_eq!(engine.store().calls(Move::Renew), 1);
        attempt
    });
    // In the middle of a renewal.
    drop(gone);
    runtime().block_on(async {
        let new = claim(&engine, "new").await;
        sleep(2 * LEASE).await;
        for text in ["old", "new"] {
            let left = lease_left(&engine.admit(&key(text), request("r")).await.unwrap());
            assert!(left > LEASE / 2, "{left:?} of {text} left");
        }
        let _ = new.complete(outcome("1")).await;
        let _ = old.complete(outcome("1")).await;
    });
}

#[test]
fn without_a_runtime_an_attempt_is_left_to_its_lease() {
    let engine = Idempotency::new(MemoryStore::new());
    // The memory store answers at once.
    let attempt = first(admit(&engine).now_or_never().unwrap());
    drop(attempt);
    assert_eq!(engine.running(), 0);
    let admission = admit(&engine).now_or_never().unwrap();
    assert!(matches!(admission, Admission::InFlight(_)));
}

#[test]
fn a_claim_on_a_runtime_that_shuts_down_is_no_deadlock() {
    use std::sync::mpsc::{Sender, channel};

    /// Tells when the runtime drops its tasks: from then on it drops new ones at once.
    struct Dropped(Sender<()>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .unwrap();
    let (running, is_running) = channel();
    let (shut_down, is_shut_down) = channel();
    let (admitted, is_admitted) = channel();
    let engine = engine();
    let claiming = engine.clone();
    runtime.spawn(async move {
        running.send(()).unwrap();
        // Blocks one worker in the middle of a poll; the other one shuts down.
        is_shut_down.recv().unwrap();
        let attempt = begin(&claiming).await;
        admitted.send(attempt).unwrap();
    });
    is_running.recv().unwrap();
    let dropped = Dropped(shut_down);
    runtime.spawn(async move {
        let _dropped = dropped;
        std::future::pending::<()>().await;
    });
    runtime.shutdown_background();
    let attempt = is_admitted
        .recv_timeout(Duration::from_secs(60))
        .expect("the claim hangs");
    assert!(!attempt.attempt().is_claim_lost());
}
