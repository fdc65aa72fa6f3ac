//! The contract between the engine and whatever remembers keys.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;

#[cfg(feature = "encrypt")]
mod encrypted;
#[cfg(feature = "encrypt")]
pub use encrypted::{EncryptedStore, Keyring, UnsealError};
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "memory")]
pub use memory::MemoryStore;
#[cfg(feature = "sqlite-system")]
mod sqlite;
#[cfg(feature = "sqlite-system")]
pub use sqlite::{
    SqliteOneCommit, SqliteOptions, SqliteRecording, SqliteStore, SqliteTransaction, SqliteWork,
};
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
pub use postgres::{
    PostgresConnection, PostgresOneCommit, PostgresOptions, PostgresRecording, PostgresSchemaError,
    PostgresStore, PostgresTransaction, PreparedStatements,
};
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
pub use redis::{RedisConnection, RedisOptions, RedisStore};
mod open;
pub use open::{OpenError, open};
mod one_commit;
pub use one_commit::{Begun, Committed, OneCommit, OpenTransaction};
mod prefixed;
pub use prefixed::PrefixedStore;
mod recording;
pub use recording::{RecordingError, Transactional};
#[cfg(any(feature = "sqlite-system", feature = "postgres", feature = "redis"))]
mod watchers;

/// Remembers which keys were claimed, by whom, and how it ended.
///
/// # Contract
///
/// A store holds one record per [`ScopedKey`] and keeps these rules. Each is a function of
/// `tower_idempotency::testing::conformance` (feature `testing`), and `store_conformance!` makes a
/// test of each.
///
/// 1. **Every move is one atomic step.** Its *result* decides; no move looks first and writes later.
///    Concurrent claims of one key never yield two live claims.
/// 2. **Claim.** A key with no record, with an *expired* record (purged or not) or with a *released*
///    one is acquired and begins afresh: new owner, new fingerprint, new `created_at`, no notes. Only
///    the attempt goes on: 1, or the last attempt + 1. (Across an expiry it may begin at 1 again.)
/// 3. **Claim again by the same owner**, while the record is started and the fingerprint is equal:
///    acquired again, the same attempt, the lease starts anew, whatever was left of it.
/// 4. **Takeover.** A started record of another owner whose lease is over is acquired only under
///    [`OnAbandoned::Rerun`](crate::OnAbandoned::Rerun) and only if the fingerprint is equal byte
///    for byte: new owner, attempt + 1, notes kept.
/// 5. **Everything else** is [`Claimed::Existing`] and changes nothing, not even a time. Rules 2 to 5
///    are tried in this order: an expired record is as good as none, whoever asks.
/// 6. **Fencing.** `renew`, `complete`, `release`, `abandon`, `annotate` and `checkpoint` compare
///    the owner and apply only to a *started* record of that owner; otherwise they change nothing
///    and say so. A lease that is over does not matter as long as the owner stands, and neither does
///    a retention that is over as long as the record is still there.
/// 7. **A kept outcome is final.** Completing again, by anyone, changes nothing and returns the
///    outcome that stands. Completing keeps fingerprint, owner, attempt and notes.
/// 8. **Release** keeps the record as [`State::Released`](crate::State::Released) with its owner and
///    its attempt; its notes may go. Releasing again by the same owner, or a key without a record, is `Applied`.
/// 9. **Lease and retention are two things.** Every *acquired* claim sets `expires_at` to its
///    retention from now; renewing does not move it. Completion moves it only where it has already
///    passed (the claim's retention then runs once more, from now), or where the caller names
///    another retention. A record is *expired* when `expires_at` has passed and no live lease
///    stands: a slow handler never loses its record. A retention of zero is over at once.
/// 10. **The store owns the clock.** Callers pass durations. Leases end by the clock that all
///     callers of the store share.
/// 11. **Purge** removes expired records only, at most `limit` of them, and never one whose claim
///     is live. A store may also drop expired records by itself, as long as the next purge counts
///     the unresolved ones among them.
/// 12. **Resolve** applies to an abandoned record only while owner *and* lease are those that were
///     seen. To resolve as completed is to complete: rules 7 and 9 hold. Repeated, it is
///     `ClaimLost`, and the record shows what stands.
/// 13. **Keys never collide** and are never patterns: two different triples are two records.
/// 14. **Full is `Unavailable`.** A store that has no room refuses new claims. It never forgets a
///     live claim or an unexpired record to make room, and never refuses to complete a claim that
///     it granted.
/// 15. **Every move may be repeated** after a lost reply, with the same arguments.
/// 16. **Erase** removes records of exactly one scope, in the namespaces that begin with the given
///     text, at most `limit` of them and *in whatever state they are*: live claims and kept outcomes
///     too. When it removes none, none is left of those that were there when it was called. A store
///     that met records which it cannot read, and so cannot tell whose they are, fails instead of
///     saying that none is left.
///
/// # Errors
///
/// Every method returns [`StoreError`] when it does not know whether the move was applied. Expected
/// conflicts are values.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// What the store can promise; see [`StoreProperties`].
    fn properties(&self) -> StoreProperties;

    /// Claims a key, or shows the record that stands in the way. Rules 1–5.
    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError>;

    /// Lets the lease start anew, `lease` from now. Rule 6.
    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError>;

    /// Records how the attempt ended. `retention`, if given, is counted from now and replaces the
    /// record's expiry. Rules 6, 7 and 9.
    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError>;

    /// Frees the key: the attempt did nothing that lasts. Rules 6 and 8.
    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError>;

    /// Ends the lease now: nobody knows how the attempt ended. A lease that is over keeps its end, so
    /// that a repetition does not cross a [`resolve`](Store::resolve). Rule 6.
    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError>;

    /// Attaches the id under which another system knows the work. Rule 6.
    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError>;

    /// Records that a named phase is finished; a repeated name replaces its data. Rule 6.
    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError>;

    /// One page of at most `limit` abandoned records, unexpired ones included and expired ones that
    /// are not purged yet, after the cursor of the page before. Every record that is abandoned
    /// during the whole walk is seen exactly once. A page may be short, or empty, and still not be the
    /// last. A `limit` of zero ends the walk.
    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError>;

    /// Closes an abandoned record. Rule 12.
    async fn resolve(&self, record: &Record, resolution: &Resolution)
    -> Result<Fenced, StoreError>;

    /// The record of a key, if there is one that is not expired.
    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError>;

    /// Erases a record in whatever state it is, for an operator or for a legal duty. The key is
    /// then as if it had never been seen. Whether there was one.
    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError>;

    /// Erases at most `limit` records of a scope in every namespace that begins with `within` (empty:
    /// in all of them), as [`remove`](Store::remove) erases one: to forget a customer. How many it
    /// erased; call it until that is none. Rule 16.
    ///
    /// An attempt that is under way loses its claim, and a retry of a key that is erased runs the
    /// handler: call it when this customer sends no requests any more. What is claimed meanwhile may or
    /// may not be erased. It may walk through the whole store, in short steps.
    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError>;

    /// Removes at most `limit` expired records. When it removes none, none was left. Rule 11.
    async fn purge(&self, limit: usize) -> Result<Purged, StoreError>;

    /// Returns as soon as the record of `key` is anything but a live claim of `seen`, or after
    /// `max`. It may return too early, may poll, and holds no connection while it waits.
    async fn changed(&self, key: &ScopedKey, seen: &Owner, max: Duration)
    -> Result<(), StoreError>;
}

