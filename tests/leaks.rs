//! Clients that leave at any point leave nothing behind: no task, no claim, no count, no engine.

#[path = "support/engine.rs"]
mod engine;
#[path = "support/odd.rs"]
mod odd;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Failure, IdempotencyKey, IdempotencyLayer, InFlight, RequestBody, Scope, ScopedKey, State,
    Store,
};

use crate::engine::*;

const REQUESTS: usize = 10_000;
/// Every key is asked for by several clients.
const KEYS: usize = 3_000;
const AT_ONCE: usize = 50;

/// Evenly spread numbers, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        // The multiplier and the increment of Knuth's MMIX; the high bits are the good ones.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// How long a client waits: from not at all to the end, in steps finer than the work's.
fn patience(dice: &mut Dice) -> Option<Duration> {
    let steps = u64::try_from(dice.below(16)).unwrap();
    (steps > 0).then(|| Duration::from_millis(steps - 1))
}

/// Drops a future after this long, or before its first poll.
async fn leave_after(patience: Option<Duration>, asking: impl Future) {
    match patience {
        None => drop(asking),
        // The first poll comes before the timer's.
        Some(patience) => drop(timeout(patience, asking).await),
    }
}

/// A store that takes its time, and fails now and then.
fn slow_engine() -> Engine {
    let engine = engine_with(|settings| settings.detached_limit(REQUESTS));
    let store = engine.store();
    for (n, of) in [Move::Claim, Move::Complete, Move::Renew]
        .into_iter()
        .cycle()
        .take(300)
        .enumerate()
    {
        let fault = match n % 2 {
            0 => Fault::Fail,
            _ => Fault::LoseReply,
        };
        store.inject(of, Calls::Nth(1 + 37 * n), fault);
    }
    for of in [Move::Claim, Move::Complete, Move::Renew] {
        let slow = Fault::Delay(Duration::from_millis(2));
        store.inject(of, Calls::Every, slow);
    }
    engine
}

