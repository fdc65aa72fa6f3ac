//! Random histories of a few keys: the in-process store against a model, and against the promises of
//! the protocol, which know nothing of the model.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use proptest::prelude::*;
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fenced, Fingerprint, MemoryStore, Notes, OnAbandoned,
    Outcome, Owner, Record, Resolution, ScopedKey, State, Store, Timestamp,
};

const MINUTE: u64 = 60_000_000;
const KEYS: u8 = 3;
const OWNERS: u8 = 4;

#[derive(Clone, Debug)]
enum Op {
    Claim {
        owner: u8,
        request: u8,
        lease: u64,
        retention: u64,
        rerun: bool,
    },
    Renew {
        owner: u8,
        lease: u64,
    },
    Complete {
        owner: u8,
        outcome: u8,
        retention: Option<u64>,
    },
    Release {
        owner: u8,
    },
    Abandon {
        owner: u8,
    },
    Annotate {
        owner: u8,
        with: u8,
    },
    Checkpoint {
        owner: u8,
        name: u8,
        data: u8,
    },
    /// With the record as it was seen last, which may be long ago.
    Resolve {
        outcome: Option<u8>,
    },
    Remove,
    Lookup,
}

#[derive(Clone, Debug)]
enum Step {
    /// One move on one key, perhaps once more because the reply was lost.
    Move {
        key: u8,
        op: Op,
        again: bool,
    },
    Pass {
        micros: u64,
    },
    /// Until nothing is left, so many at a time.
    Purge {
        limit: usize,
    },
}

#[derive(Clone, Debug, PartialEq)]
enum Reply {
    Acquired(u32, Notes),
    Existing(Record),
    Fenced(Fenced),
    Completed(Completion),
    Removed(bool),
    Found(Option<Record>),
}

/// The contract, read aloud.
#[derive(Clone, Default)]
struct Model {
    now: u64,
    rows: BTreeMap<u8, (Record, u64)>,
    /// Unresolved records that are gone and that no purge has told of yet.
    untold: usize,
}

impl Model {
    fn lease_until(record: &Record) -> Option<u64> {
        match record.state {
            State::Started { lease_until, .. } => Some(lease_until.as_micros()),
            _ => None,
        }
    }

    fn is_expired(&self, key: u8) -> bool {
        self.rows.get(&key).is_some_and(|(record, _)| {
            let until = Self::lease_until(record).unwrap_or(0);
            record.expires_at.as_micros().max(until) <= self.now
        })
    }

    fn forget(&mut self, key: u8) {
        let gone = self.rows.remove(&key);
        self.untold += usize::from(gone.is_some_and(|row| Self::lease_until(&row.0).is_some()));
    }

    fn shown(&self, mut record: Record) -> Record {
        if let State::Started {
            lease_until,
            lease_left,
        } = &mut record.state
        {
            *lease_left = Duration::from_micros(lease_until.as_micros().saturating_sub(self.now));
        }
        record
    }

    fn claim(&mut self, key: u8, op: &Op) -> Reply {
        let Op::Claim {
            owner,
            request,
            lease,
            retention,
            rerun,
        } = *op
        else {
            unreachable!("no claim");
        };
        let (now, at) = (self.now, Timestamp::from_micros);
        let (owner, asked) = (owner_of(owner), fingerprint(request));
        let before = self.rows.get(&key).cloned();
        let afresh = self.is_expired(key)
            || before
                .as_ref()
                .is_none_or(|(record, _)| record.state == State::Released);
        let attempt = before.as_ref().map_or(0, |(record, _)| record.attempt);
        if self.is_expired(key) {
            self.forget(key);
        }
        let started = started(now + lease);
        let expires_at = at(now + retention);
        let record = if afresh {
            let notes = Notes::default();
            let key = scoped(key);
            Record::new(
                key,
                asked,
                owner,
                attempt + 1,
                started,
                notes,
                at(now),
                expires_at,
            )
        } else {
            let mut record = before.expect("not afresh").0;
            let until = Self::lease_until(&record);
            let again = record.owner == owner;
            let takeover = rerun && until.is_some_and(|until| until <= now);
            if until.is_none() || record.fingerprint != asked || !(again || takeover) {
                return Reply::Existing(self.shown(record));
            }
            record.attempt += u32::from(!again);
            record.owner = owner;
            record.state = started;
            record.expires_at = expires_at;
            record
        };
        let reply = Reply::Acquired(record.attempt, record.notes.clone());
        self.rows.insert(key, (record, retention));
        reply
    }

