//! Answers that are not kept: they reach the first client as they are produced, and their status
//! stands for them afterwards.

use bytes::Bytes;

use crate::h1::with_length;
use crate::h2;
use crate::message::Request;
use crate::patience::patient;
use crate::puppet::{Puppet, WIRES, Wire, ran};

/// A pause that no test waits out: what comes behind it never comes.
const HOUR: &str = "3600000";

async fn is_not_kept(puppet: &Puppet, request: &Request, status: u16) {
    for wire in WIRES {
        let again = puppet.send(wire, request).await;
        let problem = again.problem(409, "response_not_kept");
        assert_eq!(problem["original_status"], status);
    }
}

/// The first bytes of the answer arrive although its end is an hour away.
async fn arrives_as_it_is_produced(puppet: &Puppet, name: &str, request: Request) {
    let request = request.header("x-puppet-stream", format!("2,{HOUR}"));
    for wire in WIRES {
        let name = format!("{name}-{wire:?}");
        let mut request = request.clone().key(&name);
        request.path = format!("/do/{name}");
        match wire {
            Wire::H1 => {
                let mut connection = puppet.h1().await;
                connection.write(&with_length(&request)).await;
                let head = connection.head().await.expect("an answer");
                assert_eq!(head.status, 200);
                let chunk = connection.chunk().await.expect("a chunk");
                assert_eq!(chunk, b"chunk 0\n");
                is_not_kept(puppet, &request, 200).await;
            }
            Wire::H2 => {
                let (answer, mut body) = puppet.h2().await.open(&request).await;
                let data = Bytes::copy_from_slice(&request.body);
                body.send_data(data, true).expect("the stream is open");
                let answer = patient("an answer", answer).await;
                let mut body = answer.expect("an answer").into_body();
                let data = h2::next_data(&mut body).await.expect("a frame");
                assert_eq!(data.as_deref(), Some(b"chunk 0\n".as_slice()));
                is_not_kept(puppet, &request, 200).await;
            }
        }
        // That the first client has left by now changes nothing.
        is_not_kept(puppet, &request, 200).await;
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn events_arrive_one_by_one_and_are_not_kept() {
    let puppet = Puppet::start(&[]);
    for content_type in ["text/event-stream", "Text/Event-Stream; charset=utf-8"] {
        let header = format!("content-type: {content_type}");
        let request = Request::post("").header("x-puppet-header", header);
        let name = if content_type.contains(';') {
            "upper"
        } else {
            "plain"
        };
        arrives_as_it_is_produced(&puppet, name, request).await;
    }
}

#[tokio::test]
async fn behind_the_limit_an_answer_arrives_as_it_is_produced_and_is_not_kept() {
    // The first chunk has eight bytes.
    let puppet = Puppet::start(&["--max-response-bytes", "7"]);
    arrives_as_it_is_produced(&puppet, "over", Request::post("")).await;
}

#[tokio::test]
async fn an_answer_over_the_limit_reaches_the_first_client_whole_and_runs_once() {
    let puppet = Puppet::start(&["--max-response-bytes", "80"]);
    let whole: String = (0..20).map(|n| format!("chunk {n}\n")).collect();
    let bodies = [
        // Found out while it is read, and known from its length.
        ("stream", "x-puppet-stream", "20,1", whole.len()),
        ("sized", "x-puppet-body-size", "81", 81),
        ("large", "x-puppet-body-size", "3000000", 3_000_000),
    ];
    for (name, order, value, length) in bodies {
        for wire in WIRES {
            let name = format!("{name}-{wire:?}");
            let request = Request::post(&name)
                .key(&name)
                .header("x-puppet-status", "201")
                .header("x-puppet-header", "location: /1")
                .header(order, value);
            let first = puppet.send(wire, &request).await;
            first.fresh(201);
            assert_eq!(first.header("location"), Some("/1"));
            assert_eq!(first.body.len(), length);
            if order == "x-puppet-stream" {
                assert_eq!(first.text(), whole);
            }
            is_not_kept(&puppet, &request, 201).await;
            // The identity is kept with the status: another body is another request.
            let other = request.body("amount=1");
            puppet.send(wire, &other).await.problem(422, "key_reused");
            assert_eq!(puppet.count(&name).await, ran(1));
        }
    }
}

#[tokio::test]
async fn trailers_of_an_answer_over_the_limit_reach_the_first_client() {
    let puppet = Puppet::start(&["--max-response-bytes", "10"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("te", "trailers")
            .header("x-puppet-stream", "3,1")
            .header("x-puppet-trailer", "x-sum: 1");
        let first = puppet.send(wire, &request).await;
        first.fresh(200);
        assert_eq!(first.text(), "chunk 0\nchunk 1\nchunk 2\n");
        assert_eq!(first.trailers, [("x-sum".to_owned(), b"1".to_vec())]);
        is_not_kept(&puppet, &request, 200).await;
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}
