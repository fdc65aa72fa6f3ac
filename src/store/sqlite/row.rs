//! One record, and what every move does to it. Pure: no SQL, no clock.

use std::time::Duration;

use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::{Notes, Record, State, Timestamp};
use crate::scope::ScopedKey;
use crate::store::{Completion, Fenced, Resolution};

use super::clock::{Micros, micros};

/// A row of the table, decoded and checked.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) id: i64,
    pub(super) fingerprint: Fingerprint,
    pub(super) owner: Owner,
    pub(super) attempt: u32,
    pub(super) stage: Stage,
    pub(super) notes: Notes,
    pub(super) created_at: Micros,
    pub(super) expires_at: Micros,
    // What the last acquired claim asked for: a completion after the expiry counts it again.
    pub(super) retention: Micros,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    Started {
        lease_until: Micros,
    },
    Completed {
        outcome: Outcome,
        completed_at: Micros,
    },
    Released,
}

/// The reply to a move, and whether the row is another one now.
#[derive(Debug, PartialEq)]
pub(super) enum After<T> {
    Changed(T),
    Unchanged(T),
}

/// What a claim finds.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Rules 2 to 4: it may be granted, by [`Row::grant`].
    Grant(Grant),
    /// Rule 5.
    Existing,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Grant {
    Afresh,
    Again,
    Takeover,
}

impl Row {
    /// The row of a key that is claimed for the first time.
    pub(super) fn new(request: &ClaimRequest, now: Micros) -> Self {
        let retention = micros(request.retention);
        Self {
            id: 0,
            fingerprint: request.fingerprint,
            owner: request.owner,
            attempt: 1,
            stage: Stage::Started {
                lease_until: now.saturating_add(micros(request.lease)),
            },
            notes: Notes::default(),
            created_at: now,
            expires_at: now.saturating_add(retention),
            retention,
        }
    }

    /// Rules 2 to 5, in this order.
    pub(super) fn judge(&self, request: &ClaimRequest, now: Micros) -> Verdict {
        if self.stage == Stage::Released || self.is_expired(now) {
            return Verdict::Grant(Grant::Afresh);
        }
        match self.stage {
            Stage::Started { .. } if self.fingerprint != request.fingerprint => Verdict::Existing,
            Stage::Started { .. } if self.owner == request.owner => Verdict::Grant(Grant::Again),
            Stage::Started { lease_until }
                if lease_until <= now && request.on_abandoned == OnAbandoned::Rerun =>
            {
                Verdict::Grant(Grant::Takeover)
            }
            _ => Verdict::Existing,
        }
    }

    pub(super) fn grant(&mut self, grant: Grant, request: &ClaimRequest, now: Micros) {
        let attempt = match grant {
            Grant::Again => self.attempt,
            Grant::Afresh | Grant::Takeover => self.attempt.saturating_add(1),
        };
        let fresh = Self::new(request, now);
        *self = match grant {
            Grant::Afresh => Self {
                id: self.id,
                attempt,
                ..fresh
            },
            Grant::Again | Grant::Takeover => Self {
                id: self.id,
                attempt,
                created_at: self.created_at,
                notes: std::mem::take(&mut self.notes),
                ..fresh
            },
        };
    }

    /// The answer to the claim that holds the row.
    pub(super) fn acquired(&self, key: &ScopedKey) -> Claimed {
        Claimed::Acquired {
            claim: Claim::new(key.clone(), self.owner, self.attempt),
            notes: self.notes.clone(),
        }
    }

    pub(super) fn renew(&mut self, owner: &Owner, lease: Duration, now: Micros) -> After<Fenced> {
        self.fenced(owner, |row| {
            row.stage = Stage::Started {
                lease_until: now.saturating_add(micros(lease)),
            };
        })
    }

    pub(super) fn complete(
        &mut self,
        owner: &Owner,
        outcome: &Outcome,
        retention: Option<Duration>,
        now: Micros,
    ) -> After<Completion> {
        match &self.stage {
            Stage::Completed { outcome, .. } => {
                After::Unchanged(Completion::Standing(outcome.clone()))
            }
            Stage::Started { .. } if self.owner == *owner => {
                self.finish(outcome, retention, now);
                After::Changed(Completion::Recorded)
            }
            Stage::Started { .. } | Stage::Released => After::Unchanged(Completion::ClaimLost),
        }
    }

