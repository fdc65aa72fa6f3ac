//! Who waits in this process for the record of a key to change.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::scope::ScopedKey;

/// One bell for each key that is waited for, and none for any other.
#[derive(Default)]
pub(super) struct Watchers {
    bells: Mutex<HashMap<ScopedKey, Bell>>,
    // So that a move of a key that nobody waits for takes no lock.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Bell {
    listeners: usize,
    rings: Arc<Notify>,
}

/// A stay at one bell; leaving takes its traces away.
pub(super) struct Watch<'a> {
    watchers: &'a Watchers,
    key: &'a ScopedKey,
    rings: Arc<Notify>,
}

impl Watchers {
    pub(super) fn watch<'a>(&'a self, key: &'a ScopedKey) -> Watch<'a> {
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
    pub(super) fn wake(&self, key: &ScopedKey) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let rings = self.bells().get(key).map(|bell| Arc::clone(&bell.rings));
        // A waker is somebody else's code: not under the lock.
        if let Some(rings) = rings {
            rings.notify_waiters();
        }
    }

    fn bells(&self) -> MutexGuard<'_, HashMap<ScopedKey, Bell>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch<'_> {
    /// Hears of everything that is acknowledged from now on, whether it is polled or not.
    pub(super) fn next(&self) -> Notified<'_> {
        self.rings.notified()
    }
}

impl Drop for Watch<'_> {
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
    use super::*;
    use crate::key::IdempotencyKey;

    #[test]
    fn waiters_that_left_leave_nothing_behind() {
        let watchers = Watchers::default();
        let key = ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap());
        let first = watchers.watch(&key);
        let second = watchers.watch(&key);
        drop(first);
        assert_eq!(watchers.bells().len(), 1, "one is still waiting");
        drop(second);
        assert_eq!(watchers.bells().len(), 0);
        assert_eq!(watchers.waiting.load(Ordering::SeqCst), 0);
    }
}
