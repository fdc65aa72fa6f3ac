//! One record in memory, and what every move does to it. Pure: no lock, no clock.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::{Notes, Record, State, Timestamp};
use crate::scope::ScopedKey;
use crate::store::{Completion, Fenced, Resolution};

use super::clock::{Micros, micros};
use super::sync::Notify;

/// A record. Its size is what a million keys cost, so rare fields sit behind one pointer.
pub(super) struct Entry {
    pub(super) hash: u64,
    pub(super) key: ScopedKey,
    fingerprint: Fingerprint,
    attempt: u32,
    owner: Owner,
    stage: Stage,
    created_at: Micros,
    expires_at: Micros,
    extras: Option<Box<Extras>>,
}

enum Stage {
    Started {
        lease_until: Micros,
        // What the claim asked for: a completion after the expiry counts it once more.
        retention: Micros,
    },
    Completed {
        outcome: Outcome,
        completed_at: Micros,
    },
    Released,
}

#[derive(Default)]
struct Extras {
    notes: Notes,
    watchers: Option<Arc<Notify>>,
}

/// What a move displaced. It is dropped, and its watchers are woken, after the lock is free again:
/// a waker, or the owner of an outcome's bytes, is somebody else's code.
#[derive(Default)]
pub(super) struct Leftovers {
    stage: Option<Stage>,
    extras: Option<Box<Extras>>,
    watchers: Option<Arc<Notify>>,
    #[expect(
        clippy::vec_box,
        reason = "the map hands out boxes, and they are not unpacked to die"
    )]
    pub(super) entries: Vec<Box<Entry>>,
}

impl Entry {
    pub(super) fn new(hash: u64, request: &ClaimRequest, now: Micros) -> Self {
        Self {
            hash,
            key: request.key.clone(),
            fingerprint: request.fingerprint,
            attempt: 1,
            owner: request.owner,
            stage: Stage::started(request, now),
            created_at: now,
            expires_at: now.saturating_add(micros(request.retention)),
            extras: None,
        }
    }

    /// What an entry for this key weighs before anything is attached to it.
    pub(super) fn weight_of_new(key: &ScopedKey) -> usize {
        PER_ENTRY + key.as_bytes().len()
    }

    /// How many bytes the entry is counted as.
    pub(super) fn weight(&self) -> usize {
        let outcome = match &self.stage {
            Stage::Completed { outcome, .. } => outcome.as_bytes().len(),
            Stage::Started { .. } | Stage::Released => 0,
        };
        let extras = self.extras.as_deref().map_or(0, |extras| {
            let correlation = extras.notes.correlation.as_deref().map_or(0, str::len);
            let checkpoints = extras.notes.checkpoints.iter();
            let checkpoints: usize = checkpoints
                .map(|(name, data)| size_of::<(String, Bytes)>() + name.len() + data.len())
                .sum();
            size_of::<Extras>() + correlation + checkpoints
        });
        Self::weight_of_new(&self.key) + outcome + extras
    }

    /// When the entry may be removed, if nothing happens to it until then.
    pub(super) fn due(&self) -> Micros {
        match self.stage {
            Stage::Started { lease_until, .. } => self.expires_at.max(lease_until),
            Stage::Completed { .. } | Stage::Released => self.expires_at,
        }
    }

    pub(super) fn is_expired(&self, now: Micros) -> bool {
        self.due() <= now
    }

    /// Whether nobody has said how the last attempt ended.
    pub(super) fn is_unresolved(&self) -> bool {
        matches!(self.stage, Stage::Started { .. })
    }

    pub(super) fn is_abandoned(&self, now: Micros) -> bool {
        matches!(self.stage, Stage::Started { lease_until, .. } if lease_until <= now)
    }

    /// When the live claim of this owner ends, if it stands.
    pub(super) fn live_until(&self, owner: &Owner, now: Micros) -> Option<Micros> {
        match self.stage {
            Stage::Started { lease_until, .. } if self.owner == *owner && now < lease_until => {
                Some(lease_until)
            }
            _ => None,
        }
    }

