//! How long to wait between two tries.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Exponential ceilings, and what is picked below them.
#[derive(Clone)]
pub(super) struct Backoff {
    pub(super) base: Duration,
    pub(super) cap: Duration,
    pub(super) pick: Pick,
}

/// Picks a delay for a ceiling.
pub(super) type Pick = Arc<dyn Fn(Duration) -> Duration + Send + Sync>;

impl Backoff {
    /// The longest delay before retry `n`, from 0: `min(cap, base × 2^n)`.
    pub(super) fn ceiling(&self, n: u32) -> Duration {
        let factor = 2_u32.saturating_pow(n);
        self.base.saturating_mul(factor).min(self.cap)
    }

    /// The delay before retry `n`, from 0.
    pub(super) fn delay(&self, n: u32) -> Duration {
        let ceiling = self.ceiling(n);
        (self.pick)(ceiling).min(ceiling)
    }

    /// The sum of the first `retries` ceilings.
    pub(super) fn total(&self, retries: u32) -> Duration {
        // From here on the factor of `ceiling` does not grow.
        let growing = retries.min(u32::BITS);
        let grown = (0..growing)
            .map(|n| self.ceiling(n))
            .fold(Duration::ZERO, Duration::saturating_add);
        let level = self.ceiling(u32::BITS).saturating_mul(retries - growing);
        grown.saturating_add(level)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            base: BASE,
            cap: CAP,
            pick: Arc::new(full_jitter),
        }
    }
}

impl fmt::Debug for Backoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backoff")
            .field("base", &self.base)
            .field("cap", &self.cap)
            .finish_non_exhaustive()
    }
}

/// Anything from nothing to the ceiling. With any less of it, clients that failed together come back
/// together.
fn full_jitter(ceiling: Duration) -> Duration {
    rand::random_range(Duration::ZERO..=ceiling)
}

const BASE: Duration = Duration::from_millis(500);
const CAP: Duration = Duration::from_secs(8);
