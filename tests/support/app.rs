//! A guarded service in memory: what it is asked, what it answers, how often its handler ran.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::IntoResponse;
use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{Semaphore, mpsc};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};
use tower_idempotency::{
    Attempt, Idempotency, IdempotencyBuilder, IdempotencyKey, IdempotencyLayer,
    IdempotencyLayerBuilder, MemoryStore, ProblemKind, Record, Replay, RequestBody, ScopedKey,
    Store,
};

/// The layer's settings, as tests change them.
pub type Settings = IdempotencyLayerBuilder<MemoryStore>;
/// The engine's settings, as tests change them.
pub type EngineSettings = IdempotencyBuilder<MemoryStore>;

/// A handler behind the layer.
#[derive(Clone)]
pub struct App<S = MemoryStore> {
    service: BoxCloneSyncService<Request<Body>, Response<Body>, BoxError>,
    pub idempotency: Idempotency<S>,
    runs: Arc<AtomicUsize>,
}

/// What the handler was called with. `run` is 1 for its first call.
pub struct Call {
    pub run: usize,
    pub head: Parts,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl App<MemoryStore> {
    /// A handler behind a layer with the defaults.
    pub fn new<H, F, R>(handler: H) -> Self
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        Self::with(|settings| settings, handler)
    }

    /// A handler behind a layer with these settings.
    pub fn with<H, F, R>(settings: impl FnOnce(Settings) -> Settings, handler: H) -> Self
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        Self::with_engine(|engine| engine, settings, handler)
    }

    /// A handler behind a layer over an engine with these settings.
    pub fn with_engine<H, F, R>(
        engine: impl FnOnce(EngineSettings) -> EngineSettings,
        settings: impl FnOnce(Settings) -> Settings,
        handler: H,
    ) -> Self
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        let engine = engine(Idempotency::builder(MemoryStore::new()));
        let layer = settings(IdempotencyLayer::builder(engine.build().unwrap()));
        Self::behind(&layer.build().unwrap(), handler)
    }
}

impl<S: Store> App<S> {
    /// A handler behind this layer.
    pub fn behind<H, F, R>(layer: &IdempotencyLayer<S>, handler: H) -> Self
    where
        H: Fn(Call) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = R> + Send + 'static,
        R: IntoResponse,
    {
        let runs = Arc::new(AtomicUsize::new(0));
        let inner = counted(&runs, handler);
        Self {
            runs,
            ..Self::around(layer, inner)
        }
    }

    /// Any service behind this layer; its runs are not counted.
    pub fn around<T>(layer: &IdempotencyLayer<S>, inner: T) -> Self
    where
        T: Service<Request<RequestBody<Body>>, Response = Response<Body>>,
        T: Clone + Send + Sync + 'static,
        T::Future: Send,
        T::Error: Into<BoxError> + Send + 'static,
    {
        let service = ServiceBuilder::new()
            .map_response(|response: Response<_>| response.map(Body::new))
            .map_err(Into::into)
            .service(layer.layer(inner));
        Self {
            service: BoxCloneSyncService::new(service),
            idempotency: layer.idempotency().clone(),
            runs: Arc::default(),
        }
    }

    /// Sends a request and reads the answer to its end.
    pub async fn send(&self, request: impl Into<Request<Body>>) -> Answer {
        send(&self.service, request).await
    }

    /// Sends a request and leaves the answer's body alone.
    pub fn call<Q: Into<Request<Body>>>(
        &self,
        request: Q,
    ) -> impl Future<Output = Result<Response<Body>, BoxError>> + Send + use<Q, S> {
        self.service.clone().oneshot(request.into())
    }

    /// Calls the service, and gives its future back before it is polled.
    pub async fn begin<Q: Into<Request<Body>>>(
        &self,
        request: Q,
    ) -> impl Future<Output = Result<Response<Body>, BoxError>> + Send + use<Q, S> {
        let mut service = self.service.clone();
        service.ready().await.unwrap().call(request.into())
    }

    /// How often the handler was begun.
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub fn store(&self) -> &S {
        self.idempotency.store()
    }

    /// The record of a key of everybody's scope.
    pub async fn record(&self, key: &str) -> Option<Record> {
        self.record_of("", key).await
    }

