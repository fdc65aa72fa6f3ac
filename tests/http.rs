//! What a client sees of a guarded service, and what its handler sees of the layer.
//!
//! One module per topic; each drives whole requests through the layer over a real memory store.

#[path = "support/app.rs"]
mod app;

// The request.
#[path = "http/body_key.rs"]
mod body_key;
#[path = "http/fingerprint.rs"]
mod fingerprint;
#[path = "http/key.rs"]
mod key;
#[path = "http/limits.rs"]
mod limits;
#[path = "http/methods.rs"]
mod methods;
#[path = "http/scope.rs"]
mod scope;
#[path = "http/webhooks.rs"]
mod webhooks;

// The response.
#[path = "http/bodies.rs"]
mod bodies;
#[path = "http/problems.rs"]
mod problems;
#[path = "http/replay.rs"]
mod replay;
#[path = "http/retention.rs"]
mod retention;

// What may come between.
#[path = "http/disconnect.rs"]
mod disconnect;
#[path = "http/faults.rs"]
mod faults;
#[path = "http/in_flight.rs"]
mod in_flight;
#[path = "http/layers.rs"]
mod layers;
#[path = "http/time.rs"]
mod time;

// What its owners see of it.
#[path = "http/handler.rs"]
mod handler;
#[cfg(feature = "metrics")]
#[path = "http/metrics.rs"]
mod metrics;
#[path = "http/policy.rs"]
mod policy;
#[path = "http/settings.rs"]
mod settings;
#[cfg(feature = "tracing")]
#[path = "http/tracing.rs"]
mod tracing;
