//! Waiting: until when, and how long between two tries.

use std::thread;
use std::time::{Duration, Instant};

/// When it is too late for something. By the system's time and not by tokio's: the store's threads,
/// which look at it, run in no runtime.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Instant);

#[allow(
    clippy::disallowed_methods,
    reason = "for the store's own threads, which no test pauses"
)]
impl Deadline {
    pub(super) fn after(limit: Duration) -> Self {
        Self(Instant::now() + limit)
    }

    pub(super) fn is_over(self) -> bool {
        Instant::now() >= self.0
    }
}

/// Pauses that double up to a limit. Each is cut by up to a half at random, so that those who began to
/// wait together do not go on together.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Pauses {
    pub(super) const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            next: first,
            longest,
        }
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.next.mul_f64(0.5 + rand::random::<f64>() / 2.0);
        self.next = self.longest.min(self.next * 2);
        pause
    }

    /// Sleeps through the next one. For threads of the store's own only.
    #[allow(clippy::disallowed_methods, reason = "no runtime has this thread")]
    pub(super) fn sleep(&mut self) {
        thread::sleep(self.next());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_limit_and_differ() {
        let millis = Duration::from_millis;
        for _ in 0..100 {
            let mut pauses = Pauses::new(millis(10), millis(35));
            for whole in [10, 20, 35, 35] {
                let pause = pauses.next();
                assert!(
                    pause >= millis(whole) / 2 && pause <= millis(whole),
                    "{pause:?}"
                );
            }
        }
        let first = || Pauses::new(millis(10), millis(10)).next();
        let one = first();
        assert!((0..100).any(|_| first() != one));
    }
}
