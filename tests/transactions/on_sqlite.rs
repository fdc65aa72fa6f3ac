//! What is SQLite's own: files, attached ones, and snapshots.

use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior};
use tower_idempotency::{
    Admission, AttemptGuard, Idempotency, RecordingError, SqliteRecording, SqliteStore, Store,
};

use crate::claims::{acquire, fingerprint, key, request};
use crate::database::{Database, Sqlite, charged};
use crate::sqlite::Folder;

#[tokio::test]
async fn outside_of_a_transaction_nothing_is_recorded() {
    let database = Sqlite::new().await;
    let (guard, recording) = prepared(database.store()).await;
    let connection = Connection::open(database.file()).unwrap();
    let error = recording.complete_in(&connection).unwrap_err();
    assert!(matches!(error, RecordingError::Misplaced(_)), "{error:?}");
    drop(guard);
}

#[tokio::test]
async fn a_transaction_on_another_file_records_nothing_even_if_the_store_is_attached() {
    let database = Sqlite::new().await;
    let (guard, recording) = prepared(database.store()).await;
    let folder = Folder::new();
    let mut connection = Connection::open(folder.file()).unwrap();
    let attach = format!("ATTACH '{}' AS store", database.file().display());
    connection.execute_batch(&attach).unwrap();
    let transaction = connection.transaction().unwrap();
    let error = recording.complete_in(&transaction).unwrap_err();
    assert!(matches!(error, RecordingError::Misplaced(_)), "{error:?}");
    drop(guard);
}

#[cfg(unix)]
#[tokio::test]
async fn the_same_file_by_another_name_is_the_same_file() {
    let database = Sqlite::new().await;
    let folder = Folder::new();
    let link = folder.path().join("link.db");
    std::os::unix::fs::symlink(database.file(), &link).unwrap();
    let (guard, recording) = prepared(database.store()).await;
    let mut connection = Connection::open(link).unwrap();
    let transaction = connection.transaction().unwrap();
    recording.complete_in(&transaction).unwrap();
    transaction.commit().unwrap();
    drop(guard);
}

#[tokio::test]
async fn a_transaction_that_read_before_a_renewal_has_to_begin_anew() {
    let database = Sqlite::new().await;
    let (guard, recording) = prepared(database.store()).await;
    let mut connection = Connection::open(database.file()).unwrap();
    let transaction = connection.transaction().unwrap();
    let count = "SELECT count(*) FROM charges";
    let none: i64 = transaction.query_row(count, [], |row| row.get(0)).unwrap();
    assert_eq!(none, 0);
    // Whatever changes the file does; the renewal of a lease is one such thing.
    let _ = acquire(database.store(), &request("other")).await;
    let error = recording.complete_in(&transaction).unwrap_err();
    assert!(matches!(error, RecordingError::Conflict(_)), "{error:?}");
    drop(transaction);
    let behavior = TransactionBehavior::Immediate;
    let transaction = connection.transaction_with_behavior(behavior).unwrap();
    recording.complete_in(&transaction).unwrap();
    transaction.commit().unwrap();
    drop(guard);
}

#[tokio::test]
async fn a_savepoint_that_is_taken_back_takes_the_outcome_back() {
    let database = Sqlite::new().await;
    let (guard, recording) = prepared(database.store()).await;
    let mut connection = Connection::open(database.file()).unwrap();
    let mut transaction = connection.transaction().unwrap();
    let mut savepoint = transaction.savepoint().unwrap();
    recording.complete_in(&savepoint).unwrap();
    savepoint.rollback().unwrap();
    drop(savepoint);
    recording.complete_in(&transaction).unwrap();
    drop(transaction);
    let record = database.store().lookup(&key("k")).await.unwrap().unwrap();
    assert!(!record.is_abandoned() && record.attempt == 1, "{record:?}");
    drop(guard);
}

#[tokio::test]
async fn a_retention_of_its_own_replaces_that_of_the_claim() {
    let database = Sqlite::new().await;
    let (guard, recording) = prepared(database.store()).await;
    let mut connection = Connection::open(database.file()).unwrap();
    let transaction = connection.transaction().unwrap();
    let recording = recording.retention(Duration::ZERO);
    recording.complete_in(&transaction).unwrap();
    transaction.commit().unwrap();
    // Over at once.
    assert_eq!(database.store().lookup(&key("k")).await.unwrap(), None);
    drop(guard);
}

async fn prepared(store: &SqliteStore) -> (AttemptGuard, SqliteRecording) {
    let idempotency = Idempotency::new(store.clone());
    let admitted = idempotency.admit(&key("k"), fingerprint()).await.unwrap();
    let Admission::First(guard) = admitted else {
        panic!("{admitted:?}");
    };
    let recording = idempotency.recording(guard.attempt(), &charged("1"));
    (guard, recording.unwrap())
}
