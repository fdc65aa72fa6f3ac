//! Two processes that want the same keys.

use std::process::{Command, Stdio};

use tower_idempotency::{Claimed, Store};

use super::support::{options, shared_url};
use super::*;

const URL: &str = "TEST_CONTENDER_URL";
const PREFIX: &str = "TEST_CONTENDER_PREFIX";
const KEYS: usize = 1_000;

#[test]
fn of_two_processes_that_race_for_1000_keys_each_key_has_one_winner() {
    let url = shared_url();
    let prefix = format!("race:{:016x}:", rand::random::<u64>());
    let contenders: Vec<_> = (0..2)
        .map(|_| {
            let mut contender = Command::new(std::env::current_exe().unwrap());
            contender.args([
                "--exact",
                "processes::contender",
                "--ignored",
                "--nocapture",
            ]);
            contender.env(URL, &url).env(PREFIX, &prefix);
            contender.stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut winners = vec![0; KEYS];
    for contender in contenders {
        let output = contender.wait_with_output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{said}");
        for won in said.lines().filter_map(|line| line.strip_prefix("won ")) {
            winners[won.parse::<usize>().unwrap()] += 1;
        }
    }
    let wrong: Vec<_> = (0..KEYS).filter(|n| winners[*n] != 1).collect();
    assert!(wrong.is_empty(), "no winner, or two, of {wrong:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "one of the two processes that the test above starts"]
async fn contender() {
    let options = options().key_prefix(std::env::var(PREFIX).unwrap());
    let store = options.connect(&std::env::var(URL).unwrap()).await.unwrap();
    // A bounded crowd, so that both processes are at the same keys most of the time.
    for crowd in (0..KEYS).collect::<Vec<_>>().chunks(50) {
        let claims = crowd.iter().map(|n| {
            let store = store.clone();
            let n = *n;
            tokio::spawn(async move {
                let claimed = store.claim(&request(&format!("{n}"))).await.unwrap();
                matches!(claimed, Claimed::Acquired { .. }).then_some(n)
            })
        });
        for claim in claims.collect::<Vec<_>>() {
            if let Some(won) = claim.await.unwrap() {
                println!("won {won}");
            }
        }
    }
}
