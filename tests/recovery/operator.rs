//! The example `operator`, on every store that another process can see.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use http::StatusCode;
use tower_idempotency::{
    Admission, Idempotency, IdempotencyKey, PrefixedStore, ScopedKey, Store, store,
};

use crate::engine::{first, replayed, request};

#[path = "../support/example.rs"]
mod support;

static OPERATOR: LazyLock<PathBuf> = LazyLock::new(|| support::example("operator"));

#[cfg(feature = "sqlite-system")]
#[tokio::test]
async fn an_operator_closes_what_is_abandoned_in_a_file() {
    let folder = crate::sqlite_file::Folder::new();
    let path = folder.file().display().to_string();
    let url = format!("sqlite:{path}");
    operate(&url).await;
    // The same file, said in another way.
    let told = operator(&["--store", "sqlite", "--url", &path, "purge"]);
    assert_eq!(done(&told), "removed=0 unresolved=0\n");
}

#[cfg(feature = "sqlite-system")]
#[test]
fn an_operator_who_mistypes_a_file_is_told_so_and_none_is_made() {
    let folder = crate::sqlite_file::Folder::new();
    let path = folder.file().with_file_name("mistyped.db");
    let name = path.display().to_string();
    for url in [
        format!("sqlite:{name}"),
        format!("sqlite://{name}"),
        format!(" SQLite:{name} "),
    ] {
        let told = refused(&operator(&["--url", &url, "list-abandoned"]));
        assert!(told.contains("there is no SQLite file"), "{told}");
        assert!(told.contains("mistyped.db"), "{told}");
    }
    let told = refused(&operator(&["--store", "sqlite", "--url", &name, "purge"]));
    assert!(told.contains("there is no SQLite file"), "{told}");
    assert!(!path.exists());
}

#[cfg(feature = "postgres")]
#[tokio::test]
async fn an_operator_closes_what_is_abandoned_in_postgresql() {
    operate(crate::postgres_server::shared().url()).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_operator_closes_what_is_abandoned_in_redis() {
    operate(&crate::redis_server::shared_url()).await;
}

#[test]
fn a_wrong_command_is_one_line_with_exit_code_2() {
    for words in [
        &["--url", "memory:"][..],
        &["--url", "memory:", "look"],
        &["--url", "memory:", "lookup"],
        &["--url", "memory:", "resolve", "--key", "k"],
        &["--url", "memory:", "resolve", "happened", "--key", "k"],
        &["--url", "memory:", "erase-scope"],
        &[
            "--url",
            "memory:",
            "erase-scope",
            "--scope",
            "7",
            "--key",
            "k",
        ],
        &["--url", "memory:", "lookup", "--key", ""],
        &["--url", "memory:", "lookup", "--colour", "red"],
        &["lookup", "--key", "k"],
        &["--store", "redis", "--url", "sqlite:keys.db", "purge"],
    ] {
        let told = operator(words);
        let stderr = String::from_utf8(told.stderr).unwrap();
        assert_eq!(told.status.code(), Some(2), "{words:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

/// As they stand in the document, on an empty store.
#[cfg(unix)]
#[test]
fn the_commands_of_the_runbook_are_commands() {
    let document = include_str!("../../OPERATIONS.md");
    let commands: Vec<_> = document
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("operator "))
        .collect();
    assert!(commands.len() > 4, "{commands:?}");
    for command in commands {
        let script = format!("operator() {{ \"$OPERATOR\" \"$@\"; }}\n{command}");
        let told = Command::new("sh")
            .args(["-c", &script])
            .env("OPERATOR", &*OPERATOR)
            .env("STORE", "memory:")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&told.stderr);
        assert!(
            matches!(told.status.code(), Some(0 | 1)),
            "{command}: {stderr}"
        );
    }
}

fn operator(words: &[&str]) -> Output {
    Command::new(&*OPERATOR).args(words).output().unwrap()
}

#[track_caller]
fn done(told: &Output) -> String {
    let stderr = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "{stderr}");
    String::from_utf8(told.stdout.clone()).unwrap()
}

#[track_caller]
fn refused(told: &Output) -> String {
    assert_eq!(told.status.code(), Some(1), "{told:?}");
    String::from_utf8(told.stderr.clone()).unwrap()
}

#[cfg_attr(
    not(any(feature = "postgres", feature = "redis", feature = "sqlite-system")),
    expect(dead_code, reason = "no store outlives the process")
)]
async fn operate(url: &str) {
    // Built before a lease begins.
    LazyLock::force(&OPERATOR);
    let prefix = IdempotencyKey::random().as_str().to_owned();
    let store = store::open(url).await.unwrap();
    let store: Arc<dyn Store> = Arc::new(PrefixedStore::new(store, &prefix));
    let engine = Idempotency::builder(store).lease(Duration::from_secs(600));
    let engine = engine.build().unwrap();
    let key = |key: &str| ScopedKey::new("http", "user 7", &IdempotencyKey::new(key).unwrap());
    let admit = async |name| engine.admit(&key(name), request("r")).await.unwrap();
    for name in ["paid", "free"] {
        let guard = first(admit(name).await);
        guard.attempt().annotate("order-1").await.unwrap();
        guard
            .attempt()
            .checkpoint("reserved", b"r\x01")
            .await
            .unwrap();
        let _ = guard.abandon().await;
    }
    let live = first(admit("live").await);

    let ask = |words: &[&str]| {
        let start = ["--url", url, "--prefix", &prefix];
        operator(&[&start[..], words].concat())
    };
    let at = |words: &[&'static str], key: &'static str| {
        let key = ["--scope", "user 7", "--key", key];
        ask(&[words, &key].concat())
    };
    let listed = done(&ask(&["list-abandoned"]));
    let mut lines: Vec<_> = listed.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines.len(), 2, "{listed}");
    assert!(
        lines[0].contains("scope=\"user 7\" key=\"free\" attempt=1"),
        "{listed}"
    );
    assert!(
        lines[1].contains("correlation=\"order-1\" finished=[\"reserved\"]"),
        "{listed}"
    );

    let shown = done(&at(&["lookup"], "paid"));
    assert!(
        shown.contains("abandoned") && shown.contains("r\\\\x01"),
        "{shown}"
    );
    assert!(refused(&at(&["lookup"], "none")).contains("no such record"));
    assert!(refused(&at(&["resolve", "not-happened"], "live")).contains("not abandoned"));

    let answer = [
        "resolve", "happened", "--status", "201", "--header", "x-a: b", "--body", "ok",
    ];
    assert!(done(&at(&answer, "paid")).contains("completed"));
    assert!(refused(&at(&answer, "paid")).contains("not abandoned"));
    let outcome = replayed(admit("paid").await);
    assert_eq!(outcome.status(), Some(StatusCode::CREATED));
    assert_eq!(outcome.headers().next().unwrap().0, "x-a");
    assert_eq!(&outcome.body()[..], b"ok");

    assert!(done(&at(&["resolve", "not-happened"], "free")).contains("released"));
    assert_eq!(first(admit("free").await).attempt().number(), 2);

    assert_eq!(done(&at(&["remove"], "paid")), "removed\n");
    assert!(refused(&at(&["remove"], "paid")).contains("no such record"));
    assert!(matches!(admit("paid").await, Admission::First(_)));
    let _ = live.release().await;

    let erased = ask(&["erase-scope", "--scope", "user 7"]);
    assert_eq!(done(&erased), "erased=3\n");
    assert!(refused(&at(&["lookup"], "live")).contains("no such record"));
    let again = ask(&["erase-scope", "--scope", "user 7"]);
    assert_eq!(done(&again), "erased=0\n");
}
