//! One run of a handler under a claim.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::admission::Settled;
use crate::claim::{Claim, ClaimRequest};
use crate::detach::Counted;
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::idempotency::{Asked, Closing, Engine};
use crate::key::IdempotencyKey;
use crate::outcome::Outcome;
use crate::record::Notes;
use crate::scope::ScopedKey;
use crate::store::{Fenced, OpenTransaction};
use crate::telemetry::{self, Fault};

/// What a handler sees of the claim it runs under: find it in the request's extensions, or extract
/// it in axum (feature `axum`).
///
/// Cheap to clone. It cannot complete or release the key: the response does that.
///
/// ```
/// # async fn charge(attempt: &tower_idempotency::Attempt) -> Result<(), Box<dyn std::error::Error>> {
/// // The same downstream key on every attempt of this request, another one for every step.
/// let gateway_key = attempt.derive("charge")?;
/// attempt.annotate("charge-4711").await?;
/// if attempt.finished("charged").is_none() {
///     // … call the gateway with `gateway_key` …
///     attempt.checkpoint("charged", b"ch_1").await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Attempt {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    engine: Arc<Engine>,
    claim: Claim,
    fingerprint: Fingerprint,
    claim_was_repeated: bool,
    notes: Mutex<Notes>,
    /// From which the handler takes its transaction, in one-commit mode.
    slot: Option<Arc<dyn Any + Send + Sync>>,
    lost: AtomicBool,
    lost_signal: Notify,
    // Where the claim was made: what has to go on for it finds its way home from anywhere.
    runtime: Option<Handle>,
}

/// Why a note could not be attached to a claim.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoteError {
    /// Another attempt took the key over, or the record was erased. Stop working: what this attempt
    /// still does may be done twice.
    #[error("the claim was lost: another attempt may be running, so stop working")]
    ClaimLost,
    /// The store did not answer; the note may or may not be there. Asking again is safe.
    #[error("the note could not be recorded: ask again")]
    Store(#[source] StoreError),
}

/// No secret was set, so that a derived key could be guessed or differ between two instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no secret to derive keys from: set `Idempotency::builder(store).secret(…)`")]
pub struct MissingSecret;

impl Attempt {
    /// The lookup key; [`ScopedKey::key`] is what the client sent.
    pub fn key(&self) -> &ScopedKey {
        self.inner.claim.key()
    }

    /// The client's key by itself.
    pub fn idempotency_key(&self) -> IdempotencyKey {
        IdempotencyKey::from_decoded(self.key().key().into())
    }

    /// The fencing token: 1 for the first run, greater with every later one. Send it along to
    /// systems that can refuse a stalled attempt.
    pub fn number(&self) -> u32 {
        self.inner.claim.attempt()
    }

    /// What earlier phases of this record left; `None` if the phase was not finished.
    pub fn finished(&self, name: &str) -> Option<Bytes> {
        self.inner.notes().checkpoint(name).cloned()
    }

    /// The correlation id that was attached, by this attempt or by one before it.
    pub fn correlation(&self) -> Option<String> {
        self.inner.notes().correlation.clone()
    }

    /// Records that a phase is finished, so that a later attempt
    /// ([`OnAbandoned::Rerun`](crate::OnAbandoned::Rerun)) resumes after it. A repeated name
    /// replaces its data.
    ///
    /// # Errors
    ///
    /// [`NoteError`] if the claim was lost or the store did not answer.
    pub async fn checkpoint(&self, name: &str, data: &[u8]) -> Result<(), NoteError> {
        let inner = &self.inner;
        let data = Bytes::copy_from_slice(data);
        let store = inner.engine.store();
        let recorded = store.checkpoint(&inner.claim, name, &data);
        inner.noted("checkpoint", recorded).await?;
        inner.notes().set_checkpoint(name, data);
        Ok(())
    }

    /// Attaches the id under which another system knows the work (an order, a charge), for the
    /// reconciler. A second one replaces the first.
    ///
    /// # Errors
    ///
    /// [`NoteError`] if the claim was lost or the store did not answer.
    pub async fn annotate(&self, correlation: &str) -> Result<(), NoteError> {
        let inner = &self.inner;
        let recorded = inner.engine.store().annotate(&inner.claim, correlation);
        inner.noted("annotate", recorded).await?;
        inner.notes().correlation = Some(correlation.to_owned());
        Ok(())
    }