/// Nothing is left but what the clients have paid for.
async fn assert_nothing_is_left(engine: Engine, keys: &[ScopedKey], runs: &[AtomicUsize]) {
    assert!(engine.drain().await);
    assert_eq!((engine.running(), engine.detached()), (0, 0));
    sleep(LEASE).await;
    assert_eq!(tasks(), 0);
    engine.store().heal();
    let mut kept = 0;
    for (key, runs) in keys.iter().zip(runs) {
        let record = engine.store().lookup(key).await.unwrap();
        let expected = match record.map(|record| record.state) {
            None | Some(State::Released) => 0,
            Some(State::Completed { .. }) => 1,
            Some(_) => panic!("a claim is left of {key:?}"),
        };
        assert_eq!(runs.load(Ordering::SeqCst), expected, "{key:?}");
        kept += expected;
    }
    // So that the test knows that it tests something.
    assert!(kept > keys.len() / 2, "{kept} of {}", keys.len());
    let store = engine.store().inner().token();
    drop(engine);
    assert_eq!(Weak::strong_count(&store), 0, "the engine is still held");
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_requests_that_were_cancelled_leave_nothing_behind() {
    let engine = slow_engine();
    let runs: Arc<[AtomicUsize]> = (0..KEYS).map(|_| AtomicUsize::new(0)).collect();
    let counting = Arc::clone(&runs);
    let handler = service_fn(move |call: Request<RequestBody<Full<Bytes>>>| {
        let counting = Arc::clone(&counting);
        async move {
            sleep(Duration::from_millis(2)).await;
            let n: usize = call.headers()["idempotency-key"]
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            counting[n].fetch_add(1, Ordering::SeqCst);
            sleep(Duration::from_millis(2)).await;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"1"))))
        }
    });
    let service = |in_flight| {
        IdempotencyLayer::builder(engine.clone())
            .scope(Scope::everybody())
            .in_flight(in_flight)
            .build()
            .unwrap()
            .layer(handler.clone())
    };
    let services = [
        service(InFlight::Reject),
        service(InFlight::Wait(Duration::from_millis(20))),
    ];
    let mut dice = Dice(4711);
    for _ in 0..REQUESTS / AT_ONCE {
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..AT_ONCE {
            let key = dice.below(KEYS).to_string();
            let request = Request::post("/").header("idempotency-key", &key);
            let request = request.body(Full::from("body")).unwrap();
            let service = services[dice.below(2)].clone();
            let patience = patience(&mut dice);
            clients.spawn(async move { leave_after(patience, service.oneshot(request)).await });
        }
        while clients.join_next().await.is_some() {}
    }
    drop((services, handler));
    let keys: Vec<_> = (0..KEYS)
        .map(|n| ScopedKey::new("http", "", &IdempotencyKey::new(&n.to_string()).unwrap()))
        .collect();
    assert_nothing_is_left(engine, &keys, &runs).await;
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_jobs_that_were_cancelled_leave_nothing_behind() {
    let engine = slow_engine();
    let runs: Arc<[AtomicUsize]> = (0..KEYS).map(|_| AtomicUsize::new(0)).collect();
    let mut dice = Dice(42);
    for _ in 0..REQUESTS / AT_ONCE {
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..AT_ONCE {
            let n = dice.below(KEYS);
            let patience = patience(&mut dice);
            let (engine, runs) = (engine.clone(), Arc::clone(&runs));
            callers.spawn(async move {
                let key = key(&n.to_string());
                let work = move |_| async move {
                    sleep(Duration::from_millis(2)).await;
                    runs[n].fetch_add(1, Ordering::SeqCst);
                    sleep(Duration::from_millis(2)).await;
                    Ok::<_, Failure<()>>(1)
                };
                leave_after(patience, engine.run(&key, request("r"), work)).await;
            });
        }
        while callers.join_next().await.is_some() {}
    }
    let keys: Vec<_> = (0..KEYS).map(|n| key(&n.to_string())).collect();
    assert_nothing_is_left(engine, &keys, &runs).await;
}

/// Several threads at once, where a drop may meet a poll, a wake-up or another drop anywhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cancelled_jobs_on_several_threads_leave_nothing_behind() {
    let engine = engine_with(|settings| settings.detached_limit(REQUESTS));
    let runs: Arc<[AtomicUsize]> = (0..KEYS).map(|_| AtomicUsize::new(0)).collect();
    let mut callers = tokio::task::JoinSet::new();
    for seed in 0..4 {
        let (engine, runs) = (engine.clone(), Arc::clone(&runs));
        callers.spawn(async move {
            let mut dice = Dice(seed);
            for _ in 0..REQUESTS / 4 {
                let n = dice.below(KEYS);
                let (key, runs) = (key(&n.to_string()), Arc::clone(&runs));
                let work = move |_| async move {
                    tokio::task::yield_now().await;
                    runs[n].fetch_add(1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    Ok::<_, Failure<()>>(1)
                };
                let mut running = Box::pin(engine.run(&key, request("r"), work));
                for _ in 0..dice.below(5) {
                    if poll_once(running.as_mut()).await.is_ready() {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
        });
    }
    callers.join_all().await;
    assert!(engine.drain().await);
    assert_eq!((engine.running(), engine.detached()), (0, 0));
    for (n, runs) in runs.iter().enumerate() {
        let record = engine.store().lookup(&key(&n.to_string())).await.unwrap();
        let is_completed = match record.map(|record| record.state) {
            None => false,
            Some(State::Completed { .. }) => true,
            Some(state) => panic!("{n} is {state:?}"),
        };
        assert_eq!(runs.load(Ordering::SeqCst), usize::from(is_completed));
    }
    let store = engine.store().inner().token();
    drop(engine);
    // The heartbeat may have its hand on the engine for a moment.
    while Weak::strong_count(&store) > 0 {
        tokio::task::yield_now().await;
    }
}

async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}
