//! What becomes of a response's body, decided once, when its head arrives.
//!
//! (a) Its status releases the key: it passes. (b) It is known not to be keepable: a tombstone is
//! recorded and it passes. (c) It is held to its end, recorded, and then answered.

use std::convert::Infallible;
use std::error::Error as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::IntoResponse;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, StreamBody};
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, ProblemKind, RequestBody, RetentionOverride, State,
};

use crate::app::{
    Answer, App, Settings, Step, Unread, broken, data, fed, paid, pay, steps, trailers,
};

/// An app that answers its first call with this response, and must not be called again.
fn app_that_answers(
    settings: impl FnOnce(Settings) -> Settings,
    response: impl IntoResponse,
) -> App {
    let response = std::sync::Arc::new(Mutex::new(Some(response.into_response())));
    App::with(settings, move |_| {
        let response = response.lock().unwrap().take();
        async move { response.expect("no second run") }
    })
}

async fn is_completed(app: &App) -> bool {
    let record = app.record("k").await.unwrap();
    matches!(record.state, State::Completed { .. })
}

async fn is_tombstone(app: &App) -> bool {
    let record = app.record("k").await.unwrap();
    matches!(record.state, State::Completed { outcome, .. } if outcome.is_tombstone())
}

async fn next_text(body: &mut Body) -> Option<String> {
    let frame = body.frame().await?.unwrap();
    Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
}

// (a)

#[tokio::test]
async fn a_released_response_passes_as_it_is_produced() {
    let (feed, body) = fed();
    let app = app_that_answers(|s| s, (StatusCode::SERVICE_UNAVAILABLE, body));
    // The head comes although the body has not begun.
    let response = app.call(pay("k")).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let record = app.record("k").await.unwrap();
    assert_eq!(record.state, State::Released);

    let mut body = response.into_body();
    feed.send(data("later")).unwrap();
    assert_eq!(next_text(&mut body).await.unwrap(), "later");
    feed.send(trailers("x-sum", "1")).unwrap();
    let frame = body.frame().await.unwrap().unwrap();
    assert_eq!(frame.into_trailers().unwrap()["x-sum"], "1");
}

#[tokio::test]
async fn a_response_that_was_left_unknown_passes_as_it_is_produced() {
    let (feed, body) = fed();
    let mut response = Response::new(body);
    response
        .extensions_mut()
        .insert(RetentionOverride::LeaveUnknown);
    let app = app_that_answers(|s| s, response);
    let mut body = app.call(pay("k")).await.unwrap().into_body();
    assert!(app.record("k").await.unwrap().is_abandoned());
    feed.send(data("later")).unwrap();
    assert_eq!(next_text(&mut body).await.unwrap(), "later");
}

// (b)

