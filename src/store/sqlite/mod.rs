//! The store in an SQLite file.

mod clock;
mod columns;
mod connection;
mod error;
mod one_commit;
mod patience;
mod reader;
mod recording;
mod row;
mod schema;
mod table;
#[cfg(test)]
mod tests;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::claim::{Claim, ClaimRequest, Claimed, Owner};
use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::Outcome;
use crate::record::Record;
use crate::scope::ScopedKey;
use crate::store::watchers::Watchers;
use crate::store::{
    AbandonedPage, Completion, Cursor, Fenced, Purged, Resolution, Store, StoreProperties,
};

use self::clock::{Clock, Micros};
use self::error::{full_queue, unanswered};
pub use self::one_commit::{SqliteOneCommit, SqliteTransaction, SqliteWork};
use self::patience::{Deadline, Pauses};
pub use self::recording::SqliteRecording;
use self::row::{After, Row};
use self::table::{Reads, Table};
use self::writer::{Call, Reply, Unattended};

/// Remembers keys in an SQLite file: durable on one machine, with nothing to install.
///
/// It keeps the whole contract of [`Store`]. Records outlive the process, and all processes of the
/// machine that open the file see the same ones ([`properties`](Store::properties): durable and
/// shared). Clones share two threads and two connections; the threads end after the last clone is
/// gone and its moves are made.
///
/// # Durability
///
/// What was answered is on the disk: the file is in WAL mode with `synchronous = FULL`, so that a
/// kept outcome survives a crash of the process, of the system, and a loss of power. The price of that
/// is a flush per commit, and moves that queue up while one is under way share the next one. A disk
/// that lies about flushing is beyond this.
///
/// # Many processes
///
/// Every process has a writer of its own, and every transaction takes the file's write lock before it
/// reads, so that a claim is one atomic step across all of them. Whoever finds the lock taken asks again
/// for as long as [`busy_timeout`](SqliteOptions::busy_timeout) says. The file must be on a local disk:
/// network file systems do not lock as SQLite needs it. Never delete or replace the file while a process
/// has it open.
///
/// Answers that change nothing (replays, mismatches, claims of keys that are in flight) come from a
/// connection that only reads. They wait for no lock and no flush.
///
/// # Time
///
/// Leases and retention run on the machine's wall clock. If it is set back, they last longer; if it leaps
/// ahead, leases end early. Let it be slewed, not stepped. `tokio::time::pause` does not move it,
/// and a paused runtime does not know that it waits for a thread: do not pause time in tests of this store.
///
/// # Damage
///
/// Every record carries a checksum. One that does not match, or cannot be decoded, is
/// [`StoreErrorKind::Corrupt`](crate::StoreErrorKind::Corrupt) for every move but
/// [`remove`](Store::remove), and stays in the file; [`purge`](Store::purge) leaves it, and
/// [`abandoned`](Store::abandoned) leaves it out. The same goes for rows that were changed by hand: the
/// table is for reading. `migrations/sqlite` says what its columns mean.
///
/// The file holds responses in plain bytes. SQLite makes it with the permissions that the process's umask
/// leaves.
///
/// # Example
///
/// ```no_run
/// use tower_idempotency::{IdempotencyLayer, SqliteStore};
///
/// # fn main() -> Result<(), tower_idempotency::StoreError> {
/// let layer = IdempotencyLayer::new(SqliteStore::open("idempotency.db")?);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

/// How an [`SqliteStore`] is opened.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency::SqliteOptions;
///
/// # fn main() -> Result<(), tower_idempotency::StoreError> {
/// let store = SqliteOptions::new()
///     .busy_timeout(Duration::from_secs(2))
///     .open("idempotency.db")?;
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    busy_timeout: Duration,
}

struct Inner {
    path: PathBuf,
    busy_timeout: Duration,
    reader: reader::Queue,
    writer: writer::Queue,
    shared: Arc<Shared>,
}

/// What the threads and the handles have in common.
#[derive(Default)]
struct Shared {
    clock: Clock,
    watchers: Watchers<ScopedKey>,
    commits: AtomicU64,
}

