//! Under which names records lie.

use crate::error::{StoreError, StoreErrorKind};
use crate::scope::ScopedKey;

/// `prefix{digest}`: the braces are the hash tag of a cluster, so that what lies beside a record lies in
/// its slot.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

/// What a key that a walk meets stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Met {
    Record([u8; DIGEST]),
    Counter,
    /// A temporary key, or somebody else's.
    Other,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Result<Self, StoreError> {
        if prefix.contains(['{', '}']) {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "`key_prefix` has a brace in it: it would put all records into one slot of a cluster",
            ));
        }
        Ok(Self {
            prefix: prefix.to_owned(),
        })
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key of a record. Half a digest is enough to tell keys apart, and every value names its key
    /// in full, so that not even a collision could show somebody else's record.
    pub(super) fn record(&self, key: &ScopedKey) -> String {
        let [digest, _] = halves(key.digest());
        self.of_digest(&digest)
    }

    pub(super) fn of_digest(&self, digest: &[u8; DIGEST]) -> String {
        let mut name = String::with_capacity(self.prefix.len() + 2 * DIGEST + 2);
        name.push_str(&self.prefix);
        name.push('{');
        for byte in digest {
            name.push(char::from(DIGITS[usize::from(byte >> 4)]));
            name.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        name.push('}');
        name
    }

    /// Where expired unknowns of a record are counted until a purge tells of them.
    pub(super) fn counter(record: &str) -> String {
        format!("{record}{COUNTER}")
    }

    /// Where a purge that removed or counted this key says so, for when its reply is lost.
    pub(super) fn receipt(key: &str) -> String {
        format!("{key}{RECEIPT}")
    }

    /// A key for one value that is on its way to a record.
    pub(super) fn temporary(record: &str) -> String {
        format!("{record}:t:{:016x}", rand::random::<u64>())
    }

    /// The pattern for `SCAN` that finds all of them.
    pub(super) fn pattern(&self) -> String {
        let mut pattern = String::new();
        for c in self.prefix.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '^' | '\\') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern + "{*"
    }

    pub(super) fn met(&self, key: &[u8]) -> Met {
        self.try_met(key).unwrap_or(Met::Other)
    }

    fn try_met(&self, key: &[u8]) -> Option<Met> {
        let rest = key.strip_prefix(self.prefix.as_bytes())?;
        let (digits, rest) = rest.strip_prefix(b"{")?.split_at_checked(2 * DIGEST)?;
        match rest.strip_prefix(b"}")? {
            b"" => {}
            rest if rest == COUNTER.as_bytes() => return Some(Met::Counter),
            _ => return None,
        }
        let mut digest = [0; DIGEST];
        let nibble = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        for (byte, digits) in digest.iter_mut().zip(digits.chunks(2)) {
            *byte = nibble(digits[0])? << 4 | nibble(digits[1])?;
        }
        Some(Met::Record(digest))
    }
}

fn halves(digest: [u8; 32]) -> [[u8; DIGEST]; 2] {
    let mut halves = [[0; DIGEST]; 2];
    for (half, bytes) in halves.iter_mut().zip(digest.chunks(DIGEST)) {
        half.copy_from_slice(bytes);
    }
    halves
}

pub(super) const DIGEST: usize = 16;
const DIGITS: &[u8; 16] = b"0123456789abcdef";
const COUNTER: &str = ":x";
const RECEIPT: &str = ":r";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::IdempotencyKey;

    fn key() -> ScopedKey {
        ScopedKey::new("http", "alice", &IdempotencyKey::new("order-1").unwrap())
    }

    #[test]
    fn an_operator_finds_a_record_by_what_the_logs_show_of_it() {
        let name = Keys::new("idempotency:").unwrap().record(&key());
        let begin = format!("idempotency:{{{}", key().log_id());
        assert!(name.starts_with(&begin) && name.len() == 12 + 34, "{name}");
        assert!(!name.contains("alice") && !name.contains("order"), "{name}");
    }

    #[test]
    fn keys_that_a_walk_meets_are_told_apart() {
        let keys = Keys::new("a*:").unwrap();
        let record = keys.record(&key());
        let Met::Record(digest) = keys.met(record.as_bytes()) else {
            panic!("{record} is not met as a record");
        };
        assert_eq!(keys.of_digest(&digest), record);
        assert_eq!(keys.met(Keys::counter(&record).as_bytes()), Met::Counter);
        let temporary = Keys::temporary(&record);
        let receipts = [
            Keys::receipt(&record),
            Keys::receipt(&Keys::counter(&record)),
        ];
        for other in [
            &*temporary,
            &*receipts[0],
            &*receipts[1],
            "",
            "a*:",
            "a*:{",
            "a*:{0123}",
            "b{0}",
            &record[..20],
            &record.to_uppercase(),
            &record.replace("a*:", "ab:"),
        ] {
            assert_eq!(keys.met(other.as_bytes()), Met::Other, "{other}");
        }
        assert_eq!(keys.pattern(), "a\\*:{*");
    }

    #[test]
    fn a_prefix_with_a_brace_is_refused() {
        for prefix in ["{a}", "a{", "}"] {
            assert!(Keys::new(prefix).is_err(), "{prefix}");
        }
    }
}
