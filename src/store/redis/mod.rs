//! The store in Redis.

mod address;
mod claim;
mod clock;
mod erase;
mod error;
mod frame;
mod keys;
mod line;
mod link;
mod options;
mod purge;
mod replicas;
mod scripts;
mod server;
mod walk;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::{Pipeline, Value};

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::StoreError;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::watchers::Watchers;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};

use self::clock::Clock;
use self::error::{answered, damaged, is_code, unexpected};
use self::frame::{Damage, Frame, Times, millis};
use self::keys::Keys;
use self::link::{Link, Repeat, To};
use self::purge::Unanswered;
use self::replicas::Acknowledged;
use self::scripts::{By, Move};
use self::walk::Position;

pub use self::link::RedisConnection;
pub use self::options::RedisOptions;

/// Remembers keys in Redis 7.0 or later: one server, the master behind Sentinels, or a cluster.
///
/// It keeps the whole contract of [`Store`] as long as the server keeps what it acknowledged; what
/// that takes is said under [Durability](#durability). Records outlive the process, and all processes that use
/// the server and the same prefix see the same ones ([`properties`](Store::properties): durable
/// and shared). Clones share one multiplexed connection, which is made anew when it is lost. Commands that
/// the connection lost are asked for once more, and every move may be.
///
/// # Round trips
///
/// A first request takes two: a plain `SET` with `NX` and `GET` for the claim, a script for the
/// completion. A replay, a live duplicate and a mismatch take one and write nothing. Taking over, claiming
/// again after a lost reply, and claiming what was released, expired without an outcome, or abandoned take a
/// second one, by script. Outcomes above 8 KiB do not pass through the scripting engine: they are laid
/// beside the record, in its slot, and renamed.
///
/// # Durability
///
/// Redis is a memory with a log, and it acknowledges before it is sure. Choose what may be lost:
///
/// | setting | what an acknowledged move survives |
/// |---|---|
/// | none of these | a crash of *this* process only |
/// | `appendonly yes`, `appendfsync everysec` | a crash of the server process; of the machine, but for the last second or two |
/// | `appendonly yes`, `appendfsync always` | a crash or power loss of the machine. A flush for each turn of the server's event loop; moves that arrive together share it |
/// | `min-replicas-to-write` | a master that lost its replicas stops taking moves (and new keys get 503), so that a master on the wrong side of a partition loses little |
/// | [`RedisOptions::replicas`] | the move is in so many replicas' memory before its caller hears of it. A failover that picks one of them keeps it |
///
/// Even with all of them, **a failover can lose acknowledged moves**: replication is asynchronous, and
/// the replica that is promoted need not be one that acknowledged, unless *all* of them have to. A lost
/// claim or outcome means that a retry runs again. Where that is a second payment, use a database
/// that commits, or hand [`Claim::attempt`] and a derived key to the other system and let *it* refuse. A
/// `FLUSHALL` forgets everything too; a completion after it is [`Completion::ClaimLost`].
///
/// # Memory
///
/// The server must not evict: connecting fails unless its `maxmemory-policy` is `noeviction`
/// ([`RedisOptions::on_eviction`] lets it pass). At `maxmemory` new keys are refused as
/// [`Unavailable`](crate::StoreErrorKind::Unavailable), while known ones are answered, and claims that were
/// granted are still completed: their scripts may exceed it. A record takes about 350 bytes more than its key and outcome.
///
/// # Expiry
///
/// Completed and released records end in the server at the moment when they expire. Records whose
/// attempt is unknown stay for [`RedisOptions::unresolved_for`] longer, and end when a
/// [`purge`](Store::purge) counts them; it finds nothing else to remove. A claim that comes upon
/// one counts it beside the record for the next purge. A purge leaves a receipt beside what it removes,
/// for the moment until its reply has arrived (at most a minute), so that a lost reply loses no count.
///
/// # Walks
///
/// [`abandoned`](Store::abandoned), [`purge`](Store::purge) and [`erase`](Store::erase) walk over *all* keys of every master with
/// `SCAN`: there is no index that could miss a record. That is some seconds of a server's time for each
/// million keys (other users' keys count a little too), in steps well below a millisecond; once in some
/// minutes is often enough. A walk begins anew by itself after a failover. While slots are
/// moved between nodes, it may miss records that move, and the next walk sees them.
///
/// # Time
///
/// Leases and retention are measured by the server's clock, as the key's remaining time to live; no clock
/// of a caller decides anything. After a failover it is the new master's clock. The instants that a
/// [`Record`] shows are anchored where its claim was: at the server's clock as the claiming
/// process knew it when it connected. Everything is counted in milliseconds.
///
/// # Damage
///
/// Every part of a record carries a checksum, or is there twice. A value that does not match, or that
/// was written by a newer release, is [`Corrupt`](crate::StoreErrorKind::Corrupt) for every move but
/// [`remove`](Store::remove), and stays. [`abandoned`](Store::abandoned) and [`purge`](Store::purge)
/// leave it out, and [`erase`](Store::erase) fails when only such are left. Keys are `{prefix}{digest}`, and the digest begins with
/// [`ScopedKey::log_id`]: `redis-cli --scan --pattern 'idempotency:{1f3a5c7e*'`.
///
/// # Example
///
/// ```no_run
/// use tower_idempotency::{IdempotencyLayer, RedisStore};
///
/// # async fn run() -> Result<(), tower_idempotency::StoreError> {
/// let layer = IdempotencyLayer::new(RedisStore::connect("redis://localhost").await?);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    link: Link,
    acknowledged: Option<Acknowledged>,
    keys: Keys,
    clock: Clock,
    grace: Duration,
    watchers: Watchers<ScopedKey>,
    purged_to: Mutex<Option<Position>>,
    unanswered: Mutex<Vec<Unanswered>>,
}

