//! Black box over raw sockets: what a client sees of the puppet, byte for byte, over HTTP/1.1 and
//! HTTP/2.
//!
//! Each test starts puppets of its own. None waits for a time to pass: handlers that must still run
//! take an hour, and whatever must have happened is asked for at `/count/{name}`.

#![cfg(all(feature = "memory", unix))]

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
#[path = "support/puppet.rs"]
mod puppet;
#[path = "support/raw_h2.rs"]
mod raw_h2;

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
