//! What other middleware for axum, tower and their like gets wrong, by kind.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{Response, StatusCode};
use tokio::time::sleep;
use tower::ServiceBuilder;
use tower_idempotency::{IdempotencyLayer, MemoryStore, OnAbandoned, ProblemKind, Scope};

use crate::app::{App, Call, Gate, counted, data, paid, pay, post, send, steps, trailers};

/// Looks first, runs, stores then: 200 requests were 200 runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_hundred_requests_at_once_are_one_run() {
    let app = App::new(|call| async move {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        paid(call).await
    });
    let tasks = (0..200).map(|_| {
        let app = app.clone();
        tokio::spawn(async move { app.send(pay("k")).await })
    });
    for answer in join_all(tasks.collect::<Vec<_>>()).await {
        assert!(matches!(answer.unwrap().status.as_u16(), 201 | 409));
    }
    assert_eq!(app.runs(), 1);
}

/// An app whose handler marks its start and its end, and the gate between.
fn half_way() -> (App, Gate, Arc<AtomicUsize>) {
    let (gate, ended) = (Gate::new(), Arc::new(AtomicUsize::new(0)));
    let (held, counter) = (gate.clone(), Arc::clone(&ended));
    let app = App::new(move |call: Call| {
        let (held, counter) = (held.clone(), Arc::clone(&counter));
        async move {
            held.pass().await;
            counter.fetch_add(1, Ordering::SeqCst);
            paid(call).await
        }
    });
    (app, gate, ended)
}

/// The handler was cancelled half-way and the key freed: the retry did its first half again.
#[tokio::test]
async fn a_client_that_leaves_neither_repeats_nor_loses_the_work() {
    let (app, gate, ended) = half_way();
    tokio::select! {
        biased;
        _ = app.call(pay("k")) => unreachable!("the handler is held up"),
        () = gate.entered() => {}
    }
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::InProgress);
    gate.open();
    assert!(app.idempotency.drain().await);
    assert!(app.send(pay("k")).await.is_replay());
    assert_eq!((app.runs(), ended.load(Ordering::SeqCst)), (1, 1));
}

/// After a panic, or a client that left, the key was locked for a day, or for ever.
#[tokio::test]
async fn a_panic_is_told_at_once_and_locks_nothing() {
    let app = App::with_engine(
        |engine| engine.on_abandoned(OnAbandoned::Rerun),
        |s| s,
        |call| async move {
            assert_ne!(call.run, 1, "the first run fails");
            paid(call).await
        },
    );
    let first = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
    assert!(first.is_err());
    // No lease has to end first.
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
}

/// Streams, answers over the limit and panics were run again when the lease was over.
#[tokio::test(start_paused = true)]
async fn nothing_runs_again_when_the_lease_is_over() {
    let app = App::with(
        |s| s.response_limit(10),
        |call| async move {
            match call.head.uri.path() {
                "/stream" => {
                    let body = steps([data("data: 1\n\n")]);
                    let kind = [("content-type", "text/event-stream")];
                    axum::response::IntoResponse::into_response((kind, body))
                }
                "/big" => Response::new(Body::from("more than ten bytes")),
                _ => panic!("out of cheese"),
            }
        },
    );
    for path in ["/stream", "/big", "/panic"] {
        let ask = || post(path).key(path);
        let _ = AssertUnwindSafe(app.send(ask())).catch_unwind().await;
        for _ in 0..3 {
            sleep(Duration::from_secs(60)).await;
            assert_eq!(app.send(ask()).await.status, StatusCode::CONFLICT);
        }
    }
    assert_eq!(app.runs(), 3);
}

/// `Cache-Control: no-store`, which security layers set everywhere, freed the key: two payments.
#[tokio::test]
async fn no_store_does_not_switch_the_layer_off() {
    let app =
        App::new(
            |call| async move { ([("cache-control", "no-store")], format!("run {}", call.run)) },
        );
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);
}

/// The answer to another endpoint, or to another body, was replayed.
#[tokio::test]
async fn no_other_endpoint_and_no_other_body_is_answered() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    for other in [
        pay("k").body("1 THB"),
        post("/refund").key("k").body("100 THB"),
        post("/pay?x").key("k").body("100 THB"),
    ] {
        app.send(other).await.assert_problem(ProblemKind::KeyReused);
    }
}

