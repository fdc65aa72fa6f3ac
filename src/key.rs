//! The key that a client sends.

use std::fmt;

use crate::scope::ScopedKey;

/// One operation's name, chosen by the client: decoded, validated, compared byte for byte.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Box<str>);

impl IdempotencyKey {
    /// The decoded key: what a gateway is handed.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// This key under a namespace, with everybody's scope: for jobs.
    pub fn scoped(&self, namespace: &str) -> ScopedKey {
        ScopedKey::new(namespace, "", self)
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(…)")
    }
}
