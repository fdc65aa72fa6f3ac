//! The engine: claims keys, judges what it finds, and sees to it that every attempt is settled.
//!
//! It knows no HTTP server and no database.

use std::error::Error;
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
use crate::error::{ConfigError, StoreError, StoreErrorKind};
use crate::fingerprint::{Fingerprint, FingerprintMatch};
use crate::heartbeat::Heartbeat;
use crate::one_commit::Begin;
use crate::outcome::Outcome;
use crate::reconciler::{Reconciler, Verdict};
use crate::record::{Record, State};
use crate::scope::ScopedKey;
use crate::store::{Completion, Fenced, OneCommit, Purged, Store};
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

/// Settings of [`Idempotency`]. Every one has a default that can stay.
#[derive(Debug)]
#[must_use = "nothing is built until `build` is called"]
pub struct IdempotencyBuilder<S> {
    store: Arc<S>,
    one_commit: Option<Arc<dyn Begin>>,
    settings: Settings,
    reconciler: Option<Reconciler>,
}

impl<S: Store> IdempotencyBuilder<S> {
    fn start(store: S) -> Self {
        Self {
            store: Arc::new(store),
            one_commit: None,
            settings: Settings::default(),
            reconciler: None,
        }
    }

    /// How long a claim lives without a renewal: the time for which a dead process blocks a key.
    /// Live attempts renew at a third of it. Default 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// How long a record is kept, counted from its claim. Longer than the lease. Default 24 h, the
    /// window that clients of payment APIs expect.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }

    /// What a retry may do with an attempt that ended without a known outcome. Default
    /// [`OnAbandoned::Hold`].
    pub fn on_abandoned(mut self, on_abandoned: OnAbandoned) -> Self {
        self.settings.on_abandoned = on_abandoned;
        self
    }

    /// One-commit mode, for handlers whose effects *all* lie in the database of the store: the handler
    /// works in a transaction that holds the key, and what it wrote is committed together with the
    /// outcome. See `PostgresStore::one_commit`.
    ///
    /// No record exists while the handler runs, so nothing can be left half done: an attempt that
    /// panics, dies, frees its key or comes to the [attempt limit](Self::attempt_limit) is rolled back,
    /// and its key is free at once. Lease and [`OnAbandoned`] mean nothing here. No success is answered
    /// before the commit is acknowledged: 503 `store_unavailable` where nothing was committed, and 409
    /// `outcome_unknown` where the reply was lost and the database cannot be asked.
    ///
    /// A mail that is sent or a gateway that is called is not rolled back: there this mode is wrong.
    /// Checkpoints and correlation ids are not recorded. Give it a namespace of its own.
    pub fn one_commit(mut self, transactions: impl OneCommit<Store = S>) -> Self {
        self.one_commit = Some(Arc::new(transactions));
        self
    }