/// A record and its age, read in one step.
struct Kept {
    frame: Frame,
    age: u64,
}

impl RedisStore {
    /// Connects with the default [options](RedisOptions); [`RedisOptions::connect`] says what the URL
    /// may be.
    ///
    /// # Errors
    ///
    /// Those of [`RedisOptions::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        RedisOptions::new().connect(url).await
    }

    /// Uses a connection of the application with the default options.
    ///
    /// # Errors
    ///
    /// Those of [`RedisOptions::from_connection`].
    pub async fn from_connection(
        connection: impl Into<RedisConnection>,
    ) -> Result<Self, StoreError> {
        RedisOptions::new().from_connection(connection).await
    }

    /// The key under which the record of `key` lies, for an operator.
    pub fn record_key(&self, key: &ScopedKey) -> String {
        self.inner.keys.record(key)
    }

    /// Moves the times of one record into the past, as if it had been written `by` earlier: its
    /// creation, the end of its lease, its completion and its expiry. Whether there is such a record. One
    /// that Redis would have removed by then is removed.
    ///
    /// For [`Harness::age`](crate::testing::Harness::age), and for tests of services that want to
    /// meet an old record. Nothing else may happen to the record at the same time.
    ///
    /// # Errors
    ///
    /// Those of every move.
    #[cfg(feature = "testing")]
    pub async fn age(&self, key: &ScopedKey, by: Duration) -> Result<bool, StoreError> {
        let name = self.inner.keys.record(key);
        let Some((mut value, left)) = self.inner.load(&name).await? else {
            return Ok(false);
        };
        Kept::read(value.clone(), left).map_err(|damage| damaged(key, damage))?;
        let (by, left) = (millis(by), u64::try_from(left).unwrap_or(0));
        frame::backdate(&mut value, by);
        let mut pipe = Pipeline::new();
        if left > by {
            let set = pipe.cmd("SET").arg(&name).arg(value);
            set.arg("PX").arg(left - by);
        } else {
            pipe.cmd("UNLINK").arg(&name);
        }
        let replies = self.inner.link.send(To::Key(&name), &pipe, Repeat::Once);
        for reply in replies.await? {
            answered(reply)?;
        }
        self.inner.watchers.wake(key);
        Ok(true)
    }

    fn new(
        link: Link,
        acknowledged: Option<Acknowledged>,
        keys: Keys,
        clock: Clock,
        grace: Duration,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                link,
                acknowledged,
                keys,
                clock,
                grace,
                watchers: Watchers::default(),
                purged_to: Mutex::default(),
                unanswered: Mutex::default(),
            }),
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("key_prefix", &self.inner.keys.prefix())
            .field("cluster", &self.inner.link.is_cluster())
            .finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for RedisStore {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("redis", true, true)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.inner.claim(request).await
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        let inner = &*self.inner;
        let (lease, grace) = (millis(lease).to_string(), millis(inner.grace).to_string());
        let arguments: [&[u8]; 3] = [claim.owner().as_bytes(), lease.as_bytes(), grace.as_bytes()];
        // Not acknowledged by replicas: the next renewal makes good for one that was lost.
        let name = inner.keys.record(claim.key());
        let pipe = |by| only(scripts::LEASE.on(by, &[&name], &arguments));
        let replies = inner.link.run(To::Key(&name), Repeat::Once, pipe).await?;
        inner.fenced(claim.key(), replies).await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let inner = &*self.inner;
        let completion = inner
            .complete(claim.key(), claim.owner(), outcome, retention, None)
            .await?;
        inner.watchers.wake(claim.key());
        Ok(completion)
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let arguments: [&[u8]; 3] = [claim.owner().as_bytes(), b"", b""];
        self.inner
            .script(claim.key(), &scripts::RELEASE, &arguments)
            .await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let grace = millis(self.inner.grace).to_string();
        let arguments: [&[u8]; 3] = [claim.owner().as_bytes(), b"", grace.as_bytes()];
        self.inner
            .script(claim.key(), &scripts::LEASE, &arguments)
            .await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        self.inner.note(claim, None, correlation.as_bytes()).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        self.inner.note(claim, Some(name), data).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.inner.abandoned(after, limit).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let inner = &*self.inner;
        // A record that was not started, or whose lease is no number of milliseconds, is none that this
        // store showed as abandoned.
        let Some((created, lease)) = frame::seen(record) else {
            return Ok(Fenced::ClaimLost);
        };
        match resolution {
            Resolution::Completed(outcome) => {
                let seen = Some((created, lease));
                let completion = inner
                    .complete(&record.key, &record.owner, outcome, None, seen)
                    .await?;
                inner.watchers.wake(&record.key);
                Ok(match completion {
                    Completion::Recorded => Fenced::Applied,
                    Completion::Standing(_) | Completion::ClaimLost => Fenced::ClaimLost,
                })
            }
            Resolution::Released => {
                let lease = lease.to_string();
                let arguments: [&[u8]; 3] = [record.owner.as_bytes(), &created, lease.as_bytes()];
                inner.resolve_released(&record.key, &arguments).await
            }
        }
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let name = self.inner.keys.record(key);
        let Some((value, left)) = self.inner.load(&name).await? else {
            return Ok(None);
        };
        let kept = self.inner.read(key, value, &Value::Int(left))?;
        let kept = kept.filter(|kept| !kept.frame.is_expired(kept.age));
        Ok(kept.map(Kept::into_record))
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.unlink(key).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.inner.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let began = tokio::time::Instant::now();
        let watch = self.inner.watchers.watch(key);
        let mut longest = FIRST_POLL;
        loop {
            // Before the look, so that no change comes between.
            let rings = watch.next();
            let Some(lease_left) = self.inner.lease_left(key, seen).await? else {
                return Ok(());
            };
            let left = max.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            // The bell rings for what this process does. What others do shows only in the server, and
            // the waiters of many processes shall not look at the same moment.
            let pause = longest.mul_f64(0.5 + rand::random::<f64>() / 2.0);
            let _ = tokio::time::timeout(pause.min(lease_left).min(left), rings).await;
            longest = LONGEST_POLL.min(longest * 2);
        }
    }
}

