//! A store for reading, with a switch for every mistake that a store author can make.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Fenced, Fingerprint, Notes,
    OnAbandoned, Outcome, Owner, Purged, Record, Resolution, ScopedKey, State, Store, StoreError,
    StoreProperties, Timestamp, async_trait,
};

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    // Claiming.
    CheckThenInsert,
    AttemptsBeginAtZero,
    ClaimWithoutRecord,
    LosersRenewTheLease,
    LiveClaimsAreTakenOver,
    OtherFingerprintReplaces,
    NotReentrant,
    ReentrantOnlyWhileLive,
    ReentrantKeepsTheLease,
    ReentrantDropsTheNotes,
    ReentrantIgnoresTheFingerprint,
    ReentrantAfterCompletion,
    HoldIsIgnored,
    RerunIsIgnored,
    TakeoverIgnoresTheFingerprint,
    TakeoverDropsTheNotes,
    TakeoverKeepsTheAttempt,
    ReleaseForgetsTheAttempt,
    ExpiredStandsUntilPurged,
    RetentionRunsFromTheFirstClaim,
    RetentionIsTheLease,
    // Fencing.
    RenewByAnyone,
    CompleteByAnyone,
    ReleaseByAnyone,
    AbandonByAnyone,
    AnnotateByAnyone,
    CheckpointByAnyone,
    FencingNeedsALiveLease,
    FencingIgnoresTheState,
    RenewalAddsToTheLease,
    RenewalOnlyOnce,
    CompletionMakesARecord,
    AnnotatingKeepsTheFirst,
    CheckpointsAreSorted,
    CheckpointsAreAppended,
    // Completing.
    CompletionLosesTheFingerprint,
    CompletionLosesTheNotes,
    OutcomesLoseTheirTrailers,
    LargeOutcomesAreRefused,
    RepeatedCompletionIsLost,
    CompletionOverwrites,
    LookThenComplete,
    // Releasing.
    RepeatedReleaseIsLost,
    ReleaseOfNothingIsLost,
    AbandoningDoesNothing,
    AbandoningMovesTheLease,
    // Keeping.
    RenewalMovesTheExpiry,
    CompletionMovesTheExpiry,
    CompletionNeverMovesTheExpiry,
    RetentionOfTheCompletionIsIgnored,
    ZeroIsNoRetention,
    ExpiryIgnoresTheLease,
    LookupShowsTheExpired,
    PurgeDoesNothing,
    PurgeIgnoresItsLimit,
    PurgeCountsNoUnresolved,
    PurgeTakesTheAbandoned,
    PurgeTakesLiveClaims,
    // Reconciling.
    PagesOverlap,
    PagesByOffset,
    ExpiredIsNotListed,
    ListedWithoutNotes,
    ResolutionCountsAsAttempt,
    ResolvedReleaseRemoves,
    ResolutionNeverMovesTheExpiry,
    ResolveIgnoresALiveLease,
    ResolveIgnoresTheLease,
    ResolveIgnoresTheOwner,
    ResolveIgnoresTheState,
    LookThenResolve,
    // Keys.
    CorrelationIsAscii,
    LookupMakesARecord,
    KeysIgnoreCase,
    PartsAreConcatenated,
    RemoveKeepsLiveClaims,
    RemoveTakesAPattern,
    // Erasing.
    EraseKeepsLiveClaims,
    EraseTakesAPattern,
    EraseIgnoresTheNamespace,
    EraseIgnoresItsLimit,
    EraseGivesUpEarly,
    // Waiting.
    ChangedWaitsForAnyChange,
    ChangedSeesCompletionsOnly,
    ChangedMissesCompletions,
    ChangedIgnoresTheLease,
    ChangedIgnoresItsLimit,
    ChangedWakesOne,
    LeavingTakesOthersAlong,
}

#[derive(Clone)]
struct Row {
    record: Record,
    retention: Duration,
    renewals: usize,
}

