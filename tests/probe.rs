//! A probe passes on stores that work, names the step at which others do not, and leaves nothing
//! behind.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Fenced, Fingerprint,
    Idempotency, MemoryStore, Outcome, Owner, PrefixedStore, ProbeError, ProbeStep, Purged, Record,
    Resolution, ScopedKey, Store, StoreError, StoreProperties, async_trait, probe,
};

#[tokio::test]
async fn a_store_that_works_passes_and_keeps_nothing() {
    let inside = MemoryStore::new();
    let prefixed = PrefixedStore::new(inside.clone(), "shop");
    let stores: [Arc<dyn Store>; 2] = [Arc::new(inside.clone()), Arc::new(prefixed)];
    for store in stores {
        probe(&*store).await.unwrap();
        probe(&store).await.unwrap();
        Idempotency::new(store).probe().await.unwrap();
        assert!(inside.is_empty());
    }
}

#[cfg(feature = "encrypt")]
#[tokio::test]
async fn an_encrypting_store_that_works_passes_and_keeps_nothing() {
    use tower_idempotency::{EncryptedStore, Keyring};

    let inside = MemoryStore::new();
    let store = EncryptedStore::new(inside.clone(), Keyring::new(1, [1; 32]));
    probe(&PrefixedStore::new(store, "shop")).await.unwrap();
    assert!(inside.is_empty());
}

#[tokio::test]
async fn probes_of_many_instances_do_not_disturb_each_other() {
    let inside = MemoryStore::new();
    let instances: Vec<_> = (0..10).map(|_| Idempotency::new(inside.clone())).collect();
    for probed in join_all(instances.iter().map(Idempotency::probe)).await {
        probed.unwrap();
    }
    assert!(inside.is_empty());
}

