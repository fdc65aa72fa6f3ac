//! What only the inside shows: plans, threads, schemas, panics.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use rusqlite::Connection;

use super::*;
use crate::fingerprint::Fingerprint;
use crate::key::IdempotencyKey;

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("tower-idempotency-unit-{}-{made}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("unit.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn deadline() -> Deadline {
    Deadline::after(BUSY_TIMEOUT)
}

fn migrated(folder: &Folder) -> Connection {
    let connection = connection::writer(&folder.file(), deadline()).unwrap();
    schema::migrate(&connection, schema::MIGRATIONS, deadline()).unwrap();
    connection
}

fn key() -> ScopedKey {
    ScopedKey::new("http", "alice", &IdempotencyKey::random())
}

fn request() -> ClaimRequest {
    ClaimRequest::new(key(), Fingerprint::of(&[b"request"]))
}

fn details(connection: &Connection, explain: &str, column: usize) -> Vec<String> {
    let mut statement = connection.prepare(explain).unwrap();
    // Raw: what is not bound is NULL, which is all the same to a plan.
    let rows = statement.raw_query().mapped(|row| row.get(column));
    rows.collect::<Result<_, _>>().unwrap()
}

#[test]
fn the_queries_use_the_indexes_and_sort_nothing() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let by_key = "SELECT outcome FROM idempotency_records WHERE lookup_key = ?1".to_owned();
    for (sql, index) in [
        (table::due_sql(), "idempotency_records_expiry"),
        (table::abandoned_sql(), "idempotency_records_started"),
        (by_key, "sqlite_autoindex_idempotency_records_1"),
    ] {
        let plan = details(&connection, &format!("EXPLAIN QUERY PLAN {sql}"), 3);
        // A scan, or a second step that sorts, grows with the table.
        assert_eq!(plan.len(), 1, "{plan:?}");
        assert!(plan[0].starts_with("SEARCH"), "{plan:?}");
        assert!(plan[0].contains(index), "{plan:?}");
    }
}

#[test]
fn a_completion_touches_no_index_but_that_of_what_is_under_way() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let root = |name: &str| -> i64 {
        let sql = "SELECT rootpage FROM sqlite_master WHERE name = ?1";
        connection.query_row(sql, [name], |row| row.get(0)).unwrap()
    };
    let opened = |sql: &str| -> Vec<i64> {
        let mut statement = connection.prepare(&format!("EXPLAIN {sql}")).unwrap();
        let mut rows = statement.raw_query();
        let mut roots = Vec::new();
        while let Some(row) = rows.next().unwrap() {
            if row.get::<_, String>(1).unwrap() == "OpenWrite" {
                roots.push(row.get(3).unwrap());
            }
        }
        roots.sort_unstable();
        roots
    };
    let (table, started, expiry) = (
        root("idempotency_records"),
        root("idempotency_records_started"),
        root("idempotency_records_expiry"),
    );
    assert_eq!(opened(&table::update_sql()), [table, started]);
    // And the look at it is one that can tell.
    let mut all = [table, started, expiry];
    all.sort_unstable();
    assert_eq!(opened(&table::update_with_expiry_sql()), all);
}

#[test]
fn a_commit_is_flushed_before_it_is_acknowledged() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let pragma = |name: &str| -> i64 {
        let sql = format!("PRAGMA {name}");
        connection.query_row(&sql, [], |row| row.get(0)).unwrap()
    };
    assert_eq!(pragma("synchronous"), 2, "FULL");
    assert_eq!(pragma("fullfsync"), 1);
    assert_eq!(pragma("checkpoint_fullfsync"), 1);
}

#[test]
fn the_writer_leaves_no_waiting_to_sqlite() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let sql = "PRAGMA busy_timeout";
    let timeout: i64 = connection.query_row(sql, [], |row| row.get(0)).unwrap();
    assert_eq!(timeout, 0);
}

#[test]
fn the_reader_cannot_write() {
    let folder = Folder::new();
    let _writer = migrated(&folder);
    let reader = connection::reader(&folder.file(), BUSY_TIMEOUT, deadline()).unwrap();
    let written = reader.execute("DELETE FROM idempotency_records", []);
    let error = error::failed(written.unwrap_err());
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(error.to_string().contains("read-only"), "{error}");
}