    pub async fn record_of(&self, scope: &str, key: &str) -> Option<Record> {
        let key = ScopedKey::new("http", scope, &IdempotencyKey::new(key).unwrap());
        self.store().lookup(&key).await.unwrap()
    }
}

/// A handler as a service that counts its runs.
pub fn counted<B, H, F, R>(
    runs: &Arc<AtomicUsize>,
    handler: H,
) -> impl Service<Request<B>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ Sync
+ 'static
+ use<B, H, F, R>
where
    B: http_body::Body<Data = Bytes, Error: Debug> + Send + 'static,
    H: Fn(Call) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = R> + Send + 'static,
    R: IntoResponse,
{
    let runs = Arc::clone(runs);
    tower::service_fn(move |request: Request<B>| {
        let (runs, handler) = (Arc::clone(&runs), handler.clone());
        async move {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            let (head, body) = request.into_parts();
            let collected = body.collect().await.expect("a whole body");
            let trailers = collected.trailers().cloned();
            let body = collected.to_bytes();
            let call = Call {
                run,
                head,
                body,
                trailers,
            };
            Ok(handler(call).await.into_response())
        }
    })
}

impl Call {
    /// What the layer gave the handler; absent where the layer did not guard the request.
    pub fn attempt(&self) -> Option<&Attempt> {
        self.head.extensions.get()
    }
}

/// A handler that answers 201 and the number of its run.
pub async fn paid(call: Call) -> impl IntoResponse {
    let body = format!("run {}", call.run);
    (StatusCode::CREATED, [("location", "/payments/1")], body)
}

/// Sends a request and reads the answer to its end.
pub async fn send<T, R>(service: &T, request: impl Into<Request<Body>>) -> Answer
where
    T: Service<Request<Body>, Response = Response<R>> + Clone,
    T::Error: Debug,
    R: http_body::Body<Data = Bytes>,
    R::Error: Debug,
{
    let response = service.clone().oneshot(request.into()).await;
    Answer::of(response.expect("an answer")).await
}

/// A whole response.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
    pub extensions: Extensions,
}

impl Answer {
    pub async fn of<R>(response: Response<R>) -> Self
    where
        R: http_body::Body<Data = Bytes>,
        R::Error: Debug,
    {
        let (parts, body) = response.into_parts();
        let collected = body.collect().await.expect("a whole body");
        let trailers = collected.trailers().cloned();
        Self {
            status: parts.status,
            headers: parts.headers,
            body: collected.to_bytes(),
            trailers,
            extensions: parts.extensions,
        }
    }

