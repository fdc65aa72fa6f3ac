//! The thread that writes: whatever has queued up becomes one transaction.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rusqlite::{Connection, Statement};
use tokio::sync::{mpsc, oneshot};

use crate::error::StoreError;
use crate::scope::ScopedKey;

use super::Shared;
use super::clock::Micros;
use super::connection::pauses;
use super::error::{busy, failed, full_queue, is_busy, unanswered, uncommitted};
use super::patience::Deadline;
use super::table::Table;

/// A move on its way through the writer.
pub(super) trait Move: Send {
    /// Whose waiters want to hear of it.
    fn key(&self) -> Option<&ScopedKey>;
    /// When it is too late to begin with it.
    fn deadline(&self) -> Deadline;
    /// Whether it shall be made although nobody waits for its reply any more.
    fn is_wanted(&self) -> bool;
    /// Makes the move within a transaction, and keeps the reply. May be called again when that
    /// transaction was rolled back.
    fn apply(&mut self, table: &mut Table<'_>, now: Micros) -> Result<(), ()>;
    /// Hands over the reply.
    fn answer(self: Box<Self>);
    /// Hands over an error instead.
    fn refuse(self: Box<Self>, error: StoreError);
}

pub(super) type Queue = mpsc::Sender<Box<dyn Move>>;

/// A move that is written as a closure.
pub(super) struct Call<T, F> {
    pub(super) key: Option<ScopedKey>,
    pub(super) deadline: Deadline,
    pub(super) unattended: Unattended,
    pub(super) apply: F,
    pub(super) reply: Reply<T>,
    done: Option<Result<T, StoreError>>,
}

/// What becomes of a move whose caller left while it was queued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Unattended {
    /// It is made all the same.
    Make,
    /// It is dropped. A claim that nobody has heard of would only age into an unknown outcome.
    Drop,
}

/// Where the reply to one call goes.
pub(super) struct Reply<T>(oneshot::Sender<Result<T, StoreError>>);

impl<T> Reply<T> {
    pub(super) fn channel() -> (Self, impl Future<Output = Result<T, StoreError>>) {
        let (sender, receiver) = oneshot::channel();
        let answer = async { receiver.await.unwrap_or_else(|_| Err(unanswered())) };
        (Self(sender), answer)
    }

    pub(super) fn send(self, reply: Result<T, StoreError>) {
        // A caller that left takes no reply; what was done stays done.
        let _ = self.0.send(reply);
    }
}

impl<T, F> Call<T, F>
where
    T: Send + 'static,
    F: FnMut(&mut Table<'_>, Micros) -> Result<T, StoreError> + Send + 'static,
{
    pub(super) fn new(deadline: Deadline, reply: Reply<T>, apply: F) -> Self {
        Self {
            key: None,
            deadline,
            unattended: Unattended::Make,
            apply,
            reply,
            done: None,
        }
    }

    /// Queues the call, or refuses it at once.
    pub(super) fn send(self, queue: &Queue) {
        let refused = match queue.try_send(Box::new(self)) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(call)) => (call, full_queue()),
            Err(mpsc::error::TrySendError::Closed(call)) => (call, unanswered()),
        };
        refused.0.refuse(refused.1);
    }
}

impl<T, F> Move for Call<T, F>
where
    T: Send + 'static,
    F: FnMut(&mut Table<'_>, Micros) -> Result<T, StoreError> + Send + 'static,
{
    fn key(&self) -> Option<&ScopedKey> {
        self.key.as_ref()
    }

    fn deadline(&self) -> Deadline {
        self.deadline
    }

    fn is_wanted(&self) -> bool {
        self.unattended == Unattended::Make || !self.reply.0.is_closed()
    }

    fn apply(&mut self, table: &mut Table<'_>, now: Micros) -> Result<(), ()> {
        let done = (self.apply)(table, now);
        let failed = done.is_err();
        self.done = Some(done);
        if failed { Err(()) } else { Ok(()) }
    }

    fn answer(self: Box<Self>) {
        let done = self.done.unwrap_or_else(|| Err(unanswered()));
        self.reply.send(done);
    }

    fn refuse(self: Box<Self>, error: StoreError) {
        self.reply.send(Err(error));
    }
}

/// Serves the queue until its last sender is gone and it is empty.
pub(super) fn run(
    connection: &Connection,
    mut queue: mpsc::Receiver<Box<dyn Move>>,
    shared: &Shared,
) {
    loop {
        // A panic is a bug. It takes the batch along, whose callers hear that nothing is known of
        // their moves; those that are queued behind it are not to blame.
        let served = catch_unwind(AssertUnwindSafe(|| {
            Writer::prepare(connection, shared).map(|mut writer| writer.serve(&mut queue))
        }));
        roll_back(connection);
        match served {
            Ok(Ok(())) => return,
            Ok(Err(error)) => match queue.blocking_recv() {
                Some(first) => first.refuse(error),
                None => return,
            },
            Err(_) => {}
        }
    }
}

struct Writer<'c> {
    connection: &'c Connection,
    shared: &'c Shared,
    begin: Statement<'c>,
    commit: Statement<'c>,
    table: Table<'c>,
}

