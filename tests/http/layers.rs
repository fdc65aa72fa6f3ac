//! The layer among others: what belongs outside, what may happen inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::header::{HeaderName, SET_COOKIE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use tower::{ServiceBuilder, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, MissingKey, ProblemKind, RequestBody, Scope,
};

use crate::app::{App, Call, ask, counted, data, paid, pay, post, send, steps};

#[derive(Clone)]
struct UserId(String);

/// What an authentication layer does: an identity for tokens that are good, 401 for the others.
fn authenticate(mut request: Request<Body>, revoked: usize) -> Result<Request<Body>, StatusCode> {
    let token = request.headers().get("authorization");
    let user = token.and_then(|token| token.to_str().ok()?.strip_prefix("Bearer "));
    match user.map(str::to_owned) {
        Some(user) if revoked == 0 => {
            request.extensions_mut().insert(UserId(user));
            Ok(request)
        }
        _ => Err(StatusCode::UNAUTHORIZED),
    }
}

#[tokio::test]
async fn inside_authentication_a_revoked_caller_gets_a_401_and_not_the_stored_answer() {
    let runs = Arc::new(AtomicUsize::new(0));
    let revoked = Arc::new(AtomicUsize::new(0));
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .scope(Scope::from_fn(|head| {
            head.extensions.get::<UserId>().map(|user| user.0.clone())
        }))
        .build()
        .unwrap();
    let inner = ServiceBuilder::new()
        .layer(layer)
        .service(counted(&runs, paid));
    let told = Arc::clone(&revoked);
    let service = service_fn(move |request: Request<Body>| {
        let (inner, revoked) = (inner.clone(), told.load(Ordering::SeqCst));
        async move {
            match authenticate(request, revoked) {
                Ok(request) => {
                    let answer = tower::ServiceExt::oneshot(inner, request).await?;
                    Ok(answer.map(Body::new))
                }
                Err(status) => {
                    let mut response = Response::new(Body::empty());
                    *response.status_mut() = status;
                    Ok::<_, std::convert::Infallible>(response)
                }
            }
        }
    });
    let request = || pay("k").header("authorization", "Bearer alice");
    let first = send(&service, request()).await;
    send(&service, request()).await.assert_replays(&first);

    revoked.store(1, Ordering::SeqCst);
    let refused = send(&service, request()).await;
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED);
    assert!(refused.body.is_empty());
    revoked.store(0, Ordering::SeqCst);
    send(&service, request()).await.assert_replays(&first);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// What an inner layer may do to a request on its way to the handler.
fn rewritten(request: Request<RequestBody<Body>>) -> Request<RequestBody<Body>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::SeqCst);
    let (mut head, body) = request.into_parts();
    head.method = Method::PUT;
    head.uri = format!("/rewritten/{count}").parse().unwrap();
    head.headers.clear();
    let token = HeaderValue::from(count);
    head.headers.insert("authorization", token);
    Request::from_parts(head, body)
}

#[tokio::test]
async fn what_inner_layers_do_to_the_request_does_not_change_its_identity() {
    let runs = Arc::new(AtomicUsize::new(0));
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .map_request(rewritten)
        .service(counted(&runs, |call: Call| async move {
            call.head.uri.to_string()
        }));
    let first = send(&service, pay("k")).await;
    assert!(first.text().starts_with("/rewritten/"));
    send(&service, pay("k")).await.assert_replays(&first);
    send(&service, post("/other").key("k"))
        .await
        .assert_problem(ProblemKind::KeyReused);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_inner_layer_may_replace_the_body() {
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .map_request(|request: Request<RequestBody<Body>>| request.map(|_| Body::from("other")))
        .service(service_fn(|request: Request<Body>| async move {
            Ok::<_, std::convert::Infallible>(Response::new(request.into_body()))
        }));
    let first = send(&service, pay("k")).await;
    assert_eq!(first.text(), "other");
    send(&service, pay("k")).await.assert_replays(&first);
}

const ORIGIN: &str = "https://shop.example";

/// What a service for browsers needs: the header allowed, the marker and the code exposed.
fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AllowOrigin::exact(HeaderValue::from_static(ORIGIN)))
        .allow_methods([Method::POST])
        .allow_headers([HeaderName::from_static("idempotency-key")])
        .expose_headers(
            ["idempotency-replayed", "idempotency-error", "retry-after"]
                .map(HeaderName::from_static),
        )
}

fn required() -> IdempotencyLayer<MemoryStore> {
    let layer = IdempotencyLayer::builder(MemoryStore::new());
    layer.missing_key(MissingKey::Reject).build().unwrap()
}

#[tokio::test]
async fn preflights_pass_even_where_a_key_is_required() {
    let preflight = || {
        ask("OPTIONS", "/pay")
            .header("origin", ORIGIN)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "idempotency-key")
    };
    let runs = Arc::default();
    let inside = ServiceBuilder::new()
        .layer(cors())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(required())
        .service(counted(&runs, paid));
    let outside = ServiceBuilder::new()
        .layer(required())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(cors())
        .service(counted(&runs, paid));
    let answers = [
        send(&inside, preflight()).await,
        send(&outside, preflight()).await,
    ];
    for answer in answers {
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(
            answer.header("access-control-allow-headers"),
            "idempotency-key"
        );
        assert!(!answer.headers.contains_key("idempotency-error"));
    }
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn inside_cors_every_answer_has_the_headers_of_its_own_origin() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(cors())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(required())
        .service(counted(&runs, paid));
    let request = |key| pay(key).header("origin", ORIGIN);
    for (key, status) in [("k", 201), ("k", 201), ("\"", 400)] {
        let answer = send(&service, request(key)).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("access-control-allow-origin"), ORIGIN);
        assert!(
            answer
                .header("access-control-expose-headers")
                .contains("idempotency-replayed")
        );
    }
}

