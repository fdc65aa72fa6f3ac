//! A store that fails on demand.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};

/// Wraps a store, counts its calls, and lets chosen ones go wrong.
///
/// Without an injected fault it behaves as the store inside. Clones share faults and counts.
///
/// ```
/// use tower_idempotency::MemoryStore;
/// use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};
///
/// let store = FaultyStore::new(MemoryStore::new());
/// // The first claim is granted, but whoever asked does not hear of it.
/// store.inject(Move::Claim, Calls::Nth(1), Fault::LoseReply);
/// // From now on, nothing can be completed.
/// store.inject(Move::Complete, Calls::Every, Fault::Fail);
/// assert_eq!(store.calls(Move::Claim), 0);
/// ```
#[derive(Clone)]
pub struct FaultyStore<S> {
    inner: S,
    script: Arc<Mutex<Script>>,
}

/// The moves of a [`Store`], to say which of them shall fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Move {
    /// [`Store::claim`]
    Claim,
    /// [`Store::renew`]
    Renew,
    /// [`Store::complete`]
    Complete,
    /// [`Store::release`]
    Release,
    /// [`Store::abandon`]
    Abandon,
    /// [`Store::annotate`]
    Annotate,
    /// [`Store::checkpoint`]
    Checkpoint,
    /// [`Store::abandoned`]
    Abandoned,
    /// [`Store::resolve`]
    Resolve,
    /// [`Store::lookup`]
    Lookup,
    /// [`Store::remove`]
    Remove,
    /// [`Store::erase`]
    Erase,
    /// [`Store::purge`]
    Purge,
    /// [`Store::changed`]
    Changed,
}

/// Which calls of a move a fault hits, counted from the moment of injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Calls {
    /// The n-th call only; the next one is 1. Zero is none.
    Nth(usize),
    /// So many calls, from the next one on.
    Next(usize),
    /// Every call until [`FaultyStore::heal`].
    Every,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The call fails with [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable), and
    /// was not applied.
    Fail,
    /// The call is applied, and then fails as above: a reply that was lost on the way.
    LoseReply,
    /// The call is applied so much later. Needs a tokio runtime with a timer.
    Delay(Duration),
    /// The call is applied at once and answers so much later: under a shorter time limit, another
    /// way to lose a reply. Needs a tokio runtime with a timer.
    DelayReply(Duration),
    /// The call is not applied and never answers.
    Hang,
}

impl<S> FaultyStore<S> {
    /// This store, with no fault yet.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            script: Arc::default(),
        }
    }

    /// Lets these calls of this move go wrong. Where several faults hit one call, the one that was
    /// injected first counts.
    pub fn inject(&self, of: Move, calls: Calls, fault: Fault) {
        let mut script = self.script();
        let next = script.calls[of as usize] + 1;
        let calls = match calls {
            Calls::Nth(0) => next..next,
            Calls::Nth(n) => next.saturating_add(n - 1)..next.saturating_add(n),
            Calls::Next(n) => next..next.saturating_add(n),
            Calls::Every => next..usize::MAX,
        };
        script.plans.push(Plan { of, calls, fault });
    }

    /// Takes all faults back. Calls that they already delay stay delayed.
    pub fn heal(&self) {
        self.script().plans.clear();
    }

    /// How often this move was called so far, failed calls included.
    pub fn calls(&self, of: Move) -> usize {
        self.script().calls[of as usize]
    }

    /// The store inside, past all faults and uncounted.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call<T>(
        &self,
        of: Move,
        apply: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let fault = self.script().next(of);
        match fault {
            None => apply.await,
            Some(Fault::Fail) => Err(StoreError::unavailable("injected: not applied")),
            Some(Fault::LoseReply) => {
                apply.await?;
                Err(StoreError::unavailable("injected: the reply was lost"))
            }
            Some(Fault::Delay(by)) => {
                tokio::time::sleep(by).await;
                apply.await
            }
            Some(Fault::DelayReply(by)) => {
                let reply = apply.await;
                tokio::time::sleep(by).await;
                reply
            }
            Some(Fault::Hang) => std::future::pending().await,
        }
    }
}

