//! What a handler's end means for its key.

use crate::message::Request;
use crate::patience::patient;
use crate::puppet::{Count, Puppet, WIRES, ran};

#[tokio::test]
pub async fn a_handler_that_panics_closes_the_connection_and_is_never_run_again() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        for (when, finished) in [("before", 0), ("after", 1)] {
            let name = format!("{wire:?}-{when}");
            let request = Request::post(&name).key(&name);
            let panicking = request.clone().header("x-puppet-panic", when);
            puppet.is_not_answered(wire, &panicking).await;
            for _ in 0..2 {
                let again = puppet.send(wire, &request).await;
                again.problem(409, "outcome_unknown");
                let after = again.header("retry-after").expect("a time");
                assert!(after.parse::<u64>().expect("seconds") >= 1);
            }
            let other = request.body("amount=1");
            puppet.send(wire, &other).await.problem(422, "key_reused");
            let count = Count {
                started: 1,
                finished,
            };
            assert_eq!(puppet.count(&name).await, count);
        }
    }
    // The server is none the worse for it.
    for wire in WIRES {
        puppet.send(wire, &Request::post("next")).await.fresh(200);
    }
}

#[tokio::test]
async fn other_streams_of_a_connection_outlive_a_panic() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    let mut connection = puppet.h2().await;
    let panicking = Request::post("panics")
        .key("panics")
        .header("x-puppet-panic", "after");
    assert!(connection.send_or_reset(&panicking).await.is_err());
    connection
        .send(&Request::post("lives").key("lives"))
        .await
        .fresh(200);
}

#[tokio::test]
async fn a_panic_while_others_wait_is_told_to_them() {
    let puppet = Puppet::start(&["--in-flight", "wait:60000"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let panicking = request
            .clone()
            .header("x-puppet-delay-ms", "300")
            .header("x-puppet-panic", "after");
        let waiting = async {
            puppet.until_started(&name, 1).await;
            puppet.send(wire, &request).await
        };
        let ((), answer) = tokio::join!(puppet.is_not_answered(wire, &panicking), waiting);
        answer.problem(409, "outcome_unknown");
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn where_that_is_said_to_be_safe_a_retry_runs_again_after_a_panic() {
    let puppet = Puppet::start(&["--on-abandoned", "rerun"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let panicking = request.clone().header("x-puppet-panic", "before");
        puppet.is_not_answered(wire, &panicking).await;
        puppet.is_not_answered(wire, &panicking).await;
        // Another request may not use the chance.
        let other = request.clone().body("amount=1");
        puppet.send(wire, &other).await.problem(422, "key_reused");
        let third = puppet.send(wire, &request).await;
        third.fresh(200);
        puppet.send(wire, &request).await.is_replay_of(&third, &[]);
        let count = Count {
            started: 3,
            finished: 1,
        };
        assert_eq!(puppet.count(&name).await, count);
    }
}

#[tokio::test]
async fn a_handler_that_did_nothing_frees_the_key_whatever_its_status() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let refused = request
            .clone()
            .header("x-puppet-status", "422")
            .header("x-puppet-override", "not-executed");
        puppet.send(wire, &refused).await.fresh(422);
        puppet.send(wire, &refused).await.fresh(422);
        // A corrected body may use the same key.
        let corrected = request.body("amount=1");
        let first = puppet.send(wire, &corrected).await;
        first.fresh(200);
        puppet
            .send(wire, &corrected)
            .await
            .is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(3));
    }
}

#[tokio::test]
async fn a_handler_may_keep_a_failure() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        for status in ["500", "503", "401", "429"] {
            let name = format!("{wire:?}-{status}");
            let request = Request::post(&name)
                .key(&name)
                .header("x-puppet-status", status)
                .header("x-puppet-override", "keep")
                .header("x-puppet-stream", "3,1");
            let first = puppet.send(wire, &request).await;
            assert_eq!(first.text(), "chunk 0\nchunk 1\nchunk 2\n");
            puppet.send(wire, &request).await.is_replay_of(&first, &[]);
            assert_eq!(puppet.count(&name).await, ran(1));
        }
    }
}

