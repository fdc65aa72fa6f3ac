//! What holds on PostgreSQL as well as on SQLite.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tower_idempotency::{
    Admission, AttemptGuard, EncryptedStore, Failure, Idempotency, IdempotencyLayer, Keyring,
    OnAbandoned, Outcome, PrefixedStore, Ran, RecordingError, Settled, State, Store, Transactional,
};

use crate::app::{App, Call, pay};
use crate::child::charge_and_die;
use crate::claims::{fingerprint, key, outcome};
use crate::database::{Database, Postgres, Sqlite, Till, charged};

const HOUR: Duration = Duration::from_secs(3600);

/// Each of these tests once for each database.
macro_rules! on_both {
    ($($test:ident)*) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test::<super::Postgres>().await;
            })*
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test::<super::Sqlite>().await;
            })*
        }
    };
}

on_both! {
    the_first_answer_is_what_was_recorded_and_a_retry_replays_it
    what_stands_is_sent_whatever_the_handler_answers_then
    a_handler_that_panics_before_the_commit_leaves_neither
    a_lost_claim_fails_and_nothing_commits
    of_an_attempt_and_its_takeover_one_commits
    an_outcome_is_recorded_once
    a_killed_process_leaves_both_or_neither
    a_prefix_and_a_seal_are_put_on_in_the_transaction_too
    an_attempt_of_another_engine_is_refused
    a_job_records_its_value_itself
}

async fn the_first_answer_is_what_was_recorded_and_a_retry_replays_it<D: Database>() {
    let database = D::new().await;
    let app = app(database.store().clone(), database.till(), |outcome| {
        outcome.into_response()
    });
    let first = app.send(pay("k")).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "run 1"));
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!((app.runs(), database.charges().await), (1, 1));
    let record = app.record("k").await.unwrap();
    assert_eq!(outcome(&record), &charged("run 1"));
}

async fn what_stands_is_sent_whatever_the_handler_answers_then<D: Database>() {
    let database = D::new().await;
    // One that frees the key, and one that would be kept.
    for (key, answer) in [
        ("released", StatusCode::BAD_GATEWAY),
        ("kept", StatusCode::ACCEPTED),
    ] {
        let app = app(database.store().clone(), database.till(), move |_| {
            answer.into_response()
        });
        for _ in 0..2 {
            let answered = app.send(pay(key)).await;
            assert_eq!(answered.status, StatusCode::CREATED, "{key}");
            assert_eq!(answered.text(), "run 1");
        }
        assert_eq!(app.runs(), 1);
    }
    assert_eq!(database.charges().await, 2);
}

async fn a_handler_that_panics_before_the_commit_leaves_neither<D: Database>() {
    let database = D::new().await;
    let panics = Arc::new(AtomicBool::new(true));
    let idempotency = Idempotency::builder(database.store().clone())
        .on_abandoned(OnAbandoned::Rerun)
        .build()
        .unwrap();
    let layer = IdempotencyLayer::new(idempotency.clone());
    let (till, panicking) = (database.till(), Arc::clone(&panics));
    let app = App::behind(&layer, move |call: Call| {
        let (till, idempotency) = (till.clone(), idempotency.clone());
        let panics = Arc::clone(&panicking);
        async move {
            let attempt = call.attempt().unwrap().clone();
            let outcome = charged("paid");
            let at = move |at: &str| {
                let now = at == "recorded" && panics.swap(false, Ordering::SeqCst);
                assert!(!now, "as ordered");
            };
            let charging = till.charge(&idempotency, &attempt, outcome.clone(), at);
            charging.await.unwrap();
            outcome
        }
    });
    let sent = tokio::spawn(app.call(pay("k"))).await;
    assert!(sent.unwrap_err().is_panic());
    assert_eq!(database.charges().await, 0);
    // All that the handler does lies in its transaction, so that it may run again.
    let answer = app.send(pay("k")).await;
    assert_eq!(answer.text(), "paid");
    assert_eq!((app.runs(), database.charges().await), (2, 1));
}

