//! What SQLite's errors mean for a caller.

use std::sync::Arc;

use rusqlite::ErrorCode;

use crate::error::{StoreError, StoreErrorKind};
use crate::scope::ScopedKey;

/// The error of a statement. The message says what to do; SQLite's own is the source.
pub(super) fn failed(error: impl Into<Arc<rusqlite::Error>>) -> StoreError {
    // Shared, because one failure can be the answer to many moves.
    let error = error.into();
    let (kind, message) = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            return busy().with_source(error);
        }
        Some(ErrorCode::DiskFull) => (
            StoreErrorKind::Unavailable,
            "the disk is full: make room on it, or purge expired records",
        ),
        Some(ErrorCode::ReadOnly) => (
            StoreErrorKind::Other,
            "the file is read-only: the process needs to write the file and its directory",
        ),
        Some(ErrorCode::NotADatabase) => (
            StoreErrorKind::Other,
            "the file is not an SQLite database: check the path",
        ),
        Some(ErrorCode::DatabaseCorrupt) => (
            StoreErrorKind::Corrupt,
            "the file is damaged: run `PRAGMA integrity_check` and restore it from a backup",
        ),
        Some(
            ErrorCode::CannotOpen
            | ErrorCode::SystemIoFailure
            | ErrorCode::FileLockingProtocolFailed
            | ErrorCode::OutOfMemory
            | ErrorCode::OperationInterrupted,
        ) => (
            StoreErrorKind::Unavailable,
            "the file cannot be read or written at the moment: check its disk and directory",
        ),
        Some(ErrorCode::ConstraintViolation) => (
            StoreErrorKind::Other,
            "a constraint or a trigger that is not the store's own refused the record: take it away",
        ),
        _ => (
            StoreErrorKind::Other,
            "a statement failed: the tables are not those of `migrations/sqlite`",
        ),
    };
    StoreError::new(kind, message).with_source(error)
}

pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

pub(super) fn busy() -> StoreError {
    StoreError::unavailable(
        "another connection has kept the file locked for longer than `busy_timeout`: look for a \
         long write transaction on it",
    )
}

/// The transaction of a move could not be committed. Nothing is known of the move then, whatever the
/// reason was, and asking again is safe.
pub(super) fn uncommitted(error: Arc<rusqlite::Error>) -> StoreError {
    match failed(Arc::clone(&error)) {
        told if told.is_transient() => told,
        _ => StoreError::unavailable("the disk or a trigger refused to commit: look at the source")
            .with_source(error),
    }
}

pub(super) fn full_queue() -> StoreError {
    StoreError::unavailable("more moves are waiting for the file than the store queues")
}

/// The thread that should have answered did not.
pub(super) fn unanswered() -> StoreError {
    StoreError::unavailable(
        "the thread of the store failed on this move, or has ended: ask again, and open the store \
         anew if that does not help",
    )
}

/// A record that is there and cannot be relied on.
pub(super) fn damaged(key: &ScopedKey, what: &str) -> StoreError {
    StoreError::corrupt(format!(
        "record {} {what}. It is left where it is: restore the file, or remove the key once you \
         know how its attempt ended",
        key.log_id()
    ))
}