    /// Rules 2 to 5, in this order.
    pub(super) fn claim(
        &mut self,
        request: &ClaimRequest,
        now: Micros,
        left: &mut Leftovers,
    ) -> Claimed {
        if matches!(self.stage, Stage::Released) || self.is_expired(now) {
            left.extras = self.extras.take();
            self.fingerprint = request.fingerprint;
            self.created_at = now;
            self.attempt = self.attempt.saturating_add(1);
            return self.grant(request, now, left);
        }
        match self.stage {
            Stage::Started { .. } if self.fingerprint != request.fingerprint => {}
            Stage::Started { .. } if self.owner == request.owner => {
                return self.grant(request, now, left);
            }
            Stage::Started { lease_until, .. }
                if lease_until <= now && request.on_abandoned == OnAbandoned::Rerun =>
            {
                self.attempt = self.attempt.saturating_add(1);
                return self.grant(request, now, left);
            }
            _ => {}
        }
        Claimed::Existing(self.record(now))
    }

    fn grant(&mut self, request: &ClaimRequest, now: Micros, left: &mut Leftovers) -> Claimed {
        if self.owner != request.owner {
            self.wake_watchers(left);
        }
        self.owner = request.owner;
        self.expires_at = now.saturating_add(micros(request.retention));
        self.enter(Stage::started(request, now), left);
        self.acquired()
    }

    /// The answer to the claim that holds the entry.
    pub(super) fn acquired(&self) -> Claimed {
        Claimed::Acquired {
            claim: Claim::new(self.key.clone(), self.owner, self.attempt),
            notes: self.notes(),
        }
    }

    pub(super) fn renew(&mut self, owner: &Owner, lease: Duration, now: Micros) -> Fenced {
        self.fenced(owner, |entry| {
            if let Stage::Started { lease_until, .. } = &mut entry.stage {
                *lease_until = now.saturating_add(micros(lease));
            }
        })
    }

    pub(super) fn complete(
        &mut self,
        owner: &Owner,
        outcome: Outcome,
        retention: Option<Duration>,
        now: Micros,
        left: &mut Leftovers,
    ) -> Completion {
        match &self.stage {
            Stage::Completed { outcome, .. } => Completion::Standing(outcome.clone()),
            Stage::Started { .. } if self.owner == *owner => {
                self.finish(outcome, retention, now, left);
                Completion::Recorded
            }
            Stage::Started { .. } | Stage::Released => Completion::ClaimLost,
        }
    }

    pub(super) fn release(&mut self, owner: &Owner, left: &mut Leftovers) -> Fenced {
        match self.stage {
            Stage::Released if self.owner == *owner => Fenced::Applied,
            _ => self.fenced(owner, |entry| entry.free(left)),
        }
    }

    pub(super) fn abandon(&mut self, owner: &Owner, now: Micros, left: &mut Leftovers) -> Fenced {
        self.fenced(owner, |entry| {
            if let Stage::Started { lease_until, .. } = &mut entry.stage {
                *lease_until = now.min(*lease_until);
            }
            entry.wake_watchers(left);
        })
    }

    pub(super) fn annotate(&mut self, owner: &Owner, correlation: String) -> Fenced {
        self.fenced(owner, |entry| {
            entry.extras().notes.correlation = Some(correlation);
        })
    }

    pub(super) fn checkpoint(&mut self, owner: &Owner, name: &str, data: Bytes) -> Fenced {
        self.fenced(owner, |entry| {
            entry.extras().notes.set_checkpoint(name, data);
        })
    }

    /// Rule 12: `seen` is compared as a whole, not only its owner.
    pub(super) fn resolve(
        &mut self,
        seen: &Record,
        resolution: Resolution,
        now: Micros,
        left: &mut Leftovers,
    ) -> Fenced {
        let Stage::Started { lease_until, .. } = self.stage else {
            return Fenced::ClaimLost;
        };
        let same_lease = matches!(
            seen.state,
            State::Started { lease_until: seen, .. } if seen.as_micros() == lease_until
        );
        if !same_lease || now < lease_until || self.owner != seen.owner {
            return Fenced::ClaimLost;
        }
        match resolution {
            Resolution::Completed(outcome) => self.finish(outcome, None, now, left),
            Resolution::Released => self.free(left),
        }
        Fenced::Applied
    }

