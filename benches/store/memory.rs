//! The store in this process, beside a sharded map that checks nothing, owns no clock and forgets
//! nothing.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tower_idempotency::{ClaimRequest, Fingerprint, MemoryStore, Outcome, Owner, ScopedKey, Store};

use crate::arguments::Arguments;
use crate::run::{Measured, Plan};
use crate::side::{Ours, Side, new_request, outcome};

pub async fn measure(arguments: &Arguments) -> Vec<Measured> {
    let plan = Plan {
        store: "memory",
        about: "64 `Mutex<HashMap>`".to_owned(),
        slice: Duration::from_secs(5),
        jobs: if arguments.quick { 2_000 } else { 40_000 },
        kept: 4_000,
        stride: 16,
        elsewhere: false,
        expired: 20_000,
        short_life: Duration::from_millis(500),
        processes: Box::new(Vec::new),
    };
    let store = MemoryStore::new()
        .max_entries(usize::MAX)
        .max_bytes(usize::MAX);
    crate::run::measure(arguments, plan, Ours::new(store), Map::new()).await
}

#[derive(Clone)]
struct Map {
    shards: Arc<[Mutex<HashMap<ScopedKey, Entry>>; 64]>,
    hashing: RandomState,
}

struct Entry {
    fingerprint: Fingerprint,
    owner: Owner,
    until: Instant,
    outcome: Option<Outcome>,
}

impl Map {
    fn new() -> Self {
        Self {
            shards: Arc::new(std::array::from_fn(|_| Mutex::default())),
            hashing: RandomState::new(),
        }
    }

    fn shard(&self, key: &ScopedKey) -> &Mutex<HashMap<ScopedKey, Entry>> {
        &self.shards[self.hashing.hash_one(key) as usize % 64]
    }
}

impl Side for Map {
    type Held = (ScopedKey, Owner);

    async fn claim(&self, request: &ClaimRequest) -> Self::Held {
        let entry = Entry {
            fingerprint: request.fingerprint,
            owner: request.owner,
            until: Instant::now() + request.retention,
            outcome: None,
        };
        let mut shard = self.shard(&request.key).lock().unwrap();
        assert!(shard.insert(request.key.clone(), entry).is_none());
        (request.key.clone(), request.owner)
    }

    async fn complete(&self, held: &Self::Held, outcome: &Outcome) {
        let mut shard = self.shard(&held.0).lock().unwrap();
        let entry = shard.get_mut(&held.0).expect("an entry");
        assert!(entry.owner == held.1);
        entry.outcome = Some(outcome.clone());
    }

    async fn replay(&self, request: &ClaimRequest) {
        let shard = self.shard(&request.key).lock().unwrap();
        let entry = &shard[&request.key];
        assert!(entry.fingerprint == request.fingerprint && entry.until > Instant::now());
        let outcome = entry.outcome.clone();
        drop(shard);
        assert!(outcome.is_some());
    }

    async fn purge(&self, _: usize) -> usize {
        let now = Instant::now();
        let shards = self.shards.iter().map(|shard| {
            let mut shard = shard.lock().unwrap();
            let before = shard.len();
            shard.retain(|_, entry| entry.until > now);
            before - shard.len()
        });
        shards.sum()
    }
}

/// The longest stops while a million entries expire.
pub struct Pause {
    pub entries: usize,
    /// Of one claim that removes some of them: CPU time of its thread, and by the clock on the wall.
    pub claim: [Duration; 2],
    /// Of one claim while another thread purges all of them.
    pub beside_purge: [Duration; 2],
}

pub fn pause(quick: bool) -> Pause {
    let entries = if quick { 10_000 } else { 1_000_000 };
    let claim = expire(entries, |store| {
        let mut longest = [Duration::ZERO; 2];
        for _ in 0..entries / 2 {
            longest = longer(longest, one_claim(store));
        }
        assert!(
            store.len() <= entries,
            "claims did not remove what was expired"
        );
        longest
    });
    let beside_purge = expire(entries, |store| {
        // Whose clock was moved.
        let runtime = Handle::current();
        let purging = store.clone();
        let began = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let purge = scope.spawn(|| {
                began.wait();
                let purge = runtime.block_on(purging.purge(usize::MAX));
                purge.expect("a purge").removed
            });
            began.wait();
            let mut longest = [Duration::ZERO; 2];
            while !purge.is_finished() {
                longest = longer(longest, one_claim(store));
            }
            purge.join().expect("the purge");
            longest
        })
    });
    Pause {
        entries,
        claim,
        beside_purge,
    }
}

/// Fills a store, lets all of it expire, and looks at what is done then.
fn expire(entries: usize, then: impl FnOnce(&MemoryStore) -> [Duration; 2]) -> [Duration; 2] {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let store = MemoryStore::new()
            .max_entries(usize::MAX)
            .max_bytes(usize::MAX);
        let side = Ours::new(store);
        for _ in 0..entries {
            let claim = side.claim(&new_request()).await;
            side.complete(&claim, &outcome()).await;
        }
        tokio::time::advance(Duration::from_secs(25 * 60 * 60)).await;
        then(&side.store)
    })
}

fn one_claim(store: &MemoryStore) -> [Duration; 2] {
    let request = new_request();
    let (cpu, wall) = (ThreadTime::now(), Instant::now());
    let claimed = store.claim(&request).now_or_never();
    let took = [cpu.elapsed(), wall.elapsed()];
    assert!(matches!(claimed, Some(Ok(_))));
    took
}

fn longer(a: [Duration; 2], b: [Duration; 2]) -> [Duration; 2] {
    [a[0].max(b[0]), a[1].max(b[1])]
}
