//! tonic's server takes the layer, and its bodies pass with their trailers.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::Server;
use tower::{Layer, service_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody};

use crate::app::{self, Answer, send};

/// What code generators make of a service: its name, and a function of requests.
#[derive(Clone, Default)]
struct Payments {
    runs: Arc<AtomicUsize>,
}

impl NamedService for Payments {
    const NAME: &'static str = "shop.Payments";
}

impl tower::Service<Request<Body>> for Payments {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.runs.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Ok(unary()))
    }
}

/// One message of no bytes, and the status in the trailers with others.
fn unary() -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    trailers.append("x-cost-bin", "AAEC".parse().unwrap());
    trailers.append("x-cost-bin", "AwQF".parse().unwrap());
    let frames = [
        Ok::<_, tonic::Status>(Frame::data(Bytes::from_static(&[0; 5]))),
        Ok(Frame::trailers(trailers)),
    ];
    let body = Body::new(StreamBody::new(futures_util::stream::iter(frames)));
    let response = Response::builder().header("content-type", "application/grpc");
    response.body(body).unwrap()
}

fn call() -> app::Ask {
    app::post("/shop.Payments/Charge")
        .key("k")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(&[0; 5][..])
}

fn assert_is_the_unary_answer(answer: &Answer, replayed: bool) {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "application/grpc");
    assert_eq!(answer.body, &[0; 5][..]);
    let trailers = answer.trailers.as_ref().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    let costs: Vec<_> = trailers.get_all("x-cost-bin").iter().collect();
    assert_eq!(costs, ["AAEC", "AwQF"]);
    assert_eq!(trailers.len(), 3);
    assert_eq!(answer.is_replay(), replayed);
    // gRPC announces no trailers.
    assert!(!answer.headers.contains_key("trailer"));
}

#[tokio::test]
async fn a_tonic_server_with_the_layer_answers_and_replays() {
    let payments = Payments::default();
    let (client, server) = tokio::io::duplex(1 << 16);
    let connections = futures_util::stream::iter([Ok::<_, std::io::Error>(server)]);
    let server = Server::builder()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .add_service(payments.clone())
        .serve_with_incoming(connections);
    tokio::spawn(server.map(drop));

    let executor = TokioExecutor::new();
    let (mut sender, connection) = http2::handshake(executor, TokioIo::new(client))
        .await
        .unwrap();
    tokio::spawn(connection.map(drop));
    for replayed in [false, true, true] {
        let mut request = Request::<axum::body::Body>::from(call());
        *request.uri_mut() = "http://shop.example/shop.Payments/Charge".parse().unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_is_the_unary_answer(&Answer::of(response).await, replayed);
    }
    assert_eq!(payments.runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn tonics_body_type_passes_both_ways() {
    let echo = service_fn(|request: Request<RequestBody<Body>>| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, &[0; 5][..]);
        Ok::<_, Infallible>(unary())
    });
    let guarded = IdempotencyLayer::new(MemoryStore::new()).layer(echo);
    let service = tower::ServiceBuilder::new()
        .map_request(|request: Request<axum::body::Body>| request.map(Body::new))
        .service(guarded);
    for replayed in [false, true] {
        let answer = send(&service, call()).await;
        assert_is_the_unary_answer(&answer, replayed);
    }
}

#[test]
fn tonics_routes_take_the_layer() {
    fn is_a_service<S, R>(_: &S)
    where
        S: tower::Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
        S::Future: Send,
    {
    }
    let routes = tonic::service::Routes::new(Payments::default());
    is_a_service(&IdempotencyLayer::new(MemoryStore::new()).layer(routes));
}
