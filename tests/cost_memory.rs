//! What a record costs in the in-process store: bytes for each entry, allocations for each move.
//!
//! One test, because the allocator counts for the whole process. `cargo test --test cost_memory --
//! --nocapture` prints the figures.

#![allow(unsafe_code, reason = "the trait of an allocator is unsafe")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fingerprint, MemoryStore, Outcome, ScopedKey, Store,
};

/// The system's allocator, counting what is asked of it.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A sixteenth of a million, so that the tables of the shards are as full as they are with a million.
const ENTRIES: usize = 62_500;
const MOST_BYTES_PER_ENTRY: usize = 512;

#[test]
fn an_entry_with_a_frame_of_200_bytes_costs_at_most_512_bytes_and_a_move_few_allocations() {
    let before = LIVE.load(Ordering::Relaxed);
    let store = MemoryStore::new();
    for n in 0..ENTRIES {
        finish(&store, n);
    }
    assert_eq!(store.len(), ENTRIES);
    let per_entry = (LIVE.load(Ordering::Relaxed) - before) / ENTRIES;
    let counted = store.bytes() / ENTRIES;
    println!("{per_entry} bytes per entry, counted as {counted}");
    assert!(per_entry <= MOST_BYTES_PER_ENTRY, "{per_entry} bytes");
    // The bound of bytes means what it says, within a tenth.
    assert!(
        counted.abs_diff(per_entry) <= per_entry / 10,
        "{counted} counted"
    );

    // The future of the trait's method is one allocation each.
    let claimed = request(ENTRIES);
    let (claim, of_claim) = counting(|| claim(&store, &claimed));
    let frame = outcome();
    let (_, of_complete) = counting(|| complete(&store, &claim, &frame));
    let (_, of_replay) = counting(|| {
        let replayed = store.claim(&claimed).now_or_never().unwrap().unwrap();
        assert!(matches!(replayed, Claimed::Existing(_)));
    });
    println!("allocations: claim {of_claim}, complete {of_complete}, replay {of_replay}");
    assert_eq!(of_claim, 2, "the entry");
    assert!(of_complete <= 2, "what shares the outcome's bytes");
    assert_eq!(of_replay, 1, "nothing");

    drop((store, claim, claimed, frame));
    let left = LIVE.load(Ordering::Relaxed).saturating_sub(before);
    assert!(left < 1_024, "{left} bytes are left when the store is gone");
}

fn counting<R>(act: impl FnOnce() -> R) -> (R, usize) {
    let before = CALLS.load(Ordering::Relaxed);
    let reply = act();
    (reply, CALLS.load(Ordering::Relaxed) - before)
}

fn finish(store: &MemoryStore, n: usize) {
    let claim = claim(store, &request(n));
    complete(store, &claim, &outcome());
}

fn claim(store: &MemoryStore, request: &ClaimRequest) -> Claim {
    match store.claim(request).now_or_never().unwrap().unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("not acquired: {record:?}"),
    }
}

fn complete(store: &MemoryStore, claim: &Claim, outcome: &Outcome) {
    let completed = store.complete(claim, outcome, None).now_or_never();
    assert_eq!(completed.unwrap().unwrap(), Completion::Recorded);
}

/// A key of 32 bytes, in the scope of everybody.
fn request(n: usize) -> ClaimRequest {
    let key = format!("\0\0\0\x04\0\0\0\0http{n:032x}");
    let key = ScopedKey::from_bytes(key.as_bytes()).unwrap();
    ClaimRequest::new(key, Fingerprint::of(&[b"the same"]))
}

/// A frame of 200 bytes.
fn outcome() -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let status = http::StatusCode::CREATED;
    let framed = |bytes| Outcome::response(status, &headers, &[&vec![b'x'; bytes]], None);
    let around = framed(128).as_bytes().len() - 128;
    let outcome = framed(200 - around);
    assert_eq!(outcome.as_bytes().len(), 200);
    outcome
}
