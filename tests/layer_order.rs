//! What the README says of the layers around this one, and of the wrong side of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::extract::rejection::JsonRejection;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::Notify;
use tower::{ServiceBuilder, ServiceExt};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, MissingKey, RequestBody, RetentionOverride,
};

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new())
}

/// Counts the runs of a handler.
#[derive(Clone, Default)]
struct Runs(Arc<AtomicUsize>);

impl Runs {
    fn begin(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    fn code(&self) -> Option<&str> {
        self.header("idempotency-error")
    }
}

async fn send(app: &Router, request: http::request::Builder, body: &'static str) -> Answer {
    let request = request.body(Body::from(body)).expect("a request");
    let response = app.clone().oneshot(request).await.expect("an answer");
    let (parts, body) = response.into_parts();
    Answer {
        status: parts.status,
        headers: parts.headers,
        body: body.collect().await.expect("a whole body").to_bytes(),
    }
}

fn keyed() -> http::request::Builder {
    Request::post("/pay").header("idempotency-key", "\"k\"")
}

async fn panic(runs: Runs) {
    runs.begin();
    panic!("on purpose");
}

#[tokio::test]
async fn a_catch_panic_layer_outside_leaves_the_outcome_unknown() {
    let runs = Runs::default();
    let counted = runs.clone();
    let app = Router::new()
        .route("/pay", post(move || panic(counted.clone())))
        .layer(layer())
        .layer(CatchPanicLayer::new());
    let first = send(&app, keyed(), "").await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
    let retry = send(&app, keyed(), "").await;
    assert_eq!(retry.code(), Some("outcome_unknown"));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_catch_panic_layer_inside_lets_a_retry_run_again() {
    let runs = Runs::default();
    let counted = runs.clone();
    let app = Router::new()
        .route("/pay", post(move || panic(counted.clone())))
        .layer(CatchPanicLayer::new())
        .layer(layer());
    for _ in 0..2 {
        let answer = send(&app, keyed(), "").await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(runs.count(), 2);
}

/// A handler that waits until it may end, and the service around it.
fn slow(runs: &Runs, may_end: &Arc<Notify>) -> Router {
    let (runs, may_end) = (runs.clone(), Arc::clone(may_end));
    let handler = move || {
        let (run, may_end) = (runs.begin(), Arc::clone(&may_end));
        async move {
            may_end.notified().await;
            format!("run {run}")
        }
    };
    Router::new().route("/pay", post(handler))
}

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(5))
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_ends_the_waiting_and_not_the_work() {
    let (runs, may_end) = <(Runs, Arc<Notify>)>::default();
    let idempotency = layer();
    let engine = idempotency.idempotency().clone();
    let app = slow(&runs, &may_end).layer(idempotency).layer(timeout());
    let first = send(&app, keyed(), "").await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    let early = send(&app, keyed(), "").await;
    assert_eq!(early.code(), Some("in_progress"));
    may_end.notify_one();
    assert!(engine.drain().await);
    let late = send(&app, keyed(), "").await;
    assert!(late.is_replay());
    assert_eq!(late.body, "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_lets_a_retry_run_again() {
    let (runs, may_end) = <(Runs, Arc<Notify>)>::default();
    let app = slow(&runs, &may_end).layer(timeout()).layer(layer());
    for _ in 0..2 {
        let answer = send(&app, keyed(), "").await;
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    }
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn compression_outside_is_chosen_anew_for_every_retry() {
    let text = "a long text that is worth to be compressed, ".repeat(100);
    let answer = text.clone();
    let app = Router::new()
        .route("/pay", post(move || async move { answer }))
        .layer(layer())
        .layer(CompressionLayer::new());
    let first = send(&app, keyed().header("accept-encoding", "gzip"), "").await;
    assert_eq!(first.header("content-encoding"), Some("gzip"));
    let retry = send(&app, keyed(), "").await;
    assert!(retry.is_replay());
    assert_eq!(retry.header("content-encoding"), None);
    assert_eq!(retry.body, text);
}

#[tokio::test]
async fn cors_outside_answers_preflights_and_marks_replays_and_refusals() {
    let idempotency = IdempotencyLayer::builder(MemoryStore::new())
        .missing_key(MissingKey::Reject)
        .build()
        .expect("settings that can work");
    let cors = CorsLayer::new()
        .allow_origin(["https://shop.example".parse().expect("an origin")])
        .allow_methods([Method::POST])
        .allow_headers([HeaderName::from_static("idempotency-key")])
        .expose_headers([HeaderName::from_static("idempotency-replayed")]);
    let app = Router::new()
        .route("/pay", post(async || "paid"))
        .layer(idempotency)
        .layer(cors);

    let preflight = Request::options("/pay")
        .header(header::ORIGIN, "https://shop.example")
        .header(header::ACCESS_CONTROL_REQUEST_METHOD, "POST")
        .header(header::ACCESS_CONTROL_REQUEST_HEADERS, "idempotency-key");
    let preflight = send(&app, preflight, "").await;
    assert_eq!(preflight.status, StatusCode::OK);
    let allowed = preflight.header("access-control-allow-headers");
    assert_eq!(allowed, Some("idempotency-key"));

    // The first request is no browser's: what it was answered says nothing of origins.
    let first = send(&app, keyed(), "").await;
    assert_eq!(first.status, StatusCode::OK);
    let shop = |request: http::request::Builder| request.header("origin", "https://shop.example");
    let replay = send(&app, shop(keyed()), "").await;
    assert!(replay.is_replay());
    let refusal = send(&app, shop(Request::post("/pay")), "").await;
    assert_eq!(refusal.code(), Some("missing_key"));
    for answer in [replay, refusal] {
        let origin = answer.header("access-control-allow-origin");
        assert_eq!(origin, Some("https://shop.example"));
        let exposed = answer.header("access-control-expose-headers");
        assert_eq!(exposed, Some("idempotency-replayed"));
    }
}

#[tokio::test]
async fn a_layer_for_the_body_of_axum_is_inside_after_one_line() {
    async fn inner(request: Request, next: Next) -> Response {
        next.run(request).await
    }
    let layers = ServiceBuilder::new()
        .layer(layer())
        .map_request(|request: http::Request<RequestBody<Body>>| request.map(Body::new))
        .layer(from_fn(inner));
    let app = Router::new()
        .route("/pay", post(async |body: String| body))
        .layer(layers);
    for is_replay in [false, true] {
        let answer = send(&app, keyed(), "10.00").await;
        assert_eq!(answer.is_replay(), is_replay);
        assert_eq!(answer.body, "10.00");
    }
}

/// The first body is no JSON, the second one is.
async fn mend(app: &Router) -> [Answer; 2] {
    let json = || keyed().header("content-type", "application/json");
    let malformed = send(app, json(), "[1").await;
    [malformed, send(app, json(), "[1]").await]
}

#[tokio::test]
async fn a_rejection_of_axum_is_kept_like_every_other_answer() {
    let handler = async |_: Json<[u8; 1]>| "paid";
    let app = Router::new().route("/pay", post(handler)).layer(layer());
    let [malformed, mended] = mend(&app).await;
    assert_eq!(malformed.status, StatusCode::BAD_REQUEST);
    assert_eq!(mended.code(), Some("key_reused"));
}

#[tokio::test]
async fn a_rejection_that_says_not_executed_lets_a_mended_request_use_its_key() {
    let handler = async |json: Result<Json<[u8; 1]>, JsonRejection>| match json {
        Ok(_) => "paid".into_response(),
        Err(rejection) => {
            let word = Extension(RetentionOverride::NotExecuted);
            (rejection.status(), word, rejection.body_text()).into_response()
        }
    };
    let app = Router::new().route("/pay", post(handler)).layer(layer());
    let [malformed, mended] = mend(&app).await;
    assert_eq!(malformed.status, StatusCode::BAD_REQUEST);
    assert_eq!((mended.status, mended.is_replay()), (StatusCode::OK, false));
    assert_eq!(mended.body, "paid");
}
