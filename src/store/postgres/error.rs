//! What went wrong, in the words of the store contract: a kind, and what to do.

use std::error::Error;
use std::time::Duration;

use deadpool_postgres::PoolError;
use tokio_postgres::error::SqlState;

use crate::error::{StoreError, StoreErrorKind};

/// Tables that are not those of this release: the [`source`](std::error::Error::source) of a
/// [`StoreError`] of kind [`Other`](StoreErrorKind::Other).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresSchemaError {
    /// There are none.
    #[error("the tables are missing")]
    Missing,
    /// An older release made them.
    #[error("the tables have version {found}; this release needs version {needed}")]
    Older {
        /// What the database says.
        found: i32,
        /// The version of this release.
        needed: i32,
    },
    /// A newer release made them, and they need a newer release.
    #[error(
        "the tables have version {found}, which needs a release that knows version {needed}; \
         this one knows version {known}"
    )]
    Newer {
        /// What the database says.
        found: i32,
        /// The oldest version whose releases still work with them.
        needed: i32,
        /// The version of this release.
        known: i32,
    },
    /// A column is missing or has another type.
    #[error("the columns are not those of a table that `migrate()` makes")]
    Altered,
    /// The server is older than what the statements need.
    #[error("the server has version number {found}; {needed} is the least")]
    ServerTooOld {
        /// `server_version_num` of the server.
        found: i32,
        /// The least that works.
        needed: i32,
    },
    /// Keys are Unicode text, and the database cannot keep every text.
    #[error("the database is encoded in {found}; it has to be UTF8")]
    Encoding {
        /// `server_encoding` of the database.
        found: String,
    },
}

impl From<PostgresSchemaError> for StoreError {
    fn from(problem: PostgresSchemaError) -> Self {
        let advice = match problem {
            PostgresSchemaError::Missing => {
                "the tables are missing: call `migrate()`, or run the files of \
                 migrations/postgres; if they are there, set `table` and `schema`"
            }
            PostgresSchemaError::Older { .. } => {
                "the tables are older than this release: call `migrate()`, or run the newer files \
                 of migrations/postgres"
            }
            PostgresSchemaError::Newer { .. } => {
                "the tables are newer than this release can work with: deploy a newer release"
            }
            PostgresSchemaError::Altered => {
                "the columns are not those that `migrate()` makes: compare them with \
                 migrations/postgres"
            }
            PostgresSchemaError::ServerTooOld { .. } => {
                "the server is too old: PostgreSQL 12 or newer is needed"
            }
            PostgresSchemaError::Encoding { .. } => {
                "the database is not encoded in UTF8: create one with ENCODING 'UTF8'"
            }
        };
        StoreError::new(StoreErrorKind::Other, advice).with_source(problem)
    }
}

/// What the server said, without the details: those can hold a row.
#[derive(Debug, thiserror::Error)]
#[error("{message} (SQLSTATE {code})")]
struct ServerError {
    code: String,
    message: String,
}

/// What may be done about a statement that failed, besides saying so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// It lost against another transaction and was not applied: once more, under READ COMMITTED.
    Isolate,
    /// The server does not know the prepared statement any more: once more, unprepared.
    Unprepared,
    /// The connection is gone: once more, on another one.
    Reconnect,
    /// Not by the same server: a later call needs another connection.
    Elsewhere,
    None,
}

impl Remedy {
    pub(super) fn of(error: &tokio_postgres::Error) -> Self {
        let Some(code) = error.code() else {
            return if is_io(error) {
                Self::Reconnect
            } else {
                Self::None
            };
        };
        match code {
            &SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED => {
                Self::Isolate
            }
            // The second one is what a changed table makes of a cached plan.
            &SqlState::INVALID_SQL_STATEMENT_NAME
            | &SqlState::FEATURE_NOT_SUPPORTED
            | &SqlState::DUPLICATE_PSTATEMENT => Self::Unprepared,
            // The server closes the connection behind these.
            &SqlState::ADMIN_SHUTDOWN
            | &SqlState::CRASH_SHUTDOWN
            | &SqlState::CANNOT_CONNECT_NOW => Self::Reconnect,
            &SqlState::READ_ONLY_SQL_TRANSACTION => Self::Elsewhere,
            code if code.code().starts_with("08") => Self::Reconnect,
            _ => Self::None,
        }
    }
}

/// A statement, or a connection, that failed.
pub(super) fn failed(error: tokio_postgres::Error) -> StoreError {
    let Some(database) = error.as_db_error() else {
        return without_code(error);
    };
    let (kind, advice) = match database.code() {
        &SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME => {
            return PostgresSchemaError::Missing.into();
        }
        &SqlState::UNDEFINED_COLUMN | &SqlState::DATATYPE_MISMATCH => {
            return PostgresSchemaError::Altered.into();
        }
        code => advice(code),
    };
    StoreError::new(kind, advice).with_source(ServerError {
        code: database.code().code().to_owned(),
        message: database.message().to_owned(),
    })
}

