//! Connections outlive what is sent over them.

use crate::h1::with_length;
use crate::message::Request;
use crate::puppet::{Puppet, ran};

#[tokio::test]
async fn a_connection_goes_on_after_replays_and_after_refusals() {
    let puppet = Puppet::start(&["--missing-key", "reject", "--max-request-bytes", "64"]);
    let mut h1 = puppet.h1().await;
    let mut h2 = puppet.h2().await;
    for round in 0..3 {
        // One client of each version, so that each sees the other's results too.
        let name = format!("round-{round}");
        let request = Request::post(&name).key(&name);
        let first = h1.send(&request).await;
        first.fresh(200);
        let refused = [
            (Request::post(&name), 400, "missing_key"),
            (request.clone().key("again"), 400, "invalid_key"),
            (Request::post(&name).key("a b"), 400, "invalid_key"),
            (request.clone().body("x".repeat(65)), 413, "body_too_large"),
            (request.clone().body("amount=1"), 422, "key_reused"),
        ];
        for (refused, status, code) in refused {
            h1.send(&refused).await.problem(status, code);
            h1.send(&request).await.is_replay_of(&first, &[]);
            h2.send(&refused).await.problem(status, code);
            h2.send(&request).await.is_replay_of(&first, &[]);
        }
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order() {
    let puppet = Puppet::start(&[]);
    let first = Request::post("pipeline")
        .key("k")
        .header("x-puppet-delay-ms", "50");
    let mismatch = first.clone().body("amount=1");
    let other = Request::post("pipeline").key("other");
    let count = Request::new("GET", "/count/pipeline");
    let all = [&first, &first, &mismatch, &other, &first, &count];
    let mut connection = puppet.h1().await;
    let bytes: Vec<u8> = all.into_iter().flat_map(with_length).collect();
    connection.write(&bytes).await;
    let ran_first = connection.answer(&first).await;
    ran_first.fresh(200);
    connection
        .answer(&first)
        .await
        .is_replay_of(&ran_first, &[]);
    connection
        .answer(&mismatch)
        .await
        .problem(422, "key_reused");
    connection.answer(&other).await.fresh(200);
    connection
        .answer(&first)
        .await
        .is_replay_of(&ran_first, &[]);
    let count = connection.answer(&count).await;
    assert_eq!(count.text(), r#"{"started":2,"finished":2}"#);
}

#[tokio::test]
async fn a_handler_that_closes_its_connection_closes_no_replay() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("close")
        .key("close")
        .header("x-puppet-header", "connection: close");
    let mut connection = puppet.h1().await;
    let first = connection.send(&request).await;
    connection.ends().await;
    let mut connection = puppet.h1().await;
    for _ in 0..3 {
        let again = connection.send(&request).await;
        again.is_replay_of(&first, &["connection"]);
    }
    assert_eq!(puppet.count("close").await, ran(1));
}
