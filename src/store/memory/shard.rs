//! One part of the store: what one lock guards.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use hashbrown::HashTable;

use crate::claim::{ClaimRequest, Claimed};
use crate::record::Record;
use crate::scope::ScopedKey;

use super::clock::Micros;
use super::entry::{Entry, Leftovers};
use super::room::Room;

/// A table of entries and a queue of the times at which they may go.
///
/// For every entry there is an element in the queue that is not later than the time at which the
/// entry may go. There may be others, older ones of the same key: they do no harm, and are dropped
/// when their time comes, or all at once when they outnumber the entries.
// Aligned, so that two threads at two locks do not fight for one cache line.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Shard {
    entries: HashTable<Box<Entry>>,
    queue: Queue,
}

type Queue = BinaryHeap<Reverse<(Micros, u64)>>;

/// What one bounded look into the queue did.
#[derive(Clone, Copy, Default)]
pub(super) struct Drained {
    pub(super) removed: usize,
    pub(super) unresolved: usize,
    /// Whether something was due that the bound left for the next look.
    pub(super) more: bool,
}

impl Shard {
    pub(super) fn get(&self, hash: u64, key: &ScopedKey) -> Option<&Entry> {
        self.entries.find(hash, is(hash, key)).map(|entry| &**entry)
    }

    /// Changes one entry, and keeps the counts and the queue right.
    pub(super) fn update<R>(
        &mut self,
        hash: u64,
        key: &ScopedKey,
        room: &Room,
        change: impl FnOnce(&mut Entry) -> R,
    ) -> Option<R> {
        let entry = self.entries.find_mut(hash, is(hash, key))?;
        let (weight, due) = (entry.weight(), entry.due());
        let reply = change(entry);
        room.reweigh(weight, entry.weight());
        // One that may go later is found, and put back, when its old time comes.
        let sooner = Some(entry.due()).filter(|sooner| *sooner < due);
        if let Some(sooner) = sooner {
            self.enqueue(sooner, hash);
        }
        Some(reply)
    }

    /// Inserts an entry whose place is reserved and whose key is not here.
    pub(super) fn insert(&mut self, hash: u64, request: &ClaimRequest, now: Micros) -> Claimed {
        let entry = Box::new(Entry::new(hash, request, now));
        let (claimed, due) = (entry.acquired(), entry.due());
        self.entries.insert_unique(hash, entry, |entry| entry.hash);
        self.enqueue(due, hash);
        claimed
    }

    pub(super) fn remove(
        &mut self,
        hash: u64,
        key: &ScopedKey,
        room: &Room,
        left: &mut Leftovers,
    ) -> bool {
        let Ok(found) = self.entries.find_entry(hash, is(hash, key)) else {
            return false;
        };
        let (entry, _) = found.remove();
        room.free(entry.weight());
        left.entries.push(entry);
        true
    }

    /// Removes entries of this scope, at most `limit`, and says how many.
    pub(super) fn erase(
        &mut self,
        within: &str,
        scope: &str,
        limit: usize,
        room: &Room,
        left: &mut Leftovers,
    ) -> usize {
        let of_the_scope = |entry: &mut Box<Entry>| {
            entry.key.scope() == scope && entry.key.namespace().starts_with(within)
        };
        let erased = self.entries.extract_if(of_the_scope).take(limit);
        let before = left.entries.len();
        left.entries
            .extend(erased.inspect(|entry| room.free(entry.weight())));
        left.entries.len() - before
    }

    /// Removes what is expired, with at most `looks` looks into the queue.
    pub(super) fn drain(
        &mut self,
        looks: usize,
        now: Micros,
        room: &Room,
        left: &mut Leftovers,
    ) -> Drained {
        let Self { entries, queue } = self;
        let mut drained = Drained::default();
        for _ in 0..looks {
            let Some(mut first) = first_due(queue, now) else {
                return drained;
            };
            let Reverse((_, hash)) = *first;
            match entries.find_entry(hash, |entry| entry.hash == hash) {
                Ok(found) if found.get().is_expired(now) => {
                    PeekMut::pop(first);
                    let (entry, _) = found.remove();
                    room.free(entry.weight());
                    drained.removed += 1;
                    drained.unresolved += usize::from(entry.is_unresolved());
                    left.entries.push(entry);
                }
                // It lives longer than it was queued for.
                Ok(found) => *first = Reverse((found.get().due(), hash)),
                Err(_) => {
                    PeekMut::pop(first);
                }
            }
        }
        drained.more = first_due(queue, now).is_some();
        drained
    }

    /// At most `limit` abandoned records after this position, in the order of hash and key, which no
    /// insertion, removal or growth of the table disturbs.
    pub(super) fn abandoned(
        &self,
        after: Option<(u64, &[u8])>,
        limit: usize,
        now: Micros,
    ) -> Vec<(u64, Record)> {
        let mut found: Vec<&Entry> = self
            .entries
            .iter()
            .map(|entry| &**entry)
            .filter(|entry| entry.is_abandoned(now))
            .filter(|entry| after.is_none_or(|after| position(entry) > after))
            .collect();
        found.sort_unstable_by(|a, b| position(a).cmp(&position(b)));
        found
            .into_iter()
            .take(limit)
            .map(|entry| (entry.hash, entry.record(now)))
            .collect()
    }

    #[cfg(all(test, not(idempotency_loom)))]
    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    #[cfg(all(test, not(idempotency_loom)))]
    pub(super) fn weight(&self) -> usize {
        self.entries.iter().map(|entry| entry.weight()).sum()
    }

    fn enqueue(&mut self, due: Micros, hash: u64) {
        self.queue.push(Reverse((due, hash)));
        // Paid for by the pushes that made the needless ones, as the growth of a table is.
        if self.queue.len() > 2 * self.entries.len() + SLACK {
            let entries = self.entries.iter();
            self.queue = entries
                .map(|entry| Reverse((entry.due(), entry.hash)))
                .collect();
        }
    }
}

fn is(hash: u64, key: &ScopedKey) -> impl Fn(&Box<Entry>) -> bool {
    // The hash first: it lies next to the pointer that was followed anyway, the key does not.
    move |entry| entry.hash == hash && entry.key == *key
}

fn position(entry: &Entry) -> (u64, &[u8]) {
    (entry.hash, entry.key.as_bytes())
}

fn first_due(queue: &mut Queue, now: Micros) -> Option<PeekMut<'_, Reverse<(Micros, u64)>>> {
    let first = queue.peek_mut()?;
    let Reverse((due, _)) = *first;
    (due <= now).then_some(first)
}

/// How many needless elements a small queue may hold before it is made anew.
const SLACK: usize = 64;
