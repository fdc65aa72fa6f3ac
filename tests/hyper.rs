//! Behind hyper, over connections in memory: HTTP/1.1 and HTTP/2.

#[path = "support/app.rs"]
mod app;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tower::{Layer, Service};
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, ProblemKind, RequestBody};

use app::{Answer, Ask, Call, Gate, counted, data, paid, pay, steps, trailers};

/// A guarded service, and the connections to it.
struct Server<T> {
    layer: IdempotencyLayer<MemoryStore>,
    inner: T,
}

impl<T> Server<T>
where
    T: Service<
            Request<RequestBody<Incoming>>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send,
        > + Clone
        + Send
        + 'static,
{
    fn new(inner: T) -> Self {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        Self { layer, inner }
    }

    fn engine(&self) -> &Idempotency<MemoryStore> {
        self.layer.idempotency()
    }

    /// One end of a connection whose other end is served over HTTP/1.1.
    fn http1(&self) -> DuplexStream {
        let (client, server) = tokio::io::duplex(1 << 16);
        let service = TowerToHyperService::new(self.layer.layer(self.inner.clone()));
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(server), service);
        tokio::spawn(connection.map(drop));
        client
    }

    /// One end of a connection whose other end is served over HTTP/2.
    fn http2(&self) -> DuplexStream {
        let (client, server) = tokio::io::duplex(1 << 16);
        let service = TowerToHyperService::new(self.layer.layer(self.inner.clone()));
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(server), service);
        tokio::spawn(connection.map(drop));
        client
    }

    async fn connect1(&self) -> http1::SendRequest<Body> {
        let io = TokioIo::new(self.http1());
        let (sender, connection) = http1::handshake(io).await.unwrap();
        tokio::spawn(connection.map(drop));
        sender
    }

    async fn connect2(&self) -> http2::SendRequest<Body> {
        let io = TokioIo::new(self.http2());
        let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection.map(drop));
        sender
    }
}

/// A server with a handler that is counted.
macro_rules! serve {
    ($handler:expr) => {{
        let runs = Arc::new(AtomicUsize::new(0));
        (Server::new(counted(&runs, $handler)), runs)
    }};
}

fn over1(ask: Ask) -> Request<Body> {
    ask.header("host", "shop.example").into()
}

fn over2(ask: Ask) -> Request<Body> {
    let mut request = Request::from(ask);
    let uri = format!("http://shop.example{}", request.uri());
    *request.uri_mut() = uri.parse().unwrap();
    request
}

async fn send1(sender: &mut http1::SendRequest<Body>, ask: Ask) -> Answer {
    sender.ready().await.unwrap();
    Answer::of(sender.send_request(over1(ask)).await.unwrap()).await
}

async fn send2(sender: &mut http2::SendRequest<Body>, ask: Ask) -> Answer {
    sender.ready().await.unwrap();
    Answer::of(sender.send_request(over2(ask)).await.unwrap()).await
}

/// The header lines and the body of an answer, without what servers add to each.
fn kept(answer: &Answer) -> (StatusCode, Vec<String>, &[u8]) {
    let lines = answer.headers.iter();
    let lines = lines.filter(|(name, _)| {
        ![
            "date",
            "content-length",
            "transfer-encoding",
            "idempotency-replayed",
        ]
        .contains(&name.as_str())
    });
    let lines = lines.map(|(name, value)| format!("{name}: {value:?}"));
    (answer.status, lines.collect(), &answer.body)
}

async fn held(gate: Gate, call: Call) -> impl axum::response::IntoResponse {
    gate.pass().await;
    paid(call).await
}

