//! One round of a sweeper: whom it asks about, and what becomes of the answers.

use std::time::Duration;

use tokio::time::{Instant, advance};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{Admission, Fenced, Settled, State, Store, StoreErrorKind, Swept};

use crate::engine::*;
use crate::gateway::*;
use crate::odd::Odd;

async fn sweep(engine: &Engine) -> Swept {
    engine.sweeper().sweep().await.unwrap()
}

/// The default of `reconcile_timeout`.
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test(start_paused = true)]
async fn work_that_happened_is_replayed() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let swept = sweep(&engine).await;
    assert_eq!((swept.seen, swept.happened), (1, 1));
    assert!(swept.complete);
    assert_eq!(replayed(admit(&engine).await), outcome("paid"));
}

#[tokio::test(start_paused = true)]
async fn work_that_did_not_happen_may_be_done() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let swept = sweep(&engine).await;
    assert_eq!((swept.seen, swept.not_happened), (1, 1));
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_knows_stays_held_and_is_asked_about_each_time() {
    let gateway = Gateway::that(Says::Unknown);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let mut sweeper = engine.sweeper();
    for questions in 1..4 {
        let swept = sweeper.sweep().await.unwrap();
        assert_eq!((swept.seen, swept.unknown), (1, 1));
        assert_eq!(gateway.questions(), questions);
    }
    assert!(record(&engine).await.unwrap().is_abandoned());
}

