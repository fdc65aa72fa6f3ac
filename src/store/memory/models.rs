//! The store under loom: every interleaving of a few threads, over the code that ships.
//!
//! ```sh
//! RUSTFLAGS="--cfg idempotency_loom" CARGO_TARGET_DIR=target/loom \
//!     cargo test --lib --release store::memory::models
//! ```
//!
//! Only the mutex, the counters, tokio's `Notify`, the clock and the random seed of the hash are
//! models. The cfg has a name of its own because tokio reacts to `--cfg loom`.

use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use http::StatusCode;
use loom::future::block_on;
use loom::thread;

use super::MemoryStore;
use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned};
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::{Record, State};
use crate::scope::ScopedKey;
use crate::store::{Completion, Fenced, Store};

/// What [`sync`](super::sync) is made of here.
pub(super) mod seam {
    use std::hash::{BuildHasherDefault, DefaultHasher};
    use std::pin::Pin;
    use std::task::Waker;

    pub(in super::super) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(in super::super) use loom::sync::{Mutex, MutexGuard};

    use super::super::clock::Micros;
    use super::*;

    /// Without a seed: loom needs the same steps in every run.
    pub(in super::super) type Hashing = BuildHasherDefault<DefaultHasher>;

    pub(in super::super) const SHARDS: usize = 2;

    /// Stands still, and no wait ends by itself: a wake-up that is lost is a deadlock, which loom
    /// reports.
    pub(in super::super) struct Clock;

    impl Clock {
        pub(in super::super) fn start() -> Self {
            Self
        }

        pub(in super::super) fn now(&self) -> Micros {
            1_000_000
        }

        pub(in super::super) async fn wait(&self, _until: Micros, event: impl Future<Output = ()>) {
            event.await;
        }
    }

    /// What tokio documents of its `Notify`: `notify_waiters` wakes every future that was made
    /// before it, polled or not, and none that is made after it.
    #[derive(Default)]
    pub(in super::super) struct Notify(Mutex<Rounds>);

    #[derive(Default)]
    struct Rounds {
        done: usize,
        waiting: Vec<Waker>,
    }

    impl Notify {
        pub(in super::super) fn notified(&self) -> Notified<'_> {
            Notified {
                notify: self,
                made_in: self.0.lock().unwrap().done,
            }
        }

        pub(in super::super) fn notify_waiters(&self) {
            let waiting = {
                let mut rounds = self.0.lock().unwrap();
                rounds.done += 1;
                std::mem::take(&mut rounds.waiting)
            };
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    pub(in super::super) struct Notified<'a> {
        notify: &'a Notify,
        made_in: usize,
    }

    impl Future for Notified<'_> {
        type Output = ();

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            let mut rounds = self.notify.0.lock().unwrap();
            if rounds.done != self.made_in {
                return Poll::Ready(());
            }
            rounds.waiting.push(cx.waker().clone());
            Poll::Pending
        }
    }
}

#[test]
fn two_claims_of_a_fresh_key_race_and_one_is_acquired() {
    loom::model(|| {
        let store = MemoryStore::new();
        let [first, second] = race(&store, || request("key"), claim);
        match (first, second) {
            (Claimed::Acquired { claim, .. }, Claimed::Existing(seen))
            | (Claimed::Existing(seen), Claimed::Acquired { claim, .. }) => {
                assert_eq!(seen.owner, *claim.owner());
                assert_eq!(claim.attempt(), 1);
            }
            other => panic!("not one winner and one loser: {other:?}"),
        }
        assert_eq!(store.len(), 1);
    });
}

#[test]
fn two_takeovers_race_and_one_is_acquired() {
    loom::model(|| {
        let store = MemoryStore::new();
        let _ = acquire(&store, &over_at_once("key"));
        let takeover = || ClaimRequest {
            on_abandoned: OnAbandoned::Rerun,
            ..request("key")
        };
        let answers = race(&store, takeover, claim);
        let attempts = answers.map(|answer| match answer {
            Claimed::Acquired { claim, .. } => Some(claim.attempt()),
            Claimed::Existing(_) => None,
        });
        assert!(matches!(attempts, [Some(2), None] | [None, Some(2)]));
    });
}

#[test]
fn a_claim_meets_a_completion_before_or_after_it_and_never_half_of_it() {
    loom::model(|| {
        let store = MemoryStore::new();
        let granted = acquire(&store, &request("key"));
        let completing = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || complete(&store, &granted, 201)
        });
        match claim(&store, request("key")) {
            Claimed::Existing(Record { state, owner, .. }) => {
                assert_eq!(owner, *granted.owner());
                match state {
                    State::Started { lease_left, .. } => assert!(!lease_left.is_zero()),
                    State::Completed { outcome, .. } => assert_eq!(outcome, status(201)),
                    State::Released => panic!("nobody released it"),
                }
            }
            Claimed::Acquired { .. } => panic!("a live claim was taken"),
        }
        assert_eq!(completing.join().unwrap(), Completion::Recorded);
    });
}

