//! The example `client`, and what jitter does to a thousand of them.

#[path = "../../examples/client/simulate.rs"]
mod simulate;

use std::process::Command;

use simulate::{CLIENTS, Jitter, peak, report, simulate};

use crate::support;

#[test]
fn each_payment_of_the_example_is_charged_once() {
    let output = Command::new(support::example("client")).output();
    let output = output.expect("the example runs");
    let stdout = String::from_utf8(output.stdout).expect("text");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    let expected = [
        ("503, 503, 201 ", "charged [1000]"),
        ("cut, 201 replayed ", "charged [1000, 2000]"),
        ("201, cut, 201 replayed ", "charged [1000, 2000, 3000]"),
        ("409, 201 replayed ", "charged [1000, 2000, 3000, 4000]"),
    ];
    assert_eq!(lines.len(), expected.len(), "{stdout}");
    for (line, (seen, charged)) in lines.iter().zip(expected) {
        assert!(line.contains(seen) && line.ends_with(charged), "{line}");
    }
}

#[test]
fn the_example_plots_the_simulation() {
    let output = Command::new(support::example("client"))
        .arg("--simulate")
        .output();
    let output = output.expect("the example runs");
    assert!(output.status.success());
    let stdout = String::from_utf8(output.stdout).expect("text");
    let mut plot = Vec::new();
    report(&mut plot).expect("a vector takes it");
    // Its randomness is seeded.
    assert_eq!(stdout.as_bytes(), plot);
    let last = stdout.lines().last().expect("lines");
    assert!(last.contains(": 1000 without jitter, "), "{last}");
    assert!(stdout.contains("\n 0.5s  1000 ####"), "{stdout}");
}

#[test]
fn the_example_refuses_a_wrong_flag_in_one_line_with_exit_code_2() {
    let output = Command::new(support::example("client"))
        .arg("--fast")
        .output();
    let output = output.expect("the example runs");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
}

#[test]
fn jitter_spreads_a_thousand_clients_after_an_outage() {
    let (without, with) = (simulate(Jitter::None), simulate(Jitter::Full));
    let all = usize::try_from(CLIENTS).unwrap();
    // All come back in one moment; spread over half a second they are twenty in 10 ms, and the second
    // retries of some are among them.
    assert_eq!(peak(&without), all);
    assert!(peak(&with) * 15 <= all, "{}", peak(&with));
    assert!(
        with.len() >= 4 * all && without.len() == 4 * all,
        "{}",
        with.len()
    );
}