fn advice(code: &SqlState) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Corrupt, Other, Unavailable};
    match code {
        &SqlState::INVALID_PASSWORD | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION => (
            Other,
            "the server refused the user or the password: check the URL, and pg_hba.conf",
        ),
        &SqlState::INVALID_CATALOG_NAME => (Other, "the database does not exist: create it"),
        &SqlState::INSUFFICIENT_PRIVILEGE => (
            Other,
            "the user lacks a privilege: grant SELECT, INSERT, UPDATE and DELETE on the table of \
             keys and SELECT on its schema table; `migrate()` needs CREATE on the schema",
        ),
        &SqlState::READ_ONLY_SQL_TRANSACTION => (
            Unavailable,
            "the server is read only, a replica perhaps: name the primary, or set \
             target_session_attrs=read-write in the URL",
        ),
        &SqlState::INVALID_SQL_STATEMENT_NAME | &SqlState::DUPLICATE_PSTATEMENT => (
            Other,
            "prepared statements get lost, behind a connection pooler perhaps: set \
             `PreparedStatements::Never`",
        ),
        &SqlState::TOO_MANY_CONNECTIONS => (
            Unavailable,
            "the server has no connection left: raise max_connections, or lower `pool_size`",
        ),
        &SqlState::DISK_FULL => (Unavailable, "the server's disk is full"),
        &SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED => (
            Unavailable,
            "the statement lost against other transactions again and again",
        ),
        &SqlState::ADMIN_SHUTDOWN | &SqlState::CRASH_SHUTDOWN | &SqlState::CANNOT_CONNECT_NOW => {
            (Unavailable, "the server is starting or shutting down")
        }
        &SqlState::QUERY_CANCELED => (
            Unavailable,
            "the server cancelled the statement: see its statement_timeout",
        ),
        &SqlState::LOCK_NOT_AVAILABLE => (
            Unavailable,
            "another transaction holds the record: see lock_timeout",
        ),
        code if code.code().starts_with("XX") => {
            (Corrupt, "the server cannot read the record: see its log")
        }
        code if ["08", "53", "57", "58"].contains(&class(code)) => {
            (Unavailable, "the server cannot serve the statement now")
        }
        _ => (Other, "the server refused the statement"),
    }
}

fn without_code(error: tokio_postgres::Error) -> StoreError {
    let (kind, advice) = if is_refused_certificate(&error) {
        (
            StoreErrorKind::Other,
            "TLS could not be agreed on: name the file with the server's root certificate as \
             sslrootcert in the URL, and the host as the certificate names it",
        )
    } else if is_io(&error) {
        (
            StoreErrorKind::Unavailable,
            "the connection to the server could not be made, or broke: check host and port",
        )
    } else {
        (
            StoreErrorKind::Other,
            "the connection could not be set up: see the cause",
        )
    };
    StoreError::new(kind, advice).with_source(error)
}

/// A value of a row that could not be read as the type that the column should have.
pub(super) fn unreadable(error: tokio_postgres::Error) -> StoreError {
    let source = error.source();
    if source.is_some_and(|source| source.is::<tokio_postgres::types::WrongType>()) {
        return PostgresSchemaError::Altered.into();
    }
    StoreError::corrupt("a column of the record cannot be read; the row is left as it is")
        .with_source(error)
}

pub(super) fn no_connection(error: PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => failed(error),
        PoolError::Timeout(_) => StoreError::unavailable(
            "no connection of the pool was free in time: raise its size or its wait limit",
        )
        .with_source(error),
        PoolError::Closed => {
            StoreError::unavailable("the pool was closed: keep it open as long as the service runs")
                .with_source(error)
        }
        PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_) => {
            StoreError::new(StoreErrorKind::Other, "the pool is not set up rightly")
                .with_source(error)
        }
    }
}

pub(super) fn pool_exhausted(limit: Duration) -> StoreError {
    StoreError::unavailable(format!(
        "no connection within {limit:?}: the pool is too small, or the server cannot be reached"
    ))
}

pub(super) fn too_slow(limit: Duration) -> StoreError {
    StoreError::unavailable(format!(
        "no answer within {limit:?}: the server is overloaded, cannot be reached, or another \
         transaction holds the record"
    ))
}

fn is_io(error: &tokio_postgres::Error) -> bool {
    error.is_closed() || io_cause(error).is_some()
}

fn is_refused_certificate(error: &tokio_postgres::Error) -> bool {
    let refusal = io_cause(error).and_then(std::io::Error::get_ref);
    refusal.is_some_and(|cause| cause.is::<rustls::Error>())
}

fn io_cause(error: &tokio_postgres::Error) -> Option<&std::io::Error> {
    let mut cause = error.source()?;
    loop {
        match cause.downcast_ref() {
            Some(io) => return Some(io),
            None => cause = cause.source()?,
        }
    }
}

fn class(code: &SqlState) -> &str {
    code.code().get(..2).unwrap_or_default()
}
