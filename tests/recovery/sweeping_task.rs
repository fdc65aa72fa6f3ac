//! A sweeper in the background: when it looks, what stops it, and what does not.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::StoreErrorKind;
use tower_idempotency::testing::{Calls, Fault, Move};

use crate::engine::*;
use crate::gateway::*;
use crate::odd::Odd;

/// The default interval is the lease.
const INTERVAL: Duration = LEASE;

#[tokio::test(start_paused = true)]
async fn a_record_is_closed_within_the_interval() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    let sweeping = engine.sweeper().spawn();
    for n in 0..5 {
        let name = n.to_string();
        leave(&engine, &name).await;
        sleep(INTERVAL + SECOND).await;
        let admission = engine.admit(&key(&name), request("r")).await.unwrap();
        assert_eq!(replayed(admission), outcome("paid"));
        assert_eq!(
            gateway.questions(),
            n + 1,
            "the sweeper asked, not the retry"
        );
    }
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_sweeper_that_is_raced_against_something_else_ends_with_it() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    leave(&engine, "k").await;
    let ended = timeout(2 * INTERVAL, engine.sweeper().run()).await;
    assert!(ended.is_err());
    assert_eq!(gateway.questions(), 1);
    leave(&engine, "k2").await;
    sleep(10 * INTERVAL).await;
    assert_eq!(gateway.questions(), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_that_fails_ends_it() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    let sweeping = engine.sweeper().spawn();
    let odd = engine.store().inner().clone();
    let kinds = [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Corrupt,
        StoreErrorKind::Other,
    ];
    let faults = kinds.map(Odd::Error).into_iter().chain([Odd::Panic]);
    for (n, fault) in faults.enumerate() {
        for of in [Move::Abandoned, Move::Resolve, Move::Purge] {
            let name = format!("{n}-{of:?}");
            leave(&engine, &name).await;
            odd.set(of, fault);
            sleep(20 * INTERVAL).await;
            assert!(!sweeping.is_finished(), "{of:?} {fault:?}");
            odd.heal();
            sleep(20 * INTERVAL).await;
            let record = engine.store().inner().memory();
            let record = tower_idempotency::Store::lookup(record, &key(&name)).await;
            let record = record.unwrap().unwrap();
            assert!(!record.is_abandoned(), "{of:?} {fault:?}");
        }
    }
    for says in [Says::Panics, Says::PanicsAtOnce, Says::Fails, Says::Hangs] {
        leave(&engine, "k").await;
        gateway.says(says);
        sleep(20 * INTERVAL).await;
        gateway.says(Says::NotHappened);
        sleep(20 * INTERVAL).await;
        assert!(!record(&engine).await.unwrap().is_abandoned());
    }
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_is_asked_less_often() {
    let engine = asking(&Gateway::that(Says::Unknown));
    let sweeping = engine.sweeper().spawn();
    let store = engine.store();
    sleep(100 * INTERVAL).await;
    let healthy = store.calls(Move::Abandoned);
    assert!((90..=210).contains(&healthy), "{healthy}");
    store.inject(Move::Abandoned, Calls::Every, Fault::Fail);
    sleep(100 * INTERVAL).await;
    let failed = store.calls(Move::Abandoned) - healthy;
    assert!((9..=30).contains(&failed), "{failed}");
    store.heal();
    leave(&engine, "k").await;
    sleep(10 * INTERVAL + SECOND).await;
    assert!(store.calls(Move::Abandoned) > healthy + failed);
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn one_record_that_always_fails_does_not_slow_it_down() {
    let gateway = Gateway::that(Says::NotHappened);
    gateway.says_of(&key("poison"), Says::Fails);
    let engine = asking(&gateway);
    leave(&engine, "poison").await;
    let sweeping = engine.sweeper().spawn();
    for n in 0..30 {
        let name = n.to_string();
        leave(&engine, &name).await;
        sleep(INTERVAL + SECOND).await;
        assert!(
            gateway.asked().iter().any(|asked| asked.key == key(&name)),
            "{n}"
        );
    }
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_is_away_is_asked_less_often() {
    let gateway = Gateway::that(Says::Fails);
    let engine = asking(&gateway);
    for n in 0..20 {
        leave(&engine, &n.to_string()).await;
    }
    let sweeping = engine.sweeper().spawn();
    sleep(100 * INTERVAL).await;
    let questions = gateway.questions();
    // A question each in all of a hundred rounds would be 2,000 at the least.
    assert!((100..=600).contains(&questions), "{questions}");
    gateway.says(Says::NotHappened);
    sleep(20 * INTERVAL + SECOND).await;
    let swept = engine.sweeper().sweep().await.unwrap();
    assert_eq!(swept.seen, 0);
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_long_walk_goes_on_without_a_pause() {
    let gateway = Gateway::that(Says::NotHappened);
    let engine = asking(&gateway);
    for n in 0..3500 {
        leave(&engine, &n.to_string()).await;
    }
    let begun = Instant::now();
    let sweeping = engine.sweeper().spawn();
    while gateway.questions() < 3500 {
        sleep(SECOND).await;
        assert!(begun.elapsed() <= INTERVAL + SECOND);
    }
    sweeping.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_open_questions_and_asks_no_more() {
    let says = Says::Later(3 * SECOND, Box::new(Says::NotHappened));
    let gateway = Gateway::that(says);
    let engine = asking(&gateway);
    for n in 0..50 {
        leave(&engine, &n.to_string()).await;
    }
    let sweeping = engine.sweeper().concurrency(4).spawn();
    while gateway.questions() == 0 {
        sleep(SECOND).await;
    }
    let told = Instant::now();
    sweeping.shutdown().await;
    assert!(told.elapsed() <= 3 * SECOND);
    assert!(gateway.questions() <= 8);
    // What was asked is closed, and what was not is still there.
    let _ = engine.sweeper().sweep().await.unwrap();
    assert_eq!(gateway.questions(), 50);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_while_it_rests_is_immediate() {
    let engine = asking(&Gateway::that(Says::Unknown));
    let sweeping = engine.sweeper().spawn();
    sleep(5 * INTERVAL).await;
    let told = Instant::now();
    sweeping.shutdown().await;
    assert_eq!(told.elapsed(), Duration::ZERO);
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_handle_ends_the_task_and_frees_the_store() {
    let engine = asking(&Gateway::that(Says::Unknown));
    let token = engine.store().inner().token();
    let sweeping = engine.sweeper().spawn();
    drop(engine);
    sleep(5 * INTERVAL).await;
    assert!(token.upgrade().is_some());
    drop(sweeping);
    sleep(SECOND).await;
    assert!(token.upgrade().is_none());
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn many_sweepers_side_by_side_close_each_record_once() {
    let gateway = Gateway::that(Says::Happened(outcome("paid")));
    let engine = asking(&gateway);
    let others: Vec<_> = (0..5)
        .map(|_| another_engine(&engine, |settings| gateway.asked_by(settings)))
        .collect();
    let sweeping: Vec<_> = others.iter().map(|other| other.sweeper().spawn()).collect();
    for n in 0..100 {
        leave(&engine, &n.to_string()).await;
    }
    sleep(2 * INTERVAL).await;
    for n in 0..100 {
        let admission = engine.admit(&key(&n.to_string()), request("r")).await;
        assert_eq!(replayed(admission.unwrap()), outcome("paid"));
    }
    drop(sweeping);
}
