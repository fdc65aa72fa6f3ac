//! Several services in one store.

use std::sync::Arc;
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
    Transactional,
};

/// Puts a prefix before the namespace of every key, so that several services share one store
/// without seeing each other's records.
///
/// A key of the namespace `http` is filed under `shop/http`. Two prefixes never meet, whatever the
/// namespaces are: in the prefix itself `/` and `%` are written as `%2F` and `%25`. A service
/// without a prefix has namespaces as it chooses them, so give every service one.
///
/// # What it does not divide
///
/// * [`purge`](Store::purge) removes the expired records of *all* services, because that is what
///   the store inside removes; what one service's purge counts may be another's. It is enough that
///   one of them purges.
/// * A store that is full is full for all.
/// * Pages of [`abandoned`](Store::abandoned) hold this service's records only, and each of them
///   asks for one page of the store inside: where most abandoned records are others', pages are
///   short or empty.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, PrefixedStore};
///
/// let database = MemoryStore::new();
/// let shop = IdempotencyLayer::new(PrefixedStore::new(database.clone(), "shop"));
/// let billing = IdempotencyLayer::new(PrefixedStore::new(database, "billing"));
/// # let _ = (shop, billing);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PrefixedStore<S> {
    inner: S,
    /// With the `/` at its end, the only one in it.
    prefix: Arc<str>,
}

impl<S> PrefixedStore<S> {
    /// The records of the service that this prefix names.
    ///
    /// An empty prefix is one like any other. Records that are there already have the prefix that
    /// they were written with: another one makes all keys new ones.
    pub fn new(inner: S, prefix: &str) -> Self {
        let mut escaped = prefix.replace('%', "%25").replace('/', "%2F");
        escaped.push(BORDER);
        Self {
            inner,
            prefix: escaped.into(),
        }
    }

    /// The key under which the store inside files `key`: for an operator who looks for its row.
    pub fn inner_key(&self, key: &ScopedKey) -> ScopedKey {
        let mut namespace = String::with_capacity(self.prefix.len() + key.namespace().len());
        namespace.push_str(&self.prefix);
        namespace.push_str(key.namespace());
        key.with_namespace(&namespace)
    }

    /// The store inside, with the records of all services.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    fn inner_claim(&self, claim: &Claim) -> Claim {
        Claim::new(self.inner_key(claim.key()), *claim.owner(), claim.attempt())
    }

    /// A record of this service with its own key, `None` if it is another's.
    fn own(&self, mut record: Record) -> Option<Record> {
        let namespace = record.key.namespace().strip_prefix(&*self.prefix)?;
        record.key = record.key.with_namespace(namespace);
        Some(record)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for PrefixedStore<S> {
    fn properties(&self) -> StoreProperties {
        self.inner.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let mut inner = request.clone();
        inner.key = self.inner_key(&request.key);
        Ok(match self.inner.claim(&inner).await? {
            Claimed::Acquired { claim, notes } => Claimed::Acquired {
                claim: Claim::new(request.key.clone(), *claim.owner(), claim.attempt()),
                notes,
            },
            Claimed::Existing(record) => Claimed::Existing(with_key(record, &request.key)),
        })
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.inner.renew(&self.inner_claim(claim), lease).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let claim = self.inner_claim(claim);
        self.inner.complete(&claim, outcome, retention).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.release(&self.inner_claim(claim)).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.abandon(&self.inner_claim(claim)).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let claim = self.inner_claim(claim);
        self.inner.annotate(&claim, correlation).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let claim = self.inner_claim(claim);
        self.inner.checkpoint(&claim, name, data).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        // One page for one page: filling it up could mean to walk through all of another service's.
        let mut page = self.inner.abandoned(after, limit).await?;
        page.records = page
            .records
            .into_iter()
            .filter_map(|record| self.own(record))
            .collect();
        Ok(page)
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let record = with_key(record.clone(), &self.inner_key(&record.key));
        self.inner.resolve(&record, resolution).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let record = self.inner.lookup(&self.inner_key(key)).await?;
        Ok(record.map(|record| with_key(record, key)))
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.remove(&self.inner_key(key)).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        let within = format!("{}{within}", self.prefix);
        self.inner.erase(&within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let key = self.inner_key(key);
        self.inner.changed(&key, seen, max).await
    }
}

impl<S: Transactional> Transactional for PrefixedStore<S> {
    type Recording = S::Recording;

    fn recording(&self, claim: &Claim, outcome: &Outcome) -> Result<S::Recording, StoreError> {
        self.inner.recording(&self.inner_claim(claim), outcome)
    }
}

fn with_key(mut record: Record, key: &ScopedKey) -> Record {
    record.key = key.clone();
    record
}

/// Ends the prefix, which holds no other one.
const BORDER: char = '/';
