//! Makes the tables, and knows whether they are those that this release works with.

use std::error::Error;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use crate::error::StoreError;

use super::client::Client;
use super::error::{PostgresSchemaError, failed, too_slow};
use super::names::{Names, quoted};
use super::row::get;
use super::sql::Statements;

/// One step from a version to the next, as published.
struct Migration {
    version: i32,
    text: &'static str,
}

const MIGRATIONS: [Migration; 1] = [Migration {
    version: 1,
    text: include_str!("../../../migrations/postgres/0001_idempotency_keys.sql"),
}];

/// Whether the server and the tables are such that the store works with them.
pub(super) async fn check(
    client: &Client,
    statements: &Statements,
    deadline: Instant,
) -> Result<(), StoreError> {
    check_server(client, statements, deadline).await?;
    match version(client, statements, deadline).await? {
        Some(found) => found.judge()?,
        None => return Err(PostgresSchemaError::Missing.into()),
    }
    // A table of that name may be somebody else's. Nothing has this digest.
    let nothing: &[u8] = &[];
    client
        .row(&statements.lookup, &[&nothing], deadline)
        .await?;
    Ok(())
}

/// Whether the server is new enough, keeps every text, and is reached directly.
pub(super) async fn check_server(
    client: &Client,
    statements: &Statements,
    deadline: Instant,
) -> Result<(), StoreError> {
    client.examine(deadline).await?;
    let row = client.row(&statements.server, &[], deadline).await?;
    let Some(row) = row else {
        return Ok(());
    };
    let (found, encoding): (i32, &str) = (get(&row, 0)?, get(&row, 1)?);
    if found < OLDEST_SERVER {
        let needed = OLDEST_SERVER;
        return Err(PostgresSchemaError::ServerTooOld { found, needed }.into());
    }
    // SQL_ASCII converts nothing and so keeps every text.
    if !["UTF8", "SQL_ASCII"].contains(&encoding) {
        let found = encoding.to_owned();
        return Err(PostgresSchemaError::Encoding { found }.into());
    }
    Ok(())
}

/// Applies what is missing. Many may do so at once.
pub(super) async fn migrate(
    client: &Client,
    statements: &Statements,
    names: &Names,
) -> Result<(), StoreError> {
    let deadline = Instant::now() + MIGRATION_LIMIT;
    check_server(client, statements, deadline).await?;
    let mut tries = 0;
    loop {
        let applied = match version(client, statements, deadline).await? {
            Some(found) if found.version >= VERSION => break,
            Some(found) => found.version,
            None => 0,
        };
        match apply(client, names, applied, deadline).await {
            Ok(()) => break,
            // Somebody does the same, with another tool that does not take the lock.
            Err(Failed::Server(error)) if tries < TRIES && is_race(&error) => {
                tries += 1;
                sleep(PAUSE * tries).await;
            }
            Err(Failed::Server(error)) => return Err(failed(error)),
            Err(Failed::Store(error)) => return Err(error),
        }
    }
    check(client, statements, deadline).await
}

enum Failed {
    Server(tokio_postgres::Error),
    Store(StoreError),
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Server(error)
    }
}

/// All that is missing, in one transaction.
async fn apply(
    client: &Client,
    names: &Names,
    applied: i32,
    deadline: Instant,
) -> Result<(), Failed> {
    let lent = client.lend(deadline).await?.closed_unless_returned();
    let running = async {
        let mut script = String::from("BEGIN ISOLATION LEVEL READ COMMITTED;\n");
        // Of the transaction, not of the session: a pooler may hand on the session.
        script += &format!("SELECT pg_advisory_xact_lock({});\n", lock_of(names));
        if let Some(schema) = names.schema() {
            let known = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)";
            let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&schema, Type::TEXT)];
            let known = lent.client().query_typed_one(known, &parameters).await?;
            // Where it is there, the right to make one is not needed.
            if !known.try_get::<_, bool>(0)? {
                script += &format!("CREATE SCHEMA IF NOT EXISTS {};\n", quoted(schema));
            }
        }
        for migration in MIGRATIONS.iter().filter(|known| known.version > applied) {
            script += &names.applied_to(migration.text);
        }
        script += "COMMIT;";
        lent.client().batch_execute(&script).await
    };
    match timeout_at(deadline, running).await {
        Ok(result) => {
            result?;
            lent.give_back();
            Ok(())
        }
        Err(_) => Err(too_slow(MIGRATION_LIMIT).into()),
    }
}