#[derive(Clone)]
pub struct Naive(Arc<World>);

struct World {
    fault: Option<Fault>,
    rows: Mutex<BTreeMap<Vec<u8>, Row>>,
    start: Instant,
    watchers: Mutex<Arc<Notify>>,
}

impl Naive {
    pub fn new(fault: Option<Fault>) -> Self {
        Self(Arc::new(World {
            fault,
            rows: Mutex::default(),
            start: Instant::now(),
            watchers: Mutex::default(),
        }))
    }

    fn has(&self, fault: Fault) -> bool {
        self.0.fault == Some(fault)
    }

    fn now(&self) -> u64 {
        // Far enough from zero for records that are aged by days.
        1_000_000_000_000_000 + self.0.start.elapsed().as_micros() as u64
    }

    fn id(&self, key: &ScopedKey) -> Vec<u8> {
        if self.has(Fault::KeysIgnoreCase) {
            return key.as_bytes().to_ascii_lowercase();
        }
        if self.has(Fault::PartsAreConcatenated) {
            return [key.namespace(), key.scope(), key.key()].concat().into();
        }
        key.as_bytes().to_vec()
    }

    /// Looks at a row, decides, writes: in one step, unless the fault is that it is not.
    async fn step<R>(
        &self,
        key: &ScopedKey,
        in_two_steps: Fault,
        decide: impl FnOnce(Option<Row>, u64) -> (Option<Row>, R),
    ) -> R {
        let (id, now) = (self.id(key), self.now());
        let looked = if self.has(in_two_steps) {
            let looked = self.0.rows.lock().unwrap().get(&id).cloned();
            tokio::task::yield_now().await;
            Some(looked)
        } else {
            None
        };
        let mut rows = self.0.rows.lock().unwrap();
        let looked = looked.unwrap_or_else(|| rows.get(&id).cloned());
        let (written, reply) = decide(looked, now);
        match written {
            Some(row) => rows.insert(id, row),
            None => rows.remove(&id),
        };
        drop(rows);
        let watchers = self.0.watchers.lock().unwrap().clone();
        if self.has(Fault::ChangedWakesOne) {
            watchers.notify_one();
        } else {
            watchers.notify_waiters();
        }
        reply
    }

    async fn fenced(
        &self,
        claim: &Claim,
        by_anyone: Fault,
        change: impl FnOnce(&mut Row, u64),
    ) -> Fenced {
        self.step(claim.key(), Fault::CheckThenInsert, |row, now| {
            let Some(mut row) = row else {
                return (None, Fenced::ClaimLost);
            };
            let held = self.holds(&row, claim, by_anyone, now);
            if held {
                change(&mut row, now);
            }
            let fenced = if held {
                Fenced::Applied
            } else {
                Fenced::ClaimLost
            };
            (Some(row), fenced)
        })
        .await
    }

    fn holds(&self, row: &Row, claim: &Claim, by_anyone: Fault, now: u64) -> bool {
        let owner = row.record.owner == *claim.owner() || self.has(by_anyone);
        let state = match row.record.state {
            State::Started { .. } if self.has(Fault::FencingNeedsALiveLease) => is_live(row, now),
            State::Started { .. } => true,
            _ => self.has(Fault::FencingIgnoresTheState),
        };
        owner && state
    }

    fn is_expired(&self, row: &Row, now: u64) -> bool {
        let over = if self.has(Fault::RetentionIsTheLease) {
            matches!(row.record.state, State::Started { .. })
        } else {
            row.record.expires_at.as_micros() <= now
        };
        over && (!is_live(row, now) || self.has(Fault::ExpiryIgnoresTheLease))
    }

