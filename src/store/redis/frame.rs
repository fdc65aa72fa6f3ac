//! How a record lies in one value, and what is checked when it is read.
//!
//! # Layout (version 1, numbers little endian)
//!
//! ```text
//! times      40  u8 version = 1 · u8 state (1 started, 2 completed, 3 released)
//!                u48 total · u48 lease · u48 expiry · u48 retention · u48 done    milliseconds
//!                u32 bytes of the outcome · u32 bytes of the notes
//! times      40  once more
//! identity   92  u64 creation, microseconds since the Unix epoch · 16 owner · u32 attempt
//!                52 fingerprint · u32 bytes of the key · 8 sum of all this and the key
//! outcome        its frame · 8 sum of the owner and it
//! key            namespace, scope and key, joined
//! notes          (u8 kind (0 correlation, 1 checkpoint) · u32 length, name · u32 length, data · 8 sum)*
//! ```
//!
//! A value written by a plain `SET` knows no server time, so every time is counted from the record's
//! creation, and the key's time to live tells how long ago that is: it was `total` then, so
//! *age = total − time to live*, by the server's clock. `lease`, `expiry` and `done` are ages;
//! `retention` is what the last claim asked for. The creation itself only places them in a calendar.
//!
//! Sums are the first eight bytes of a SHA-256. Scripts never make one: they copy what callers
//! summed, so that damage cannot be sealed by the next move. The times, which scripts do make, are
//! there twice instead.

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::claim::{ClaimRequest, Owner};
use crate::fingerprint::Fingerprint;
use crate::outcome::{DecodeError, Outcome};
use crate::record::{Notes, Record, State, Timestamp};
use crate::scope::ScopedKey;

/// A record as it was read, every part checked.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) stage: Stage,
    pub(super) owner: Owner,
    pub(super) attempt: u32,
    pub(super) fingerprint: Fingerprint,
    pub(super) key: ScopedKey,
    pub(super) notes: Notes,
    times: Times,
    created: u64,
    outcome: Option<Outcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Started,
    Completed,
    Released,
}

/// Where the record stands in time, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) stage: Stage,
    total: u64,
    lease: u64,
    expiry: u64,
    retention: u64,
    done: u64,
    outcome: usize,
    notes: usize,
}

/// What a claim asks for, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) lease: u64,
    pub(super) retention: u64,
    pub(super) grace: u64,
}

/// Why a value is not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// Whole, but of a release that knows more.
    Version(u8),
    Outcome(DecodeError),
    Part(&'static str),
}

impl Terms {
    pub(super) fn new(lease: Duration, retention: Duration, grace: Duration) -> Self {
        Self {
            lease: millis(lease),
            retention: millis(retention),
            grace: millis(grace),
        }
    }

    /// How long the key lives if nothing happens to it.
    pub(super) fn total(self) -> u64 {
        self.lease.max(self.retention) + self.grace
    }
}

/// The value of a claim of a key that has no record.
pub(super) fn fresh(request: &ClaimRequest, terms: Terms, created: u64) -> Vec<u8> {
    let times = Times {
        stage: Stage::Started,
        total: terms.total(),
        lease: terms.lease,
        expiry: terms.retention,
        retention: terms.retention,
        done: 0,
        outcome: 0,
        notes: 0,
    };
    let key = request.key.as_bytes();
    let mut value = Vec::with_capacity(HEAD + key.len());
    times.put(&mut value);
    value.extend_from_within(..);
    value.extend_from_slice(&identity(request, 1, created));
    value.extend_from_slice(key);
    value
}

/// Who holds the key: the part of a value that changes with every claim.
pub(super) fn identity(request: &ClaimRequest, attempt: u32, created: u64) -> [u8; IDENTITY] {
    let key = request.key.as_bytes();
    let mut identity = [0; IDENTITY];
    let (summed, sum) = identity.split_at_mut(SUMMED);
    summed[..8].copy_from_slice(&created.to_le_bytes());
    summed[8..24].copy_from_slice(request.owner.as_bytes());
    summed[24..28].copy_from_slice(&attempt.to_le_bytes());
    summed[28..80].copy_from_slice(request.fingerprint.as_bytes());
    summed[80..].copy_from_slice(&length(key).to_le_bytes());
    sum.copy_from_slice(&sum_of(&[summed, key]));
    identity
}

