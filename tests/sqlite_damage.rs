//! Damaged records: told as such, never replayed, never run again, never lost.

#[path = "support/sqlite.rs"]
mod support;

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use rusqlite::types::Value;
use rusqlite::{Connection, params};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fenced, Fingerprint, IdempotencyKey, OnAbandoned,
    Outcome, Record, Resolution, ScopedKey, SqliteStore, Store, StoreErrorKind,
};

use self::support::Folder;

const HOUR: Duration = Duration::from_secs(60 * 60);

fn request(name: &str) -> ClaimRequest {
    let key = ScopedKey::new("http", "alice", &IdempotencyKey::new(name).unwrap());
    ClaimRequest::new(key, Fingerprint::of(&[b"request"]))
}

fn outcome() -> Outcome {
    let mut headers = http::HeaderMap::new();
    headers.insert("location", http::HeaderValue::from_static("/charges/7"));
    Outcome::response(StatusCode::CREATED, &headers, &[b"{\"paid\":true}"], None)
}

async fn acquire(store: &SqliteStore, name: &str) -> Claim {
    match store.claim(&request(name)).await {
        Ok(Claimed::Acquired { claim, .. }) => claim,
        other => panic!("not acquired: {other:?}"),
    }
}

/// A claim with everything attached that can be.
async fn started(store: &SqliteStore, name: &str) -> Claim {
    let claim = acquire(store, name).await;
    let applied = store.annotate(&claim, "charge 7").await.unwrap();
    assert_eq!(applied, Fenced::Applied);
    let data = Bytes::from_static(b"7");
    let applied = store.checkpoint(&claim, "paid", &data).await.unwrap();
    assert_eq!(applied, Fenced::Applied);
    claim
}

async fn completed(store: &SqliteStore, name: &str) -> Claim {
    let claim = started(store, name).await;
    let completion = store.complete(&claim, &outcome(), None).await.unwrap();
    assert_eq!(completion, Completion::Recorded);
    claim
}

async fn released(store: &SqliteStore, name: &str) -> Claim {
    let claim = started(store, name).await;
    assert_eq!(store.release(&claim).await.unwrap(), Fenced::Applied);
    claim
}

/// A second way into the file.
fn tamper(folder: &Folder) -> Connection {
    let connection = Connection::open(folder.file()).unwrap();
    connection.busy_timeout(Duration::from_secs(60)).unwrap();
    connection
        .execute_batch("PRAGMA synchronous = OFF")
        .unwrap();
    connection
}

/// Everything that the store reads of a row found by its key.
const COLUMNS: [&str; 14] = [
    "state",
    "status",
    "attempt",
    "owner",
    "fingerprint",
    "lease_until",
    "created_at",
    "completed_at",
    "expires_at",
    "retention",
    "correlation",
    "checkpoints",
    "checksum",
    "outcome",
];

/// The value with each of its bytes changed in turn, and the ends of what could stand there.
fn damages(value: &Value) -> Vec<Value> {
    let bytes = |bytes: &[u8]| -> Vec<Vec<u8>> {
        let flipped = (0..bytes.len()).map(|n| {
            let mut damaged = bytes.to_vec();
            damaged[n] ^= 1 << (n % 7);
            damaged
        });
        let cut = bytes[..bytes.len().saturating_sub(1)].to_vec();
        flipped.chain([cut, [bytes, b"!"].concat()]).collect()
    };
    match value {
        Value::Blob(blob) => bytes(blob).into_iter().map(Value::Blob).collect(),
        Value::Text(text) => {
            let texts = bytes(text.as_bytes()).into_iter();
            texts
                .map(|text| Value::Text(String::from_utf8(text).unwrap()))
                .collect()
        }
        Value::Integer(integer) => {
            let flipped = (0..64).map(|bit| Value::Integer(integer ^ (1 << bit)));
            flipped.chain([Value::Null]).collect()
        }
        Value::Null => vec![
            Value::Integer(0),
            Value::Integer(7),
            Value::Blob(vec![]),
            Value::Text("x".into()),
        ],
        Value::Real(_) => unreachable!("no column is REAL"),
    }
}

