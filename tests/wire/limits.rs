//! Requests that are refused before their body: no byte of it is asked for, and nothing is claimed.

use crate::h1::{H1, chunked, head};
use crate::h2;
use crate::message::{Answer, Request};
use crate::puppet::{Puppet, WIRES, Wire, ran};

const LIMIT: usize = 64;

fn puppet(more: &[&str]) -> Puppet {
    let limit = LIMIT.to_string();
    let mut flags = vec!["--max-request-bytes", &limit];
    flags.extend_from_slice(more);
    Puppet::start(&flags)
}

/// Sends the head of a request that expects 100 Continue before its body, and reads what comes.
async fn expect(connection: &mut H1, request: &Request, length: usize) -> Answer {
    let framing = format!("Content-Length: {length}\r\nExpect: 100-continue\r\n");
    connection.write(&head(request, &framing)).await;
    connection.answer(request).await
}

#[tokio::test]
async fn a_body_of_the_limit_passes_and_one_of_a_byte_more_does_not() {
    let puppet = puppet(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let over = request.clone().body("x".repeat(LIMIT + 1));
        puppet
            .send(wire, &over)
            .await
            .problem(413, "body_too_large");
        assert_eq!(puppet.count(&name).await, ran(0));
        // Nothing was claimed: the key is free for another body.
        let full = request.body("x".repeat(LIMIT));
        let first = puppet.send(wire, &full).await;
        first.fresh(200);
        puppet.send(wire, &full).await.is_replay_of(&first, &[]);
        puppet
            .send(wire, &over)
            .await
            .problem(413, "body_too_large");
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_without_a_byte_of_the_body() {
    let puppet = puppet(&[]);
    let request = Request::post("declared").key("declared");
    let mut connection = puppet.h1().await;
    let framing = format!("Content-Length: {}\r\n", LIMIT + 1);
    connection.write(&head(&request, &framing)).await;
    let answer = connection.answer(&request).await;
    answer.problem(413, "body_too_large");

    let declared = request.header("content-length", (LIMIT + 1).to_string());
    let (answer, body) = puppet.h2().await.open(&declared).await;
    let answer = h2::read(answer).await.expect("an answer");
    answer.problem(413, "body_too_large");
    drop(body);
    assert_eq!(puppet.count("declared").await, ran(0));
}

#[tokio::test]
async fn a_body_of_undeclared_length_is_refused_at_the_byte_over_the_limit() {
    let puppet = puppet(&[]);
    for split in [1, LIMIT / 2, LIMIT] {
        let name = format!("chunked-{split}");
        let request = Request::post(&name).key(&name);
        let over = [b'x'; LIMIT + 1];
        let over = chunked(&request, &[&over[..split], &over[split..]], "", "");
        // The last chunk, the one without bytes, never comes.
        let mut connection = puppet.h1().await;
        connection.write(&over[..over.len() - 5]).await;
        let answer = connection.answer(&request).await;
        answer.problem(413, "body_too_large");
        assert_eq!(puppet.count(&name).await, ran(0));

        let full = [b'x'; LIMIT];
        let full = chunked(&request, &[&full[..split], &full[split..]], "", "");
        let mut connection = puppet.h1().await;
        connection.write(&full).await;
        connection.answer(&request).await.fresh(200);

        let name = format!("h2-{split}");
        let request = Request::post(&name).key(&name);
        let (answer, mut body) = puppet.h2().await.open(&request).await;
        for bytes in [split, LIMIT + 1 - split] {
            let data = vec![b'x'; bytes].into();
            body.send_data(data, false).expect("the stream is open");
        }
        let answer = h2::read(answer).await.expect("an answer");
        answer.problem(413, "body_too_large");
        assert_eq!(puppet.count(&name).await, ran(0));
    }
}

#[tokio::test]
async fn a_refused_request_is_not_asked_to_continue() {
    let puppet = puppet(&["--missing-key", "reject"]);
    let request = Request::post("expect");
    let refused = [
        (request.clone(), 10, 400, "missing_key"),
        (request.clone().key("\"a"), 10, 400, "invalid_key"),
        (request.clone().key("a").key("a"), 10, 400, "invalid_key"),
        (request.clone().key("a"), LIMIT + 1, 413, "body_too_large"),
    ];
    for (request, length, status, code) in refused {
        let mut connection = puppet.h1().await;
        let answer = expect(&mut connection, &request, length).await;
        assert!(answer.interim.is_empty(), "{answer:?}");
        answer.problem(status, code);
    }
    assert_eq!(puppet.count("expect").await, ran(0));
}

#[tokio::test]
async fn a_request_whose_body_is_needed_is_asked_to_continue() {
    let puppet = puppet(&[]);
    let request = Request::post("continue").key("a");
    let mut first = None;
    for _ in 0..2 {
        let mut connection = puppet.h1().await;
        let framing = format!(
            "Content-Length: {}\r\nExpect: 100-continue\r\n",
            request.body.len()
        );
        connection.write(&head(&request, &framing)).await;
        connection.continues().await;
        connection.write(&request.body).await;
        let answer = connection.answer(&request).await;
        match &first {
            None => first = Some(answer),
            Some(first) => answer.is_replay_of(first, &[]),
        }
    }
    assert_eq!(puppet.count("continue").await, ran(1));
    // The claim comes after the body: a client that was told to continue and leaves has claimed
    // nothing.
    let request = Request::post("left").key("b");
    let mut connection = puppet.h1().await;
    let framing = "Content-Length: 10\r\nExpect: 100-continue\r\n";
    connection.write(&head(&request, framing)).await;
    connection.continues().await;
    drop(connection);
    puppet.send(Wire::H1, &request).await.fresh(200);
    assert_eq!(puppet.count("left").await, ran(1));
}
