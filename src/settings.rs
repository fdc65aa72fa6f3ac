//! The settings of the engine, their defaults, and what is refused.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::claim::OnAbandoned;
use crate::error::ConfigError;
use crate::idempotency::Idempotency;
use crate::one_commit::Begin;
use crate::reconciler::{Reconciler, Verdict};
use crate::record::Record;
use crate::store::{OneCommit, Store};

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
    pub(crate) fn start(store: S) -> Self {
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

    pub(crate) fn finish(self) -> Idempotency<S> {
        Idempotency::start(self.store, self.one_commit, self.settings, self.reconciler)
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
