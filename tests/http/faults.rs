//! Handlers that panic or fail, services that are not ready, stores that do not answer.

use std::future::{Ready, ready};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::StreamBody;
use tower::limit::ConcurrencyLimitLayer;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{
    Disposition, IdempotencyLayer, MemoryStore, OnAbandoned, OnOutage, ProblemKind, RequestBody,
};

use crate::app::{App, Call, Gate, counted, paid, pay, post, send};

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new())
}

/// Sends a request whose answer is a panic, and returns what was thrown.
async fn panic_of(app: &App, request: impl Into<Request<Body>>) -> &'static str {
    let thrown = AssertUnwindSafe(app.call(request)).catch_unwind().await;
    let thrown = thrown.expect_err("a panic");
    *thrown.downcast::<&'static str>().unwrap()
}

// Panics

async fn panics(_: Call) -> Response<Body> {
    tokio::task::yield_now().await;
    panic!("out of cheese")
}

#[tokio::test]
async fn a_panic_goes_on_and_leaves_an_unknown_outcome() {
    let app = App::new(panics);
    assert_eq!(panic_of(&app, pay("k")).await, "out of cheese");
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(app.runs(), 1);
    assert_eq!(app.idempotency.running(), 0);
}

#[derive(Clone)]
struct PanicsInCall;

impl Service<Request<RequestBody<Body>>> for PanicsInCall {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Ready<Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Body>>) -> Self::Future {
        panic!("in call itself")
    }
}

#[tokio::test]
async fn a_panic_before_there_is_a_future_is_one_too() {
    let app = App::around(&layer(), PanicsInCall);
    assert_eq!(panic_of(&app, pay("k")).await, "in call itself");
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
}

