//! Renews every live claim of an engine from one task.
//!
//! An attempt that ends before a third of its lease is over never meets the task. The task is
//! started with the first claim, sleeps until the next renewal is due, and ends when it wakes up
//! with nothing to do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::attempt::Inner;
use crate::idempotency::Engine;
use crate::store::Fenced;
use crate::telemetry::{self, Fault};

/// How many renewals are under way at once.
const CONCURRENT: usize = 64;

/// No slot: the attempt is not renewed, because there was no runtime to renew it from.
const NONE: usize = usize::MAX;

#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    beating: bool,
}

struct Slot {
    attempt: Arc<Inner>,
    /// When to renew or look next.
    due: Instant,
    /// Until when the claim is ours for sure.
    held_until: Instant,
    /// After this it is renewed no more.
    limit: Instant,
    exhausted: bool,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("due", &self.due).finish()
    }
}

impl Heartbeat {
    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews `attempt`, claimed by a call that was made at `asked`, until it is deregistered.
    pub(crate) fn register(
        &self,
        engine: &Arc<Engine>,
        attempt: &Arc<Inner>,
        asked: Instant,
    ) -> usize {
        let settings = &engine.settings;
        let slot = Slot {
            attempt: Arc::clone(attempt),
            due: asked + settings.lease / 3,
            held_until: asked + settings.lease,
            limit: asked + settings.attempt_limit,
            exhausted: false,
        };
        let mut registry = self.lock();
        if !registry.beating {
            let Ok(runtime) = Handle::try_current() else {
                return NONE;
            };
            registry.beating = true;
            runtime.spawn(beat(Beating(Some(Arc::downgrade(engine)))));
        }
        if let Some(index) = registry.free.pop() {
            registry.slots[index] = Some(slot);
            index
        } else {
            registry.slots.push(Some(slot));
            registry.slots.len() - 1
        }
    }

    /// Ends the renewals of `attempt`. Returns until when the claim was held for sure, the first
    /// time it is called.
    pub(crate) fn deregister(&self, index: usize, attempt: &Arc<Inner>) -> Option<Instant> {
        let mut registry = self.lock();
        let slot = registry.slots.get_mut(index)?;
        // The slot may be another attempt's by now.
        if !slot
            .as_ref()
            .is_some_and(|slot| Arc::ptr_eq(&slot.attempt, attempt))
        {
            return None;
        }
        let held_until = slot.take().map(|slot| slot.held_until);
        registry.free.push(index);
        held_until
    }

    /// The attempts to renew now, or when to look again; `None` when there is nothing to do.
    fn next(&self, now: Instant, slack: Duration) -> Option<Result<Vec<Due>, Instant>> {
        let mut registry = self.lock();
        let mut earliest: Option<Instant> = None;
        let mut due = Vec::new();
        for (index, slot) in registry.slots.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            if slot.due > now + slack {
                earliest = Some(earliest.map_or(slot.due, |at| at.min(slot.due)));
                continue;
            }
            if now >= slot.held_until {
                slot.attempt.mark_lost();
            }
            if now >= slot.limit && !slot.exhausted {
                slot.exhausted = true;
                let claim = slot.attempt.claim();
                telemetry::fault(Fault::AttemptLimit, claim.key(), claim.attempt());
            }
            if slot.exhausted {
                // Looked at once more, when the lease is over and the claim counts as lost.
                slot.due = if now < slot.held_until {
                    slot.held_until
                } else {
                    now + FAR_AWAY
                };
                earliest = Some(earliest.map_or(slot.due, |at| at.min(slot.due)));
                continue;
            }
            due.push(Due {
                index,
                attempt: Arc::clone(&slot.attempt),
            });
        }
        if !due.is_empty() {
            return Some(Ok(due));
        }
        if earliest.is_none() {
            // Nothing is held: end, and let the next claim start a new task. A registry that grew in
            // a burst gives its memory back here.
            registry.beating = false;
            registry.slots = Vec::new();
            registry.free = Vec::new();
        }
        earliest.map(Err)
    }

    /// Notes the answer to a renewal that was asked for at `asked`.
    fn renewed(&self, renewal: &Due, asked: Instant, lease: Duration, answer: Renewal) {
        let mut registry = self.lock();
        let Some(Some(slot)) = registry.slots.get_mut(renewal.index) else {
            return;
        };
        if !Arc::ptr_eq(&slot.attempt, &renewal.attempt) {
            return;
        }
        match answer {
            Renewal::Applied => {
                slot.held_until = asked + lease;
                slot.due = asked + lease / 3;
            }
            Renewal::Lost => {
                slot.attempt.mark_lost();
                slot.exhausted = true;
                slot.due = asked + FAR_AWAY;
            }
            Renewal::Failed => {
                slot.due = Instant::now() + (lease / 12).min(Duration::from_secs(1));
            }
        }
    }
}

/// Longer than any attempt, and far from overflowing a clock.
const FAR_AWAY: Duration = Duration::from_secs(365 * 24 * 60 * 60);

struct Due {
    index: usize,
    attempt: Arc<Inner>,
}

enum Renewal {
    Applied,
    Lost,
    Failed,
}

/// The task's hold on its engine. When the task goes, for whatever reason (its runtime shut down),
/// the next claim may start another.
struct Beating(Option<Weak<Engine>>);

impl Beating {
    fn engine(&self) -> Option<Arc<Engine>> {
        self.0.as_ref()?.upgrade()
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        if let Some(engine) = self.engine() {
            engine.heartbeat.lock().beating = false;
        }
    }
}

async fn beat(mut beating: Beating) {
    loop {
        let Some(engine) = beating.engine() else {
            return;
        };
        let (now, lease) = (Instant::now(), engine.settings.lease);
        match engine.heartbeat.next(now, lease / 30) {
            // The registry noted the end under its lock; a task that was started since is not ours
            // to report.
            None => {
                beating.0 = None;
                return;
            }
            Some(Err(at)) => {
                // Not held while asleep: an engine that nobody uses any more may go.
                drop(engine);
                // A claim that arrives meanwhile may be due sooner, by as long as its store call
                // took; so never sleep long.
                sleep_until(at.min(now + lease / 6)).await;
            }
            Some(Ok(due)) => renew_all(&engine, due).await,
        }
    }
}

async fn renew_all(engine: &Arc<Engine>, due: Vec<Due>) {
    let mut renewals = JoinSet::new();
    for renewal in due {
        if renewals.len() >= CONCURRENT {
            renewals.join_next().await;
        }
        let engine = Arc::clone(engine);
        renewals.spawn(async move {
            let lease = engine.settings.lease;
            let claim = renewal.attempt.claim();
            let asked = Instant::now();
            // A renewal that hangs must not hold up those that are due after it.
            let limit = engine.settings.store_timeout.min(lease / 3);
            let renewed = engine.store.renew(claim, lease);
            let answer = match engine.call_within(limit, "renew", renewed).await {
                Ok(Fenced::Applied) => Renewal::Applied,
                Ok(Fenced::ClaimLost) => Renewal::Lost,
                Err(_) => {
                    telemetry::fault(Fault::NotRenewed, claim.key(), claim.attempt());
                    Renewal::Failed
                }
            };
            engine.heartbeat.renewed(&renewal, asked, lease, answer);
        });
    }
    while renewals.join_next().await.is_some() {}
}
