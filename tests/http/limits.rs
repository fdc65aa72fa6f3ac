//! The largest bodies of requests, and bodies that break off.

use axum::body::Body;
use tower_idempotency::ProblemKind;

use crate::app::{App, Unread, broken, data, fed, paid, pay, post, steps};

const DEFAULT: usize = 2 * 1024 * 1024;

#[tokio::test]
async fn the_limit_is_inclusive() {
    let app = App::with(|s| s.request_limit(8), paid);
    assert_eq!(app.send(pay("in").body("12345678")).await.status, 201);
    let answer = app.send(pay("out").body("123456789")).await;
    answer.assert_problem(ProblemKind::BodyTooLarge);
    assert_eq!(app.runs(), 1);
    assert!(app.record("out").await.is_none());
}

#[tokio::test]
async fn the_limit_is_two_mebibytes_by_default() {
    let app = App::new(|call| async move { call.body.len().to_string() });
    let largest = app.send(pay("in").body(vec![0; DEFAULT])).await;
    assert_eq!(largest.text(), DEFAULT.to_string());
    let answer = app.send(pay("out").body(vec![0; DEFAULT + 1])).await;
    answer.assert_problem(ProblemKind::BodyTooLarge);
}

#[tokio::test]
async fn a_body_of_unknown_length_is_counted_as_it_arrives() {
    let app = App::with(|s| s.request_limit(6), paid);
    let fits = pay("in").stream(steps([data("123"), data("456")]));
    assert_eq!(app.send(fits).await.status, 201);
    let exceeds = pay("out").stream(steps([data("123"), data("4567")]));
    app.send(exceeds)
        .await
        .assert_problem(ProblemKind::BodyTooLarge);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn what_comes_after_the_limit_is_not_read() {
    let app = App::with(|s| s.request_limit(2), paid);
    let (feed, body) = fed();
    feed.send(data("123")).unwrap();
    // The sender is still there: reading on would never end.
    let answer = app.send(pay("k").stream(body)).await;
    answer.assert_problem(ProblemKind::BodyTooLarge);
    drop(feed);
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_before_the_body_is_read() {
    let app = App::with(|s| s.request_limit(8), paid);
    let request = pay("k")
        .header("content-length", "9")
        .stream(steps([broken()]));
    app.send(request)
        .await
        .assert_problem(ProblemKind::BodyTooLarge);
}

#[tokio::test]
async fn a_length_that_the_body_knows_is_refused_before_it_is_read() {
    let app = App::with(|s| s.request_limit(8), paid);
    let body = Body::new(Unread { at_least: 9 });
    app.send(pay("k").stream(body))
        .await
        .assert_problem(ProblemKind::BodyTooLarge);
}

#[tokio::test]
async fn a_body_that_breaks_off_claims_nothing() {
    let app = App::new(paid);
    let request = pay("k").stream(steps([data("half"), broken()]));
    app.send(request)
        .await
        .assert_problem(ProblemKind::BodyUnreadable);
    assert_eq!(app.runs(), 0);
    assert!(app.store().is_empty());
    // The same key with the whole body, as the refusal advises.
    assert_eq!(app.send(pay("k")).await.text(), "run 1");
}

#[tokio::test]
async fn a_request_without_a_key_is_not_limited() {
    let app = App::with(
        |s| s.request_limit(1),
        |call| async move { call.body.len().to_string() },
    );
    assert_eq!(app.send(post("/pay").body("123456789")).await.text(), "9");
}

#[tokio::test]
async fn an_empty_body_is_within_a_limit_of_zero() {
    let app = App::with(|s| s.request_limit(0), paid);
    assert_eq!(app.send(post("/pay").key("k")).await.status, 201);
    app.send(pay("l").body("1"))
        .await
        .assert_problem(ProblemKind::BodyTooLarge);
}

#[tokio::test]
async fn frames_and_trailers_reach_the_handler() {
    use crate::app::trailers;
    let app = App::new(|call| async move {
        let sum = call.trailers.unwrap();
        format!("{:?} {}", call.body, sum["x-sum"].to_str().unwrap())
    });
    let body = steps([data("ab"), data("cd"), trailers("x-sum", "42")]);
    let answer = app.send(pay("k").stream(body)).await;
    assert_eq!(answer.text(), "b\"abcd\" 42");
}

#[tokio::test]
async fn the_handler_is_told_the_length_of_the_body_unless_it_has_trailers() {
    use crate::app::trailers;
    use http::{Request, Response};
    use http_body::Body as _;
    use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody};

    // A handler that forwards the request sends an exact length as Content-Length, and then no
    // trailers over HTTP/1.1.
    let hint = |request: Request<RequestBody<Body>>| async move {
        let hint = request.body().size_hint();
        let text = format!("{} {:?}", hint.lower(), hint.exact());
        Ok::<_, std::convert::Infallible>(Response::new(Body::from(text)))
    };
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let app = App::around(&layer, tower::service_fn(hint));
    let plain = pay("a").stream(steps([data("ab"), data("cd")]));
    assert_eq!(app.send(plain).await.text(), "4 Some(4)");
    let with = pay("b").stream(steps([data("abcd"), trailers("x-sum", "42")]));
    assert_eq!(app.send(with).await.text(), "4 None");
}