#[tokio::test(start_paused = true)]
async fn the_reconciler_sees_what_the_handler_attached() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    let attempt = begin(&engine).await;
    attempt.attempt().annotate("charge-1").await.unwrap();
    let charged = attempt.attempt().checkpoint("charged", b"ch_1").await;
    charged.unwrap();
    let _ = attempt.abandon().await;
    let _ = sweep(&engine).await;

    let asked = &gateway.asked()[0];
    assert_eq!(asked.key, key("k"));
    assert_eq!(asked.attempt, 1);
    assert!(asked.is_abandoned());
    assert_eq!(asked.notes.correlation.as_deref(), Some("charge-1"));
    assert_eq!(asked.notes.checkpoint("charged").unwrap(), &b"ch_1"[..]);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_about_what_runs_or_has_ended() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    let running = begin(&engine).await;
    let done = first(engine.admit(&key("done"), request("r")).await.unwrap());
    assert_eq!(done.complete(outcome("1")).await, Settled::Recorded);
    let free = first(engine.admit(&key("free"), request("r")).await.unwrap());
    assert_eq!(free.release().await, Settled::Recorded);
    let swept = sweep(&engine).await;
    assert_eq!((swept.seen, gateway.questions()), (0, 0));
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_reconciler_that_fails_is_an_unknown_outcome() {
    for says in [Says::Fails, Says::Panics, Says::PanicsAtOnce, Says::Hangs] {
        let gateway = Gateway::that(says.clone());
        let engine = asking(&gateway);
        leave(&engine, "k").await;
        let asked = Instant::now();
        let swept = sweep(&engine).await;
        assert_eq!((swept.seen, swept.failed), (1, 1), "{says:?}");
        assert!(asked.elapsed() <= LIMIT + SECOND);
        assert!(record(&engine).await.unwrap().is_abandoned());
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_fails_is_asked_about_less_and_less_often() {
    let gateway = Gateway::that(Says::Fails);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let mut sweeper = engine.sweeper();
    let mut gaps = Vec::new();
    let mut last = Instant::now();
    while gaps.len() < 12 {
        let questions = gateway.questions();
        let swept = sweeper.sweep().await.unwrap();
        assert_eq!(swept.failed + swept.deferred, 1);
        if gateway.questions() > questions {
            gaps.push(last.elapsed());
            last = Instant::now();
        }
        advance(SECOND / 2).await;
    }
    assert!(gaps[3] > gaps[1], "{gaps:?}");
    // Ten times the interval, which is the lease.
    assert!(*gaps.last().unwrap() <= 10 * LEASE + SECOND, "{gaps:?}");
}

#[tokio::test(start_paused = true)]
async fn one_record_that_always_fails_holds_up_no_other() {
    let gateway = Gateway::that(Says::NotHappened);
    for poison in [Says::Fails, Says::Panics, Says::Hangs] {
        gateway.says_of(&key("poison"), poison.clone());
        let engine = asking(&gateway);
        leave(&engine, "poison").await;
        for n in 0..30 {
            leave(&engine, &n.to_string()).await;
        }
        let mut sweeper = engine.sweeper().concurrency(1);
        let swept = sweeper.sweep().await.unwrap();
        assert_eq!((swept.not_happened, swept.failed), (30, 1), "{poison:?}");
    }
}

/// Or a gateway that is away would hold up the purge, and a stop, for as long as there are records.
#[tokio::test(start_paused = true)]
async fn a_round_ends_early_when_everything_fails_and_the_next_one_goes_on_behind_it() {
    let gateway = Gateway::that(Says::Fails);
    let engine = asking(&gateway);
    for n in 0..250 {
        leave(&engine, &n.to_string()).await;
    }
    let mut sweeper = engine.sweeper();
    let mut asked = 0;
    for _ in 0..3 {
        let swept = sweeper.sweep().await.unwrap();
        assert!(swept.failed <= 100);
        asked += swept.failed;
    }
    assert_eq!(asked, 250);
    let keys: std::collections::HashSet<_> = gateway
        .asked()
        .into_iter()
        .map(|record| record.key)
        .collect();
    assert_eq!(keys.len(), 250, "each of them was asked about");
}

#[tokio::test(start_paused = true)]
async fn a_round_is_bounded_and_the_next_one_goes_on() {
    let gateway = Gateway::that(Says::Unknown);
    let engine = asking(&gateway);
    for n in 0..1250 {
        leave(&engine, &n.to_string()).await;
    }
    let mut sweeper = engine.sweeper();
    let first = sweeper.sweep().await.unwrap();
    assert!(!first.complete && first.seen <= 1100);
    let second = sweeper.sweep().await.unwrap();
    assert!(second.complete);
    assert_eq!(first.seen + second.seen, 1250);
}

#[tokio::test(start_paused = true)]
async fn no_more_questions_are_open_at_once_than_may_be() {
    let gateway = Gateway::that(Says::Later(SECOND, Box::new(Says::NotHappened)));
    let engine = asking(&gateway);
    for n in 0..20 {
        leave(&engine, &n.to_string()).await;
    }
    let swept = engine.sweeper().concurrency(3).sweep().await.unwrap();
    assert_eq!(swept.not_happened, 20);
    assert_eq!(gateway.most_open(), 3);
}

#[tokio::test(start_paused = true)]
async fn two_sweepers_close_a_record_once() {
    let late = |says| Says::Later(SECOND, Box::new(says));
    let paid = Gateway::that(late(Says::Happened(outcome("paid"))));
    let unpaid = Gateway::that(late(late(Says::NotHappened)));
    let engine = asking(&paid);
    let other = another_engine(&engine, |settings| unpaid.asked_by(settings));
    leave(&engine, "k").await;
    let (mut one, mut two) = (engine.sweeper(), other.sweeper());
    let (one, two) = tokio::join!(one.sweep(), two.sweep());
    assert_eq!(one.unwrap().happened, 1);
    assert_eq!(two.unwrap().overtaken, 1);
    assert_eq!(replayed(admit(&engine).await), outcome("paid"));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_comes_back_while_the_reconciler_thinks_keeps_its_claim() {
    let says = Says::Later(SECOND, Box::new(Says::NotHappened));
    let gateway = Gateway::that(says);
    let engine = asking(&gateway);
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    let attempt = begin(&engine).await;
    lost(&attempt).await;
    engine.store().heal();
    let found = record(&engine).await.unwrap();
    let claim = tower_idempotency::Claim::new(found.key, found.owner, found.attempt);

    let mut sweeper = engine.sweeper();
    let (swept, ()) = tokio::join!(sweeper.sweep(), async {
        tokio::time::sleep(SECOND / 2).await;
        let store = engine.store().inner();
        assert_eq!(store.renew(&claim, LEASE).await.unwrap(), Fenced::Applied);
    });
    assert_eq!(swept.unwrap().overtaken, 1);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_comes_back_too_late_is_told_so() {
    let engine = asking(&Gateway::that(Says::NotHappened));
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    let attempt = begin(&engine).await;
    lost(&attempt).await;
    engine.store().heal();
    assert_eq!(sweep(&engine).await.not_happened, 1);
    assert_eq!(attempt.complete(outcome("1")).await, Settled::ClaimLost);
    assert_eq!(record(&engine).await.unwrap().state, State::Released);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_comes_back_after_its_work_was_found_answers_what_stands() {
    let engine = asking(&Gateway::that(Says::Happened(outcome("paid"))));
    engine
        .store()
        .inject(Move::Renew, Calls::Every, Fault::Fail);
    let attempt = begin(&engine).await;
    lost(&attempt).await;
    engine.store().heal();
    assert_eq!(sweep(&engine).await.happened, 1);
    let settled = attempt.complete(outcome("late")).await;
    assert_eq!(settled, Settled::Standing(outcome("paid")));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_the_store_did_not_take_at_once_is_given_again() {
    for fault in [Fault::Fail, Fault::LoseReply] {
        let gateway = Gateway::that(Says::Happened(outcome("paid")));
        let engine = asking(&gateway);
        leave(&engine, "k").await;
        engine.store().inject(Move::Resolve, Calls::Next(2), fault);
        let swept = sweep(&engine).await;
        assert_eq!(swept.happened + swept.overtaken, 1, "{fault:?}");
        assert_eq!(gateway.questions(), 1);
        assert_eq!(replayed(admit(&engine).await), outcome("paid"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_the_store_does_not_take_is_asked_for_again_later() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    engine
        .store()
        .inject(Move::Resolve, Calls::Every, Fault::Fail);
    let mut sweeper = engine.sweeper();
    assert_eq!(sweeper.sweep().await.unwrap().failed, 1);
    engine.store().heal();
    assert_eq!(sweeper.sweep().await.unwrap().deferred, 1);
    advance(2 * SECOND).await;
    assert_eq!(sweeper.sweep().await.unwrap().happened, 1);
}

#[tokio::test(start_paused = true)]
async fn without_a_reconciler_records_are_counted_and_left() {
    let engine = engine();
    leave(&engine, "k").await;
    let swept = sweep(&engine).await;
    assert_eq!((swept.seen, swept.unknown), (1, 1));
    assert!(record(&engine).await.unwrap().is_abandoned());
}

/// The default retention.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::test(start_paused = true)]
async fn expired_records_are_purged() {
    let engine = engine();
    for n in 0..1234 {
        let key = key(&n.to_string());
        let attempt = first(engine.admit(&key, request("r")).await.unwrap());
        assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    }
    let kept = begin(&engine).await;
    advance(DAY / 2).await;
    assert_eq!(sweep(&engine).await.purged.removed, 0);
    advance(DAY / 2 + SECOND).await;
    let swept = sweep(&engine).await;
    assert!(swept.purged.removed >= 1234);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn an_expired_record_is_asked_about_before_it_is_purged() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    advance(2 * DAY).await;
    let swept = sweep(&engine).await;
    assert_eq!((swept.happened, swept.purged.removed), (1, 0));
    assert_eq!(replayed(admit(&engine).await), outcome("paid"));
}

#[tokio::test(start_paused = true)]
async fn what_is_purged_unresolved_is_reported_as_an_error() {
    for says in [Says::Unknown, Says::Fails] {
        #[cfg(feature = "tracing")]
        let events = crate::events::Events::listen();
        let engine = asking(&Gateway::that(says));
        leave(&engine, "k").await;
        advance(2 * DAY).await;
        #[cfg(feature = "tracing")]
        let _ = events.errors();
        let swept = sweep(&engine).await;
        assert_eq!((swept.purged.removed, swept.purged.unresolved), (1, 1));
        #[cfg(feature = "tracing")]
        assert_eq!(
            events.errors(),
            ["records with an unknown outcome expired unresolved"]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_before_the_purge_does_not_hold_it_up() {
    let engine = asking(&Gateway::that(Says::Unknown));
    leave(&engine, "k").await;
    advance(2 * DAY).await;
    let odd = engine.store().inner();
    odd.set(Move::Abandoned, Odd::Error(StoreErrorKind::Corrupt));
    let error = engine.sweeper().sweep().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    assert_eq!(record(&engine).await, None);
    assert!(matches!(admit(&engine).await, Admission::First(_)));
}
