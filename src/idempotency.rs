//! The engine: claims keys, judges what it finds, and sees to it that every attempt is settled.
//!
//! It knows no HTTP server and no database.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::admission::{Admission, AdmitError, Holder, Replay, Settled};
use crate::attempt::{AttemptGuard, Inner};
use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
use crate::detach::Tracker;
use crate::error::{StoreError, StoreErrorKind};
use crate::fingerprint::{Fingerprint, FingerprintMatch};
use crate::heartbeat::Heartbeat;
use crate::one_commit::Begin;
use crate::outcome::Outcome;
use crate::reconciler::Reconciler;
use crate::record::{Record, State};
use crate::scope::ScopedKey;
use crate::settings::{IdempotencyBuilder, Settings};
use crate::store::{Completion, Fenced, Purged, Store};
use crate::store_call::StoreCall;
use crate::telemetry::{self, Fault};
use crate::time_limit::within;

/// The engine behind every front door, and the whole of it for jobs: see [`run`](Self::run).
///
/// Cheap to clone; clones share one heartbeat, one count of running attempts and one store.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{Idempotency, MemoryStore};
///
/// # fn main() -> Result<(), tower_idempotency::ConfigError> {
/// let idempotency = Idempotency::builder(MemoryStore::new())
///     .lease(Duration::from_secs(10))
///     .retention(Duration::from_secs(7 * 24 * 60 * 60))
///     .build()?;
/// # Ok(()) }
/// ```
pub struct Idempotency<S> {
    pub(crate) engine: Arc<Engine>,
    store: Arc<S>,
}

impl<S: Store> Idempotency<S> {
    /// An engine with the defaults that [`IdempotencyBuilder`] lists.
    pub fn new(store: S) -> Self {
        IdempotencyBuilder::start(store).finish()
    }

    /// An engine with settings of your own.
    pub fn builder(store: S) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::start(store)
    }

    pub(crate) fn start(
        store: Arc<S>,
        one_commit: Option<Arc<dyn Begin>>,
        settings: Settings,
        reconciler: Option<Reconciler>,
    ) -> Self {
        let engine = Engine {
            store_name: store.properties().name,
            store: Arc::clone(&store) as Arc<dyn Store>,
            one_commit,
            settings,
            reconciler,
            heartbeat: Heartbeat::default(),
            tracker: Arc::default(),
        };
        Self {
            engine: Arc::new(engine),
            store,
        }
    }

    /// The store, for an operator's calls: [`lookup`](Store::lookup), [`remove`](Store::remove),
    /// [`abandoned`](Store::abandoned), [`resolve`](Store::resolve).
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Claims `key` for a request with this fingerprint, or says what stands in the way.
    ///
    /// The attempt of [`Admission::First`] is renewed, and counts as [`running`](Self::running),
    /// until it is settled.
    ///
    /// # Errors
    ///
    /// [`AdmitError`] if the engine could not judge. The work must not be done then.
    pub async fn admit(
        &self,
        key: &ScopedKey,
        fingerprint: Fingerprint,
    ) -> Result<Admission, AdmitError> {
        // No response future stands for this attempt, so it is counted by itself.
        let counted = self.engine.tracker.count();
        let mut admission = self.engine.admit(key, fingerprint).await?;
        if let Admission::First(attempt) = &mut admission {
            attempt.count(counted);
        }
        Ok(admission)
    }

    /// Waits until the attempt that holds `key` has changed, or for `max`; then
    /// [`admit`](Self::admit) again. It may return too early.
    ///
    /// # Errors
    ///
    /// [`AdmitError::Store`] if the store did not answer.
    pub async fn wait(
        &self,
        key: &ScopedKey,
        holder: &Holder,
        max: Duration,
    ) -> Result<(), AdmitError> {
        self.engine.wait(key, holder, max).await
    }

    /// Removes at most `limit` expired records, and reports at error level how many of them were
    /// never resolved.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store did not answer.
    pub async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        let purged = self.store.purge(limit).await?;
        telemetry::purged(&purged);
        Ok(purged)
    }

    /// How many attempts, attached or not, and how much background work has not ended.
    pub fn running(&self) -> usize {
        self.engine.tracker.running()
    }

    /// How many attempts go on without their client.
    pub fn detached(&self) -> usize {
        self.engine.tracker.detached()
    }

    /// Waits until every attempt has ended and every outcome is recorded, at most as long as the
    /// drain limit says (30 s by default). Call it after the server stopped to accept requests;
    /// `false` if something still runs.
    pub async fn drain(&self) -> bool {
        let limit = self.engine.settings.drain;
        within(limit, self.engine.tracker.idle()).await.is_ok()
    }
}

