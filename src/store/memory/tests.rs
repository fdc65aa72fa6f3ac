//! What the in-process store promises beyond the contract: its bounds, its upkeep and its economy.

use futures_util::FutureExt;
use http::{HeaderMap, StatusCode};

use super::*;
use crate::fingerprint::Fingerprint;
use crate::record::State;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::test]
async fn a_new_key_is_refused_at_the_bound_of_entries_and_a_known_one_is_not() {
    let store = MemoryStore::new().max_entries(2);
    let (one, two) = (acquire(&store, "one").await, acquire(&store, "two").await);
    let refused = store.claim(&request("three")).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    assert!(refused.is_transient());
    let said = refused.to_string();
    assert!(said.contains("2 of 2 entries"), "{said}");
    assert!(said.contains("`max_entries`"), "{said}");
    assert!(!said.contains("three"), "{said}");

    let known = store.claim(&request("one")).await.unwrap();
    assert!(matches!(known, Claimed::Existing(_)));
    let recorded = store.complete(&one, &outcome(200), None).await.unwrap();
    assert_eq!(recorded, Completion::Recorded);
    // Released, it is still the same entry.
    let _ = store.release(&two).await.unwrap();
    assert_eq!(acquire(&store, "two").await.attempt(), 2);
    assert_eq!(store.len(), 2);
}

#[tokio::test]
async fn a_completion_may_go_beyond_the_bound_of_bytes_and_a_new_key_may_not() {
    let store = MemoryStore::new().max_bytes(10_000);
    let claim = acquire(&store, "one").await;
    let large = store.complete(&claim, &outcome(20_000), None).await;
    assert_eq!(large.unwrap(), Completion::Recorded);
    assert!(store.bytes() > 20_000);
    let refused = store.claim(&request("two")).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    assert!(refused.to_string().contains("of 10000 bytes"), "{refused}");
    assert_eq!(store.len(), 1);

    assert!(store.remove(claim.key()).await.unwrap());
    let _ = acquire(&store, "two").await;
}

#[tokio::test]
async fn a_bound_of_zero_refuses_every_new_key() {
    for store in [
        MemoryStore::new().max_entries(0),
        MemoryStore::new().max_bytes(0),
    ] {
        store.claim(&request("key")).await.unwrap_err();
        assert!(store.is_empty());
        assert_eq!(store.bytes(), 0);
    }
}

