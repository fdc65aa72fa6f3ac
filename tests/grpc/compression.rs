//! Messages that are compressed, and what makes two calls the same.

use std::io::Read;

use http::request::Parts;
use tonic::codec::CompressionEncoding::Gzip;
use tower_idempotency::http::grpc::messages;
use tower_idempotency::{FingerprintRecipe, ProblemKind};

use crate::shop::{Client, Shop, assert_refused, assert_replay, defaults, paid, pay, said, wire};

/// A client that compresses what it sends.
async fn compressing(shop: &Shop) -> Client {
    Client(shop.client().await.0.send_compressed(Gzip))
}

/// A client that reads compressed answers.
async fn accepting(shop: &Shop) -> Client {
    Client(shop.client().await.0.accept_compressed(Gzip))
}

#[tokio::test]
async fn a_retry_that_sends_the_same_frames_is_the_same_call() {
    let shop = Shop::unary(defaults, paid).await;
    let client = compressing(&shop).await;
    assert_eq!(client.charge(pay("k")).await.unwrap().get_ref(), "run 1");
    assert_replay(&client.charge(pay("k")).await, "run 1");
}

#[tokio::test]
async fn by_default_another_compression_is_another_call() {
    let shop = Shop::unary(defaults, paid).await;
    shop.client().await.charge(pay("k")).await.unwrap();
    let answer = compressing(&shop).await.charge(pay("k")).await;
    assert_eq!(assert_refused(&answer, ProblemKind::KeyReused), Some(-1));
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_recipe_that_reads_the_message_makes_them_one() {
    let recipe = FingerprintRecipe::closure("message-1", |head, body| match message(head, body) {
        Some(message) => [b"message".to_vec(), message].concat(),
        None => [b"frames:".to_vec(), body.to_vec()].concat(),
    });
    let shop = Shop::unary(|settings| settings.fingerprint(recipe), paid).await;
    shop.client().await.charge(pay("k")).await.unwrap();
    let client = compressing(&shop).await;
    assert_replay(&client.charge(pay("k")).await, "run 1");
    // And still tells apart what is not the same.
    let other = crate::shop::keyed("k", "200 THB".to_owned());
    assert_refused(&client.charge(other).await, ProblemKind::KeyReused);
    assert_eq!(shop.runs(), 1);
}

fn message(head: &Parts, body: &[u8]) -> Option<Vec<u8>> {
    let [message] = messages(body)?.try_into().ok()?;
    if !message.compressed {
        return Some(message.bytes.to_vec());
    }
    assert_eq!(head.headers["grpc-encoding"], "gzip");
    let mut bytes = Vec::new();
    let mut gzip = flate2::read::GzDecoder::new(message.bytes);
    gzip.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

#[tokio::test]
async fn a_compressed_answer_is_replayed_to_who_accepts_it() {
    let shop = Shop::unary(defaults, paid).await;
    let client = accepting(&shop).await;
    let first = client.charge(pay("k")).await.unwrap();
    assert_eq!(said(first.metadata(), "grpc-encoding"), "gzip");
    assert_replay(&client.charge(pay("k")).await, "run 1");

    for accepted in ["gzip", "identity,deflate, gzip"] {
        let (answer, _) = shop
            .raw(wire("k").header("grpc-accept-encoding", accepted))
            .await;
        assert!(answer.is_replay(), "{accepted}");
    }
}

#[tokio::test]
async fn who_does_not_accept_it_gets_a_clear_status() {
    let shop = Shop::unary(defaults, paid).await;
    let first = accepting(&shop).await.charge(pay("k")).await.unwrap();
    assert_eq!(first.get_ref(), "run 1");
    let answer = shop.client().await.charge(pay("k")).await;
    assert_eq!(
        assert_refused(&answer, ProblemKind::ResponseNotKept),
        Some(-1)
    );
    assert!(answer.unwrap_err().message().contains(" gzip,"));
    let deflate = wire("k").header("grpc-accept-encoding", "identity, deflate, gzi");
    let (answer, _) = shop.raw(deflate).await;
    assert_eq!(answer.header("idempotency-error"), "response_not_kept");
    // The record stands: who accepts it gets it.
    assert_replay(&accepting(&shop).await.charge(pay("k")).await, "run 1");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn an_answer_that_is_not_compressed_suits_everybody() {
    let shop = Shop::unary(defaults, paid).await;
    shop.client().await.charge(pay("k")).await.unwrap();
    assert_replay(&accepting(&shop).await.charge(pay("k")).await, "run 1");
}

#[test]
fn frames_are_taken_apart_or_refused_whole() {
    let body = b"\0\0\0\0\x02hi\x01\0\0\0\x03abc\0\0\0\0\0";
    let parted = messages(body).unwrap();
    let parted: Vec<_> = parted
        .iter()
        .map(|one| (one.compressed, one.bytes))
        .collect();
    assert_eq!(parted, [(false, &b"hi"[..]), (true, b"abc"), (false, b"")]);
    assert_eq!(messages(b""), Some(vec![]));
    let ends = [7, 15, 20];
    for cut in 1..body.len() {
        assert_eq!(
            messages(&body[..cut]).is_some(),
            ends.contains(&cut),
            "{cut}"
        );
    }
    assert_eq!(messages(b"\x02\0\0\0\0"), None);
    assert_eq!(messages(b"\0\xff\xff\xff\xffhi"), None);
}
