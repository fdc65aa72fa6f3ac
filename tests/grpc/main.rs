//! gRPC: tonic's server with the layer, tonic's client, and what goes over the wire between them.

#[path = "../support/app.rs"]
mod app;
#[path = "../support/patience.rs"]
mod patience;
#[path = "../../examples/tonic/text.rs"]
mod text;

mod bodies;
mod calls;
mod compression;
mod refusals;
mod retention;
mod retries;
mod shop;
mod streams;