#[tokio::test]
async fn a_panic_of_the_body_while_it_is_held_is_one_too() {
    let app = App::new(|_| async {
        let stream =
            futures_util::stream::poll_fn(|_| -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
                panic!("in the body")
            });
        Body::new(StreamBody::new(stream))
    });
    assert_eq!(panic_of(&app, pay("k")).await, "in the body");
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_layer_outside_can_make_a_response_of_a_panic() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(CatchPanicLayer::new())
        .layer(layer())
        .service(counted(&runs, panics));
    assert_eq!(send(&service, pay("k")).await.status, 500);
    send(&service, pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_layer_inside_that_makes_a_response_of_a_panic_says_that_it_may_run_again() {
    // To this layer it is a handler that returned 500: put the other one outside.
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(layer())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(CatchPanicLayer::new())
        .service(counted(&runs, panics));
    for _ in 0..2 {
        assert_eq!(send(&service, pay("k")).await.status, 500);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn where_it_is_set_a_retry_takes_over_after_a_panic() {
    let app = App::with_engine(
        |engine| engine.on_abandoned(OnAbandoned::Rerun),
        |s| s,
        |call| async move {
            assert_ne!(call.run, 1, "the first run fails");
            paid(call).await
        },
    );
    let first = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
    assert!(first.is_err());
    let second = app.send(pay("k")).await;
    assert_eq!(second.text(), "run 2");
    app.send(pay("k")).await.assert_replays(&second);
}

#[tokio::test]
async fn hooks_that_panic_after_the_handler_ran_leave_an_unknown_outcome() {
    use tower_idempotency::RetentionPolicy;
    let by_redaction = App::with(|s| s.redact(|_, _, _| panic!("in a hook")), paid);
    let rule = RetentionPolicy::from_fn("broken", |_| panic!("in a hook"));
    let by_retention = App::with(|s| s.retention(rule), paid);
    for app in [by_redaction, by_retention] {
        assert_eq!(panic_of(&app, pay("k")).await, "in a hook");
        assert!(app.idempotency.drain().await);
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::OutcomeUnknown);
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test]
async fn hooks_that_panic_before_the_claim_leave_nothing() {
    use tower_idempotency::{FingerprintRecipe, Scope};
    let by_scope = App::with(|s| s.scope(Scope::from_fn(|_| panic!("in a hook"))), paid);
    let recipe = FingerprintRecipe::closure("broken", |_, _| panic!("in a hook"));
    let by_recipe = App::with(|s| s.fingerprint(recipe), paid);
    for app in [by_scope, by_recipe] {
        assert_eq!(panic_of(&app, pay("k")).await, "in a hook");
        assert!(app.store().is_empty());
        assert_eq!((app.runs(), app.idempotency.running()), (0, 0));
    }
}

// Errors of the inner service

#[derive(Debug, PartialEq, thiserror::Error)]
enum GatewayError {
    #[error("no connection")]
    Refused,
    #[error("no answer")]
    TimedOut,
}

async fn fails(request: Request<RequestBody<Body>>) -> Result<Response<Body>, GatewayError> {
    Err(match request.uri().path() {
        "/refused" => GatewayError::Refused,
        _ => GatewayError::TimedOut,
    })
}

#[tokio::test]
async fn an_error_passes_as_it_is_and_leaves_an_unknown_outcome() {
    let service = layer().layer(tower::service_fn(fails));
    let error = service.clone().oneshot(pay("k").into()).await.unwrap_err();
    // Not boxed, not wrapped: the type is the inner service's own.
    assert_eq!(error, GatewayError::TimedOut);
    send(&service, pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
}

#[tokio::test]
async fn errors_can_be_classified() {
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .classify_error(|error: &GatewayError| match error {
            GatewayError::Refused => Disposition::Release,
            GatewayError::TimedOut => Disposition::Keep,
        })
        .build()
        .unwrap();
    let service = layer.layer(tower::service_fn(fails));
    let call = |path| service.clone().oneshot(post(path).key(path).into());
    for _ in 0..2 {
        assert_eq!(call("/refused").await.unwrap_err(), GatewayError::Refused);
    }
    // There is no response that could be kept.
    assert_eq!(call("/slow").await.unwrap_err(), GatewayError::TimedOut);
    send(&service, post("/slow").key("/slow"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
}

#[tokio::test]
async fn a_classifier_is_not_asked_about_errors_of_another_type() {
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .classify_error(|_: &std::io::Error| Disposition::Release)
        .build()
        .unwrap();
    let service = layer.layer(tower::service_fn(fails));
    let failed = service.clone().oneshot(pay("k").into()).await;
    assert!(failed.is_err());
    send(&service, pay("k"))
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
}

// Readiness

#[derive(Clone, Default)]
struct NeverReady {
    calls: Arc<AtomicUsize>,
}

impl Service<Request<RequestBody<Body>>> for NeverReady {
    type Response = Response<Body>;
    type Error = GatewayError;
    type Future = Ready<Result<Response<Body>, GatewayError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), GatewayError>> {
        Poll::Ready(Err(GatewayError::Refused))
    }

    fn call(&mut self, _: Request<RequestBody<Body>>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn an_error_of_readiness_passes_and_claims_nothing() {
    let inner = NeverReady::default();
    let layer = layer();
    let service = layer.layer(inner.clone());
    let error = service.oneshot(pay("k").into()).await.unwrap_err();
    assert_eq!(error, GatewayError::Refused);
    assert_eq!(inner.calls.load(Ordering::SeqCst), 0);
    assert!(layer.idempotency().store().is_empty());
}

#[tokio::test]
async fn the_service_that_was_ready_is_the_one_that_is_called() {
    // `ConcurrencyLimit` panics when it is called without being ready.
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(layer())
        .layer(ConcurrencyLimitLayer::new(2))
        .service(counted(&runs, paid));
    for _ in 0..3 {
        send(&service, post("/pay")).await;
        send(&service, pay("k")).await;
        send(&service, pay("\"")).await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn one_service_that_is_called_again_and_again_becomes_ready_each_time() {
    let runs = Arc::default();
    let mut service = ServiceBuilder::new()
        .layer(layer())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(counted(&runs, paid));
    for key in ["a", "a", "b", "\"", "b"] {
        let ready = ServiceExt::<Request<Body>>::ready(&mut service).await;
        let answer = ready.unwrap().call(pay(key).into()).await;
        drop(answer.unwrap());
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn replays_and_refusals_give_their_place_inside_back() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(layer())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(counted(&runs, paid));
    send(&service, pay("k")).await;
    let retries = (0..20).map(|_| send(&service, pay("k")));
    for retry in join_all(retries).await {
        assert!(retry.is_replay());
    }
}

#[tokio::test]
async fn a_buffered_service_inside_works() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(layer())
        .buffer(4)
        .service(counted(&runs, paid));
    let first = send(&service, pay("k")).await;
    send(&service, pay("k")).await.assert_replays(&first);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn load_that_is_shed_inside_can_free_the_key() {
    let gate = Gate::new();
    let held = gate.clone();
    let runs = Arc::default();
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .classify_error(|error: &BoxError| {
            match error.is::<tower::load_shed::error::Overloaded>() {
                true => Disposition::Release,
                false => Disposition::LeaveUnknown,
            }
        })
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .load_shed()
        .concurrency_limit(1)
        .service(counted(&runs, move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                paid(call).await
            }
        }));
    let shed_then_free = async {
        gate.entered().await;
        let shed = service.clone().oneshot(pay("second").into()).await;
        assert!(
            shed.unwrap_err()
                .is::<tower::load_shed::error::Overloaded>()
        );
        gate.open();
    };
    tokio::join!(send(&service, pay("first")), shed_then_free);
    gate.open();
    assert_eq!(send(&service, pay("second")).await.text(), "run 2");
}

// A store that takes no more keys

fn full(on_outage: OnOutage) -> App {
    let store = MemoryStore::new().max_entries(0);
    let layer = IdempotencyLayer::builder(store).on_outage(on_outage);
    App::behind(&layer.build().unwrap(), paid)
}

#[tokio::test(start_paused = true)]
async fn without_its_store_nothing_runs() {
    let app = full(OnOutage::Reject);
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::StoreUnavailable);
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(app.runs(), 0);
    // What needs no store goes on.
    assert_eq!(app.send(post("/pay")).await.status, 201);
}

#[tokio::test(start_paused = true)]
async fn without_its_store_it_runs_unprotected_where_that_is_set_and_says_so() {
    let app = full(OnOutage::PassThrough);
    for run in 1..=2 {
        let answer = app.send(pay("k")).await;
        assert_eq!(answer.text(), format!("run {run}"));
        assert_eq!(answer.header("idempotency-unprotected"), "true");
        assert!(!answer.is_replay());
    }
    let unguarded = app.send(post("/pay")).await;
    assert!(!unguarded.headers.contains_key("idempotency-unprotected"));
}

#[tokio::test(start_paused = true)]
async fn a_full_store_still_replays_and_refuses_what_it_knows() {
    let store = MemoryStore::new().max_entries(1);
    let app = App::behind(&IdempotencyLayer::new(store), paid);
    let first = app.send(pay("k")).await;
    app.send(pay("other"))
        .await
        .assert_problem(ProblemKind::StoreUnavailable);
    app.send(pay("k")).await.assert_replays(&first);
    app.send(pay("k").body("1 THB"))
        .await
        .assert_problem(ProblemKind::KeyReused);
}