    fn decide(&self, request: &ClaimRequest, row: Option<Row>, now: u64) -> (Option<Row>, Claimed) {
        let Some(row) = row else {
            let first = u32::from(!self.has(Fault::AttemptsBeginAtZero));
            return self.grant(request, first, None, now);
        };
        let next = row.record.attempt + 1;
        let afresh = matches!(row.record.state, State::Released)
            || (self.is_expired(&row, now) && !self.has(Fault::ExpiredStandsUntilPurged));
        if afresh {
            return self.grant(request, next, None, now);
        }
        let same = row.record.fingerprint == request.fingerprint;
        if !same && self.has(Fault::OtherFingerprintReplaces) {
            return self.grant(request, next, None, now);
        }
        let started = matches!(row.record.state, State::Started { .. })
            || self.has(Fault::ReentrantAfterCompletion);
        let mine = row.record.owner == request.owner
            && (same || self.has(Fault::ReentrantIgnoresTheFingerprint))
            && (is_live(&row, now) || !self.has(Fault::ReentrantOnlyWhileLive))
            && !self.has(Fault::NotReentrant);
        if started && mine {
            return self.grant(request, row.record.attempt, Some(row), now);
        }
        let over = !is_live(&row, now) || self.has(Fault::LiveClaimsAreTakenOver);
        let rerun = match request.on_abandoned {
            OnAbandoned::Rerun => !self.has(Fault::RerunIsIgnored),
            _ => self.has(Fault::HoldIsIgnored),
        };
        let same = same || self.has(Fault::TakeoverIgnoresTheFingerprint);
        if matches!(row.record.state, State::Started { .. }) && over && rerun && same {
            let kept = self.has(Fault::TakeoverKeepsTheAttempt);
            let attempt = if kept { row.record.attempt } else { next };
            return self.grant(request, attempt, Some(row), now);
        }
        let shown = self.shown(&row, now);
        let mut row = row;
        if self.has(Fault::LosersRenewTheLease) {
            lease(&mut row, now + micros(request.lease));
        }
        (Some(row), Claimed::Existing(shown))
    }

    fn grant(
        &self,
        request: &ClaimRequest,
        attempt: u32,
        before: Option<Row>,
        now: u64,
    ) -> (Option<Row>, Claimed) {
        let again = before
            .as_ref()
            .is_some_and(|row| row.record.owner == request.owner);
        let drops = if again {
            Fault::ReentrantDropsTheNotes
        } else {
            Fault::TakeoverDropsTheNotes
        };
        let record = before.as_ref().map(|row| row.record.clone());
        let record = record.unwrap_or_else(|| {
            Record::new(
                request.key.clone(),
                request.fingerprint,
                request.owner,
                attempt,
                State::Released,
                Notes::default(),
                at(now),
                at(now + micros(request.retention)),
            )
        });
        let mut row = Row {
            record,
            retention: request.retention,
            renewals: 0,
        };
        row.record.owner = request.owner;
        row.record.attempt = attempt;
        if !self.has(Fault::RetentionRunsFromTheFirstClaim) {
            row.record.expires_at = at(now + micros(request.retention));
        }
        if self.has(drops) {
            row.record.notes = Notes::default();
        }
        if !(again && self.has(Fault::ReentrantKeepsTheLease)) {
            lease(&mut row, now + micros(request.lease));
        }
        let granted = Claimed::Acquired {
            claim: Claim::new(request.key.clone(), request.owner, attempt),
            notes: row.record.notes.clone(),
        };
        let recorded = !self.has(Fault::ClaimWithoutRecord);
        (recorded.then_some(row), granted)
    }

