//! A service that answers by script, and remembers what it was asked.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::client::{ClientError, ClientLayer, GaveUp, OutcomeUnknown, RetryPolicy};

/// What one try meets.
#[derive(Clone, Debug)]
pub enum Step {
    Answer(u16, Vec<(&'static str, String)>),
    Reset,
    Silence,
}

pub fn status(status: u16) -> Step {
    Step::Answer(status, Vec::new())
}

/// A refusal of the layer's.
pub fn problem(status: u16, code: &str) -> Step {
    self::status(status).with("idempotency-error", code)
}

impl Step {
    pub fn with(self, name: &'static str, value: &str) -> Self {
        match self {
            Self::Answer(status, mut headers) => {
                headers.push((name, value.to_owned()));
                Self::Answer(status, headers)
            }
            other => panic!("{other:?} has no headers"),
        }
    }
}

/// One request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub at: Duration,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Seen {
    pub fn key(&self) -> &str {
        let key = self.headers.get("idempotency-key");
        key.map_or("", |key| key.to_str().unwrap())
    }
}

/// Clones are one service. The last step of the script repeats.
#[derive(Clone)]
pub struct Script {
    begun: Instant,
    state: Arc<Mutex<State>>,
}

struct State {
    steps: Vec<Step>,
    seen: Vec<Seen>,
}

impl Script {
    pub fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            begun: Instant::now(),
            state: Arc::new(Mutex::new(State {
                steps: steps.into_iter().collect(),
                seen: Vec::new(),
            })),
        }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }

    /// How many requests arrived.
    pub fn tries(&self) -> usize {
        self.seen().len()
    }

    /// When they arrived, in milliseconds.
    pub fn times(&self) -> Vec<u128> {
        self.seen().iter().map(|seen| seen.at.as_millis()).collect()
    }

    /// From here on other steps.
    pub fn now(&self, steps: impl IntoIterator<Item = Step>) {
        let mut state = self.state.lock().unwrap();
        state.steps = steps.into_iter().collect();
    }

    /// Sends one request through a client with this layer.
    pub async fn ask(
        &self,
        layer: &ClientLayer,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Bytes>, ClientError> {
        layer.layer(self.clone()).oneshot(request).await
    }
}

impl Service<Request<Full<Bytes>>> for Script {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let script = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = http_body_util::BodyExt::collect(body).await.unwrap();
            let step = {
                let mut state = script.state.lock().unwrap();
                state.seen.push(Seen {
                    at: script.begun.elapsed(),
                    headers: head.headers,
                    body: body.to_bytes(),
                });
                match state.steps.len() {
                    0 => panic!("the script is empty"),
                    1 => state.steps[0].clone(),
                    _ => state.steps.remove(0),
                }
            };
            match step {
                Step::Answer(status, headers) => {
                    let mut answer = Response::builder().status(status);
                    for (name, value) in headers {
                        answer = answer.header(name, value);
                    }
                    Ok(answer.body(Full::from("the answer")).unwrap())
                }
                Step::Reset => Err(io::ErrorKind::ConnectionReset.into()),
                Step::Silence => std::future::pending().await,
            }
        })
    }
}

pub fn request(method: Method) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri("http://shop.example/payments")
        .body(Full::from("10 EUR"))
        .unwrap()
}

pub fn pay() -> Request<Full<Bytes>> {
    request(Method::POST)
}

/// Waits for the whole ceiling each time, so that times are exact.
pub fn exact() -> RetryPolicy {
    RetryPolicy::new().jitter(|ceiling| ceiling)
}

pub fn with(retry: RetryPolicy) -> ClientLayer {
    ClientLayer::new().retry(retry)
}

#[track_caller]
pub fn answered(result: Result<Response<Bytes>, ClientError>, status: u16) -> Response<Bytes> {
    let answer = result.expect("an answer");
    assert_eq!(answer.status(), StatusCode::from_u16(status).unwrap());
    answer
}

#[track_caller]
pub fn unknown(result: Result<Response<Bytes>, ClientError>, why: GaveUp) -> OutcomeUnknown {
    match result {
        Err(ClientError::OutcomeUnknown(unknown)) => {
            assert_eq!(unknown.why(), why, "{unknown}");
            *unknown
        }
        other => panic!("{other:?}"),
    }
}
