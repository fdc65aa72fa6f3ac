//! How much the store holds, and how much it may.

use crate::error::StoreError;

use super::sync::{AtomicUsize, Ordering};

/// Counts over all shards. A place is reserved before an entry is inserted, so that the bounds hold
/// at every moment; what a completion adds is counted but never refused.
pub(super) struct Room {
    entries: AtomicUsize,
    bytes: AtomicUsize,
    max_entries: AtomicUsize,
    max_bytes: AtomicUsize,
    // Unresolved records that were dropped on the way and that no purge has told of yet.
    untold: AtomicUsize,
}

impl Room {
    pub(super) fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            entries: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            max_entries: AtomicUsize::new(max_entries),
            max_bytes: AtomicUsize::new(max_bytes),
            untold: AtomicUsize::new(0),
        }
    }

    pub(super) fn set_max_entries(&self, entries: usize) {
        self.max_entries.store(entries, Ordering::Relaxed);
    }

    pub(super) fn set_max_bytes(&self, bytes: usize) {
        self.max_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes the place of one entry of this weight, if there is one.
    pub(super) fn reserve(&self, weight: usize) -> bool {
        if !add_within(&self.entries, 1, &self.max_entries) {
            return false;
        }
        let fits = add_within(&self.bytes, weight, &self.max_bytes);
        if !fits {
            self.entries.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    /// Gives back the place of one entry.
    pub(super) fn free(&self, weight: usize) {
        self.entries.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(weight, Ordering::Relaxed);
    }

    /// Counts an entry anew that weighed something else before.
    pub(super) fn reweigh(&self, before: usize, after: usize) {
        if after > before {
            self.bytes.fetch_add(after - before, Ordering::Relaxed);
        } else if after < before {
            self.bytes.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Remembers that unresolved records were dropped outside a purge.
    pub(super) fn owe(&self, unresolved: usize) {
        if unresolved > 0 {
            self.untold.fetch_add(unresolved, Ordering::Relaxed);
        }
    }

    /// Hands over at most `limit` of what is owed.
    pub(super) fn settle(&self, limit: usize) -> usize {
        let take = |owed: usize| Some(owed - owed.min(limit));
        let owed = self
            .untold
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        owed.unwrap_or(0).min(limit)
    }

    pub(super) fn full(&self) -> StoreError {
        StoreError::unavailable(format!(
            "the memory store is full ({} of {} entries, {} of {} bytes, nothing expired): raise \
             `max_entries` or `max_bytes`, keep outcomes for a shorter time, or use a store with a \
             disk",
            self.entries(),
            self.max_entries.load(Ordering::Relaxed),
            self.bytes(),
            self.max_bytes.load(Ordering::Relaxed),
        ))
    }
}

fn add_within(count: &AtomicUsize, more: usize, max: &AtomicUsize) -> bool {
    let max = max.load(Ordering::Relaxed);
    count
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
            count.checked_add(more).filter(|sum| *sum <= max)
        })
        .is_ok()
}
