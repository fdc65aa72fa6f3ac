//! The store in a file, beside the same rows in the same table of the same file, with a commit of
//! its own for each claim and each completion, and a read by the unique key for a replay.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rusqlite::{Connection, params};
use tokio::sync::oneshot;
use tower_idempotency::{ClaimRequest, Outcome, Owner, ScopedKey, SqliteStore};

use crate::arguments::Arguments;
use crate::run::{Measured, Plan};
use crate::side::{Ours, Side};

pub async fn measure(arguments: &Arguments) -> Vec<Measured> {
    let folder = folder();
    let file = folder.join("bench.db");
    let store = SqliteStore::open(&file).expect("a new file");
    let plan = Plan {
        store: "sqlite",
        about: format!(
            "SQLite {}: a commit for each move, `synchronous = FULL`",
            rusqlite::version()
        ),
        slice: Duration::from_millis(300),
        jobs: 12_000,
        kept: 500,
        stride: 1,
        elsewhere: false,
        expired: 1_000,
        short_life: Duration::from_millis(2),
        processes: Box::new(Vec::new),
    };
    let bare = Bare::open(&file);
    let measured = crate::run::measure(arguments, plan, Ours::new(store), bare).await;
    let _ = std::fs::remove_dir_all(folder);
    measured
}

/// Two threads, each with one connection and prepared statements; one writes, the other one reads.
#[derive(Clone)]
struct Bare {
    writes: mpsc::Sender<(Write, oneshot::Sender<usize>)>,
    reads: mpsc::Sender<(ScopedKey, oneshot::Sender<Bytes>)>,
}

enum Write {
    Claim(ClaimRequest),
    Complete(ScopedKey, Owner, Outcome),
    Purge(usize),
}

impl Bare {
    fn open(file: &Path) -> Self {
        let open = || {
            let connection = Connection::open(file).expect("the file");
            let settings = "PRAGMA synchronous = FULL; PRAGMA cache_size = -8000; \
                 PRAGMA wal_autocheckpoint = 4000";
            connection.execute_batch(settings).expect("settings");
            connection
        };
        let (writer, reader) = (open(), open());
        let (writes, queue) = mpsc::channel();
        std::thread::spawn(move || write(&writer, &queue));
        let (reads, queue) = mpsc::channel();
        std::thread::spawn(move || read(&reader, &queue));
        Self { writes, reads }
    }

    async fn write(&self, write: Write) -> usize {
        let (reply, answer) = oneshot::channel();
        self.writes.send((write, reply)).expect("the thread runs");
        answer.await.expect("the thread answers")
    }
}

fn write(connection: &Connection, queue: &mpsc::Receiver<(Write, oneshot::Sender<usize>)>) {
    let prepare = |sql| connection.prepare(sql).expect("a statement");
    let mut claim = prepare(
        "INSERT INTO idempotency_records (lookup_key, namespace, scope, key, state,
             attempt, owner, fingerprint, lease_until, created_at, expires_at,
             retention, checksum)
         VALUES (?1, ?2, ?3, ?4, 'started', 1, ?5, ?6, ?7, ?8, ?9, ?10, zeroblob(17))
         ON CONFLICT (lookup_key) DO NOTHING",
    );
    let mut complete = prepare(
        "UPDATE idempotency_records
         SET state = 'completed', status = 201, lease_until = NULL, completed_at = ?4,
             checksum = zeroblob(17), outcome = ?3
         WHERE lookup_key = ?1 AND state = 'started' AND owner = ?2",
    );
    let mut purge = prepare(
        "DELETE FROM idempotency_records WHERE id IN (
             SELECT id FROM idempotency_records
             WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2)",
    );
    while let Ok((write, reply)) = queue.recv() {
        let changed = match write {
            Write::Claim(request) => {
                let (key, now) = (&request.key, now());
                let micros = |time: Duration| time.as_micros() as i64;
                claim.execute(params![
                    key.as_bytes(),
                    key.namespace(),
                    key.scope(),
                    key.key(),
                    &request.owner.as_bytes()[..],
                    &request.fingerprint.as_bytes()[..],
                    now + micros(request.lease),
                    now,
                    now + micros(request.retention),
                    micros(request.retention),
                ])
            }
            Write::Complete(key, owner, outcome) => {
                let (owner, outcome) = (&owner.as_bytes()[..], &outcome.as_bytes()[..]);
                complete.execute(params![key.as_bytes(), owner, outcome, now()])
            }
            Write::Purge(limit) => purge.execute(params![now(), limit as i64]),
        };
        let _ = reply.send(changed.expect("a commit"));
    }
}

fn read(connection: &Connection, queue: &mpsc::Receiver<(ScopedKey, oneshot::Sender<Bytes>)>) {
    let mut select = connection
        .prepare(
            "SELECT outcome, state, attempt, owner, fingerprint, created_at, completed_at,
                 expires_at, retention
             FROM idempotency_records WHERE lookup_key = ?1",
        )
        .expect("a statement");
    while let Ok((key, reply)) = queue.recv() {
        let outcome = select.query_row([key.as_bytes()], |row| {
            let outcome = row.get_ref(0)?.as_blob()?;
            Ok(Bytes::copy_from_slice(outcome))
        });
        let _ = reply.send(outcome.expect("a row"));
    }
}

impl Side for Bare {
    type Held = (ScopedKey, Owner);

    async fn claim(&self, request: &ClaimRequest) -> Self::Held {
        assert_eq!(self.write(Write::Claim(request.clone())).await, 1);
        (request.key.clone(), request.owner)
    }

    async fn complete(&self, held: &Self::Held, outcome: &Outcome) {
        let write = Write::Complete(held.0.clone(), held.1, outcome.clone());
        assert_eq!(self.write(write).await, 1);
    }

    async fn replay(&self, request: &ClaimRequest) {
        let (reply, answer) = oneshot::channel();
        let read = (request.key.clone(), reply);
        self.reads.send(read).expect("the thread runs");
        let outcome = answer.await.expect("the thread answers");
        Outcome::decode(outcome).expect("an outcome");
    }

    async fn purge(&self, limit: usize) -> usize {
        self.write(Write::Purge(limit)).await
    }
}

fn now() -> i64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.map_or(0, |since| since.as_micros() as i64)
}

fn folder() -> PathBuf {
    // Beside the program: a temporary directory may be kept in memory, where a flush costs nothing.
    let program = std::env::current_exe().expect("the path of this program");
    let parent = program.parent().expect("a directory");
    let folder = parent.join(format!("bench-sqlite-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a new directory");
    folder
}