    fn finish(&self, row: &mut Row, outcome: &Outcome, retention: Option<Duration>, now: u64) {
        let mut outcome = outcome.clone();
        if self.has(Fault::OutcomesLoseTheirTrailers)
            && let (Some(status), false) = (outcome.status(), outcome.is_tombstone())
        {
            let headers = outcome.headers().collect();
            outcome = Outcome::response(status, &headers, &[&outcome.body()], None);
        }
        row.record.state = State::Completed {
            outcome,
            completed_at: at(now),
        };
        if self.has(Fault::CompletionLosesTheFingerprint) {
            row.record.fingerprint = Fingerprint::of(&[]);
        }
        if self.has(Fault::CompletionLosesTheNotes) {
            row.record.notes = Notes::default();
        }
        let zero = self.has(Fault::ZeroIsNoRetention);
        let retention = retention.filter(|retention| !(zero && retention.is_zero()));
        let passed = row.record.expires_at.as_micros() <= now;
        let again = (passed && !self.has(Fault::CompletionNeverMovesTheExpiry))
            || self.has(Fault::CompletionMovesTheExpiry);
        match retention {
            Some(retention) if !self.has(Fault::RetentionOfTheCompletionIsIgnored) => {
                row.record.expires_at = at(now + micros(retention));
            }
            _ if again => row.record.expires_at = at(now + micros(row.retention)),
            _ => {}
        }
    }

    fn shown(&self, row: &Row, now: u64) -> Record {
        let mut record = row.record.clone();
        if let State::Started {
            lease_until,
            lease_left,
        } = &mut record.state
        {
            *lease_left = Duration::from_micros(lease_until.as_micros().saturating_sub(now));
        }
        record
    }
}