async fn a_lost_claim_fails_and_nothing_commits<D: Database>() {
    let database = D::new().await;
    let idempotency = Idempotency::new(database.store().clone());
    let stalled = admit(&idempotency).await;
    let other = take_over(&database).await;
    let till = database.till();
    let charging = till.charge(&idempotency, stalled.attempt(), charged("1"), |at| {
        assert_eq!(at, "rows", "it went on without a claim");
    });
    let error = charging.await.unwrap_err();
    assert!(matches!(error, RecordingError::ClaimLost), "{error:?}");
    assert_eq!(database.charges().await, 0);
    assert_eq!(other.complete(charged("2")).await, Settled::Recorded);

    let erased = key("erased");
    let admitted = idempotency.admit(&erased, fingerprint()).await.unwrap();
    let Admission::First(guard) = admitted else {
        panic!("{admitted:?}");
    };
    assert!(database.store().remove(&erased).await.unwrap());
    let charging = till.charge(&idempotency, guard.attempt(), charged("1"), |_| {});
    let error = charging.await.unwrap_err();
    assert!(matches!(error, RecordingError::ClaimLost), "{error:?}");
    assert_eq!(database.charges().await, 0);
}

async fn of_an_attempt_and_its_takeover_one_commits<D: Database>() {
    let database = D::new().await;
    for round in 1..=10 {
        let stalled = Idempotency::new(database.store().clone());
        let key = key(&format!("k{round}"));
        let admitted = stalled.admit(&key, fingerprint()).await.unwrap();
        let Admission::First(first) = admitted else {
            panic!("{admitted:?}");
        };
        database.age(&key, HOUR).await;
        let till = database.till();
        let slow = till.charge(&stalled, first.attempt(), charged("slow"), |_| {});
        let quick = async {
            let rerunning = rerunning(&database);
            let admitted = rerunning.admit(&key, fingerprint()).await.unwrap();
            let Admission::First(second) = admitted else {
                // The slow one was quicker after all.
                assert!(matches!(admitted, Admission::Replay(_)), "{admitted:?}");
                return None;
            };
            let till = database.till();
            let charging = till.charge(&rerunning, second.attempt(), charged("quick"), |_| {});
            Some(charging.await)
        };
        let (slow, quick) = tokio::join!(slow, quick);
        let committed = u32::from(slow.is_ok()) + u32::from(matches!(quick, Some(Ok(()))));
        assert_eq!(committed, 1, "slow: {slow:?}, quick: {quick:?}");
        assert_eq!(database.charges().await, round);
    }
}

async fn an_outcome_is_recorded_once<D: Database>() {
    let database = D::new().await;
    let idempotency = Idempotency::new(database.store().clone());
    let guard = admit(&idempotency).await;
    let till = database.till();
    let (one, two) = (charged("1"), charged("2"));
    till.charge(&idempotency, guard.attempt(), one.clone(), |_| {})
        .await
        .unwrap();
    // As a handler does whose COMMIT got no reply.
    let again = till.charge(&idempotency, guard.attempt(), two.clone(), |_| {});
    let again = again.await.unwrap_err();
    assert!(matches!(again, RecordingError::ClaimLost), "{again:?}");
    assert_eq!(database.charges().await, 1);
    assert_eq!(guard.complete(two).await, Settled::Standing(one));
}

async fn a_killed_process_leaves_both_or_neither<D: Database>() {
    for (point, committed) in [("rows", 0), ("recorded", 0), ("committed", 1)] {
        let database = D::new().await;
        let address = database.address();
        tokio::task::spawn_blocking(move || charge_and_die(&address, point))
            .await
            .unwrap();
        assert_eq!(database.charges().await, committed, "{point}");
        let held = database.store().lookup(&key("k")).await.unwrap().unwrap();
        match held.state {
            State::Completed { .. } => assert_eq!(committed, 1, "{point}"),
            _ => assert_eq!(committed, 0, "{point}"),
        }
        if committed == 0 {
            // Its lease ends, and as everything lies in the transaction, it is run again.
            let guard = take_over(&database).await;
            let rerunning = rerunning(&database);
            let _ = guard.release().await;
            let guard = admit(&rerunning).await;
            let till = database.till();
            let charging = till.charge(&rerunning, guard.attempt(), charged("once"), |_| {});
            charging.await.unwrap();
        }
        let Admission::Replay(replay) = rerunning(&database)
            .admit(&key("k"), fingerprint())
            .await
            .unwrap()
        else {
            panic!("no replay after {point}");
        };
        assert_eq!(replay.outcome, charged("once"));
        assert_eq!(database.charges().await, 1, "{point}");
    }
}

