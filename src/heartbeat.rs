//! Renews every live claim of an engine from one task.
//!
//! An attempt that ends before a third of its lease is over never meets the task. The task is
//! started with the first claim, on the runtime of that claim, sleeps until there is something to do,
//! and ends when it wakes up with nothing to do. If that runtime shuts down, another one that has
//! attempts goes on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::attempt::Inner;
use crate::detach::catch_panic;
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
    /// When to renew next.
    due: Instant,
    /// Until when the claim is ours for sure.
    held_until: Instant,
    /// After this it is renewed no more.
    limit: Instant,
    renewals: Renewals,
    /// The attempt is being settled: a refused renewal may say nothing new.
    closing: bool,
    /// The attempt was told that its claim is lost.
    told: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Renewals {
    /// The next one waits for its time.
    Waiting,
    /// One is under way.
    UnderWay,
    /// There are no more.
    Ended,
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
            renewals: Renewals::Waiting,
            closing: false,
            told: false,
        };
        let mut registry = self.lock();
        let mut start = None;
        if !registry.beating {
            let Some(runtime) = attempt.runtime() else {
                return NONE;
            };
            registry.beating = true;
            start = Some(runtime);
        }
        let index = if let Some(index) = registry.free.pop() {
            registry.slots[index] = Some(slot);
            index
        } else {
            registry.slots.push(Some(slot));
            registry.slots.len() - 1
        };
        drop(registry);
        // Without the lock: a runtime that is shutting down drops the task at once, and its drop
        // locks.
        if let Some(runtime) = start {
            runtime.spawn(beat(Beating::new(engine)));
        }
        index
    }

    /// Starts the task at another runtime. `false` if that one is gone too, which drops what it is
    /// given at once.
    fn go_on(&self, engine: &Arc<Engine>, runtime: &Handle) -> bool {
        let beating = std::mem::replace(&mut self.lock().beating, true);
        beating || !runtime.spawn(beat(Beating::new(engine))).is_finished()
    }

    /// The store is about to be told how `attempt` ended. It is renewed meanwhile, but that a
    /// renewal is refused from here on may just mean that the store has heard.
    pub(crate) fn closing(&self, index: usize, attempt: &Arc<Inner>) {
        if let Some(slot) = self.lock().slot(index, attempt) {
            slot.closing = true;
        }
    }

    /// Ends the renewals of `attempt`. Returns until when the claim was held for sure, the first
    /// time it is called.
    pub(crate) fn deregister(&self, index: usize, attempt: &Arc<Inner>) -> Option<Instant> {
        let mut registry = self.lock();
        let held_until = registry.slot(index, attempt)?.held_until;
        let slot = registry.slots[index].take();
        registry.free.push(index);
        drop(registry);
        // Without the lock, like everything that may be somebody else's code.
        drop(slot);
        Some(held_until)
    }

    /// What is to be done now, with at most `room` renewals, and when to look again.
    fn look(&self, now: Instant, slack: Duration, room: usize) -> Look {
        let mut look = Look::default();
        let (mut empty, mut idle) = (true, true);
        let mut registry = self.lock();
        for (index, slot) in registry.slots.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            empty = false;
            if now >= slot.held_until && !slot.told {
                slot.told = true;
                look.lost.push(Arc::clone(&slot.attempt));
            }
            if now >= slot.limit && slot.renewals != Renewals::Ended {
                slot.renewals = Renewals::Ended;
                look.exhausted.push(Arc::clone(&slot.attempt));
            }
            idle &= slot.told && slot.renewals == Renewals::Ended;
            if !slot.told {
                look.again_at(slot.held_until);
            }
            if slot.renewals != Renewals::Waiting {
                continue;
            }
            if slot.due > now + slack {
                look.again_at(slot.due);
            } else if look.due.len() < room {
                slot.renewals = Renewals::UnderWay;
                let attempt = Arc::clone(&slot.attempt);
                look.due.push(Renewal { index, attempt });
            }
            // Without room its turn comes when one of those under way ends.
        }
        if empty {
            // A registry that grew in a burst gives its memory back here.
            registry.slots = Vec::new();
            registry.free = Vec::new();
        }
        if idle {
            // Noted under the lock, so that the next claim starts a new task.
            registry.beating = false;
            look.over = true;
        }
        look
    }

    /// Notes the answer to a renewal that was asked for at `asked`.
    fn renewed(&self, renewal: &Renewal, asked: Instant, lease: Duration, answer: Answer) {
        let mut registry = self.lock();
        let Some(slot) = registry.slot(renewal.index, &renewal.attempt) else {
            return;
        };
        if slot.renewals == Renewals::UnderWay {
            slot.renewals = Renewals::Waiting;
        }
        let fault = match answer {
            Answer::Applied => {
                slot.held_until = asked + lease;
                slot.due = asked + lease / 3;
                None
            }
            Answer::Lost => {
                slot.renewals = Renewals::Ended;
                let news = !slot.closing && !slot.told;
                slot.told = true;
                news.then_some(Fault::ClaimLost)
            }
            Answer::Failed => {
                slot.due = Instant::now() + pause(lease);
                Some(Fault::NotRenewed)
            }
        };
        drop(registry);
        match fault {
            Some(Fault::ClaimLost) => renewal.attempt.mark_lost(),
            Some(fault) => {
                let claim = renewal.attempt.claim();
                telemetry::fault(fault, claim.key(), claim.attempt());
            }
            None => {}
        }
    }
}