const LONG: &str = "a text that is long enough for a compressor to be worth its while";

#[tokio::test]
async fn inside_compression_each_client_gets_the_coding_that_it_takes() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(CompressionLayer::new())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .service(counted(&runs, |_| async { LONG }));
    let coded = send(&service, pay("k").header("accept-encoding", "gzip")).await;
    assert_eq!(coded.header("content-encoding"), "gzip");
    let plain = send(&service, pay("k")).await;
    assert!(plain.is_replay());
    assert!(!plain.headers.contains_key("content-encoding"));
    assert_eq!(plain.text(), LONG);
}

#[tokio::test]
async fn outside_compression_the_coded_bytes_are_kept_with_their_coding() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(CompressionLayer::new())
        .service(counted(&runs, |_| async { LONG }));
    let first = send(&service, pay("k").header("accept-encoding", "gzip")).await;
    assert_eq!(first.header("content-encoding"), "gzip");
    // The reason to put compression outside: this client did not ask for gzip.
    send(&service, pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn what_outer_layers_add_is_fresh_on_every_answer() {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .map_response(|mut response: Response<_>| {
            let count = COUNT.fetch_add(1, Ordering::SeqCst);
            let headers = response.headers_mut();
            headers.insert("x-request-id", HeaderValue::from(count));
            headers.append(SET_COOKIE, HeaderValue::from_static("session=fresh"));
            response
        })
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .service(counted(&runs, paid));
    for count in ["0", "1"] {
        let answer = send(&service, pay("k")).await;
        assert_eq!(answer.header("x-request-id"), count);
        assert_eq!(answer.header("set-cookie"), "session=fresh");
    }
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_is_an_answer_that_frees_the_key() {
    use tower_http::timeout::TimeoutLayer;
    let runs = Arc::new(AtomicUsize::new(0));
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::REQUEST_TIMEOUT,
            Duration::from_secs(1),
        ))
        .service(counted(&runs, |_| std::future::pending::<()>()));
    for _ in 0..2 {
        let answer = send(&service, pay("k")).await;
        assert_eq!(answer.status, StatusCode::REQUEST_TIMEOUT);
    }
    // The reason to put timeouts outside, or to keep their status.
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn two_layers_around_each_other_keep_their_keys_apart() {
    let store = MemoryStore::new();
    let layer = |namespace: &str| {
        let layer = IdempotencyLayer::builder(store.clone()).namespace(namespace);
        layer.build().unwrap()
    };
    let runs = Arc::new(AtomicUsize::new(0));
    let service = ServiceBuilder::new()
        .layer(layer("outer"))
        .layer(layer("inner"))
        .service(counted(&runs, paid));
    let first = send(&service, pay("k")).await;
    send(&service, pay("k")).await.assert_replays(&first);
    assert_eq!((runs.load(Ordering::SeqCst), store.len()), (1, 2));
}

#[tokio::test]
async fn what_an_inner_layer_refused_is_not_kept_by_an_outer_one() {
    let store = MemoryStore::new();
    let layer = |namespace: &str| IdempotencyLayer::builder(store.clone()).namespace(namespace);
    let runs = Arc::new(AtomicUsize::new(0));
    let service = ServiceBuilder::new()
        .layer(layer("outer").build().unwrap())
        .layer(layer("inner").request_limit(8).build().unwrap())
        .service(counted(&runs, paid));
    for _ in 0..2 {
        let refused = send(&service, pay("k").body("1,000 THB")).await;
        refused.assert_problem(ProblemKind::BodyTooLarge);
    }
    // Nothing ran: the key is free for the corrected request.
    let first = send(&service, pay("k").body("1 THB")).await;
    assert_eq!(first.text(), "run 1");
}

#[tokio::test]
async fn a_layer_that_was_added_twice_refuses_and_pins_nothing() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let runs = Arc::new(AtomicUsize::new(0));
    let twice = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(layer.clone())
        .service(counted(&runs, paid));
    send(&twice, pay("k"))
        .await
        .assert_problem(ProblemKind::InProgress);
    let once = App::behind(&layer, paid);
    assert_eq!(once.send(pay("k")).await.text(), "run 1");
}

#[tokio::test]
async fn a_service_of_another_body_type_is_guarded_as_well() {
    use bytes::Bytes;
    use http_body_util::Full;
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .service(service_fn(|_: Request<RequestBody<Body>>| async {
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from("paid"))))
        }));
    let first = send(&service, pay("k")).await;
    send(&service, pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn clones_of_a_layer_share_their_records() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let first = App::behind(&layer, paid);
    let second = App::behind(&layer.clone(), paid);
    let answer = first.send(pay("k")).await;
    second.send(pay("k")).await.assert_replays(&answer);
    let streamed = App::behind(&layer, |_| async { steps([data("a")]) });
    assert!(streamed.send(pay("k")).await.is_replay());
}