#[tokio::test]
async fn the_threads_end_after_the_last_handle_and_what_it_queued() {
    let folder = Folder::new();
    let (store, threads) = SqliteStore::start(&folder.file(), &SqliteOptions::new()).unwrap();
    let request = request();
    let last = store.clone();
    drop(store);
    let (reply, answer) = Reply::channel();
    let claim = request.clone();
    let call = Call::new(deadline(), reply, move |table, now| {
        table.claim(&claim, now)
    });
    call.send(&last.inner.writer);
    drop(last);
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(matches!(answer.await, Ok(Claimed::Acquired { .. })));
    let connection = migrated(&folder);
    let mut reads = Reads::prepare(&connection).unwrap();
    assert!(reads.load(&request.key).unwrap().is_some());
}

#[tokio::test]
async fn a_move_that_panics_takes_only_its_own_batch_along() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let panicked = store.make(None, |_, _| -> Result<(), StoreError> { panic!("a bug") });
    let error = panicked.await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let panicked = store.look(|_, _| -> Result<(), StoreError> { panic!("a bug") });
    let error = panicked.await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let claimed = store.claim(&request()).await;
    assert!(matches!(claimed, Ok(Claimed::Acquired { .. })));
}

#[tokio::test]
async fn a_panic_leaves_no_transaction_open() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let request = request();
    let claim = request.clone();
    let panicked = store.make(None, move |table, now| -> Result<(), StoreError> {
        let _ = table.claim(&claim, now);
        panic!("a bug")
    });
    panicked.await.unwrap_err();
    // Another connection can write, and what the panic interrupted was undone.
    let other = Connection::open(folder.file()).unwrap();
    other.busy_timeout(Duration::from_secs(60)).unwrap();
    other.execute_batch("BEGIN IMMEDIATE; COMMIT").unwrap();
    assert_eq!(store.lookup(&request.key).await.unwrap(), None);
}

/// Claims that the writer finds in its queue together, on a file that somebody has tampered with.
struct OneBatch {
    _folder: Folder,
    connection: Connection,
    requests: [ClaimRequest; 4],
    claimed: Vec<Result<Claimed, StoreError>>,
    commits: u64,
}

impl OneBatch {
    /// The third claim is the one that `tampering` is about: its scope begins with `bad`, and takes
    /// ten pages.
    async fn with(tampering: &str) -> Self {
        let folder = Folder::new();
        let connection = migrated(&folder);
        connection.execute_batch(tampering).unwrap();
        let mut requests = [request(), request(), request(), request()];
        requests[2].key = ScopedKey::new("http", &"bad".repeat(14_000), &IdempotencyKey::random());
        let (queue, moves) = mpsc::channel(8);
        let answers = requests.clone().map(|request| {
            let (reply, answer) = Reply::channel();
            let apply = move |table: &mut Table<'_>, now| table.claim(&request, now);
            Call::new(deadline(), reply, apply).send(&queue);
            answer
        });
        drop(queue);
        let writing = thread::spawn(move || {
            let shared = Shared::default();
            writer::run(&connection, moves, &shared);
            (connection, shared.commits.load(Ordering::Relaxed))
        });
        let (connection, commits) = writing.join().unwrap();
        let mut claimed = Vec::new();
        for answer in answers {
            claimed.push(answer.await);
        }
        Self {
            _folder: folder,
            connection,
            requests,
            claimed,
            commits,
        }
    }

    /// That a claim was acquired exactly where its record is there.
    fn kept(&self) -> Vec<bool> {
        let mut table = Table::prepare(&self.connection).unwrap();
        let requests = self.requests.iter().zip(&self.claimed);
        requests
            .map(|(request, claimed)| {
                let kept = table.reads.load(&request.key).unwrap().is_some();
                match claimed {
                    Ok(Claimed::Acquired { .. }) => assert!(kept),
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => assert!(!kept, "{error}"),
                }
                kept
            })
            .collect()
    }
}

#[tokio::test]
async fn a_statement_that_fails_fails_alone() {
    let batch = OneBatch::with(
        "CREATE TRIGGER no AFTER INSERT ON idempotency_records WHEN NEW.scope LIKE 'bad%'
         BEGIN SELECT RAISE(ABORT, 'no'); END;",
    )
    .await;
    assert_eq!(batch.kept(), [true, true, false, true]);
    assert_eq!(batch.commits, 1);
}

