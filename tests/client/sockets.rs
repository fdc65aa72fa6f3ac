//! Over real connections that break, against the layer itself: hyper-util's client and reqwest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use h2::Reason;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower::{ServiceExt, service_fn};
use tower_idempotency::client::{ClientError, ClientLayer, GaveUp, RetryPolicy};
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, MemoryStore, ProblemKind};

use crate::script::{answered, unknown};
use crate::unlucky::{Luck, Unlucky};

/// A service that pays, behind the layer.
struct Service {
    addr: SocketAddr,
    payments: Arc<AtomicUsize>,
    /// One permit for each payment that was begun.
    entered: Arc<Semaphore>,
    /// One permit lets one payment end.
    gate: Arc<Semaphore>,
}

impl Service {
    async fn start() -> Self {
        let service = Self::held().await;
        service.gate.add_permits(1_000);
        service
    }

    async fn held() -> Self {
        let payments = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(Semaphore::new(0));
        let entered = Arc::new(Semaphore::new(0));
        let (counted, held) = (Arc::clone(&payments), Arc::clone(&gate));
        let begun = Arc::clone(&entered);
        let pay = async move |body: String| {
            begun.add_permits(1);
            held.acquire().await.unwrap().forget();
            let n = counted.fetch_add(1, Ordering::SeqCst) + 1;
            (StatusCode::CREATED, format!("payment {n} of {body}"))
        };
        let app = Router::new().route("/payments", post(pay));
        let app = app.layer(IdempotencyLayer::new(MemoryStore::new()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self {
            addr,
            payments,
            entered,
            gate,
        }
    }

    fn payments(&self) -> usize {
        self.payments.load(Ordering::SeqCst)
    }
}

fn quick() -> RetryPolicy {
    RetryPolicy::new().base(Duration::from_millis(2))
}

fn pay(addr: SocketAddr) -> Request<Full<Bytes>> {
    let request = Request::post(format!("http://{addr}/payments"));
    request.body(Full::from("10 EUR")).unwrap()
}

async fn send(
    layer: ClientLayer,
    request: Request<Full<Bytes>>,
) -> Result<Response<Bytes>, ClientError> {
    let http = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build_http::<Full<Bytes>>();
    layer.around(http).oneshot(request).await
}

async fn pays_once(plan: &'static [Luck], replayed: bool) {
    let service = Service::start().await;
    let addr = Unlucky::before(service.addr, plan).await.unwrap();
    let layer = ClientLayer::new()
        .retry(quick())
        .try_timeout(Duration::from_secs(2));
    let answer = answered(send(layer, pay(addr)).await, 201);
    assert_eq!(answer.body(), "payment 1 of 10 EUR");
    assert_eq!(
        answer.headers().contains_key("idempotency-replayed"),
        replayed
    );
    assert_eq!(service.payments(), 1);
}

#[tokio::test]
async fn a_connection_that_is_reset_before_the_request_arrives_pays_once() {
    pays_once(&[Luck::CutBeforeRequest, Luck::CutBeforeRequest], false).await;
}

#[tokio::test]
async fn a_connection_that_is_reset_before_the_answer_pays_once() {
    pays_once(&[Luck::CutBeforeAnswer], true).await;
}

#[tokio::test]
async fn a_connection_that_is_reset_half_way_in_the_answer_pays_once() {
    pays_once(&[Luck::CutInAnswer, Luck::CutBeforeAnswer], true).await;
}

#[tokio::test]
async fn an_answer_that_does_not_come_in_time_pays_once() {
    pays_once(&[Luck::Silence], true).await;
}

#[tokio::test]
async fn unavailable_twice_and_then_not_pays_once() {
    pays_once(&[Luck::Unavailable, Luck::Unavailable], false).await;
}

#[tokio::test]
async fn a_service_that_does_not_listen_is_tried_again_until_the_retries_are_used_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let told = send(ClientLayer::new().retry(quick()), pay(addr)).await;
    let told = unknown(told, GaveUp::Retries);
    assert_eq!((told.tries(), told.status()), (6, None));
}

#[tokio::test]
async fn a_payment_that_runs_already_is_waited_for_and_made_once() {
    let service = Service::held().await;
    let key = IdempotencyKey::random();
    let (mut one, mut two) = (pay(service.addr), pay(service.addr));
    one.extensions_mut().insert(key.clone());
    two.extensions_mut().insert(key);
    let first = tokio::spawn(send(ClientLayer::new().retry(quick()), one));
    service.entered.acquire().await.unwrap().forget();
    let impatient = ClientLayer::new().retry(quick().retries(0));
    let told = unknown(send(impatient, two.clone()).await, GaveUp::Retries);
    assert_eq!(told.problem(), Some(ProblemKind::InProgress));
    let second = tokio::spawn(send(ClientLayer::new().retry(quick()), two));
    service.gate.add_permits(1);
    let first = answered(first.await.unwrap(), 201);
    let second = answered(second.await.unwrap(), 201);
    assert_eq!(first.body(), second.body());
    assert_eq!(service.payments(), 1);
}

/// `reqwest::Client` takes `reqwest::Request`: one closure turns one into the other.
#[tokio::test]
async fn reqwest_pays_once_over_a_connection_that_breaks() {
    let service = Service::start().await;
    let plan = &[Luck::CutBeforeAnswer, Luck::Unavailable, Luck::CutInAnswer];
    let addr = Unlucky::before(service.addr, plan).await.unwrap();
    let http = reqwest::Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(0)
        .retry(reqwest::retry::never())
        .build()
        .unwrap();
    let http = service_fn(move |request: Request<Bytes>| {
        let http = http.clone();
        async move {
            let answer = http.execute(request.try_into()?).await?;
            Ok::<_, reqwest::Error>(Response::<reqwest::Body>::from(answer))
        }
    });
    let client = ClientLayer::new().retry(quick()).around(http);
    let request = pay(addr).map(|_| Bytes::from("10 EUR"));
    let answer = answered(client.oneshot(request).await, 201);
    assert_eq!(answer.body(), "payment 1 of 10 EUR");
    assert_eq!(service.payments(), 1);
}

/// A service over HTTP/2 that fails its first streams for these reasons, and then answers.
async fn http2(reasons: &'static [Reason]) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let streams = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&streams);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let n = counted.fetch_add(1, Ordering::SeqCst);
                    match reasons.get(n) {
                        Some(&Reason::NO_ERROR) => connection.abrupt_shutdown(Reason::NO_ERROR),
                        Some(&reason) => respond.send_reset(reason),
                        None => {
                            let answer = Response::builder().status(201).body(()).unwrap();
                            respond.send_response(answer, true).unwrap();
                        }
                    }
                }
            });
        }
    });
    (addr, streams)
}

#[tokio::test]
async fn streams_of_http2_that_are_refused_or_go_away_are_tried_again() {
    let reasons = &[
        Reason::REFUSED_STREAM,
        Reason::INTERNAL_ERROR,
        Reason::CANCEL,
        // GOAWAY.
        Reason::NO_ERROR,
    ];
    let (addr, streams) = http2(reasons).await;
    let http = Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http::<Full<Bytes>>();
    let client = ClientLayer::new().retry(quick()).around(http);
    answered(client.oneshot(pay(addr)).await, 201);
    assert_eq!(streams.load(Ordering::SeqCst), 5);
}
