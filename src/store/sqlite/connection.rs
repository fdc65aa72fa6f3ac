//! Connections to the file, and patience with whoever has locked it.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::error::{StoreError, StoreErrorKind};

use super::error::{busy, failed, is_busy};
use super::patience::{Deadline, Pauses};

/// Opens a file for writing, and makes it if it is not there.
pub(super) fn writer(path: &Path, deadline: Deadline) -> Result<Connection, StoreError> {
    let connection = open(path, OpenFlags::SQLITE_OPEN_CREATE)?;
    // The writer waits by itself; rusqlite's default would be 5 s within SQLite.
    connection.busy_timeout(Duration::ZERO).map_err(failed)?;
    patiently(deadline, || use_wal(&connection))?;
    patiently(deadline, || connection.execute_batch(WRITER))?;
    check_mode(&connection)?;
    check_writable(&connection)?;
    Ok(connection)
}

/// Opens a file that a writer of this process has open.
pub(super) fn reader(
    path: &Path,
    busy_timeout: Duration,
    deadline: Deadline,
) -> Result<Connection, StoreError> {
    let connection = open(path, OpenFlags::empty())?;
    // A reader waits for nobody, but for a process that repairs the log after another one's crash.
    connection.busy_timeout(busy_timeout).map_err(failed)?;
    patiently(deadline, || connection.execute_batch(READER))?;
    Ok(connection)
}

/// Repeats what somebody else's lock refuses, until `deadline`.
pub(super) fn patiently<T>(
    deadline: Deadline,
    mut act: impl FnMut() -> Result<T, rusqlite::Error>,
) -> Result<T, StoreError> {
    let mut pauses = pauses();
    loop {
        match act() {
            Err(error) if is_busy(&error) => {
                if deadline.is_over() {
                    return Err(busy().with_source(error));
                }
                pauses.sleep();
            }
            done => return done.map_err(failed),
        }
    }
}

/// Between two tries to get at a locked file. Short ones, and slept by the store: SQLite's own are
/// longer and even, and let some of many processes wait for ever.
pub(super) fn pauses() -> Pauses {
    Pauses::new(Duration::from_micros(200), Duration::from_millis(5))
}

fn open(path: &Path, create: OpenFlags) -> Result<Connection, StoreError> {
    let is_no_file = path.as_os_str().is_empty() || path == Path::new(":memory:");
    if is_no_file {
        return Err(StoreError::new(
            StoreErrorKind::Other,
            "the store needs the path of a file; for a store that ends with the process use \
             `MemoryStore`",
        ));
    }
    // No URI: a path that begins with `file:` is a path. No mutex: a connection has one thread.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | create;
    Connection::open_with_flags(path, flags).map_err(|error| {
        StoreError::new(
            StoreErrorKind::Other,
            format!(
                "the file `{}` cannot be opened: its directory must exist, and the process must be \
                 allowed to write to both",
                path.display()
            ),
        )
        .with_source(error)
    })
}

/// A file keeps its mode, so this does something only once.
fn use_wal(connection: &Connection) -> Result<(), rusqlite::Error> {
    connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))
}

fn check_mode(connection: &Connection) -> Result<(), StoreError> {
    let mode: String = connection
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .map_err(failed)?;
    if mode == "wal" {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Other,
        format!(
            "the file stays in journal mode `{mode}`, and the store needs `wal`: put it on a local \
             disk, and close whatever else has it open"
        ),
    ))
}

fn check_writable(connection: &Connection) -> Result<(), StoreError> {
    match connection.execute_batch("BEGIN IMMEDIATE; ROLLBACK") {
        // Locked: so somebody can write, and nothing more can be told without waiting.
        Err(error) if !is_busy(&error) => Err(failed(error)),
        _ => Ok(()),
    }
}

/// FULL: a commit is on the disk before it is acknowledged, so that a kept outcome survives a loss
/// of power; NORMAL would lose the last commits. `fullfsync` is what that takes on Apple's systems.
///
/// Keys are random, so every claim is on another page of their index: 8 MB of cache hold the index of
/// some 100,000 records, and a log of 16 MB copies a page back once that was written many times.
/// SQLite's own 2 and 4 MB were measured a tenth slower.
const WRITER: &str = "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; \
     PRAGMA checkpoint_fullfsync = ON; PRAGMA cache_size = -8000; \
     PRAGMA wal_autocheckpoint = 4000; PRAGMA cell_size_check = ON; PRAGMA trusted_schema = OFF;";

const READER: &str =
    "PRAGMA query_only = ON; PRAGMA cell_size_check = ON; PRAGMA trusted_schema = OFF;";
