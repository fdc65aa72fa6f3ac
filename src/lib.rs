//! Idempotency for tower services.

#![forbid(unsafe_code)]

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
    OnOutage, Policy, Problem, ProblemKind, RequestBody, ResponseBody, Scope,
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
