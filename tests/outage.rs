//! What a client is told while the store is away, slow, damaged or emptied.

#[path = "support/engine.rs"]
mod engine;
#[path = "support/odd.rs"]
mod odd;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Attempt, Claim, Completion, Disposition, IdempotencyKey, IdempotencyLayer,
    IdempotencyLayerBuilder, InFlight, OnOutage, Outcome, RequestBody, ResponseBody,
    RetentionOverride, Scope, ScopedKey, Settled, Store, StoreErrorKind,
};

use crate::engine::*;
use crate::odd::Odd;

type Settings = IdempotencyLayerBuilder<TestStore>;
type Call = Request<RequestBody<Full<Bytes>>>;
type Reply = Response<Full<Bytes>>;
type Layered = Response<ResponseBody<Full<Bytes>>>;

/// A handler behind the layer, whose runs are counted.
#[derive(Clone)]
struct App {
    service: BoxCloneSyncService<Request<Full<Bytes>>, Layered, BoxError>,
    engine: Engine,
    runs: Arc<AtomicUsize>,
}

/// An answer, read to its end.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl App {
    /// A charge that takes two seconds.
    fn new(engine: Engine) -> Self {
        Self::with(engine, |settings| settings, async |_| Ok(created("1")))
    }

    fn with<H, F>(engine: Engine, settings: impl FnOnce(Settings) -> Settings, handler: H) -> Self
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Reply, BoxError>> + Send + 'static,
    {
        let runs = Arc::<AtomicUsize>::default();
        let counting = Arc::clone(&runs);
        let inner = service_fn(move |call| {
            let (handler, counting) = (handler.clone(), Arc::clone(&counting));
            async move {
                sleep(2 * SECOND).await;
                counting.fetch_add(1, Ordering::SeqCst);
                handler(call).await
            }
        });
        let builder = IdempotencyLayer::builder(engine.clone()).scope(Scope::everybody());
        let layer = settings(builder).build().unwrap();
        Self {
            service: BoxCloneSyncService::new(layer.layer(inner)),
            engine,
            runs,
        }
    }

    async fn call(&self) -> Result<Answer, BoxError> {
        let request = Request::post("/charges").header("idempotency-key", "k");
        let request = request.body(Full::from("amount=100")).unwrap();
        let response = self.service.clone().oneshot(request).await?;
        let (head, body) = response.into_parts();
        Ok(Answer {
            status: head.status.as_u16(),
            headers: head.headers,
            body: body.collect().await.unwrap().to_bytes(),
        })
    }

    async fn send(&self) -> Answer {
        self.call().await.unwrap()
    }

    /// A client that leaves after this long.
    async fn leave_after(&self, patience: Duration) {
        assert!(timeout(patience, self.call()).await.is_err());
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    fn store(&self) -> &TestStore {
        self.engine.store()
    }
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The code of a refusal, which stands in a header and in the body.
    #[track_caller]
    fn code(&self) -> &str {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json")
        );
        let code = self.header("idempotency-error").expect("no refusal");
        let problem: Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem["code"], code);
        assert_eq!(problem["status"], self.status);
        code
    }

    #[track_caller]
    fn assert_refused(&self, status: u16, code: &str, retry_after: Option<&str>) {
        assert_eq!((self.status, self.code()), (status, code));
        assert_eq!(self.header("retry-after"), retry_after);
    }

    /// The handler's own answer, with what the layer says about its record.
    #[track_caller]
    fn assert_own(&self, result: Option<&str>) {
        assert_eq!((self.status, &self.body[..]), (201, &b"1"[..]));
        assert_eq!(self.header("idempotency-result"), result);
        assert_eq!(self.header("idempotency-replayed"), None);
    }

    #[track_caller]
    fn assert_replayed(&self, body: &str) {
        assert_eq!((self.status, &self.body[..]), (201, body.as_bytes()));
        assert_eq!(self.header("idempotency-replayed"), Some("true"));
        assert_eq!(self.header("idempotency-result"), None);
    }
}

fn created(body: &'static str) -> Reply {
    let mut reply = Response::new(Full::from(body));
    *reply.status_mut() = StatusCode::CREATED;
    reply
}

/// The lookup key of what [`App::call`] sends.
fn lookup_key() -> ScopedKey {
    ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap())
}