#[test]
fn a_completion_and_a_takeover_race_and_one_of_them_applies() {
    loom::model(|| {
        let store = MemoryStore::new();
        let stalled = acquire(&store, &over_at_once("key"));
        let completing = thread::spawn({
            let store = store.clone();
            move || complete(&store, &stalled, 201)
        });
        let takeover = ClaimRequest {
            on_abandoned: OnAbandoned::Rerun,
            ..request("key")
        };
        let taken = claim(&store, takeover);
        match (completing.join().unwrap(), taken) {
            (Completion::Recorded, Claimed::Existing(record)) => {
                assert!(matches!(record.state, State::Completed { .. }));
            }
            (Completion::ClaimLost, Claimed::Acquired { claim, .. }) => {
                assert_eq!(claim.attempt(), 2);
            }
            other => panic!("both applied, or neither: {other:?}"),
        }
    });
}

#[test]
fn two_completions_race_and_both_see_the_one_that_stands() {
    loom::model(|| {
        let store = MemoryStore::new();
        let granted = acquire(&store, &request("key"));
        let other = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || complete(&store, &granted, 201)
        });
        let here = complete(&store, &granted, 202);
        match (other.join().unwrap(), here) {
            (Completion::Recorded, Completion::Standing(stands)) => assert_eq!(stands, status(201)),
            (Completion::Standing(stands), Completion::Recorded) => assert_eq!(stands, status(202)),
            other => panic!("not one that stands: {other:?}"),
        }
    });
}

#[test]
fn a_waiter_never_misses_the_completion() {
    loom::model(|| {
        let store = MemoryStore::new();
        let granted = acquire(&store, &request("key"));
        let completing = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || complete(&store, &granted, 201)
        });
        let waited = store.changed(granted.key(), granted.owner(), Duration::from_secs(60));
        block_on(waited).unwrap();
        let record = store.lookup(granted.key()).now_or_never().unwrap().unwrap();
        assert!(matches!(record.unwrap().state, State::Completed { .. }));
        let _ = completing.join().unwrap();
    });
}

#[test]
fn two_waiters_are_both_woken_by_a_release_and_leave_nothing_behind() {
    // Three threads have too many interleavings for all of them.
    let mut few = loom::model::Builder::new();
    few.preemption_bound = Some(2);
    few.check(|| {
        let store = MemoryStore::new();
        let granted = acquire(&store, &request("key"));
        let bare = store.bytes();
        let wait = |store: MemoryStore, granted: Claim| {
            let waited = store.changed(granted.key(), granted.owner(), Duration::from_secs(60));
            block_on(waited).unwrap();
        };
        let waiting = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || wait(store, granted)
        });
        let releasing = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || store.release(&granted).now_or_never().unwrap().unwrap()
        });
        wait(store.clone(), granted);
        waiting.join().unwrap();
        assert_eq!(releasing.join().unwrap(), Fenced::Applied);
        assert_eq!(store.bytes(), bare);
    });
}

#[test]
fn a_waiter_that_leaves_takes_its_traces_away_while_another_comes() {
    loom::model(|| {
        let store = MemoryStore::new();
        let granted = acquire(&store, &request("key"));
        let bare = store.bytes();
        let look_in = |store: MemoryStore, granted: Claim| {
            let max = Duration::from_secs(60);
            let waited = store.changed(granted.key(), granted.owner(), max);
            assert!(waited.now_or_never().is_none());
        };
        let leaving = thread::spawn({
            let (store, granted) = (store.clone(), granted.clone());
            move || look_in(store, granted)
        });
        look_in(store.clone(), granted);
        leaving.join().unwrap();
        assert_eq!(store.bytes(), bare);
    });
}

#[test]
fn two_keys_race_for_the_last_place_and_one_gets_it() {
    loom::model(|| {
        let store = MemoryStore::new().max_entries(1);
        let other = thread::spawn({
            let store = store.clone();
            move || store.claim(&request("one")).now_or_never().unwrap().is_ok()
        });
        let here = store.claim(&request("two")).now_or_never().unwrap().is_ok();
        assert_ne!(other.join().unwrap(), here);
        assert_eq!(store.len(), 1);
    });
}

fn race<R: 'static>(
    store: &MemoryStore,
    request: impl Fn() -> ClaimRequest,
    act: fn(&MemoryStore, ClaimRequest) -> R,
) -> [R; 2] {
    let other = thread::spawn({
        let (store, request) = (store.clone(), request());
        move || act(&store, request)
    });
    let here = act(store, request());
    [other.join().unwrap(), here]
}

fn claim(store: &MemoryStore, request: ClaimRequest) -> Claimed {
    store.claim(&request).now_or_never().unwrap().unwrap()
}

fn acquire(store: &MemoryStore, request: &ClaimRequest) -> Claim {
    match claim(store, request.clone()) {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("not acquired: {record:?}"),
    }
}

fn complete(store: &MemoryStore, claim: &Claim, code: u16) -> Completion {
    let outcome = status(code);
    let completed = store.complete(claim, &outcome, None);
    completed.now_or_never().unwrap().unwrap()
}

fn status(code: u16) -> Outcome {
    Outcome::tombstone(StatusCode::from_u16(code).unwrap())
}

fn request(key: &str) -> ClaimRequest {
    let key = ScopedKey::join("models", "", key);
    ClaimRequest::new(key, Fingerprint::of(&[b"the same"]))
}

fn over_at_once(key: &str) -> ClaimRequest {
    ClaimRequest {
        lease: Duration::ZERO,
        ..request(key)
    }
}
