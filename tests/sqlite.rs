//! What the SQLite store promises beyond the store contract: durability, patience, typed errors.

#[path = "support/patience.rs"]
mod patience;
#[path = "support/sqlite.rs"]
mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::StatusCode;
use rusqlite::Connection;
use tokio::sync::Barrier;
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fenced, Fingerprint, IdempotencyKey, OnAbandoned,
    Outcome, Owner, Record, ScopedKey, SqliteOptions, SqliteStore, State, Store, StoreError,
    StoreErrorKind,
};

use self::patience::patient;
use self::support::Folder;

const HOUR: Duration = Duration::from_secs(60 * 60);

fn open(folder: &Folder) -> SqliteStore {
    SqliteStore::open(folder.file()).expect("a file that can be opened")
}

fn key(name: &str) -> ScopedKey {
    ScopedKey::new("http", "alice", &IdempotencyKey::new(name).unwrap())
}

fn request(name: &str) -> ClaimRequest {
    ClaimRequest::new(key(name), Fingerprint::of(&[b"request"]))
}

fn response(body: &[u8]) -> Outcome {
    Outcome::response(StatusCode::CREATED, &http::HeaderMap::new(), &[body], None)
}

async fn acquire(store: &impl Store, request: &ClaimRequest) -> Claim {
    match store.claim(request).await {
        Ok(Claimed::Acquired { claim, .. }) => claim,
        other => panic!("not acquired: {other:?}"),
    }
}

async fn existing(store: &impl Store, request: &ClaimRequest) -> Record {
    match store.claim(request).await {
        Ok(Claimed::Existing(record)) => record,
        other => panic!("nothing stood in the way: {other:?}"),
    }
}