impl<S> Clone for Idempotency<S> {
    fn clone(&self) -> Self {
        Self {
            engine: Arc::clone(&self.engine),
            store: Arc::clone(&self.store),
        }
    }
}

impl<S> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("store", &self.engine.store)
            .field("settings", &self.engine.settings)
            .finish_non_exhaustive()
    }
}

impl<S: Store> From<S> for Idempotency<S> {
    fn from(store: S) -> Self {
        Self::new(store)
    }
}

/// What all clones of an [`Idempotency`] share, without its type parameter.
pub(crate) struct Engine {
    store: Arc<dyn Store>,
    one_commit: Option<Arc<dyn Begin>>,
    pub(crate) store_name: &'static str,
    pub(crate) settings: Settings,
    pub(crate) reconciler: Option<Reconciler>,
    pub(crate) heartbeat: Heartbeat,
    pub(crate) tracker: Arc<Tracker>,
}

/// How a claim that was granted had been asked for.
pub(crate) struct Asked {
    /// When the try that was answered began: the lease is not older than that.
    pub(crate) at: Instant,
    /// Whether there were tries before it, which may still be on their way to the store.
    pub(crate) repeated: bool,
}

/// How an attempt ends.
#[derive(Clone, Debug)]
pub(crate) enum Closing {
    Complete {
        outcome: Outcome,
        retention: Option<Duration>,
    },
    Release,
    Abandon,
}

impl Closing {
    const fn op(&self) -> &'static str {
        match self {
            Self::Complete { .. } => "complete",
            Self::Release => "release",
            Self::Abandon => "abandon",
        }
    }

    /// Whether `standing` is what this closing records, by a call whose reply was lost.
    fn is_recorded_by(&self, standing: &Outcome) -> bool {
        matches!(self, Self::Complete { outcome, .. } if outcome == standing)
    }

    async fn apply(&self, store: &dyn Store, claim: &Claim) -> Result<Completion, StoreError> {
        let fenced = match self {
            Self::Complete { outcome, retention } => {
                return store.complete(claim, outcome, *retention).await;
            }
            Self::Release => store.release(claim).await?,
            Self::Abandon => store.abandon(claim).await?,
        };
        Ok(match fenced {
            Fenced::Applied => Completion::Recorded,
            Fenced::ClaimLost => Completion::ClaimLost,
        })
    }
}

/// The pause before the n-th repetition of a store call.
pub(crate) fn backoff(tries: u32) -> Duration {
    Duration::from_millis(10 << tries.min(7))
}

impl Engine {
    /// The store itself. A method called on the `Arc` would be that of the `Arc`, which is a store
    /// too and boxes one more future.
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Makes one store call within the store's time limit.
    pub(crate) fn call<F: Future>(&self, op: &'static str, call: F) -> StoreCall<F> {
        self.call_within(self.settings.store_timeout, op, call)
    }

    pub(crate) fn call_within<F: Future>(
        &self,
        limit: Duration,
        op: &'static str,
        call: F,
    ) -> StoreCall<F> {
        StoreCall::new(limit, op, self.store_name, call)
    }

