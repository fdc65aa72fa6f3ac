//! The engine over a store that fails on demand, on a clock that stands still.

#[path = "../support/engine.rs"]
mod engine;
#[cfg(feature = "tracing")]
#[path = "../support/events.rs"]
mod events;
#[path = "../support/odd.rs"]
mod odd;

mod admitting;
mod attempt;
mod claim_faults;
mod heartbeat;
mod settling;
