//! How attempts end: what the store acknowledges, what it does not, and what stands instead.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    AttemptGuard, Claim, Completion, OnAbandoned, Outcome, Settled, State, Store, StoreErrorKind,
};

use crate::engine::*;
use crate::odd::Odd;

const INSTANT: Duration = Duration::from_millis(1);
/// The default of `complete_wait`.
const WAIT: Duration = Duration::from_secs(5);

/// The three ways in which an attempt can end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Complete,
    Release,
    Abandon,
}

const ENDS: [End; 3] = [End::Complete, End::Release, End::Abandon];

impl End {
    fn of(self) -> Move {
        match self {
            Self::Complete => Move::Complete,
            Self::Release => Move::Release,
            Self::Abandon => Move::Abandon,
        }
    }

    async fn settle(self, attempt: AttemptGuard) -> Settled {
        match self {
            Self::Complete => attempt.complete(outcome("1")).await,
            Self::Release => attempt.release().await,
            Self::Abandon => attempt.abandon().await,
        }
    }

    async fn stands(self, engine: &Engine) -> bool {
        let record = record(engine).await.unwrap();
        match &record.state {
            State::Completed { outcome: kept, .. } => {
                self == Self::Complete && *kept == outcome("1")
            }
            State::Released => self == Self::Release,
            _ => self == Self::Abandon && record.is_abandoned(),
        }
    }
}

/// The claim under which `k` is held, as another process could not know it.
async fn claim(engine: &Engine) -> Claim {
    let record = record(engine).await.unwrap();
    Claim::new(record.key, record.owner, record.attempt)
}

