//! What a client sees of a guarded service, and what its handler sees of the layer.
//!
//! One module per topic; each drives whole requests through the layer over a real memory store.

#[path = "support/app.rs"]
mod app;
#[path = "http/problems.rs"]
mod problems;