/// An outcome with its sum, after `room` bytes that are left for a script to fill.
pub(super) fn outcome(owner: &Owner, outcome: &Outcome, room: usize) -> Vec<u8> {
    let frame = outcome.as_bytes();
    let mut part = Vec::with_capacity(room + frame.len() + SUM);
    part.resize(room, 0);
    part.extend_from_slice(frame);
    part.extend_from_slice(&sum_of(&[owner.as_bytes(), frame]));
    part
}

/// A note, and how long its head is: kind and name, by which a script finds the one to replace.
pub(super) fn note(checkpoint: Option<&str>, data: &[u8]) -> (Vec<u8>, usize) {
    let name = checkpoint.unwrap_or_default().as_bytes();
    let head = 5 + name.len();
    let mut note = Vec::with_capacity(head + 4 + data.len() + SUM);
    note.push(u8::from(checkpoint.is_some()));
    note.extend_from_slice(&length(name).to_le_bytes());
    note.extend_from_slice(name);
    note.extend_from_slice(&length(data).to_le_bytes());
    note.extend_from_slice(data);
    let sum = sum_of(&[&note]);
    note.extend_from_slice(&sum);
    (note, head)
}

impl Frame {
    pub(super) fn read(value: Vec<u8>) -> Result<Self, Damage> {
        let value = Bytes::from(value);
        let times = Times::read(&value)?;
        let rest = value.get(2 * TIMES..).ok_or(CUT)?;
        let (identity, _) = rest.split_at_checked(IDENTITY).ok_or(CUT)?;
        let (summed, sum) = identity.split_at(SUMMED);
        let key_at = HEAD.checked_add(times.outcome).ok_or(CUT)?;
        let key_len = usize::try_from(u32::from_le_bytes(array(&summed[80..])?));
        let notes_at = key_at.checked_add(key_len.map_err(|_| CUT)?).ok_or(CUT)?;
        // Compared for equality: a value that was cut short or grew is no record.
        if notes_at.checked_add(times.notes) != Some(value.len()) {
            return Err(Damage::Part("has another length than it says"));
        }
        let key = value.get(key_at..notes_at).ok_or(CUT)?;
        if sum != sum_of(&[summed, key]) {
            return Err(Damage::Part("does not match the checksum of its identity"));
        }
        let key = ScopedKey::from_bytes(key).ok_or(Damage::Part("holds no key"))?;
        let owner = Owner::from_bytes(array(&summed[8..24])?);
        let outcome = match times.stage {
            Stage::Completed => Some(read_outcome(&owner, value.slice(HEAD..key_at))?),
            Stage::Started | Stage::Released if times.outcome == 0 => None,
            Stage::Started | Stage::Released => {
                return Err(Damage::Part("has an outcome that it should not have"));
            }
        };
        Ok(Self {
            stage: times.stage,
            owner,
            attempt: u32::from_le_bytes(array(&summed[24..28])?),
            fingerprint: Fingerprint::from_bytes(array(&summed[28..80])?),
            key,
            notes: read_notes(&value, notes_at)?,
            created: u64::from_le_bytes(array(&summed[..8])?),
            times,
            outcome,
        })
    }

    /// How old the record is, if the key has `left` milliseconds to live.
    pub(super) fn age(&self, left: u64) -> u64 {
        self.times.age(left)
    }

    pub(super) fn is_expired(&self, age: u64) -> bool {
        self.times.is_expired(age)
    }

    pub(super) fn is_lease_over(&self, age: u64) -> bool {
        self.times.lease <= age
    }

    /// The creation that a takeover keeps, or `now` where the next claim begins anew.
    pub(super) fn created_if_kept(&self, now: u64) -> u64 {
        match self.stage {
            Stage::Started => self.created,
            Stage::Completed | Stage::Released => now,
        }
    }

    pub(super) fn into_outcome(self) -> Option<Outcome> {
        self.outcome
    }

