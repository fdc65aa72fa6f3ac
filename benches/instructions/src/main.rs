//! Sends requests of one kind through the layer, so often as told, and does nothing else.
//!
//! `instructions KIND REQUESTS`, where a kind is `bare`, `pass-through`, `first`, `replay` or `in-flight`.
//! Two runs of different length under an instruction counter tell what one request takes: see
//! `scripts/instructions`.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tower_idempotency::{IdempotencyLayer, MemoryStore};
use tower_layer::Layer;
use tower_service::Service;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, requests] = &arguments[..] else {
        return usage();
    };
    let (Some(kind), Ok(requests)) = (Kind::parse(kind), requests.parse()) else {
        return usage();
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime can be built");
    runtime.block_on(async {
        if kind == Kind::Bare {
            send(kind, requests, Plain).await;
        } else {
            let layer = IdempotencyLayer::new(MemoryStore::new());
            send(kind, requests, layer.layer(Plain)).await;
        }
    });
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: instructions bare|pass-through|first|replay|in-flight REQUESTS");
    ExitCode::from(2)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bare,
    PassThrough,
    First,
    Replay,
    InFlight,
}

impl Kind {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "bare" => Some(Self::Bare),
            "pass-through" => Some(Self::PassThrough),
            "first" => Some(Self::First),
            "replay" => Some(Self::Replay),
            "in-flight" => Some(Self::InFlight),
            _ => None,
        }
    }
}

async fn send<S, R>(kind: Kind, requests: u64, mut service: S)
where
    S: Service<Request<Full<Bytes>>, Response = Response<R>, Error = Infallible>,
    R: Body<Data = Bytes>,
{
    let held = service.call(request(kind, 0));
    let mut held = pin!(held);
    if kind == Kind::InFlight {
        // It stays where it is, unanswered, until the end.
        let mut context = Context::from_waker(Waker::noop());
        assert!(held.as_mut().poll(&mut context).is_pending());
    } else {
        assert_eq!(answer(held).await, (StatusCode::CREATED, false));
    }
    let status = match kind {
        Kind::InFlight => StatusCode::CONFLICT,
        _ => StatusCode::CREATED,
    };
    for number in 1..=requests {
        let response = service.call(request(kind, number));
        let answer = answer(pin!(response)).await;
        assert_eq!(answer, (status, kind == Kind::Replay), "{kind:?}");
    }
}

/// Its status, and whether it says that it is a replay.
async fn answer<R, F>(response: Pin<&mut F>) -> (StatusCode, bool)
where
    F: Future<Output = Result<Response<R>, Infallible>>,
    R: Body<Data = Bytes>,
{
    let Ok(response) = response.await;
    let status = response.status();
    let replayed = response.headers().contains_key("idempotency-replayed");
    let mut body = pin!(response.into_body());
    while let Some(frame) = body.frame().await {
        black_box(frame.is_ok());
    }
    (status, replayed)
}

/// A request whose key is new with every number, except where one key is what is measured. Every
/// kind builds it in the same way.
fn request(kind: Kind, number: u64) -> Request<Full<Bytes>> {
    let mut key = *b"6f9619ff-8b86-4011-b42d-000000000000";
    let fresh = !matches!(kind, Kind::Replay | Kind::InFlight);
    let mut rest = if fresh { number } else { 0 };
    for digit in key.iter_mut().rev().take(12) {
        *digit = b"0123456789abcdef"[(rest & 15) as usize];
        rest >>= 4;
    }
    let (name, body): (_, &'static [u8]) = match kind {
        Kind::PassThrough => ("x-not-the-key-x", b"amount"),
        Kind::InFlight => ("idempotency-key", HELD),
        _ => ("idempotency-key", b"amount"),
    };
    Request::post("/charges")
        .header(CONTENT_TYPE, HeaderValue::from_static("text/plain"))
        .header(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(&key).expect("hexadecimal digits"),
        )
        .body(Full::new(Bytes::from_static(body)))
        .expect("a request")
}

const HELD: &[u8] = b"hold!!";

/// Reads its request and answers 200 bytes.
#[derive(Clone)]
struct Plain;

impl<B> Service<Request<B>> for Plain
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(async move {
            let mut body = pin!(request.into_body());
            while let Some(frame) = body.frame().await {
                let data = frame.ok().and_then(|frame| frame.into_data().ok());
                if data.is_some_and(|data| data[..] == *HELD) {
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