    /// Who knows how an attempt ended that nobody heard of again: your function that asks the gateway,
    /// or looks into your own tables. Default: nobody, and such keys stay held until an operator
    /// closes them.
    ///
    /// It is given the [`Record`] with what the handler attached ([correlation id and
    /// checkpoints](crate::Notes)), the number of the attempt and its times, and says a [`Verdict`].
    /// A retry that meets an abandoned key asks it at once, and a [`Sweeper`](crate::Sweeper) asks it
    /// about all of them. Under [`OnAbandoned::Rerun`] a retry takes over and asks nobody.
    ///
    /// *All* means all of the store, those of other engines on it included. Where there are such,
    /// look at the [namespace](crate::ScopedKey::namespace) of `record.key` first, and say
    /// [`Verdict::Unknown`] of what is not yours: "not in my table" would free the key of somebody
    /// else's payment.
    ///
    /// An error, a panic, or no answer within the [time limit](Self::reconcile_timeout) is logged and
    /// means [`Verdict::Unknown`]. It may be asked again about a record that it has answered for (a
    /// reply of the store may be lost), by several processes at once, and its future may be dropped
    /// at any `.await`.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Response;
    /// use tower_idempotency::{Idempotency, MemoryStore, Record, Verdict};
    ///
    /// # struct Charge { id: String, paid: bool }
    /// # struct Gateway;
    /// # static GATEWAY: Gateway = Gateway;
    /// # impl Gateway {
    /// #     async fn cancel_unless_paid(&self, id: &str) -> Result<Charge, std::io::Error> {
    /// #         Ok(Charge { id: id.to_owned(), paid: true })
    /// #     }
    /// # }
    /// type BoxError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// async fn ask_the_gateway(record: Record) -> Result<Verdict, BoxError> {
    ///     // Attached by the handler, before it called the gateway.
    ///     let Some(order) = &record.notes.correlation else {
    ///         return Ok(Verdict::Unknown);
    ///     };
    ///     // Cancelling is what makes "it did not happen" final.
    ///     let charge = GATEWAY.cancel_unless_paid(order).await?;
    ///     if !charge.paid {
    ///         return Ok(Verdict::NotHappened);
    ///     }
    ///     let answer = Response::builder().status(201).body(Bytes::from(charge.id))?;
    ///     Ok(Verdict::Happened(answer.into()))
    /// }
    ///
    /// # fn main() -> Result<(), tower_idempotency::ConfigError> {
    /// let idempotency = Idempotency::builder(MemoryStore::new())
    ///     .reconciler(ask_the_gateway)
    ///     .build()?;
    /// # Ok(()) }
    /// ```
    pub fn reconciler<F, Fut, E>(mut self, reconciler: F) -> Self
    where
        F: Fn(Record) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Verdict, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.reconciler = Some(Reconciler::new(reconciler));
        self
    }

    /// How long one answer of the [reconciler](Self::reconciler) may take, and with it a retry that
    /// asks it. Default 10 s.
    pub fn reconcile_timeout(mut self, timeout: Duration) -> Self {
        self.settings.reconcile_timeout = timeout;
        self
    }

    /// The longest pause between two rounds of a [`Sweeper`](crate::Sweeper), and the `Retry-After`
    /// of a 409 `outcome_unknown`: set it alike in processes that sweep and in those that answer.
    /// Default: as long as the lease.
    pub fn sweep_interval(mut self, interval: Duration) -> Self {
        self.settings.sweep_interval = Some(interval);
        self
    }

    /// After this an attempt is renewed no more, so that a hung handler cannot block a key for
    /// ever. Not shorter than the lease. Default 15 min.
    pub fn attempt_limit(mut self, limit: Duration) -> Self {
        self.settings.attempt_limit = limit;
        self
    }

    /// The time limit of a store call, a claim's repetitions included. Default 5 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.settings.store_timeout = timeout;
        self
    }

    /// How often a claim that failed is asked for again within the store's time limit, with the same
    /// owner. Default 3.
    pub fn claim_retries(mut self, retries: u32) -> Self {
        self.settings.claim_retries = retries;
        self
    }

    /// How long an answer waits for its outcome to be recorded. After that it leaves, marked
    /// `Idempotency-Result: not-saved`, and recording goes on in the background. Default 5 s.
    pub fn complete_wait(mut self, wait: Duration) -> Self {
        self.settings.complete_wait = wait;
        self
    }

    /// How many attempts may go on without their clients before new claims are refused with a 503.
    /// Default 1,024.
    pub fn detached_limit(mut self, limit: usize) -> Self {
        self.settings.detached_limit = limit;
        self
    }

    /// How long [`drain`](Idempotency::drain) waits at the most. Default 30 s.
    pub fn drain_limit(mut self, limit: Duration) -> Self {
        self.settings.drain = limit;
        self
    }

    /// The secret from which [`Attempt::derive`](crate::Attempt::derive) makes downstream keys; the
    /// same on all instances and for as long as records live. At least 16 bytes. Default: none, and
    /// `derive` is an error.
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.settings.secret = Some(secret.into().into_boxed_slice());
        self
    }

    /// Checks the settings and builds the engine.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with the name of the setting: a duration that is zero or longer than a
    /// hundred years, a lease that is not shorter than the retention, an attempt limit below the
    /// lease, a short secret, no detached attempt at all.
    pub fn build(self) -> Result<Idempotency<S>, ConfigError> {
        self.settings.check()?;
        Ok(self.finish())
    }

    fn finish(self) -> Idempotency<S> {
        let engine = Engine {
            store_name: self.store.properties().name,
            store: Arc::clone(&self.store) as Arc<dyn Store>,
            one_commit: self.one_commit,
            settings: self.settings,
            reconciler: self.reconciler,
            heartbeat: Heartbeat::default(),
            tracker: Arc::default(),
        };
        Idempotency {
            engine: Arc::new(engine),
            store: self.store,
        }
    }
}

