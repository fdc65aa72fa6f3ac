//! What a process that died leaves behind, and how it is put in order again.

#![cfg(all(feature = "memory", feature = "testing"))]

#[path = "../support/app.rs"]
mod app;
#[path = "../support/engine.rs"]
mod engine;
#[cfg(feature = "tracing")]
#[path = "../support/events.rs"]
mod events;
mod gateway;
#[path = "../support/odd.rs"]
mod odd;
#[path = "../support/patience.rs"]
mod patience;
mod places;
#[cfg(feature = "postgres")]
#[path = "../support/postgres.rs"]
mod postgres_server;
#[cfg(feature = "redis")]
#[path = "../support/redis.rs"]
mod redis_server;
#[cfg(feature = "sqlite-system")]
#[path = "../support/sqlite.rs"]
mod sqlite_file;

mod closing;
mod inline;
mod lost_claim;
mod operator;
mod phases;
mod sweeping;
mod sweeping_task;
mod typed;
