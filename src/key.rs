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

    /// A key in the text form of a UUID (RFC 9562 section 4) made of these bytes.
    pub(crate) fn uuid(mut bytes: [u8; 16], version: u8) -> Self {
        bytes[6] = (bytes[6] & 0x0f) | (version << 4);
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        let n = u128::from_be_bytes(bytes);
        let text = format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            n >> 96,
            (n >> 80) & 0xffff,
            (n >> 64) & 0xffff,
            (n >> 48) & 0xffff,
            n & 0xffff_ffff_ffff
        );
        Self(text.into_boxed_str())
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