impl Inner {
    /// Sends a move, and waits for replicas if they have to acknowledge it.
    async fn make(
        &self,
        name: &str,
        repeat: Repeat,
        pipe: impl Fn(By) -> Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        match &self.acknowledged {
            Some(acknowledged) => Box::pin(acknowledged.run(name, repeat, pipe)).await,
            None => self.link.run(To::Key(name), repeat, pipe).await,
        }
    }

    async fn script(
        &self,
        key: &ScopedKey,
        script: &Move,
        arguments: &[&[u8]],
    ) -> Result<Fenced, StoreError> {
        let name = self.keys.record(key);
        let pipe = |by| only(script.on(by, &[&name], arguments));
        let replies = self.make(&name, Repeat::Once, pipe).await?;
        let fenced = self.fenced(key, replies).await?;
        self.watchers.wake(key);
        Ok(fenced)
    }

    async fn fenced(&self, key: &ScopedKey, mut replies: Vec<Value>) -> Result<Fenced, StoreError> {
        match answered(replies.pop().ok_or_else(unexpected)?)? {
            Value::Int(1) => Ok(Fenced::Applied),
            Value::Int(0) => Ok(Fenced::ClaimLost),
            Value::Int(-1) => Err(self.unreadable(key).await),
            _ => Err(unexpected()),
        }
    }