    pub(super) fn into_record(self, age: u64) -> Record {
        let at = |millis: u64| {
            let micros = millis.saturating_mul(1_000);
            Timestamp::from_micros(self.created.saturating_add(micros))
        };
        let Times {
            lease,
            expiry,
            done,
            ..
        } = self.times;
        let state = match (self.stage, self.outcome) {
            (Stage::Completed, Some(outcome)) => State::Completed {
                outcome,
                completed_at: at(done),
            },
            (Stage::Started, _) => State::Started {
                lease_until: at(lease),
                lease_left: Duration::from_millis(lease.saturating_sub(age)),
            },
            (Stage::Completed | Stage::Released, _) => State::Released,
        };
        Record::new(
            self.key,
            self.fingerprint,
            self.owner,
            self.attempt,
            state,
            self.notes,
            at(0),
            at(expiry),
        )
    }
}

impl Times {
    /// Reads the times at the head of a value, of which no more than the head need be there.
    pub(super) fn read(value: &[u8]) -> Result<Self, Damage> {
        let (times, rest) = value.split_at_checked(TIMES).ok_or(CUT)?;
        if rest.get(..TIMES) != Some(times) {
            return Err(Damage::Part("has two different sets of times"));
        }
        if times[0] != VERSION {
            return Err(Damage::Version(times[0]));
        }
        let stage = match times[1] {
            1 => Stage::Started,
            2 => Stage::Completed,
            3 => Stage::Released,
            _ => return Err(Damage::Part("is in no known state")),
        };
        let millis = |nth: usize| {
            let mut number = [0; 8];
            number[..6].copy_from_slice(&times[2 + nth * 6..8 + nth * 6]);
            u64::from_le_bytes(number)
        };
        let bytes = |at: usize| -> Result<usize, Damage> {
            usize::try_from(u32::from_le_bytes(array(&times[at..at + 4])?)).map_err(|_| CUT)
        };
        Ok(Self {
            stage,
            total: millis(0),
            lease: millis(1),
            expiry: millis(2),
            retention: millis(3),
            done: millis(4),
            outcome: bytes(32)?,
            notes: bytes(36)?,
        })
    }

    pub(super) fn age(&self, left: u64) -> u64 {
        self.total.saturating_sub(left)
    }

    pub(super) fn is_expired(&self, age: u64) -> bool {
        let due = match self.stage {
            Stage::Started => self.expiry.max(self.lease),
            Stage::Completed | Stage::Released => self.expiry,
        };
        due <= age
    }

    /// How much of the lease is left, if the record is started and its lease is live.
    pub(super) fn lease_left(&self, age: u64) -> Option<Duration> {
        let left = self.lease.saturating_sub(age);
        (self.stage == Stage::Started && left > 0).then(|| Duration::from_millis(left))
    }

    fn put(&self, value: &mut Vec<u8>) {
        let stage = match self.stage {
            Stage::Started => 1,
            Stage::Completed => 2,
            Stage::Released => 3,
        };
        value.extend_from_slice(&[VERSION, stage]);
        let Self {
            total,
            lease,
            expiry,
            retention,
            done,
            ..
        } = *self;
        for millis in [total, lease, expiry, retention, done] {
            value.extend_from_slice(&millis.to_le_bytes()[..6]);
        }
        for bytes in [self.outcome, self.notes] {
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            value.extend_from_slice(&bytes.to_le_bytes());
        }
    }
}

/// Moves the creation, and with it every instant, into the past.
#[cfg(feature = "testing")]
pub(super) fn backdate(value: &mut [u8], by: u64) {
    let Ok(times) = Times::read(value) else {
        return;
    };
    let (head, rest) = value.split_at_mut(HEAD);
    let identity = &mut head[2 * TIMES..];
    let created = array(&identity[..8]).map_or(0, u64::from_le_bytes);
    let created = created.saturating_sub(by.saturating_mul(1_000));
    identity[..8].copy_from_slice(&created.to_le_bytes());
    let key = rest.get(times.outcome..rest.len().saturating_sub(times.notes));
    let (summed, sum) = identity.split_at_mut(SUMMED);
    sum.copy_from_slice(&sum_of(&[summed, key.unwrap_or_default()]));
}