impl SqliteStore {
    /// Opens a file with the default [options](SqliteOptions), makes it if it is not there, and brings
    /// its tables up to date. It may be a file that the application keeps its own tables in: the
    /// store's are named `idempotency_…`. The file is put into WAL mode.
    ///
    /// Blocks for as long as the disk takes, so it belongs before the first request.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Other`](crate::StoreErrorKind::Other) if the directory does not exist, the
    /// file is no database, read-only or of a schema that needs a newer release, or if SQLite is older
    /// than 3.37; [`Unavailable`](crate::StoreErrorKind::Unavailable) if tables have to be made while
    /// somebody keeps the file locked.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        SqliteOptions::new().open(path)
    }

    /// How many transactions this handle and its clones have committed so far.
    #[cfg(feature = "testing")]
    pub fn commits(&self) -> u64 {
        let commits = &self.inner.shared.commits;
        commits.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Moves the times of one record into the past, as if it had been written `by` earlier: its
    /// creation, the end of its lease, its completion and its expiry. Whether there is such a record.
    ///
    /// For [`Harness::age`](crate::testing::Harness::age), and for tests of services that want to
    /// meet an old record. No time goes below the Unix epoch.
    ///
    /// # Errors
    ///
    /// Those of every move.
    #[cfg(feature = "testing")]
    pub async fn age(&self, key: &ScopedKey, by: Duration) -> Result<bool, StoreError> {
        let aged = self.change(key, move |row, _| {
            row.age(clock::micros(by));
            After::Changed(())
        });
        Ok(aged.await?.is_some())
    }

    fn start(
        path: &Path,
        options: &SqliteOptions,
    ) -> Result<(Self, [JoinHandle<()>; 2]), StoreError> {
        schema::check_library(rusqlite::version_number())?;
        let busy_timeout = options.busy_timeout;
        let deadline = Deadline::after(busy_timeout);
        let writer = connection::writer(path, deadline)?;
        schema::migrate(&writer, schema::MIGRATIONS, deadline)?;
        // What is wrong with the tables shows when the statements are prepared, before any request.
        Table::prepare(&writer)?;
        let reader = connection::reader(path, busy_timeout, deadline)?;
        let shared = Arc::new(Shared::default());
        let (writes, write_queue) = mpsc::channel(QUEUED_MOVES);
        let (reads, read_queue) = mpsc::channel(QUEUED_MOVES);
        let for_the_writer = Arc::clone(&shared);
        let threads = [
            spawn("idempotency-sqlite-reader", move || {
                reader::run(&reader, read_queue);
            })?,
            spawn("idempotency-sqlite-writer", move || {
                writer::run(&writer, write_queue, &for_the_writer);
            })?,
        ];
        let inner = Inner {
            path: path.to_owned(),
            busy_timeout,
            reader: reads,
            writer: writes,
            shared,
        };
        let store = Self {
            inner: Arc::new(inner),
        };
        Ok((store, threads))
    }

    /// Asks the reader.
    async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&mut Reads<'_>, Micros) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = Reply::channel();
        let shared = Arc::clone(&self.inner.shared);
        self.inner.enqueue_look(Box::new(move |reads| {
            reply.send(reads.and_then(|reads| look(reads, shared.clock.now())));
        }))?;
        answer.await
    }

    /// Asks the writer.
    async fn make<T: Send + 'static>(
        &self,
        key: Option<&ScopedKey>,
        apply: impl FnMut(&mut Table<'_>, Micros) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = Reply::channel();
        let mut call = Call::new(self.inner.deadline(), reply, apply);
        call.key = key.cloned();
        call.send(&self.inner.writer);
        answer.await
    }

    /// Changes the record of a key; `None` if it has none.
    async fn change<T: Send + 'static>(
        &self,
        key: &ScopedKey,
        mut change: impl FnMut(&mut Row, Micros) -> After<T> + Send + 'static,
    ) -> Result<Option<T>, StoreError> {
        let changed = key.clone();
        self.make(Some(key), move |table, now| {
            table.change(&changed, |row| change(row, now))
        })
        .await
    }

    async fn fenced(
        &self,
        claim: &Claim,
        mut change: impl FnMut(&mut Row, &Owner, Micros) -> After<Fenced> + Send + 'static,
    ) -> Result<Fenced, StoreError> {
        let owner = *claim.owner();
        let changed = self.change(claim.key(), move |row, now| change(row, &owner, now));
        Ok(changed.await?.unwrap_or(Fenced::ClaimLost))
    }
}

