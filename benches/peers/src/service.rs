//! The handlers behind all of the crates.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, LOCATION};
use http::{HeaderMap, HeaderName, Response, StatusCode};
use serde::Serialize;

/// What a charge whose handler never returns begins with.
pub const HELD: u8 = b'h';

/// What an API of medium size does: reads the body, answers a small JSON document.
pub fn charges() -> Router {
    Router::new().route("/charges", post(charge))
}

async fn charge(body: Bytes) -> (StatusCode, [(HeaderName, &'static str); 1], Json<Receipt>) {
    if body.first() == Some(&HELD) {
        pending::<()>().await;
    }
    let receipt = Receipt {
        id: "ch_3PXq2eKZ7vYx0a1b2c3d4e5f",
        amount: 4_999,
        currency: "eur",
        status: "succeeded",
        created: 1_764_460_800,
        description: "Order 4711, two items, shipped to the customer's address",
        bytes: body.len(),
    };
    let location = [(LOCATION, "/charges/ch_3PXq2eKZ7vYx0a1b2c3d4e5f")];
    (StatusCode::CREATED, location, Json(receipt))
}

/// 190 bytes of JSON.
#[derive(Serialize)]
struct Receipt {
    id: &'static str,
    amount: u64,
    currency: &'static str,
    status: &'static str,
    created: u64,
    description: &'static str,
    bytes: usize,
}

/// How often the handlers of [`watched`] began and came to their end.
#[derive(Default)]
pub struct Runs {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl Runs {
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// How long the slow handler and the slow stream take.
pub const SLOW: Duration = Duration::from_millis(100);

/// Handlers in which something is slow or goes wrong.
pub fn watched(runs: &Arc<Runs>) -> Router {
    let (slow, panics, streams, names) = (
        Arc::clone(runs),
        Arc::clone(runs),
        Arc::clone(runs),
        Arc::clone(runs),
    );
    Router::new()
        .route("/slow", post(move |_: Bytes| slow_charge(slow)))
        .route("/panic", post(move |_: Bytes| panic_in(panics)))
        .route("/stream", post(move |_: Bytes| stream(streams)))
        .route(
            "/caller",
            post(move |headers: HeaderMap, _: Bytes| name_caller(names, headers)),
        )
}

async fn slow_charge(runs: Arc<Runs>) -> StatusCode {
    runs.begin();
    tokio::time::sleep(SLOW).await;
    runs.end();
    StatusCode::CREATED
}

async fn panic_in(runs: Arc<Runs>) -> StatusCode {
    runs.begin();
    panic!("a handler panics, as it should here");
}

/// A live stream of two events, the second of which comes later.
async fn stream(runs: Arc<Runs>) -> Response<Body> {
    runs.begin();
    let events = futures_util::stream::unfold(0, |sent| async move {
        match sent {
            0 => Some((Ok::<_, Infallible>("data: 1\n\n"), 1)),
            1 => {
                tokio::time::sleep(SLOW).await;
                Some((Ok("data: 2\n\n"), 2))
            }
            _ => None,
        }
    });
    let mut response = Response::new(Body::from_stream(events));
    let live = http::HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(CONTENT_TYPE, live);
    runs.end();
    response
}

async fn name_caller(runs: Arc<Runs>, headers: HeaderMap) -> (StatusCode, String) {
    runs.begin();
    let caller = headers.get(AUTHORIZATION);
    let caller = caller.map_or("nobody", |caller| caller.to_str().unwrap_or("?"));
    runs.end();
    (StatusCode::CREATED, caller.to_owned())
}
