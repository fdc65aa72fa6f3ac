//! The server's clock as this process knew it when it connected.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Dates records. Nothing is decided by it: ages and leases are measured by the server.
pub(super) struct Clock {
    anchor: Instant,
    anchored_at: u64,
}

impl Clock {
    #[allow(
        clippy::disallowed_methods,
        reason = "a server that does not tell its time leaves only this process's wall clock"
    )]
    pub(super) fn start(server_time: Option<u64>) -> Self {
        let own = || {
            let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            since_epoch.map_or(0, micros)
        };
        Self {
            anchor: Instant::now(),
            anchored_at: server_time.unwrap_or_else(own),
        }
    }

    /// Microseconds since the Unix epoch.
    pub(super) fn now(&self) -> u64 {
        self.anchored_at
            .saturating_add(micros(self.anchor.elapsed()))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