#[tokio::test(start_paused = true)]
async fn what_failed_is_said_again() {
    for end in ENDS {
        for fault in [Fault::Fail, Fault::LoseReply] {
            let engine = engine();
            let attempt = begin(&engine).await;
            engine.store().inject(end.of(), Calls::Next(3), fault);
            assert_eq!(end.settle(attempt).await, Settled::Recorded, "{end:?}");
            assert_eq!(engine.store().calls(end.of()), 4);
            assert!(end.stands(&engine).await);
            assert_eq!(engine.running(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_acknowledged_in_time_goes_on_in_the_background() {
    for end in ENDS {
        for fault in [Fault::Fail, Fault::Hang, Fault::Delay(LEASE)] {
            let engine = engine();
            let attempt = begin(&engine).await;
            engine.store().inject(end.of(), Calls::Every, fault);
            let asked = Instant::now();
            assert_eq!(end.settle(attempt).await, Settled::NotSaved);
            assert!(asked.elapsed() <= WAIT + INSTANT, "{end:?} {fault:?}");
            assert_eq!(engine.running(), 1);
            let _ = lease_left(&admit(&engine).await);

            engine.store().heal();
            assert!(engine.drain().await);
            assert!(end.stands(&engine).await, "{end:?} {fault:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_recorded_until_the_lease_ends_stays_unknown() {
    for end in ENDS {
        #[cfg(feature = "tracing")]
        let events = crate::events::Events::listen();
        let engine = engine();
        let attempt = begin(&engine).await;
        engine.store().inject(end.of(), Calls::Every, Fault::Fail);
        assert_eq!(end.settle(attempt).await, Settled::NotSaved);
        sleep(LEASE).await;
        assert_eq!(engine.running(), 0);
        engine.store().heal();
        let tries = engine.store().calls(end.of());
        sleep(10 * LEASE).await;
        assert_eq!(engine.store().calls(end.of()), tries);
        assert_unknown(&admit(&engine).await);
        #[cfg(feature = "tracing")]
        match end {
            End::Abandon => {
                let unknown = "outcome_unknown";
                assert_eq!(events.errors(), ["not_saved", unknown, "unreleased"]);
            }
            _ => assert_eq!(events.errors(), ["not_saved", "unreleased"]),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_no_retry_can_mend_is_said_once() {
    for end in ENDS {
        for kind in [StoreErrorKind::Other, StoreErrorKind::Corrupt] {
            let engine = engine();
            let attempt = begin(&engine).await;
            engine.store().inner().set(end.of(), Odd::Error(kind));
            assert_eq!(end.settle(attempt).await, Settled::NotSaved);
            assert_eq!(engine.running(), 0);
            sleep(2 * LEASE).await;
            assert_eq!(engine.store().calls(end.of()), 1);
            assert_unknown(&admit(&engine).await);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_kept_while_its_outcome_is_being_recorded() {
    let engine = engine_with(|settings| settings.complete_wait(10 * LEASE));
    let attempt = begin(&engine).await;
    engine
        .store()
        .inject(Move::Complete, Calls::Every, Fault::Fail);
    let settling = tokio::spawn(attempt.complete(outcome("1")));
    sleep(5 * LEASE).await;
    let _ = lease_left(&admit(&engine).await);
    engine.store().heal();
    assert_eq!(settling.await.unwrap(), Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_given_up_is_renewed_no_more() {
    let engine = engine_with(|settings| settings.complete_wait(10 * LEASE));
    let attempt = begin(&engine).await;
    engine
        .store()
        .inject(Move::Abandon, Calls::Every, Fault::Fail);
    let _settling = tokio::spawn(attempt.abandon());
    sleep(LEASE).await;
    assert_unknown(&admit(&engine).await);
    assert_eq!(engine.store().calls(Move::Renew), 0);
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_the_handler_recorded_itself_is_the_one_that_stands() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let own = claim(&engine).await;
    let completed = engine.store().complete(&own, &outcome("tx"), None).await;
    assert_eq!(completed.unwrap(), Completion::Recorded);
    assert_eq!(
        attempt.complete(outcome("1")).await,
        Settled::Standing(outcome("tx"))
    );
    assert_eq!(replayed(admit(&engine).await), outcome("tx"));
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_stands_is_the_answer_however_the_attempt_ended() {
    for end in [End::Release, End::Abandon] {
        let engine = engine();
        let attempt = begin(&engine).await;
        let own = claim(&engine).await;
        let completed = engine.store().complete(&own, &outcome("tx"), None).await;
        assert_eq!(completed.unwrap(), Completion::Recorded);
        assert_eq!(end.settle(attempt).await, Settled::Standing(outcome("tx")));
    }
}

/// Attempt 1, which was stalled, and attempt 2 of another process, which took its key over.
async fn taken_over(engine: &Engine) -> (AttemptGuard, AttemptGuard) {
    let stalled = begin(engine).await;
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    lost(&stalled).await;
    engine.store().heal();
    let other = another_engine(engine, |settings| settings.on_abandoned(OnAbandoned::Rerun));
    let second = begin(&other).await;
    assert_eq!(second.attempt().number(), 2);
    (stalled, second)
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_taken_over_gets_the_outcome_of_its_successor() {
    for end in ENDS {
        let engine = rerunning_engine();
        let (stalled, second) = taken_over(&engine).await;
        assert_eq!(second.complete(outcome("2")).await, Settled::Recorded);
        assert_eq!(
            end.settle(stalled).await,
            Settled::Standing(outcome("2")),
            "{end:?}"
        );
        assert_eq!(replayed(admit(&engine).await), outcome("2"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_taken_over_changes_nothing() {
    for end in ENDS {
        let engine = rerunning_engine();
        let (stalled, second) = taken_over(&engine).await;
        assert_eq!(end.settle(stalled).await, Settled::ClaimLost, "{end:?}");
        let _ = lease_left(&admit(&engine).await);
        assert_eq!(second.complete(outcome("2")).await, Settled::Recorded);
        assert_eq!(replayed(admit(&engine).await), outcome("2"));
    }
}

#[tokio::test(start_paused = true)]
async fn background_work_that_meets_a_takeover_changes_nothing_and_says_so() {
    #[cfg(feature = "tracing")]
    let events = crate::events::Events::listen();
    let engine = rerunning_engine();
    let attempt = begin(&engine).await;
    let store = engine.store();
    store.inject(Move::Renew, Calls::Every, Fault::Fail);
    store.inject(Move::Complete, Calls::Every, Fault::Fail);
    sleep(LEASE - WAIT - SECOND).await;
    assert_eq!(attempt.complete(outcome("1")).await, Settled::NotSaved);
    // The lease ends before the background work does.
    let left = lease_left(&admit(&engine).await);
    sleep(left).await;
    let second = begin(&engine).await;
    store.heal();
    sleep(WAIT).await;
    let _ = lease_left(&admit(&engine).await);
    assert_eq!(second.complete(outcome("2")).await, Settled::Recorded);
    assert_eq!(engine.running(), 0);
    #[cfg(feature = "tracing")]
    assert_eq!(events.errors(), ["not_saved", "claim_lost"]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_record_was_erased_has_lost_its_claim() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let handler = attempt.attempt().clone();
    engine.store().remove(&key("k")).await.unwrap();
    assert_eq!(attempt.complete(outcome("1")).await, Settled::ClaimLost);
    assert!(handler.is_claim_lost());
    handler.claim_lost().await;
    assert!(record(&engine).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_record_was_erased_is_free() {
    let engine = engine();
    let attempt = begin(&engine).await;
    engine.store().remove(&key("k")).await.unwrap();
    assert_eq!(attempt.release().await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_never_gets_the_outcome_of_another_request() {
    for end in ENDS {
        let engine = engine();
        let attempt = begin(&engine).await;
        // The store is emptied, and somebody else uses the key.
        engine.store().remove(&key("k")).await.unwrap();
        let other = engine.admit(&key("k"), request("other")).await.unwrap();
        let settled = first(other).complete(outcome("secret")).await;
        assert_eq!(settled, Settled::Recorded);
        assert_eq!(end.settle(attempt).await, Settled::ClaimLost, "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_standing_outcome_cannot_be_read_has_lost_its_claim() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let own = claim(&engine).await;
    let completed = engine.store().complete(&own, &outcome("tx"), None).await;
    assert_eq!(completed.unwrap(), Completion::Recorded);
    engine
        .store()
        .inject(Move::Lookup, Calls::Every, Fault::Fail);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::ClaimLost);
}

#[tokio::test(start_paused = true)]
async fn an_outcome_may_be_kept_for_a_tombstone() {
    let engine = engine();
    let tombstone = Outcome::tombstone(http::StatusCode::OK);
    let settled = begin(&engine).await.complete(tombstone.clone()).await;
    assert_eq!(settled, Settled::Recorded);
    assert_eq!(replayed(admit(&engine).await), tombstone);
}

#[cfg(feature = "tracing")]
#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_dropped_without_a_word_is_unknown_at_once() {
    let events = crate::events::Events::listen();
    let engine = engine();
    drop(begin(&engine).await);
    assert!(engine.drain().await);
    assert_unknown(&admit(&engine).await);
    assert_eq!(events.errors(), ["outcome_unknown"]);
    assert_eq!(engine.store().calls(Move::Abandon), 1);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_task_is_aborted_is_unknown_at_once() {
    let engine = engine();
    let working = engine.clone();
    let task = tokio::spawn(async move {
        let attempt = begin(&working).await;
        sleep(Duration::MAX).await;
        attempt.complete(outcome("1")).await
    });
    sleep(SECOND).await;
    let _ = lease_left(&admit(&engine).await);
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(engine.drain().await);
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_panics_is_unknown_at_once() {
    let engine = engine();
    let working = engine.clone();
    let task = tokio::spawn(async move {
        let _attempt = begin(&working).await;
        panic!("in the work");
    });
    assert!(task.await.unwrap_err().is_panic());
    assert!(engine.drain().await);
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_attempt_is_insisted_on_until_its_lease_ends() {
    let engine = engine();
    let attempt = begin(&engine).await;
    engine
        .store()
        .inject(Move::Abandon, Calls::Every, Fault::Fail);
    drop(attempt);
    sleep(LEASE / 2).await;
    let _ = lease_left(&admit(&engine).await);
    engine.store().heal();
    sleep(2 * SECOND).await;
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn a_word_that_was_given_stands_although_nobody_waits_for_its_end() {
    for end in ENDS {
        let engine = rerunning_engine();
        let attempt = begin(&engine).await;
        engine
            .store()
            .inject(end.of(), Calls::Next(1), Fault::Delay(2 * SECOND));
        let settling = Box::pin(end.settle(attempt));
        assert!(timeout(SECOND, settling).await.is_err());
        assert_eq!(engine.running(), 1);
        assert!(engine.drain().await);
        assert!(end.stands(&engine).await, "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_settling_that_is_never_polled_is_an_attempt_without_a_word() {
    let engine = engine();
    let attempt = begin(&engine).await;
    drop(attempt.complete(outcome("1")));
    assert!(engine.drain().await);
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_attempts_and_for_what_they_left_behind() {
    let engine = engine();
    assert!(engine.drain().await);
    let attempt = begin(&engine).await;
    assert_eq!((engine.running(), engine.detached()), (1, 0));
    engine
        .store()
        .inject(Move::Complete, Calls::Next(1), Fault::Delay(LEASE));
    let work = tokio::spawn(async move {
        sleep(3 * SECOND).await;
        attempt.complete(outcome("1")).await
    });
    let begun = Instant::now();
    assert!(engine.drain().await);
    // Three seconds of work, five until the answer leaves, a moment in the background.
    assert!(begun.elapsed() >= 3 * SECOND + WAIT);
    assert_eq!(work.await.unwrap(), Settled::NotSaved);
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
    assert_eq!(engine.running(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_drain_gives_up_at_its_limit() {
    let engine = engine_with(|settings| settings.drain_limit(7 * SECOND));
    let attempt = begin(&engine).await;
    let begun = Instant::now();
    assert!(!engine.drain().await);
    assert!(begun.elapsed() - 7 * SECOND < 2 * INSTANT);
    assert_eq!(engine.running(), 1);
    let _ = attempt.release().await;
    assert!(engine.drain().await);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_is_not_running() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let _ = admit(&engine).await;
    assert_eq!(engine.running(), 1);
    let _ = attempt.complete(outcome("1")).await;
    let _ = admit(&engine).await;
    assert_eq!(engine.running(), 0);
}
