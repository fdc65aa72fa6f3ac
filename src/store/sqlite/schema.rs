//! Which tables a file has, and how an older one becomes a current one.

use rusqlite::{Connection, OptionalExtension};

use crate::error::{StoreError, StoreErrorKind};

use super::connection::patiently;
use super::error::failed;
use super::patience::Deadline;

/// What `migrations/sqlite` holds, in order. A script ends by writing its number to
/// `idempotency_schema`.
pub(super) const MIGRATIONS: &[&str] =
    &[include_str!("../../../migrations/sqlite/0001_records.sql")];

/// STRICT tables came with 3.37, `RETURNING` with 3.35.
const OLDEST_LIBRARY: i32 = 3_037_000;

/// Whether the SQLite that this program is linked with can do what the store asks of it.
pub(super) fn check_library(version: i32) -> Result<(), StoreError> {
    if version >= OLDEST_LIBRARY {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Other,
        format!(
            "this program is linked with SQLite {}, and 3.37 is the oldest that will do: update \
             the system's library, or use the feature `sqlite`, which brings its own",
            rusqlite::version()
        ),
    ))
}

/// Brings the file to the newest schema of `migrations`, in one transaction, whoever else does the
/// same at the same time.
pub(super) fn migrate(
    connection: &Connection,
    migrations: &[&str],
    deadline: Deadline,
) -> Result<(), StoreError> {
    // Looked at first without a lock: a current file can be opened while somebody writes to it.
    if pending(connection, migrations)?.is_empty() {
        return Ok(());
    }
    patiently(deadline, || connection.execute_batch("BEGIN IMMEDIATE"))?;
    let migrated = pending(connection, migrations).and_then(|scripts| {
        scripts
            .iter()
            .try_for_each(|script| connection.execute_batch(script).map_err(failed))
    });
    let ended = match &migrated {
        Ok(()) => connection.execute_batch("COMMIT"),
        Err(_) => connection.execute_batch("ROLLBACK"),
    };
    migrated.and(ended.map_err(failed))
}

fn pending<'m>(
    connection: &Connection,
    migrations: &'m [&'m str],
) -> Result<&'m [&'m str], StoreError> {
    let known = migrations.len();
    let Some((version, readable_since)) = stamp(connection)? else {
        return Ok(migrations);
    };
    if let Some(pending) = migrations.get(version..) {
        return Ok(pending);
    }
    // A newer release has been here. It says itself whether that matters.
    if readable_since <= known {
        return Ok(&[]);
    }
    Err(StoreError::new(
        StoreErrorKind::Other,
        format!(
            "the file has schema version {version}, which can be used from {readable_since} on, and \
             this release knows {known}: update tower-idempotency, or choose another file"
        ),
    ))
}

/// The schema version of the file and the oldest one that can use it; `None` without tables.
fn stamp(connection: &Connection) -> Result<Option<(usize, usize)>, StoreError> {
    let has_table = connection
        .query_row(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'idempotency_schema'",
            [],
            |_| Ok(()),
        )
        .optional()
        .map_err(failed)?;
    if has_table.is_none() {
        return Ok(None);
    }
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?));
    let stamp = connection
        .query_row(
            "SELECT version, readable_since FROM idempotency_schema WHERE id = 1",
            [],
            read,
        )
        .optional()
        .map_err(failed)?;
    let numbers = stamp.and_then(|(version, readable_since)| {
        let version = usize::try_from(version).ok().filter(|v| *v > 0)?;
        Some((version, usize::try_from(readable_since).ok()?))
    });
    numbers.map(Some).ok_or_else(|| {
        StoreError::new(
            StoreErrorKind::Other,
            "the table `idempotency_schema` does not tell the schema's version: restore its row from \
             `migrations/sqlite`",
        )
    })
}
