//! Runs the handler of a request once per `Idempotency-Key`, and answers every repetition with what
//! it answered the first time.
//!
#![cfg_attr(feature = "memory", doc = "```")]
#![cfg_attr(not(feature = "memory"), doc = "```ignore")]
//! use axum::{Router, http::StatusCode, routing::post};
//! use tower_idempotency::{IdempotencyLayer, MemoryStore, MissingKey};
//!
//! async fn charge(body: String) -> (StatusCode, String) {
//!     (StatusCode::CREATED, format!("charged {body}"))
//! }
//!
//! # fn main() -> Result<(), tower_idempotency::ConfigError> {
//! let layer = IdempotencyLayer::builder(MemoryStore::new())
//!     .missing_key(MissingKey::Reject)
//!     .build()?;
//! let app: Router = Router::new().route("/charges", post(charge)).layer(layer);
//! # Ok(()) }
//! ```
//!
//! The [README](_documentation::readme) says where the layer goes among others and how a client
//! retries; [DESIGN](_documentation::design) says why it is so;
//! [OPERATIONS](_documentation::operations) says what to do when things go wrong. There is a guide for
//! [webhooks](_documentation::webhooks), for [jobs](_documentation::jobs) and for
//! [gateways](_documentation::gateways).
//!
//! # The contract
//!
//! 1. **At most one live attempt.** For one key, two attempts never both hold a live claim.
//! 2. **A kept result is final.** Every later request with the same fingerprint gets it, byte for
//!    byte, until its record expires. Nothing overwrites it.
//! 3. **A handler that did not return is never run again** unless
//!    [`OnAbandoned::Rerun`] says that this is safe. After a crash, a panic or an abort the outcome is
//!    *unknown*, which is neither success nor failure.
//! 4. **A handler that returned decides.** What it answered says whether the result is kept or the
//!    key is free: by the [`RetentionPolicy`], or by a [`RetentionOverride`] of its own.
//! 5. **No answer before the record.** The first response leaves after the store has acknowledged
//!    what is recorded of it, or says `Idempotency-Result: not-saved`.
//! 6. **A rejected request changes nothing.** 400, 409, 413 and 422 leave the record as it was.
//!
//! These hold as long as the record does. [`MemoryStore`] forgets when the process ends, and no other
//! process sees what it holds; a record expires after its retention, 24 h by default.
//!
//! # The words
//!
//! A request's *key* names an operation, its [`Scope`] says whose operation, and its [`Fingerprint`]
//! says which request that was. Whoever comes first *claims* the key and holds it under a *lease* that
//! is renewed while the attempt lives. The *outcome* is recorded and *replayed* for as long as the
//! *retention* lasts. A claim whose lease ends without an outcome is *abandoned*.
//!
//! # Where things are
//!
//! | for | look at |
//! |---|---|
//! | HTTP services | [`IdempotencyLayer`], its [builder](IdempotencyLayerBuilder), [`http`] |
//! | gRPC services | [`http::grpc`], [`GrpcCode`] |
//! | webhooks | [`IdempotencyLayer::webhooks`], [`KeySource`] |
//! | handlers | [`Attempt`], [`RetentionOverride`] |
//! | clients | the codes of [`ProblemKind`] |
#![cfg_attr(feature = "client", doc = "| clients in Rust | [`client`] |")]
//! | jobs and queues | [`Idempotency::run`], [`Failure`], [`RunError`] |
//! | front doors of your own | [`Idempotency::admit`], [`Admission`] |
//! | times and limits | [`IdempotencyBuilder`] |
//! | what is the same request | [`FingerprintRecipe`], [`fingerprint`] |
//! | which answers are kept | [`RetentionPolicy`] |
//! | stores | [`Store`] and its sixteen rules, [`store`], [`store::open`] |
//! | rows and answer in one commit | [`Idempotency::recording`], [`IdempotencyBuilder::one_commit`] |
//! | attempts that died | [`IdempotencyBuilder::reconciler`], [`Verdict`], [`Sweeper`], [OPERATIONS](_documentation::operations) |
//! | start-up checks | [`Idempotency::probe`] |
#![cfg_attr(feature = "testing", doc = "| tests of stores | [`testing`] |")]
//! | API documentation | [`Policy`] |
//!
//! # Features
//!
//! * **`memory`** (default): [`MemoryStore`], for one process and for tests.
//! * **`tracing`** (default): the span `idempotency`, and an event for everything that needs a look.
//! * **`sqlite`**: [`SqliteStore`](store), a file, with SQLite compiled in; **`sqlite-system`** is the same with the
//!   SQLite library of the system (3.37 or later).
//! * **`postgres`**: [`PostgresStore`](store), with TLS by rustls.
//! * **`redis`**: [`RedisStore`](store), for one server, Sentinel, or a cluster, with TLS by rustls.
//! * **`encrypt`**: `EncryptedStore`, which seals what any store keeps.
//! * **`client`**: layers for programs that call such services: one key per operation, retries with
//!   full jitter, and a journal that keeps keys over restarts.
//! * **`axum`**: extractors for axum 0.8, and the original URI inside nested routers. Switch it on in
//!   every axum service.
//! * **`metrics`**: counters, gauges and histograms through the `metrics` facade.
//! * **`testing`**: the conformance kit for stores, and a store that fails on demand.
//!
//! `cargo doc --open --all-features` shows what all of them add.
//!
//! # The draft
//!
//! The header follows draft-ietf-httpapi-idempotency-key-header-07, which expired in April 2026 and
//! never became an RFC.

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

