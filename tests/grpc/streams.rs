//! Methods that stream.

use std::sync::{Arc, Mutex};

use futures_util::{StreamExt, stream};
use tokio::sync::mpsc;
use tonic::{Code, Response, Status};
use tower_idempotency::{IdempotencyLayer, MemoryStore, ProblemKind, State};

use crate::app::Settings;
use crate::patience::patient;
use crate::shop::{CHARGE, Messages, Shop, assert_refused, assert_replay, defaults, paid, pay};

fn listed(settings: Settings) -> Settings {
    settings.grpc_streaming(["/shop.Payments/Refund", CHARGE])
}

/// A stream of what is sent while it is sent.
fn fed() -> (mpsc::UnboundedSender<Result<String, Status>>, Messages) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let stream = stream::poll_fn(move |cx| receiver.poll_recv(cx));
    (sender, stream.boxed())
}

#[tokio::test]
async fn a_listed_stream_passes_as_it_is_produced_and_a_retry_is_told_so() {
    let (feed, messages) = fed();
    let messages = Arc::new(Mutex::new(Some(messages)));
    let shop = Shop::streaming(listed, move |_, _| {
        let messages = messages.lock().unwrap().take();
        async move { Ok(Response::new(messages.unwrap())) }
    })
    .await;
    let client = shop.client().await;
    feed.send(Ok("one".to_owned())).unwrap();
    let begun = patient("the head", client.send("k", &["a", "b"])).await;
    let mut answer = begun.unwrap().into_inner();
    let message = patient("a message", answer.message()).await;
    assert_eq!(message.unwrap().unwrap(), "one");

    // While it goes on, and after it.
    let retry = client.send("k", &["a", "b"]).await;
    assert_eq!(
        assert_refused(&retry, ProblemKind::ResponseNotKept),
        Some(-1)
    );
    feed.send(Ok("two".to_owned())).unwrap();
    assert_eq!(answer.message().await.unwrap().unwrap(), "two");
    drop(feed);
    assert_eq!(answer.message().await.unwrap(), None);
    let retry = client.send("k", &["a", "b"]).await;
    assert_refused(&retry, ProblemKind::ResponseNotKept);
    let text = retry.unwrap_err().message().to_owned();
    assert!(!text.contains("original_status"), "{text}");

    // Another stream with the key is a mismatch all the same.
    let other = client.send("k", &["a", "c"]).await;
    assert_refused(&other, ProblemKind::KeyReused);
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn an_error_before_a_listed_stream_begins_is_kept_as_it_is() {
    let shop = Shop::streaming(listed, |run, _| async move {
        Err(Status::not_found(format!("run {run}")))
    })
    .await;
    let client = shop.client().await;
    for _ in 0..2 {
        let status = client.send("k", &["a"]).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::NotFound, "run 1"));
    }
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_transient_error_before_a_listed_stream_begins_frees_the_key() {
    let shop = Shop::streaming(listed, |run, _| async move {
        Err(Status::unavailable(format!("run {run}")))
    })
    .await;
    let client = shop.client().await;
    for expected in ["run 1", "run 2"] {
        let status = client.send("k", &["a"]).await.unwrap_err();
        assert_eq!(status.message(), expected);
    }
}

#[tokio::test]
async fn a_stream_that_is_not_listed_is_held_and_replayed_whole() {
    let shop = Shop::streaming(defaults, |run, call| async move {
        let sent: Vec<_> = call.into_inner().map(Result::unwrap).collect().await;
        let mut messages: Vec<_> = sent.into_iter().map(Ok).collect();
        messages.push(Ok(format!("run {run}")));
        messages.push(Err(Status::out_of_range("that was all")));
        Ok(Response::new(stream::iter(messages).boxed()))
    })
    .await;
    let client = shop.client().await;
    for replayed in [false, true] {
        let answer = client.send("k", &["a", "b"]).await.unwrap();
        let marker = answer.metadata().contains_key("idempotency-replayed");
        assert_eq!(marker, replayed);
        let mut messages = answer.into_inner();
        for expected in ["a", "b", "run 1"] {
            assert_eq!(messages.message().await.unwrap().unwrap(), expected);
        }
        let status = messages.message().await.unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::OutOfRange, "that was all")
        );
    }
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_stream_of_requests_over_the_limit_does_not_run() {
    // Five bytes of frame and three of message, twice.
    for (limit, runs) in [(16, 1), (15, 0)] {
        let limited = |settings: Settings| settings.request_limit(limit);
        let shop = Shop::streaming(limited, |run, _| async move {
            Ok(Response::new(
                stream::iter([Ok(format!("run {run}"))]).boxed(),
            ))
        })
        .await;
        let client = shop.client().await;
        for _ in 0..2 {
            let answer = client.send("k", &["abc", "def"]).await;
            if runs == 0 {
                assert_eq!(assert_refused(&answer, ProblemKind::BodyTooLarge), Some(-1));
                assert!(shop.record("k").await.is_none());
            } else {
                let message = answer.unwrap().into_inner().message().await;
                assert_eq!(message.unwrap().unwrap(), "run 1");
            }
        }
        assert_eq!(shop.runs(), runs);
    }
}

#[tokio::test]
async fn an_answer_over_the_limit_passes_and_a_retry_is_told_that_it_is_done() {
    for (limit, is_kept) in [(10, true), (9, false)] {
        let shop = Shop::unary(|settings| settings.response_limit(limit), paid).await;
        let client = shop.client().await;
        let first = client.charge(pay("k")).await.unwrap();
        assert_eq!(first.get_ref(), "run 1");
        let retry = client.charge(pay("k")).await;
        if is_kept {
            assert_replay(&retry, "run 1");
        } else {
            assert_eq!(
                assert_refused(&retry, ProblemKind::ResponseNotKept),
                Some(-1)
            );
        }
        let state = shop.record("k").await.unwrap().state;
        assert!(matches!(state, State::Completed { .. }));
        assert_eq!(shop.runs(), 1);
    }
}

#[test]
fn a_path_of_another_form_is_refused_when_the_layer_is_built() {
    let build = |path: &str| {
        let layer = IdempotencyLayer::builder(MemoryStore::new());
        layer.grpc_streaming([path.to_owned()]).build()
    };
    assert!(build(CHARGE).is_ok());
    for wrong in [
        "",
        "/",
        "Watch",
        "shop.Orders/Watch",
        "/shop.Orders",
        "/shop.Orders/",
        "//Watch",
        "/shop.Orders/Watch/",
        "/shop.Orders/Watch?all",
        "/shop.Orders /Watch",
    ] {
        let error = build(wrong).expect_err(wrong);
        assert_eq!(error.setting(), "grpc_streaming");
    }
}