    pub(crate) fn admit<'a>(
        self: &'a Arc<Self>,
        key: &'a ScopedKey,
        fingerprint: Fingerprint,
    ) -> impl Future<Output = Result<Admission, AdmitError>> + Send + 'a {
        self.admit_for(self.settings.retention, key, fingerprint)
    }

    /// [`admit`](Self::admit), for a record that is kept for so long, however its attempt ends.
    pub(crate) fn admit_for<'a>(
        self: &'a Arc<Self>,
        retention: Duration,
        key: &'a ScopedKey,
        fingerprint: Fingerprint,
    ) -> impl Future<Output = Result<Admission, AdmitError>> + Send + 'a {
        self.admit_once(retention, key, fingerprint, self.reconciler.is_some())
    }

    async fn admit_once(
        self: &Arc<Self>,
        retention: Duration,
        key: &ScopedKey,
        fingerprint: Fingerprint,
        may_reconcile: bool,
    ) -> Result<Admission, AdmitError> {
        if self.tracker.detached() >= self.settings.detached_limit {
            return Err(AdmitError::Overloaded);
        }
        let request = ClaimRequest {
            key: key.clone(),
            fingerprint,
            owner: Owner::random(),
            lease: self.settings.lease,
            retention,
            on_abandoned: self.settings.on_abandoned,
        };
        if let Some(transactions) = &self.one_commit {
            // Boxed, because it would make the future of every attempt larger.
            return Box::pin(self.begin(&**transactions, request)).await;
        }
        let mut unanswered = Unanswered {
            engine: self,
            request: &request,
            acknowledged: false,
            runtime: Handle::try_current().ok(),
        };
        let answered = self.claim(&request).await;
        unanswered.acknowledged = match &answered {
            Ok(_) => true,
            // A record that cannot be read is left as it is: nothing was granted.
            Err(error) => error.kind() == StoreErrorKind::Corrupt,
        };
        let (asking, claimed) = answered.map_err(AdmitError::Store)?;
        match claimed {
            Claimed::Acquired { claim, notes } => {
                let attempt = AttemptGuard::new(self, claim, fingerprint, notes, asking);
                Ok(Admission::First(attempt))
            }
            Claimed::Existing(record)
                if may_reconcile && record.is_abandoned() && is_for(&record, &fingerprint) =>
            {
                self.admit_reconciled(retention, record, fingerprint).await
            }
            Claimed::Existing(record) => judge(record, &fingerprint).map_err(AdmitError::Store),
        }
    }

    /// Asks how the attempt of this abandoned record ended; if that can be told, whoever comes now
    /// finds the key completed or free. Boxed, because it is rare, and would make the future of every
    /// attempt larger.
    fn admit_reconciled(
        self: &Arc<Self>,
        retention: Duration,
        record: Record,
        fingerprint: Fingerprint,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, AdmitError>> + Send + '_>> {
        Box::pin(async move {
            if self.reconcile_at_once(&record).await {
                let again = self.admit_once(retention, &record.key, fingerprint, false);
                return again.await;
            }
            judge(record, &fingerprint).map_err(AdmitError::Store)
        })
    }

    /// Claims, asking again with the same owner while that may help.
    async fn claim(&self, request: &ClaimRequest) -> Result<(Asked, Claimed), StoreError> {
        let started = Instant::now();
        let deadline = started + self.settings.store_timeout;
        let mut asked = started;
        let mut tries = 0;
        loop {
            let claimed = self
                .call_within(deadline - asked, "claim", self.store().claim(request))
                .await;
            match claimed {
                Ok(claimed) => {
                    let repeated = tries > 0;
                    return Ok((
                        Asked {
                            at: asked,
                            repeated,
                        },
                        claimed,
                    ));
                }
                Err(error) => {
                    let next = Instant::now() + backoff(tries);
                    let give_up = !error.is_transient()
                        || tries >= self.settings.claim_retries
                        || next >= deadline;
                    if give_up {
                        return Err(error);
                    }
                    tries += 1;
                    tokio::time::sleep_until(next).await;
                    asked = Instant::now();
                }
            }
        }
    }

    pub(crate) async fn wait(
        &self,
        key: &ScopedKey,
        holder: &Holder,
        max: Duration,
    ) -> Result<(), AdmitError> {
        // The store's own time limit is for calls that work; this one waits.
        let limit = max.saturating_add(self.settings.store_timeout);
        let changed = self.store().changed(key, &holder.owner, max);
        self.call_within(limit, "changed", changed)
            .await
            .map_err(AdmitError::Store)
    }

    /// Records how an attempt ended, asking again until the store acknowledges or the time for it is
    /// over; then goes on in the background until the lease ends.
    pub(crate) async fn close(
        self: &Arc<Self>,
        attempt: &Arc<Inner>,
        closing: &Closing,
        slot: usize,
    ) -> Settled {
        let claim = attempt.claim();
        let deadline = Instant::now() + self.settings.complete_wait;
        let mut held_until = None;
        if matches!(closing, Closing::Abandon) {
            // A renewal would let the lease start anew.
            held_until = self.heartbeat.deregister(slot, attempt);
        } else {
            self.heartbeat.closing(slot, attempt);
        }
        let result = self.insist(claim, closing, deadline).await;
        let held_until = self.heartbeat.deregister(slot, attempt).or(held_until);
        let settled = match result {
            Ok(Completion::Recorded) => Settled::Recorded,
            Ok(Completion::Standing(outcome)) if closing.is_recorded_by(&outcome) => {
                Settled::Recorded
            }
            Ok(Completion::Standing(_) | Completion::ClaimLost) => {
                let standing = self.standing(attempt).await;
                if standing.is_none() {
                    attempt.mark_lost();
                }
                standing.map_or(Settled::ClaimLost, Settled::Standing)
            }
            Err(error) => {
                telemetry::fault(Fault::NotSaved, claim.key(), claim.attempt());
                if error.is_transient() {
                    self.keep_closing(attempt, closing.clone(), held_until);
                }
                Settled::NotSaved
            }
        };
        match closing {
            Closing::Abandon => telemetry::fault(Fault::Unknown, claim.key(), claim.attempt()),
            Closing::Release if attempt.claim_was_repeated() => self.free_late_claim(claim.clone()),
            _ => {}
        }
        settled
    }

    /// Repeats a closing move until it is answered, cannot succeed, or `deadline` has passed.
    async fn insist(
        &self,
        claim: &Claim,
        closing: &Closing,
        deadline: Instant,
    ) -> Result<Completion, StoreError> {
        let mut tries = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = left.min(self.settings.store_timeout);
            let applied = closing.apply(self.store(), claim);
            match self.call_within(limit, closing.op(), applied).await {
                Err(error) if error.is_transient() => {
                    let next = Instant::now() + backoff(tries);
                    if next >= deadline {
                        return Err(error);
                    }
                    tries += 1;
                    tokio::time::sleep_until(next).await;
                }
                answered => return answered,
            }
        }
    }

    /// An attempt was dropped before it was settled.
    pub(crate) fn close_dropped(
        self: &Arc<Self>,
        attempt: &Arc<Inner>,
        closing: Closing,
        held_until: Option<Instant>,
    ) {
        let claim = attempt.claim();
        if matches!(closing, Closing::Abandon) {
            telemetry::fault(Fault::Unknown, claim.key(), claim.attempt());
        }
        self.keep_closing(attempt, closing, held_until);
    }

    /// Goes on with a closing move in the background, until the lease ends.
    fn keep_closing(
        self: &Arc<Self>,
        attempt: &Inner,
        closing: Closing,
        held_until: Option<Instant>,
    ) {
        let engine = Arc::clone(self);
        let claim = attempt.claim().clone();
        let until = held_until.unwrap_or_else(|| Instant::now() + self.settings.lease);
        self.tracker.spawn(attempt.runtime(), async move {
            let closed = engine.insist_once_at_least(&claim, &closing, until).await;
            let fault = match closed {
                Ok(Completion::Recorded) => return,
                Ok(Completion::Standing(outcome)) if closing.is_recorded_by(&outcome) => return,
                Ok(_) if matches!(closing, Closing::Complete { .. }) => Fault::ClaimLost,
                // Somebody else holds the key: there is nothing to free.
                Ok(_) => return,
                Err(_) => Fault::Unreleased,
            };
            telemetry::fault(fault, claim.key(), claim.attempt());
        });
    }

    /// Nobody works under a claim that was not acknowledged: frees it, if it stands.
    fn free_in_background(self: &Arc<Self>, request: &ClaimRequest, home: Option<&Handle>) {
        // Stores compare the owner alone, and the attempt of an unanswered claim is unknown.
        let claim = Claim::new(request.key.clone(), request.owner, 0);
        let closing = match request.on_abandoned {
            OnAbandoned::Hold => Closing::Release,
            // It may be a takeover: a release would forget the checkpoints of the attempt before.
            OnAbandoned::Rerun => Closing::Abandon,
        };
        let until = Instant::now() + request.lease;
        let engine = Arc::clone(self);
        self.tracker.spawn(home, async move {
            let mut freed = engine.insist_once_at_least(&claim, &closing, until).await;
            if freed.is_ok() {
                freed = engine.free_again(&claim, &closing).await;
            }
            if freed.is_err() {
                telemetry::fault(Fault::Unreleased, claim.key(), claim.attempt());
            }
        });
    }

    /// A key was released whose claim had been asked for more than once.
    fn free_late_claim(self: &Arc<Self>, claim: Claim) {
        let engine = Arc::clone(self);
        self.tracker.spawn(None, async move {
            if engine.free_again(&claim, &Closing::Release).await.is_err() {
                telemetry::fault(Fault::Unreleased, claim.key(), claim.attempt());
            }
        });
    }

    /// Frees a key once more after a pause: a try of its claim that was given up may have been behind
    /// the move that freed it, and would hold the key for nobody.
    async fn free_again(&self, claim: &Claim, closing: &Closing) -> Result<Completion, StoreError> {
        sleep(self.settings.store_timeout).await;
        let until = Instant::now() + self.settings.lease;
        self.insist_once_at_least(claim, closing, until).await
    }

    /// [`insist`](Self::insist), also when `until` has passed: as long as nobody took the key over,
    /// the record can still be mended.
    async fn insist_once_at_least(
        &self,
        claim: &Claim,
        closing: &Closing,
        until: Instant,
    ) -> Result<Completion, StoreError> {
        let until = until.max(Instant::now() + self.settings.store_timeout);
        self.insist(claim, closing, until).await
    }

    /// The outcome that stands for a request whose claim was lost, if there is one.
    async fn standing(&self, attempt: &Inner) -> Option<Outcome> {
        let key = attempt.claim().key();
        let record = self.call("lookup", self.store().lookup(key)).await;
        let record = record.ok().flatten()?;
        // Where the record was erased meanwhile, the key may be another request's, or another
        // caller's, by now.
        if record.fingerprint.compare(attempt.fingerprint()) != FingerprintMatch::Same {
            return None;
        }
        match record.state {
            State::Completed { outcome, .. } => Some(outcome),
            _ => None,
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// A claim that was asked for and not yet answered. If it goes unanswered (the store failed, or the
/// caller was dropped), the claim may stand although nobody works under it: free it.
struct Unanswered<'a> {
    engine: &'a Arc<Engine>,
    request: &'a ClaimRequest,
    acknowledged: bool,
    runtime: Option<Handle>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.acknowledged {
            let home = self.runtime.as_ref();
            self.engine.free_in_background(self.request, home);
        }
    }
}