#[tokio::test]
async fn every_change_of_every_column_is_told_and_changes_nothing_else() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let held = [
        ("started", started(&store, "started").await),
        ("completed", completed(&store, "completed").await),
        ("released", released(&store, "released").await),
    ];
    let file = tamper(&folder);
    let mut tried = 0;
    for (name, claim) in &held {
        for column in COLUMNS {
            let find = format!("SELECT {column} FROM idempotency_records WHERE key = ?1");
            let set = format!("UPDATE idempotency_records SET {column} = ?2 WHERE key = ?1");
            let stored = || -> Value { file.query_row(&find, [name], |row| row.get(0)).unwrap() };
            let sound = stored();
            for damaged in damages(&sound) {
                // What the table's own types and checks refuse is nothing to test.
                if file.execute(&set, params![name, damaged]).is_err() {
                    continue;
                }
                let damaged = stored();
                assert_ne!(damaged, sound);
                let what = format!("{column} of the {name} record as {damaged:?}");
                all_moves_tell(&store, claim, &what).await;
                assert_eq!(stored(), damaged, "{what} was written over");
                file.execute(&set, params![name, sound]).unwrap();
                tried += 1;
            }
        }
    }
    assert!(tried > 1_000, "{tried} damages");
    // And whole again, they are as good as before.
    assert_eq!(
        store.renew(&held[0].1, HOUR).await.unwrap(),
        Fenced::Applied
    );
    let again = store
        .complete(&held[1].1, &Outcome::value(b"late"), None)
        .await;
    assert_eq!(again.unwrap(), Completion::Standing(outcome()));
    let _ = acquire(&store, "released").await;
}

async fn all_moves_tell(store: &SqliteStore, claim: &Claim, what: &str) {
    let mut again = request(claim.key().key());
    again.owner = *claim.owner();
    let mut rerun = request(claim.key().key());
    rerun.on_abandoned = OnAbandoned::Rerun;
    let errors = [
        store.claim(&request(claim.key().key())).await.map(drop),
        store.claim(&again).await.map(drop),
        store.claim(&rerun).await.map(drop),
        store.lookup(claim.key()).await.map(drop),
        store.renew(claim, HOUR).await.map(drop),
        store
            .complete(claim, &Outcome::value(b""), None)
            .await
            .map(drop),
        store.release(claim).await.map(drop),
        store.abandon(claim).await.map(drop),
        store.annotate(claim, "").await.map(drop),
        store.checkpoint(claim, "", &Bytes::new()).await.map(drop),
    ];
    for (n, told) in errors.into_iter().enumerate() {
        let Err(error) = told else {
            panic!("move {n} answered with {what}");
        };
        assert_eq!(
            error.kind(),
            StoreErrorKind::Corrupt,
            "move {n}, {what}: {error}"
        );
        let text = format!("{error} {error:?}");
        assert!(!text.contains("alice"), "the scope is in {text}");
    }
}

#[tokio::test]
async fn every_changed_byte_of_the_file_is_told_or_does_not_matter() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let _ = completed(&store, "key").await;
    drop(store);
    let file = tamper(&folder);
    // Everything into the one file, once the store's threads have closed it.
    while file
        .query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(()))
        .is_err()
    {
        std::thread::yield_now();
    }
    drop(file);
    let sound = std::fs::read(folder.file()).unwrap();
    let cell = cell_of_the_record(&sound);
    let (mut told, mut harmless) = (0, 0);
    let copy = folder.path().join("copy.db");
    for at in cell {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x11;
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", copy.display()));
        }
        std::fs::write(&copy, &damaged).unwrap();
        let claimed = match SqliteStore::open(&copy) {
            Ok(store) => store.claim(&request("key")).await,
            Err(error) => Err(error),
        };
        match claimed {
            Ok(Claimed::Existing(record)) => {
                assert_eq!(replayed(&record), outcome(), "byte {at}");
                harmless += 1;
            }
            Ok(claimed) => panic!("byte {at}: {claimed:?}"),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Corrupt, "byte {at}: {error}");
                told += 1;
            }
        }
    }
    // Harmless are the columns that are there for people only.
    assert!(
        told > 200 && harmless < 100,
        "{told} told, {harmless} harmless"
    );
}