/// What the database says was applied.
struct Found {
    version: i32,
    oldest_reader: i32,
}

impl Found {
    fn judge(&self) -> Result<(), PostgresSchemaError> {
        let found = self.version;
        if found < VERSION {
            let needed = VERSION;
            return Err(PostgresSchemaError::Older { found, needed });
        }
        // A newer version says itself how old a release may be to work with it.
        if self.oldest_reader > VERSION {
            return Err(PostgresSchemaError::Newer {
                found,
                needed: self.oldest_reader,
                known: VERSION,
            });
        }
        Ok(())
    }
}

async fn version(
    client: &Client,
    statements: &Statements,
    deadline: Instant,
) -> Result<Option<Found>, StoreError> {
    match client.row(&statements.version, &[], deadline).await {
        Ok(Some(row)) => Ok(Some(Found {
            version: get(&row, 0)?,
            oldest_reader: get(&row, 1)?,
        })),
        Ok(None) => Ok(None),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_missing(error: &StoreError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref());
    source == Some(&PostgresSchemaError::Missing)
}

fn is_race(error: &tokio_postgres::Error) -> bool {
    [
        SqlState::DUPLICATE_TABLE,
        SqlState::DUPLICATE_OBJECT,
        SqlState::DUPLICATE_SCHEMA,
        SqlState::UNIQUE_VIOLATION,
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::T_R_DEADLOCK_DETECTED,
    ]
    .iter()
    .any(|code| error.code() == Some(code))
}

/// The advisory lock of those who migrate one table.
fn lock_of(names: &Names) -> i64 {
    let table = crc32fast::hash(names.table().as_bytes());
    (LOCKS << 32) | i64::from(table)
}

/// What this release writes.
const VERSION: i32 = MIGRATIONS[MIGRATIONS.len() - 1].version;
/// PostgreSQL 12, for `MATERIALIZED`.
const OLDEST_SERVER: i32 = 120_000;
const MIGRATION_LIMIT: Duration = Duration::from_secs(60);
/// How often the losers of a race against somebody who does not take the lock look again.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);
/// Told apart from the application's own advisory locks by nothing better than luck.
const LOCKS: i64 = 0x1de3_707e;

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(version: i32, oldest_reader: i32) -> Result<(), PostgresSchemaError> {
        let found = Found {
            version,
            oldest_reader,
        };
        found.judge()
    }

    #[test]
    fn a_newer_version_works_as_long_as_it_says_so() {
        assert_eq!(judge(VERSION, VERSION), Ok(()));
        assert_eq!(judge(VERSION + 1, VERSION), Ok(()));
        let newer = PostgresSchemaError::Newer {
            found: VERSION + 2,
            needed: VERSION + 1,
            known: VERSION,
        };
        assert_eq!(judge(VERSION + 2, VERSION + 1), Err(newer));
        let older = PostgresSchemaError::Older {
            found: VERSION - 1,
            needed: VERSION,
        };
        assert_eq!(judge(VERSION - 1, 1), Err(older));
    }

    #[test]
    fn migrations_are_numbered_without_gaps() {
        for (n, migration) in (1..).zip(&MIGRATIONS) {
            assert_eq!(migration.version, n);
            let records = format!("(version, oldest_reader) VALUES ({n}, ");
            assert!(
                migration.text.contains(&records),
                "{n} does not record itself"
            );
        }
    }
}