async fn assert_passes_with_a_tombstone(app: App, feed: tokio::sync::mpsc::UnboundedSender<Step>) {
    let response = app.call(pay("k")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(is_tombstone(&app).await, "recorded before the answer");
    let mut body = response.into_body();
    for text in ["one", "two"] {
        feed.send(data(text)).unwrap();
        assert_eq!(next_text(&mut body).await.unwrap(), text);
    }
    drop(feed);
    assert!(body.frame().await.is_none());

    let retry = app.send(pay("k")).await;
    retry.assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(retry.json()["original_status"], 200);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn server_sent_events_pass_live() {
    for content_type in [
        "text/event-stream",
        "text/event-stream; charset=utf-8",
        "Text/Event-Stream ;x=y",
    ] {
        let (feed, body) = fed();
        let app = app_that_answers(|s| s, ([("content-type", content_type)], body));
        assert_passes_with_a_tombstone(app, feed).await;
    }
}

#[tokio::test]
async fn other_content_types_can_be_live() {
    let (feed, body) = fed();
    let app = app_that_answers(
        |s| s.live_types(["application/x-ndjson"]),
        ([("content-type", "application/x-ndjson")], body),
    );
    assert_passes_with_a_tombstone(app, feed).await;
}

#[tokio::test]
async fn the_handler_can_say_that_its_response_is_live() {
    let (feed, body) = fed();
    let mut response = Response::new(body);
    response.extensions_mut().insert(RetentionOverride::Live);
    assert_passes_with_a_tombstone(app_that_answers(|s| s, response), feed).await;
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_not_held() {
    let (feed, body) = fed();
    let app = app_that_answers(|s| s.response_limit(5), ([("content-length", "6")], body));
    assert_passes_with_a_tombstone(app, feed).await;
}

#[tokio::test]
async fn a_length_over_the_limit_that_the_body_knows_is_not_held() {
    let app = app_that_answers(|s| s.response_limit(5), Body::new(Unread { at_least: 6 }));
    // Reading the body would panic.
    let response = app.call(pay("k")).await.unwrap();
    assert_eq!(response.body().size_hint().lower(), 6);
    assert!(is_tombstone(&app).await);
}

// (c)

#[tokio::test]
async fn everything_else_is_held_recorded_and_then_answered() {
    let (feed, body) = fed();
    let app = app_that_answers(|s| s, body);
    let answer = app.call(pay("k"));
    tokio::pin!(answer);
    feed.send(data("one ")).unwrap();
    assert!(futures_util::poll!(&mut answer).is_pending());
    feed.send(data("two")).unwrap();
    assert!(futures_util::poll!(&mut answer).is_pending());
    assert!(!is_completed(&app).await);

    drop(feed);
    let response = answer.await.unwrap();
    assert!(is_completed(&app).await, "recorded before the answer");
    let first = Answer::of(response).await;
    assert_eq!(first.text(), "one two");
    app.send(pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn the_limit_of_what_is_kept_is_inclusive() {
    let whole = || steps([data("123"), data("45")]);
    let app = app_that_answers(|s| s.response_limit(5), whole());
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);

    let app = app_that_answers(|s| s.response_limit(4), whole());
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "12345");
    app.send(pay("k"))
        .await
        .assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn the_limit_is_one_mebibyte_by_default() {
    for (length, kept) in [(1 << 20, true), ((1 << 20) + 1, false)] {
        let app = app_that_answers(|s| s, vec![b'x'; length]);
        assert_eq!(app.send(pay("k")).await.body.len(), length);
        assert_eq!(app.send(pay("k")).await.is_replay(), kept);
    }
}

#[tokio::test]
async fn beyond_the_limit_the_rest_passes_as_it_is_produced() {
    let (feed, body) = fed();
    let app = app_that_answers(|s| s.response_limit(4), body);
    feed.send(data("123")).unwrap();
    feed.send(data("45")).unwrap();
    let mut body = app.call(pay("k")).await.unwrap().into_body();
    assert!(is_tombstone(&app).await, "recorded before the answer");
    for held in ["123", "45"] {
        assert_eq!(next_text(&mut body).await.unwrap(), held);
    }
    feed.send(data("later")).unwrap();
    assert_eq!(next_text(&mut body).await.unwrap(), "later");
    feed.send(broken()).unwrap();
    assert!(body.frame().await.unwrap().is_err());
}

/// A body that is longer than it says, or has no end at all.
struct Longer {
    says: u64,
    frames: usize,
    read: Arc<AtomicUsize>,
}

impl http_body::Body for Longer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let read = self.read.fetch_add(1, Ordering::Relaxed);
        let frame = Frame::data(Bytes::from_static(b"more"));
        Poll::Ready((read < self.frames).then_some(Ok(frame)))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.says)
    }
}

#[tokio::test]
async fn a_body_without_end_that_says_it_is_short_is_read_no_further_than_the_limit() {
    let read = Arc::new(AtomicUsize::new(0));
    let endless = Longer {
        says: 4,
        frames: usize::MAX,
        read: Arc::clone(&read),
    };
    let response = (StatusCode::CREATED, Body::new(endless));
    let app = app_that_answers(|s| s.response_limit(10), response);
    // No answer that looks whole: what a retry gets, too.
    for _ in ["first", "retry"] {
        let answer = app.send(pay("k")).await;
        answer.assert_problem(ProblemKind::ResponseNotKept);
        assert_eq!(answer.json()["original_status"], 201);
    }
    assert!(is_tombstone(&app).await);
    assert_eq!(read.load(Ordering::Relaxed), 3, "frames of four bytes");
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_body_within_the_limit_that_is_longer_than_it_says_is_kept_whole() {
    let longer = Longer {
        says: 4,
        frames: 2,
        read: Arc::default(),
    };
    let response = ([("content-length", "4")], Body::new(longer));
    let app = app_that_answers(|s| s.response_limit(10), response);
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "moremore");
    app.send(pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn trailers_are_held_kept_announced_and_replayed() {
    let app = app_that_answers(|s| s, steps([data("paid"), trailers("x-sum", "42")]));
    let first = app.send(pay("k")).await;
    assert_eq!(first.trailers.as_ref().unwrap()["x-sum"], "42");
    let mut retry = app.send(pay("k")).await;
    // Over HTTP/1.1 trailers that are not announced are not sent.
    assert_eq!(retry.headers.remove("trailer").unwrap(), "x-sum");
    retry.assert_replays(&first);
}

#[tokio::test]
async fn trailers_that_belong_to_one_exchange_are_not_replayed() {
    let mut mixed = http::HeaderMap::new();
    for (name, value) in [
        ("x-sum", "42"),
        ("server-timing", "db;dur=5"),
        ("set-cookie", "a=1"),
    ] {
        mixed.insert(name, value.parse().unwrap());
    }
    let body = steps([data("paid"), Ok(Frame::trailers(mixed.clone()))]);
    let app = app_that_answers(|s| s, body);
    assert_eq!(app.send(pay("k")).await.trailers.unwrap(), mixed);
    let retry = app.send(pay("k")).await;
    assert_eq!(retry.header("trailer"), "x-sum");
    let trailers = retry.trailers.unwrap();
    assert_eq!(trailers.len(), 1);
    assert_eq!(trailers["x-sum"], "42");
}

#[tokio::test]
async fn trailers_pass_with_a_response_that_is_not_kept() {
    let app = app_that_answers(
        |s| s.response_limit(3),
        steps([data("paid"), trailers("x-sum", "42")]),
    );
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "paid");
    assert_eq!(first.trailers.unwrap()["x-sum"], "42");
}

#[tokio::test]
async fn an_empty_body_is_kept_as_such() {
    for body in [Body::empty(), steps([]), steps([data("")])] {
        let app = app_that_answers(|s| s, (StatusCode::ACCEPTED, body));
        let first = app.send(pay("k")).await;
        assert!(first.body.is_empty());
        let replay = app.call(pay("k")).await.unwrap();
        assert_eq!(replay.status(), StatusCode::ACCEPTED);
        assert_eq!(replay.body().size_hint().exact(), Some(0));
        assert!(replay.body().is_end_stream());
    }
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the disk is gone")]
struct DiskGone;

type TypedBody = StreamBody<futures_util::stream::Iter<std::vec::IntoIter<Typed>>>;
type Typed = Result<Frame<Bytes>, DiskGone>;

async fn breaks_off(_: Request<RequestBody<Body>>) -> Result<Response<TypedBody>, DiskGone> {
    let frame = |text: &'static str| Ok(Frame::data(Bytes::from(text)));
    let frames = vec![frame("1"), frame("2"), Err(DiskGone)];
    let body = StreamBody::new(futures_util::stream::iter(frames));
    let response = Response::builder().status(201).header("location", "/1");
    Ok(response.body(body).unwrap())
}

#[tokio::test]
async fn a_body_that_fails_while_it_is_held_gives_its_head_its_frames_and_its_error() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let service = layer.layer(tower::service_fn(breaks_off));
    let response = service.clone().oneshot(pay("k").into()).await.unwrap();
    assert_eq!(response.status(), StatusCode::CREATED);
    assert_eq!(response.headers()["location"], "/1");
    let mut body = response.into_body();
    // An exact length would hide from the client that the body broke off.
    assert_eq!(body.size_hint().upper(), None);
    for expected in ["1", "2"] {
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), expected);
    }
    assert!(!body.is_end_stream());
    assert_eq!(body.frame().await.unwrap().unwrap_err(), DiskGone);
    assert!(body.frame().await.is_none());

    let retry = service.oneshot(pay("k").into()).await.unwrap();
    Answer::of(retry)
        .await
        .assert_problem(ProblemKind::OutcomeUnknown);
}