impl Registry {
    /// The slot of this attempt; by now the place may be another one's.
    fn slot(&mut self, index: usize, attempt: &Arc<Inner>) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(index)?.as_mut()?;
        Arc::ptr_eq(&slot.attempt, attempt).then_some(slot)
    }
}

/// What one look into the registry found.
#[derive(Default)]
struct Look {
    due: Vec<Renewal>,
    lost: Vec<Arc<Inner>>,
    exhausted: Vec<Arc<Inner>>,
    /// When something is to be done next, if nothing is registered until then.
    again: Option<Instant>,
    /// Nothing is left to do.
    over: bool,
}

impl Look {
    fn again_at(&mut self, at: Instant) {
        self.again = Some(self.again.map_or(at, |again| again.min(at)));
    }

    fn report(&self) {
        for attempt in &self.exhausted {
            let claim = attempt.claim();
            telemetry::fault(Fault::AttemptLimit, claim.key(), claim.attempt());
        }
        for attempt in &self.lost {
            attempt.mark_lost();
        }
    }
}

struct Renewal {
    index: usize,
    attempt: Arc<Inner>,
}

enum Answer {
    Applied,
    Lost,
    Failed,
}

/// The task's hold on its engine. When the task goes, for whatever reason (its runtime shut down),
/// another runtime goes on, or the next claim starts another.
struct Beating {
    engine: Option<Weak<Engine>>,
    begun: bool,
}

impl Beating {
    fn new(engine: &Arc<Engine>) -> Self {
        Self {
            engine: Some(Arc::downgrade(engine)),
            begun: false,
        }
    }

    fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.as_ref()?.upgrade()
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        let Some(engine) = self.engine() else { return };
        let mut registry = engine.heartbeat.lock();
        registry.beating = false;
        let mut homes = Vec::new();
        for slot in registry.slots.iter_mut().flatten() {
            // Those went with the task.
            if slot.renewals == Renewals::UnderWay {
                slot.renewals = Renewals::Waiting;
            }
            if self.begun && slot.renewals != Renewals::Ended {
                homes.extend(slot.attempt.runtime().cloned());
            }
        }
        drop(registry);
        let _ = homes
            .iter()
            .any(|runtime| engine.heartbeat.go_on(&engine, runtime));
    }
}

/// By how much a renewal may come early to be made together with others.
fn slack(lease: Duration) -> Duration {
    (lease / 30).min(Duration::from_millis(500))
}

/// How long to wait after a renewal that failed. More than the slack, or it would be asked for again
/// at once.
fn pause(lease: Duration) -> Duration {
    (lease / 12).min(Duration::from_secs(1))
}

