//! How much memory the records of a crate take: growth of the resident set, in a process for each.

use std::fmt::Write as _;
use std::process::{Command, ExitCode};

use http_body_util::BodyExt;
use tower::ServiceExt;

use crate::peer::{self, Peer, Settings};
use crate::service;

const RECORDS: u64 = 100_000;
/// Of a service that has been up for a while.
const BEFORE: u64 = 10_000;

pub fn report(quick: bool) -> String {
    if quick {
        return "### Memory\n\nNot measured with `--quick`.\n".to_owned();
    }
    let mut text = format!(
        "### Memory\n\nGrowth of the resident set over {RECORDS} first requests of 256 B, each with an answer \
         of 190 B in JSON and two headers.\n\n| | bytes for each record |\n|---|---:|\n"
    );
    for peer in Peer::ALL {
        let program = std::env::current_exe().expect("the program knows its path");
        let output = Command::new(program)
            .args(["--records", &format!("{peer:?}")])
            .output()
            .expect("the program can start itself");
        let grown = String::from_utf8_lossy(&output.stdout);
        let _ = writeln!(text, "| {} | {} |", peer.name(), grown.trim());
    }
    text
}

/// What the child process does.
pub fn measure(name: &str) -> ExitCode {
    let peer = Peer::ALL
        .into_iter()
        .find(|peer| format!("{peer:?}") == name);
    let (Some(peer), Some(_)) = (peer, resident()) else {
        eprintln!("peers: no such crate, or no /proc");
        return ExitCode::FAILURE;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime can be built");
    runtime.block_on(async {
        let router = peer.before(service::charges(), Settings::default());
        let mut before = 0;
        for number in 0..BEFORE + RECORDS {
            if number == BEFORE {
                before = resident().unwrap_or_default();
            }
            let session = peer::session(number / crate::cost::KEYS_OF_A_SESSION);
            let body = vec![b'a'; 256];
            let request = peer::request("/charges", &key(number), &session, body);
            let Ok(response) = router.clone().oneshot(request).await;
            assert_eq!(response.status(), 201);
            response.into_body().collect().await.expect("a whole body");
        }
        let after = resident().unwrap_or_default();
        println!("{}", after.saturating_sub(before) / RECORDS);
    });
    // Emptying a full store is not what is measured.
    std::process::exit(0);
}

fn key(number: u64) -> String {
    format!("6f9619ff-8b86-4011-b42d-{number:012x}")
}

fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}