/// Completes the key of a handler that runs, as that handler's own transaction would.
async fn complete_in_transaction(store: &TestStore, outcome: &Outcome) {
    let record = store.lookup(&lookup_key()).await.unwrap().unwrap();
    let claim = Claim::new(record.key, record.owner, record.attempt);
    let completed = store.complete(&claim, outcome, None).await.unwrap();
    assert_eq!(completed, Completion::Recorded);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_nothing_runs() {
    let app = App::new(engine());
    app.store().inject(Move::Claim, Calls::Every, Fault::Fail);
    for _ in 0..3 {
        let refused = app.send().await;
        refused.assert_refused(503, "store_unavailable", Some("1"));
    }
    assert_eq!(app.runs(), 0);
    app.store().heal();
    app.send().await.assert_own(None);
    app.send().await.assert_replayed("1");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_too_slow_is_away() {
    let app = App::new(engine());
    app.store()
        .inject(Move::Claim, Calls::Next(1), Fault::DelayReply(LEASE));
    let asked = Instant::now();
    let refused = app.send().await;
    refused.assert_refused(503, "store_unavailable", Some("1"));
    assert!(asked.elapsed() < 6 * SECOND);
    assert_eq!(app.runs(), 0);
    // It was claimed all the same, and is free again in a moment.
    sleep(Duration::from_millis(1)).await;
    app.send().await.assert_own(None);
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_to_a_claim_goes_unnoticed() {
    let app = App::new(engine());
    app.store()
        .inject(Move::Claim, Calls::Next(1), Fault::LoseReply);
    app.send().await.assert_own(None);
    app.send().await.assert_replayed("1");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_nobody_heard_of_does_not_hold_its_key() {
    let app = App::new(engine());
    app.store()
        .inject(Move::Claim, Calls::Next(4), Fault::LoseReply);
    let refused = app.send().await;
    refused.assert_refused(503, "store_unavailable", Some("1"));
    sleep(SECOND).await;
    app.send().await.assert_own(None);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_cannot_be_read_is_an_error_and_nothing_runs() {
    for on_outage in [OnOutage::Reject, OnOutage::PassThrough] {
        let app = App::with(
            engine(),
            |settings| settings.on_outage(on_outage),
            async |_| Ok(created("1")),
        );
        app.store()
            .inner()
            .set(Move::Claim, Odd::Error(StoreErrorKind::Corrupt));
        let refused = app.send().await;
        refused.assert_refused(500, "record_unreadable", None);
        assert_eq!(app.runs(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_for_good_is_asked_once() {
    let app = App::new(engine());
    app.store()
        .inner()
        .set(Move::Claim, Odd::Error(StoreErrorKind::Other));
    let refused = app.send().await;
    refused.assert_refused(503, "store_unavailable", Some("1"));
    assert_eq!((app.runs(), app.store().calls(Move::Claim)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn unprotected_answers_are_marked() {
    for odd in [None, Some(Odd::Error(StoreErrorKind::Other))] {
        let app = App::with(
            engine(),
            |settings| settings.on_outage(OnOutage::PassThrough),
            async |_| Ok(created("1")),
        );
        match odd {
            None => app.store().inject(Move::Claim, Calls::Every, Fault::Fail),
            Some(odd) => app.store().inner().set(Move::Claim, odd),
        }
        for runs in 1..3 {
            let answer = app.send().await;
            answer.assert_own(None);
            assert_eq!(answer.header("idempotency-unprotected"), Some("true"));
            assert_eq!(app.runs(), runs);
        }
        app.store().heal();
        app.store().inner().heal();
        let answer = app.send().await;
        assert_eq!(answer.header("idempotency-unprotected"), None);
        app.send().await.assert_replayed("1");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unprotected_handler_ends_without_its_client() {
    let app = App::with(
        engine(),
        |settings| settings.on_outage(OnOutage::PassThrough),
        async |_| Ok(created("1")),
    );
    app.store()
        .inner()
        .set(Move::Claim, Odd::Error(StoreErrorKind::Other));
    app.leave_after(SECOND).await;
    assert_eq!(app.engine.detached(), 1);
    assert!(app.engine.drain().await);
    assert_eq!(app.runs(), 1);
}

#[cfg(feature = "metrics")]
#[test]
fn unprotected_answers_are_counted() {
    use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};
    use std::sync::Mutex;

    #[derive(Default)]
    struct Counted(Arc<Mutex<Vec<String>>>);

    struct Outcome(String, Arc<Mutex<Vec<String>>>);

    impl metrics::CounterFn for Outcome {
        fn increment(&self, _: u64) {
            self.1.lock().unwrap().push(self.0.clone());
        }
        fn absolute(&self, _: u64) {}
    }

    impl metrics::Recorder for Counted {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            let mut labels = key.labels();
            let outcome = labels.find(|label| label.key() == "outcome");
            match outcome {
                Some(outcome) if key.name() == "idempotency.requests" => {
                    let outcome = outcome.value().to_owned();
                    Counter::from_arc(Arc::new(Outcome(outcome, Arc::clone(&self.0))))
                }
                _ => Counter::noop(),
            }
        }
        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    let recorder = Counted::default();
    let counted = Arc::clone(&recorder.0);
    metrics::with_local_recorder(&recorder, || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let app = App::with(
                engine(),
                |settings| settings.on_outage(OnOutage::PassThrough),
                async |_| Ok(created("1")),
            );
            app.store().inject(Move::Claim, Calls::Every, Fault::Fail);
            app.send().await;
            app.store().heal();
            app.send().await;
            app.send().await;
        });
    });
    assert_eq!(
        *counted.lock().unwrap(),
        ["unprotected", "executed", "replayed"]
    );
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_is_recorded_at_the_second_try_is_like_any_other() {
    for fault in [Fault::Fail, Fault::LoseReply] {
        let app = App::new(engine());
        app.store().inject(Move::Complete, Calls::Next(1), fault);
        app.send().await.assert_own(None);
        app.send().await.assert_replayed("1");
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_is_not_recorded_in_time_is_marked_and_recorded_later() {
    for fault in [Fault::Fail, Fault::Hang, Fault::DelayReply(LEASE)] {
        let app = App::new(engine());
        app.store().inject(Move::Complete, Calls::Every, fault);
        let asked = Instant::now();
        app.send().await.assert_own(Some("not-saved"));
        assert!(asked.elapsed() <= 8 * SECOND, "{fault:?}");
        if !matches!(fault, Fault::DelayReply(_)) {
            let refused = app.send().await;
            refused.assert_refused(409, "in_progress", Some("1"));
        }
        app.store().heal();
        assert!(app.engine.drain().await);
        app.send().await.assert_replayed("1");
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_is_never_recorded_is_unknown_and_never_run_again() {
    let app = App::new(engine());
    app.store()
        .inject(Move::Complete, Calls::Every, Fault::Fail);
    app.send().await.assert_own(Some("not-saved"));
    sleep(2 * LEASE).await;
    app.store().heal();
    for _ in 0..3 {
        let refused = app.send().await;
        refused.assert_refused(409, "outcome_unknown", Some("30"));
        sleep(10 * LEASE).await;
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_not_freed_in_time_is_marked_and_freed_later() {
    let app = App::with(
        engine(),
        |settings| settings,
        async |_| {
            let mut reply = created("1");
            reply
                .extensions_mut()
                .insert(RetentionOverride::NotExecuted);
            Ok(reply)
        },
    );
    app.store().inject(Move::Release, Calls::Every, Fault::Fail);
    app.send().await.assert_own(Some("not-saved"));
    let refused = app.send().await;
    refused.assert_refused(409, "in_progress", Some("1"));
    app.store().heal();
    assert!(app.engine.drain().await);
    app.send().await.assert_own(None);
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_a_transaction_recorded_is_sent() {
    let engine = engine();
    let store = engine.store().clone();
    let app = App::with(
        engine,
        |settings| settings,
        move |_| {
            let store = store.clone();
            async move {
                complete_in_transaction(&store, &outcome("tx")).await;
                Ok(created("1"))
            }
        },
    );
    app.send().await.assert_replayed("tx");
    app.send().await.assert_replayed("tx");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_that_stands_leaves_the_handlers_own_answer() {
    let engine = engine();
    let store = engine.store().clone();
    let app = App::with(
        engine,
        |settings| settings,
        move |_| {
            let store = store.clone();
            async move {
                let tombstone = Outcome::tombstone(StatusCode::CREATED);
                complete_in_transaction(&store, &tombstone).await;
                Ok(created("1"))
            }
        },
    );
    app.send().await.assert_own(None);
    let refused = app.send().await;
    refused.assert_refused(409, "response_not_kept", None);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_was_overtaken_answers_what_its_successor_answered() {
    let engine = rerunning_engine();
    let waiting = engine.store().clone();
    // The first run stalls until its claim is lost and another one is done.
    let app = App::with(
        engine.clone(),
        |settings| settings,
        move |call: Call| {
            let store = waiting.clone();
            async move {
                let attempt = call.extensions().get::<Attempt>();
                let attempt = attempt.unwrap().clone();
                if attempt.number() == 2 {
                    return Ok(created("2"));
                }
                store.inject(Move::Renew, Calls::Every, Fault::Fail);
                attempt.claim_lost().await;
                sleep(10 * SECOND).await;
                Ok(created("1"))
            }
        },
    );
    let stalled = tokio::spawn({
        let app = app.clone();
        async move { app.send().await }
    });
    sleep(LEASE + 3 * SECOND).await;
    let second = app.send().await;
    assert_eq!((second.status, &second.body[..]), (201, &b"2"[..]));
    assert_eq!(second.header("idempotency-replayed"), None);
    stalled.await.unwrap().assert_replayed("2");
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_lost_its_claim_answers_for_itself() {
    for removal_is_followed in [false, true] {
        let engine = engine();
        let store = engine.store().clone();
        let other = engine.clone();
        let app = App::with(
            engine,
            |settings| settings,
            move |_| {
                let (store, other) = (store.clone(), other.clone());
                async move {
                    // An operator, or a store that was emptied.
                    assert!(store.remove(&lookup_key()).await.unwrap());
                    if removal_is_followed {
                        let admission = other.admit(&lookup_key(), request("other")).await;
                        let settled = first(admission.unwrap()).complete(outcome("other")).await;
                        assert_eq!(settled, Settled::Recorded);
                    }
                    Ok(created("1"))
                }
            },
        );
        app.send().await.assert_own(Some("claim-lost"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_service_leaves_the_key_unknown_unless_it_is_classified() {
    let failing = async |_| Err::<Reply, BoxError>("broken".into());
    let app = App::with(engine(), |settings| settings, failing);
    assert_eq!(app.call().await.unwrap_err().to_string(), "broken");
    let refused = app.send().await;
    refused.assert_refused(409, "outcome_unknown", Some("30"));
    assert_eq!(app.runs(), 1);

    let shed = |settings: Settings| settings.classify_error(|_: &BoxError| Disposition::Release);
    let app = App::with(engine(), shed, failing);
    for _ in 0..2 {
        assert_eq!(app.call().await.unwrap_err().to_string(), "broken");
    }
    assert_eq!(app.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_panic_goes_on_unwinding_and_leaves_the_key_unknown() {
    let panicking = async |_| -> Result<Reply, BoxError> { panic!("in the handler") };
    let app = App::with(engine(), |settings| settings, panicking);
    let payload = AssertUnwindSafe(app.call()).catch_unwind().await;
    assert_eq!(payload.unwrap_err().downcast_ref(), Some(&"in the handler"));
    let refused = app.send().await;
    refused.assert_refused(409, "outcome_unknown", Some("30"));
    assert_eq!((app.runs(), app.engine.running()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_finds_its_answer_later() {
    // While it is claimed, handled and recorded; each of them takes two seconds.
    for leaves_after in [1, 3, 5] {
        let app = App::new(engine());
        let store = app.store();
        store.inject(Move::Claim, Calls::Next(1), Fault::Delay(2 * SECOND));
        store.inject(Move::Complete, Calls::Next(1), Fault::Delay(2 * SECOND));
        app.leave_after(leaves_after * SECOND).await;
        assert_eq!((app.engine.running(), app.engine.detached()), (1, 1));
        assert!(app.engine.drain().await);
        app.send().await.assert_replayed("1");
        assert_eq!(app.runs(), 1, "left after {leaves_after} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_without_its_client_leaves_the_key_unknown() {
    let panicking = async |_| -> Result<Reply, BoxError> { panic!("in the handler") };
    let app = App::with(engine(), |settings| settings, panicking);
    app.leave_after(SECOND).await;
    assert!(app.engine.drain().await);
    assert_eq!((app.engine.running(), app.engine.detached()), (0, 0));
    let refused = app.send().await;
    refused.assert_refused(409, "outcome_unknown", Some("30"));
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_clients_that_are_still_there() {
    let app = App::new(engine());
    let sending = tokio::spawn({
        let app = app.clone();
        async move { app.send().await }
    });
    sleep(SECOND).await;
    assert_eq!((app.engine.running(), app.engine.detached()), (1, 0));
    let begun = Instant::now();
    assert!(app.engine.drain().await);
    assert_eq!(begun.elapsed(), SECOND);
    sending.await.unwrap().assert_own(None);
}

#[tokio::test(start_paused = true)]
async fn too_many_clients_that_left_stop_new_work() {
    let app = App::new(engine_with(|settings| settings.detached_limit(1)));
    app.leave_after(SECOND).await;
    let claims = app.store().calls(Move::Claim);
    let refused = app.send().await;
    refused.assert_refused(503, "overloaded", Some("1"));
    assert_eq!(app.store().calls(Move::Claim), claims);
    assert!(app.engine.drain().await);
    app.send().await.assert_replayed("1");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_store_goes_away_is_told_so() {
    let waiting = |settings: Settings| settings.in_flight(InFlight::Wait(10 * SECOND));
    let app = App::with(engine(), waiting, async |_| Ok(created("1")));
    let store = app.store();
    store.inject(Move::Changed, Calls::Every, Fault::Fail);
    let sending = tokio::spawn({
        let app = app.clone();
        async move { app.send().await }
    });
    tokio::task::yield_now().await;
    let refused = app.send().await;
    refused.assert_refused(503, "store_unavailable", Some("1"));
    sending.await.unwrap().assert_own(None);
    store.heal();
    app.send().await.assert_replayed("1");
    assert_eq!(app.runs(), 1);
}
