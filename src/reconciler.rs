//! Asks the user's function how an abandoned attempt ended, and closes the record as it says.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::claim::Owner;
use crate::detach::{catch_panic, catch_panic_now};
use crate::error::StoreError;
use crate::idempotency::Engine;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::{Fenced, Resolution};
use crate::telemetry;
use crate::time_limit::within;

/// What a reconciler knows of the work of an abandoned attempt. See
/// [`IdempotencyBuilder::reconciler`](crate::IdempotencyBuilder::reconciler).
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It was done, and every retry gets this outcome. [`Outcome`] can be made from an HTTP response
    /// and, for [`Idempotency::run`](crate::Idempotency::run), from a value or an error.
    Happened(Outcome),
    /// It was not done **and can no longer be done**: the key is free, and a retry does the work.
    ///
    /// The attempt may only be slow, or its request may still be on the way to the gateway. Fence the
    /// effect before you say this: cancel it by its id, or let the other system refuse an attempt
    /// with a lower [number](crate::Attempt::number).
    NotHappened,
    /// Nobody knows yet. The key stays held, and the question is asked again later.
    Unknown,
}

type BoxError = Box<dyn Error + Send + Sync>;
type Asked = Pin<Box<dyn Future<Output = Result<Verdict, BoxError>> + Send>>;

/// The user's function, and whom it is being asked about.
pub(crate) struct Reconciler {
    ask: Box<dyn Fn(Record) -> Asked + Send + Sync>,
    turns: Arc<Turns>,
}

impl Reconciler {
    pub(crate) fn new<F, Fut, E>(ask: F) -> Self
    where
        F: Fn(Record) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Verdict, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        Self {
            ask: Box::new(move |record| {
                let asked = ask(record);
                Box::pin(async move { asked.await.map_err(Into::into) })
            }),
            turns: Arc::default(),
        }
    }

    /// Asks within a time limit. A panic and a late answer are errors.
    async fn ask(&self, record: &Record, limit: Duration) -> Result<Verdict, BoxError> {
        let panicked = "it panicked";
        let asked = catch_panic_now(|| (self.ask)(record.clone())).map_err(|_| panicked)?;
        match within(limit, catch_panic(asked)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(panicked.into()),
            Err(_) => Err(format!("it did not answer within {limit:?}").into()),
        }
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconciler").finish_non_exhaustive()
    }
}

/// What became of one abandoned record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reconciled {
    /// Closed with an outcome.
    Happened,
    /// Freed.
    NotHappened,
    /// Left as it is.
    Unknown,
    /// The reconciler failed, or the store did not take the answer.
    Failed,
    /// It was no longer the record that was seen.
    Overtaken,
    /// Not asked about: somebody is asking, or it failed a moment ago.
    Deferred,
}

impl Reconciled {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Happened => "happened",
            Self::NotHappened => "not_happened",
            Self::Unknown => "unknown",
            Self::Failed => "failed",
            Self::Overtaken => "overtaken",
            Self::Deferred => "deferred",
        }
    }

    /// Whether the record is known to be abandoned no more.
    pub(crate) const fn is_closed(self) -> bool {
        matches!(self, Self::Happened | Self::NotHappened | Self::Overtaken)
    }
}

impl Engine {
    /// A sweeper met this record.
    pub(crate) async fn reconcile_in_turn(&self, record: &Record) -> Reconciled {
        let Some(reconciler) = &self.reconciler else {
            return Reconciled::Unknown;
        };
        match reconciler.turns.take(record, Asker::Sweeper) {
            Taken::Mine(turn) => self.reconcile(reconciler, record, turn).await,
            Taken::Theirs(_) | Taken::NotYet => Reconciled::Deferred,
        }
    }

    /// A retry met this record: asks, or waits for the answer to somebody else's question. Whether it
    /// is worth while to claim the key again.
    pub(crate) async fn reconcile_at_once(&self, record: &Record) -> bool {
        let Some(reconciler) = &self.reconciler else {
            return false;
        };
        match reconciler.turns.take(record, Asker::Retry) {
            Taken::Mine(turn) => self.reconcile(reconciler, record, turn).await.is_closed(),
            Taken::Theirs(mut answered) => {
                // Ends with an error, when the one who asked is gone.
                let _ = within(self.settings.reconcile_timeout, answered.changed()).await;
                true
            }
            Taken::NotYet => false,
        }
    }

