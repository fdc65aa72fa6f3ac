//! The in-process store.

mod clock;
mod entry;
#[cfg(all(test, idempotency_loom))]
mod models;
mod room;
mod shard;
mod sync;
#[cfg(test)]
#[cfg(not(idempotency_loom))]
mod tests;

use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};

use self::clock::{Micros, micros};
use self::entry::{Entry, Leftovers};
use self::room::Room;
use self::shard::Shard;
use self::sync::{Clock, Hashing, Mutex, MutexGuard, Notify, SHARDS};

/// Remembers keys in this process: for a service of one process, and for tests.
///
/// It keeps the whole contract of [`Store`], but what it remembers ends with the process and no other
/// process sees it ([`properties`](Store::properties): neither durable nor shared). After a restart,
/// or behind a load balancer, a retry runs again. Where that would be a second payment, use a
/// database.
///
/// Clones share one set of records.
///
/// # Bounds
///
/// At most 1,000,000 entries and 512 MiB, both settable; [`bytes`](Self::bytes) says what is
/// counted. At a bound, new keys are refused with
/// [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable). Nothing that is unexpired is
/// ever forgotten to make room, and no completion is refused: outcomes of claims that were granted
/// may go beyond the bound of bytes, and new keys then wait until they are expired.
///
/// # Expiry
///
/// Every new key removes a few expired records, so the store needs no task of its own. Calling
/// [`purge`](Store::purge) now and then frees memory sooner, and is the only way to hear of records
/// that expired while nobody knew how their attempt ended.
///
/// # Time
///
/// Leases and retention run on [`tokio::time::Instant`]: even, and moved by
/// `tokio::time::{pause, advance}` in tests. Only [`changed`](Store::changed) needs a runtime.
///
/// # Example
///
/// ```
/// use tower_idempotency::MemoryStore;
///
/// let store = MemoryStore::new().max_entries(100_000).max_bytes(64 << 20);
/// let for_the_health_page = store.clone();
/// assert_eq!(for_the_health_page.len(), 0);
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    shards: Box<[Mutex<Shard>]>,
    // Keyed, because clients choose the keys.
    hashing: Hashing,
    clock: Clock,
    room: Room,
}