fn replayed(record: &Record) -> Outcome {
    match &record.state {
        tower_idempotency::State::Completed { outcome, .. } => outcome.clone(),
        state => panic!("not completed: {state:?}"),
    }
}

/// Where the row is in the file: the page with the outcome, from its cells on.
fn cell_of_the_record(file: &[u8]) -> std::ops::Range<usize> {
    let page_size = usize::from(u16::from_be_bytes([file[16], file[17]]));
    let body = b"{\"paid\":true}";
    let found: Vec<_> = (0..file.len() - body.len())
        .filter(|at| file[*at..].starts_with(body))
        .collect();
    let page = found[0] / page_size;
    assert!(
        found.iter().all(|at| at / page_size == page),
        "on several pages"
    );
    let start = page * page_size;
    // A leaf of a table: the number of cells at 3, where the content begins at 5, its cells from 8 on.
    assert_eq!(file[start], 13, "not a leaf of a table");
    let cell = u16::from_be_bytes([file[start + 8], file[start + 9]]);
    start + usize::from(cell)..found[found.len() - 1] + body.len()
}

#[tokio::test]
async fn a_damaged_record_can_be_removed() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let claim = completed(&store, "key").await;
    let spoil = "UPDATE idempotency_records SET outcome = x'00'";
    tamper(&folder).execute(spoil, []).unwrap();
    store.lookup(claim.key()).await.unwrap_err();
    assert!(store.remove(claim.key()).await.unwrap());
    assert_eq!(acquire(&store, "key").await.attempt(), 1);
}

#[tokio::test]
async fn purge_leaves_damaged_records_and_tells_when_nothing_else_is_left() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for name in ["sound", "damaged", "sound too"] {
        let claim = completed(&store, name).await;
        assert!(store.age(claim.key(), 48 * HOUR).await.unwrap());
    }
    let spoil = "UPDATE idempotency_records SET owner = zeroblob(16) WHERE key = 'damaged'";
    tamper(&folder).execute(spoil, []).unwrap();
    let purged = store.purge(1).await.unwrap();
    assert_eq!(purged.removed, 1);
    let purged = store.purge(10).await.unwrap();
    assert_eq!(purged.removed, 1);
    let error = store.purge(10).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    let left: String = tamper(&folder)
        .query_row("SELECT key FROM idempotency_records", [], |row| row.get(0))
        .unwrap();
    assert_eq!(left, "damaged");
}

#[tokio::test]
async fn an_expiry_that_was_turned_back_does_not_free_a_kept_outcome() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let _ = completed(&store, "key").await;
    let spoil = "UPDATE idempotency_records SET expires_at = 1";
    tamper(&folder).execute(spoil, []).unwrap();
    let error = store.claim(&request("key")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    store.purge(10).await.unwrap_err();
}

#[tokio::test]
async fn a_damaged_record_does_not_keep_the_others_from_being_reconciled() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for name in ["one", "damaged", "two"] {
        let claim = started(&store, name).await;
        assert!(store.age(claim.key(), HOUR).await.unwrap());
    }
    let spoil = "UPDATE idempotency_records SET attempt = 9 WHERE key = 'damaged'";
    tamper(&folder).execute(spoil, []).unwrap();
    let mut after = None;
    let mut seen = Vec::new();
    loop {
        let page = store.abandoned(after.as_ref(), 1).await.unwrap();
        for record in page.records {
            let resolved = store.resolve(&record, &Resolution::Released).await;
            assert_eq!(resolved.unwrap(), Fenced::Applied);
            seen.push(record.key.key().to_owned());
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, ["one", "two"]);
}

#[tokio::test]
async fn the_outcome_of_one_key_does_not_pass_for_that_of_another() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let _ = completed(&store, "mine").await;
    let _ = completed(&store, "yours").await;
    // A whole row under the other key: every column is sound in itself.
    let spoil = "UPDATE idempotency_records SET lookup_key = x'00' WHERE key = 'mine'; \
         UPDATE idempotency_records SET lookup_key = ?1 WHERE key = 'yours'";
    let (first, second) = spoil.split_once(';').unwrap();
    let file = tamper(&folder);
    file.execute(first, []).unwrap();
    file.execute(second, [request("mine").key.as_bytes()])
        .unwrap();
    let error = store.claim(&request("mine")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
}