    async fn reconcile(
        &self,
        reconciler: &Reconciler,
        record: &Record,
        mut turn: Turn,
    ) -> Reconciled {
        let answer = reconciler.ask(record, self.settings.reconcile_timeout);
        let (resolution, meant) = match answer.await {
            Ok(Verdict::Happened(outcome)) => {
                (Some(Resolution::Completed(outcome)), Reconciled::Happened)
            }
            Ok(Verdict::NotHappened) => (Some(Resolution::Released), Reconciled::NotHappened),
            Ok(Verdict::Unknown) => (None, Reconciled::Unknown),
            Err(error) => {
                telemetry::reconciler_failed(&record.key, record.attempt, &*error);
                (None, Reconciled::Failed)
            }
        };
        let reconciled = match resolution {
            None => meant,
            Some(resolution) => match self.resolve(record, &resolution).await {
                Ok(Fenced::Applied) => meant,
                Ok(Fenced::ClaimLost) => Reconciled::Overtaken,
                Err(_) => Reconciled::Failed,
            },
        };
        turn.ended(reconciled, self.settings.sweep_interval());
        telemetry::reconciled(reconciled, &record.key, record.attempt, self.store_name);
        reconciled
    }

    /// Closes the record. Asked again after a lost reply, the store may say that it is closed, which
    /// is all that matters.
    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let mut tries = 0;
        loop {
            let resolved = self.store().resolve(record, resolution);
            match self.call("resolve", resolved).await {
                Err(error) if error.is_transient() && tries < RESOLVE_RETRIES => {
                    tokio::time::sleep(crate::idempotency::backoff(tries)).await;
                    tries += 1;
                }
                answered => return answered,
            }
        }
    }
}

/// How often a resolution is repeated that the store did not answer.
const RESOLVE_RETRIES: u32 = 2;

/// Whom the reconciler is being asked about in this process, and about whom it had no answer a moment
/// ago: so that many retries of one key do not become as many questions to a gateway.
#[derive(Debug, Default)]
struct Turns {
    known: Mutex<HashMap<ScopedKey, Known>>,
}

#[derive(Debug)]
struct Known {
    /// Whose attempt it is about: another one begins with a clean sheet.
    owner: Owner,
    /// Closed when the question is answered.
    asking: Option<watch::Receiver<()>>,
    /// How often there was no answer that closed the record.
    tries: u32,
    /// Whether the last one was a failure.
    failed: bool,
    not_before: Instant,
}

#[derive(Clone, Copy, PartialEq)]
enum Asker {
    /// Comes at its own pace, and waits after failures only.
    Sweeper,
    /// Comes as often as it likes.
    Retry,
}

enum Taken {
    Mine(Turn),
    Theirs(watch::Receiver<()>),
    NotYet,
}

/// How many keys are remembered. Beyond it a key is asked about whenever it is met.
const REMEMBERED: usize = 4096;

/// After the first answer that closes nothing; twice as long after each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, HashMap<ScopedKey, Known>> {
        // Plain data: a panic elsewhere leaves it whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, record: &Record, asker: Asker) -> Taken {
        let now = Instant::now();
        let (done, asking) = watch::channel(());
        let mut known = self.lock();
        if let Some(entry) = known.get_mut(&record.key) {
            if entry.owner == record.owner {
                if let Some(asking) = &entry.asking {
                    return Taken::Theirs(asking.clone());
                }
                if now < entry.not_before && (entry.failed || asker == Asker::Retry) {
                    return Taken::NotYet;
                }
            } else {
                entry.owner = record.owner;
                entry.tries = 0;
            }
            entry.asking = Some(asking);
        } else {
            if known.len() >= REMEMBERED {
                known.retain(|_, entry| entry.asking.is_some() || now < entry.not_before);
            }
            if known.len() < REMEMBERED {
                let entry = Known {
                    owner: record.owner,
                    asking: Some(asking),
                    tries: 0,
                    failed: false,
                    not_before: now,
                };
                known.insert(record.key.clone(), entry);
            }
        }
        Taken::Mine(Turn {
            turns: Arc::clone(self),
            key: record.key.clone(),
            owner: record.owner,
            _done: done,
        })
    }
}

/// The right to ask. Ends when it is dropped, with or without an answer.
struct Turn {
    turns: Arc<Turns>,
    key: ScopedKey,
    owner: Owner,
    _done: watch::Sender<()>,
}

impl Turn {
    fn ended(&mut self, reconciled: Reconciled, interval: Duration) {
        let mut known = self.turns.lock();
        if reconciled.is_closed() {
            if known
                .get(&self.key)
                .is_some_and(|entry| entry.owner == self.owner)
            {
                known.remove(&self.key);
            }
            return;
        }
        let Some(entry) = known.get_mut(&self.key) else {
            return;
        };
        if entry.owner == self.owner {
            entry.failed = reconciled == Reconciled::Failed;
            let longest = match entry.failed {
                true => interval.saturating_mul(10),
                // So that a retry which comes when it was told to finds the next answer.
                false => interval / 2,
            };
            let pause = FIRST_PAUSE
                .saturating_mul(1 << entry.tries.min(16))
                .min(longest);
            entry.tries = entry.tries.saturating_add(1);
            entry.not_before = Instant::now() + jittered(pause);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(entry) = self.turns.lock().get_mut(&self.key)
            && entry.owner == self.owner
        {
            entry.asking = None;
        }
    }
}

/// Between half of `pause` and all of it, so that instances which began together drift apart.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.5..=1.0))
}