#[async_trait]
impl Store for Naive {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("naive", false, false)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let decide = |row, now| self.decide(request, row, now);
        Ok(self
            .step(&request.key, Fault::CheckThenInsert, decide)
            .await)
    }

    async fn renew(&self, claim: &Claim, by: Duration) -> Result<Fenced, StoreError> {
        if self.has(Fault::RenewalOnlyOnce) {
            let id = self.id(claim.key());
            let rows = self.0.rows.lock().unwrap();
            if rows.get(&id).is_some_and(|row| row.renewals > 0) {
                return Ok(Fenced::ClaimLost);
            }
        }
        let renewed = self.fenced(claim, Fault::RenewByAnyone, |row, now| {
            row.renewals += 1;
            let adds = self.has(Fault::RenewalAddsToTheLease);
            let from = match row.record.state {
                State::Started { lease_until, .. } if adds => lease_until.as_micros(),
                _ => now,
            };
            lease(row, from + micros(by));
            if self.has(Fault::RenewalMovesTheExpiry) {
                row.record.expires_at = at(now + micros(row.retention));
            }
        });
        Ok(renewed.await)
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        if self.has(Fault::LargeOutcomesAreRefused) && outcome.as_bytes().len() > 65_536 {
            return Err(StoreError::unavailable("the value is too long"));
        }
        let decide = |row: Option<Row>, now| {
            let Some(mut row) = row else {
                if !self.has(Fault::CompletionMakesARecord) {
                    return (None, Completion::ClaimLost);
                }
                let request = ClaimRequest::new(claim.key().clone(), Fingerprint::of(&[]));
                return (self.grant(&request, 1, None, now).0, Completion::ClaimLost);
            };
            if let State::Completed { outcome, .. } = &row.record.state {
                let standing = Completion::Standing(outcome.clone());
                if self.has(Fault::RepeatedCompletionIsLost) {
                    return (Some(row), Completion::ClaimLost);
                }
                if !self.has(Fault::CompletionOverwrites) {
                    return (Some(row), standing);
                }
            }
            let overwrites = self.has(Fault::CompletionOverwrites)
                && matches!(row.record.state, State::Completed { .. });
            if !overwrites && !self.holds(&row, claim, Fault::CompleteByAnyone, now) {
                return (Some(row), Completion::ClaimLost);
            }
            self.finish(&mut row, outcome, retention, now);
            (Some(row), Completion::Recorded)
        };
        let completed = self.step(claim.key(), Fault::LookThenComplete, decide);
        Ok(completed.await)
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let decide = |row: Option<Row>, now| {
            let Some(mut row) = row else {
                let lost = self.has(Fault::ReleaseOfNothingIsLost);
                let fenced = if lost {
                    Fenced::ClaimLost
                } else {
                    Fenced::Applied
                };
                return (None, fenced);
            };
            let again = row.record.state == State::Released && row.record.owner == *claim.owner();
            if again && !self.has(Fault::RepeatedReleaseIsLost) {
                return (Some(row), Fenced::Applied);
            }
            if !self.holds(&row, claim, Fault::ReleaseByAnyone, now) {
                return (Some(row), Fenced::ClaimLost);
            }
            if self.has(Fault::ReleaseForgetsTheAttempt) {
                return (None, Fenced::Applied);
            }
            row.record.state = State::Released;
            (Some(row), Fenced::Applied)
        };
        let released = self.step(claim.key(), Fault::CheckThenInsert, decide);
        Ok(released.await)
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let abandoned = self.fenced(claim, Fault::AbandonByAnyone, |row, now| {
            let moves = self.has(Fault::AbandoningMovesTheLease) || is_live(row, now);
            if moves && !self.has(Fault::AbandoningDoesNothing) {
                // So that "now" is another one for a repetition in the same instant.
                lease(row, now - row.renewals as u64);
                row.renewals += 1;
            }
        });
        Ok(abandoned.await)
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let mut correlation = correlation.to_owned();
        if self.has(Fault::CorrelationIsAscii) {
            correlation.retain(|char| char.is_ascii());
        }
        let annotated = self.fenced(claim, Fault::AnnotateByAnyone, |row, _| {
            let standing = &mut row.record.notes.correlation;
            if standing.is_none() || !self.has(Fault::AnnotatingKeepsTheFirst) {
                *standing = Some(correlation);
            }
        });
        Ok(annotated.await)
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let checkpointed = self.fenced(claim, Fault::CheckpointByAnyone, |row, _| {
            let notes = &mut row.record.notes;
            if self.has(Fault::CheckpointsAreAppended) {
                notes.checkpoints.push((name.to_owned(), data.clone()));
            } else {
                notes.set_checkpoint(name, data.clone());
            }
            if self.has(Fault::CheckpointsAreSorted) {
                notes.checkpoints.sort();
            }
        });
        Ok(checkpointed.await)
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        if limit == 0 {
            return Ok(AbandonedPage::new(Vec::new(), None));
        }
        let now = self.now();
        let rows = self.0.rows.lock().unwrap();
        let listed = rows
            .iter()
            .filter(|(_, row)| self.shown(row, now).is_abandoned())
            .filter(|(_, row)| !(self.has(Fault::ExpiredIsNotListed) && self.is_expired(row, now)));
        let mut listed: Vec<_> = listed.collect();
        let mut skipped = 0;
        if self.has(Fault::PagesByOffset) {
            let seen = after.map(|cursor| cursor.as_bytes().try_into().unwrap());
            skipped = seen.map_or(0, u64::from_be_bytes) as usize;
            listed.drain(..skipped.min(listed.len()));
        } else if let Some(after) = after {
            let overlap = self.has(Fault::PagesOverlap);
            listed.retain(|(id, _)| {
                id.as_slice() > after.as_bytes() || (overlap && id.as_slice() == after.as_bytes())
            });
        }
        let more = listed.len() > limit;
        listed.truncate(limit);
        let last = listed.last().map(|(id, _)| id.to_vec());
        let next = if self.has(Fault::PagesByOffset) {
            Some(((skipped + listed.len()) as u64).to_be_bytes().to_vec())
        } else {
            last
        };
        let records = listed.iter().map(|(_, row)| {
            let mut record = self.shown(row, now);
            if self.has(Fault::ListedWithoutNotes) {
                record.notes = Notes::default();
            }
            record
        });
        let next = next.filter(|_| more).map(Cursor::new);
        Ok(AbandonedPage::new(records.collect(), next))
    }

    async fn resolve(&self, seen: &Record, resolution: &Resolution) -> Result<Fenced, StoreError> {
        let decide = |row: Option<Row>, now| {
            let Some(mut row) = row else {
                return (None, Fenced::ClaimLost);
            };
            let lease_is = |record: &Record| match record.state {
                State::Started { lease_until, .. } => Some(lease_until),
                _ => None,
            };
            let started = lease_is(&row.record).is_some();
            let fits = (started || self.has(Fault::ResolveIgnoresTheState))
                && (!is_live(&row, now) || self.has(Fault::ResolveIgnoresALiveLease))
                && (lease_is(&row.record) == lease_is(seen)
                    || !started
                    || self.has(Fault::ResolveIgnoresTheLease))
                && (row.record.owner == seen.owner || self.has(Fault::ResolveIgnoresTheOwner));
            if !fits {
                return (Some(row), Fenced::ClaimLost);
            }
            let expires_at = row.record.expires_at;
            match resolution {
                Resolution::Completed(outcome) => self.finish(&mut row, outcome, None, now),
                _ if self.has(Fault::ResolvedReleaseRemoves) => return (None, Fenced::Applied),
                _ => row.record.state = State::Released,
            }
            if self.has(Fault::ResolutionNeverMovesTheExpiry) {
                row.record.expires_at = expires_at;
            }
            if self.has(Fault::ResolutionCountsAsAttempt) {
                row.record.attempt += 1;
            }
            (Some(row), Fenced::Applied)
        };
        Ok(self.step(&seen.key, Fault::LookThenResolve, decide).await)
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        if self.has(Fault::LookupMakesARecord) {
            let request = ClaimRequest::new(key.clone(), Fingerprint::of(&[]));
            let _ = self.claim(&request).await?;
        }
        let (id, now) = (self.id(key), self.now());
        let rows = self.0.rows.lock().unwrap();
        let row = rows
            .get(&id)
            .filter(|row| !self.is_expired(row, now) || self.has(Fault::LookupShowsTheExpired));
        Ok(row.map(|row| self.shown(row, now)))
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        if self.has(Fault::RemoveTakesAPattern) && key.key().ends_with('*') {
            let prefix = key.as_bytes()[..key.as_bytes().len() - 1].to_vec();
            let mut rows = self.0.rows.lock().unwrap();
            rows.retain(|id, _| !id.starts_with(&prefix));
            return Ok(true);
        }
        let keeps = self.has(Fault::RemoveKeepsLiveClaims);
        let decide = |row: Option<Row>, now| {
            let left = row.clone().filter(|row| keeps && is_live(row, now));
            (left, row.is_some())
        };
        Ok(self.step(key, Fault::CheckThenInsert, decide).await)
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        let now = self.now();
        let mut limit = limit;
        if self.has(Fault::EraseIgnoresItsLimit) && limit > 0 {
            limit = usize::MAX;
        }
        let mut erased = 0;
        let mut rows = self.0.rows.lock().unwrap();
        let looks = if self.has(Fault::EraseGivesUpEarly) {
            3
        } else {
            usize::MAX
        };
        let mut looked = 0;
        rows.retain(|_, row| {
            let key = &row.record.key;
            looked += 1;
            let of_scope = key.scope() == scope
                || (self.has(Fault::EraseTakesAPattern) && key.scope().starts_with(scope));
            let goes = of_scope
                && (key.namespace().starts_with(within)
                    || self.has(Fault::EraseIgnoresTheNamespace))
                && !(self.has(Fault::EraseKeepsLiveClaims) && is_live(row, now))
                && looked <= looks
                && erased < limit;
            erased += usize::from(goes);
            !goes
        });
        Ok(erased)
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        if self.has(Fault::PurgeDoesNothing) {
            return Ok(Purged::default());
        }
        let now = self.now();
        let mut limit = limit;
        if self.has(Fault::PurgeIgnoresItsLimit) && limit > 0 {
            limit = usize::MAX;
        }
        let mut purged = Purged::default();
        let mut rows = self.0.rows.lock().unwrap();
        rows.retain(|_, row| {
            let over = row.record.expires_at.as_micros() <= now;
            let goes = (over && self.has(Fault::PurgeTakesLiveClaims))
                || (self.has(Fault::PurgeTakesTheAbandoned) && self.shown(row, now).is_abandoned())
                || self.is_expired(row, now);
            if !goes || purged.removed == limit {
                return true;
            }
            purged.removed += 1;
            let unresolved = matches!(row.record.state, State::Started { .. });
            if unresolved && !self.has(Fault::PurgeCountsNoUnresolved) {
                purged.unresolved += 1;
            }
            false
        });
        Ok(purged)
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let _leaving = self
            .has(Fault::LeavingTakesOthersAlong)
            .then(|| Leaving(self.clone()));
        let give_up = Instant::now() + max;
        let id = self.id(key);
        let first = self
            .0
            .rows
            .lock()
            .unwrap()
            .get(&id)
            .map(|row| row.record.clone());
        loop {
            let watchers = self.0.watchers.lock().unwrap().clone();
            let notified = watchers.notified();
            let row = self.0.rows.lock().unwrap().get(&id).cloned();
            let now = self.now();
            let waits = match &row {
                _ if self.has(Fault::ChangedWaitsForAnyChange) => {
                    row.as_ref().map(|row| &row.record) == first.as_ref()
                }
                Some(row) => match row.record.state {
                    State::Started { .. } => row.record.owner == *seen && is_live(row, now),
                    State::Completed { .. } => self.has(Fault::ChangedMissesCompletions),
                    _ => self.has(Fault::ChangedSeesCompletionsOnly),
                },
                None => self.has(Fault::ChangedSeesCompletionsOnly) && first.is_some(),
            };
            let gone_by = Instant::now() >= give_up && !self.has(Fault::ChangedIgnoresItsLimit);
            if !waits || gone_by {
                return Ok(());
            }
            let mut until = give_up;
            if self.has(Fault::ChangedIgnoresItsLimit) {
                until += Duration::from_secs(86_400 * 365);
            }
            if let Some(Row { record, .. }) = &row
                && let State::Started { lease_until, .. } = record.state
                && !self.has(Fault::ChangedIgnoresTheLease)
            {
                let left = lease_until.as_micros().saturating_sub(now).max(1_000);
                until = until.min(Instant::now() + Duration::from_micros(left));
            }
            tokio::select! {
                () = notified => {}
                () = sleep_until(until) => {}
            }
        }
    }
}