    pub(super) fn record(&self, now: Micros) -> Record {
        let state = match &self.stage {
            Stage::Started { lease_until, .. } => State::Started {
                lease_until: Timestamp::from_micros(*lease_until),
                lease_left: Duration::from_micros(lease_until.saturating_sub(now)),
            },
            Stage::Completed {
                outcome,
                completed_at,
            } => State::Completed {
                outcome: outcome.clone(),
                completed_at: Timestamp::from_micros(*completed_at),
            },
            Stage::Released => State::Released,
        };
        Record::new(
            self.key.clone(),
            self.fingerprint,
            self.owner,
            self.attempt,
            state,
            self.notes(),
            Timestamp::from_micros(self.created_at),
            Timestamp::from_micros(self.expires_at),
        )
    }

    /// What tells a watcher that something happened; created with the first one.
    pub(super) fn watch(&mut self) -> Arc<Notify> {
        Arc::clone(self.extras().watchers.get_or_insert_default())
    }

    /// Forgets `watchers` if nobody else holds them.
    pub(super) fn unwatch(&mut self, watchers: Arc<Notify>) {
        // Given back under the lock, so that of two that leave together the second one sees it.
        drop(watchers);
        let Some(extras) = &mut self.extras else {
            return;
        };
        if let Some(standing) = &extras.watchers
            && Arc::strong_count(standing) == 1
        {
            extras.watchers = None;
            if extras.notes.is_empty() {
                self.extras = None;
            }
        }
    }

    #[cfg(feature = "testing")]
    pub(super) fn age(&mut self, by: Micros, left: &mut Leftovers) {
        let earlier = |time: &mut Micros| *time = time.saturating_sub(by);
        earlier(&mut self.created_at);
        earlier(&mut self.expires_at);
        match &mut self.stage {
            Stage::Started { lease_until, .. } => earlier(lease_until),
            Stage::Completed { completed_at, .. } => earlier(completed_at),
            Stage::Released => {}
        }
        self.wake_watchers(left);
    }

    #[cfg(all(test, not(idempotency_loom)))]
    pub(super) fn is_watched(&self) -> bool {
        self.extras
            .as_deref()
            .is_some_and(|extras| extras.watchers.is_some())
    }

    fn fenced(&mut self, owner: &Owner, apply: impl FnOnce(&mut Self)) -> Fenced {
        if self.owner != *owner || !matches!(self.stage, Stage::Started { .. }) {
            return Fenced::ClaimLost;
        }
        apply(self);
        Fenced::Applied
    }

    fn finish(
        &mut self,
        outcome: Outcome,
        retention: Option<Duration>,
        now: Micros,
        left: &mut Leftovers,
    ) {
        let again = match self.stage {
            Stage::Started { retention, .. } if self.expires_at <= now => Some(retention),
            _ => None,
        };
        if let Some(retention) = retention.map(micros).or(again) {
            self.expires_at = now.saturating_add(retention);
        }
        self.enter(
            Stage::Completed {
                outcome,
                completed_at: now,
            },
            left,
        );
        self.wake_watchers(left);
    }

    fn free(&mut self, left: &mut Leftovers) {
        self.enter(Stage::Released, left);
        // The next claim starts without notes, so there is nobody left to read them.
        left.extras = self.extras.take();
    }

    fn enter(&mut self, stage: Stage, left: &mut Leftovers) {
        left.stage = Some(mem::replace(&mut self.stage, stage));
    }

    fn wake_watchers(&mut self, left: &mut Leftovers) {
        if let Some(extras) = &mut self.extras
            && let Some(watchers) = extras.watchers.take()
        {
            left.watchers = Some(watchers);
        }
    }

    fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    fn notes(&self) -> Notes {
        self.extras
            .as_deref()
            .map_or_else(Notes::default, |extras| extras.notes.clone())
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        let of_entries = self
            .entries
            .iter()
            .filter_map(|entry| entry.extras.as_ref());
        let displaced = self.extras.iter().chain(of_entries);
        let displaced = displaced.filter_map(|extras| extras.watchers.as_ref());
        for watchers in self.watchers.iter().chain(displaced) {
            watchers.notify_waiters();
        }
    }
}

impl Stage {
    fn started(request: &ClaimRequest, now: Micros) -> Self {
        Self::Started {
            lease_until: now.saturating_add(micros(request.lease)),
            retention: micros(request.retention),
        }
    }
}

/// What an entry takes besides its key, outcome and notes: itself, its place in the table and in the
/// queue, and the headers of the shared key and outcome. `tests/cost_memory.rs` measures it.
const PER_ENTRY: usize = 264;