    fn apply(&mut self, key: u8, op: &Op, seen: Option<&Record>) -> Reply {
        let (now, at) = (self.now, Timestamp::from_micros);
        if let Op::Claim { .. } = op {
            return self.claim(key, op);
        }
        if let Op::Lookup = op {
            let visible = (!self.is_expired(key))
                .then(|| self.rows.get(&key))
                .flatten();
            return Reply::Found(visible.map(|(record, _)| self.shown(record.clone())));
        }
        if let Op::Remove = op {
            return Reply::Removed(self.rows.remove(&key).is_some());
        }
        let finish = |record: &mut Record, outcome: u8, retention: Option<u64>, kept: u64| {
            record.state = State::Completed {
                outcome: outcome_of(outcome),
                completed_at: at(now),
            };
            if let Some(retention) = retention {
                record.expires_at = at(now + retention);
            } else if record.expires_at.as_micros() <= now {
                record.expires_at = at(now + kept);
            }
        };
        let fenced = |applied| {
            Reply::Fenced(if applied {
                Fenced::Applied
            } else {
                Fenced::ClaimLost
            })
        };
        let Some((record, kept)) = self.rows.get_mut(&key) else {
            return match op {
                Op::Complete { .. } => Reply::Completed(Completion::ClaimLost),
                op => fenced(matches!(op, Op::Release { .. })),
            };
        };
        let until = Self::lease_until(record);
        let held = |by: &u8| until.is_some() && record.owner == owner_of(*by);
        match op {
            Op::Renew { owner, lease } if held(owner) => record.state = started(now + lease),
            Op::Complete {
                owner,
                outcome,
                retention,
            } => {
                return Reply::Completed(match &record.state {
                    State::Completed { outcome, .. } => Completion::Standing(outcome.clone()),
                    _ if held(owner) => {
                        finish(record, *outcome, *retention, *kept);
                        Completion::Recorded
                    }
                    _ => Completion::ClaimLost,
                });
            }
            Op::Release { owner } if held(owner) => {
                record.state = State::Released;
                record.notes = Notes::default();
            }
            Op::Release { owner } => {
                return fenced(record.state == State::Released && record.owner == owner_of(*owner));
            }
            Op::Abandon { owner } if held(owner) => {
                if until > Some(now) {
                    record.state = started(now);
                }
            }
            Op::Annotate { owner, with } if held(owner) => {
                record.notes.correlation = Some(with.to_string());
            }
            Op::Checkpoint { owner, name, data } if held(owner) => {
                record
                    .notes
                    .set_checkpoint(&name.to_string(), Bytes::from(vec![*data]));
            }
            Op::Resolve { outcome } => {
                let fits = seen.is_some_and(|seen| {
                    let over = until.is_some_and(|until| until <= now);
                    over && Self::lease_until(seen) == until && seen.owner == record.owner
                });
                if !fits {
                    return fenced(false);
                }
                match outcome {
                    Some(outcome) => finish(record, *outcome, None, *kept),
                    None => {
                        record.state = State::Released;
                        record.notes = Notes::default();
                    }
                }
            }
            _ => return fenced(false),
        }
        fenced(true)
    }

    /// Everything expired is gone; how much of it was unresolved.
    fn purge(&mut self) -> usize {
        for key in 0..KEYS {
            if self.is_expired(key) {
                self.forget(key);
            }
        }
        std::mem::take(&mut self.untold)
    }
}

