//! The puppet as a process: its flags, its published policy, its end.

use crate::h1::with_length;
use crate::message::Request;
use crate::puppet::{Puppet, WIRES, Wire, ran, run};

#[test]
fn flags_that_cannot_be_followed_are_one_line_and_exit_code_2() {
    let flags: [(&[&str], &str); 26] = [
        (&["--nope", "1"], "--nope"),
        (&["nope"], "nope"),
        (&["--addr"], "--addr"),
        (&["--addr", "here"], "--addr"),
        (&["--store", "sqlite"], "sqlite"),
        (
            &["--store", "postgres", "--url", "redis://localhost"],
            "postgres",
        ),
        (&["--store=redis"], "redis"),
        (&["--store", "paper"], "paper"),
        (&["--lease-ms", "abc"], "--lease-ms"),
        (&["--lease-ms", "-5"], "--lease-ms"),
        (&["--lease-ms=0"], "lease"),
        (&["--lease-ms", "18446744073709551615"], "lease"),
        (&["--retention-ms", "0"], "retention"),
        (
            &["--lease-ms", "1000", "--retention-ms", "1000"],
            "retention",
        ),
        (&["--retention-ms", "18446744073709551615"], "retention"),
        (&["--max-request-bytes", "1k"], "--max-request-bytes"),
        (&["--max-response-bytes", ""], "--max-response-bytes"),
        (&["--missing-key", "required"], "--missing-key"),
        (&["--syntax", "Strict"], "--syntax"),
        (&["--retention", "all"], "--retention"),
        (&["--on-abandoned", "ask"], "--on-abandoned"),
        (&["--on-outage", "panic"], "--on-outage"),
        (&["--in-flight", "wait"], "--in-flight"),
        (&["--in-flight", "wait:0"], "in_flight"),
        (&["--scope", "header:"], "--scope"),
        (&["--fingerprint", "xml"], "--fingerprint"),
    ];
    for (flags, named) in flags {
        let output = run(flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {output:?}");
        assert_eq!(output.stdout, b"", "{flags:?}");
        let text = String::from_utf8(output.stderr).expect("text");
        assert_eq!(text.lines().count(), 1, "{flags:?}: {text}");
        assert!(text.contains(named), "{flags:?}: {text}");
    }
}

#[test]
fn help_lists_every_flag() {
    let output = run(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).expect("text");
    for flag in [
        "--addr",
        "--store",
        "--url",
        "--lease-ms",
        "--retention-ms",
        "--max-request-bytes",
        "--max-response-bytes",
        "--missing-key",
        "--syntax",
        "--retention",
        "--on-abandoned",
        "--on-outage",
        "--in-flight",
        "--scope",
        "--fingerprint",
    ] {
        assert!(text.contains(flag), "{flag}: {text}");
    }
}

#[tokio::test]
async fn the_policy_says_what_is_in_force() {
    let default = Puppet::start(&[]);
    let set = Puppet::start(&[
        "--lease-ms=2000",
        "--retention-ms=60000",
        "--max-request-bytes=1000",
        "--max-response-bytes=2000",
        "--missing-key=reject",
        "--syntax=strict",
        "--retention=stripe",
        "--on-abandoned=rerun",
        "--on-outage=pass-through",
        "--in-flight=wait:1500",
        "--scope=header:x-caller",
        "--fingerprint=json",
    ]);
    for wire in WIRES {
        let request = Request::new("GET", "/policy");
        let answer = default.send(wire, &request).await;
        answer.fresh(200);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let policy = answer.json();
        assert_eq!(policy["retention_seconds"], 86_400.0);
        assert_eq!(policy["lease_seconds"], 30.0);
        assert_eq!(policy["required"], false);
        assert_eq!(policy["syntax"], "lenient");
        assert_eq!(policy["kept"], "standard");
        let policy = set.send(wire, &request).await.json();
        assert_eq!(policy["retention_seconds"], 60.0);
        assert_eq!(policy["lease_seconds"], 2.0);
        assert_eq!(policy["max_request_bytes"], 1000);
        assert_eq!(policy["max_response_bytes"], 2000);
        assert_eq!(policy["required"], true);
        assert_eq!(policy["syntax"], "strict");
        assert_eq!(policy["kept"], "stripe");
        assert_eq!(policy["on_abandoned"], "rerun");
        assert_eq!(policy["on_outage"], "pass-through");
        assert_eq!(policy["in_flight"], "wait");
        assert_eq!(policy["wait_seconds"], 1.5);
        assert_ne!(
            policy["fingerprint"],
            default.send(wire, &request).await.json()["fingerprint"]
        );
    }
}

#[tokio::test]
async fn outside_of_the_layer_there_are_the_counts_the_policy_and_nothing_else() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        for path in ["/", "/do", "/counts", "/policy/"] {
            let answer = puppet.send(wire, &Request::new("GET", path)).await;
            answer.fresh(404);
        }
        let name = format!("{wire:?}");
        for path in [format!("/count/{name}"), "/policy".to_owned()] {
            // Not guarded: the key means nothing here.
            let post = Request::new("POST", &path).key("k");
            puppet.send(wire, &post).await.fresh(405);
        }
        let count = Request::new("GET", &format!("/count/{name}")).key("not a key");
        let answer = puppet.send(wire, &count).await;
        assert_eq!(answer.text(), r#"{"started":0,"finished":0}"#);
    }
}

