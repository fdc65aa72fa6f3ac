//! Many processes on one file, some of which are killed.
//!
//! The children are this test binary again, told by the environment what to do.

#[path = "support/sqlite.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_idempotency::{
    ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, Record, ScopedKey,
    SqliteStore, State, Store,
};

use self::support::Folder;

const JOB: &str = "TEST_CHILD_JOB";
const FILE: &str = "TEST_CHILD_FILE";
const NAME: &str = "TEST_CHILD_NAME";
/// Marks the lines that are the child's own, among those of the test runner.
const MARK: &str = "child: ";

fn request(name: &str) -> ClaimRequest {
    let key = ScopedKey::new("http", "alice", &IdempotencyKey::new(name).unwrap());
    ClaimRequest::new(key, Fingerprint::of(&[b"request"]))
}

/// What the attempt about this key ends with; no two are alike.
fn outcome(name: &str) -> Outcome {
    Outcome::value(name.repeat(20).as_bytes())
}

#[test]
fn of_eight_processes_one_is_granted_each_key() {
    const KEYS: usize = 1_000;
    let folder = Folder::new();
    drop(SqliteStore::open(folder.file()).unwrap());
    let processes: Vec<_> = (0..8)
        .map(|n| Process::start("claim", &KEYS.to_string(), &folder.file(), n))
        .collect();
    let processes = together(processes);
    let mut winners = BTreeMap::new();
    for (n, process) in processes.into_iter().enumerate() {
        for line in process.finished() {
            let before = winners.insert(line.clone(), n);
            assert_eq!(before, None, "{line} was granted twice");
        }
    }
    assert_eq!(winners.len(), KEYS, "keys that somebody was granted");
}

#[test]
fn fifty_processes_write_and_none_is_refused() {
    hammer(50, "30 requests");
}

/// `cargo test --release --features sqlite,testing --test sqlite_processes -- --ignored a_minute`
#[test]
#[ignore = "takes a minute"]
fn fifty_processes_write_for_a_minute_and_none_is_refused() {
    hammer(50, "60 seconds");
}

fn hammer(processes: usize, how_long: &str) {
    let folder = Folder::new();
    drop(SqliteStore::open(folder.file()).unwrap());
    let processes: Vec<_> = (0..processes)
        .map(|n| Process::start("write", how_long, &folder.file(), n))
        .collect();
    let mut written = 0;
    for process in together(processes) {
        for line in process.finished() {
            written += line.parse::<usize>().unwrap();
        }
    }
    println!("{written} first requests were answered");
    assert!(written > 0);
    // The file is whole and has them all.
    let file = rusqlite::Connection::open(folder.file()).unwrap();
    let one = |sql: &str| -> String { file.query_row(sql, [], |row| row.get(0)).unwrap() };
    assert_eq!(one("PRAGMA integrity_check"), "ok");
    let kept =
        one("SELECT CAST(count(*) AS TEXT) FROM idempotency_records WHERE state = 'completed'");
    assert_eq!(kept, written.to_string());
}

#[tokio::test]
async fn what_was_acknowledged_survives_a_kill() {
    let folder = Folder::new();
    let mut acknowledged = Vec::new();
    for round in 0..5 {
        let mut process = Process::start("go on", "", &folder.file(), round);
        process.go();
        for _ in 0..100 {
            acknowledged.push(process.next().expect("the child goes on"));
        }
        // In the middle of whatever it is doing.
        acknowledged.extend(process.kill());
    }
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(acknowledged.len() >= 500);
    for name in &acknowledged {
        assert_eq!(replayed(&store, name).await, outcome(name), "{name}");
    }
    let file = rusqlite::Connection::open(folder.file()).unwrap();
    let whole: String = file
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(whole, "ok");
}

#[tokio::test]
async fn a_claim_of_a_killed_process_is_held_and_not_run_again() {
    let folder = Folder::new();
    let mut process = Process::start("hold", "", &folder.file(), 0);
    process.go();
    let name = process.next().expect("a claim");
    process.kill();
    let store = SqliteStore::open(folder.file()).unwrap();
    let request = request(&name);
    let Ok(Claimed::Existing(record)) = store.claim(&request).await else {
        panic!("the claim of a dead process was granted to another");
    };
    assert!(matches!(record.state, State::Started { .. }));
    assert!(
        store
            .age(&request.key, Duration::from_secs(3_600))
            .await
            .unwrap()
    );
    let Ok(Claimed::Existing(record)) = store.claim(&request).await else {
        panic!("an unknown outcome was run again");
    };
    assert!(record.is_abandoned());
}