    pub(super) fn release(&mut self, owner: &Owner) -> After<Fenced> {
        match self.stage {
            Stage::Released if self.owner == *owner => After::Unchanged(Fenced::Applied),
            _ => self.fenced(owner, Self::free),
        }
    }

    pub(super) fn abandon(&mut self, owner: &Owner, now: Micros) -> After<Fenced> {
        self.fenced(owner, |row| {
            if let Stage::Started { lease_until } = &mut row.stage {
                *lease_until = now.min(*lease_until);
            }
        })
    }

    pub(super) fn annotate(&mut self, owner: &Owner, correlation: &str) -> After<Fenced> {
        self.fenced(owner, |row| {
            row.notes.correlation = Some(correlation.to_owned());
        })
    }

    pub(super) fn checkpoint(&mut self, owner: &Owner, name: &str, data: &Bytes) -> After<Fenced> {
        self.fenced(owner, |row| {
            row.notes.set_checkpoint(name, data.clone());
        })
    }

    /// Rule 12: `seen` is compared as a whole, not only its owner.
    pub(super) fn resolve(
        &mut self,
        seen: &Record,
        resolution: &Resolution,
        now: Micros,
    ) -> After<Fenced> {
        let Stage::Started { lease_until } = self.stage else {
            return After::Unchanged(Fenced::ClaimLost);
        };
        let same_lease = matches!(
            seen.state,
            State::Started { lease_until: seen, .. } if seen == timestamp(lease_until)
        );
        if !same_lease || now < lease_until || self.owner != seen.owner {
            return After::Unchanged(Fenced::ClaimLost);
        }
        match resolution {
            Resolution::Completed(outcome) => self.finish(outcome, None, now),
            Resolution::Released => self.free(),
        }
        After::Changed(Fenced::Applied)
    }

    /// When the record may be removed, if nothing happens to it until then.
    pub(super) fn is_expired(&self, now: Micros) -> bool {
        let live = matches!(self.stage, Stage::Started { lease_until } if lease_until > now);
        self.expires_at <= now && !live
    }

    pub(super) fn is_unresolved(&self) -> bool {
        matches!(self.stage, Stage::Started { .. })
    }

    /// The record as callers see it.
    pub(super) fn into_record(self, key: ScopedKey, now: Micros) -> Record {
        let state = match self.stage {
            Stage::Started { lease_until } => State::Started {
                lease_until: timestamp(lease_until),
                lease_left: Duration::from_micros(
                    u64::try_from(lease_until.saturating_sub(now)).unwrap_or(0),
                ),
            },
            Stage::Completed {
                outcome,
                completed_at,
            } => State::Completed {
                outcome,
                completed_at: timestamp(completed_at),
            },
            Stage::Released => State::Released,
        };
        Record::new(
            key,
            self.fingerprint,
            self.owner,
            self.attempt,
            state,
            self.notes,
            timestamp(self.created_at),
            timestamp(self.expires_at),
        )
    }

    #[cfg(feature = "testing")]
    pub(super) fn age(&mut self, by: Micros) {
        let earlier = |time: &mut Micros| *time = time.saturating_sub(by).max(0);
        earlier(&mut self.created_at);
        earlier(&mut self.expires_at);
        match &mut self.stage {
            Stage::Started { lease_until } => earlier(lease_until),
            Stage::Completed { completed_at, .. } => earlier(completed_at),
            Stage::Released => {}
        }
    }

    fn fenced(&mut self, owner: &Owner, apply: impl FnOnce(&mut Self)) -> After<Fenced> {
        if self.owner != *owner || !self.is_unresolved() {
            return After::Unchanged(Fenced::ClaimLost);
        }
        apply(self);
        After::Changed(Fenced::Applied)
    }

    fn finish(&mut self, outcome: &Outcome, retention: Option<Duration>, now: Micros) {
        if let Some(retention) = retention {
            self.expires_at = now.saturating_add(micros(retention));
        } else if self.expires_at <= now {
            self.expires_at = now.saturating_add(self.retention);
        }
        self.stage = Stage::Completed {
            outcome: outcome.clone(),
            completed_at: now,
        };
    }

    fn free(&mut self) {
        self.stage = Stage::Released;
        // The next claim starts without notes, so there is nobody left to read them.
        self.notes = Notes::default();
    }
}

fn timestamp(micros: Micros) -> Timestamp {
    // Not negative: the clock starts at the epoch, and a stored time that is was refused.
    Timestamp::from_micros(u64::try_from(micros).unwrap_or(0))
}