/// Whether the record is that of this request, as far as can be told.
fn is_for(record: &Record, fingerprint: &Fingerprint) -> bool {
    let compared = record.fingerprint.compare(fingerprint);
    matches!(
        compared,
        FingerprintMatch::Same | FingerprintMatch::OtherRecipe
    )
}

pub(crate) fn judge(record: Record, fingerprint: &Fingerprint) -> Result<Admission, StoreError> {
    match record.fingerprint.compare(fingerprint) {
        FingerprintMatch::Same => {}
        FingerprintMatch::OtherRecipe => telemetry::other_recipe(&record.key),
        FingerprintMatch::OtherCaller => {
            return Ok(Admission::Mismatch {
                caller_changed: true,
            });
        }
        FingerprintMatch::Different => {
            return Ok(Admission::Mismatch {
                caller_changed: false,
            });
        }
    }
    Ok(match record.state {
        State::Completed {
            outcome,
            completed_at,
        } => Admission::Replay(Replay::new(outcome, completed_at.to_system_time())),
        State::Started { lease_left, .. } if lease_left.is_zero() => Admission::OutcomeUnknown,
        State::Started { lease_left, .. } => Admission::InFlight(Holder {
            owner: record.owner,
            lease_left,
        }),
        State::Released => {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "the store showed a released record instead of granting the claim",
            ));
        }
    })
}

/// Waits out the time between two looks at a key that is in flight, so that a store which reports
/// changes too early is not asked in a busy loop.
pub(crate) async fn pause_between_looks(look: u32) {
    sleep(backoff(look.min(4))).await;
}