async fn replayed(store: &SqliteStore, name: &str) -> Outcome {
    match store.claim(&request(name)).await {
        Ok(Claimed::Existing(Record {
            state: State::Completed { outcome, .. },
            ..
        })) => outcome,
        other => panic!("{name} is no replay: {other:?}"),
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a child, which waits with its store open until it is told to [`go`](Self::go).
    fn start(job: &str, argument: &str, file: &Path, name: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_child", "--ignored", "--nocapture", "--quiet"])
            .env(JOB, format!("{job}:{argument}"))
            .env(FILE, file)
            .env(NAME, name.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Self { child, lines };
        assert_eq!(process.next().as_deref(), Some("ready"));
        process
    }

    fn go(&mut self) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(b"go\n").unwrap();
    }

    /// The child's next line.
    fn next(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, own) = line.split_once(MARK)?;
            Some(own.to_owned())
        })
    }

    /// All its other lines, once it is done.
    fn finished(mut self) -> Vec<String> {
        let lines = std::iter::from_fn(|| self.next()).collect();
        assert!(self.child.wait().unwrap().success(), "the child failed");
        lines
    }

    /// Kills it, and gives the whole lines that it had written by then.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let mut lines: Vec<_> = std::iter::from_fn(|| self.next()).collect();
        // The end of a line may have died with it.
        lines.pop();
        lines
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn together(mut processes: Vec<Process>) -> Vec<Process> {
    processes.iter_mut().for_each(Process::go);
    processes
}

/// What the other tests start in processes of their own.
#[test]
#[ignore = "started by the other tests"]
fn a_child() {
    let Ok(job) = std::env::var(JOB) else {
        return;
    };
    let (job, argument) = job.split_once(':').unwrap();
    let file = PathBuf::from(std::env::var_os(FILE).unwrap());
    let name = std::env::var(NAME).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = SqliteStore::open(file).unwrap();
        tell("ready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        match job {
            "claim" => claim_all(&store, argument.parse().unwrap()).await,
            "write" => write(&store, &name, argument).await,
            "go on" => go_on(&store, &name).await,
            "hold" => hold(&store).await,
            _ => panic!("no such job: {job}"),
        }
    });
}

fn tell(what: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{what}").unwrap();
    out.flush().unwrap();
}

/// Tells which keys it was granted.
async fn claim_all(store: &SqliteStore, keys: usize) {
    let claiming = (0..keys).map(|n| async move {
        let name = format!("key-{n}");
        match store.claim(&request(&name)).await.unwrap() {
            Claimed::Acquired { .. } => tell(&name),
            Claimed::Existing(_) => {}
        }
    });
    join_all(claiming).await;
}

async fn first(store: &SqliteStore, name: &str) {
    let Claimed::Acquired { claim, .. } = store.claim(&request(name)).await.unwrap() else {
        panic!("{name} was claimed before");
    };
    let completion = store.complete(&claim, &outcome(name), None).await.unwrap();
    assert_eq!(completion, Completion::Recorded);
}

/// Makes first requests, four at a time, and tells how many.
async fn write(store: &SqliteStore, name: &str, how_long: &str) {
    let (number, unit) = how_long.split_once(' ').unwrap();
    let number: u64 = number.parse().unwrap();
    let began = Instant::now();
    let writing = (0..4).map(|writer| async move {
        let mut written = 0;
        while match unit {
            "seconds" => began.elapsed() < Duration::from_secs(number),
            _ => written < number,
        } {
            first(store, &format!("{name}-{writer}-{written}")).await;
            written += 1;
        }
        written
    });
    let written: u64 = join_all(writing).await.into_iter().sum();
    tell(&written.to_string());
}

/// Makes first requests until it is killed, and tells each as soon as it is acknowledged.
async fn go_on(store: &SqliteStore, name: &str) {
    let going_on = (0..16).map(|writer| async move {
        for n in 0_u64.. {
            let key = format!("{name}-{writer}-{n}");
            first(store, &key).await;
            tell(&key);
        }
    });
    join_all(going_on).await;
}

async fn hold(store: &SqliteStore) {
    let claimed = store.claim(&request("held")).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired { .. }));
    tell("held");
    // Until it is killed, or whoever started it is gone.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}
