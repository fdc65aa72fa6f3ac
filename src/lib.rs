//! Idempotency for tower services.

#![forbid(unsafe_code)]

mod claim;
mod error;
pub mod fingerprint;
mod key;
mod outcome;
mod record;
mod scope;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use async_trait::async_trait;
pub use claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
pub use error::{ConfigError, StoreError, StoreErrorKind};
pub use fingerprint::{Fingerprint, FingerprintMatch};
pub use key::IdempotencyKey;
pub use outcome::{DecodeError, Fields, Outcome};
pub use record::{Notes, Record, State, Timestamp};
pub use scope::ScopedKey;
#[cfg(feature = "memory")]
pub use store::MemoryStore;
pub use store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};