#[tokio::test]
async fn sigterm_lets_a_request_have_its_answer() {
    for wire in WIRES {
        let puppet = Puppet::start(&[]);
        let slow = Request::post("slow")
            .key("slow")
            .header("x-puppet-status", "201")
            .header("x-puppet-delay-ms", "500");
        // Connections without a request do not hold up the end.
        let mut idle_h1 = puppet.h1().await;
        idle_h1.send(&Request::post("idle")).await.fresh(200);
        let mut idle_h2 = puppet.h2().await;
        idle_h2.send(&Request::post("idle")).await.fresh(200);
        let silent = puppet.h1().await;
        let terminate = async {
            puppet.until_started("slow", 1).await;
            puppet.terminate();
        };
        let (answer, ()) = tokio::join!(puppet.send(wire, &slow), terminate);
        answer.fresh(201);
        let (status, said) = puppet.ended().await;
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(said.contains("drained: 3 started, 3 finished"), "{said}");
        drop(silent);
    }
}

#[tokio::test]
pub async fn sigterm_lets_a_handler_whose_client_left_reach_its_end() {
    let puppet = Puppet::start(&[]);
    let slow = Request::post("slow")
        .key("slow")
        .header("x-puppet-delay-ms", "500");
    let mut connection = puppet.h1().await;
    connection.write(&with_length(&slow)).await;
    puppet.until_started("slow", 1).await;
    drop(connection);
    puppet.terminate();
    let (status, said) = puppet.ended().await;
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("drained: 1 started, 1 finished"), "{said}");
}

#[tokio::test]
async fn sigterm_lets_a_stream_end() {
    for wire in WIRES {
        let puppet = Puppet::start(&[]);
        let events = Request::post("events")
            .key("events")
            .header("x-puppet-header", "content-type: text/event-stream")
            .header("x-puppet-stream", "5,100");
        let terminate = async {
            puppet.until_finished("events", 1).await;
            puppet.terminate();
        };
        let (answer, ()) = tokio::join!(puppet.send(wire, &events), terminate);
        assert_eq!(answer.text().lines().count(), 5, "{answer:?}");
        let (status, said) = puppet.ended().await;
        assert_eq!(status.code(), Some(0), "{said}");
    }
}

#[tokio::test]
async fn half_a_request_does_not_hold_up_the_end_for_ever() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("half").key("half");
    let bytes = with_length(&request);
    let mut stuck = [puppet.h1().await, puppet.h1().await];
    stuck[0].write(&bytes[..10]).await;
    stuck[1].write(&bytes[..bytes.len() - 1]).await;
    // Answered on another connection: the halves have been read by now, or never will be.
    puppet
        .send(Wire::H1, &Request::post("whole"))
        .await
        .fresh(200);
    puppet.terminate();
    let (status, said) = puppet.ended().await;
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("drained: 1 started, 1 finished"), "{said}");
}

#[tokio::test]
async fn sigterm_without_work_ends_at_once_and_closes_the_port() {
    let puppet = Puppet::start(&["--addr", "127.0.0.1:0"]);
    let addr = puppet.addr();
    puppet
        .send(Wire::H1, &Request::post("one"))
        .await
        .fresh(200);
    assert_eq!(puppet.count("one").await, ran(1));
    puppet.terminate();
    let (status, _) = puppet.ended().await;
    assert_eq!(status.code(), Some(0));
    assert!(std::net::TcpStream::connect(addr).is_err());
}
