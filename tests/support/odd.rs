//! A store with faults that `FaultyStore` does not have: errors that no retry mends, panics, and
//! claims that arrive after whoever asked has given up.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::testing::Move;
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Fenced, MemoryStore, Outcome,
    Owner, Purged, Record, Resolution, ScopedKey, Store, StoreError, StoreErrorKind,
    StoreProperties, async_trait,
};

/// A [`MemoryStore`] of which one move at a time is odd.
#[derive(Clone, Debug, Default)]
pub struct OddStore {
    inner: MemoryStore,
    odd: Arc<Mutex<Option<(Move, Odd)>>>,
    // Held by the store alone: tells whether anybody still has the store.
    token: Arc<()>,
}

#[derive(Clone, Copy, Debug)]
pub enum Odd {
    /// Fails with an error of this kind.
    Error(StoreErrorKind),
    Panic,
    /// A claim: never answers, and is applied this much later, whoever listens by then.
    Late(Duration),
    /// The next claim: fails at once, and is applied this much later all the same.
    FailedAndLate(Duration),
}

impl OddStore {
    /// From now on `of` is odd, and everything else is not.
    pub fn set(&self, of: Move, odd: Odd) {
        *self.odd.lock().unwrap() = Some((of, odd));
    }

    pub fn heal(&self) {
        *self.odd.lock().unwrap() = None;
    }

    pub fn memory(&self) -> &MemoryStore {
        &self.inner
    }

    /// Upgrades for as long as a clone of the store lives.
    pub fn token(&self) -> std::sync::Weak<()> {
        Arc::downgrade(&self.token)
    }

    fn check(&self, of: Move) -> Result<(), StoreError> {
        let odd = *self.odd.lock().unwrap();
        match odd {
            Some((odd, Odd::Error(kind))) if odd == of => {
                Err(StoreError::new(kind, "injected: an odd error"))
            }
            Some((odd, Odd::Panic)) if odd == of => panic!("injected: the store panics"),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Store for OddStore {
    fn properties(&self) -> StoreProperties {
        self.inner.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.check(Move::Claim)?;
        let odd = *self.odd.lock().unwrap();
        if let Some((Move::Claim, Odd::Late(by) | Odd::FailedAndLate(by))) = odd {
            let (inner, request) = (self.inner.clone(), request.clone());
            tokio::spawn(async move {
                tokio::time::sleep(by).await;
                let _ = inner.claim(&request).await;
            });
            if matches!(odd, Some((_, Odd::FailedAndLate(_)))) {
                self.heal();
                return Err(StoreError::unavailable("injected: on its way"));
            }
            std::future::pending::<()>().await;
        }
        self.inner.claim(request).await
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.check(Move::Renew)?;
        self.inner.renew(claim, lease).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        self.check(Move::Complete)?;
        self.inner.complete(claim, outcome, retention).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.check(Move::Release)?;
        self.inner.release(claim).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.check(Move::Abandon)?;
        self.inner.abandon(claim).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        self.check(Move::Annotate)?;
        self.inner.annotate(claim, correlation).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        self.check(Move::Checkpoint)?;
        self.inner.checkpoint(claim, name, data).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.check(Move::Abandoned)?;
        self.inner.abandoned(after, limit).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        self.check(Move::Resolve)?;
        self.inner.resolve(record, resolution).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        self.check(Move::Lookup)?;
        self.inner.lookup(key).await
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.remove(key).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.inner.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.check(Move::Purge)?;
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.inner.changed(key, seen, max).await
    }
}
