//! Jobs: work that is done once per key, whoever asks for it and whatever goes wrong.

#[path = "support/engine.rs"]
mod engine;
#[path = "support/odd.rs"]
mod odd;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use serde::{Serialize, Serializer};
use tokio::time::{sleep, timeout};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Advice, Attempt, Claim, Completion, Failure, Outcome, Ran, RunError, Settled, Store,
    StoreError, StoreErrorKind,
};

use crate::engine::*;
use crate::odd::Odd;

type Text = String;

/// Work that is counted.
#[derive(Clone, Default)]
struct Points {
    runs: Arc<AtomicUsize>,
    // The last fencing token.
    attempt: Arc<AtomicUsize>,
}

impl Points {
    /// Adds points for two seconds, and says in the end what came of it.
    async fn add(
        &self,
        engine: &Engine,
        result: Result<i64, Failure<Text>>,
    ) -> Result<Ran<i64>, RunError<Text>> {
        let points = self.clone();
        let work = move |attempt: Attempt| async move {
            points
                .attempt
                .store(attempt.number() as usize, Ordering::SeqCst);
            sleep(2 * SECOND).await;
            points.runs.fetch_add(1, Ordering::SeqCst);
            result
        };
        engine.run(&key("k"), request("r"), work).await
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    fn attempt(&self) -> usize {
        self.attempt.load(Ordering::SeqCst)
    }
}

fn text() -> Text {
    "no such account".to_owned()
}

#[tokio::test(start_paused = true)]
async fn the_first_call_does_the_work_and_every_other_one_gets_its_value() {
    let (engine, points) = (engine(), Points::default());
    let ran = points.add(&engine, Ok(100)).await.unwrap();
    assert_eq!(ran, Ran::First(100));
    for _ in 0..3 {
        // What another call would make of it does not count.
        let ran = points.add(&engine, Ok(7)).await.unwrap();
        assert_eq!(ran, Ran::Repeat(100));
        assert_eq!(ran.into_inner(), 100);
    }
    assert_eq!((points.runs(), engine.running()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn values_of_all_shapes_come_back() {
    async fn twice<T>(value: T)
    where
        T: Serialize + serde::de::DeserializeOwned + Clone + PartialEq + std::fmt::Debug,
        T: Send + 'static,
    {
        let engine = engine();
        for expected in [Ran::First(value.clone()), Ran::Repeat(value.clone())] {
            let value = value.clone();
            let work = |_| async { Ok::<_, Failure<()>>(value) };
            let ran = engine.run(&key("k"), request("r"), work).await.unwrap();
            assert_eq!(ran, expected);
        }
    }
    twice(()).await;
    twice(Some(u64::MAX)).await;
    twice(None::<u64>).await;
    twice("é\u{0}\n".to_owned()).await;
    twice(vec![(1, "a".to_owned()), (2, String::new())]).await;
    twice(Err::<(), i64>(-1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_terminal_failure_is_kept() {
    let (engine, points) = (engine(), Points::default());
    for expected in [false, true, true] {
        let failed = points.add(&engine, Err(Failure::Terminal(text()))).await;
        match failed {
            Err(RunError::Terminal { error, repeat }) => {
                assert_eq!((error, repeat), (text(), expected));
            }
            other => panic!("not terminal: {other:?}"),
        }
    }
    assert_eq!(points.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_transient_failure_frees_the_key() {
    let (engine, points) = (engine(), Points::default());
    for runs in 1..4 {
        let failed = points.add(&engine, Err(Failure::Transient(text()))).await;
        assert!(matches!(failed, Err(RunError::Transient(error)) if error == text()));
        assert_eq!((points.runs(), points.attempt()), (runs, runs));
    }
    let ran = points.add(&engine, Ok(100)).await.unwrap();
    assert_eq!(ran, Ran::First(100));
}

#[tokio::test(start_paused = true)]
async fn an_unknown_failure_holds_the_key() {
    let (engine, points) = (engine(), Points::default());
    let failed = points.add(&engine, Err(Failure::Unknown(text()))).await;
    assert!(matches!(failed, Err(RunError::Unknown(error)) if error == text()));
    for _ in 0..2 {
        let failed = points.add(&engine, Ok(100)).await;
        assert!(matches!(failed, Err(RunError::OutcomeUnknown)));
        sleep(10 * LEASE).await;
    }
    assert_eq!(points.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_panic_reaches_the_caller_after_the_key_was_abandoned() {
    let engine = engine();
    let key = key("k");
    let panicking = engine.run(&key, request("r"), |_| async {
        tokio::task::yield_now().await;
        if true {
            panic!("in the work");
        }
        Ok::<(), Failure<()>>(())
    });
    let payload = AssertUnwindSafe(panicking).catch_unwind().await;
    assert_eq!(payload.unwrap_err().downcast_ref(), Some(&"in the work"));
    assert_unknown(&admit(&engine).await);
    assert_eq!((engine.running(), tasks()), (0, 1), "the heartbeat only");
}

#[tokio::test(start_paused = true)]
async fn work_that_panics_before_its_first_await_is_abandoned_too() {
    let engine = engine();
    let work = |_| -> std::future::Ready<Result<(), Failure<()>>> { panic!("in the closure") };
    let key = key("k");
    let panicking = engine.run(&key, request("r"), work);
    assert!(AssertUnwindSafe(panicking).catch_unwind().await.is_err());
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_written_holds_the_key() {
    #[derive(Debug, serde::Deserialize)]
    struct Unwritable;
    impl Serialize for Unwritable {
        fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("unwritable"))
        }
    }
    let engine = engine();
    let work = |_| async { Ok::<_, Failure<()>>(Unwritable) };
    let failed = engine.run(&key("k"), request("r"), work).await;
    assert!(matches!(failed, Err(RunError::Value(_))), "{failed:?}");
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_read_back_holds_the_key() {
    let engine = engine();
    let work = |_| async { Ok::<_, Failure<()>>(f64::NAN) };
    let failed = engine.run(&key("k"), request("r"), work).await;
    assert!(matches!(failed, Err(RunError::Value(_))), "{failed:?}");
    assert_unknown(&admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn a_value_of_another_type_is_an_error_and_stays() {
    let (engine, points) = (engine(), Points::default());
    points.add(&engine, Ok(100)).await.unwrap();
    let work = |_| async { Ok::<Text, Failure<()>>(text()) };
    let failed = engine.run(&key("k"), request("r"), work).await;
    assert!(matches!(failed, Err(RunError::Value(_))), "{failed:?}");
    let ran = points.add(&engine, Ok(7)).await.unwrap();
    assert_eq!(ran, Ran::Repeat(100));
}

#[tokio::test(start_paused = true)]
async fn a_response_is_no_value() {
    for kept in [outcome("1"), Outcome::tombstone(http::StatusCode::OK)] {
        let (engine, points) = (engine(), Points::default());
        let _ = begin(&engine).await.complete(kept).await;
        let failed = points.add(&engine, Ok(100)).await;
        assert!(matches!(failed, Err(RunError::NotAValue)), "{failed:?}");
        assert_eq!(points.runs(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn other_work_under_the_same_key_is_a_mismatch() {
    let (engine, points) = (engine(), Points::default());
    points.add(&engine, Ok(100)).await.unwrap();
    let work = |_| async { Ok::<i64, Failure<Text>>(7) };
    let failed = engine.run(&key("k"), request("other"), work).await;
    assert!(matches!(failed, Err(RunError::Mismatch)), "{failed:?}");
}

#[tokio::test(start_paused = true)]
async fn work_that_is_being_done_is_in_flight() {
    let (engine, points) = (engine(), Points::default());
    let _attempt = begin(&engine).await;
    sleep(4 * SECOND).await;
    let failed = points.add(&engine, Ok(100)).await;
    let Err(RunError::InFlight { lease_left }) = failed else {
        panic!("not in flight: {failed:?}");
    };
    assert_eq!(lease_left, LEASE - 4 * SECOND);
    assert_eq!(points.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn of_many_callers_one_does_the_work() {
    let (engine, points) = (engine(), Points::default());
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let (engine, points) = (engine.clone(), points.clone());
        callers.spawn(async move {
            loop {
                match points.add(&engine, Ok(100)).await {
                    Err(RunError::InFlight { .. }) => sleep(SECOND).await,
                    ran => return ran.unwrap(),
                }
            }
        });
    }
    let ran = callers.join_all().await;
    assert_eq!(points.runs(), 1);
    assert_eq!(ran.iter().filter(|it| **it == Ran::First(100)).count(), 1);
    assert_eq!(ran.iter().filter(|it| **it == Ran::Repeat(100)).count(), 63);
}

#[tokio::test(start_paused = true)]
async fn work_whose_caller_leaves_goes_on() {
    // While it is claimed, done and recorded; each of them takes two seconds.
    for leaves_after in [1, 3, 5] {
        let (engine, points) = (engine(), Points::default());
        let store = engine.store();
        store.inject(Move::Claim, Calls::Next(1), Fault::Delay(2 * SECOND));
        store.inject(Move::Complete, Calls::Next(1), Fault::Delay(2 * SECOND));
        let running = points.add(&engine, Ok(100));
        let left = timeout(leaves_after * SECOND, running).await;
        assert!(left.is_err());
        assert_eq!((engine.running(), engine.detached()), (1, 1));
        assert!(engine.drain().await);
        assert_eq!((engine.running(), engine.detached()), (0, 0));
        let ran = points.add(&engine, Ok(7)).await.unwrap();
        assert_eq!(ran, Ran::Repeat(100), "left after {leaves_after} s");
        assert_eq!((points.runs(), store.calls(Move::Abandon)), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn work_whose_caller_leaves_before_the_first_poll_never_begins() {
    let (engine, points) = (engine(), Points::default());
    drop(points.add(&engine, Ok(100)));
    sleep(10 * SECOND).await;
    assert_eq!((points.runs(), engine.store().calls(Move::Claim)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn work_needs_nothing_of_its_callers_task() {
    tokio::task_local!(static CALLER: u64);
    let engine = engine();
    let seen = Arc::new(AtomicUsize::new(0));
    let seeing = Arc::clone(&seen);
    let work = move |_| async move {
        let before = CALLER.try_with(|it| *it).is_ok();
        sleep(2 * SECOND).await;
        let after = CALLER.try_with(|it| *it).is_ok();
        let both = usize::from(before) + 2 * usize::from(after);
        seeing.store(both, Ordering::SeqCst);
        Ok::<_, Failure<()>>(100)
    };
    let key = key("k");
    let running = CALLER.scope(1, engine.run(&key, request("r"), work));
    assert!(timeout(SECOND, running).await.is_err());
    assert!(engine.drain().await);
    // Lost on the way, and the work is recorded all the same.
    assert_eq!(seen.load(Ordering::SeqCst), 1);
    assert!(replayed(admit(&engine).await).status().is_none());
}

#[cfg(feature = "tracing")]
#[tokio::test(start_paused = true)]
async fn work_keeps_its_span_without_its_caller() {
    let _subscribed = tracing::subscriber::set_default(tracing_subscriber::registry());
    let engine = engine();
    let work = |_| async {
        let span = || tracing::Span::current().metadata().map(|it| it.name());
        let before = span();
        sleep(2 * SECOND).await;
        assert_eq!((before, span()), (Some("idempotency"), Some("idempotency")));
        Ok::<_, Failure<()>>(())
    };
    let key = key("k");
    let running = engine.run(&key, request("r"), work);
    assert!(timeout(SECOND, running).await.is_err());
    assert!(engine.drain().await);
    // It would be unknown if the work had panicked.
    let _ = replayed(admit(&engine).await);
}

#[tokio::test(start_paused = true)]
async fn too_many_callers_that_left_stop_new_work() {
    let engine = engine_with(|settings| settings.detached_limit(2));
    let run = async |text: &str| {
        let work = |_| async {
            sleep(10 * SECOND).await;
            Ok::<_, Failure<()>>(())
        };
        let key = key(text);
        timeout(SECOND, engine.run(&key, request("r"), work)).await
    };
    assert!(run("1").await.is_err());
    assert!(run("2").await.is_err());
    assert_eq!(engine.detached(), 2);
    let claims = engine.store().calls(Move::Claim);
    let refused = run("3").await.unwrap().unwrap_err();
    assert!(matches!(refused, RunError::Overloaded), "{refused:?}");
    assert_eq!(engine.store().calls(Move::Claim), claims);
    assert!(engine.drain().await);
    assert!(run("3").await.is_err(), "it runs longer than a second");
}

#[tokio::test(start_paused = true)]
async fn without_the_store_no_work_is_done() {
    let (engine, points) = (engine(), Points::default());
    engine
        .store()
        .inject(Move::Claim, Calls::Every, Fault::Fail);
    let failed = points.add(&engine, Ok(100)).await.unwrap_err();
    assert!(matches!(failed, RunError::Store(_)), "{failed:?}");
    assert_eq!(points.runs(), 0);
    engine.store().heal();
    engine
        .store()
        .inner()
        .set(Move::Claim, Odd::Error(StoreErrorKind::Corrupt));
    let failed = points.add(&engine, Ok(100)).await.unwrap_err();
    assert_eq!(failed.advice(), Advice::DeadLetter);
    assert_eq!(points.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_is_recorded_late_is_returned_in_time() {
    let (engine, points) = (engine(), Points::default());
    engine
        .store()
        .inject(Move::Complete, Calls::Every, Fault::Fail);
    let ran = points.add(&engine, Ok(100)).await.unwrap();
    assert_eq!(ran, Ran::First(100));
    let failed = points.add(&engine, Ok(7)).await;
    assert!(matches!(failed, Err(RunError::InFlight { .. })));
    engine.store().heal();
    assert!(engine.drain().await);
    let ran = points.add(&engine, Ok(7)).await.unwrap();
    assert_eq!(ran, Ran::Repeat(100));
}

#[tokio::test(start_paused = true)]
async fn the_value_that_stands_is_the_one_that_everybody_gets() {
    // A record that the work completes itself, as in a transaction of its own.
    for result in [
        Ok(100),
        Err(Failure::Terminal(text())),
        Err(Failure::Transient(text())),
        Err(Failure::Unknown(text())),
    ] {
        let engine = engine();
        let store = engine.store().clone();
        let work = move |_| async move {
            let record = store.lookup(&key("k")).await.unwrap().unwrap();
            let claim = Claim::new(record.key, record.owner, record.attempt);
            let value = Outcome::value(br#"{"Ok":99}"#);
            let completed = store.complete(&claim, &value, None).await.unwrap();
            assert_eq!(completed, Completion::Recorded);
            result
        };
        let ran = engine.run(&key("k"), request("r"), work).await.unwrap();
        assert_eq!(ran, Ran::Repeat(99));
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_lost_its_claim_says_so() {
    let engine = rerunning_engine();
    let store = engine.store().clone();
    let other = another_engine(&engine, |settings| settings);
    let work = move |attempt: Attempt| async move {
        store.remove(&key("k")).await.unwrap();
        let second = begin(&other).await;
        attempt.claim_lost().await;
        assert_eq!(second.abandon().await, Settled::Recorded);
        Ok::<_, Failure<()>>(100)
    };
    let failed = engine.run(&key("k"), request("r"), work).await;
    assert!(matches!(failed, Err(RunError::ClaimLost)), "{failed:?}");
}

#[test]
fn every_error_has_its_advice() {
    let second = Advice::RetryAfter(SECOND);
    let store = |kind| RunError::Store(StoreError::new(kind, "test"));
    let unreadable = serde_json::from_str::<i64>("x").unwrap_err();
    let in_flight = |left| RunError::InFlight {
        lease_left: Duration::from_millis(left),
    };
    let terminal = |repeat| RunError::Terminal {
        error: text(),
        repeat,
    };
    for (error, advice) in [
        (terminal(false), Advice::Acknowledge),
        (terminal(true), Advice::Acknowledge),
        (RunError::Transient(text()), second),
        (RunError::ClaimLost, second),
        (RunError::Overloaded, second),
        (in_flight(30_000), second),
        (
            in_flight(300),
            Advice::RetryAfter(Duration::from_millis(300)),
        ),
        (
            RunError::Unknown(text()),
            Advice::RetryAfter(Duration::from_secs(30)),
        ),
        (
            RunError::OutcomeUnknown,
            Advice::RetryAfter(Duration::from_secs(30)),
        ),
        (store(StoreErrorKind::Unavailable), second),
        (store(StoreErrorKind::Corrupt), Advice::DeadLetter),
        (store(StoreErrorKind::Other), Advice::DeadLetter),
        (RunError::Mismatch, Advice::DeadLetter),
        (RunError::Value(unreadable), Advice::DeadLetter),
        (RunError::NotAValue, Advice::DeadLetter),
    ] {
        assert_eq!(error.advice(), advice, "{error:?}");
        // Its text says what to do, and nothing of the key.
        assert!(!error.to_string().is_empty());
    }
}