mod admission;
mod attempt;
mod claim;
#[cfg(feature = "client")]
pub mod client;
mod detach;
mod error;
pub mod fingerprint;
mod grpc_code;
mod heartbeat;
pub mod http;
mod idempotency;
mod key;
mod one_commit;
mod outcome;
mod probe;
mod reconciler;
mod record;
mod recording;
mod retention;
mod run;
mod scope;
mod settings;
pub mod store;
mod store_call;
mod sweeper;
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
mod transaction;

pub use admission::{Admission, AdmitError, Holder, Replay, Settled};
pub use async_trait::async_trait;
pub use attempt::{Attempt, AttemptGuard, MissingSecret, NoteError};
pub use claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
pub use error::{ConfigError, StoreError, StoreErrorKind};
pub use fingerprint::{Fingerprint, FingerprintDescription, FingerprintMatch, FingerprintRecipe};
pub use grpc_code::GrpcCode;
pub use http::{
    IdempotencyLayer, IdempotencyLayerBuilder, IdempotencyService, InFlight, KeySource, MissingKey,
    OnNoStore, OnOutage, Policy, PolicyProblem, Problem, ProblemKind, RequestBody, ResponseBody,
    Scope,
};
pub use idempotency::Idempotency;
pub use key::{IdempotencyKey, KeyAdvice, KeyError, KeyFormat, KeySyntax, PersonalData};
pub use outcome::{DecodeError, Fields, Outcome};
pub use probe::{ProbeError, ProbeStep, probe};
pub use reconciler::Verdict;
pub use record::{Notes, Record, State, Timestamp};
pub use retention::{Disposition, RetentionOverride, RetentionPolicy};
pub use run::{Advice, Failure, Ran, RunError};
pub use scope::ScopedKey;
pub use settings::IdempotencyBuilder;
#[cfg(feature = "memory")]
pub use store::MemoryStore;
pub use store::{
    AbandonedPage, Begun, Committed, Completion, Cursor, Fenced, OneCommit, OpenTransaction,
    PrefixedStore, Purged, RecordingError, Resolution, Store, StoreProperties, Transactional,
};
#[cfg(feature = "encrypt")]
pub use store::{EncryptedStore, Keyring, UnsealError};
#[cfg(feature = "postgres")]
pub use store::{
    PostgresConnection, PostgresOneCommit, PostgresOptions, PostgresRecording, PostgresSchemaError,
    PostgresStore, PostgresTransaction, PreparedStatements,
};
#[cfg(feature = "redis")]
pub use store::{RedisConnection, RedisOptions, RedisStore};
#[cfg(feature = "sqlite-system")]
pub use store::{
    SqliteOneCommit, SqliteOptions, SqliteRecording, SqliteStore, SqliteTransaction, SqliteWork,
};
pub use sweeper::{Sweeper, Sweeping, Swept};
pub use transaction::{NoTransaction, Transaction, TransactionSlot};

/// The documents beside the sources, compiled with the tests.
#[cfg(all(any(doc, doctest), feature = "memory"))]
pub mod _documentation {
    /// README.
    #[doc = include_str!("../README.md")]
    pub mod readme {}
    /// Events that are delivered more than once.
    #[doc = include_str!("../WEBHOOKS.md")]
    pub mod webhooks {}
    /// Queues, rows, and one operation with several ways in.
    #[doc = include_str!("../JOBS.md")]
    pub mod jobs {}
    /// Keys for payment gateways.
    #[doc = include_str!("../GATEWAYS.md")]
    pub mod gateways {}
    /// Why it is so.
    #[doc = include_str!("../DESIGN.md")]
    pub mod design {}
    /// When things go wrong.
    #[doc = include_str!("../OPERATIONS.md")]
    pub mod operations {}
    /// Other crates, and when to use them.
    #[doc = include_str!("../COMPARE.md")]
    pub mod compare {}
    /// What a contributor needs.
    #[cfg_attr(feature = "testing", doc = include_str!("../CONTRIBUTING.md"))]
    pub mod contributing {}
    /// Changes.
    #[doc = include_str!("../CHANGELOG.md")]
    pub mod changelog {}
}
