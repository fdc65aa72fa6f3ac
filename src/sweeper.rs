//! Closes what died attempts leave behind, and removes what is expired.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet, yield_now};

use crate::detach::catch_panic;
use crate::error::StoreError;
use crate::idempotency::{Engine, Idempotency};
use crate::reconciler::{Reconciled, jittered};
use crate::record::{Record, State, Timestamp};
use crate::store::{Cursor, Purged, Store};
use crate::telemetry;
use crate::time_limit::within;

impl<S: Store> Idempotency<S> {
    /// What looks after this engine's store in the background: see [`Sweeper`].
    pub fn sweeper(&self) -> Sweeper {
        Sweeper {
            engine: Arc::clone(&self.engine),
            concurrency: CONCURRENCY,
            walk: Walk::default(),
            stuck: false,
        }
    }
}

/// Asks the [reconciler](crate::IdempotencyBuilder::reconciler) about every abandoned record, closes
/// those that it has an answer for, and then removes expired records.
///
/// Run one in every process, or in one of its own: many side by side do no harm, because a record is
/// closed only while its owner and its lease are those that were seen. Without a reconciler it
/// counts abandoned records and purges.
///
/// ```
/// use tower_idempotency::{Idempotency, MemoryStore, Verdict};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let idempotency = Idempotency::builder(MemoryStore::new())
///     .reconciler(|_record| async { Ok::<_, std::io::Error>(Verdict::Unknown) })
///     .build()?;
/// let sweeping = idempotency.sweeper().spawn();
/// // … serve …
/// sweeping.shutdown().await;
/// # Ok(()) }
/// ```
///
/// # What it does
///
/// A round begins [`sweep_interval`](crate::IdempotencyBuilder::sweep_interval) after the last one,
/// or up to half of that earlier, at random. When the store does not answer, or the reconciler fails
/// for all of many records, the pauses grow up to ten intervals. A record whose
/// question fails is asked about again after a pause that grows in the same way, and holds up no
/// other. Nothing but [`shutdown`](Sweeping::shutdown) or a drop ends it.
///
/// Expired records that nobody has closed are asked about before they are purged. What is purged
/// unresolved all the same is reported at error level.
#[must_use = "it does nothing until it is spawned, run or asked to sweep"]
pub struct Sweeper {
    engine: Arc<Engine>,
    concurrency: usize,
    walk: Walk,
    /// Whether the reconciler failed for all of many in the last round.
    stuck: bool,
}

/// How far the walk through abandoned records has got; a round may end in the middle of it.
#[derive(Clone, Default)]
struct Walk {
    after: Option<Cursor>,
    /// Records that stayed abandoned, since it began.
    left: usize,
    oldest: Option<Timestamp>,
}

impl Sweeper {
    /// How many questions to the reconciler are open at once. Default 8; 0 is taken for 1.
    pub fn concurrency(mut self, questions: usize) -> Self {
        self.concurrency = questions.max(1);
        self
    }

    /// One round: for a scheduled job, or an operator. It goes on where the last round of this
    /// sweeper stopped; [`Swept::complete`] says whether it came to the end.
    ///
    /// Dropping the future leaves every record either closed or as it was.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store did not list or did not purge. What was closed by then is closed.
    pub async fn sweep(&mut self) -> Result<Swept, StoreError> {
        self.round(&Stop::never()).await
    }

    /// Sweeps until the future is dropped, in the task that polls it. For a `select!`.
    pub async fn run(mut self) -> Infallible {
        loop {
            self.keep_sweeping(&Stop::never()).await;
        }
    }