async fn a_prefix_and_a_seal_are_put_on_in_the_transaction_too<D: Database>() {
    let database = D::new().await;
    let sealed = EncryptedStore::new(database.store().clone(), Keyring::new(1, [7; 32]));
    let app = app(
        PrefixedStore::new(sealed, "shop"),
        database.till(),
        |outcome| outcome.into_response(),
    );
    let first = app.send(pay("k")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    app.send(pay("k")).await.assert_replays(&first);
    let record = app.record("k").await.unwrap();
    let inner = app.store().inner_key(&record.key);
    let kept = database.store().lookup(&inner).await.unwrap().unwrap();
    let kept = outcome(&kept).as_bytes();
    assert!(!kept.windows(5).any(|bytes| bytes == b"run 1"), "in clear");
    assert_eq!(database.charges().await, 1);
}

async fn an_attempt_of_another_engine_is_refused<D: Database>() {
    let database = D::new().await;
    let guard = admit(&Idempotency::new(database.store().clone())).await;
    let other = Idempotency::new(database.store().clone());
    let Err(error) = other.recording(guard.attempt(), &charged("1")) else {
        panic!("it may be another store's");
    };
    assert!(matches!(error, RecordingError::Misplaced(_)), "{error:?}");
}

async fn a_job_records_its_value_itself<D: Database>() {
    let database = D::new().await;
    let idempotency = Idempotency::new(database.store().clone());
    let run = async || {
        let (idempotency, till) = (idempotency.clone(), database.till());
        idempotency
            .clone()
            .run(&key("points"), fingerprint(), |attempt| async move {
                let outcome = Outcome::of_value(&100).map_err(|_| Failure::Unknown(()))?;
                let charging = till.charge(&idempotency, &attempt, outcome, |_| {});
                charging.await.map_err(|_| Failure::Transient(()))?;
                Ok::<u32, Failure<()>>(100)
            })
            .await
            .unwrap()
    };
    assert_eq!(run().await, Ran::First(100));
    assert_eq!(run().await, Ran::Repeat(100));
    assert_eq!(database.charges().await, 1);
}

/// The key `k`, for the first time.
async fn admit<S: Store>(idempotency: &Idempotency<S>) -> AttemptGuard {
    match idempotency.admit(&key("k"), fingerprint()).await.unwrap() {
        Admission::First(guard) => guard,
        other => panic!("not the first: {other:?}"),
    }
}

fn rerunning<D: Database>(database: &D) -> Idempotency<D::Store> {
    let builder = Idempotency::builder(database.store().clone());
    builder.on_abandoned(OnAbandoned::Rerun).build().unwrap()
}

/// Another process gets the key `k`, because its holder stalls.
async fn take_over<D: Database>(database: &D) -> AttemptGuard {
    database.age(&key("k"), HOUR).await;
    let guard = admit(&rerunning(database)).await;
    assert_eq!(guard.attempt().number(), 2);
    guard
}

/// A service that charges and answers as it is told to.
fn app<S, T>(
    store: S,
    till: T,
    answer: impl Fn(Outcome) -> Response + Clone + Send + Sync + 'static,
) -> App<S>
where
    S: Transactional,
    T: Till<Recording = S::Recording>,
{
    let layer = IdempotencyLayer::new(store);
    let idempotency = layer.idempotency().clone();
    App::behind(&layer, move |call: Call| {
        let (till, idempotency) = (till.clone(), idempotency.clone());
        let answer = answer.clone();
        async move {
            let outcome = charged(&format!("run {}", call.run));
            let attempt = call.attempt().unwrap();
            let charging = till.charge(&idempotency, attempt, outcome.clone(), |_| {});
            charging.await.unwrap();
            answer(outcome)
        }
    })
}