    /// The value of a header with one line; empty if it is absent.
    pub fn header(&self, name: &str) -> &str {
        let mut lines = self.headers.get_all(name).iter();
        let line = lines.next().map_or("", |line| line.to_str().unwrap());
        assert!(lines.next().is_none(), "{name} has several lines");
        line
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Whether the answer is marked as a replay.
    pub fn is_replay(&self) -> bool {
        let marked = self.header("idempotency-replayed") == "true";
        assert_eq!(marked, self.headers.contains_key("idempotency-replayed"));
        marked
    }

    /// This is `first` again: the same status, the same header lines in the same order, the same
    /// bytes and trailers; marked, as `first` is not.
    #[track_caller]
    pub fn assert_replays(&self, first: &Self) {
        assert!(!first.is_replay(), "the first answer is marked as a replay");
        assert!(self.is_replay(), "not marked as a replay: {self:?}");
        assert!(self.extensions.get::<Replay>().is_some());
        assert_eq!(self.status, first.status);
        assert_eq!(self.kept_lines(), first.kept_lines());
        assert_eq!(self.body, first.body);
        assert_eq!(self.trailers, first.trailers);
    }

    /// All header lines but the layer's own, and but the length, which servers add.
    fn kept_lines(&self) -> Vec<(&str, &[u8])> {
        let lines = self.headers.iter();
        lines
            .map(|(name, value)| (name.as_str(), value.as_bytes()))
            .filter(|(name, _)| {
                ![
                    "idempotency-replayed",
                    "idempotency-original-date",
                    "content-length",
                ]
                .contains(name)
            })
            .collect()
    }

    /// This is the layer's own refusal of this kind, in every member and header.
    #[track_caller]
    pub fn assert_problem(&self, kind: ProblemKind) {
        let seen = self.extensions.get::<ProblemKind>();
        assert_eq!(seen, Some(&kind), "{} {}", self.status, self.text());
        assert_eq!(self.status, kind.status());
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(self.header("cache-control"), "no-store");
        assert_eq!(self.header("idempotency-error"), kind.code());
        assert!(!self.is_replay());
        let document = self.json();
        assert_eq!(document["code"], kind.code());
        assert_eq!(document["status"], kind.status().as_u16());
        for text in ["title", "detail"] {
            assert!(document[text].as_str().is_some_and(|text| text.len() > 10));
        }
        let link = self.header("link");
        let page = document["type"].as_str().unwrap();
        let page = page.strip_suffix(&format!("#{}", kind.code())).unwrap();
        assert_eq!(
            link,
            format!("<{page}>; rel=\"describedby\"; type=\"text/html\"")
        );
    }
}

/// A request in the making; becomes one by `Into`.
#[derive(Clone, Debug)]
pub struct Ask {
    method: Method,
    uri: String,
    headers: HeaderMap,
    body: Bytes,
    extensions: Extensions,
}

pub fn ask(method: &str, uri: &str) -> Ask {
    Ask {
        method: method.parse().unwrap(),
        uri: uri.to_owned(),
        headers: HeaderMap::new(),
        body: Bytes::new(),
        extensions: Extensions::new(),
    }
}

pub fn post(uri: &str) -> Ask {
    ask("POST", uri)
}

/// The request that most tests repeat.
pub fn pay(key: &str) -> Ask {
    post("/pay").key(key).body("100 THB")
}

impl Ask {
    pub fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    /// Adds a header line.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let name: http::HeaderName = name.parse().unwrap();
        let value = http::HeaderValue::from_bytes(value.as_ref()).unwrap();
        self.headers.append(name, value);
        self
    }

    pub fn json(self, body: impl Into<Bytes>) -> Self {
        self.header("content-type", "application/json").body(body)
    }

    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub fn extension<T: Clone + Send + Sync + 'static>(mut self, extension: T) -> Self {
        self.extensions.insert(extension);
        self
    }

    /// The same request with a body that is not in memory.
    pub fn stream(self, body: Body) -> Request<Body> {
        Request::from(self).map(|_| body)
    }
}

impl From<Ask> for Request<Body> {
    fn from(ask: Ask) -> Self {
        let mut request = Self::new(Body::from(ask.body));
        *request.method_mut() = ask.method;
        *request.uri_mut() = ask.uri.parse().unwrap();
        *request.headers_mut() = ask.headers;
        *request.extensions_mut() = ask.extensions;
        request
    }
}

/// What a body consists of.
pub type Step = Result<Frame<Bytes>, BoxError>;

pub fn data(text: &'static str) -> Step {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

pub fn trailers(name: &'static str, value: &'static str) -> Step {
    let mut trailers = HeaderMap::new();
    trailers.insert(name, value.parse().unwrap());
    Ok(Frame::trailers(trailers))
}

pub fn broken() -> Step {
    Err("the body broke off".into())
}

/// A body of unknown length that consists of these steps.
pub fn steps<const N: usize>(steps: [Step; N]) -> Body {
    Body::new(StreamBody::new(futures_util::stream::iter(steps)))
}

/// A body of unknown length that consists of what is sent, while it is sent.
pub fn fed() -> (mpsc::UnboundedSender<Step>, Body) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let stream = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
    (sender, Body::new(StreamBody::new(stream)))
}

/// A body that promises a length and must not be read.
pub struct Unread {
    pub at_least: u64,
}

impl http_body::Body for Unread {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("the body was read");
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(self.at_least);
        hint
    }
}

/// Holds handlers up until the test lets them go.
#[derive(Clone)]
pub struct Gate {
    entered: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    pub fn new() -> Self {
        Self {
            entered: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(0)),
        }
    }

    /// The handler's side: says that it is here and waits.
    pub async fn pass(&self) {
        self.entered.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// The test's side: waits until a handler is here.
    pub async fn entered(&self) {
        self.entered.acquire().await.unwrap().forget();
    }

    /// Lets one handler go, now or when it comes.
    pub fn open(&self) {
        self.open.add_permits(1);
    }
}
