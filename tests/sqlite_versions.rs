//! Files of earlier releases: what they kept is still there.

#[path = "support/sqlite.rs"]
mod support;

use bytes::Bytes;
use http::StatusCode;
use rusqlite::Connection;
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, OnAbandoned, Outcome,
    Owner, Record, ScopedKey, SqliteStore, State, Store,
};

use self::support::Folder;

/// A file as the first release left it.
fn version_1() -> Folder {
    let folder = Folder::new();
    let file = Connection::open(folder.file()).unwrap();
    file.execute_batch(include_str!("fixtures/sqlite_v1.sql"))
        .unwrap();
    folder
}

fn open(folder: &Folder) -> SqliteStore {
    SqliteStore::open(folder.file()).unwrap()
}

fn key(name: &str) -> ScopedKey {
    ScopedKey::new("http", "alice", &IdempotencyKey::new(name).unwrap())
}

/// The fingerprint of every record in the file; not computed, because a later release may compute
/// another one.
fn fingerprint() -> Fingerprint {
    let mut bytes = [0; Fingerprint::LEN];
    bytes[4..36].copy_from_slice(&[
        0x07, 0x9e, 0xd4, 0x0d, 0xbe, 0x3d, 0xdb, 0xd1, 0x99, 0xaa, 0x22, 0xf9, 0xaf, 0xa1, 0x27,
        0xeb, 0x4f, 0x1e, 0x4f, 0xd8, 0x5a, 0x21, 0xc9, 0x56, 0xc6, 0xaa, 0xcd, 0x83, 0xb2, 0x5a,
        0xda, 0x23,
    ]);
    Fingerprint::from_bytes(bytes)
}

fn request(name: &str) -> ClaimRequest {
    ClaimRequest::new(key(name), fingerprint())
}

async fn existing(store: &SqliteStore, name: &str) -> Record {
    match store.claim(&request(name)).await.unwrap() {
        Claimed::Existing(record) => record,
        Claimed::Acquired { claim, .. } => panic!("{name} was free: {claim:?}"),
    }
}

fn outcome(record: &Record) -> &Outcome {
    match &record.state {
        State::Completed { outcome, .. } => outcome,
        state => panic!("not completed: {state:?}"),
    }
}

#[tokio::test]
async fn outcomes_of_version_1_are_replayed() {
    let folder = version_1();
    let store = open(&folder);
    let record = existing(&store, "completed").await;
    let kept = outcome(&record);
    assert_eq!(kept.status(), Some(StatusCode::CREATED));
    let lines: Vec<_> = kept
        .headers()
        .chain(kept.trailers())
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    assert_eq!(
        lines,
        [
            "location: /charges/7",
            "x-repeated: two",
            "x-repeated: one",
            "x-checksum: 7"
        ]
    );
    assert_eq!(kept.body(), "{\"paid\":true}");
    assert_eq!(record.owner, Owner::from_bytes([1; 16]));
    assert_eq!(record.attempt, 1);
    assert_eq!(record.notes.correlation.as_deref(), Some("charge 7"));
    assert_eq!(
        record.notes.checkpoints,
        [
            ("paid".to_owned(), Bytes::from_static(b"\0\xff")),
            ("mailed".to_owned(), Bytes::new()),
        ]
    );
    assert_eq!(record.created_at.as_micros(), 1_735_581_492_228_010);
    let tombstone = existing(&store, "tombstone").await;
    assert_eq!(outcome(&tombstone), &Outcome::tombstone(StatusCode::OK));
    let value = existing(&store, "value").await;
    assert_eq!(outcome(&value), &Outcome::value(b"\0points"));
}

#[tokio::test]
async fn attempts_of_version_1_go_on() {
    let folder = version_1();
    let store = open(&folder);
    let live = existing(&store, "live").await;
    assert!(!live.is_abandoned());
    let claim = Claim::new(live.key, live.owner, live.attempt);
    let done = store.complete(&claim, &Outcome::value(b"done"), None).await;
    assert_eq!(done.unwrap(), Completion::Recorded);
    let live = existing(&store, "live").await;
    assert_eq!(outcome(&live), &Outcome::value(b"done"));

    let abandoned = store.abandoned(None, 10).await.unwrap().records;
    assert_eq!(abandoned.len(), 1);
    assert_eq!(abandoned[0].key, key("abandoned"));
    let mut rerun = request("abandoned");
    rerun.on_abandoned = OnAbandoned::Rerun;
    let Claimed::Acquired { claim, notes } = store.claim(&rerun).await.unwrap() else {
        panic!("not taken over");
    };
    assert_eq!(claim.attempt(), 2);
    assert_eq!(notes.checkpoint("paid"), Some(&Bytes::from_static(b"7")));

    let Claimed::Acquired { claim, .. } = store.claim(&request("released")).await.unwrap() else {
        panic!("a released key was not free");
    };
    assert_eq!(claim.attempt(), 2);
}

#[test]
fn a_new_file_is_laid_out_as_the_frozen_one() {
    let (frozen, new) = (version_1(), Folder::new());
    drop(open(&new));
    let layout = |folder: &Folder| -> Vec<String> {
        let file = Connection::open(folder.file()).unwrap();
        let mut columns = file
            .prepare(
                "SELECT t.name || '.' || c.name || ' ' || c.type || ' ' || c.\"notnull\" || c.pk
                 FROM sqlite_master AS t, pragma_table_info(t.name) AS c
                 WHERE t.name LIKE 'idempotency%' ORDER BY t.name, c.cid",
            )
            .unwrap();
        let columns = columns.query_map([], |row| row.get(0)).unwrap();
        let mut layout: Vec<String> = columns.map(Result::unwrap).collect();
        let mut indexes = file
            .prepare(
                "SELECT name || coalesce(replace(sql, 'IF NOT EXISTS ', ''), '')
                 FROM sqlite_master WHERE type = 'index' ORDER BY name",
            )
            .unwrap();
        let indexes = indexes.query_map([], |row| row.get(0)).unwrap();
        layout.extend(indexes.map(Result::unwrap));
        layout
    };
    let frozen = layout(&frozen);
    assert!(frozen.len() > 20, "{frozen:#?}");
    assert_eq!(layout(&new), frozen);
}

#[tokio::test]
async fn two_releases_use_one_file_and_the_older_one_may_come_back() {
    let folder = version_1();
    let older = open(&folder);
    // What a newer release would do to it: a column more, and a note that this does not matter.
    Connection::open(folder.file())
        .unwrap()
        .execute_batch(
            "BEGIN IMMEDIATE;
             ALTER TABLE idempotency_records ADD COLUMN note TEXT;
             UPDATE idempotency_schema SET version = 2, readable_since = 1;
             COMMIT;",
        )
        .unwrap();
    for (name, store) in [("older", older), ("newer", open(&folder))] {
        existing(&store, "completed").await;
        let request = request(name);
        let Claimed::Acquired { claim, .. } = store.claim(&request).await.unwrap() else {
            panic!("a new key was not free");
        };
        let kept = Outcome::value(b"kept");
        let done = store.complete(&claim, &kept, None).await.unwrap();
        assert_eq!(done, Completion::Recorded);
        let record = open(&folder).lookup(&request.key).await.unwrap().unwrap();
        assert_eq!(outcome(&record), &kept);
    }
}
