//! Clients that leave: an attempt that was begun goes on without them.

use std::time::Duration;

use axum::body::Body;
use http::{Response, StatusCode};
use tokio::time::{advance, timeout};
use tower::ServiceBuilder;
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{
    IdempotencyLayer, InFlight, MemoryStore, ProblemKind, RetentionOverride, State,
};

use crate::app::{
    App, Ask, EngineSettings, Gate, Settings, counted, data, fed, paid, pay, post, send, steps,
};

struct Held {
    app: App,
    gate: Gate,
}

impl Held {
    /// An app whose handlers wait at the gate.
    fn new(
        engine: impl FnOnce(EngineSettings) -> EngineSettings,
        settings: impl FnOnce(Settings) -> Settings,
    ) -> Self {
        let gate = Gate::new();
        let held = gate.clone();
        let app = App::with_engine(engine, settings, move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                assert_ne!(call.head.uri.path(), "/panic");
                paid(call).await
            }
        });
        Self { app, gate }
    }

    /// Sends a request and leaves while its handler runs.
    async fn leave(&self, request: Ask) {
        tokio::select! {
            biased;
            _ = self.app.call(request) => unreachable!("the handler is held up"),
            () = self.gate.entered() => {}
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().unwrap()
}

fn defaults() -> Held {
    Held::new(|engine| engine, |settings| settings)
}

#[tokio::test]
async fn before_the_first_poll_nothing_happened() {
    let held = defaults();
    drop(held.app.begin(pay("k")).await);
    assert!(held.app.store().is_empty());
    assert_eq!((held.app.runs(), held.app.idempotency.running()), (0, 0));
}

#[tokio::test]
async fn while_the_request_is_read_nothing_happened() {
    let held = defaults();
    let (feed, body) = fed();
    feed.send(data("half")).unwrap();
    let call = held.app.call(pay("k").stream(body));
    {
        tokio::pin!(call);
        assert!(futures_util::poll!(call.as_mut()).is_pending());
    }
    assert!(held.app.store().is_empty());
    assert_eq!((held.app.runs(), held.app.idempotency.running()), (0, 0));
    // The sender is gone with the body.
    assert!(feed.is_closed());
}

#[tokio::test]
async fn while_the_handler_runs_it_goes_on_and_the_retry_gets_its_answer() {
    let held = defaults();
    held.leave(pay("k")).await;
    let engine = &held.app.idempotency;
    assert_eq!((engine.running(), engine.detached()), (1, 1));
    held.app
        .send(pay("k"))
        .await
        .assert_problem(ProblemKind::InProgress);

    held.gate.open();
    assert!(engine.drain().await);
    assert_eq!((engine.running(), engine.detached()), (0, 0));
    let retry = held.app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!((retry.status, retry.text()), (StatusCode::CREATED, "run 1"));
    assert_eq!(held.app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_waits_gets_the_answer_of_the_attempt_that_was_left() {
    let wait = InFlight::Wait(Duration::from_secs(5));
    let held = Held::new(|engine| engine, |s| s.in_flight(wait));
    held.leave(pay("k")).await;
    let open = async { held.gate.open() };
    let (retry, ()) = tokio::join!(held.app.send(pay("k")), open);
    assert!(retry.is_replay());
    assert_eq!(held.app.runs(), 1);
}

#[tokio::test]
async fn while_the_body_is_held_it_is_driven_to_its_end() {
    let (feed, body) = fed();
    let body = std::sync::Arc::new(std::sync::Mutex::new(Some(body)));
    let app = App::new(move |_| {
        let body = body.lock().unwrap().take();
        async move { body.unwrap() }
    });
    feed.send(data("one ")).unwrap();
    {
        let call = app.call(pay("k"));
        tokio::pin!(call);
        assert!(futures_util::poll!(call.as_mut()).is_pending());
        assert_eq!(app.runs(), 1);
    }
    feed.send(data("two")).unwrap();
    drop(feed);
    assert!(app.idempotency.drain().await);
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "one two");
}

#[tokio::test]
async fn a_body_that_passes_belongs_to_the_connection() {
    let (feed, body) = fed();
    let body = std::sync::Arc::new(std::sync::Mutex::new(Some(body)));
    let app = App::new(move |_| {
        let mut response = Response::new(body.lock().unwrap().take().unwrap());
        response.extensions_mut().insert(RetentionOverride::Live);
        async move { response }
    });
    let response = app.call(pay("k")).await.unwrap();
    assert_eq!(app.idempotency.running(), 0);
    drop(response);
    assert!(feed.is_closed());
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::ResponseNotKept);
}

#[tokio::test]
async fn an_answer_that_was_never_read_is_kept_all_the_same() {
    let app = App::new(paid);
    drop(app.call(pay("k")).await.unwrap());
    assert!(app.send(pay("k")).await.is_replay());
}

#[tokio::test]
async fn a_detached_attempt_that_panics_leaves_an_unknown_outcome() {
    let held = defaults();
    let request = post("/panic").key("k");
    held.leave(request.clone()).await;
    held.gate.open();
    assert!(held.app.idempotency.drain().await);
    assert_eq!(held.app.idempotency.detached(), 0);
    held.app
        .send(request)
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(held.app.runs(), 1);
}

#[tokio::test]
async fn a_detached_attempt_that_ends_badly_frees_or_keeps_its_key_as_any_other() {
    let gate = Gate::new();
    let gated = gate.clone();
    let app = App::new(move |_| {
        let gated = gated.clone();
        async move {
            gated.pass().await;
            (StatusCode::BAD_GATEWAY, steps([data("no")]))
        }
    });
    let held = Held { app, gate };
    held.leave(pay("k")).await;
    held.gate.open();
    assert!(held.app.idempotency.drain().await);
    let record = held.app.record("k").await.unwrap();
    assert_eq!(record.state, State::Released);
}

#[test]
fn dropped_on_a_thread_without_a_runtime_it_finds_its_way_home() {
    let runtime = runtime();
    let held = defaults();
    let mut call = Box::pin(held.app.call(pay("k")));
    runtime.block_on(async {
        assert!(futures_util::poll!(call.as_mut()).is_pending());
    });
    std::thread::spawn(move || drop(call)).join().unwrap();
    runtime.block_on(async {
        held.gate.open();
        assert!(held.app.idempotency.drain().await);
        assert!(held.app.send(pay("k")).await.is_replay());
    });
}

#[test]
fn an_attempt_that_dies_with_its_runtime_ages_into_an_unknown_outcome() {
    let held = defaults();
    let first = runtime();
    first.block_on(held.leave(pay("k")));
    drop(first);
    // The process lives on, and so do the store and its clock.
    let engine = tower_idempotency::Idempotency::new(held.app.store().clone());
    let app = App::behind(&IdempotencyLayer::new(engine), paid);
    runtime().block_on(async {
        let retry = app.send(pay("k")).await;
        assert_eq!(retry.status, StatusCode::CONFLICT);
        assert_eq!(app.runs(), 0);
    });
}

#[tokio::test]
async fn too_many_detached_attempts_refuse_new_ones_and_let_them_in_again() {
    let held = Held::new(|engine| engine.detached_limit(2), |settings| settings);
    for key in ["a", "b"] {
        assert_eq!(held.app.idempotency.detached(), usize::from(key == "b"));
        held.leave(pay(key)).await;
    }
    let refused = held.app.send(pay("c")).await;
    refused.assert_problem(ProblemKind::Overloaded);
    assert_eq!(held.app.runs(), 2);
    assert!(held.app.record("c").await.is_none());
    held.gate.open();
    held.gate.open();
    assert!(held.app.idempotency.drain().await);
    held.gate.open();
    assert_eq!(held.app.send(pay("c")).await.status, StatusCode::CREATED);
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_attempts_with_and_without_their_clients_up_to_its_limit() {
    let limit = Duration::from_secs(3);
    let held = Held::new(|engine| engine.drain_limit(limit), |settings| settings);
    held.leave(pay("left")).await;
    let stays = tokio::spawn({
        let app = held.app.clone();
        async move { app.send(pay("stays")).await }
    });
    held.gate.entered().await;
    assert_eq!(held.app.idempotency.running(), 2);

    let began = tokio::time::Instant::now();
    assert!(!held.app.idempotency.drain().await);
    assert_eq!(began.elapsed(), limit);

    held.gate.open();
    held.gate.open();
    assert!(held.app.idempotency.drain().await);
    assert_eq!(stays.await.unwrap().status, StatusCode::CREATED);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_answers_and_the_attempt_goes_on() {
    let runs = Default::default();
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let engine = layer.idempotency().clone();
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            Duration::from_secs(1),
        ))
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(layer)
        .service(counted(&runs, |call| async move {
            tokio::time::sleep(Duration::from_secs(3)).await;
            paid(call).await
        }));
    let first = send(&service, pay("k")).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    assert!(engine.drain().await);
    let retry = send(&service, pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_detached_attempt_is_renewed_as_any_other() {
    let held = defaults();
    held.leave(pay("k")).await;
    for _ in 0..10 {
        // Lets the renewals be made, and then moves on.
        assert!(
            timeout(Duration::from_secs(9), std::future::pending::<()>())
                .await
                .is_err()
        );
        held.app
            .send(pay("k"))
            .await
            .assert_problem(ProblemKind::InProgress);
    }
    held.gate.open();
    assert!(held.app.idempotency.drain().await);
    advance(Duration::from_secs(1)).await;
    assert!(held.app.send(pay("k")).await.is_replay());
}

#[tokio::test]
async fn a_request_without_a_key_is_dropped_with_its_client() {
    let held = defaults();
    held.leave(post("/pay")).await;
    assert_eq!(held.app.idempotency.running(), 0);
    assert!(held.app.store().is_empty());
}
