//! The thread that reads: in WAL mode it waits for no writer, of this process or another one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rusqlite::Connection;
use tokio::sync::mpsc;

use crate::error::StoreError;

use super::table::Reads;

/// A look at the file; it sends its own reply.
pub(super) type Look = Box<dyn FnOnce(Result<&mut Reads<'_>, StoreError>) + Send>;

pub(super) type Queue = mpsc::Sender<Look>;

/// Serves the queue until its last sender is gone and it is empty.
pub(super) fn run(connection: &Connection, mut queue: mpsc::Receiver<Look>) {
    loop {
        // As in the writer: a panic is a bug, and costs its own caller the reply.
        let served = catch_unwind(AssertUnwindSafe(|| serve(connection, &mut queue)));
        if served.is_ok() {
            return;
        }
    }
}

fn serve(connection: &Connection, queue: &mut mpsc::Receiver<Look>) {
    let mut prepared = None;
    while let Some(look) = queue.blocking_recv() {
        // Tried again for every look, because somebody may put a missing table back.
        let reads = match prepared.take() {
            Some(reads) => Ok(reads),
            None => Reads::prepare(connection),
        };
        match reads {
            Ok(reads) => look(Ok(prepared.insert(reads))),
            Err(error) => look(Err(error)),
        }
    }
}