    async fn resolve_released(
        &self,
        key: &ScopedKey,
        arguments: &[&[u8]],
    ) -> Result<Fenced, StoreError> {
        let name = self.keys.record(key);
        let pipe = |by| only(scripts::RELEASE.on(by, &[&name], arguments));
        // Repeated, it would be lost to itself.
        let replies = self.make(&name, Repeat::Never, pipe).await?;
        let fenced = self.fenced(key, replies).await?;
        self.watchers.wake(key);
        Ok(fenced)
    }

    async fn complete(
        &self,
        key: &ScopedKey,
        owner: &Owner,
        outcome: &Outcome,
        retention: Option<Duration>,
        seen: Option<([u8; 8], u64)>,
    ) -> Result<Completion, StoreError> {
        let name = self.keys.record(key);
        let retention = retention.map(|retention| millis(retention).to_string());
        let retention = retention.as_deref().unwrap_or_default().as_bytes();
        let lease = seen.map(|(_, lease)| lease.to_string());
        let lease = lease.as_deref().unwrap_or_default().as_bytes();
        let created: &[u8] = seen.as_ref().map_or(&[], |(created, _)| created);
        // Repeated, a resolution would be lost to itself.
        let repeat = match seen {
            Some(_) => Repeat::Never,
            None => Repeat::Once,
        };
        if outcome.as_bytes().len() > LARGE {
            let value = frame::outcome(owner, outcome, frame::HEAD);
            let beside = Keys::temporary(&name);
            let arguments: [&[u8]; 5] = [owner.as_bytes(), b"", retention, created, lease];
            let pipe = |by| {
                let mut pipe = Pipeline::with_capacity(3);
                let set = pipe.cmd("SET").arg(&beside).arg(&value[..]);
                set.arg("PX").arg(BESIDE);
                let keys = [&*name, &*beside];
                pipe.add_command(scripts::COMPLETE.on(by, &keys, &arguments));
                pipe
            };
            match self.make(&name, repeat, pipe).await {
                Ok(replies) => {
                    let [laid, completed] = replies.try_into().map_err(|_| unexpected())?;
                    // At `maxmemory` nothing is laid beside a record, and only a script goes on.
                    let full = is_code(&laid, "OOM");
                    match answered(completed)? {
                        Value::Int(-2) if full => {}
                        completed => {
                            answered(laid)?;
                            return self.completion(key, completed).await;
                        }
                    }
                }
                // While their slot moves, the two keys may be on two nodes.
                Err(error)
                    if error.is_transient() && self.link.is_cluster() && repeat == Repeat::Once => {
                }
                Err(error) => return Err(error),
            }
        }
        let value = frame::outcome(owner, outcome, 0);
        let arguments: [&[u8]; 5] = [owner.as_bytes(), &value, retention, created, lease];
        let pipe = |by| only(scripts::COMPLETE.on(by, &[&name], &arguments));
        let mut replies = self.make(&name, repeat, pipe).await?;
        let completed = answered(replies.pop().ok_or_else(unexpected)?)?;
        self.completion(key, completed).await
    }

    async fn completion(&self, key: &ScopedKey, reply: Value) -> Result<Completion, StoreError> {
        match reply {
            Value::Int(1) => Ok(Completion::Recorded),
            Value::Int(0) => Ok(Completion::ClaimLost),
            Value::Int(-1) => Err(Box::pin(self.unreadable(key)).await),
            Value::Int(-2) => Err(StoreError::unavailable(
                "the outcome that was laid beside its record is gone: ask again",
            )),
            Value::BulkString(value) => {
                let frame = Frame::read(value).map_err(|damage| damaged(key, damage))?;
                own(key, &frame)?;
                let outcome = frame.into_outcome().ok_or_else(unexpected)?;
                Ok(Completion::Standing(outcome))
            }
            _ => Err(unexpected()),
        }
    }

