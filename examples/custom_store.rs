//! A store of your own: the sixteen rules of [`Store`], kept by a map behind a mutex.
//!
//! ```text
//! cargo run --example custom_store
//! ```
//!
//! It forgets everything at the end of the process, as [`MemoryStore`](tower_idempotency::MemoryStore)
//! does, and has no bound. What there is to see is how little a store has to know: it answers "granted"
//! or "this is what I have", and judges nothing. In a database, what happens here under the lock is one
//! statement.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Failure, Fenced, Fingerprint,
    Idempotency, IdempotencyKey, Notes, OnAbandoned, Outcome, Owner, Purged, Record, Resolution,
    ScopedKey, State, Store, StoreError, StoreErrorKind, StoreProperties, Timestamp, async_trait,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let idempotency = Idempotency::new(MapStore::default());
    let key = IdempotencyKey::new("order-4711")?.scoped("points");
    let payload = br#"{"order":4711,"points":100}"#;
    for _ in 0..2 {
        let work = |_attempt| async { Ok::<u32, Failure<String>>(100) };
        let ran = idempotency
            .run(&key, Fingerprint::of(&[payload]), work)
            .await?;
        println!("{ran:?}");
    }
    Ok(())
}

#[derive(Debug, Default)]
struct MapStore {
    rows: Mutex<HashMap<ScopedKey, Row>>,
}

#[derive(Debug)]
struct Row {
    /// All but how much of the lease is left, which changes while nobody looks.
    record: Record,
    /// What the last granted claim asked for.
    retention: Duration,
}

#[async_trait]
impl Store for MapStore {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("map", false, false)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let now = now();
        let mut rows = self.lock();
        let attempt = match rows.get_mut(&request.key) {
            None => 1,
            Some(row) if row.is_free(now) => row.record.attempt + 1,
            Some(row) => return Ok(row.claim(request, now)),
        };
        let record = Record::new(
            request.key.clone(),
            request.fingerprint,
            request.owner,
            attempt,
            State::Released,
            Notes::default(),
            now,
            now,
        );
        let retention = request.retention;
        let mut row = Row { record, retention };
        let claimed = row.grant(request, now);
        rows.insert(request.key.clone(), row);
        Ok(claimed)
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        Ok(self.fenced(claim, |row, now| row.start(now, lease)))
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let now = now();
        let mut rows = self.lock();
        Ok(match rows.get_mut(claim.key()) {
            Some(row) if row.is_held_by(claim.owner()) => {
                row.complete(outcome.clone(), retention, now);
                Completion::Recorded
            }
            Some(row) => match &row.record.state {
                State::Completed { outcome, .. } => Completion::Standing(outcome.clone()),
                _ => Completion::ClaimLost,
            },
            None => Completion::ClaimLost,
        })
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let mut rows = self.lock();
        let Some(row) = rows.get_mut(claim.key()) else {
            return Ok(Fenced::Applied);
        };
        let is_own = row.record.owner == *claim.owner();
        Ok(match row.record.state {
            State::Started { .. } | State::Released if is_own => {
                row.record.state = State::Released;
                Fenced::Applied
            }
            _ => Fenced::ClaimLost,
        })
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        Ok(self.fenced(claim, |row, now| {
            if row.lease_left(now) > Duration::ZERO {
                row.start(now, Duration::ZERO);
            }
        }))
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        Ok(self.fenced(claim, |row, _| {
            row.record.notes.correlation = Some(correlation.to_owned());
        }))
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        Ok(self.fenced(claim, |row, _| {
            row.record.notes.set_checkpoint(name, data.clone());
        }))
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let now = now();
        // In the order of the keys, which no insertion or removal disturbs.
        let mut records: Vec<Record> = self
            .lock()
            .values()
            .map(|row| row.seen(now))
            .filter(Record::is_abandoned)
            .filter(|record| after.is_none_or(|after| record.key.as_bytes() > after.as_bytes()))
            .collect();
        records.sort_by(|a, b| a.key.as_bytes().cmp(b.key.as_bytes()));
        let more = records.len() > limit;
        records.truncate(limit);
        let last = records.last().filter(|_| more);
        let next = last.map(|last| Cursor::new(last.key.as_bytes().to_vec()));
        Ok(AbandonedPage::new(records, next))
    }

    async fn resolve(&self, seen: &Record, how: &Resolution) -> Result<Fenced, StoreError> {
        let now = now();
        let mut rows = self.lock();
        let Some(row) = rows.get_mut(&seen.key) else {
            return Ok(Fenced::ClaimLost);
        };
        let (owner, until) = (row.record.owner, row.lease_until());
        let stands = owner == seen.owner && until.is_some() && until == lease_until(seen);
        if !stands || row.lease_left(now) > Duration::ZERO {
            return Ok(Fenced::ClaimLost);
        }
        match how {
            Resolution::Completed(outcome) => row.complete(outcome.clone(), None, now),
            Resolution::Released => row.record.state = State::Released,
            _ => {
                return Err(StoreError::new(
                    StoreErrorKind::Other,
                    "an unknown resolution",
                ));
            }
        }
        Ok(Fenced::Applied)
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let now = now();
        let rows = self.lock();
        let row = rows.get(key).filter(|row| !row.is_expired(now));
        Ok(row.map(|row| row.seen(now)))
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        Ok(self.lock().remove(key).is_some())
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        let mut rows = self.lock();
        let of_it = |key: &&ScopedKey| key.scope() == scope && key.namespace().starts_with(within);
        let erased: Vec<ScopedKey> = rows.keys().filter(of_it).take(limit).cloned().collect();
        for key in &erased {
            rows.remove(key);
        }
        Ok(erased.len())
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        let now = now();
        let mut rows = self.lock();
        let expired = rows.iter().filter(|(_, row)| row.is_expired(now));
        let expired: Vec<ScopedKey> = expired.map(|(key, _)| key.clone()).take(limit).collect();
        let removed = expired.iter().filter_map(|key| rows.remove(key));
        let unresolved = removed.filter(|row| row.lease_until().is_some()).count();
        Ok(Purged::new(expired.len(), unresolved))
    }

    async fn changed(&self, _: &ScopedKey, _: &Owner, max: Duration) -> Result<(), StoreError> {
        // Whoever waits looks again: too early is allowed.
        tokio::time::sleep(max.min(Duration::from_millis(20))).await;
        Ok(())
    }
}