/// The promises of the protocol, kept by hand from the replies alone.
#[derive(Default)]
struct Ledger {
    /// The last claim that was granted and that nothing has ended yet, and until when.
    claimed: Option<(Owner, u64)>,
    /// The outcome that stands.
    kept: Option<Outcome>,
    /// When the record may be forgotten.
    expires_at: u64,
}

impl Ledger {
    fn check(
        &mut self,
        now: u64,
        op: &Op,
        reply: &Reply,
        [before, after]: [&Option<Record>; 2],
    ) -> Result<(), TestCaseError> {
        let remembered = now < self.expires_at;
        let live = self.claimed.filter(|(_, until)| now < *until);
        match (op, reply) {
            (
                Op::Claim {
                    owner,
                    rerun,
                    lease,
                    ..
                },
                Reply::Acquired(..),
            ) => {
                let owner = owner_of(*owner);
                let others = self.claimed.filter(|(holder, _)| *holder != owner);
                let alive = live.filter(|(holder, _)| *holder != owner);
                prop_assert!(alive.is_none(), "promise 1: two live attempts");
                prop_assert!(
                    self.kept.is_none() || !remembered,
                    "promise 2: ran again although a result was kept"
                );
                prop_assert!(
                    others.is_none() || *rerun || !remembered,
                    "promise 3: ran again although nobody knows how it ended"
                );
                self.claimed = Some((owner, now + lease));
                self.kept = None;
            }
            (Op::Claim { .. }, Reply::Existing(shown)) => {
                prop_assert_eq!(
                    before,
                    after,
                    "promise 6: a rejected claim changed something"
                );
                prop_assert_eq!(before.as_ref(), Some(shown));
            }
            (Op::Renew { lease, .. }, Reply::Fenced(Fenced::Applied)) => {
                self.claimed = self.claimed.map(|(owner, _)| (owner, now + lease));
            }
            (Op::Abandon { .. }, Reply::Fenced(Fenced::Applied)) => {
                self.claimed = self.claimed.map(|(owner, until)| (owner, until.min(now)));
            }
            (
                Op::Complete {
                    outcome, retention, ..
                },
                Reply::Completed(Completion::Recorded),
            ) => {
                self.claimed = None;
                self.kept = Some(outcome_of(*outcome));
                self.expires_at = retention.map_or(self.expires_at, |kept| now + kept);
                prop_assert!(
                    after.is_some() || *retention == Some(0),
                    "promise 5: acknowledged and not on record"
                );
            }
            (Op::Complete { .. }, Reply::Completed(Completion::Standing(outcome))) => {
                prop_assert_eq!(self.kept.as_ref(), Some(outcome), "promise 2");
            }
            (Op::Release { .. }, Reply::Fenced(Fenced::Applied)) => {
                self.claimed = None;
                let released = after
                    .as_ref()
                    .is_none_or(|now| now.state == State::Released);
                prop_assert!(released, "promise 4: released, but the key is not free");
            }
            (Op::Resolve { outcome }, Reply::Fenced(Fenced::Applied)) => {
                prop_assert!(live.is_none(), "promise 3: resolved under a live attempt");
                self.claimed = None;
                self.kept = outcome.map(outcome_of);
            }
            (Op::Remove, _) => *self = Self::default(),
            _ => {}
        }
        if let Some(after) = after {
            self.expires_at = after.expires_at.as_micros();
            if let State::Completed { outcome, .. } = &after.state {
                prop_assert_eq!(self.kept.as_ref(), Some(outcome), "promises 2 and 4");
            } else {
                prop_assert!(self.kept.is_none(), "promise 2: a kept result is gone");
            }
        }
        Ok(())
    }
}