    /// Sweeps in a task of its own until [`Sweeping`] is shut down or dropped.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn spawn(mut self) -> Sweeping {
        let (running, stop) = watch::channel(());
        let task = Handle::current().spawn(async move {
            self.keep_sweeping(&Stop(Some(stop))).await;
        });
        Sweeping { running, task }
    }

    async fn keep_sweeping(&mut self, stop: &Stop) {
        let interval = self.engine.settings.sweep_interval();
        let mut failures = 0_u32;
        // Instances that are deployed together do not begin together.
        let mut pause = interval.mul_f64(rand::random());
        while !stop.within(pause).await {
            let round = match catch_panic(self.round(stop)).await {
                Ok(round) => round,
                Err(_) => Err(StoreError::unavailable("a store call panicked")),
            };
            let failed = match &round {
                Ok(_) => self.stuck,
                Err(error) => {
                    telemetry::sweep_failed(error, self.engine.store_name);
                    // What no repetition mends must not hold up what can be done beside it.
                    error.is_transient()
                }
            };
            failures = if failed {
                failures.saturating_add(1)
            } else {
                0
            };
            pause = match round {
                Ok(swept) if !swept.complete && !failed => Duration::ZERO,
                _ => {
                    let longer = interval.saturating_mul(1 << failures.min(4));
                    jittered(longer.min(interval.saturating_mul(10)))
                }
            };
            yield_now().await;
        }
    }

    async fn round(&mut self, stop: &Stop) -> Result<Swept, StoreError> {
        let mut swept = Swept::default();
        let walked = self.walk(&mut swept, stop).await;
        // Also when the walk failed: one thing that goes wrong is no reason for a store to fill up.
        let purged = self.purge(&mut swept, stop).await;
        telemetry::swept(&swept);
        walked.and(purged).map(|()| swept)
    }

    /// Asks about abandoned records, page by page, until there are no more or it is enough for one
    /// round.
    async fn walk(&mut self, swept: &mut Swept, stop: &Stop) -> Result<(), StoreError> {
        self.stuck = false;
        let engine = Arc::clone(&self.engine);
        while !stop.is_set() && swept.seen < RECORDS_PER_ROUND {
            let listed = engine
                .store()
                .abandoned(self.walk.after.as_ref(), RECORDS_PER_PAGE);
            let page = match engine.call("abandoned", listed).await {
                Ok(page) => page,
                Err(error) => {
                    // A cursor that the store does not take (any more) is not tried for ever.
                    self.walk = Walk::default();
                    return Err(error);
                }
            };
            self.stuck = self.reconcile(page.records, swept, stop).await;
            self.walk.after = page.next;
            if self.walk.after.is_none() {
                let walk = std::mem::take(&mut self.walk);
                telemetry::abandoned(walk.left, walk.oldest, engine.store_name);
                swept.complete = true;
                return Ok(());
            }
            if self.stuck {
                return Ok(());
            }
            // A page may be empty, and the store answer at once.
            yield_now().await;
        }
        Ok(())
    }

    /// Asks about the records of one page, a few at a time. Whether the reconciler failed for all of
    /// many: whom it asks is away, and the rest is for later.
    async fn reconcile(&mut self, records: Vec<Record>, swept: &mut Swept, stop: &Stop) -> bool {
        let mut page = Swept::default();
        let mut asking = JoinSet::new();
        for record in records {
            while asking.len() >= self.concurrency {
                self.count(asking.join_next().await, &mut page);
            }
            if stop.is_set() {
                break;
            }
            let engine = Arc::clone(&self.engine);
            asking.spawn(async move {
                let reconciled = engine.reconcile_in_turn(&record).await;
                (reconciled, record.state)
            });
        }
        while !asking.is_empty() {
            self.count(asking.join_next().await, &mut page);
        }
        swept.add(&page);
        let answered = page.happened + page.not_happened + page.unknown + page.overtaken;
        page.failed >= MANY && answered == 0
    }

    fn count(
        &mut self,
        ended: Option<Result<(Reconciled, State), tokio::task::JoinError>>,
        page: &mut Swept,
    ) {
        let Some(ended) = ended else {
            return;
        };
        // The reconciler's own panics are caught; one of a store is a failure.
        let (reconciled, state) = match ended {
            Ok((reconciled, state)) => (reconciled, Some(state)),
            Err(_) => (Reconciled::Failed, None),
        };
        page.seen += 1;
        *match reconciled {
            Reconciled::Happened => &mut page.happened,
            Reconciled::NotHappened => &mut page.not_happened,
            Reconciled::Unknown => &mut page.unknown,
            Reconciled::Failed => &mut page.failed,
            Reconciled::Overtaken => &mut page.overtaken,
            Reconciled::Deferred => &mut page.deferred,
        } += 1;
        if !reconciled.is_closed() {
            self.walk.left += 1;
            if let Some(State::Started { lease_until, .. }) = state {
                let oldest = self.walk.oldest.get_or_insert(lease_until);
                *oldest = lease_until.min(*oldest);
            }
        }
    }

    /// Removes expired records in batches, until none is left.
    async fn purge(&mut self, swept: &mut Swept, stop: &Stop) -> Result<(), StoreError> {
        let engine = &self.engine;
        // A store may have to look at everything to find nothing.
        let limit = engine.settings.store_timeout.saturating_mul(10);
        while !stop.is_set() {
            let purging = engine.store().purge(RECORDS_PER_PURGE);
            let purged = engine.call_within(limit, "purge", purging).await?;
            telemetry::purged(&purged);
            swept.purged.removed += purged.removed;
            swept.purged.unresolved += purged.unresolved;
            if purged.removed == 0 {
                break;
            }
            yield_now().await;
        }
        Ok(())
    }
}

