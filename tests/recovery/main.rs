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

mod inline;
mod sweeping;
mod sweeping_task;
mod typed;
