//! Wakes the waiters of this process, so that they need not wait for their next look.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

type Digest = [u8; 32];

/// Who waits for which record.
#[derive(Default)]
pub(super) struct Watchers {
    waiting: Mutex<HashMap<Digest, Arc<Notify>>>,
    // So that a move of a record for which nobody waits takes no lock.
    keys: AtomicUsize,
}

impl Watchers {
    /// Somebody changed this record.
    pub(super) fn wake(&self, digest: &Digest) {
        if self.keys.load(Ordering::Acquire) == 0 {
            return;
        }
        if let Some(watched) = self.lock().get(digest) {
            watched.notify_waiters();
        }
    }

    /// Begins to wait; whoever looks at the record afterwards misses nothing.
    pub(super) fn watch(&self, digest: Digest) -> Watch<'_> {
        let mut waiting = self.lock();
        let changed = Arc::clone(waiting.entry(digest).or_default());
        self.keys.store(waiting.len(), Ordering::Release);
        Watch {
            watchers: self,
            digest,
            changed,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, Arc<Notify>>> {
        // Nothing under the lock panics; if it does after all, waiters look by themselves.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A waiter's stay at one record; leaving takes its traces away.
pub(super) struct Watch<'a> {
    watchers: &'a Watchers,
    digest: Digest,
    pub(super) changed: Arc<Notify>,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut waiting = self.watchers.lock();
        // One count is the map's and one is ours.
        if Arc::strong_count(&self.changed) <= 2 {
            waiting.remove(&self.digest);
        }
        self.watchers.keys.store(waiting.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_waiter_is_woken_by_its_own_record_only() {
        let watchers = Watchers::default();
        let watch = watchers.watch([1; 32]);
        let mut changed = Box::pin(watch.changed.notified());
        assert!(changed.as_mut().now_or_never().is_none());
        watchers.wake(&[2; 32]);
        assert!(changed.as_mut().now_or_never().is_none());
        watchers.wake(&[1; 32]);
        assert!(changed.now_or_never().is_some());
    }

    #[test]
    fn nothing_is_left_of_waiters_that_leave() {
        let watchers = Watchers::default();
        let first = watchers.watch([1; 32]);
        let second = watchers.watch([1; 32]);
        drop(first);
        assert_eq!(watchers.keys.load(Ordering::Relaxed), 1);
        drop(second);
        assert!(watchers.lock().is_empty());
        assert_eq!(watchers.keys.load(Ordering::Relaxed), 0);
    }
}
