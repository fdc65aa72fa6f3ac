//! Whose key it is: two callers who send the same key are two keys.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::key::IdempotencyKey;

/// What a store files a record under: namespace + scope + key.
///
/// The *namespace* separates uses (`http`, `webhook`, the name of a job), the *scope* separates
/// callers and comes from authenticated state, the *key* is what the client sent, decoded. The
/// parts are joined with their lengths, so that no two triples are ever one key.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ScopedKey {
    // u32 length of the namespace, u32 length of the scope, then the three parts.
    joined: Arc<[u8]>,
}

const LENGTHS: usize = 8;

impl ScopedKey {
    /// Joins the three parts. An empty scope is the scope of everybody: choose it only where all
    /// callers may see each other's results.
    pub fn new(namespace: &str, scope: &str, key: &IdempotencyKey) -> Self {
        Self::join(namespace, scope, key.as_str())
    }

    pub(crate) fn join(namespace: &str, scope: &str, key: &str) -> Self {
        let length = |part: &str| u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes();
        let lengths = [length(namespace), length(scope)];
        let parts = [
            lengths.as_flattened(),
            namespace.as_bytes(),
            scope.as_bytes(),
            key.as_bytes(),
        ];
        // Joined on the stack, where most keys fit, so that this is one allocation.
        let mut stack = [0; 256];
        let mut end = 0;
        for part in parts {
            match stack.get_mut(end..end + part.len()) {
                Some(place) => place.copy_from_slice(part),
                None => {
                    let joined = parts.concat().into();
                    return Self { joined };
                }
            }
            end += part.len();
        }
        let joined = stack[..end].into();
        Self { joined }
    }

    /// Reads [`as_bytes`](Self::as_bytes) back; `None` if these bytes were not made by it.
    pub fn from_bytes(joined: &[u8]) -> Option<Self> {
        let (lengths, text) = joined.split_at_checked(LENGTHS)?;
        let length = |at: usize| -> Option<usize> {
            let bytes = lengths.get(at..at + 4)?.try_into().ok()?;
            usize::try_from(u32::from_be_bytes(bytes)).ok()
        };
        let text = std::str::from_utf8(text).ok()?;
        let (namespace, rest) = text.split_at_checked(length(0)?)?;
        let (scope, key) = rest.split_at_checked(length(4)?)?;
        (!key.is_empty()).then(|| Self::join(namespace, scope, key))
    }

    /// The same scope and key in another namespace, for stores that put something round the keys of
    /// another store.
    #[must_use]
    pub fn with_namespace(&self, namespace: &str) -> Self {
        Self::join(namespace, self.scope(), self.key())
    }

    /// The joined form: equal exactly when all three parts are equal.
    pub fn as_bytes(&self) -> &[u8] {
        &self.joined
    }

    /// What the key is used for.
    pub fn namespace(&self) -> &str {
        self.part(LENGTHS, LENGTHS + self.length(0))
    }

    /// Whose key it is; empty for everybody's.
    pub fn scope(&self) -> &str {
        let start = LENGTHS + self.length(0);
        self.part(start, start + self.length(4))
    }

    /// What the client sent, decoded.
    pub fn key(&self) -> &str {
        let start = LENGTHS + self.length(0) + self.length(4);
        self.part(start, self.joined.len())
    }

    /// SHA-256 of the joined form: for stores that want keys of one size.
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(&self.joined).into()
    }

    fn length(&self, at: usize) -> usize {
        self.joined
            .get(at..at + 4)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, |bytes| u32::from_be_bytes(bytes) as usize)
    }

    fn part(&self, start: usize, end: usize) -> &str {
        self.joined
            .get(start..end)
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .unwrap_or_default()
    }
}

impl fmt::Debug for ScopedKey {
    /// The namespace and a prefix of the digest: keys and scopes can hold personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScopedKey({}/{})", self.namespace(), self.log_id())
    }
}