#[tokio::test]
async fn a_bound_holds_for_all_clones() {
    let store = MemoryStore::new();
    let clone = store.clone().max_entries(1);
    let _ = acquire(&clone, "one").await;
    store.claim(&request("two")).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn a_full_store_gives_the_place_of_an_expired_record_to_a_new_key() {
    let store = MemoryStore::new().max_entries(1);
    // Many keys, so that the old one and the new one lie in different shards.
    for n in 0..200 {
        let _ = acquire(&store, &n.to_string()).await;
        store.claim(&request("too many")).await.unwrap_err();
        tokio::time::advance(DAY).await;
    }
    assert_eq!(store.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_never_gives_away_a_live_claim_or_an_unexpired_record() {
    let store = MemoryStore::new().max_entries(2);
    let live = acquire(&store, "live").await;
    let kept = acquire(&store, "kept").await;
    let _ = store.complete(&kept, &outcome(1), Some(3 * DAY)).await;
    tokio::time::advance(DAY - MINUTE).await;
    assert_eq!(store.renew(&live, DAY).await.unwrap(), Fenced::Applied);
    tokio::time::advance(2 * MINUTE).await;
    store.claim(&request("new")).await.unwrap_err();
    let recorded = store.complete(&live, &outcome(1), None).await.unwrap();
    assert_eq!(recorded, Completion::Recorded);
    assert!(store.lookup(kept.key()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn new_keys_remove_expired_ones_without_a_purge() {
    let store = MemoryStore::new();
    for n in 0..5_000 {
        let _ = acquire(&store, &format!("old {n}")).await;
    }
    tokio::time::advance(DAY).await;
    for n in 0..5_000 {
        let _ = acquire(&store, &format!("new {n}")).await;
    }
    assert!(store.len() < 5_100, "{} entries are left", store.len());
}

#[tokio::test(start_paused = true)]
async fn a_short_retention_behind_long_ones_is_removed_when_it_is_over() {
    let store = MemoryStore::new();
    for n in 0..2_000 {
        let _ = acquire(&store, &format!("long {n}")).await;
        let mut short = request(&format!("short {n}"));
        short.retention = MINUTE;
        let _ = store.claim(&short).await.unwrap();
        // And one that becomes short by its completion.
        let claim = acquire(&store, &format!("shortened {n}")).await;
        let _ = store.complete(&claim, &outcome(1), Some(MINUTE)).await;
    }
    tokio::time::advance(2 * MINUTE).await;
    let purged = store.purge(usize::MAX).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (4_000, 2_000));
    assert_eq!(store.len(), 2_000);
}

#[tokio::test(start_paused = true)]
async fn a_purge_stops_at_its_limit_and_goes_on_the_next_time() {
    let store = MemoryStore::new();
    for n in 0..1_000 {
        let _ = acquire(&store, &n.to_string()).await;
    }
    tokio::time::advance(DAY).await;
    let mut left = 1_000;
    while left > 0 {
        let purged = store.purge(300).await.unwrap();
        assert_eq!(purged.removed, left.min(300));
        assert_eq!(purged.unresolved, purged.removed);
        left -= purged.removed;
        assert_eq!(store.len(), left);
    }
    assert_eq!(store.bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn unresolved_records_that_were_dropped_on_the_way_are_told_by_the_next_purge() {
    let store = MemoryStore::new().max_entries(2);
    let _ = acquire(&store, "replaced").await;
    let _ = acquire(&store, "displaced").await;
    tokio::time::advance(DAY).await;
    let _ = acquire(&store, "replaced").await;
    let _ = acquire(&store, "new").await;
    assert_eq!(store.len(), 2);
    let purged = store.purge(1).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (1, 1));
    let purged = store.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (1, 1));
    assert_eq!(store.purge(10).await.unwrap(), Purged::default());
}

#[tokio::test(start_paused = true)]
async fn the_queue_of_a_key_that_comes_and_goes_does_not_grow() {
    let store = MemoryStore::new();
    for _ in 0..10_000 {
        let claim = acquire(&store, "key").await;
        let _ = store.complete(&claim, &outcome(1), Some(MINUTE)).await;
        store.remove(claim.key()).await.unwrap();
    }
    for _ in 0..10_000 {
        let claim = acquire(&store, "key").await;
        let _ = store.complete(&claim, &outcome(1), Some(MINUTE)).await;
        tokio::time::advance(MINUTE).await;
    }
    let queued: usize = store
        .inner
        .shards
        .iter()
        .map(|shard| locked(shard).queued())
        .sum();
    assert!(queued < 200, "{queued} elements for one entry");
}

#[tokio::test]
async fn what_was_counted_is_given_back() {
    let store = MemoryStore::new();
    for n in 0..8 {
        let claim = acquire(&store, &n.to_string()).await;
        let _ = store.annotate(&claim, "a correlation").await;
        let _ = store.annotate(&claim, "another").await;
        let data = Bytes::from(vec![0; 1_000]);
        let _ = store.checkpoint(&claim, "phase", &data).await;
        let _ = store.checkpoint(&claim, "phase", &data.slice(..10)).await;
        let _ = match n % 4 {
            0 => store.release(&claim).await,
            1 => store.abandon(&claim).await,
            2 => store
                .complete(&claim, &outcome(500), None)
                .await
                .map(|_| Fenced::Applied),
            _ => Ok(Fenced::Applied),
        };
    }
    let counted: usize = store
        .inner
        .shards
        .iter()
        .map(|shard| locked(shard).weight())
        .sum();
    assert_eq!(store.bytes(), counted);
    for n in 0..8 {
        store.remove(&request(&n.to_string()).key).await.unwrap();
    }
    assert_eq!((store.len(), store.bytes()), (0, 0));
}

#[test]
fn everything_but_waiting_works_without_a_runtime() {
    let store = MemoryStore::new();
    let claim = acquire(&store, "key").now_or_never().unwrap();
    let renewed = store.renew(&claim, MINUTE).now_or_never().unwrap();
    assert_eq!(renewed.unwrap(), Fenced::Applied);
    let outcome = outcome(1);
    let completed = store.complete(&claim, &outcome, None).now_or_never();
    assert_eq!(completed.unwrap().unwrap(), Completion::Recorded);
    let found = store.lookup(claim.key()).now_or_never().unwrap().unwrap();
    assert!(found.is_some());
    // Nothing to wait for: it does not come to the timer.
    let waited = store.changed(claim.key(), claim.owner(), MINUTE);
    waited.now_or_never().unwrap().unwrap();
}

#[tokio::test]
async fn a_replay_shares_the_bytes_of_the_outcome() {
    let store = MemoryStore::new();
    let claim = acquire(&store, "key").await;
    let outcome = outcome(1_000);
    let _ = store.complete(&claim, &outcome, None).await;
    let Claimed::Existing(record) = store.claim(&request("key")).await.unwrap() else {
        panic!("acquired twice");
    };
    let State::Completed {
        outcome: replayed, ..
    } = record.state
    else {
        panic!("not completed");
    };
    assert_eq!(replayed.as_bytes().as_ptr(), outcome.as_bytes().as_ptr());
}

#[tokio::test]
async fn a_checkpoint_does_not_hold_the_buffer_it_is_a_slice_of() {
    let store = MemoryStore::new();
    let claim = acquire(&store, "key").await;
    let body = Bytes::from(vec![0; 1_000]);
    let _ = store.checkpoint(&claim, "phase", &body.slice(..10)).await;
    assert!(body.is_unique());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_leaves_nothing_behind() {
    let store = MemoryStore::new();
    let claim = acquire(&store, "key").await;
    let bare = store.bytes();
    let watched = || {
        let (hash, _) = store.inner.about(claim.key());
        let shard = store.inner.lock(hash);
        shard.get(hash, claim.key()).unwrap().is_watched()
    };
    let wait = || Box::pin(store.changed(claim.key(), claim.owner(), MINUTE));
    let (mut first, mut second) = (wait(), wait());
    assert!((&mut first).now_or_never().is_none());
    assert!((&mut second).now_or_never().is_none());
    assert!(watched());
    drop(first);
    assert!(watched());
    drop(second);
    assert!(!watched());
    // Nor one that gives up.
    wait().await.unwrap();
    assert!(!watched());
    assert_eq!(store.bytes(), bare);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_sees_the_end_of_the_lease_and_of_a_renewed_one() {
    let store = MemoryStore::new();
    let mut asked = request("key");
    asked.lease = MINUTE;
    let Claimed::Acquired { claim, .. } = store.claim(&asked).await.unwrap() else {
        panic!("not acquired");
    };
    let start = tokio::time::Instant::now();
    let renewing = async {
        tokio::time::sleep(MINUTE / 2).await;
        store.renew(&claim, MINUTE).await.unwrap()
    };
    let waiting = store.changed(claim.key(), claim.owner(), DAY);
    let (waited, renewed) = futures_util::future::join(waiting, renewing).await;
    waited.unwrap();
    assert_eq!(renewed, Fenced::Applied);
    // Tokio's timer counts whole milliseconds.
    let waited = start.elapsed();
    assert!(waited >= MINUTE * 3 / 2, "{waited:?}");
    assert!(
        waited < MINUTE * 3 / 2 + Duration::from_millis(5),
        "{waited:?}"
    );
}

#[tokio::test]
async fn a_poisoned_lock_does_not_take_its_keys_down() {
    let store = MemoryStore::new();
    let claim = acquire(&store, "key").await;
    let (hash, _) = store.inner.about(claim.key());
    let panicking = std::thread::spawn({
        let store = store.clone();
        move || {
            let _guard = store.inner.lock(hash);
            panic!("under the lock");
        }
    });
    assert!(panicking.join().is_err());
    assert!(store.inner.shards[shard_of(hash)].is_poisoned());
    let completed = store.complete(&claim, &outcome(1), None).await;
    assert_eq!(completed.unwrap(), Completion::Recorded);
}

#[tokio::test]
async fn a_cursor_of_another_store_is_an_error() {
    let store = MemoryStore::new();
    let error = store.abandoned(Some(&Cursor::new("7")), 1).await;
    assert_eq!(error.unwrap_err().kind(), StoreErrorKind::Other);
}

#[tokio::test]
async fn abandoned_records_of_one_hash_are_all_listed() {
    let store = MemoryStore::new();
    let mut shard = Shard::default();
    for n in 0..4 {
        let mut asked = request(&n.to_string());
        asked.lease = Duration::ZERO;
        let _ = shard.insert(7, &asked, store.inner.clock.now());
    }
    let now = store.inner.clock.now();
    let mut listed = 0;
    let mut last = None;
    loop {
        let after = last.as_ref().map(|key: &ScopedKey| (7, key.as_bytes()));
        let page = shard.abandoned(after, 1, now);
        let Some((_, record)) = page.into_iter().next() else {
            break;
        };
        listed += 1;
        last = Some(record.key);
    }
    assert_eq!(listed, 4);
}

#[test]
fn durations_that_do_not_fit_last_for_ever() {
    let store = MemoryStore::new();
    let mut asked = request("key");
    (asked.lease, asked.retention) = (Duration::MAX, Duration::MAX);
    let claimed = store.claim(&asked).now_or_never().unwrap().unwrap();
    assert!(matches!(claimed, Claimed::Acquired { .. }));
    let known = store.claim(&request("key")).now_or_never().unwrap();
    assert!(matches!(known.unwrap(), Claimed::Existing(record) if !record.is_abandoned()));
}

#[tokio::test(start_paused = true)]
async fn waiting_for_ever_is_possible() {
    let store = MemoryStore::new();
    let mut asked = request("key");
    asked.lease = Duration::MAX;
    let Claimed::Acquired { claim, .. } = store.claim(&asked).await.unwrap() else {
        panic!("not acquired");
    };
    let waiting = store.changed(claim.key(), claim.owner(), Duration::MAX);
    let (waited, released) = futures_util::future::join(waiting, store.release(&claim)).await;
    waited.unwrap();
    assert_eq!(released.unwrap(), Fenced::Applied);
}

#[test]
fn debug_output_shows_counts_and_no_key() {
    let store = MemoryStore::new();
    let _ = acquire(&store, "secret").now_or_never().unwrap();
    let shown = format!("{store:?}");
    assert!(shown.contains("len: 1"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
}

async fn acquire(store: &MemoryStore, key: &str) -> Claim {
    match store.claim(&request(key)).await.unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("not acquired: {record:?}"),
    }
}

fn request(key: &str) -> ClaimRequest {
    let key = ScopedKey::join("tests", "", key);
    ClaimRequest::new(key, Fingerprint::of(&[b"the same"]))
}

fn outcome(bytes: usize) -> Outcome {
    let body = vec![b'x'; bytes];
    Outcome::response(StatusCode::OK, &HeaderMap::new(), &[&body], None)
}