async fn finish(store: &impl Store, name: &str) -> Outcome {
    let claim = acquire(store, &request(name)).await;
    let outcome = response(name.as_bytes());
    let completion = store.complete(&claim, &outcome, None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    outcome
}

fn outcome(record: &Record) -> &Outcome {
    match &record.state {
        State::Completed { outcome, .. } => outcome,
        state => panic!("not completed: {state:?}"),
    }
}

mod durability {
    use super::*;

    #[tokio::test]
    async fn a_kept_outcome_survives_the_store() {
        let folder = Folder::new();
        let kept = finish(&open(&folder), "key").await;
        let shown = existing(&open(&folder), &request("key")).await;
        assert_eq!(outcome(&shown), &kept);
    }

    #[tokio::test]
    async fn an_unfinished_attempt_survives_with_its_notes() {
        let folder = Folder::new();
        let store = open(&folder);
        let claim = acquire(&store, &request("key")).await;
        assert_eq!(
            store.annotate(&claim, "charge 7").await.unwrap(),
            Fenced::Applied
        );
        let data = Bytes::from_static(b"\0\xff");
        assert_eq!(
            store.checkpoint(&claim, "paid", &data).await.unwrap(),
            Fenced::Applied
        );
        drop(store);
        let shown = existing(&open(&folder), &request("key")).await;
        assert_eq!(shown.owner, *claim.owner());
        assert_eq!(shown.notes.correlation.as_deref(), Some("charge 7"));
        assert_eq!(shown.notes.checkpoint("paid"), Some(&data));
    }

    #[tokio::test]
    async fn the_columns_say_what_happened() {
        let folder = Folder::new();
        let store = open(&folder);
        finish(&store, "order-1").await;
        let columns: (String, String, String, String, u16, u32) = Connection::open(folder.file())
            .unwrap()
            .query_row(
                "SELECT namespace, scope, key, state, status, attempt FROM idempotency_records",
                [],
                |row| {
                    Ok((
                        row.get(0)?,
                        row.get(1)?,
                        row.get(2)?,
                        row.get(3)?,
                        row.get(4)?,
                        row.get(5)?,
                    ))
                },
            )
            .unwrap();
        let expected = ("http", "alice", "order-1", "completed", 201, 1);
        let (namespace, scope, key, state, status, attempt) = &columns;
        assert_eq!(
            (&**namespace, &**scope, &**key, &**state, *status, *attempt),
            expected
        );
    }
}

mod sharing {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_stores_on_one_file_grant_each_key_once() {
        let folder = Folder::new();
        let stores = [open(&folder), open(&folder)];
        let keys = 1_000;
        let racing = (0..keys).map(|n| {
            let start = Arc::new(Barrier::new(2));
            let racers = stores.clone().map(|store| {
                let start = Arc::clone(&start);
                tokio::spawn(async move {
                    let request = request(&format!("key-{n}"));
                    start.wait().await;
                    (request.owner, store.claim(&request).await.unwrap())
                })
            });
            async move {
                let [one, other] = racers;
                (one.await.unwrap(), other.await.unwrap())
            }
        });
        for (one, other) in join_all(racing).await {
            match (one, other) {
                ((owner, Claimed::Acquired { .. }), (_, Claimed::Existing(seen)))
                | ((_, Claimed::Existing(seen)), (owner, Claimed::Acquired { .. })) => {
                    assert_eq!(seen.owner, owner);
                }
                both => panic!("not one winner: {both:?}"),
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn sixty_four_concurrent_claims_share_commits() {
        let folder = Folder::new();
        let store = open(&folder);
        let start = Arc::new(Barrier::new(64));
        let claiming: Vec<_> = (0..64)
            .map(|n| {
                let (store, start) = (store.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    acquire(&store, &request(&format!("key-{n}"))).await
                })
            })
            .collect();
        for claim in claiming {
            let _ = claim.await.unwrap();
        }
        let commits = store.commits();
        assert!(
            (1..=8).contains(&commits),
            "{commits} commits for 64 claims"
        );
    }

    #[tokio::test]
    async fn an_answer_that_changes_nothing_takes_no_commit() {
        let folder = Folder::new();
        let store = open(&folder);
        finish(&store, "completed").await;
        let _ = acquire(&store, &request("in flight")).await;
        let before = store.commits();
        let mismatch = ClaimRequest::new(key("completed"), Fingerprint::of(&[b"other"]));
        for request in [request("completed"), request("in flight"), mismatch] {
            existing(&store, &request).await;
            store.lookup(&request.key).await.unwrap().unwrap();
        }
        store.abandoned(None, 10).await.unwrap();
        assert_eq!(store.commits(), before);
    }

    #[tokio::test]
    async fn a_waiter_sees_what_another_store_does() {
        let folder = Folder::new();
        let (here, there) = (open(&folder), open(&folder));
        let claim = acquire(&there, &request("key")).await;
        let mut waiting = Box::pin(here.changed(claim.key(), claim.owner(), HOUR));
        assert!(
            (&mut waiting).now_or_never().is_none(),
            "nothing changed yet"
        );
        let completion = there.complete(&claim, &response(b""), None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded);
        patient("hearing of it", waiting).await.unwrap();
    }

    #[tokio::test]
    async fn a_store_lives_beside_the_tables_of_an_application() {
        let folder = Folder::new();
        let application = Connection::open(folder.file()).unwrap();
        application
            .execute_batch("CREATE TABLE orders (id); PRAGMA user_version = 41")
            .unwrap();
        finish(&open(&folder), "key").await;
        let version: i64 = application
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .unwrap();
        assert_eq!(version, 41, "the application's own number");
    }
}

mod locks {
    use super::*;

    /// Another connection in a write transaction; as good as another process.
    fn locked(folder: &Folder) -> Connection {
        let other = Connection::open(folder.file()).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        other
    }

    fn impatient(folder: &Folder) -> SqliteStore {
        let options = SqliteOptions::new().busy_timeout(Duration::from_millis(20));
        options.open(folder.file()).unwrap()
    }

    #[tokio::test]
    async fn a_lock_that_stays_is_unavailable_and_never_a_hang() {
        let folder = Folder::new();
        let store = impatient(&folder);
        finish(&store, "kept").await;
        let held = acquire(&store, &request("held")).await;
        let _lock = locked(&folder);
        let kept = response(b"");
        let refused = async {
            [
                store.claim(&request("new")).await.unwrap_err(),
                store.complete(&held, &kept, None).await.unwrap_err(),
                store.renew(&held, HOUR).await.unwrap_err(),
                store.purge(10).await.unwrap_err(),
            ]
        };
        let errors = patient("a refusal", refused).await;
        for error in errors {
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            assert!(error.to_string().contains("busy_timeout"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_replay_waits_for_no_lock() {
        let folder = Folder::new();
        let store = impatient(&folder);
        let kept = finish(&store, "kept").await;
        let _lock = locked(&folder);
        let shown = existing(&store, &request("kept")).await;
        assert_eq!(outcome(&shown), &kept);
    }

    #[tokio::test]
    async fn a_lock_that_goes_is_waited_for() {
        let folder = Folder::new();
        let store = open(&folder);
        let held = acquire(&store, &request("held")).await;
        let lock = locked(&folder);
        let (wanted, kept) = (request("new"), response(b""));
        let mut waiting = Box::pin(async {
            tokio::join!(acquire(&store, &wanted), store.complete(&held, &kept, None))
        });
        assert!(
            (&mut waiting).now_or_never().is_none(),
            "the file is locked"
        );
        lock.execute_batch("COMMIT").unwrap();
        let (claim, completion) = patient("the lock", waiting).await;
        assert_eq!(claim.attempt(), 1);
        assert_eq!(completion.unwrap(), Completion::Recorded);
    }

    #[tokio::test]
    async fn a_current_file_is_opened_while_it_is_locked() {
        let folder = Folder::new();
        let kept = finish(&open(&folder), "kept").await;
        let _lock = locked(&folder);
        let store = impatient(&folder);
        let shown = existing(&store, &request("kept")).await;
        assert_eq!(outcome(&shown), &kept);
    }

    #[tokio::test]
    async fn a_claim_whose_caller_left_is_not_made() {
        let folder = Folder::new();
        let store = open(&folder);
        let lock = locked(&folder);
        let wanted = request("key");
        assert!(store.claim(&wanted).now_or_never().is_none());
        lock.execute_batch("COMMIT").unwrap();
        // Queued behind it.
        let _ = acquire(&store, &request("other")).await;
        assert_eq!(store.lookup(&wanted.key).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_completion_whose_caller_left_is_made_all_the_same() {
        let folder = Folder::new();
        let store = open(&folder);
        let held = acquire(&store, &request("held")).await;
        let lock = locked(&folder);
        let kept = response(b"kept");
        assert!(store.complete(&held, &kept, None).now_or_never().is_none());
        lock.execute_batch("COMMIT").unwrap();
        let _ = acquire(&store, &request("other")).await;
        let shown = existing(&store, &request("held")).await;
        assert_eq!(outcome(&shown), &kept);
    }

    #[tokio::test]
    async fn more_moves_than_the_queue_holds_are_unavailable_at_once() {
        let folder = Folder::new();
        let store = open(&folder);
        let held = acquire(&store, &request("held")).await;
        let lock = locked(&folder);
        let mut refused = 0;
        let mut waiting = Vec::new();
        for _ in 0..10_000 {
            // Unconstrained: a task that polls this much is told to pause by the runtime.
            let mut renewal = Box::pin(tokio::task::unconstrained(store.renew(&held, HOUR)));
            match (&mut renewal).now_or_never() {
                Some(reply) => {
                    let error = reply.unwrap_err();
                    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                    refused += 1;
                }
                None => waiting.push(renewal),
            }
        }
        assert!(refused > 0, "the queue has no end");
        lock.execute_batch("COMMIT").unwrap();
        for renewed in join_all(waiting).await {
            assert_eq!(renewed.unwrap(), Fenced::Applied);
        }
    }
}

mod opening {
    use super::*;

    fn refused(path: impl AsRef<Path>) -> StoreError {
        match SqliteStore::open(path) {
            Ok(store) => panic!("opened: {store:?}"),
            Err(error) => error,
        }
    }

    fn says(error: &StoreError, kind: StoreErrorKind, what: &str) {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }

    #[test]
    fn a_directory_that_is_missing_is_named() {
        let folder = Folder::new();
        let error = refused(folder.path().join("missing").join("idempotency.db"));
        says(&error, StoreErrorKind::Other, "directory must exist");
        says(&error, StoreErrorKind::Other, "missing");
    }

    #[test]
    fn a_directory_is_no_file() {
        let folder = Folder::new();
        says(
            &refused(folder.path()),
            StoreErrorKind::Other,
            "cannot be opened",
        );
    }

    #[test]
    fn a_file_that_is_no_database_is_left_alone() {
        let folder = Folder::new();
        let text = "not a database, but long enough to be looked at as one\n".repeat(40);
        std::fs::write(folder.file(), &text).unwrap();
        let error = refused(folder.file());
        says(&error, StoreErrorKind::Other, "not an SQLite database");
        assert_eq!(std::fs::read_to_string(folder.file()).unwrap(), text);
    }

    #[test]
    fn a_store_that_would_end_with_the_process_is_refused() {
        for path in [":memory:", ""] {
            says(&refused(path), StoreErrorKind::Other, "MemoryStore");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_refused() {
        let folder = Folder::new();
        drop(open(&folder));
        let connection = Connection::open(folder.file()).unwrap();
        // The store's threads close the file in their own time. Until they have, its log stays.
        let into_one_file = "PRAGMA journal_mode = DELETE";
        while connection.query_row(into_one_file, [], |_| Ok(())).is_err() {
            std::thread::yield_now();
        }
        drop(connection);
        let writable = std::fs::metadata(folder.file()).unwrap().permissions();
        let mut read_only = writable.clone();
        read_only.set_readonly(true);
        std::fs::set_permissions(folder.file(), read_only).unwrap();
        // Whoever may do everything may do this too.
        let privileged = std::fs::OpenOptions::new()
            .write(true)
            .open(folder.file())
            .is_ok();
        if !privileged {
            says(&refused(folder.file()), StoreErrorKind::Other, "read-only");
        }
        std::fs::set_permissions(folder.file(), writable).unwrap();
        // The same from within: a format version from the future may be read and not written.
        let mut bytes = std::fs::read(folder.file()).unwrap();
        bytes[18] = 9;
        std::fs::write(folder.file(), bytes).unwrap();
        says(&refused(folder.file()), StoreErrorKind::Other, "read-only");
    }

    #[test]
    fn a_newer_schema_is_refused_unless_it_says_that_it_can_be_used() {
        let folder = Folder::new();
        drop(open(&folder));
        let connection = Connection::open(folder.file()).unwrap();
        let stamp = |version: i64, readable_since: i64| {
            let sql = "UPDATE idempotency_schema SET version = ?1, readable_since = ?2";
            connection.execute(sql, [version, readable_since]).unwrap();
        };
        stamp(3, 1);
        drop(open(&folder));
        stamp(3, 2);
        let error = refused(folder.file());
        says(&error, StoreErrorKind::Other, "schema version 3");
        says(&error, StoreErrorKind::Other, "update tower-idempotency");
        connection
            .execute("DELETE FROM idempotency_schema", [])
            .unwrap();
        says(
            &refused(folder.file()),
            StoreErrorKind::Other,
            "restore its row",
        );
    }

    #[test]
    fn a_missing_table_is_told_at_once() {
        let folder = Folder::new();
        drop(open(&folder));
        let connection = Connection::open(folder.file()).unwrap();
        connection
            .execute_batch("DROP TABLE idempotency_records")
            .unwrap();
        says(
            &refused(folder.file()),
            StoreErrorKind::Other,
            "migrations/sqlite",
        );
    }

    #[tokio::test]
    async fn a_table_that_goes_missing_is_an_error_until_it_is_back() {
        let folder = Folder::new();
        let store = open(&folder);
        let held = acquire(&store, &request("held")).await;
        let other = Connection::open(folder.file()).unwrap();
        other
            .execute_batch("ALTER TABLE idempotency_records RENAME TO elsewhere")
            .unwrap();
        let errors = [
            store.claim(&request("held")).await.unwrap_err(),
            store.renew(&held, HOUR).await.unwrap_err(),
            store.lookup(&key("held")).await.unwrap_err(),
        ];
        for error in &errors {
            says(error, StoreErrorKind::Other, "migrations/sqlite");
        }
        other
            .execute_batch("ALTER TABLE elsewhere RENAME TO idempotency_records")
            .unwrap();
        assert_eq!(store.renew(&held, HOUR).await.unwrap(), Fenced::Applied);
        existing(&store, &request("held")).await;
    }

    #[test]
    fn the_published_migration_makes_a_file_that_opens() {
        let folder = Folder::new();
        let connection = Connection::open(folder.file()).unwrap();
        let script = include_str!("../migrations/sqlite/0001_records.sql");
        for _ in 0..2 {
            connection.execute_batch(script).unwrap();
        }
        drop(open(&folder));
    }

    #[tokio::test]
    async fn many_may_open_a_new_file_at_once() {
        let folder = Folder::new();
        let start = Arc::new(std::sync::Barrier::new(10));
        let opening: Vec<_> = (0..10)
            .map(|_| {
                let (file, start) = (folder.file(), Arc::clone(&start));
                std::thread::spawn(move || {
                    start.wait();
                    SqliteStore::open(file)
                })
            })
            .collect();
        let stores: Vec<_> = opening
            .into_iter()
            .map(|opening| opening.join().unwrap().unwrap())
            .collect();
        finish(&stores[0], "key").await;
        for store in &stores {
            existing(store, &request("key")).await;
        }
    }

    #[tokio::test]
    async fn a_path_is_a_path_and_no_address() {
        let folder = Folder::new();
        let name = "file:idempotency.db?mode=memory";
        let store = SqliteStore::open(folder.path().join(name)).unwrap();
        finish(&store, "key").await;
        assert!(folder.path().join(name).exists());
    }

    #[tokio::test]
    async fn wrong_types_are_refused_by_the_table() {
        let folder = Folder::new();
        let store = open(&folder);
        finish(&store, "key").await;
        let connection = Connection::open(folder.file()).unwrap();
        for assignment in [
            "attempt = 'one'",
            "owner = 7",
            "expires_at = 'tomorrow'",
            "state = 'finished'",
            "outcome = 'paid'",
            "fingerprint = NULL",
        ] {
            let sql = format!("UPDATE idempotency_records SET {assignment}");
            assert!(connection.execute(&sql, []).is_err(), "{assignment}");
        }
    }
}

#[test]
fn the_store_says_what_it_is() {
    let folder = Folder::new();
    let properties = open(&folder).properties();
    assert_eq!(properties.name, "sqlite");
    assert!(properties.durable && properties.shared);
}

#[test]
fn a_store_serves_one_runtime_after_another() {
    let folder = Folder::new();
    // Opened outside of any of them, with the longest patience there is.
    let options = SqliteOptions::new().busy_timeout(Duration::MAX);
    let store = options.open(folder.file()).unwrap();
    for name in ["one", "two"] {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(finish(&store, name));
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let shown = runtime.block_on(existing(&store, &request("one")));
    assert_eq!(outcome(&shown), &response(b"one"));
}

#[tokio::test]
async fn a_foreign_cursor_is_refused() {
    let folder = Folder::new();
    let cursor = tower_idempotency::Cursor::new(&b"elsewhere"[..]);
    let error = open(&folder)
        .abandoned(Some(&cursor), 10)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
}

#[tokio::test]
async fn a_takeover_is_one_step_among_stores() {
    let folder = Folder::new();
    let stores = [open(&folder), open(&folder)];
    let stale = acquire(&stores[0], &request("key")).await;
    assert!(stores[0].age(stale.key(), HOUR).await.unwrap());
    let claiming = (0..16).map(|n| {
        let mut request = request("key");
        request.owner = Owner::random();
        request.on_abandoned = OnAbandoned::Rerun;
        let store = stores[n % 2].clone();
        async move { store.claim(&request).await.unwrap() }
    });
    let claimed = join_all(claiming).await;
    let acquired = claimed
        .iter()
        .filter(|claimed| matches!(claimed, Claimed::Acquired { .. }))
        .count();
    assert_eq!(acquired, 1);
}
