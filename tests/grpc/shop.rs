//! A tonic server with the layer, on a port of its own, and clients for it.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::stream::BoxStream;
use http::uri::PathAndQuery;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tonic::body::Body;
use tonic::client::Grpc as Caller;
use tonic::codec::{CompressionEncoding, Streaming};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::server::{Grpc, NamedService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tower::service_fn;
use tower_idempotency::{
    Idempotency, IdempotencyKey, IdempotencyLayer, MemoryStore, ProblemKind, Record, ScopedKey,
    Store,
};

use crate::app::{Answer, Settings};
use crate::text::Text;

pub const CHARGE: &str = "/shop.Payments/Charge";

pub type Unary = Result<Response<String>, Status>;
pub type Messages = BoxStream<'static, Result<String, Status>>;
pub type Stream = Result<Response<Messages>, Status>;
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The server's side. `runs` counts how often the handler was begun.
pub struct Shop {
    pub addr: SocketAddr,
    pub idempotency: Idempotency<MemoryStore>,
    runs: Arc<AtomicUsize>,
}

impl Shop {
    /// A service whose methods are unary. The handler gets the number of its run, from 1.
    pub async fn unary<F, R>(settings: impl FnOnce(Settings) -> Settings, handler: F) -> Self
    where
        F: Fn(usize, Request<String>) -> R + Send + Sync + 'static,
        R: Future<Output = Unary> + Send + 'static,
    {
        let handler = Handler::Unary(Box::new(move |run, call| handler(run, call).boxed()));
        Self::serve(settings, handler).await
    }

    /// A service whose methods take a stream and answer with one.
    pub async fn streaming<F, R>(settings: impl FnOnce(Settings) -> Settings, handler: F) -> Self
    where
        F: Fn(usize, Request<Streaming<String>>) -> R + Send + Sync + 'static,
        R: Future<Output = Stream> + Send + 'static,
    {
        let handler = Handler::Streaming(Box::new(move |run, call| handler(run, call).boxed()));
        Self::serve(settings, handler).await
    }

    async fn serve(settings: impl FnOnce(Settings) -> Settings, handler: Handler) -> Self {
        let layer = settings(IdempotencyLayer::builder(MemoryStore::new()));
        let layer = layer.build().unwrap();
        let runs = Arc::default();
        let payments = Payments {
            handler: Arc::new(handler),
            runs: Arc::clone(&runs),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = Server::builder()
            .layer(layer.clone())
            .add_service(payments)
            .serve_with_incoming(TcpIncoming::from(listener));
        tokio::spawn(server.map(drop));
        Self {
            addr,
            idempotency: layer.idempotency().clone(),
            runs,
        }
    }

    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub async fn record(&self, key: &str) -> Option<Record> {
        let key = ScopedKey::new("http", "", &IdempotencyKey::new(key).unwrap());
        self.idempotency.store().lookup(&key).await.unwrap()
    }

    /// A connection of its own.
    pub async fn client(&self) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.addr)).unwrap();
        Client(Caller::new(endpoint.connect().await.unwrap()))
    }

    /// Sends a request over HTTP/2 as it is; tells too whether the answer ended with its head.
    pub async fn raw(&self, request: impl Into<http::Request<axum::body::Body>>) -> (Answer, bool) {
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let executor = TokioExecutor::new();
        let handshake = http2::handshake(executor, TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection.map(drop));
        let mut request = request.into();
        let uri = format!("http://{}{}", self.addr, request.uri().path());
        *request.uri_mut() = uri.parse().unwrap();
        let response = sender.send_request(request).await.unwrap();
        let ended = http_body::Body::is_end_stream(response.body());
        (Answer::of(response).await, ended)
    }
}

/// tonic's client.
#[derive(Clone)]
pub struct Client(pub Caller<Channel>);

impl Client {
    pub async fn charge(&self, call: Request<String>) -> Unary {
        let mut caller = self.0.clone();
        caller.ready().await.unwrap();
        caller
            .unary(call, PathAndQuery::from_static(CHARGE), Text)
            .await
    }

    /// Sends these messages.
    pub async fn send(
        &self,
        key: &str,
        messages: &[&str],
    ) -> Result<Response<Streaming<String>>, Status> {
        let messages: Vec<String> = messages.iter().map(ToString::to_string).collect();
        let call = keyed(key, futures_util::stream::iter(messages));
        let mut caller = self.0.clone();
        caller.ready().await.unwrap();
        caller
            .streaming(call, PathAndQuery::from_static(CHARGE), Text)
            .await
    }
}

/// The call that most tests repeat.
pub fn pay(key: &str) -> Request<String> {
    keyed(key, "100 THB".to_owned())
}

pub fn keyed<T>(key: &str, message: T) -> Request<T> {
    let mut call = Request::new(message);
    let key = MetadataValue::try_from(key).unwrap();
    call.metadata_mut().insert("idempotency-key", key);
    call
}

/// The same call as bytes: one message, uncompressed.
pub fn wire(key: &str) -> crate::app::Ask {
    crate::app::post(CHARGE)
        .key(key)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(&b"\0\0\0\0\x07100 THB"[..])
}

pub async fn paid(run: usize, _: Request<String>) -> Unary {
    Ok(Response::new(format!("run {run}")))
}

pub fn defaults(settings: Settings) -> Settings {
    settings
}

/// A line of metadata; empty if it is absent.
pub fn said<'m>(metadata: &'m MetadataMap, name: &str) -> &'m str {
    metadata.get(name).map_or("", |line| line.to_str().unwrap())
}

#[track_caller]
pub fn assert_replay(answer: &Unary, message: &str) {
    let answer = answer.as_ref().expect("an answer");
    assert_eq!(answer.get_ref(), message);
    assert_eq!(said(answer.metadata(), "idempotency-replayed"), "true");
}

/// The layer's own refusal; gives back what it says of a retry.
#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(
    answer: &Result<T, Status>,
    kind: ProblemKind,
) -> Option<i32> {
    let status = answer.as_ref().expect_err("refused");
    let metadata = status.metadata();
    assert_eq!(said(metadata, "idempotency-error"), kind.code());
    assert_eq!(status.code(), Code::from(kind.grpc_status().number()));
    assert!(!metadata.contains_key("idempotency-replayed"));
    let pushback = metadata.get("grpc-retry-pushback-ms")?;
    Some(pushback.to_str().unwrap().parse().unwrap())
}

type UnaryHandler = dyn Fn(usize, Request<String>) -> Boxed<Unary> + Send + Sync;
type StreamHandler = dyn Fn(usize, Request<Streaming<String>>) -> Boxed<Stream> + Send + Sync;

enum Handler {
    Unary(Box<UnaryHandler>),
    Streaming(Box<StreamHandler>),
}

/// What code generators make of a service.
#[derive(Clone)]
struct Payments {
    handler: Arc<Handler>,
    runs: Arc<AtomicUsize>,
}

impl NamedService for Payments {
    const NAME: &'static str = "shop.Payments";
}

impl tower::Service<http::Request<Body>> for Payments {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Boxed<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self { handler, runs } = self.clone();
        let mut grpc = Grpc::new(Text)
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip);
        Box::pin(async move {
            let count = || runs.fetch_add(1, Ordering::SeqCst) + 1;
            Ok(match &*handler {
                Handler::Unary(handler) => {
                    let method = service_fn(|call| handler(count(), call));
                    grpc.unary(method, request).await
                }
                Handler::Streaming(handler) => {
                    let method = service_fn(|call| handler(count(), call));
                    grpc.streaming(method, request).await
                }
            })
        })
    }
}
