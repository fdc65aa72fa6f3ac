//! The HTTP front door: [`IdempotencyLayer`] for axum, hyper and tonic services.
//!
//! What happens to a request, in this order:
//!
//! 1. A method that is not guarded (all but POST and PATCH) passes, its key ignored.
//! 2. The key is read and checked before the body is touched (one that is in the body: after 4). Missing: it passes, or 400
//!    `missing_key`. Malformed: 400 `invalid_key`. Nothing is stored.
//! 3. The scope is taken from authenticated state.
//! 4. The body is read within its limit (413 `body_too_large`) and fingerprinted.
//! 5. The key is claimed. From here on the attempt does not depend on the connection: a client that
//!    leaves finds the result when it retries.
//! 6. The handler runs, or the kept response is replayed, or the request is answered with 409 or 422.
//! 7. The response is recorded, and only then answered.
//!
//! Every refusal is a problem document, or a status where the request is a gRPC call; see
//! [`ProblemKind`] and [`grpc`].

mod body;
mod body_key;
mod config;
#[cfg(feature = "axum")]
mod extract;
mod future;
pub mod grpc;
mod guarded;
mod header;
mod key_source;
mod layer;
mod original_uri;
mod policy;
mod problem;
mod scope;
mod service;
mod settling;

pub use body::{RequestBody, ResponseBody};
pub use config::{InFlight, MissingKey, OnNoStore, OnOutage};
pub use future::ResponseFuture;
#[cfg(feature = "client")]
pub(crate) use header::{ERROR, IDEMPOTENCY_KEY, REPLAYED, UNPROTECTED};
pub use key_source::KeySource;
pub use layer::{IdempotencyLayer, IdempotencyLayerBuilder};
pub use policy::{Policy, PolicyProblem};
pub use problem::{Problem, ProblemKind};
pub use scope::Scope;
pub use service::IdempotencyService;
