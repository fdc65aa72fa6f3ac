//! Wakes the waiters of this process, so that they need not wait for their next look.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// One bell for each key that is waited for, and none for any other. What stands for a key is up to
/// the store.
pub(super) struct Watchers<K> {
    bells: Mutex<HashMap<K, Bell>>,
    // So that a move of a key that nobody waits for takes no lock.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Bell {
    listeners: usize,
    rings: Arc<Notify>,
}

/// A stay at one bell; leaving takes its traces away.
pub(super) struct Watch<'a, K: Eq + Hash> {
    watchers: &'a Watchers<K>,
    key: &'a K,
    rings: Arc<Notify>,
}

impl<K: Eq + Hash> Watchers<K> {
    /// Begins to wait: whoever looks at the record afterwards misses nothing.
    pub(super) fn watch<'a>(&'a self, key: &'a K) -> Watch<'a, K>
    where
        K: Clone,
    {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut bells = self.bells();
        let bell = bells.entry(key.clone()).or_default();
        bell.listeners += 1;
        Watch {
            watchers: self,
            key,
            rings: Arc::clone(&bell.rings),
        }
    }

    /// Call after the move was acknowledged: whoever begins to watch later sees it in the store.
    pub(super) fn wake(&self, key: &K) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let rings = self.bells().get(key).map(|bell| Arc::clone(&bell.rings));
        // A waker is somebody else's code: not under the lock.
        if let Some(rings) = rings {
            rings.notify_waiters();
        }
    }

    fn bells(&self) -> MutexGuard<'_, HashMap<K, Bell>> {
        // Nothing under the lock panics; if it does after all, waiters look by themselves.
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Default for Watchers<K> {
    fn default() -> Self {
        Self {
            bells: Mutex::default(),
            waiting: AtomicUsize::new(0),
        }
    }
}

impl<K: Eq + Hash> Watch<'_, K> {
    /// Hears of everything that is acknowledged from now on, whether it is polled or not.
    pub(super) fn next(&self) -> Notified<'_> {
        self.rings.notified()
    }
}

impl<K: Eq + Hash> Drop for Watch<'_, K> {
    fn drop(&mut self) {
        let mut bells = self.watchers.bells();
        if let Some(bell) = bells.get_mut(self.key) {
            bell.listeners -= 1;
            if bell.listeners == 0 {
                bells.remove(self.key);
            }
        }
        self.watchers.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_waiter_is_woken_by_its_own_key_only() {
        let watchers = Watchers::default();
        let watch = watchers.watch(&1);
        let mut changed = Box::pin(watch.next());
        assert!(changed.as_mut().now_or_never().is_none());
        watchers.wake(&2);
        assert!(changed.as_mut().now_or_never().is_none());
        watchers.wake(&1);
        assert!(changed.now_or_never().is_some());
    }

    #[test]
    fn what_happens_before_the_first_poll_is_heard() {
        let watchers = Watchers::default();
        let watch = watchers.watch(&1);
        let changed = watch.next();
        watchers.wake(&1);
        assert!(changed.now_or_never().is_some());
    }

    #[test]
    fn waiters_that_left_leave_nothing_behind() {
        let watchers = Watchers::default();
        let first = watchers.watch(&1);
        let second = watchers.watch(&1);
        drop(first);
        assert_eq!(watchers.bells().len(), 1, "one is still waiting");
        drop(second);
        assert_eq!(watchers.bells().len(), 0);
        assert_eq!(watchers.waiting.load(Ordering::SeqCst), 0);
    }
}
