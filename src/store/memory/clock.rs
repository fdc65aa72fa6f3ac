//! The store's clock: one monotonic count of microseconds, anchored to the wall clock once.

use std::future::Future;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout_at};

/// Microseconds since the Unix epoch, by the store's clock.
pub(super) type Micros = u64;

/// Runs evenly whatever is done to the wall clock, and stands still where tokio's time is paused.
pub(super) struct Clock {
    anchor: Instant,
    anchored_at: Micros,
}

impl Clock {
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the store's clock: it reads the wall clock once"
    )]
    pub(super) fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            anchor: Instant::now(),
            anchored_at: since_epoch.map_or(0, micros),
        }
    }

    pub(super) fn now(&self) -> Micros {
        self.anchored_at
            .saturating_add(micros(self.anchor.elapsed()))
    }

    /// Waits for `event`, but not past `until`.
    pub(super) async fn wait(&self, until: Micros, event: impl Future<Output = ()>) {
        let ahead = Duration::from_micros(until.saturating_sub(self.anchored_at));
        // A time that the timer cannot express is a time that nobody waits for.
        match self.anchor.checked_add(ahead) {
            Some(deadline) => {
                let _ = timeout_at(deadline, event).await;
            }
            None => event.await,
        }
    }
}

/// A duration in microseconds; one that does not fit is as good as for ever.
pub(super) fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