#[tokio::test]
async fn a_handler_may_say_that_nobody_knows() {
    let hold = Puppet::start(&[]);
    let rerun = Puppet::start(&["--on-abandoned=rerun"]);
    for wire in WIRES {
        for order in [("x-puppet-status", "504"), ("x-puppet-stream", "3,1")] {
            let name = format!("{wire:?}-{}", order.0);
            let request = Request::post(&name).key(&name).header(order.0, order.1);
            let unknown = request.clone().header("x-puppet-override", "unknown");
            // The first client is told what the handler says.
            let status = if order.1 == "504" { 504 } else { 200 };
            for puppet in [&hold, &rerun] {
                let first = puppet.send(wire, &unknown).await;
                first.fresh(status);
            }
            let again = hold.send(wire, &request).await;
            again.problem(409, "outcome_unknown");
            assert_eq!(hold.count(&name).await, ran(1));
            rerun.send(wire, &request).await.fresh(status);
            assert_eq!(rerun.count(&name).await, ran(2));
        }
    }
}

#[tokio::test]
async fn each_preset_keeps_what_it_says() {
    let all = [
        200, 201, 202, 204, 303, 400, 401, 402, 403, 404, 407, 408, 409, 410, 412, 422, 425, 429,
        500, 501, 502, 503, 504,
    ];
    let presets: [(&str, &[u16]); 3] = [
        (
            "standard",
            &[401, 403, 407, 408, 425, 429, 500, 501, 502, 503, 504],
        ),
        ("draft", &[]),
        ("stripe", &[401, 403, 407, 409, 429]),
    ];
    for (preset, released) in presets {
        let puppet = Puppet::start(&["--retention", preset]);
        for wire in WIRES {
            for status in all {
                let name = format!("{wire:?}-{status}");
                let request = Request::post(&name)
                    .key(&name)
                    .header("x-puppet-status", status.to_string());
                let first = puppet.send(wire, &request).await;
                first.fresh(status);
                let again = puppet.send(wire, &request).await;
                if released.contains(&status) {
                    again.fresh(status);
                    assert_eq!(puppet.count(&name).await, ran(2), "{preset}");
                } else {
                    again.is_replay_of(&first, &[]);
                    assert_eq!(puppet.count(&name).await, ran(1), "{preset}");
                }
            }
        }
    }
}

#[tokio::test]
async fn after_a_failure_that_frees_the_key_the_retry_succeeds() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let failing = request.clone().header("x-puppet-status", "503");
        puppet.send(wire, &failing).await.fresh(503);
        let second = puppet.send(wire, &request).await;
        second.fresh(200);
        assert_eq!(second.text(), format!("{{\"run\":2,\"name\":\"{name}\"}}"));
        puppet.send(wire, &failing).await.is_replay_of(&second, &[]);
        assert_eq!(puppet.count(&name).await, ran(2));
    }
}

#[tokio::test]
async fn when_its_retention_is_over_a_key_is_as_new() {
    let puppet = Puppet::start(&["--lease-ms", "200", "--retention-ms", "300"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let first = puppet.send(wire, &request).await;
        first.fresh(200);
        let again = async {
            loop {
                let again = puppet.send(wire, &request).await;
                if !again.is_replay() {
                    break again;
                }
                again.is_replay_of(&first, &[]);
            }
        };
        let again = patient("a new run", again).await;
        again.fresh(200);
        assert_eq!(again.text(), format!("{{\"run\":2,\"name\":\"{name}\"}}"));
    }
}

#[tokio::test]
async fn an_order_that_cannot_be_followed_is_named() {
    let puppet = Puppet::start(&[]);
    let orders = [
        ("x-puppet-status", "abc"),
        ("x-puppet-status", "101"),
        ("x-puppet-delay-ms", "-1"),
        ("x-puppet-body-base64", "?"),
        ("x-puppet-body-size", "much"),
        ("x-puppet-stream", "3"),
        ("x-puppet-header", "no colon"),
        ("x-puppet-trailer", "a b: c"),
        ("x-puppet-panic", "now"),
        ("x-puppet-override", "maybe"),
        ("x-puppet-rewrite", "yes"),
        ("x-puppet-dance", "1"),
    ];
    for (name, value) in orders {
        let answer = Request::post("orders").header(name, value);
        let answer = puppet.send(WIRES[0], &answer).await;
        answer.fresh(400);
        assert!(answer.text().starts_with(name), "{answer:?}");
    }
    let twice = Request::post("orders")
        .header("x-puppet-status", "201")
        .header("x-puppet-status", "202");
    puppet.send(WIRES[1], &twice).await.fresh(400);
}
