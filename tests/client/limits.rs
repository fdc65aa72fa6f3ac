//! When there is no further try.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower::retry::RetryLayer;
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::client::{ClientLayer, GaveUp, OneTry, RetryPolicy, SetIdempotencyKeyLayer};

use crate::script::{Script, Step, answered, exact, pay, status, unknown, with};

#[tokio::test(start_paused = true)]
async fn no_retries_means_one_try() {
    let script = Script::new([Step::Reset]);
    let told = unknown(
        script.ask(&with(exact().retries(0)), pay()).await,
        GaveUp::Retries,
    );
    assert_eq!((script.tries(), told.tries()), (1, 1));
    // What happened last is there for the log.
    let source = std::error::Error::source(&told).expect("a source");
    assert!(source.to_string().contains("connection failed"), "{source}");
}

#[tokio::test(start_paused = true)]
async fn the_deadline_ends_waits_and_the_last_try() {
    let layer = with(exact().deadline(Duration::from_secs(4)));
    let script = Script::new([status(503)]);
    unknown(script.ask(&layer, pay()).await, GaveUp::Deadline);
    assert_eq!(script.times(), [0, 500, 1_500, 3_500]);

    let begun = Instant::now();
    let script = Script::new([Step::Silence]);
    unknown(script.ask(&layer, pay()).await, GaveUp::Deadline);
    assert_eq!(begun.elapsed(), Duration::from_secs(4));
    assert_eq!(script.tries(), 1);

    let begun = Instant::now();
    let script = Script::new([status(503), status(503), Step::Silence]);
    unknown(script.ask(&layer, pay()).await, GaveUp::Deadline);
    assert_eq!(begun.elapsed(), Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn no_call_lasts_longer_than_its_deadline() {
    for deadline in [0, 1, 499, 500, 501, 3_000, 9_999, 30_000, 60_000] {
        let deadline = Duration::from_millis(deadline);
        for hint in ["0", "2", "60"] {
            let layer = with(RetryPolicy::new().deadline(deadline).budget(u32::MAX));
            let steps = [
                status(503).with("retry-after", hint),
                Step::Silence,
                Step::Reset,
            ];
            let script = Script::new(steps);
            let begun = Instant::now();
            let _ = script.ask(&layer, pay()).await;
            // A timer of tokio's fires on the next millisecond.
            let over = begun.elapsed().saturating_sub(deadline);
            assert!(
                over <= Duration::from_millis(1),
                "{over:?} over {deadline:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_while_it_waits_sends_nothing_more() {
    let script = Script::new([status(503)]);
    let asking = script.clone();
    let call = tokio::spawn(async move { asking.ask(&with(exact()), pay()).await });
    sleep(Duration::from_secs(1)).await;
    assert_eq!(script.tries(), 2);
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    sleep(Duration::from_secs(60)).await;
    assert_eq!(script.tries(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_down_gets_a_hundred_retries_and_then_each_request_once() {
    let layer = with(exact());
    let script = Script::new([Step::Reset]);
    for _ in 0..20 {
        unknown(script.ask(&layer, pay()).await, GaveUp::Retries);
    }
    assert_eq!(script.tries(), 120);
    for _ in 0..100 {
        unknown(script.ask(&layer, pay()).await, GaveUp::Budget);
    }
    assert_eq!(script.tries(), 220);
}

#[tokio::test(start_paused = true)]
async fn the_budget_is_of_one_host_and_answers_fill_it() {
    let layer = with(exact().budget(5).retries(1));
    let script = Script::new([status(503)]);
    unknown(script.ask(&layer, pay()).await, GaveUp::Retries);
    unknown(script.ask(&layer, pay()).await, GaveUp::Budget);
    // Another host has its own.
    let mut other = pay();
    *other.uri_mut() = "http://other.example/payments".parse().unwrap();
    unknown(script.ask(&layer, other).await, GaveUp::Retries);
    // Five answers pay for one retry.
    script.now([status(201)]);
    for _ in 0..4 {
        answered(script.ask(&layer, pay()).await, 201);
    }
    script.now([status(503)]);
    unknown(script.ask(&layer, pay()).await, GaveUp::Budget);
    script.now([status(201)]);
    answered(script.ask(&layer, pay()).await, 201);
    // A retry that helps is given back, again and again.
    for _ in 0..10 {
        script.now([status(503), status(201)]);
        answered(script.ask(&layer, pay()).await, 201);
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_is_not_sent_again_after_its_life() {
    let key = SetIdempotencyKeyLayer::new().lifetime(Duration::from_secs(4));
    let layer = ClientLayer::new().key(key).retry(exact());
    let script = Script::new([status(503)]);
    let told = unknown(script.ask(&layer, pay()).await, GaveUp::KeyExpired);
    assert_eq!(script.times(), [0, 500, 1_500, 3_500]);
    assert!(told.key().is_some());
}

#[tokio::test(start_paused = true)]
async fn calls_side_by_side_do_not_share_their_counts() {
    let layer = Arc::new(with(exact()));
    let script = Script::new([status(503)]);
    let calls: Vec<_> = (0..10)
        .map(|_| {
            let (script, layer) = (script.clone(), Arc::clone(&layer));
            tokio::spawn(async move { script.ask(&layer, pay()).await })
        })
        .collect();
    for call in calls {
        assert_eq!(unknown(call.await.unwrap(), GaveUp::Retries).tries(), 6);
    }
    assert_eq!(script.tries(), 60);
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_stands_alone_counts_each_call_from_its_own_begin() {
    let script = Script::new([status(503)]);
    let policy = exact().deadline(Duration::from_secs(20));
    let mut service = RetryLayer::new(policy).layer(OneTry::new(script.clone()));
    for _ in 0..3 {
        let mut request = pay();
        let key = "order-1".parse().unwrap();
        request.headers_mut().insert("idempotency-key", key);
        let call = service.ready().await.unwrap().call(request);
        assert_eq!(unknown(call.await, GaveUp::Retries).tries(), 6);
        sleep(Duration::from_secs(60)).await;
    }
}