struct Leaving(Naive);

impl Drop for Leaving {
    fn drop(&mut self) {
        *self.0.0.watchers.lock().unwrap() = Arc::default();
    }
}

#[async_trait]
impl Harness for Naive {
    type Store = Self;

    fn store(&self) -> &Self {
        self
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        let mut rows = self.0.rows.lock().unwrap();
        // Where the fault is that nothing was recorded, there is nothing to age.
        let Some(row) = rows.get_mut(&self.id(key)) else {
            return;
        };
        let earlier = |time: &mut Timestamp| *time = at(time.as_micros() - micros(by));
        earlier(&mut row.record.created_at);
        earlier(&mut row.record.expires_at);
        match &mut row.record.state {
            State::Started { lease_until, .. } => earlier(lease_until),
            State::Completed { completed_at, .. } => earlier(completed_at),
            _ => {}
        }
    }
}

impl std::fmt::Debug for Naive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Naive({:?})", self.0.fault)
    }
}

fn is_live(row: &Row, now: u64) -> bool {
    matches!(row.record.state, State::Started { lease_until, .. } if now < lease_until.as_micros())
}

fn lease(row: &mut Row, until: u64) {
    row.record.state = State::Started {
        lease_until: at(until),
        lease_left: Duration::ZERO,
    };
}

fn at(micros: u64) -> Timestamp {
    Timestamp::from_micros(micros)
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}