async fn call(store: &MemoryStore, key: u8, op: &Op, seen: Option<&Record>) -> Reply {
    let claim = |owner: &u8| Claim::new(scoped(key), owner_of(*owner), 0);
    let micros = Duration::from_micros;
    match op {
        Op::Claim {
            owner,
            request,
            lease,
            retention,
            rerun,
        } => {
            let mut asked = ClaimRequest::new(scoped(key), fingerprint(*request));
            asked.owner = owner_of(*owner);
            asked.lease = micros(*lease);
            asked.retention = micros(*retention);
            if *rerun {
                asked.on_abandoned = OnAbandoned::Rerun;
            }
            match store.claim(&asked).await.unwrap() {
                Claimed::Acquired { claim, notes } => Reply::Acquired(claim.attempt(), notes),
                Claimed::Existing(record) => Reply::Existing(record),
            }
        }
        Op::Renew { owner, lease } => {
            Reply::Fenced(store.renew(&claim(owner), micros(*lease)).await.unwrap())
        }
        Op::Complete {
            owner,
            outcome,
            retention,
        } => {
            let (claim, outcome) = (claim(owner), outcome_of(*outcome));
            let completed = store
                .complete(&claim, &outcome, retention.map(micros))
                .await;
            Reply::Completed(completed.unwrap())
        }
        Op::Release { owner } => Reply::Fenced(store.release(&claim(owner)).await.unwrap()),
        Op::Abandon { owner } => Reply::Fenced(store.abandon(&claim(owner)).await.unwrap()),
        Op::Annotate { owner, with } => {
            let annotated = store.annotate(&claim(owner), &with.to_string()).await;
            Reply::Fenced(annotated.unwrap())
        }
        Op::Checkpoint { owner, name, data } => {
            let (name, data) = (name.to_string(), Bytes::from(vec![*data]));
            let checkpointed = store.checkpoint(&claim(owner), &name, &data).await;
            Reply::Fenced(checkpointed.unwrap())
        }
        Op::Resolve { outcome } => {
            let Some(seen) = seen else {
                return Reply::Fenced(Fenced::ClaimLost);
            };
            let resolution = outcome.map(outcome_of);
            let resolution = resolution.map_or(Resolution::Released, Resolution::Completed);
            Reply::Fenced(store.resolve(seen, &resolution).await.unwrap())
        }
        Op::Remove => Reply::Removed(store.remove(&scoped(key)).await.unwrap()),
        Op::Lookup => Reply::Found(store.lookup(&scoped(key)).await.unwrap()),
    }
}

async fn play(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let store = MemoryStore::new();
    let mut model = Model::default();
    // The store's clock says what time it is.
    let probe = ClaimRequest::new(scoped(KEYS), fingerprint(0));
    let _ = store.claim(&probe).await.unwrap();
    let probe = store.lookup(&probe.key).await.unwrap().unwrap();
    store.remove(&probe.key).await.unwrap();
    model.now = probe.created_at.as_micros();

    let mut ledgers: [Ledger; KEYS as usize] = Default::default();
    let mut seen: [Option<Record>; KEYS as usize] = Default::default();
    for step in steps {
        match step {
            Step::Pass { micros } => {
                tokio::time::advance(Duration::from_micros(micros)).await;
                model.now += micros;
            }
            Step::Purge { limit } => {
                let mut unresolved = 0;
                loop {
                    let purged = store.purge(limit).await.unwrap();
                    prop_assert!(purged.removed <= limit);
                    unresolved += purged.unresolved;
                    if purged.removed == 0 {
                        break;
                    }
                }
                prop_assert_eq!(
                    unresolved,
                    model.purge(),
                    "each unresolved record is told once"
                );
                prop_assert_eq!(store.len(), model.rows.len());
            }
            Step::Move { key, op, again } => {
                for _ in 0..=usize::from(again) {
                    let before = store.lookup(&scoped(key)).await.unwrap();
                    let last_seen = &mut seen[usize::from(key)];
                    let reply = call(&store, key, &op, last_seen.as_ref()).await;
                    let after = store.lookup(&scoped(key)).await.unwrap();

                    // An expired record may be gone already: both is right, and the reply tells.
                    let mut gone = model.clone();
                    let may_be_gone = model.is_expired(key);
                    let expected = model.apply(key, &op, last_seen.as_ref());
                    if may_be_gone && reply != expected {
                        gone.forget(key);
                        let expected = gone.apply(key, &op, last_seen.as_ref());
                        prop_assert_eq!(&reply, &expected);
                        model = gone;
                    } else {
                        prop_assert_eq!(&reply, &expected);
                    }
                    let found = model.apply(key, &Op::Lookup, None);
                    prop_assert_eq!(Reply::Found(after.clone()), found);

                    let ledger = &mut ledgers[usize::from(key)];
                    ledger.check(model.now, &op, &reply, [&before, &after])?;
                    if matches!(op, Op::Lookup) {
                        *last_seen = after;
                    }
                }
            }
        }
    }
    for key in 0..KEYS {
        store.remove(&scoped(key)).await.unwrap();
    }
    prop_assert_eq!(
        (store.len(), store.bytes()),
        (0, 0),
        "the counts went astray"
    );
    Ok(())
}