#[tokio::test]
async fn a_failure_that_takes_the_transaction_along_fails_alone() {
    let batch = OneBatch::with(
        "CREATE TRIGGER no AFTER INSERT ON idempotency_records WHEN NEW.scope LIKE 'bad%'
         BEGIN SELECT RAISE(ROLLBACK, 'no'); END;",
    )
    .await;
    assert_eq!(batch.kept(), [true, true, false, true]);
    assert_eq!(batch.commits, 1);
}

#[tokio::test]
async fn a_record_that_the_disk_has_no_room_for_fails_alone() {
    // The pages that the tables have by now, and two more.
    let folder = Folder::new();
    let pages: i64 = migrated(&folder)
        .query_row("PRAGMA page_count", [], |row| row.get(0))
        .unwrap();
    let batch = OneBatch::with(&format!("PRAGMA max_page_count = {}", pages + 2)).await;
    assert_eq!(batch.kept(), [true, true, false, true]);
    let full = batch.claimed[2].as_ref().unwrap_err();
    assert_eq!(full.kind(), StoreErrorKind::Unavailable);
    assert!(full.to_string().contains("disk is full"), "{full}");
}

#[tokio::test]
async fn a_commit_that_fails_is_unavailable_for_all_of_its_batch() {
    // A debt that is asked for at the commit only.
    let batch = OneBatch::with(
        "PRAGMA foreign_keys = ON;
         CREATE TABLE parents (id INTEGER PRIMARY KEY);
         CREATE TABLE orphans (
             parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED
         );
         CREATE TRIGGER debt AFTER INSERT ON idempotency_records WHEN NEW.scope LIKE 'bad%'
         BEGIN INSERT INTO orphans VALUES (7); END;",
    )
    .await;
    assert_eq!(batch.kept(), [false; 4]);
    assert_eq!(batch.commits, 0);
    for claimed in &batch.claimed {
        let error = claimed.as_ref().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        assert!(std::error::Error::source(error).is_some(), "{error}");
    }
    // And the connection is as good as before.
    assert!(batch.connection.is_autocommit());
}

#[tokio::test]
async fn a_waiter_of_this_process_is_woken_and_need_not_look() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let Claimed::Acquired { claim, .. } = store.claim(&request()).await.unwrap() else {
        panic!("a new key was not free");
    };
    let watch = store.inner.shared.watchers.watch(claim.key());
    let mut rings = Box::pin(watch.next());
    assert!((&mut rings).now_or_never().is_none());
    let _ = store.release(&claim).await.unwrap();
    assert!(rings.now_or_never().is_some());
}

#[test]
fn an_older_file_is_migrated_and_its_records_stay() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let request = request();
    let mut table = Table::prepare(&connection).unwrap();
    let claimed = table.claim(&request, 1);
    assert!(matches!(claimed, Ok(Claimed::Acquired { .. })));
    drop(table);
    let second = "ALTER TABLE idempotency_records ADD COLUMN note TEXT; \
         UPDATE idempotency_schema SET version = 2, readable_since = 1;";
    let migrations = [schema::MIGRATIONS, &[second]].concat();
    for _ in 0..2 {
        schema::migrate(&connection, &migrations, deadline()).unwrap();
    }
    // The release before goes on: it opens the file, reads and writes.
    schema::migrate(&connection, schema::MIGRATIONS, deadline()).unwrap();
    let mut table = Table::prepare(&connection).unwrap();
    assert!(table.reads.load(&request.key).unwrap().is_some());
    let claimed = table.claim(&self::request(), 1);
    assert!(matches!(claimed, Ok(Claimed::Acquired { .. })));
}

#[test]
fn a_migration_that_fails_changes_nothing() {
    let folder = Folder::new();
    let connection = migrated(&folder);
    let broken = "ALTER TABLE idempotency_records ADD COLUMN note TEXT; \
         UPDATE idempotency_schema SET version = 2; SELECT nonsense;";
    let migrations = [schema::MIGRATIONS, &[broken]].concat();
    let error = schema::migrate(&connection, &migrations, deadline()).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(connection.is_autocommit());
    let columns = details(&connection, "PRAGMA table_info(idempotency_records)", 1);
    assert!(!columns.contains(&"note".to_owned()));
    schema::migrate(&connection, schema::MIGRATIONS, deadline()).unwrap();
}

#[test]
fn an_sqlite_that_is_too_old_is_refused() {
    schema::check_library(3_037_000).unwrap();
    let error = schema::check_library(3_036_999).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(error.to_string().contains("3.37"), "{error}");
}