impl MemoryStore {
    /// An empty store, for at most 1,000,000 entries and 512 MiB.
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect();
        Self {
            inner: Arc::new(Inner {
                shards,
                hashing: Hashing::default(),
                clock: Clock::start(),
                room: Room::new(MAX_ENTRIES, MAX_BYTES),
            }),
        }
    }

    /// How many records it holds at most, expired ones that are not removed yet included. Default:
    /// 1,000,000.
    ///
    /// Holds for all clones, from now on. Zero is no "unlimited": it refuses every new key.
    #[must_use]
    pub fn max_entries(self, entries: usize) -> Self {
        self.inner.room.set_max_entries(entries);
        self
    }

    /// How many [`bytes`](Self::bytes) it holds at most before it refuses new keys. Default: 512 MiB.
    ///
    /// Holds for all clones, from now on. Zero is no "unlimited": it refuses every new key.
    #[must_use]
    pub fn max_bytes(self, bytes: usize) -> Self {
        self.inner.room.set_max_bytes(bytes);
        self
    }

    /// How many records it holds, expired ones that are not removed yet included.
    pub fn len(&self) -> usize {
        self.inner.room.entries()
    }

    /// Whether it holds no record at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many bytes its records are counted as: encoded outcomes, keys, notes, and 264 bytes for
    /// each entry.
    pub fn bytes(&self) -> usize {
        self.inner.room.bytes()
    }

    /// Moves the times of one record into the past, as if it had been written `by` earlier: its
    /// creation, the end of its lease, its completion and its expiry. Whether there is such a record.
    ///
    /// For [`Harness::age`](crate::testing::Harness::age), and for tests of services that want to
    /// meet an old record. No time goes below the Unix epoch.
    #[cfg(feature = "testing")]
    pub fn age(&self, key: &ScopedKey, by: Duration) -> bool {
        let aged = self
            .inner
            .update(key, |entry, _, left| entry.age(micros(by), left));
        aged.is_some()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("len", &self.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for MemoryStore {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("memory", false, false)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.inner.claim(request)
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        Ok(self.inner.fenced(claim, |entry, now, _| {
            entry.renew(claim.owner(), lease, now)
        }))
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let outcome = outcome.clone();
        let completion = self.inner.update(claim.key(), |entry, now, left| {
            entry.complete(claim.owner(), outcome, retention, now, left)
        });
        Ok(completion.unwrap_or(Completion::ClaimLost))
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let released = self.inner.update(claim.key(), |entry, _, left| {
            entry.release(claim.owner(), left)
        });
        Ok(released.unwrap_or(Fenced::Applied))
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        Ok(self.inner.fenced(claim, |entry, now, left| {
            entry.abandon(claim.owner(), now, left)
        }))
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let correlation = correlation.to_owned();
        Ok(self.inner.fenced(claim, |entry, _, _| {
            entry.annotate(claim.owner(), correlation)
        }))
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        // Copied: it may be a slice of something large that would be held, and not counted.
        let data = Bytes::copy_from_slice(data);
        Ok(self.inner.fenced(claim, |entry, _, _| {
            entry.checkpoint(claim.owner(), name, data)
        }))
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.inner.abandoned(after, limit).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let resolution = resolution.clone();
        let resolved = self.inner.update(&record.key, |entry, now, left| {
            entry.resolve(record, resolution, now, left)
        });
        Ok(resolved.unwrap_or(Fenced::ClaimLost))
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let (hash, now) = self.inner.about(key);
        let shard = self.inner.lock(hash);
        let entry = shard.get(hash, key).filter(|entry| !entry.is_expired(now));
        Ok(entry.map(|entry| entry.record(now)))
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        let (hash, _) = self.inner.about(key);
        let mut left = Leftovers::default();
        let mut shard = self.inner.lock(hash);
        Ok(shard.remove(hash, key, &self.inner.room, &mut left))
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        Ok(self.inner.erase(within, scope, limit).await)
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        Ok(self.inner.purge(limit).await)
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.inner.changed(key, seen, max).await;
        Ok(())
    }
}

impl Inner {
    fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let (hash, now) = self.about(&request.key);
        let mut reserved = false;
        loop {
            if let Some(claimed) = self.try_claim(request, hash, now, reserved) {
                return Ok(claimed);
            }
            reserved = self.make_room(Entry::weight_of_new(&request.key), now);
            if !reserved {
                return Err(self.room.full());
            }
        }
    }

    /// `None`: the key is new and there is no room for it.
    fn try_claim(
        &self,
        request: &ClaimRequest,
        hash: u64,
        now: Micros,
        reserved: bool,
    ) -> Option<Claimed> {
        let weight = Entry::weight_of_new(&request.key);
        let mut left = Leftovers::default();
        let mut shard = self.lock(hash);
        let standing = shard.update(hash, &request.key, &self.room, |entry| {
            let unknown = entry.is_unresolved() && entry.is_expired(now);
            self.room.owe(usize::from(unknown));
            entry.claim(request, now, &mut left)
        });
        if let Some(claimed) = standing {
            if reserved {
                self.room.free(weight);
            }
            return Some(claimed);
        }
        let drained = shard.drain(LOOKS_PER_INSERT, now, &self.room, &mut left);
        self.room.owe(drained.unresolved);
        if !reserved && !self.room.reserve(weight) {
            return None;
        }
        Some(shard.insert(hash, request, now))
    }

    /// Reserves a place that an expired entry of any shard gives up.
    fn make_room(&self, weight: usize, now: Micros) -> bool {
        self.shards.iter().any(|shard| {
            let mut left = Leftovers::default();
            let mut shard = locked(shard);
            let drained = shard.drain(LOOKS_PER_LOCK, now, &self.room, &mut left);
            self.room.owe(drained.unresolved);
            drained.removed > 0 && self.room.reserve(weight)
        })
    }

    fn fenced(
        &self,
        claim: &Claim,
        change: impl FnOnce(&mut Entry, Micros, &mut Leftovers) -> Fenced,
    ) -> Fenced {
        self.update(claim.key(), change)
            .unwrap_or(Fenced::ClaimLost)
    }

    fn update<R>(
        &self,
        key: &ScopedKey,
        change: impl FnOnce(&mut Entry, Micros, &mut Leftovers) -> R,
    ) -> Option<R> {
        let (hash, now) = self.about(key);
        // Declared before the lock, so that it is dropped after it.
        let mut left = Leftovers::default();
        let mut shard = self.lock(hash);
        shard.update(hash, key, &self.room, |entry| change(entry, now, &mut left))
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let mut after = match after {
            Some(cursor) => Some(position(cursor)?),
            None => None,
        };
        let mut records = Vec::new();
        if limit == 0 {
            return Ok(AbandonedPage::new(records, None));
        }
        let now = self.clock.now();
        let first = after.map_or(0, |(hash, _)| shard_of(hash));
        for shard in &self.shards[first..] {
            let found = locked(shard).abandoned(after.take(), limit - records.len(), now);
            let last = found
                .last()
                .map(|(hash, record)| cursor(*hash, &record.key));
            records.extend(found.into_iter().map(|(_, record)| record));
            if records.len() == limit {
                return Ok(AbandonedPage::new(records, last));
            }
            // A look through a shard takes a while when it is large; others want the thread too.
            tokio::task::yield_now().await;
        }
        Ok(AbandonedPage::new(records, None))
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> usize {
        let mut erased = 0;
        for shard in &self.shards {
            if erased == limit {
                break;
            }
            let mut left = Leftovers::default();
            erased += locked(shard).erase(within, scope, limit - erased, &self.room, &mut left);
            drop(left);
            // A look through a shard takes a while when it is large; others want the thread too.
            tokio::task::yield_now().await;
        }
        erased
    }

    async fn purge(&self, limit: usize) -> Purged {
        let now = self.clock.now();
        let owed = self.room.settle(limit);
        let mut purged = Purged::new(owed, owed);
        for shard in &self.shards {
            while purged.removed < limit {
                let looks = LOOKS_PER_LOCK.min(limit - purged.removed);
                let drained = {
                    let mut left = Leftovers::default();
                    locked(shard).drain(looks, now, &self.room, &mut left)
                };
                purged.removed += drained.removed;
                purged.unresolved += drained.unresolved;
                if !drained.more {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        purged
    }

    async fn changed(&self, key: &ScopedKey, seen: &Owner, max: Duration) {
        let (hash, now) = self.about(key);
        let give_up = now.saturating_add(micros(max));
        loop {
            let mut watch = Watch {
                store: self,
                key,
                hash,
                watchers: None,
            };
            let Some((lease_until, notified)) = watch.begin(seen) else {
                return;
            };
            self.clock.wait(lease_until.min(give_up), notified).await;
            if self.clock.now() >= give_up {
                return;
            }
        }
    }

    fn about(&self, key: &ScopedKey) -> (u64, Micros) {
        // Read before the lock: a time that grew old while waiting for it only makes the move more
        // careful, because leases and retentions then seem to last longer.
        (self.hashing.hash_one(key.as_bytes()), self.clock.now())
    }

    fn lock(&self, hash: u64) -> MutexGuard<'_, Shard> {
        locked(&self.shards[shard_of(hash)])
    }
}

/// A waiter's stay at one entry; leaving takes its traces away.
struct Watch<'a> {
    store: &'a Inner,
    key: &'a ScopedKey,
    hash: u64,
    watchers: Option<Arc<Notify>>,
}

impl Watch<'_> {
    /// When the live claim of `seen` ends, and a future that a change wakes. Made under the lock that
    /// looked, so that no change comes between.
    fn begin(&mut self, seen: &Owner) -> Option<(Micros, impl Future<Output = ()>)> {
        let now = self.store.clock.now();
        let mut shard = self.store.lock(self.hash);
        let lease_until = shard.update(self.hash, self.key, &self.store.room, |entry| {
            let lease_until = entry.live_until(seen, now)?;
            self.watchers = Some(entry.watch());
            Some(lease_until)
        })??;
        Some((lease_until, self.watchers.as_ref()?.notified()))
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let Some(watchers) = self.watchers.take() else {
            return;
        };
        let mut shard = self.store.lock(self.hash);
        shard.update(self.hash, self.key, &self.store.room, |entry| {
            entry.unwatch(watchers);
        });
    }
}

fn locked(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // Nothing under the lock panics; if it does after all, the other keys are still right.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shard_of(hash: u64) -> usize {
    // The table uses the lowest and the seven highest bits for itself.
    (hash >> 48) as usize % SHARDS
}

fn cursor(hash: u64, key: &ScopedKey) -> Cursor {
    Cursor::new([&hash.to_be_bytes(), key.as_bytes()].concat())
}

fn position(cursor: &Cursor) -> Result<(u64, &[u8]), StoreError> {
    let split = cursor.as_bytes().split_first_chunk();
    let (hash, key) = split.ok_or_else(|| {
        StoreError::new(
            StoreErrorKind::Other,
            "the cursor is not one of this store: begin the walk anew",
        )
    })?;
    Ok((u64::from_be_bytes(*hash), key))
}

const MAX_ENTRIES: usize = 1_000_000;
const MAX_BYTES: usize = 512 << 20;
/// More than one, so that a backlog of expired entries shrinks; few, so that no claim pays for it.
const LOOKS_PER_INSERT: usize = 4;
const LOOKS_PER_LOCK: usize = 64;