impl fmt::Debug for Sweeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sweeper")
            .field("engine", &self.engine)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// What one round of a [`Sweeper`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Abandoned records that it met: the sum of the next six.
    pub seen: usize,
    /// Completed, because the work was done.
    pub happened: usize,
    /// Freed, because the work was not done.
    pub not_happened: usize,
    /// Left, because the reconciler does not know, or there is none.
    pub unknown: usize,
    /// Left, because the reconciler or the store failed.
    pub failed: usize,
    /// Closed, renewed or taken over by somebody else in the meantime.
    pub overtaken: usize,
    /// Not asked about: a retry is asking, or the last question failed a moment ago.
    pub deferred: usize,
    /// Expired records that were removed, and how many of them nobody had ever closed.
    pub purged: Purged,
    /// Whether the walk came to its end. If not, the next round goes on where it stopped.
    pub complete: bool,
}

impl Swept {
    fn add(&mut self, page: &Self) {
        self.seen += page.seen;
        self.happened += page.happened;
        self.not_happened += page.not_happened;
        self.unknown += page.unknown;
        self.failed += page.failed;
        self.overtaken += page.overtaken;
        self.deferred += page.deferred;
    }
}

/// A [`Sweeper`] at work. Dropping it ends the sweeper after the questions that are open.
#[derive(Debug)]
#[must_use = "dropping it ends the sweeper"]
pub struct Sweeping {
    // Its drop is the signal.
    running: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl Sweeping {
    /// Ends the sweeper and waits for the questions that are open, one
    /// [time limit](crate::IdempotencyBuilder::reconcile_timeout) and a few store calls at the most.
    pub async fn shutdown(self) {
        drop(self.running);
        // It can only fail together with its runtime.
        let _ = self.task.await;
    }

    /// Whether the task has ended, which only the end of its runtime brings about.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

/// Hears that the sweeper is to end.
struct Stop(Option<watch::Receiver<()>>);

impl Stop {
    const fn never() -> Self {
        Self(None)
    }

    fn is_set(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|stop| stop.has_changed().is_err())
    }

    /// Sleeps; whether it was told to end meanwhile.
    async fn within(&self, pause: Duration) -> bool {
        match self.0.clone() {
            Some(mut stop) => within(pause, stop.changed()).await.is_ok(),
            None => {
                tokio::time::sleep(pause).await;
                false
            }
        }
    }
}

/// So many questions are open at once.
const CONCURRENCY: usize = 8;

/// So many failures in a row are no accident of one record.
const MANY: usize = 8;

const RECORDS_PER_PAGE: usize = 100;

/// After so many, expired records are removed before the walk goes on.
const RECORDS_PER_ROUND: usize = 1000;

const RECORDS_PER_PURGE: usize = 500;