type Batch = Vec<Box<dyn Move>>;

impl<'c> Writer<'c> {
    fn prepare(connection: &'c Connection, shared: &'c Shared) -> Result<Self, StoreError> {
        Ok(Self {
            connection,
            shared,
            // The write lock first: a transaction that reads before it asks for the lock can find
            // that what it read has changed, and fails then.
            begin: connection.prepare("BEGIN IMMEDIATE").map_err(failed)?,
            commit: connection.prepare("COMMIT").map_err(failed)?,
            table: Table::prepare(connection)?,
        })
    }

    /// Waits for nobody to join: what comes during a commit is the next batch. A pause before each
    /// commit was measured; it made batches a third larger and few callers a third slower.
    fn serve(&mut self, queue: &mut mpsc::Receiver<Box<dyn Move>>) {
        let mut batch = Batch::with_capacity(LARGEST_BATCH);
        while queue.blocking_recv_many(&mut batch, LARGEST_BATCH) > 0 {
            while !batch.is_empty() {
                self.settle(&mut batch, queue);
            }
        }
    }

    /// One transaction. Leaves in the batch what has to be tried again in another one.
    fn settle(&mut self, batch: &mut Batch, queue: &mut mpsc::Receiver<Box<dyn Move>>) {
        if !self.lock(batch, queue) {
            return;
        }
        batch.retain(|call| call.is_wanted());
        for n in 0..batch.len() {
            let applied = batch[n].apply(&mut self.table, self.shared.clock.now());
            // A statement that fails is undone alone, as a rule. Some failures take the whole
            // transaction along: then the others begin once more, without the one that failed.
            if applied.is_err() && self.connection.is_autocommit() {
                batch.remove(n).answer();
                return;
            }
        }
        let Err(error) = self.commit.execute([]) else {
            self.shared.commits.fetch_add(1, Ordering::Relaxed);
            for call in &*batch {
                if let Some(key) = call.key() {
                    self.shared.watchers.wake(key);
                }
            }
            batch.drain(..).for_each(Move::answer);
            return;
        };
        roll_back(self.connection);
        let error = Arc::new(error);
        for call in batch.drain(..) {
            call.refuse(uncommitted(Arc::clone(&error)));
        }
    }

    /// Takes the write lock, and tells whether there is something left to do with it.
    fn lock(&mut self, batch: &mut Batch, queue: &mut mpsc::Receiver<Box<dyn Move>>) -> bool {
        let mut pauses = pauses();
        while !batch.is_empty() {
            let Err(error) = self.begin.execute([]) else {
                return true;
            };
            if !is_busy(&error) {
                let error = Arc::new(error);
                for call in batch.drain(..) {
                    call.refuse(failed(Arc::clone(&error)));
                }
                return false;
            }
            pauses.sleep();
            for call in batch.extract_if(.., |call| call.deadline().is_over()) {
                call.refuse(busy());
            }
            // Those that came meanwhile wait for the lock together with the others.
            while batch.len() < LARGEST_BATCH
                && let Ok(call) = queue.try_recv()
            {
                batch.push(call);
            }
        }
        false
    }
}

fn roll_back(connection: &Connection) {
    if !connection.is_autocommit() {
        // If it fails, SQLite has done it already, or the next transaction fails and says why.
        let _ = connection.execute_batch("ROLLBACK");
    }
}

/// Enough to share a commit among many, few enough that the first does not wait long for the last.
const LARGEST_BATCH: usize = 256;
