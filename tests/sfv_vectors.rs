//! The item vectors of the HTTP working group, through a strict puppet.
//!
//! The data is not part of this crate. To run it, with a checkout of
//! <https://github.com/httpwg/structured-field-tests> somewhere:
//!
//! `SFV_TESTS_DIR=path/to/structured-field-tests cargo test --test sfv_vectors -- --ignored --nocapture`

#![cfg(unix)]
#![allow(dead_code, reason = "the support modules are those of tests/wire.rs")]

#[path = "support/example.rs"]
mod example;
#[path = "support/h1.rs"]
mod h1;
#[path = "support/h2.rs"]
mod h2;
#[path = "support/message.rs"]
mod message;
#[path = "support/patience.rs"]
mod patience;
#[path = "support/puppet.rs"]
mod puppet;

use std::path::{Path, PathBuf};

use http::HeaderValue;
use serde_json::Value;

use crate::message::Request;
use crate::puppet::{Puppet, WIRES, Wire, ran};

struct Vector {
    name: String,
    lines: Vec<Vec<u8>>,
    /// The decoded key, if the value is a String that may be one.
    key: Option<String>,
}

#[tokio::test]
#[ignore = "needs the vectors: see the head of this file"]
async fn every_string_that_may_be_a_key_is_one_and_every_other_item_is_refused() {
    let directory = std::env::var_os("SFV_TESTS_DIR").expect("SFV_TESTS_DIR names their folder");
    let vectors = items(Path::new(&directory));
    assert!(
        !vectors.is_empty(),
        "no item vectors in {}",
        directory.display()
    );
    let puppet = Puppet::start(&["--syntax", "strict", "--scope", "header:x-caller"]);
    for wire in WIRES {
        let mut keys = 0;
        let mut refused = 0;
        let mut unsendable = 0;
        let mut oversized = 0;
        for (number, vector) in vectors.iter().enumerate() {
            let name = format!("{wire:?}-{number}");
            // Vectors that hold the same key must not meet.
            let request = Request::post(&name).header("x-caller", &name);
            let sent = (vector.lines.iter()).fold(request.clone(), |sent, line| sent.key(line));
            let is_header = |line: &Vec<u8>| HeaderValue::from_bytes(line).is_ok();
            if !vector.lines.iter().all(is_header) {
                // Control characters: no HTTP library takes them, and the client's sends none.
                assert_eq!(vector.key, None, "{}", vector.name);
                if wire == Wire::H1 {
                    let answer = puppet.send(wire, &sent).await;
                    assert_eq!(answer.status, 400, "{}", vector.name);
                }
                assert_eq!(puppet.count(&name).await, ran(0), "{}", vector.name);
                unsendable += 1;
                continue;
            }
            let answer = puppet.send(wire, &sent).await;
            match &vector.key {
                Some(key) => {
                    answer.fresh(200);
                    let same = puppet.send(wire, &request.key(quote(key))).await;
                    same.is_replay_of(&answer, &[]);
                    assert_eq!(puppet.count(&name).await, ran(1), "{}", vector.name);
                    keys += 1;
                }
                // Larger than all headers of a request may be; the layer does not see it.
                None if answer.status == 431 => {
                    assert!(vector.lines.concat().len() > 8 * 1024, "{}", vector.name);
                    assert_eq!(puppet.count(&name).await, ran(0), "{}", vector.name);
                    oversized += 1;
                }
                None => {
                    answer.problem(400, "invalid_key");
                    assert_eq!(puppet.count(&name).await, ran(0), "{}", vector.name);
                    refused += 1;
                }
            }
        }
        println!(
            "{wire:?}: {} item vectors: {keys} keys, {refused} refused by the layer, {oversized} too \
             large for a request, {unsendable} that no header can hold",
            vectors.len(),
        );
    }
}

/// All vectors of items in the folder's files.
fn items(directory: &Path) -> Vec<Vector> {
    let files = std::fs::read_dir(directory).expect("a folder of vectors");
    let files = files.map(|file| file.expect("a file").path());
    let is_json = |file: &PathBuf| {
        file.extension()
            .is_some_and(|extension| extension == "json")
    };
    let mut files: Vec<_> = files.filter(is_json).collect();
    files.sort();
    let mut vectors = Vec::new();
    for file in files {
        let text = std::fs::read(&file).expect("a file of vectors");
        let read: Vec<Value> = serde_json::from_slice(&text).expect("a list of vectors");
        let items = read.iter().filter(|vector| vector["header_type"] == "item");
        vectors.extend(items.map(|vector| item(&file, vector)));
    }
    vectors
}

fn item(file: &Path, vector: &Value) -> Vector {
    let lines = vector["raw"].as_array().expect("lines");
    let lines = lines.iter().map(|line| line.as_str().expect("text"));
    let lines: Vec<_> = lines.map(|line| line.as_bytes().to_vec()).collect();
    // Strings are JSON strings there, all other types are numbers, booleans or objects.
    let string = vector["expected"][0].as_str();
    let may_be_a_key = |key: &&str| {
        // A key has one line, 1 to 255 bytes, and something in it besides spaces.
        lines.len() == 1 && (1..=255).contains(&key.len()) && !key.trim_matches(' ').is_empty()
    };
    let file = file.file_name().unwrap_or_default().display();
    Vector {
        name: format!("{file}: {}", vector["name"]),
        key: string.filter(may_be_a_key).map(str::to_owned),
        lines,
    }
}

fn quote(key: &str) -> String {
    let escaped = key.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"")
}
