//! Whether a store works, before the first request finds out that it does not.

use std::future::Future;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode};

use crate::claim::{Claim, ClaimRequest, Claimed};
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::idempotency::Idempotency;
use crate::key::IdempotencyKey;
use crate::outcome::Outcome;
use crate::record::{Record, State};
use crate::store::{Completion, Store};
use crate::time_limit::within;

impl<S: Store> Idempotency<S> {
    /// Checks the store with a throw-away record, for the start of a service: see [`probe`]. A call
    /// to the store may take as long as the engine's time limit for it says.
    ///
    /// ```
    /// use tower_idempotency::{Idempotency, MemoryStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_idempotency::ProbeError> {
    /// let idempotency = Idempotency::new(MemoryStore::new());
    /// idempotency.probe().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`probe`].
    pub async fn probe(&self) -> Result<(), ProbeError> {
        let limit = self.engine.settings.store_timeout;
        Probe::new(self.engine.store(), limit).run().await
    }
}

/// Claims a key that nobody else has, is refused it a second time, completes it, is shown the
/// outcome as a retry would be, and removes the record: the whole way of a request through this
/// store and everything that is put round it.
///
/// The key is random, so that any number of instances may do so at once, and its namespace is
/// `tower-idempotency.probe`. A probe that fails removes its record as far as the store lets it;
/// what is left expires within a minute, and [`purge`](Store::purge) may count it as unresolved.
/// Nothing is tried twice: that is for the caller to decide. A call to the store may take 5 s.
///
/// It says nothing of other instances: that they use the same database, or the same keyring.
///
/// # Errors
///
/// [`ProbeError`], with the step that failed.
pub async fn probe<S: Store + ?Sized>(store: &S) -> Result<(), ProbeError> {
    Probe::new(store, LIMIT).run().await
}

/// What a [`probe`] found to be wrong. Where the store itself failed, its error is the
/// [`source`](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[error("the idempotency store does not work: at the step `{step}`, {problem}")]
pub struct ProbeError {
    step: ProbeStep,
    problem: &'static str,
    source: Option<StoreError>,
}

impl ProbeError {
    /// Where the probe ended.
    pub fn step(&self) -> ProbeStep {
        self.step
    }
}

/// The steps of a [`probe`], in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProbeStep {
    /// Claiming a fresh key, and being refused it a second time.
    Claim,
    /// Recording an outcome.
    Complete,
    /// Being shown that outcome by a later claim.
    Replay,
    /// Erasing the record.
    Remove,
}

impl std::fmt::Display for ProbeStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Claim => "claim",
            Self::Complete => "complete",
            Self::Replay => "replay",
            Self::Remove => "remove",
        })
    }
}

struct Probe<'s, S: ?Sized> {
    store: &'s S,
    limit: Duration,
    request: ClaimRequest,
    outcome: Outcome,
}

impl<'s, S: Store + ?Sized> Probe<'s, S> {
    fn new(store: &'s S, limit: Duration) -> Self {
        let random: [u8; 16] = rand::random();
        let key = IdempotencyKey::random().scoped(NAMESPACE);
        let mut request = ClaimRequest::new(key, Fingerprint::of(&[b"probe", &random]));
        request.lease = LEASE;
        request.retention = RETENTION;
        Self {
            store,
            limit,
            request,
            outcome: sample(&random),
        }
    }

    async fn run(self) -> Result<(), ProbeError> {
        let checked = self.steps().await;
        if checked.is_err() {
            self.clean_up().await;
        }
        checked
    }

    async fn steps(&self) -> Result<(), ProbeError> {
        let claim = self.claim().await?;
        self.complete(&claim).await?;
        self.replay().await?;
        self.remove().await
    }