/// What a store is, for start-up checks and for the published policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreProperties {
    /// A short name for logs and metrics: `memory`, `postgres`, ….
    pub name: &'static str,
    /// Records outlive the process.
    pub durable: bool,
    /// Several processes see the same records.
    pub shared: bool,
}

impl StoreProperties {
    /// A store of this name.
    pub const fn new(name: &'static str, durable: bool, shared: bool) -> Self {
        Self {
            name,
            durable,
            shared,
        }
    }
}

/// The answer of a move that only the owner may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fenced {
    /// Done, now or by an earlier call whose reply was lost.
    Applied,
    /// The record is not (or no longer) a started one of this owner, or, for a resolution, not the
    /// abandoned one that was seen; nothing was changed.
    ClaimLost,
}

/// The answer to [`Store::complete`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Completion {
    /// The outcome was recorded and stands.
    Recorded,
    /// An outcome stood already, perhaps our own from a call whose reply was lost. It is what
    /// every request gets.
    Standing(Outcome),
    /// The record is somebody else's, released, or gone; nothing was recorded.
    ClaimLost,
}

/// How an abandoned record is closed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Resolution {
    /// The work was done, and this is its outcome.
    Completed(Outcome),
    /// The work was not done and can no longer happen: the key is free.
    Released,
}

