//! A handler's own rows and its outcome in one transaction: both or neither, whatever breaks.

#![cfg(all(
    feature = "postgres",
    feature = "sqlite-system",
    feature = "encrypt",
    feature = "axum",
    feature = "testing"
))]

#[path = "../support/app.rs"]
mod app;
#[path = "../support/claims.rs"]
mod claims;
#[path = "../support/patience.rs"]
mod patience;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/sqlite.rs"]
mod sqlite;

mod child;
mod database;
mod on_both;
mod on_postgres;
mod on_sqlite;
mod one_commit;
mod one_commit_sqlite;