#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
    pub(crate) on_abandoned: OnAbandoned,
    pub(crate) attempt_limit: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) claim_retries: u32,
    pub(crate) complete_wait: Duration,
    pub(crate) detached_limit: usize,
    pub(crate) drain: Duration,
    pub(crate) reconcile_timeout: Duration,
    sweep_interval: Option<Duration>,
    pub(crate) secret: Option<Box<[u8]>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(24 * 60 * 60),
            on_abandoned: OnAbandoned::Hold,
            attempt_limit: Duration::from_secs(15 * 60),
            store_timeout: Duration::from_secs(5),
            claim_retries: 3,
            complete_wait: Duration::from_secs(5),
            detached_limit: 1024,
            drain: Duration::from_secs(30),
            reconcile_timeout: Duration::from_secs(10),
            sweep_interval: None,
            secret: None,
        }
    }
}

/// The longest duration that is taken: no clock overflows with it.
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Refuses durations that are zero or overflow a clock.
pub(crate) fn check_duration(setting: &'static str, value: Duration) -> Result<(), ConfigError> {
    if value.is_zero() {
        return Err(ConfigError::new(setting, "must be longer than zero"));
    }
    if value > LONGEST {
        return Err(ConfigError::new(setting, "must not exceed a hundred years"));
    }
    Ok(())
}

impl Settings {
    /// When somebody looks after abandoned records again.
    pub(crate) fn sweep_interval(&self) -> Duration {
        self.sweep_interval.unwrap_or(self.lease)
    }

    fn check(&self) -> Result<(), ConfigError> {
        check_duration("lease", self.lease)?;
        check_duration("retention", self.retention)?;
        check_duration("attempt_limit", self.attempt_limit)?;
        check_duration("store_timeout", self.store_timeout)?;
        check_duration("complete_wait", self.complete_wait)?;
        check_duration("drain_limit", self.drain)?;
        check_duration("reconcile_timeout", self.reconcile_timeout)?;
        check_duration("sweep_interval", self.sweep_interval())?;
        if self.lease < Duration::from_millis(1) {
            return Err(ConfigError::new("lease", "must be a millisecond at least"));
        }
        if self.lease >= self.retention {
            let problem = format!(
                "({:?}) must be shorter than `retention` ({:?}): a record must outlive its claim",
                self.lease, self.retention
            );
            return Err(ConfigError::new("lease", problem));
        }
        if self.attempt_limit < self.lease {
            let problem = format!("must not be shorter than `lease` ({:?})", self.lease);
            return Err(ConfigError::new("attempt_limit", problem));
        }
        if self.detached_limit == 0 {
            let problem = "must be 1 at least: an attempt goes on when its client leaves";
            return Err(ConfigError::new("detached_limit", problem));
        }
        if self.secret.as_ref().is_some_and(|secret| secret.len() < 16) {
            return Err(ConfigError::new("secret", "must have 16 bytes at least"));
        }
        Ok(())
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .field("on_abandoned", &self.on_abandoned)
            .field("attempt_limit", &self.attempt_limit)
            .finish_non_exhaustive()
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