    /// The key for one downstream step: the same on every attempt of this record, another one for
    /// every step, key, scope and namespace. Hand it to a gateway instead of the client's key,
    /// which is not unique among your tenants.
    ///
    /// HMAC-SHA-256 over the lookup key and the step, in the form of a version 8 UUID
    /// (RFC 9562 section 5.8): 36 characters, which every gateway surveyed accepts.
    ///
    /// # Errors
    ///
    /// [`MissingSecret`] if the engine was built without a
    /// [`secret`](crate::IdempotencyBuilder::secret).
    pub fn derive(&self, step: &str) -> Result<IdempotencyKey, MissingSecret> {
        let secret = self.inner.engine.settings.secret.as_deref();
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.ok_or(MissingSecret)?)
            .map_err(|_| MissingSecret)?;
        let key = self.key().as_bytes();
        mac.update(&(key.len() as u64).to_le_bytes());
        mac.update(key);
        mac.update(step.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&mac.finalize().into_bytes()[..16]);
        Ok(IdempotencyKey::uuid(bytes, 8))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Whether the claim is known to be lost: a renewal was refused, or none got through for a
    /// whole lease.
    pub fn is_claim_lost(&self) -> bool {
        self.inner.lost.load(Ordering::Acquire)
    }

    /// Returns when the claim is lost; never otherwise. Race long work against it.
    pub async fn claim_lost(&self) {
        loop {
            // Hears of everything from here on, before it is polled.
            let signal = self.inner.lost_signal.notified();
            if self.is_claim_lost() {
                return;
            }
            signal.await;
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("key", self.key())
            .field("number", &self.number())
            .field("claim_lost", &self.is_claim_lost())
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn slot(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        self.slot.as_ref()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    pub(crate) fn claim_was_repeated(&self) -> bool {
        self.claim_was_repeated
    }

    pub(crate) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    pub(crate) fn mark_lost(&self) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            self.lost_signal.notify_waiters();
            telemetry::fault(Fault::ClaimLost, self.claim.key(), self.claim.attempt());
        }
    }

    fn notes(&self) -> std::sync::MutexGuard<'_, Notes> {
        // Plain data: a panic elsewhere leaves it whole.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn noted(
        &self,
        op: &'static str,
        recorded: impl Future<Output = Result<Fenced, StoreError>>,
    ) -> Result<(), NoteError> {
        if self.slot.is_some() {
            // There is no record, and nobody who could find an attempt half done.
            return Ok(());
        }
        match self.engine.call(op, recorded).await {
            Ok(Fenced::Applied) => Ok(()),
            Ok(Fenced::ClaimLost) => {
                self.mark_lost();
                Err(NoteError::ClaimLost)
            }
            Err(error) => Err(NoteError::Store(error)),
        }
    }
}

/// The engine's side of an attempt: whoever holds it says how the attempt ended.
///
/// While it lives the lease is renewed. Dropped without a word, it abandons the key: nobody knows
/// how the attempt ended, so retries get *outcome unknown*.
#[must_use = "dropping it abandons the key: complete or release it"]
pub struct AttemptGuard {
    attempt: Attempt,
    hold: Hold,
    /// How the attempt ends if the guard is dropped now; `None` once it is settled.
    unsettled: Option<Closing>,
    _counted: Option<Counted>,
}

/// What the attempt holds its key by.
enum Hold {
    /// A record, whose lease is renewed from this place.
    Lease { slot: usize },
    /// A transaction that is open until the attempt limit; `None` once it is closed.
    Transaction {
        open: Option<Box<dyn OpenTransaction>>,
        until: Instant,
    },
}