#[tokio::test]
async fn one_connection_serves_first_answers_replays_and_refusals() {
    let (server, runs) = serve!(paid);
    let mut sender = server.connect1().await;
    let first = send1(&mut sender, pay("k")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    for _ in 0..3 {
        let retry = send1(&mut sender, pay("k")).await;
        assert!(retry.is_replay());
        assert_eq!(kept(&retry), kept(&first));
        assert_eq!(retry.header("content-length"), "5");
        let refused = send1(&mut sender, pay("\"")).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        let refused = send1(&mut sender, pay("k").body("1 THB")).await;
        assert_eq!(refused.header("idempotency-error"), "key_reused");
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_retry_over_another_protocol_is_the_same_request() {
    let (server, runs) = serve!(paid);
    let mut one = server.connect1().await;
    let mut two = server.connect2().await;
    let first = send1(&mut one, pay("k")).await;
    let retry = send2(&mut two, pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(kept(&retry), kept(&first));
    let first = send2(&mut two, pay("other")).await;
    let retry = send1(&mut one, pay("other")).await;
    assert!(retry.is_replay());
    assert_eq!(kept(&retry), kept(&first));
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn every_answer_has_a_date_of_its_own() {
    let (server, _) = serve!(|_| async { [("date", "Tue, 15 Nov 1994 08:12:31 GMT")] });
    let mut sender = server.connect1().await;
    let first = send1(&mut sender, pay("k")).await;
    assert!(first.header("date").contains("1994"));
    let retry = send1(&mut sender, pay("k")).await;
    assert!(retry.is_replay());
    assert!(
        !retry.header("date").contains("1994"),
        "{}",
        retry.header("date")
    );
}

#[tokio::test]
async fn a_connection_that_the_handler_closed_is_not_closed_by_the_replay() {
    let (server, runs) = serve!(|_| async { [("connection", "close")] });
    let first = send1(&mut server.connect1().await, pay("k")).await;
    assert_eq!(first.header("connection"), "close");
    let mut sender = server.connect1().await;
    for _ in 0..2 {
        assert!(send1(&mut sender, pay("k")).await.is_replay());
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_wrong_length_of_the_handlers_is_not_replayed() {
    // Of a response to HEAD, say: without a body hyper lets it through.
    let (server, _) = serve!(|_| async { (StatusCode::NO_CONTENT, [("content-length", "0")]) });
    let mut sender = server.connect1().await;
    for _ in 0..2 {
        send1(&mut sender, pay("k")).await;
    }
    let retry = send1(&mut sender, pay("k")).await;
    assert_eq!(retry.status, StatusCode::NO_CONTENT);
    assert!(!retry.headers.contains_key("content-length"));
}

#[tokio::test]
async fn trailers_reach_clients_that_take_them_first_and_replayed() {
    let (server, _) = serve!(|_| async {
        (
            [("trailer", "x-sum")],
            steps([data("paid"), trailers("x-sum", "42")]),
        )
    });
    let mut one = server.connect1().await;
    let mut two = server.connect2().await;
    for replayed in [false, true, true] {
        let ask = || pay("k").header("te", "trailers");
        for answer in [send1(&mut one, ask()).await, send2(&mut two, ask()).await] {
            assert_eq!(answer.text(), "paid");
            assert_eq!(
                answer.trailers.as_ref().unwrap()["x-sum"],
                "42",
                "{replayed}"
            );
        }
    }
}

#[tokio::test]
async fn trailers_of_the_request_reach_the_handler() {
    let (server, _) = serve!(|call: Call| async move {
        let trailers = call.trailers.unwrap();
        trailers["x-sum"].to_str().unwrap().to_owned()
    });
    let mut sender = server.connect2().await;
    let body = steps([data("1"), trailers("x-sum", "42")]);
    let request = over2(pay("k")).map(|_| body);
    let answer = Answer::of(sender.send_request(request).await.unwrap()).await;
    assert_eq!(answer.text(), "42");
}

#[tokio::test]
async fn the_framing_of_the_request_does_not_count() {
    let (server, runs) = serve!(paid);
    let mut sender = server.connect1().await;
    send1(&mut sender, pay("k").body("abcd")).await;
    let chunked = over1(pay("k")).map(|_| steps([data("a"), data("bc"), data("d")]));
    assert!(chunked.body().size_hint().exact().is_none());
    let retry = Answer::of(sender.send_request(chunked).await.unwrap()).await;
    assert!(retry.is_replay());
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn over_http1_a_client_that_left_finds_the_answer_when_it_comes_back() {
    let gate = Gate::new();
    let at = gate.clone();
    let (server, runs) = serve!(move |call| held(at.clone(), call));
    let mut connection = server.http1();
    let request =
        "POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 7\r\n\r\n100 THB";
    connection.write_all(request.as_bytes()).await.unwrap();
    gate.entered().await;
    drop(connection);
    while server.engine().detached() == 0 {
        tokio::task::yield_now().await;
    }
    gate.open();
    assert!(server.engine().drain().await);
    let retry = send1(&mut server.connect1().await, pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "run 1");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn over_http2_a_stream_that_was_reset_finds_the_answer_when_it_comes_back() {
    let gate = Gate::new();
    let at = gate.clone();
    let (server, runs) = serve!(move |call| held(at.clone(), call));
    let mut sender = server.connect2().await;
    let answer = sender.send_request(over2(pay("k")));
    tokio::select! {
        biased;
        () = gate.entered() => {}
        _ = answer => unreachable!("the handler is held up"),
    }
    // The connection lives on: only the stream was reset.
    while server.engine().detached() == 0 {
        tokio::task::yield_now().await;
    }
    gate.open();
    assert!(server.engine().drain().await);
    let retry = send2(&mut sender, pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_request_that_breaks_off_claims_nothing() {
    let (server, runs) = serve!(paid);
    let mut connection = server.http1();
    let half =
        "POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 7\r\n\r\n100";
    connection.write_all(half.as_bytes()).await.unwrap();
    connection.shutdown().await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    let whole = send1(&mut server.connect1().await, pay("k")).await;
    assert_eq!(whole.text(), "run 1");
    assert!(!whole.is_replay());
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_panic_closes_the_connection_without_an_answer_and_the_retry_is_told() {
    let (server, runs) = serve!(|_| async { panic!("out of cheese") as () });
    let mut connection = server.http1();
    let request =
        "POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 7\r\n\r\n100 THB";
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "");

    let retry = send1(&mut server.connect1().await, pay("k")).await;
    let code = ProblemKind::OutcomeUnknown.code();
    assert_eq!(retry.header("idempotency-error"), code);
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_body_that_fails_while_it_is_held_gives_its_head_its_frames_and_breaks_off() {
    let (server, _) = serve!(|_| async { steps([data("1"), app::broken()]) });
    let mut sender = server.connect1().await;
    let response = sender.send_request(over1(pay("k"))).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut body = response.into_body();
    let frame = body.frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "1");
    // The client must not take it for whole.
    assert!(body.frame().await.unwrap().is_err());
    let retry = send1(&mut server.connect1().await, pay("k")).await;
    assert_eq!(retry.header("idempotency-error"), "outcome_unknown");
}
