//! One payment that is reported in three ways at once: by the gateway's callback, by the customer who
//! comes back and lets us inquire, and by somebody in the office who presses a button. All call one
//! method, and the order is settled once.

#![cfg(all(feature = "memory", feature = "testing"))]

#[path = "support/app.rs"]
mod app;
#[cfg(feature = "postgres")]
#[path = "support/postgres.rs"]
mod postgres;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tokio::sync::Barrier;
use tokio::task::yield_now;
use tower_idempotency::{
    Advice, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer, KeySource,
    MemoryStore, MissingKey, Ran, RunError, Store,
};

use crate::app::{App, Call, post};

/// What must happen once: points, a mail.
#[derive(Clone, Default)]
struct Effects {
    points: Arc<AtomicUsize>,
    mails: Arc<AtomicUsize>,
}

type Settled = Result<Ran<String>, RunError<String>>;

/// The one method behind all three doors. Its key is the operation, however it was reported.
async fn settle<S: Store>(engine: &Idempotency<S>, effects: Effects, order: &str) -> Settled {
    let key = IdempotencyKey::new(order).unwrap().scoped("settle");
    let work = move |_attempt| async move {
        effects.points.fetch_add(100, Ordering::SeqCst);
        // Others come in while it runs.
        for _ in 0..20 {
            yield_now().await;
        }
        effects.mails.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Failure<String>>("paid".to_owned())
    };
    engine.run(&key, Fingerprint::of(&[]), work).await
}

/// What a door answers: each of them may be asked again.
fn answer(settled: Settled) -> Response {
    match settled {
        Ok(ran) => ran.into_inner().into_response(),
        Err(error) => match error.advice() {
            Advice::RetryAfter(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
            _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        },
    }
}

async fn three_ways_at_once<S: Store>(make: impl AsyncFn() -> Idempotency<S>, order: &'static str) {
    let effects = Effects::default();
    let all_are_here = Arc::new(Barrier::new(3));
    let door = |engine: &Idempotency<S>| {
        let (engine, effects) = (engine.clone(), effects.clone());
        move |_: Call| {
            let (engine, effects) = (engine.clone(), effects.clone());
            async move { answer(settle(&engine, effects, order).await) }
        }
    };
    // Each in a process of its own.
    let (callback, redirect, button) = (make().await, make().await, make().await);

    let event_id = KeySource::json(["/id"]).unwrap();
    let layer = IdempotencyLayer::webhooks(callback.clone(), "gateway", event_id);
    let callback = App::behind(&layer.build().unwrap(), door(&callback));
    let layer = IdempotencyLayer::builder(button.clone()).missing_key(MissingKey::Reject);
    let button = App::behind(&layer.build().unwrap(), door(&button));

    let through = |app: App<S>, request: app::Ask| {
        let all_are_here = Arc::clone(&all_are_here);
        async move {
            all_are_here.wait().await;
            loop {
                let answer = app.send(request.clone()).await;
                if answer.status != StatusCode::SERVICE_UNAVAILABLE {
                    return (answer.status, answer.text().to_owned());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let callback = tokio::spawn(through(
        callback,
        post("/callback").json(r#"{"id":"evnt_1"}"#),
    ));
    let button = tokio::spawn(through(button, post("/orders/settle").key("click-1")));
    // The customer's way in is a GET, which no layer guards.
    let redirect = tokio::spawn({
        let (effects, all_are_here) = (effects.clone(), Arc::clone(&all_are_here));
        async move {
            all_are_here.wait().await;
            loop {
                match settle(&redirect, effects.clone(), order).await {
                    Ok(ran) => return ran,
                    Err(error) => match error.advice() {
                        Advice::RetryAfter(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                        _ => panic!("{error}"),
                    },
                }
            }
        }
    });
    let paid = (StatusCode::OK, "paid".to_owned());
    assert_eq!(callback.await.unwrap(), paid);
    assert_eq!(button.await.unwrap(), paid);
    assert_eq!(redirect.await.unwrap().into_inner(), "paid");
    let (points, mails) = (&effects.points, &effects.mails);
    assert_eq!(
        points.load(Ordering::SeqCst),
        100,
        "points were added twice"
    );
    assert_eq!(mails.load(Ordering::SeqCst), 1, "two mails were sent");

    // And whoever asks later learns the same.
    let later = settle(&make().await, effects.clone(), order).await.unwrap();
    assert_eq!(later, Ran::Repeat("paid".to_owned()));
}

const ORDERS: [&str; 8] = ["1", "2", "3", "4", "5", "6", "7", "8"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_that_is_reported_in_three_ways_is_settled_once_in_memory() {
    // One process: three clones share the engine, as its doors do.
    let engine = Idempotency::new(Arc::new(MemoryStore::new()));
    for order in ORDERS {
        three_ways_at_once(async || engine.clone(), order).await;
    }
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_that_is_reported_in_three_ways_is_settled_once_on_postgres() {
    let fresh = postgres::Fresh::store().await;
    for order in ORDERS {
        three_ways_at_once(async || Idempotency::new(fresh.store.clone()), order).await;
    }
}