impl ScopedKey {
    /// The first eight hexadecimal digits of the digest: what logs and metrics show of a key.
    pub fn log_id(&self) -> String {
        let [a, b, c, d, ..] = self.digest();
        format!("{:08x}", u32::from_be_bytes([a, b, c, d]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> IdempotencyKey {
        IdempotencyKey::new(text).unwrap()
    }

    /// Few characters, among them what a joined form might use as a delimiter: parts that look
    /// alike when they are joined are frequent.
    fn part() -> impl Strategy<Value = String> {
        "[a:/\u{0}\u{1}é]{0,3}"
    }

    fn key_text() -> impl Strategy<Value = String> {
        "[a:/]{1,3}"
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn keys_are_equal_exactly_when_all_three_parts_are(
            left in (part(), part(), key_text()),
            right in (part(), part(), key_text()),
        ) {
            let a = ScopedKey::new(&left.0, &left.1, &key(&left.2));
            let b = ScopedKey::new(&right.0, &right.1, &key(&right.2));
            prop_assert_eq!(left == right, a == b);
            prop_assert_eq!(left == right, a.as_bytes() == b.as_bytes());
            prop_assert_eq!(left == right, a.digest() == b.digest());
        }

        #[test]
        fn moving_the_borders_between_the_parts_makes_another_key(
            text in "[a-z]{3,12}",
            borders in any::<[prop::sample::Index; 4]>(),
        ) {
            let cut = |one: prop::sample::Index, two: prop::sample::Index| {
                let (one, two) = (one.index(text.len()), two.index(text.len()));
                let (one, two) = (one.min(two), one.max(two));
                ScopedKey::new(&text[..one], &text[one..two], &key(&text[two..]))
            };
            let a = cut(borders[0], borders[1]);
            let b = cut(borders[2], borders[3]);
            let same = (a.namespace(), a.scope()) == (b.namespace(), b.scope());
            prop_assert_eq!(same, a == b);
        }

        #[test]
        fn the_parts_and_the_bytes_come_back(
            namespace in ".{0,20}",
            scope in ".{0,20}",
            text in "[!-~]{1,20}",
        ) {
            let scoped = ScopedKey::new(&namespace, &scope, &key(&text));
            let back = ScopedKey::from_bytes(scoped.as_bytes());
            prop_assert_eq!(back.as_ref(), Some(&scoped));
            prop_assert_eq!(scoped.namespace(), namespace);
            prop_assert_eq!(scoped.scope(), scope);
            prop_assert_eq!(scoped.key(), text);
        }

        #[test]
        fn another_namespace_changes_nothing_else(
            namespace in ".{0,20}",
            other in ".{0,20}",
            scope in ".{0,20}",
            text in "[!-~]{1,20}",
        ) {
            let moved = ScopedKey::new(&namespace, &scope, &key(&text)).with_namespace(&other);
            prop_assert_eq!(moved, ScopedKey::new(&other, &scope, &key(&text)));
        }

        #[test]
        fn bytes_are_read_back_unchanged_or_not_at_all(
            lengths in (0..6_u32, 0..6_u32),
            rest in prop_oneof![
                any::<Vec<u8>>(),
                "[aé]{0,8}".prop_map(String::into_bytes),
            ],
        ) {
            let (namespace, scope) = lengths;
            let bytes = [&namespace.to_be_bytes()[..], &scope.to_be_bytes(), &rest].concat();
            for bytes in [&bytes, &rest] {
                if let Some(scoped) = ScopedKey::from_bytes(bytes) {
                    prop_assert_eq!(scoped.as_bytes(), &bytes[..]);
                    prop_assert!(!scoped.key().is_empty());
                }
            }
        }
    }

    #[test]
    fn bytes_that_were_cut_or_miscounted_are_refused() {
        let good = ScopedKey::new("http", "é", &key("k"));
        let bytes = good.as_bytes();
        for end in 0..bytes.len() {
            assert_eq!(ScopedKey::from_bytes(&bytes[..end]), None, "cut at {end}");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            ScopedKey::from_bytes(&bytes)
        };
        assert_eq!(with(3, 5), None, "the border is within a character");
        assert_eq!(with(7, 3), None, "no byte is left for the key");
        assert_eq!(with(7, 4), None, "the scope ends past the end");
        assert_eq!(with(0, 0xff), None, "a length of almost 4 GiB");
        assert_eq!(with(12, 0xff), None, "not UTF-8");
    }

    #[test]
    fn the_joined_form_is_stable() {
        // Stores keep these bytes: a change makes every stored key another one.
        assert_eq!(
            ScopedKey::new("http", "u1", &key("k")).as_bytes(),
            b"\0\0\0\x04\0\0\0\x02httpu1k"
        );
    }

    #[test]
    fn debug_shows_neither_the_scope_nor_the_key() {
        let scoped = ScopedKey::new("http", "alice", &key("order-1"));
        let text = format!("{scoped:?}");
        assert!(
            !text.contains("alice") && !text.contains("order-1"),
            "{text}"
        );
        assert!(
            text.contains("http") && text.contains(&scoped.log_id()),
            "{text}"
        );
    }

    #[test]
    fn the_log_id_is_the_head_of_the_digest() {
        let scoped = ScopedKey::new("http", "", &key("k"));
        let digest = scoped.digest();
        let head: String = digest[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(scoped.log_id(), head);
    }
}