/// Where a walk through abandoned records goes on; opaque to everybody but the store that made it.
#[derive(Clone, PartialEq, Eq)]
pub struct Cursor(Bytes);

impl Cursor {
    /// A cursor, as a store makes it.
    pub fn new(position: impl Into<Bytes>) -> Self {
        Self(position.into())
    }

    /// What the store put in.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Cursor {
    /// Its length: a store may have put a key in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cursor({} bytes)", self.0.len())
    }
}

/// One page of [`Store::abandoned`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AbandonedPage {
    /// The records.
    pub records: Vec<Record>,
    /// Where the next page begins; `None` after the last one.
    pub next: Option<Cursor>,
}

impl AbandonedPage {
    /// A page, as a store makes it.
    pub fn new(records: Vec<Record>, next: Option<Cursor>) -> Self {
        Self { records, next }
    }
}

/// What [`Store::purge`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// Records removed in all, with the unresolved ones that the store dropped by itself since the
    /// last call.
    pub removed: usize,
    /// Those among them that were never completed, released or resolved: work of which nobody will
    /// ever know how it ended. Report them at error level.
    pub unresolved: usize,
}

impl Purged {
    /// A count, as a store makes it.
    pub const fn new(removed: usize, unresolved: usize) -> Self {
        Self {
            removed,
            unresolved,
        }
    }
}

macro_rules! forward_to_inner {
    ($($pointer:ident),*) => {$(
        #[async_trait]
        #[deny(clippy::missing_trait_methods)]
        impl<S: Store + ?Sized> Store for $pointer<S> {
            fn properties(&self) -> StoreProperties {
                (**self).properties()
            }
            async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
                (**self).claim(request).await
            }
            async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
                (**self).renew(claim, lease).await
            }
            async fn complete(
                &self,
                claim: &Claim,
                outcome: &Outcome,
                retention: Option<Duration>,
            ) -> Result<Completion, StoreError> {
                (**self).complete(claim, outcome, retention).await
            }
            async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
                (**self).release(claim).await
            }
            async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
                (**self).abandon(claim).await
            }
            async fn annotate(
                &self,
                claim: &Claim,
                correlation: &str,
            ) -> Result<Fenced, StoreError> {
                (**self).annotate(claim, correlation).await
            }
            async fn checkpoint(
                &self,
                claim: &Claim,
                name: &str,
                data: &Bytes,
            ) -> Result<Fenced, StoreError> {
                (**self).checkpoint(claim, name, data).await
            }
            async fn abandoned(
                &self,
                after: Option<&Cursor>,
                limit: usize,
            ) -> Result<AbandonedPage, StoreError> {
                (**self).abandoned(after, limit).await
            }
            async fn resolve(
                &self,
                record: &Record,
                resolution: &Resolution,
            ) -> Result<Fenced, StoreError> {
                (**self).resolve(record, resolution).await
            }
            async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
                (**self).lookup(key).await
            }
            async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
                (**self).remove(key).await
            }
            async fn erase(
                &self,
                within: &str,
                scope: &str,
                limit: usize,
            ) -> Result<usize, StoreError> {
                (**self).erase(within, scope, limit).await
            }
            async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
                (**self).purge(limit).await
            }
            async fn changed(
                &self,
                key: &ScopedKey,
                seen: &Owner,
                max: Duration,
            ) -> Result<(), StoreError> {
                (**self).changed(key, seen, max).await
            }
        }
    )*};
}

forward_to_inner!(Arc, Box);
