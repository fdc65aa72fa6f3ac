//! Which keys this process has met lately: a hint, and nothing rests on it.
//!
//! The statement that inserts a record or shows the one that stands costs the server about twice as
//! much as one that only reads, because it has to be ready to insert. A retry comes most often to
//! the process that ran the first request, so that one reads first.

use std::sync::atomic::{AtomicU64, Ordering};

type Digest = [u8; 32];

/// A table of fixed size in which a newer key takes the place of an older one.
pub(super) struct Seen {
    slots: Box<[AtomicU64]>,
}

impl Seen {
    pub(super) fn note(&self, digest: &Digest) {
        let (slot, mark) = self.place(digest);
        // Read first: a key that is asked for again and again leaves the cache line shared.
        if slot.load(Ordering::Relaxed) != mark {
            slot.store(mark, Ordering::Relaxed);
        }
    }

    pub(super) fn has(&self, digest: &Digest) -> bool {
        let (slot, mark) = self.place(digest);
        slot.load(Ordering::Relaxed) == mark
    }

    pub(super) fn forget(&self, digest: &Digest) {
        let (slot, mark) = self.place(digest);
        let _ = slot.compare_exchange(mark, EMPTY, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn place(&self, digest: &Digest) -> (&AtomicU64, u64) {
        let [a, b, c, d, e, f, g, h, low, high, ..] = *digest;
        let slot = usize::from(u16::from_le_bytes([low, high])) % self.slots.len();
        // An empty slot is nobody's.
        let mark = u64::from_le_bytes([a, b, c, d, e, f, g, h]) | 1;
        (&self.slots[slot], mark)
    }
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            slots: (0..SLOTS).map(|_| AtomicU64::new(EMPTY)).collect(),
        }
    }
}

const EMPTY: u64 = 0;
/// 256 KiB.
const SLOTS: usize = 1 << 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_until_it_is_forgotten_or_displaced() {
        let seen = Seen::default();
        let (one, mut two) = ([7; 32], [7; 32]);
        assert!(!seen.has(&one) && !seen.has(&[0; 32]));
        seen.note(&one);
        assert!(seen.has(&one));
        // The same slot, another key.
        two[3] = 8;
        assert!(!seen.has(&two));
        seen.forget(&two);
        assert!(seen.has(&one));
        seen.note(&two);
        assert!(seen.has(&two) && !seen.has(&one));
        seen.forget(&two);
        assert!(!seen.has(&two));
    }
}
