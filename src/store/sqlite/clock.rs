//! The store's clock: the machine's wall clock.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

/// Microseconds since the Unix epoch, as SQLite keeps them.
pub(super) type Micros = i64;

/// All processes on one file run on one machine, so this is one clock for all of them. A monotonic
/// clock would not do: records outlive the boot that it counts from.
///
/// A wall clock can be set back. Within a process it then stands still here until it has caught up.
/// Nothing is kept of it beyond the process, because a clock that is behind errs on the careful side:
/// leases and retentions last longer.
#[derive(Debug, Default)]
pub(super) struct Clock {
    latest: AtomicI64,
}

impl Clock {
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the store's clock: it reads the wall clock"
    )]
    pub(super) fn now(&self) -> Micros {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.not_before_the_latest(since_epoch.map_or(0, micros))
    }

    fn not_before_the_latest(&self, now: Micros) -> Micros {
        self.latest.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

/// A duration in microseconds; one that does not fit is as good as for ever.
pub(super) fn micros(duration: Duration) -> Micros {
    Micros::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_set_back_stands_still_until_it_has_caught_up() {
        let clock = Clock::default();
        let seen: Vec<_> = [5, 9, 3, 8, 9, 10]
            .map(|now| clock.not_before_the_latest(now))
            .into();
        assert_eq!(seen, [5, 9, 9, 9, 9, 10]);
    }

    #[test]
    fn the_clock_shows_microseconds_since_the_epoch() {
        // 2020-01-01 and 2200-01-01: a unit that is wrong by a factor is out of these bounds.
        let now = Clock::default().now();
        assert!((1_577_836_800_000_000..7_258_118_400_000_000).contains(&now));
    }

    #[test]
    fn a_duration_that_does_not_fit_is_for_ever() {
        assert_eq!(micros(Duration::from_millis(2)), 2_000);
        assert_eq!(micros(Duration::MAX), Micros::MAX);
    }
}
