//! A retry that arrives while the first request runs.

use crate::h1::{H1, with_length};
use crate::message::Request;
use crate::puppet::{Count, Puppet, WIRES, Wire, ran};

/// Starts a handler that runs as long as the test.
async fn start(puppet: &Puppet, name: &str, request: &Request) -> H1 {
    let slow = request.clone().header("x-puppet-delay-ms", "3600000");
    let mut connection = puppet.h1().await;
    connection.write(&with_length(&slow)).await;
    puppet.until_started(name, 1).await;
    connection
}

#[tokio::test]
pub async fn a_retry_of_a_request_that_runs_is_told_when_to_come_back() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let _running = start(&puppet, &name, &request).await;
        for _ in 0..2 {
            let again = puppet.send(wire, &request).await;
            again.problem(409, "in_progress");
            let after = again.header("retry-after").expect("a time");
            assert!(after.parse::<u64>().expect("whole seconds") >= 1, "{after}");
        }
        // Another request with its key is told so at once.
        let other = request.clone().body("amount=1");
        puppet.send(wire, &other).await.problem(422, "key_reused");
        let other = request.header("authorization", "Bearer 2");
        puppet
            .send(wire, &other)
            .await
            .problem(422, "caller_changed");
        let count = Count {
            started: 1,
            finished: 0,
        };
        assert_eq!(puppet.count(&name).await, count);
    }
}

#[tokio::test]
pub async fn where_retries_wait_they_get_the_first_answer() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("x-puppet-status", "201");
        let slow = request.clone().header("x-puppet-delay-ms", "300");
        let retry = || async {
            puppet.until_started(&name, 1).await;
            puppet.send(wire, &request).await
        };
        let mismatch = async {
            puppet.until_started(&name, 1).await;
            puppet.send(wire, &request.clone().body("amount=1")).await
        };
        let first = puppet.send(wire, &slow);
        let (first, second, third, mismatch) = tokio::join!(first, retry(), retry(), mismatch);
        first.fresh(201);
        second.is_replay_of(&first, &[]);
        third.is_replay_of(&first, &[]);
        mismatch.problem(422, "key_reused");
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn a_wait_that_is_over_ends_with_a_conflict() {
    let puppet = Puppet::start(&["--in-flight=wait:20"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let _running = start(&puppet, &name, &request).await;
        puppet
            .send(wire, &request)
            .await
            .problem(409, "in_progress");
    }
}

#[tokio::test]
async fn of_many_at_once_one_runs() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    let request = Request::post("race")
        .key("race")
        .header("x-puppet-delay-ms", "20");
    let wires = [Wire::H1, Wire::H2].into_iter().cycle().take(20);
    let all = wires.map(|wire| puppet.send(wire, &request));
    let answers = futures_util::future::join_all(all).await;
    let fresh: Vec<_> = answers
        .iter()
        .filter(|answer| !answer.is_replay())
        .collect();
    assert_eq!(fresh.len(), 1, "{fresh:?}");
    for answer in &answers {
        assert_eq!(answer.status, 200);
        assert_eq!(answer.text(), r#"{"run":1,"name":"race"}"#);
    }
    assert_eq!(puppet.count("race").await, ran(1));
}