#[tokio::test]
async fn an_error_keeps_its_cause_on_the_way_through() {
    let app = app_that_answers(|s| s, steps([data("1"), broken()]));
    let body = app.call(pay("k")).await.unwrap().into_body();
    let error = body.collect().await.unwrap_err();
    let mut texts = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(next) = cause {
        texts.push(next.to_string());
        cause = next.source();
    }
    assert!(
        texts.iter().any(|text| text == "the body broke off"),
        "{texts:?}"
    );
}

#[tokio::test]
async fn the_length_of_a_held_body_is_known_and_that_of_one_with_trailers_is_not() {
    let app = app_that_answers(|s| s, steps([data("12"), data("345")]));
    let first = app.call(pay("k")).await.unwrap();
    assert_eq!(first.body().size_hint().exact(), Some(5));

    // As Content-Length it would cut the trailers off over HTTP/1.1.
    let app = app_that_answers(|s| s, steps([data("12"), trailers("x-sum", "1")]));
    for _ in ["first", "replay"] {
        let answer = app.call(pay("k")).await.unwrap();
        assert_eq!(answer.body().size_hint().lower(), 2);
        assert_eq!(answer.body().size_hint().exact(), None);
        assert!(!answer.body().is_end_stream());
    }
}

#[tokio::test]
async fn a_body_that_passes_keeps_what_it_knows_of_itself() {
    let app = App::new(paid);
    let unguarded = app.call(crate::app::ask("GET", "/")).await.unwrap();
    assert_eq!(
        unguarded.body().size_hint().exact(),
        Some("run 1".len() as u64)
    );
    assert!(!unguarded.body().is_end_stream());
}

#[tokio::test]
async fn a_protocol_switch_is_passed_on_and_frees_the_key() {
    let app = App::new(|_| async { (StatusCode::SWITCHING_PROTOCOLS, [("upgrade", "ws")], ()) });
    let first = app.send(pay("k")).await;
    assert_eq!(first.status, StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(first.header("upgrade"), "ws");
    assert_eq!(app.record("k").await.unwrap().state, State::Released);
}
