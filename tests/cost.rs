//! How often a request allocates: counts, which no noise changes.
//!
//! A bound is what was measured. Lower it when the code gets better; a higher one needs a reason.

// An allocator is an unsafe trait; this file is the only place of the crate that needs one.
#![allow(unsafe_code, reason = "counting allocations takes an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, MemoryStore};
use tower_layer::Layer;
use tower_service::Service;

/// Counts what this thread asks of the system's allocator.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call is handed on unchanged; the count lies in a thread-local without a
// destructor, which allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `System`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_request_that_passes_allocates_nothing_more() {
    let bare = plain(Kind::Bare);
    assert_eq!(plain(Kind::PassThrough), bare);
}

#[test]
fn a_first_request_allocates_little_more_than_its_handler() {
    let more = plain(Kind::First) - plain(Kind::Bare);
    assert!(more <= FIRST, "{more} more allocations, {FIRST} allowed");
}

#[test]
fn an_answer_of_the_layer_allocates_little() {
    for (kind, bound) in [
        (Kind::Replay, REPLAY),
        (Kind::InFlight, IN_FLIGHT),
        (Kind::Mismatch, MISMATCH),
    ] {
        let all = plain(kind);
        assert!(all <= bound, "{kind:?}: {all} allocations, {bound} allowed");
    }
}

/// The same through an axum router, as users have it. axum boxes each layered route and its future,
/// and both bodies where a layer has bodies of its own.
#[cfg(feature = "axum")]
#[test]
fn axum_adds_its_own_boxes_and_no_more() {
    let bare = routed(Kind::Bare);
    for (kind, bound) in [
        (Kind::PassThrough, bare + ROUTED),
        (Kind::First, bare + ROUTED + FIRST),
        (Kind::Replay, bare + ROUTED + REPLAY_ROUTED),
    ] {
        let all = routed(kind);
        assert!(all <= bound, "{kind:?}: {all} allocations, {bound} allowed");
    }
}

/// Beyond the handler's: the lookup key, two futures, two store calls, the record, the attempt, its
/// place in the request's extensions, and the outcome with the count of its owners.
const FIRST: usize = 10;
/// In all, with what building the request and reading the answer take.
const REPLAY: usize = 15;
const IN_FLIGHT: usize = 40;
const MISMATCH: usize = 38;
#[cfg(feature = "axum")]
const ROUTED: usize = 4;
#[cfg(feature = "axum")]
const REPLAY_ROUTED: usize = 3;
/// With the feature `metrics`, each counter and histogram allocates the list of its labels, with a
/// recorder or without. It is not counted.
fn labels(kind: Kind) -> usize {
    match kind {
        _ if cfg!(not(feature = "metrics")) => 0,
        Kind::Bare | Kind::PassThrough => 0,
        // How it was answered, and one store call; a first request makes two.
        Kind::Replay | Kind::InFlight | Kind::Mismatch => 2,
        Kind::First => 3,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bare,
    PassThrough,
    First,
    Replay,
    InFlight,
    Mismatch,
}

/// The allocations of one such request to a plain service.
fn plain(kind: Kind) -> usize {
    if kind == Kind::Bare {
        measure(kind, Plain)
    } else {
        measure(kind, IdempotencyLayer::new(MemoryStore::new()).layer(Plain))
    }
}

/// The allocations of one such request to an axum router.
#[cfg(feature = "axum")]
fn routed(kind: Kind) -> usize {
    let router = axum::Router::new().route("/charges", axum::routing::any_service(Plain));
    // With its state, as `axum::serve` gives it, a router has applied its layers once and for all.
    if kind == Kind::Bare {
        measure(kind, router.with_state(()))
    } else {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        measure(kind, router.layer(layer).with_state(()))
    }
}

fn measure<S, R>(kind: Kind, service: S) -> usize
where
    S: Service<Request<Full<Bytes>>, Response = Response<R>, Error = Infallible> + Clone,
    R: http_body::Body<Data = Bytes>,
{
    run(async {
        match kind {
            Kind::Replay | Kind::Mismatch => {
                let _ = answer(service.clone(), Kind::First, 0).await;
            }
            Kind::InFlight => {
                let held = service.clone().oneshot(request(kind, 0));
                let mut held = Box::pin(held);
                let mut context = Context::from_waker(Waker::noop());
                assert!(held.as_mut().poll(&mut context).is_pending());
                // Its attempt goes on, detached, until the runtime ends.
            }
            _ => {}
        }
        // Tables grow now and then, most of them in the beginning; what most requests take counts.
        let mut counts: Vec<usize> = Vec::with_capacity(101);
        for number in 1..=1_000 {
            let _ = answer(service.clone(), kind, number).await;
        }
        for number in 1_001..=1_101 {
            let before = ALLOCATIONS.get();
            let status = answer(service.clone(), kind, number).await;
            counts.push(ALLOCATIONS.get() - before);
            assert_eq!(status.as_u16(), kind.status(), "{kind:?}");
        }
        counts.sort_unstable();
        counts[50] - labels(kind)
    })
}

impl Kind {
    const fn status(self) -> u16 {
        match self {
            Self::InFlight => 409,
            Self::Mismatch => 422,
            _ => 201,
        }
    }
}

async fn answer<S, R>(service: S, kind: Kind, number: u64) -> StatusCode
where
    S: Service<Request<Full<Bytes>>, Response = Response<R>, Error = Infallible>,
    R: http_body::Body<Data = Bytes>,
{
    let Ok(response) = service.oneshot(request(kind, number)).await;
    let status = response.status();
    // The frames, not their bytes: joining them is the client's business.
    let mut body = std::pin::pin!(response.into_body());
    while let Some(frame) = body.frame().await {
        assert!(frame.is_ok());
    }
    status
}

/// A request whose key is new with every number, except where one key is what is measured.
fn request(kind: Kind, number: u64) -> Request<Full<Bytes>> {
    let mut key = *b"6f9619ff-8b86-4011-b42d-000000000000";
    if matches!(kind, Kind::First | Kind::Bare | Kind::PassThrough) {
        let mut rest = number;
        for digit in key.iter_mut().rev().take(12) {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
    }
    let name = match kind {
        Kind::PassThrough => HeaderName::from_static("x-not-the-key"),
        _ => HeaderName::from_static("idempotency-key"),
    };
    let body: &'static [u8] = match kind {
        Kind::Mismatch => b"another amount",
        Kind::InFlight => b"hold",
        _ => b"an amount",
    };
    Request::post("/charges")
        .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
        .header(name, HeaderValue::from_bytes(&key).expect("digits"))
        // As a layer that knows the caller leaves one.
        .extension(Caller)
        .body(Full::new(Bytes::from_static(body)))
        .expect("a request")
}

#[derive(Clone)]
struct Caller;

/// Reads its request and answers 200 bytes.
#[derive(Clone)]
struct Plain;

type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

impl<B> Service<Request<B>> for Plain
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = BoxFuture<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(async move {
            let mut body = std::pin::pin!(request.into_body());
            while let Some(frame) = body.frame().await {
                let data = frame.ok().and_then(|frame| frame.into_data().ok());
                if data.is_some_and(|data| data[..] == b"hold"[..]) {
                    pending::<()>().await;
                }
            }
            let mut response = Response::new(Full::new(Bytes::from_static(&[b'x'; 200])));
            *response.status_mut() = StatusCode::CREATED;
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, json);
            Ok(response)
        })
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    runtime.block_on(test)
}