/// Where the key lies in the value that has this head, and where it ends.
pub(super) fn key_place(head: &[u8]) -> Option<(usize, usize)> {
    let times = Times::read(head).ok()?;
    let length = head.get(KEY_LENGTH..KEY_LENGTH + 4)?.try_into().ok()?;
    let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
    let start = HEAD.checked_add(times.outcome)?;
    let end = start.checked_add(length).filter(|_| length > 0)?;
    Some((start, end))
}

/// Whose the head of a value says it is; the value is not checked.
pub(super) fn owner_of(head: &[u8]) -> Option<Owner> {
    let owner = head.get(2 * TIMES + 8..2 * TIMES + 24)?;
    Some(Owner::from_bytes(owner.try_into().ok()?))
}

/// The creation and the lease of a started record, as the scripts compare them.
pub(super) fn seen(record: &Record) -> Option<([u8; 8], u64)> {
    let State::Started { lease_until, .. } = record.state else {
        return None;
    };
    let created = record.created_at.as_micros();
    let lease = lease_until.as_micros().checked_sub(created)?;
    (lease % 1_000 == 0).then_some((created.to_le_bytes(), lease / 1_000))
}

/// Milliseconds, rounded up: a lease of one microsecond is a lease. Longer than 200 years is as good as
/// for ever, and stays within what every side can count with.
pub(super) fn millis(duration: Duration) -> u64 {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).map_or(FOR_EVER, |millis| millis.min(FOR_EVER))
}

fn read_outcome(owner: &Owner, part: Bytes) -> Result<Outcome, Damage> {
    let end = part.len().checked_sub(SUM).ok_or(CUT)?;
    if part[end..] != sum_of(&[owner.as_bytes(), &part[..end]]) {
        return Err(Damage::Part("does not match the checksum of its outcome"));
    }
    Outcome::decode(part.slice(..end)).map_err(Damage::Outcome)
}

fn read_notes(value: &Bytes, mut at: usize) -> Result<Notes, Damage> {
    let mut notes = Notes::default();
    while at < value.len() {
        let begin = at;
        let kind = *value.get(at).ok_or(CUT)?;
        at += 1;
        let name = slice(value, &mut at)?;
        let data = slice(value, &mut at)?;
        let sum = value.get(at..at + SUM).ok_or(CUT)?;
        if sum != sum_of(&[&value[begin..at]]) {
            return Err(Damage::Part("does not match the checksum of a note"));
        }
        at += SUM;
        let text = |bytes: &Bytes| {
            let text = std::str::from_utf8(bytes).map(str::to_owned);
            text.map_err(|_| Damage::Part("has a note that is no text"))
        };
        match kind {
            0 => notes.correlation = Some(text(&data)?),
            1 => notes.set_checkpoint(&text(&name)?, data),
            _ => return Err(Damage::Part("has a note of an unknown kind")),
        }
    }
    Ok(notes)
}

fn slice(value: &Bytes, at: &mut usize) -> Result<Bytes, Damage> {
    let begin = at.checked_add(4).ok_or(CUT)?;
    let length = u32::from_le_bytes(array(value.get(*at..begin).ok_or(CUT)?)?);
    let length = usize::try_from(length).map_err(|_| CUT)?;
    let end = begin.checked_add(length).ok_or(CUT)?;
    value.get(begin..end).ok_or(CUT)?;
    *at = end;
    Ok(value.slice(begin..end))
}

fn array<const N: usize>(bytes: &[u8]) -> Result<[u8; N], Damage> {
    bytes.try_into().map_err(|_| CUT)
}

fn length(part: &[u8]) -> u32 {
    u32::try_from(part.len()).unwrap_or(u32::MAX)
}

fn sum_of(parts: &[&[u8]]) -> [u8; SUM] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = hasher.finalize().into();
    [a, b, c, d, e, f, g, h]
}

const VERSION: u8 = 1;
const TIMES: usize = 40;
const IDENTITY: usize = 92;
const SUM: usize = 8;
const SUMMED: usize = IDENTITY - SUM;
/// Where the outcome begins.
pub(super) const HEAD: usize = 2 * TIMES + IDENTITY;
const KEY_LENGTH: usize = 2 * TIMES + SUMMED - 4;
const CUT: Damage = Damage::Part("is cut off");
const FOR_EVER: u64 = 200 * 365 * 24 * 60 * 60 * 1_000;