impl MapStore {
    fn lock(&self) -> MutexGuard<'_, HashMap<ScopedKey, Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rule 6: only on a started record of this owner.
    fn fenced(&self, claim: &Claim, change: impl FnOnce(&mut Row, Timestamp)) -> Fenced {
        let now = now();
        match self.lock().get_mut(claim.key()) {
            Some(row) if row.is_held_by(claim.owner()) => {
                change(row, now);
                Fenced::Applied
            }
            _ => Fenced::ClaimLost,
        }
    }
}

impl Row {
    /// Rules 3 to 5, for a record that is neither expired nor released.
    fn claim(&mut self, request: &ClaimRequest, now: Timestamp) -> Claimed {
        let is_same = self.record.fingerprint == request.fingerprint;
        let is_over = self.lease_left(now).is_zero();
        match self.record.state {
            State::Started { .. } if is_same && self.record.owner == request.owner => {
                self.grant(request, now)
            }
            State::Started { .. }
                if is_same && is_over && request.on_abandoned == OnAbandoned::Rerun =>
            {
                self.record.attempt += 1;
                self.grant(request, now)
            }
            _ => Claimed::Existing(self.seen(now)),
        }
    }

    fn grant(&mut self, request: &ClaimRequest, now: Timestamp) -> Claimed {
        self.record.owner = request.owner;
        self.record.expires_at = later(now, request.retention);
        self.retention = request.retention;
        self.start(now, request.lease);
        Claimed::Acquired {
            claim: Claim::new(request.key.clone(), request.owner, self.record.attempt),
            notes: self.record.notes.clone(),
        }
    }

    fn start(&mut self, now: Timestamp, lease: Duration) {
        self.record.state = State::Started {
            lease_until: later(now, lease),
            lease_left: lease,
        };
    }

    fn complete(&mut self, outcome: Outcome, retention: Option<Duration>, now: Timestamp) {
        if retention.is_some() || self.record.expires_at <= now {
            let retention = retention.unwrap_or(self.retention);
            self.record.expires_at = later(now, retention);
        }
        self.record.state = State::Completed {
            outcome,
            completed_at: now,
        };
    }

    /// Expired or released: as good as none, but for the attempt.
    fn is_free(&self, now: Timestamp) -> bool {
        matches!(self.record.state, State::Released) || self.is_expired(now)
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        self.record.expires_at <= now && self.lease_left(now).is_zero()
    }

    fn is_held_by(&self, owner: &Owner) -> bool {
        self.lease_until().is_some() && self.record.owner == *owner
    }

    fn lease_until(&self) -> Option<Timestamp> {
        lease_until(&self.record)
    }

    fn lease_left(&self, now: Timestamp) -> Duration {
        let until = self.lease_until().map_or(0, Timestamp::as_micros);
        Duration::from_micros(until.saturating_sub(now.as_micros()))
    }

    /// The record as it is now.
    fn seen(&self, now: Timestamp) -> Record {
        let mut record = self.record.clone();
        if let State::Started { lease_left, .. } = &mut record.state {
            *lease_left = self.lease_left(now);
        }
        record
    }
}

fn lease_until(record: &Record) -> Option<Timestamp> {
    match record.state {
        State::Started { lease_until, .. } => Some(lease_until),
        _ => None,
    }
}

/// Rule 10: the store owns the clock. A wall clock that is set back makes leases longer; a store that
/// several hosts share takes the database's clock.
fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    later(Timestamp::from_micros(0), since.unwrap_or_default())
}

fn later(instant: Timestamp, by: Duration) -> Timestamp {
    let by = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
    Timestamp::from_micros(instant.as_micros().saturating_add(by))
}

/// The rules as tests: `cargo test --example custom_store --features testing`.
#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::sync::Arc;

    use tower_idempotency::store_conformance;
    use tower_idempotency::testing::Harness;

    use super::*;

    struct Map(Arc<MapStore>);

    #[async_trait]
    impl Harness for Map {
        type Store = Arc<MapStore>;

        fn store(&self) -> &Arc<MapStore> {
            &self.0
        }

        async fn age(&self, key: &ScopedKey, by: Duration) {
            let mut rows = self.0.lock();
            let row = rows.get_mut(key).expect("a record to age");
            let earlier = |instant: &mut Timestamp| {
                let by = u64::try_from(by.as_micros()).expect("hours");
                *instant = Timestamp::from_micros(instant.as_micros().saturating_sub(by));
            };
            earlier(&mut row.record.created_at);
            earlier(&mut row.record.expires_at);
            match &mut row.record.state {
                State::Started { lease_until, .. } => earlier(lease_until),
                State::Completed { completed_at, .. } => earlier(completed_at),
                _ => {}
            }
        }
    }

    store_conformance!(Map(Arc::new(MapStore::default())));
}
