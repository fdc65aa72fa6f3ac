//! The client half: keys, retries and their limits, over a scripted service with a paused clock, over
//! real sockets, and against the layer itself.

mod classes;
mod example;
mod journal;
mod keys;
mod limits;
mod schedule;
mod script;
mod sockets;
#[path = "../support/example.rs"]
mod support;
#[path = "../../examples/client/unlucky.rs"]
mod unlucky;