impl<S: fmt::Debug> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore")
            .field("inner", &self.inner)
            .field("plans", &self.script().plans)
            .finish()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for FaultyStore<S> {
    fn properties(&self) -> StoreProperties {
        self.inner.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.call(Move::Claim, self.inner.claim(request)).await
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.call(Move::Renew, self.inner.renew(claim, lease)).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let complete = self.inner.complete(claim, outcome, retention);
        self.call(Move::Complete, complete).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.call(Move::Release, self.inner.release(claim)).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.call(Move::Abandon, self.inner.abandon(claim)).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let annotate = self.inner.annotate(claim, correlation);
        self.call(Move::Annotate, annotate).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let checkpoint = self.inner.checkpoint(claim, name, data);
        self.call(Move::Checkpoint, checkpoint).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let abandoned = self.inner.abandoned(after, limit);
        self.call(Move::Abandoned, abandoned).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let resolve = self.inner.resolve(record, resolution);
        self.call(Move::Resolve, resolve).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        self.call(Move::Lookup, self.inner.lookup(key)).await
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.call(Move::Remove, self.inner.remove(key)).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.call(Move::Erase, self.inner.erase(within, scope, limit))
            .await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.call(Move::Purge, self.inner.purge(limit)).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let changed = self.inner.changed(key, seen, max);
        self.call(Move::Changed, changed).await
    }
}

#[derive(Default)]
struct Script {
    calls: [usize; MOVES],
    plans: Vec<Plan>,
}

#[derive(Debug)]
struct Plan {
    of: Move,
    // Numbers of calls since the store was wrapped.
    calls: Range<usize>,
    fault: Fault,
}

impl Script {
    fn next(&mut self, of: Move) -> Option<Fault> {
        self.calls[of as usize] += 1;
        let call = self.calls[of as usize];
        let mut plans = self.plans.iter();
        let plan = plans.find(|plan| plan.of == of && plan.calls.contains(&call))?;
        Some(plan.fault)
    }
}

const MOVES: usize = Move::Changed as usize + 1;

#[cfg(all(test, feature = "memory", not(idempotency_loom)))]
mod tests {
    use super::*;
    use crate::fingerprint::Fingerprint;
    use crate::store::MemoryStore;

    fn request() -> ClaimRequest {
        ClaimRequest::new(ScopedKey::join("faults", "", "key"), Fingerprint::of(&[]))
    }

    #[tokio::test]
    async fn a_call_that_fails_is_not_applied() {
        let store = FaultyStore::new(MemoryStore::new());
        store.inject(Move::Claim, Calls::Every, Fault::Fail);
        store.claim(&request()).await.unwrap_err();
        assert_eq!(store.inner().len(), 0);
    }

    #[tokio::test]
    async fn a_call_whose_reply_is_lost_is_applied() {
        let store = FaultyStore::new(MemoryStore::new());
        store.inject(Move::Claim, Calls::Next(1), Fault::LoseReply);
        let error = store.claim(&request()).await.unwrap_err();
        assert!(error.is_transient());
        assert_eq!(store.inner().len(), 1);
    }

    #[tokio::test]
    async fn only_the_named_calls_of_the_named_move_go_wrong() {
        let store = FaultyStore::new(MemoryStore::new());
        let _ = store.claim(&request()).await;
        store.inject(Move::Claim, Calls::Nth(2), Fault::Fail);
        store.inject(Move::Lookup, Calls::Next(2), Fault::Fail);
        let mut claims = Vec::new();
        let mut lookups = Vec::new();
        for _ in 0..4 {
            claims.push(store.claim(&request()).await.is_ok());
            lookups.push(store.lookup(&request().key).await.is_ok());
        }
        assert_eq!(claims, [true, false, true, true]);
        assert_eq!(lookups, [false, false, true, true]);
        assert_eq!(store.calls(Move::Claim), 5);
        assert_eq!(store.calls(Move::Purge), 0);
    }

    #[tokio::test]
    async fn a_healed_store_answers_again() {
        let store = FaultyStore::new(MemoryStore::new());
        store.inject(Move::Claim, Calls::Every, Fault::Fail);
        store.clone().heal();
        assert!(store.claim(&request()).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_delayed_call_is_applied_late_and_a_delayed_reply_is_not() {
        let store = FaultyStore::new(MemoryStore::new());
        let limit = Duration::from_secs(1);
        for (fault, applied) in [
            (Fault::Delay(2 * limit), 0),
            (Fault::Hang, 0),
            (Fault::DelayReply(2 * limit), 1),
        ] {
            store.heal();
            store.inject(Move::Claim, Calls::Every, fault);
            let claim = request();
            let claimed = tokio::time::timeout(limit, store.claim(&claim)).await;
            assert!(claimed.is_err(), "{fault:?} answered in time");
            assert_eq!(store.inner().len(), applied, "{fault:?}");
        }
    }
}