fn started(until: u64) -> State {
    State::Started {
        lease_until: Timestamp::from_micros(until),
        lease_left: Duration::ZERO,
    }
}

fn scoped(key: u8) -> ScopedKey {
    let joined = [&[0, 0, 0, 1, 0, 0, 0, 0, b'm'], &[b'a' + key][..]].concat();
    ScopedKey::from_bytes(&joined).unwrap()
}

fn owner_of(owner: u8) -> Owner {
    Owner::from_bytes([owner; 16])
}

fn fingerprint(request: u8) -> Fingerprint {
    Fingerprint::of(&[&[request]])
}

fn outcome_of(outcome: u8) -> Outcome {
    Outcome::response(StatusCode::OK, &http::HeaderMap::new(), &[&[outcome]], None)
}

fn ops() -> impl Strategy<Value = Op> {
    let owner = 0..OWNERS;
    let lease = prop_oneof![Just(1), Just(MINUTE), Just(3 * MINUTE)];
    let retention = prop_oneof![Just(2 * MINUTE), Just(5 * MINUTE), Just(60 * MINUTE)];
    let replaced = prop_oneof![
        4 => Just(None),
        1 => Just(Some(0)),
        1 => Just(Some(MINUTE)),
        1 => Just(Some(90 * MINUTE)),
    ];
    prop_oneof![
        // Mostly the same request, so that more than mismatches happens.
        7 => (owner.clone(), prop_oneof![9 => Just(0), 1 => Just(1)], lease.clone(), retention, any::<bool>()).prop_map(
            |(owner, request, lease, retention, rerun)| {
                Op::Claim { owner, request, lease, retention, rerun }
            }
        ),
        2 => (owner.clone(), lease).prop_map(|(owner, lease)| Op::Renew { owner, lease }),
        3 => (owner.clone(), any::<u8>(), replaced).prop_map(|(owner, outcome, retention)| {
            Op::Complete { owner, outcome, retention }
        }),
        1 => owner.clone().prop_map(|owner| Op::Release { owner }),
        1 => owner.clone().prop_map(|owner| Op::Abandon { owner }),
        1 => (owner.clone(), 0..3_u8).prop_map(|(owner, with)| Op::Annotate { owner, with }),
        1 => (owner, 0..3_u8, 0..3_u8).prop_map(|(owner, name, data)| {
            Op::Checkpoint { owner, name, data }
        }),
        2 => proptest::option::of(any::<u8>()).prop_map(|outcome| Op::Resolve { outcome }),
        1 => Just(Op::Remove),
        3 => Just(Op::Lookup),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let pass = prop_oneof![
        Just(0),
        Just(1),
        Just(MINUTE - 1),
        Just(MINUTE),
        Just(30 * MINUTE)
    ];
    prop_oneof![
        8 => (0..KEYS, ops(), proptest::bool::weighted(0.2))
            .prop_map(|(key, op, again)| Step::Move { key, op, again }),
        3 => pass.prop_map(|micros| Step::Pass { micros }),
        1 => prop_oneof![Just(1), Just(2), Just(100)].prop_map(|limit| Step::Purge { limit }),
    ]
}

proptest! {
    #[test]
    fn every_history_agrees_with_the_model_and_keeps_the_promises(
        steps in proptest::collection::vec(steps(), 1..120)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(play(steps))?;
    }
}