/// Cookies were replayed.
#[tokio::test]
async fn no_cookie_is_replayed() {
    let app = App::new(|_| async { [("set-cookie", "session=1")] });
    assert_eq!(app.send(pay("k")).await.header("set-cookie"), "session=1");
    assert!(!app.send(pay("k")).await.headers.contains_key("set-cookie"));
}

/// Large answers became a 500 or an empty body, and trailers were dropped, even on first answers.
#[tokio::test]
async fn the_first_client_gets_the_answer_whole_whatever_can_be_kept() {
    let app = App::with(
        |s| s.response_limit(4),
        |call| async move {
            let sum = call.trailers.unwrap()["x-sum"].to_str().unwrap().to_owned();
            assert_eq!(sum, "1");
            steps([data("123"), data("45678"), trailers("grpc-status", "0")])
        },
    );
    let request = pay("k").stream(steps([data("100 THB"), trailers("x-sum", "1")]));
    let first = app.send(request).await;
    assert_eq!((first.status, first.text()), (StatusCode::OK, "12345678"));
    assert_eq!(first.trailers.unwrap()["grpc-status"], "0");
    let retry = app.send(pay("k")).await;
    retry.assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(app.runs(), 1);
}

/// A service that was not ready was called: a panic with a limit on concurrency inside.
#[tokio::test]
async fn a_limit_on_concurrency_inside_does_not_panic() {
    let runs = Arc::default();
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .concurrency_limit(1)
        .service(counted(&runs, paid));
    for request in [post("/pay"), pay("k"), pay("k")] {
        assert_eq!(send(&service, request).await.status, StatusCode::CREATED);
    }
}

/// Requests ran unprotected without a word: empty keys, long keys, large bodies, a store that is down.
#[tokio::test(start_paused = true)]
async fn no_request_with_a_key_runs_unprotected_without_saying_so() {
    let full = IdempotencyLayer::builder(MemoryStore::new().max_entries(0));
    let full = App::behind(&full.build().unwrap(), paid);
    let app = App::with(|s| s.request_limit(10), paid);
    let long = "k".repeat(257);
    for (app, request) in [
        (&app, pay("")),
        (&app, pay("\"\"")),
        (&app, pay(&long)),
        (&app, pay("k").body("more than ten bytes")),
        (&full, pay("k")),
    ] {
        let answer = app.send(request).await;
        assert!(!answer.header("idempotency-error").is_empty());
        assert_eq!(app.runs(), 0);
    }
}

/// All callers shared one scope by default: one got the body of another.
#[tokio::test]
async fn by_default_no_caller_gets_the_body_of_another() {
    let app = App::new(|_| async { "the balance of alice" });
    app.send(pay("k").header("authorization", "Bearer alice"))
        .await;
    for other in [pay("k").header("authorization", "Bearer bob"), pay("k")] {
        let answer = app.send(other).await;
        answer.assert_problem(ProblemKind::CallerChanged);
        assert!(!answer.text().contains("balance"));
    }
}

/// A cookie that the client had made up was taken for a session.
#[tokio::test]
async fn an_invented_session_is_no_identity() {
    #[derive(Clone)]
    struct Session(String);
    let scope = Scope::from_fn(|head| head.extensions.get::<Session>().map(|s| s.0.clone()));
    let app = App::with(|s| s.scope(scope), paid);
    let invented = pay("k").header("cookie", "session=AAAAAAAAAAAAAAAAAAAAAA");
    app.send(invented)
        .await
        .assert_problem(ProblemKind::ScopeUnavailable);
    let known = pay("k").extension(Session("alice".to_owned()));
    assert_eq!(app.send(known).await.status, StatusCode::CREATED);
    assert_eq!(app.runs(), 1);
}

/// Hashes of 64 bits, or with a seed per process: two instances did not agree.
#[tokio::test]
async fn two_instances_agree_on_what_is_the_same_request() {
    let store = MemoryStore::new();
    let instance = || App::behind(&IdempotencyLayer::new(store.clone()), paid);
    let token = |ask: crate::app::Ask| ask.header("authorization", "Bearer alice");
    let first = instance().send(token(pay("k"))).await;
    instance()
        .send(token(pay("k")))
        .await
        .assert_replays(&first);
    let other = instance().send(token(pay("k").body("1 THB"))).await;
    other.assert_problem(ProblemKind::KeyReused);
}
