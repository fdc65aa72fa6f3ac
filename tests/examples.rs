//! The small examples as programs.

#[path = "support/example.rs"]
mod support;

use std::process::Command;

#[test]
fn the_custom_store_runs_a_job_once() {
    let output = Command::new(support::example("custom_store")).output();
    let output = output.expect("the example runs");
    assert!(output.status.success());
    assert_eq!(output.stdout, b"First(100)\nRepeat(100)\n");
}

#[cfg(all(feature = "axum", feature = "sqlite-system"))]
#[test]
fn the_transaction_leaves_a_row_and_its_answer_or_neither() {
    let output = Command::new(support::example("transaction")).output();
    let output = output.expect("the example runs");
    assert!(output.status.success());
    let expected = "\
order-1, charge 1000: 201 charge 1 of 1000; 1 in the table
order-1, the same again: 201 charge 1 of 1000, replayed; 1 in the table
order-2, it fails before its commit: 503 ; 1 in the table
order-2, the same again: 201 charge 2 of 1000; 2 in the table
";
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn tonic_shows_each_way_in_which_a_call_is_answered() {
    let output = Command::new(support::example("tonic")).output();
    let output = output.expect("the example runs");
    assert!(output.status.success());
    let expected = "first: receipt 1 for 100 THB, attempt 1\n\
                    replay: receipt 1 for 100 THB, attempt 1 (replayed)\n\
                    mismatch: FailedPrecondition key_reused, back in -1 ms\n\
                    in flight: Aborted in_progress, back in 1000 ms\n\
                    its twin: receipt 2 for 50 THB, attempt 1\n\
                    replay: receipt 2 for 50 THB, attempt 1 (replayed)\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

#[test]
fn the_webhooks_update_each_order_once() {
    let output = Command::new(support::example("webhook")).output();
    let output = output.expect("the example runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    // Each event twice, one update each.
    for order in [
        "200 replayed   order A: paid, 100 points, 1 update\n",
        "200 replayed   order B: expired, 0 points, 1 update\n",
    ] {
        assert_eq!(said.matches(order).count(), 1, "{said}");
    }
    assert_eq!(said.lines().count(), 9, "{said}");
}

#[test]
fn the_gateways_take_and_refund_once() {
    let output = Command::new(support::example("gateways")).output();
    let output = output.expect("the example runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    for fact in [
        "warning: PayPal Payments v2 knows a key for 1080 h, we for 168 h",
        "charges, questions                       (2, 6)",
        "paid, our record gone, the same again    409 already paid",
        "invoices, refunds, inquiries             (1, 1, 1)",
        "mails                                    1",
    ] {
        assert!(said.contains(fact), "{fact:?} is missing in\n{said}");
    }
}

#[test]
fn hyper_refuses_a_bad_address_in_one_line_with_exit_code_2() {
    let output = Command::new(support::example("hyper")).arg("here").output();
    let output = output.expect("the example runs");
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[cfg(unix)]
#[tokio::test]
async fn hyper_replays_and_ends_at_sigterm() {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpStream;

    let mut service = tokio::process::Command::new(support::example("hyper"))
        .arg("127.0.0.1:0")
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the example runs");
    let mut line = String::new();
    let stdout = service.stdout.take().expect("a pipe");
    let mut stdout = BufReader::new(stdout);
    stdout.read_line(&mut line).await.expect("a first line");
    let addr = line.trim().strip_prefix("listening on ");
    let addr = addr.expect("an address");

    for is_replay in [false, true] {
        let mut stream = TcpStream::connect(addr).await.expect("a connection");
        let request = "POST /orders HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\
                       Idempotency-Key: \"o-1\"\r\nContent-Length: 3\r\n\r\ntea";
        let sent = stream.write_all(request.as_bytes()).await;
        sent.expect("the request is sent");
        let mut answer = String::new();
        let read = stream.read_to_string(&mut answer).await;
        read.expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
        assert!(answer.ends_with("\r\n\r\norder 1: tea\n"), "{answer}");
        let marker = answer.contains("\r\nidempotency-replayed: true\r\n");
        assert_eq!(marker, is_replay, "{answer}");
    }

    let pid = service.id().expect("it runs").to_string();
    let told = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(told.expect("kill runs").success());
    assert!(service.wait().await.expect("it ends").success());
}

#[cfg(feature = "memory")]
#[test]
fn the_load_test_asks_in_three_ways_and_refuses_flags_that_it_does_not_know() {
    let run = |arguments: &[&str]| {
        let output = Command::new(support::example("loadtest"))
            .args(arguments)
            .output();
        output.expect("the example runs")
    };
    let output = run(&["--seconds", "1", "--concurrency", "2", "--size", "64"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    for kind in ["first", "replay", "in flight"] {
        assert!(
            printed.lines().any(|line| line.starts_with(kind)),
            "{printed}"
        );
    }
    for wrong in [&["--turbo", "1"][..], &["--store", "redis"], &["--seconds"]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
