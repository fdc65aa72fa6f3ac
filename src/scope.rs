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
        // Chained slices have a known length: this is one allocation.
        let joined = lengths
            .as_flattened()
            .iter()
            .chain(namespace.as_bytes())
            .chain(scope.as_bytes())
            .chain(key.as_bytes())
            .copied()
            .collect();
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
