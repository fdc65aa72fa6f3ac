//! Where the store meets threads and time: swapped for models in `models.rs`, and nowhere else.

#[cfg(not(all(test, idempotency_loom)))]
pub(super) use self::real::*;

#[cfg(all(test, idempotency_loom))]
pub(super) use super::models::seam::*;

#[cfg(not(all(test, idempotency_loom)))]
mod real {
    pub(in super::super) use std::hash::RandomState as Hashing;
    pub(in super::super) use std::sync::atomic::{AtomicUsize, Ordering};
    pub(in super::super) use std::sync::{Mutex, MutexGuard};

    pub(in super::super) use tokio::sync::Notify;

    pub(in super::super) use super::super::clock::Clock;

    /// In how many parts the store is locked. A power of two.
    pub(in super::super) const SHARDS: usize = 64;
}