impl AttemptGuard {
    /// In one-commit mode.
    pub(crate) fn in_transaction(
        engine: &Arc<Engine>,
        request: ClaimRequest,
        open: Box<dyn OpenTransaction>,
    ) -> Self {
        let inner = Arc::new(Inner {
            engine: Arc::clone(engine),
            claim: Claim::new(request.key, request.owner, open.attempt()),
            fingerprint: request.fingerprint,
            claim_was_repeated: false,
            notes: Mutex::default(),
            slot: Some(open.slot()),
            lost: AtomicBool::new(false),
            lost_signal: Notify::new(),
            runtime: Handle::try_current().ok(),
        });
        Self {
            attempt: Attempt { inner },
            hold: Hold::Transaction {
                open: Some(open),
                until: Instant::now() + engine.settings.attempt_limit,
            },
            unsettled: Some(Closing::Abandon),
            _counted: None,
        }
    }

    /// How long the handler may go on: without limit while it holds a lease, which ends by itself.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        match &self.hold {
            Hold::Lease { .. } => None,
            Hold::Transaction { until, .. } => {
                Some(until.saturating_duration_since(Instant::now()))
            }
        }
    }

    /// The attempt came to its limit: its transaction is rolled back, whatever it is doing.
    pub(crate) fn give_up(self) {
        let claim = self.attempt.inner.claim();
        telemetry::fault(Fault::AttemptLimit, claim.key(), claim.attempt());
    }

    pub(crate) fn new(
        engine: &Arc<Engine>,
        claim: Claim,
        fingerprint: Fingerprint,
        notes: Notes,
        asked: Asked,
    ) -> Self {
        let inner = Arc::new(Inner {
            engine: Arc::clone(engine),
            claim,
            fingerprint,
            claim_was_repeated: asked.repeated,
            notes: Mutex::new(notes),
            slot: None,
            lost: AtomicBool::new(false),
            lost_signal: Notify::new(),
            runtime: Handle::try_current().ok(),
        });
        let slot = engine.heartbeat.register(engine, &inner, asked.at);
        Self {
            attempt: Attempt { inner },
            hold: Hold::Lease { slot },
            unsettled: Some(Closing::Abandon),
            _counted: None,
        }
    }

    /// Lets the attempt count as running until the guard is gone.
    pub(crate) fn count(&mut self, counted: Counted) {
        self._counted = Some(counted);
    }

    /// What the handler is given.
    pub fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    /// The attempt ended with this outcome: record it. It is kept as long as the engine's retention
    /// says.
    ///
    /// Dropping the future does not take the word back: recording goes on in the background.
    pub async fn complete(self, outcome: Outcome) -> Settled {
        self.close(Closing::Complete {
            outcome,
            retention: None,
        })
        .await
    }

    /// The attempt did nothing that lasts: free the key. Dropping the future does not take the word
    /// back.
    pub async fn release(self) -> Settled {
        self.close(Closing::Release).await
    }

    /// Nobody knows how the attempt ended: end its lease now.
    pub async fn abandon(self) -> Settled {
        self.close(Closing::Abandon).await
    }

    // No async function: that holds its arguments twice, and every attempt holds this future.
    pub(crate) fn close(mut self, closing: Closing) -> impl Future<Output = Settled> + Send {
        // At once, so that a future which is dropped unpolled does not take the word back.
        self.unsettled = Some(closing);
        async move {
            let inner = &self.attempt.inner;
            let settled = match (&self.unsettled, &mut self.hold) {
                (Some(closing), Hold::Lease { slot }) => {
                    inner.engine.close(inner, closing, *slot).await
                }
                (Some(closing), Hold::Transaction { open, .. }) => match open.take() {
                    Some(open) => inner.engine.close_transaction(inner, open, closing).await,
                    None => Settled::Undone,
                },
                (None, _) => Settled::Recorded,
            };
            drop(self.unsettled.take());
            settled
        }
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        // Settled: the engine has ended the renewals.
        let Some(closing) = self.unsettled.take() else {
            return;
        };
        // A transaction that is dropped is rolled back.
        let Hold::Lease { slot } = self.hold else {
            return;
        };
        let inner = &self.attempt.inner;
        let held_until = inner.engine.heartbeat.deregister(slot, inner);
        inner.engine.close_dropped(inner, closing, held_until);
    }
}

impl fmt::Debug for AttemptGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AttemptGuard").field(&self.attempt).finish()
    }
}