    async fn note(
        &self,
        claim: &Claim,
        checkpoint: Option<&str>,
        data: &[u8],
    ) -> Result<Fenced, StoreError> {
        let (note, head) = frame::note(checkpoint, data);
        let head = note.get(..head).unwrap_or_default();
        let arguments: [&[u8]; 3] = [claim.owner().as_bytes(), head, &note];
        self.script(claim.key(), &scripts::NOTE, &arguments).await
    }

    /// The value of a key and what is left of its life, in one step.
    async fn load(&self, name: &str) -> Result<Option<(Vec<u8>, i64)>, StoreError> {
        let pipe = |by| only(scripts::LOOK.on(by, &[name], &[]));
        let mut replies = self.link.run(To::Key(name), Repeat::Once, pipe).await?;
        looked(replies.pop().ok_or_else(unexpected)?)
    }

    /// `None`: the key went between the reading of its value and of its time to live.
    fn read(
        &self,
        key: &ScopedKey,
        value: Vec<u8>,
        left: &Value,
    ) -> Result<Option<Kept>, StoreError> {
        let left = match left {
            Value::Int(-2) => return Ok(None),
            Value::Int(left) => *left,
            _ => return Err(unexpected()),
        };
        let kept = Kept::read(value, left).map_err(|damage| damaged(key, damage))?;
        own(key, &kept.frame)?;
        Ok(Some(kept))
    }

    /// Why a script could not read the record of this key.
    async fn unreadable(&self, key: &ScopedKey) -> StoreError {
        let name = self.keys.record(key);
        let read = match self.load(&name).await {
            Ok(Some((value, left))) => self.read(key, value, &Value::Int(left)),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        match read {
            Err(error) => error,
            Ok(_) => StoreError::unavailable("the record changed while it was read: ask again"),
        }
    }

    /// What is left of the lease of a live claim of this owner.
    async fn lease_left(
        &self,
        key: &ScopedKey,
        owner: &Owner,
    ) -> Result<Option<Duration>, StoreError> {
        let name = self.keys.record(key);
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("GETRANGE").arg(&name).arg(0).arg(frame::HEAD - 1);
        pipe.cmd("PTTL").arg(&name);
        let replies = self.link.send(To::Key(&name), &pipe, Repeat::Once).await?;
        let [head, left] = replies.try_into().map_err(|_| unexpected())?;
        let (Value::BulkString(head), Value::Int(left)) = (answered(head)?, answered(left)?) else {
            return Err(unexpected());
        };
        let Ok(left) = u64::try_from(left) else {
            return Ok(None);
        };
        if head.is_empty() {
            return Ok(None);
        }
        let times = Times::read(&head).map_err(|damage| damaged(key, damage))?;
        if frame::owner_of(&head) != Some(*owner) {
            return Ok(None);
        }
        Ok(times.lease_left(times.age(left)))
    }
}

impl Kept {
    fn read(value: Vec<u8>, left: i64) -> Result<Self, Damage> {
        let left = u64::try_from(left);
        let left = left.map_err(|_| Damage::Part("has no time to live: somebody took it away"))?;
        let frame = Frame::read(value)?;
        let age = frame.age(left);
        Ok(Self { frame, age })
    }

    fn into_record(self) -> Record {
        self.frame.into_record(self.age)
    }
}

/// What `scripts::LOOK` says.
fn looked(reply: Value) -> Result<Option<(Vec<u8>, i64)>, StoreError> {
    match answered(reply)? {
        Value::Nil => Ok(None),
        Value::Array(found) => match <[Value; 2]>::try_from(found) {
            Ok([Value::BulkString(value), Value::Int(left)]) => Ok(Some((value, left))),
            _ => Err(unexpected()),
        },
        _ => Err(unexpected()),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn own(key: &ScopedKey, frame: &Frame) -> Result<(), StoreError> {
    if frame.key == *key {
        return Ok(());
    }
    Err(damaged(key, Damage::Part("is the record of another key")))
}

fn only(command: redis::Cmd) -> Pipeline {
    let mut pipe = Pipeline::with_capacity(2);
    pipe.add_command(command);
    pipe
}

/// Above this, what the scripting engine's copies of an outcome cost is more than a second key.
const LARGE: usize = 8 << 10;
/// How many milliseconds a value may lie beside its record.
const BESIDE: u64 = 60_000;
const FIRST_POLL: Duration = Duration::from_millis(10);
const LONGEST_POLL: Duration = Duration::from_millis(250);