async fn beat(mut beating: Beating) {
    beating.begun = true;
    let mut renewals = JoinSet::new();
    loop {
        while renewals.try_join_next().is_some() {}
        let Some(engine) = beating.engine() else {
            return;
        };
        let (now, lease) = (Instant::now(), engine.settings.lease);
        let room = CONCURRENT - renewals.len();
        let look = engine.heartbeat.look(now, slack(lease), room);
        look.report();
        if look.over {
            // The registry noted the end under its lock; a task that was started since is not ours
            // to report.
            beating.engine = None;
            return;
        }
        for renewal in look.due {
            renewals.spawn(renew(Arc::clone(&engine), renewal));
        }
        // Not held while asleep: an engine that nobody uses any more may go.
        drop(engine);
        // A claim that arrives meanwhile may be due sooner, by as long as its store call took; so
        // never sleep long.
        let at = now + lease / 6;
        let at = look.again.map_or(at, |again| again.min(at));
        if renewals.is_empty() {
            sleep_until(at).await;
        } else {
            // Not one after the other: a renewal that hangs holds up nobody.
            let _ = timeout_at(at, renewals.join_next()).await;
        }
    }
}

async fn renew(engine: Arc<Engine>, renewal: Renewal) {
    let lease = engine.settings.lease;
    let claim = renewal.attempt.claim();
    let asked = Instant::now();
    let limit = engine.settings.store_timeout.min(lease / 3);
    let renewed = engine.call_within(limit, "renew", engine.store().renew(claim, lease));
    let answer = match catch_panic(renewed).await {
        Ok(Ok(Fenced::Applied)) => Answer::Applied,
        Ok(Ok(Fenced::ClaimLost)) => Answer::Lost,
        // A store that panics has not answered either.
        Ok(Err(_)) | Err(_) => Answer::Failed,
    };
    engine.heartbeat.renewed(&renewal, asked, lease, answer);
}

#[cfg(test)]
#[cfg(feature = "memory")]
mod tests {
    use tokio::time::sleep;

    use super::*;
    use crate::admission::Admission;
    use crate::attempt::AttemptGuard;
    use crate::fingerprint::Fingerprint;
    use crate::idempotency::Idempotency;
    use crate::scope::ScopedKey;
    use crate::store::MemoryStore;

    type TestEngine = Idempotency<MemoryStore>;

    async fn begin(engine: &TestEngine, key: usize) -> AttemptGuard {
        let key = ScopedKey::join("heartbeat", "", &key.to_string());
        match engine.admit(&key, Fingerprint::of(&[])).await {
            Ok(Admission::First(attempt)) => attempt,
            other => panic!("not the first: {other:?}"),
        }
    }

    /// Places in all, places in use, and whether the task runs.
    fn registry(engine: &TestEngine) -> (usize, usize, bool) {
        let registry = engine.engine.heartbeat.lock();
        let used = registry.slots.iter().flatten().count();
        assert_eq!(registry.slots.len(), used + registry.free.len());
        (registry.slots.len(), used, registry.beating)
    }

    #[tokio::test(start_paused = true)]
    async fn ten_thousand_attempts_leave_nothing_behind() {
        let engine = Idempotency::new(MemoryStore::new());
        let lease = engine.engine.settings.lease;
        for n in 0..5_000 {
            drop(begin(&engine, n).await);
            assert_eq!(registry(&engine), (1, 0, true));
        }
        sleep(lease).await;
        assert_eq!(registry(&engine), (0, 0, false));

        let mut attempts = Vec::new();
        for n in 5_000..10_000 {
            attempts.push(begin(&engine, n).await);
        }
        sleep(lease).await;
        assert_eq!(registry(&engine), (5_000, 5_000, true));
        drop(attempts);
        sleep(lease).await;
        assert_eq!(registry(&engine), (0, 0, false));
        assert_eq!(engine.engine.heartbeat.lock().slots.capacity(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_became_free_is_used_again() {
        let engine = Idempotency::new(MemoryStore::new());
        let (first, second) = (begin(&engine, 1).await, begin(&engine, 2).await);
        drop(first);
        assert_eq!(registry(&engine), (2, 1, true));
        let third = begin(&engine, 3).await;
        assert_eq!(registry(&engine), (2, 2, true));
        drop((second, third));
    }

    #[test]
    fn a_failed_renewal_is_not_due_at_once_whatever_the_lease() {
        let mut lease = Duration::from_millis(1);
        while lease < crate::settings::LONGEST {
            assert!(slack(lease) < pause(lease), "{lease:?}");
            assert!(pause(lease) < lease / 3, "{lease:?}");
            lease *= 2;
        }
    }
}
