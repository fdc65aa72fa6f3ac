//! Clients that leave, at each stage of a request, and what they find when they come back.

use std::ops::AsyncFn;

use ::h2::Reason;
use bytes::Bytes;

use crate::h1::{chunked, head, with_length};
use crate::message::Request;
use crate::puppet::{Count, Puppet, WIRES, Wire, ran};
use crate::raw_h2::RawH2;

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// Closes its HTTP/1.1 connection.
    Closes,
    /// Resets its HTTP/2 stream; the connection goes on.
    Resets,
    /// Its HTTP/2 connection breaks.
    Breaks,
}

const LEAVING: [Leaving; 3] = [Leaving::Closes, Leaving::Resets, Leaving::Breaks];

/// Sends a request, waits for what `seen` waits for, and leaves without an answer.
async fn leave(puppet: &Puppet, how: Leaving, request: &Request, seen: impl AsyncFn()) {
    match how {
        Leaving::Closes => {
            let mut connection = puppet.h1().await;
            connection.write(&with_length(request)).await;
            seen().await;
        }
        Leaving::Resets | Leaving::Breaks => {
            let mut connection = puppet.h2().await;
            let (answer, mut body) = connection.open(request).await;
            let data = Bytes::copy_from_slice(&request.body);
            body.send_data(data, true).expect("the stream is open");
            seen().await;
            if matches!(how, Leaving::Breaks) {
                return connection.cut().await;
            }
            body.send_reset(Reason::CANCEL);
            drop((answer, body));
            // Frames are read in order: when this is answered, the reset has arrived.
            let count = Request::new("GET", "/count/other");
            connection.send(&count).await.fresh(200);
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_within_the_head_leaves_nothing() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        match wire {
            Wire::H1 => {
                let bytes = head(&request, "Content-Length: 10\r\n");
                let mut connection = puppet.h1().await;
                connection.write(&bytes[..bytes.len() - 20]).await;
            }
            Wire::H2 => {
                let mut raw = RawH2::connect(puppet.addr()).await;
                raw.send_half_a_head(&request).await;
            }
        }
        puppet.send(wire, &request).await.fresh(200);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn a_client_that_leaves_within_the_body_leaves_nothing() {
    let puppet = Puppet::start(&[]);
    let framings: [fn(&Request) -> Vec<u8>; 2] = [with_length, |request| {
        chunked(request, &[&request.body], "", "")
    }];
    for (number, framing) in framings.iter().enumerate() {
        let name = format!("h1-{number}");
        let request = Request::post(&name).key(&name);
        let bytes = framing(&request);
        let mut connection = puppet.h1().await;
        connection.write(&bytes[..bytes.len() - 8]).await;
        connection.finish().await;
        // When this comes, the server has seen that the body ends too early.
        if let Some(refused) = connection.answer_or_end(&request).await {
            refused.problem(400, "body_unreadable");
            connection.ends().await;
        }
        let first = puppet.send(Wire::H1, &request).await;
        first.fresh(200);
        puppet
            .send(Wire::H1, &request)
            .await
            .is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
    for how in [Leaving::Resets, Leaving::Breaks] {
        let name = format!("{how:?}");
        let request = Request::post(&name).key(&name);
        let mut connection = puppet.h2().await;
        let (answer, mut body) = connection.open(&request).await;
        let half = Bytes::copy_from_slice(&request.body[..5]);
        body.send_data(half, false).expect("the stream is open");
        // Frames are read in order: when this is answered, the half has arrived.
        let count = Request::new("GET", &format!("/count/{name}"));
        connection.send(&count).await.fresh(200);
        if matches!(how, Leaving::Resets) {
            body.send_reset(Reason::CANCEL);
            connection.send(&count).await.fresh(200);
        }
        drop((answer, body));
        connection.cut().await;
        let first = puppet.send(Wire::H2, &request).await;
        first.fresh(200);
        puppet
            .send(Wire::H2, &request)
            .await
            .is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
pub async fn a_handler_whose_client_left_reaches_its_end_once_and_the_retry_gets_its_answer() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for how in LEAVING {
        // A handler that was too fast proves nothing, so it gets slower until it is seen to run
        // after its client has left.
        for delay in [200, 2_000, 20_000] {
            let name = format!("{how:?}-{delay}");
            let request = Request::post(&name)
                .key(&name)
                .header("x-puppet-status", "201")
                .header("x-puppet-header", format!("location: /charges/{name}"))
                .header("x-puppet-delay-ms", delay.to_string());
            leave(&puppet, how, &request, async || {
                puppet.until_started(&name, 1).await;
            })
            .await;
            let left = puppet.count(&name).await;
            puppet.until_finished(&name, 1).await;
            // Waits until the answer is recorded, and runs nothing.
            let again = puppet.send(Wire::H1, &request).await;
            assert!(again.is_replay(), "{again:?}");
            assert_eq!(again.status, 201);
            let location = format!("/charges/{name}");
            assert_eq!(again.header("location"), Some(&*location));
            assert_eq!(again.text(), format!("{{\"run\":1,\"name\":\"{name}\"}}"));
            let other = puppet.send(Wire::H2, &request).await;
            assert_eq!(other.body, again.body);
            assert_eq!(puppet.count(&name).await, ran(1));
            let running = Count {
                started: 1,
                finished: 0,
            };
            if left == running {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_is_cut_off_at_any_byte_runs_once_in_the_end() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    let request = Request::post("cut").key("cut");
    let framings: [fn(&Request) -> Vec<u8>; 2] = [with_length, |request| {
        chunked(request, &[&request.body], "", "")
    }];
    for framing in framings {
        let bytes = framing(&request);
        for at in 0..=bytes.len() {
            puppet.h1().await.write(&bytes[..at]).await;
        }
    }
    let last = puppet.send(Wire::H1, &request).await;
    assert_eq!(last.status, 200);
    assert_eq!(last.text(), r#"{"run":1,"name":"cut"}"#);
    assert_eq!(puppet.count("cut").await, ran(1));
}

#[tokio::test]
pub async fn a_client_that_leaves_at_any_moment_finds_one_run() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for how in LEAVING {
        for moment in 0..40 {
            let name = format!("{how:?}-{moment}");
            let request = Request::post(&name).key(&name);
            let slow = request.clone().header("x-puppet-delay-ms", "1");
            let later = async || {
                for _ in 0..moment * 4 {
                    tokio::task::yield_now().await;
                }
            };
            leave(&puppet, how, &slow, later).await;
            let again = puppet.send(Wire::H2, &request).await;
            assert_eq!(again.status, 200, "{again:?}");
            assert_eq!(again.text(), format!("{{\"run\":1,\"name\":\"{name}\"}}"));
            assert_eq!(puppet.count(&name).await, ran(1));
        }
    }
}

#[tokio::test]
pub async fn an_answer_that_nobody_read_is_there_for_the_retry() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for how in LEAVING {
        let name = format!("{how:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("x-puppet-status", "201");
        leave(&puppet, how, &request, async || {
            puppet.until_finished(&name, 1).await;
        })
        .await;
        for wire in WIRES {
            let again = puppet.send(wire, &request).await;
            assert!(again.is_replay(), "{again:?}");
            assert_eq!(again.status, 201);
            assert_eq!(again.text(), format!("{{\"run\":1,\"name\":\"{name}\"}}"));
        }
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn a_streamed_answer_is_read_to_its_end_although_its_client_left() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for how in LEAVING {
        let name = format!("{how:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("x-puppet-stream", "10,30");
        // The handler has returned, and its body is being held.
        leave(&puppet, how, &request, async || {
            puppet.until_finished(&name, 1).await;
        })
        .await;
        let again = puppet.send(Wire::H1, &request).await;
        assert!(again.is_replay(), "{again:?}");
        let whole: String = (0..10).map(|n| format!("chunk {n}\n")).collect();
        assert_eq!(again.text(), whole);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn a_waiter_that_leaves_leaves_nothing() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for how in LEAVING {
        let name = format!("{how:?}");
        let request = Request::post(&name).key(&name);
        let slow = request.clone().header("x-puppet-delay-ms", "400");
        let first = async { puppet.send(Wire::H1, &slow).await };
        let others = async {
            puppet.until_started(&name, 1).await;
            leave(&puppet, how, &request, async || ()).await;
            puppet.send(Wire::H2, &request).await
        };
        let (first, again) = tokio::join!(first, others);
        again.is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}