impl SqliteOptions {
    /// The defaults, which [`SqliteStore::open`] uses.
    pub fn new() -> Self {
        Self {
            busy_timeout: BUSY_TIMEOUT,
        }
    }

    /// How long a move asks for a file that another connection has locked, its time in the queue
    /// included, before it is [`Unavailable`](crate::StoreErrorKind::Unavailable). Default: 4 s, a
    /// little less than what the engine allows for a store call, so that a caller hears the reason.
    ///
    /// Zero asks once. More than a day is a day.
    #[must_use]
    pub fn busy_timeout(mut self, limit: Duration) -> Self {
        self.busy_timeout = limit.min(LONGEST_BUSY_TIMEOUT);
        self
    }

    /// Opens a file with these options.
    ///
    /// # Errors
    ///
    /// Those of [`SqliteStore::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<SqliteStore, StoreError> {
        SqliteStore::start(path.as_ref(), self).map(|(store, _threads)| store)
    }
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("path", &self.inner.path)
            .field("busy_timeout", &self.inner.busy_timeout)
            .finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for SqliteStore {
    fn properties(&self) -> StoreProperties {
        StoreProperties::new("sqlite", true, true)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let (reply, answer) = Reply::channel();
        let claim = request.clone();
        let mut call = Call::new(self.inner.deadline(), reply, move |table, now| {
            table.claim(&claim, now)
        });
        call.key = Some(request.key.clone());
        call.unattended = Unattended::Drop;
        let claim = request.clone();
        let writer = self.inner.writer.clone();
        let shared = Arc::clone(&self.inner.shared);
        // The reader first. A record that stands in the way changes nothing (rule 5), and each of the
        // reader's statements sees one moment of the file, later than everything that was acknowledged
        // before this call and earlier than its answer: that moment is the atomic step. Whatever
        // becomes of the record then (it is completed, released, purged, removed), it becomes after
        // this claim. Where nothing stands in the way, nothing is concluded from that: the writer
        // decides, under its lock.
        self.inner.enqueue_look(Box::new(move |reads| {
            let standing = reads.and_then(|reads| reads.standing(&claim, shared.clock.now()));
            match standing {
                Ok(Some(record)) => call.reply.send(Ok(Claimed::Existing(record))),
                Ok(None) => call.send(&writer),
                Err(error) => call.reply.send(Err(error)),
            }
        }))?;
        answer.await
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.fenced(claim, move |row, owner, now| row.renew(owner, lease, now))
            .await
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        let (owner, outcome) = (*claim.owner(), outcome.clone());
        let completed = self.change(claim.key(), move |row, now| {
            row.complete(&owner, &outcome, retention, now)
        });
        Ok(completed.await?.unwrap_or(Completion::ClaimLost))
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        let owner = *claim.owner();
        let released = self.change(claim.key(), move |row, _| row.release(&owner));
        Ok(released.await?.unwrap_or(Fenced::Applied))
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.fenced(claim, |row, owner, now| row.abandon(owner, now))
            .await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        let correlation = correlation.to_owned();
        self.fenced(claim, move |row, owner, _| {
            row.annotate(owner, &correlation)
        })
        .await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        let (name, data) = (name.to_owned(), data.clone());
        self.fenced(claim, move |row, owner, _| {
            row.checkpoint(owner, &name, &data)
        })
        .await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        let after = match after {
            Some(cursor) => table::position(cursor).ok_or_else(|| {
                StoreError::new(
                    StoreErrorKind::Other,
                    "the cursor is not one of this store: begin the walk anew",
                )
            })?,
            None => i64::MIN,
        };
        self.look(move |reads, now| reads.abandoned(after, limit, now))
            .await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        let (seen, resolution) = (record.clone(), resolution.clone());
        let resolved = self.change(&record.key, move |row, now| {
            row.resolve(&seen, &resolution, now)
        });
        Ok(resolved.await?.unwrap_or(Fenced::ClaimLost))
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        let key = key.clone();
        self.look(move |reads, now| reads.lookup(&key, now)).await
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        let removed = key.clone();
        self.make(Some(key), move |table, _| table.remove(&removed))
            .await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        let mut erased = 0;
        let mut damaged = 0;
        let mut after = i64::MIN;
        while erased < limit {
            // Looked for without the write lock.
            let (within, scope) = (within.to_owned(), scope.to_owned());
            let met = self.look(move |reads, _| reads.keys_of(&within, &scope, after));
            let met = met.await?;
            damaged += met.damaged;
            for keys in met.keys.chunks(ERASED_PER_MOVE) {
                let keys = keys[..keys.len().min(limit - erased)].to_vec();
                let removing = keys.clone();
                let removed = self.make(None, move |table, _| {
                    let mut removed = 0;
                    for key in &removing {
                        removed += usize::from(table.remove(key)?);
                    }
                    Ok(removed)
                });
                erased += removed.await?;
                for key in &keys {
                    self.inner.shared.watchers.wake(key);
                }
            }
            match met.next {
                Some(next) => after = next,
                None => break,
            }
        }
        if erased == 0 && damaged > 0 {
            return Err(StoreError::corrupt(format!(
                "the keys of {damaged} records cannot be read, and nobody can say whose they are: look \
                 at them, then delete their rows"
            )));
        }
        Ok(erased)
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        let mut purged = Purged::default();
        let mut damaged = 0;
        let mut from = (Micros::MIN, i64::MIN);
        // In slices, each a move among others: whoever claims a key waits for one of them at most.
        while purged.removed < limit {
            let left = limit - purged.removed;
            let swept = self.make(None, move |table, now| {
                let slice = Deadline::after(PURGE_SLICE);
                table.purge(from, left, now, || slice.is_over())
            });
            let swept = swept.await?;
            purged.removed += swept.purged.removed;
            purged.unresolved += swept.purged.unresolved;
            damaged += swept.damaged;
            match swept.next {
                Some(next) => from = next,
                None => break,
            }
        }
        if purged.removed == 0 && damaged > 0 {
            return Err(StoreError::corrupt(format!(
                "{damaged} expired records do not match their checksums and are left where they are: \
                 look at them, then delete their rows"
            )));
        }
        Ok(purged)
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        let began = tokio::time::Instant::now();
        let watch = self.inner.shared.watchers.watch(key);
        let mut polls = Pauses::new(FIRST_POLL, LONGEST_POLL);
        loop {
            // Before the look, so that no change comes between.
            let rings = watch.next();
            let (key, seen) = (key.clone(), *seen);
            let lease_left = self.look(move |reads, now| {
                let until = reads.live_until(&key, &seen, now)?;
                Ok(until.map(|until| until.saturating_sub(now)))
            });
            let Some(lease_left) = lease_left.await? else {
                return Ok(());
            };
            let left = max.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            let lease_left = Duration::from_micros(lease_left.try_into().unwrap_or(0));
            // The bell rings for what this process does. What others do shows only in the file, and
            // the waiters of many processes shall not look at the same moment.
            let _ = tokio::time::timeout(polls.next().min(lease_left).min(left), rings).await;
        }
    }
}

impl Inner {
    fn deadline(&self) -> Deadline {
        Deadline::after(self.busy_timeout)
    }

    fn enqueue_look(&self, look: reader::Look) -> Result<(), StoreError> {
        self.reader.try_send(look).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => full_queue(),
            mpsc::error::TrySendError::Closed(_) => unanswered(),
        })
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|error| {
        StoreError::unavailable("the system gives the process no more threads").with_source(error)
    })
}

const BUSY_TIMEOUT: Duration = Duration::from_secs(4);
const LONGEST_BUSY_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// Far above what a healthy disk lets queue up; what is beyond it would have to wait too long.
const QUEUED_MOVES: usize = 8_192;
/// Whoever claims a key waits for one such move at most.
const ERASED_PER_MOVE: usize = 64;
const PURGE_SLICE: Duration = Duration::from_millis(5);
const FIRST_POLL: Duration = Duration::from_millis(10);
const LONGEST_POLL: Duration = Duration::from_millis(250);