#[tokio::test]
async fn the_step_that_failed_is_named_and_nothing_is_left() {
    for (of, calls, step) in [
        (Move::Claim, Calls::Nth(1), ProbeStep::Claim),
        (Move::Claim, Calls::Nth(2), ProbeStep::Claim),
        (Move::Complete, Calls::Nth(1), ProbeStep::Complete),
        (Move::Claim, Calls::Nth(3), ProbeStep::Replay),
        (Move::Remove, Calls::Nth(1), ProbeStep::Remove),
        (Move::Lookup, Calls::Nth(1), ProbeStep::Remove),
    ] {
        for fault in [Fault::Fail, Fault::LoseReply] {
            let store = FaultyStore::new(MemoryStore::new());
            store.inject(of, calls, fault);
            let error = Idempotency::new(store.clone()).probe().await.unwrap_err();
            assert_eq!(error.step(), step, "{of:?} {calls:?} {fault:?}");
            assert!(
                error.to_string().contains(&format!("step `{step}`")),
                "{error}"
            );
            let source = error.source().expect("the store's error");
            assert!(source.is::<StoreError>());
            assert!(store.inner().is_empty(), "{of:?} {calls:?} {fault:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_fails_within_the_time_limit_of_its_calls() {
    let store = FaultyStore::new(MemoryStore::new());
    store.inject(Move::Complete, Calls::Every, Fault::Hang);
    let started = tokio::time::Instant::now();
    let limit = Duration::from_secs(2);
    let idempotency = Idempotency::builder(store.clone()).store_timeout(limit);
    let error = idempotency.build().unwrap().probe().await.unwrap_err();
    assert_eq!(error.step(), ProbeStep::Complete);
    assert_eq!(started.elapsed(), limit);
    assert!(store.inner().is_empty());
    // For a store by itself, the engine's default.
    assert_eq!(failed(&store).await.step(), ProbeStep::Complete);
    assert_eq!(started.elapsed(), limit + Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_store_does_not_let_go_of_expires_within_a_minute() {
    let store = FaultyStore::new(MemoryStore::new());
    store.inject(Move::Complete, Calls::Every, Fault::Fail);
    store.inject(Move::Remove, Calls::Every, Fault::Fail);
    assert_eq!(failed(&store).await.step(), ProbeStep::Complete);
    // It could still be released: nobody has to reconcile it.
    let page = store.abandoned(None, 10).await.unwrap();
    assert!(page.records.is_empty());
    assert_eq!(store.inner().len(), 1);
    tokio::time::advance(Duration::from_secs(60)).await;
    let purged = store.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (1, 0));
}

#[tokio::test]
async fn a_store_that_answers_wrongly_fails_at_that_step() {
    for (flaw, step) in [
        (Flaw::ForgetsClaims, ProbeStep::Claim),
        (Flaw::RefusesFreshKeys, ProbeStep::Claim),
        (Flaw::LosesClaims, ProbeStep::Complete),
        (Flaw::ForgetsOutcomes, ProbeStep::Replay),
        (Flaw::KeepsText, ProbeStep::Replay),
        (Flaw::LosesTheFingerprint, ProbeStep::Replay),
        (Flaw::RemovesNothing, ProbeStep::Remove),
    ] {
        let inside = MemoryStore::new();
        let error = failed(&Flawed {
            flaw,
            inside: inside.clone(),
        })
        .await;
        assert_eq!(error.step(), step, "{flaw:?}: {error}");
        assert!(error.source().is_none(), "{flaw:?}: {error:?}");
        assert_eq!(inside.is_empty(), flaw != Flaw::RemovesNothing, "{flaw:?}");
    }
}

async fn failed(store: &impl Store) -> ProbeError {
    probe(store).await.expect_err("the store passed")
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    ForgetsClaims,
    RefusesFreshKeys,
    LosesClaims,
    ForgetsOutcomes,
    /// As a store that passes bodies through a `String`.
    KeepsText,
    LosesTheFingerprint,
    RemovesNothing,
}

#[derive(Debug)]
struct Flawed {
    flaw: Flaw,
    inside: MemoryStore,
}

#[async_trait]
impl Store for Flawed {
    fn properties(&self) -> StoreProperties {
        self.inside.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let claimed = self.inside.claim(request).await?;
        match (self.flaw, claimed) {
            (Flaw::ForgetsClaims, claimed) => {
                let _ = self.inside.remove(&request.key).await?;
                Ok(claimed)
            }
            (Flaw::RefusesFreshKeys, Claimed::Acquired { .. }) => {
                let record = self.inside.lookup(&request.key).await?;
                Ok(Claimed::Existing(record.expect("just claimed")))
            }
            (Flaw::LosesTheFingerprint, Claimed::Existing(mut record)) => {
                record.fingerprint = Fingerprint::of(&[]);
                Ok(Claimed::Existing(record))
            }
            (_, claimed) => Ok(claimed),
        }
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        match self.flaw {
            Flaw::LosesClaims => Ok(Completion::ClaimLost),
            Flaw::ForgetsOutcomes => Ok(Completion::Recorded),
            Flaw::KeepsText => {
                let text = String::from_utf8_lossy(&outcome.body()).into_owned();
                let status = outcome.status().expect("a response");
                let headers = outcome.headers().collect();
                let trailers = outcome.trailers().collect();
                let body: &[&[u8]] = &[text.as_bytes()];
                let outcome = Outcome::response(status, &headers, body, Some(&trailers));
                self.inside.complete(claim, &outcome, retention).await
            }
            _ => self.inside.complete(claim, outcome, retention).await,
        }
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        match self.flaw {
            Flaw::RemovesNothing => Ok(true),
            _ => self.inside.remove(key).await,
        }
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        self.inside.lookup(key).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inside.release(claim).await
    }

    async fn renew(&self, _: &Claim, _: Duration) -> Result<Fenced, StoreError> {
        unreachable!("a probe does not renew")
    }

    async fn abandon(&self, _: &Claim) -> Result<Fenced, StoreError> {
        unreachable!("a probe does not abandon")
    }

    async fn annotate(&self, _: &Claim, _: &str) -> Result<Fenced, StoreError> {
        unreachable!("a probe does not annotate")
    }

    async fn checkpoint(&self, _: &Claim, _: &str, _: &Bytes) -> Result<Fenced, StoreError> {
        unreachable!("a probe does not checkpoint")
    }

    async fn abandoned(&self, _: Option<&Cursor>, _: usize) -> Result<AbandonedPage, StoreError> {
        unreachable!("a probe does not walk")
    }

    async fn resolve(&self, _: &Record, _: &Resolution) -> Result<Fenced, StoreError> {
        unreachable!("a probe does not resolve")
    }

    async fn erase(&self, _: &str, _: &str, _: usize) -> Result<usize, StoreError> {
        unreachable!("a probe does not erase")
    }

    async fn purge(&self, _: usize) -> Result<Purged, StoreError> {
        unreachable!("a probe does not purge")
    }

    async fn changed(&self, _: &ScopedKey, _: &Owner, _: Duration) -> Result<(), StoreError> {
        unreachable!("a probe does not wait")
    }
}
