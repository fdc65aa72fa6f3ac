//! Idempotency for tower services.

#![forbid(unsafe_code)]
// A public item has a path, and one that has none is not `pub`.
#![warn(unnameable_types, unreachable_pub)]
// Nothing here panics on what came from outside, or ends or talks past the application.
#![warn(
    clippy::exit,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unreachable,
    clippy::unwrap_used
)]
// Lengths, statuses and times are not cut silently; a panic or an error that can come is documented.
#![warn(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc
)]
// A lock or a claim is given up where one can see it.
#![warn(clippy::mem_forget, clippy::significant_drop_in_scrutinee)]
// A shared thing is cloned by name; clippy.toml says what not to call, and why.
#![warn(clippy::clone_on_ref_ptr)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod admission;
mod attempt;
mod claim;
mod detach;
mod error;
pub mod fingerprint;
mod heartbeat;
pub mod http;
mod idempotency;
mod key;
mod outcome;
mod record;
mod retention;
mod run;
mod scope;
pub mod store;
mod telemetry;
#[cfg(feature = "testing")]
#[allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    reason = "it is a test: it fails by panicking, and runs where a test runs"
)]
pub mod testing;
mod time_limit;

pub use admission::{Admission, AdmitError, Holder, Replay, Settled};
pub use async_trait::async_trait;
pub use attempt::{Attempt, AttemptGuard, MissingSecret, NoteError};
pub use claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
pub use error::{ConfigError, StoreError, StoreErrorKind};
pub use fingerprint::{Fingerprint, FingerprintDescription, FingerprintMatch, FingerprintRecipe};
pub use http::{
    IdempotencyLayer, IdempotencyLayerBuilder, IdempotencyService, InFlight, MissingKey, OnNoStore,
    OnOutage, Policy, PolicyProblem, Problem, ProblemKind, RequestBody, ResponseBody, Scope,
};
pub use idempotency::{Idempotency, IdempotencyBuilder};
pub use key::{IdempotencyKey, KeyAdvice, KeyError, KeyFormat, KeySyntax, PersonalData};
pub use outcome::{DecodeError, Fields, Outcome};
pub use record::{Notes, Record, State, Timestamp};
pub use retention::{Disposition, RetentionOverride, RetentionPolicy};
pub use run::{Advice, Failure, Ran, RunError};
pub use scope::ScopedKey;
#[cfg(feature = "memory")]
pub use store::MemoryStore;
pub use store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};
#[cfg(feature = "postgres")]
pub use store::{PostgresOptions, PostgresSchemaError, PostgresStore, PreparedStatements};
