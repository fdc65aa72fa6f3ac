//! Black box over raw sockets: what a client sees of the puppet, byte for byte, over HTTP/1.1 and
//! HTTP/2.
//!
//! Each test starts puppets of its own, which keep their records in memory; `stores` runs some of the
//! tests on each durable store, and `restart` those that only such a store can pass.
//!
//! None waits for a time to pass: handlers that must still run take an hour, and whatever must have
//! happened is asked for at `/count/{name}`.

#![cfg(unix)]

#[path = "support/example.rs"]
mod example;
#[path = "support/h1.rs"]
mod h1;
#[path = "support/h2.rs"]
mod h2;
#[path = "support/message.rs"]
mod message;
#[path = "support/patience.rs"]
mod patience;
#[cfg(any(
    feature = "sqlite-system",
    all(feature = "postgres", feature = "testing"),
    feature = "redis"
))]
#[path = "support/place.rs"]
mod place;
#[cfg(all(feature = "postgres", feature = "testing"))]
#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/puppet.rs"]
mod puppet;
#[path = "support/raw_h2.rs"]
mod raw_h2;
#[cfg(feature = "redis")]
#[path = "support/redis.rs"]
mod redis_server;
#[cfg(feature = "sqlite-system")]
#[path = "support/sqlite.rs"]
mod sqlite;

#[path = "wire/connection.rs"]
mod connection;
#[path = "wire/disconnect.rs"]
mod disconnect;
#[path = "wire/framing.rs"]
mod framing;
#[path = "wire/identity.rs"]
mod identity;
#[path = "wire/in_flight.rs"]
mod in_flight;
#[path = "wire/keys.rs"]
mod keys;
#[path = "wire/limits.rs"]
mod limits;
#[path = "wire/live.rs"]
mod live;
#[path = "wire/outcome.rs"]
mod outcome;
#[path = "wire/process.rs"]
mod process;
#[path = "wire/replay.rs"]
mod replay;
#[cfg(any(
    feature = "sqlite-system",
    all(feature = "postgres", feature = "testing"),
    feature = "redis"
))]
#[path = "wire/restart.rs"]
mod restart;
#[cfg(any(
    feature = "sqlite-system",
    all(feature = "postgres", feature = "testing"),
    feature = "redis"
))]
#[path = "wire/stores.rs"]
mod stores;