    async fn claim(&self) -> Result<Claim, ProbeError> {
        let step = ProbeStep::Claim;
        let claim = match self.call(step, self.store.claim(&self.request)).await? {
            Claimed::Acquired { claim, .. } => claim,
            Claimed::Existing(_) => {
                return Err(wrong(step, "a key that nobody has used was refused"));
            }
        };
        match self.claim_again(step).await? {
            Some(record) if matches!(record.state, State::Started { .. }) => Ok(claim),
            Some(_) => Err(wrong(step, "a claim that is live is not shown as such")),
            None => Err(wrong(step, "a key was granted twice")),
        }
    }

    async fn complete(&self, claim: &Claim) -> Result<(), ProbeError> {
        let step = ProbeStep::Complete;
        let completed = self.store.complete(claim, &self.outcome, None);
        match self.call(step, completed).await? {
            Completion::Recorded => Ok(()),
            Completion::Standing(_) => Err(wrong(step, "somebody else had completed the key")),
            Completion::ClaimLost => Err(wrong(step, "the claim was lost")),
        }
    }

    async fn replay(&self) -> Result<(), ProbeError> {
        let step = ProbeStep::Replay;
        let Some(record) = self.claim_again(step).await? else {
            return Err(wrong(step, "a completed key was granted again"));
        };
        let State::Completed { outcome, .. } = record.state else {
            return Err(wrong(step, "a completed key is not shown as such"));
        };
        if record.fingerprint != self.request.fingerprint {
            return Err(wrong(step, "another fingerprint came back"));
        }
        if outcome != self.outcome {
            return Err(wrong(step, "another outcome came back"));
        }
        Ok(())
    }

    async fn remove(&self) -> Result<(), ProbeError> {
        let step = ProbeStep::Remove;
        let key = &self.request.key;
        if !self.call(step, self.store.remove(key)).await? {
            return Err(wrong(step, "the record had gone by itself"));
        }
        match self.call(step, self.store.lookup(key)).await? {
            Some(_) => Err(wrong(step, "the record is still there")),
            None => Ok(()),
        }
    }

    /// As another request with the same key. `None` if it is granted.
    async fn claim_again(&self, step: ProbeStep) -> Result<Option<Record>, ProbeError> {
        let request = &self.request;
        let mut other = ClaimRequest::new(request.key.clone(), request.fingerprint);
        (other.lease, other.retention) = (request.lease, request.retention);
        Ok(match self.call(step, self.store.claim(&other)).await? {
            Claimed::Existing(record) => Some(record),
            Claimed::Acquired { .. } => None,
        })
    }

    /// A failed call may have been applied. If the record cannot be erased, it is at least not left
    /// to be reconciled.
    async fn clean_up(&self) {
        let ClaimRequest { key, owner, .. } = &self.request;
        let removed = within(self.limit, self.store.remove(key)).await;
        if !matches!(removed, Ok(Ok(_))) {
            // Stores compare the owner alone.
            let claim = Claim::new(key.clone(), *owner, 0);
            let _ = within(self.limit, self.store.release(&claim)).await;
        }
    }

    async fn call<T>(
        &self,
        step: ProbeStep,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, ProbeError> {
        let limit = self.limit;
        let called = within(limit, call).await.unwrap_or_else(|_| {
            let message = format!("it did not answer within {limit:?}");
            Err(StoreError::unavailable(message))
        });
        called.map_err(|error| ProbeError {
            step,
            problem: "it did not answer as it should",
            source: Some(error),
        })
    }
}

fn wrong(step: ProbeStep, problem: &'static str) -> ProbeError {
    ProbeError {
        step,
        problem,
        source: None,
    }
}

/// Holds what a store may lose that keeps text instead of bytes.
fn sample(random: &[u8]) -> Outcome {
    let mut headers = HeaderMap::new();
    // Latin-1, twice.
    for value in [&b"Z\xfcrich"[..], b"again"] {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append("x-probe", value);
        }
    }
    Outcome::response(
        StatusCode::CREATED,
        &headers,
        &[b"\0\xff", random],
        Some(&headers),
    )
}

const NAMESPACE: &str = "tower-idempotency.probe";
/// As the engine's default.
const LIMIT: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(60);
