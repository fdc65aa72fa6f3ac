//! Who holds a key, and with which fencing token.

use std::fmt;
use std::time::Duration;

use crate::fingerprint::Fingerprint;
use crate::record::Record;
use crate::scope::ScopedKey;

/// 128 random bits that name one admission of one request.
///
/// The *caller* of a store draws them before its first try, so that a claim whose reply was lost
/// can be asked for again and recognised.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner([u8; 16]);

impl Owner {
    /// Draws an owner from the thread's cryptographic generator.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The owner with these bytes, as a store reads them back.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, as a store writes them.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]);
        write!(f, "Owner({prefix:08x}…)")
    }
}

/// Proof of ownership: what every later move of an attempt is compared against.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a claim that is neither completed nor released ages into an unknown outcome"]
pub struct Claim {
    key: ScopedKey,
    owner: Owner,
    attempt: u32,
}

impl Claim {
    /// A claim as a store grants it.
    pub fn new(key: ScopedKey, owner: Owner, attempt: u32) -> Self {
        Self {
            key,
            owner,
            attempt,
        }
    }

    /// The lookup key that is held.
    pub fn key(&self) -> &ScopedKey {
        &self.key
    }

    /// Who holds it. Stores compare on this and on nothing else.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The fencing token: 1 for the first claim of a record, greater with every later one. Hand it
    /// to other systems so that they can refuse a stalled attempt. It is unordered across the
    /// expiry of the record.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }
}

/// What to do with a record whose attempt stopped renewing its lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnAbandoned {
    /// Nobody knows whether the work was done, so nobody does it again: the key answers *outcome
    /// unknown* until it is [reconciled](crate::IdempotencyBuilder::reconciler). The default, and the
    /// only choice for money.
    #[default]
    Hold,
    /// Another attempt takes over. Only for handlers that are harmless when they run twice; one that
    /// works in phases resumes after the last [checkpoint](crate::Attempt::checkpoint).
    Rerun,
}

/// The arguments of [`Store::claim`](crate::Store::claim).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// Namespace, scope and key.
    pub key: ScopedKey,
    /// What the request asks for; kept with the record.
    pub fingerprint: Fingerprint,
    /// Drawn by the caller, the same for every repetition of this call.
    pub owner: Owner,
    /// How long the claim lives without a renewal. At least one microsecond.
    pub lease: Duration,
    /// How long the record is kept, counted from this claim. Longer than `lease`.
    pub retention: Duration,
    /// Whether a record whose lease is over may be taken over.
    pub on_abandoned: OnAbandoned,
}

impl ClaimRequest {
    /// A request with an owner of its own, a lease of 30 s, a retention of 24 h and
    /// [`OnAbandoned::Hold`].
    pub fn new(key: ScopedKey, fingerprint: Fingerprint) -> Self {
        Self {
            key,
            fingerprint,
            owner: Owner::random(),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(24 * 60 * 60),
            on_abandoned: OnAbandoned::Hold,
        }
    }
}

/// What a store answers to a claim. It holds no judgement: the engine decides what an existing
/// record means for the request.
#[derive(Clone, Debug)]
#[must_use]
pub enum Claimed {
    /// The claim is granted and recorded. Checkpoints are those that an earlier attempt of the
    /// same record left (takeover), or our own (asked again after a lost reply).
    Acquired {
        /// Proof of ownership.
        claim: Claim,
        /// What earlier phases left behind; empty for a fresh record.
        notes: crate::record::Notes,
    },
    /// The key is taken, finished or abandoned; this is the record.
    Existing(Record),
}
