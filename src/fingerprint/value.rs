//! The fingerprint itself, as stores keep it.

use std::fmt;

use sha2::{Digest, Sha256};

/// What a request asked for: taken once, at the claim, and kept with the record.
///
/// It has three parts. The *recipe* names how it was made, so that a change of settings in a
/// rolling deploy is not mistaken for a changed request. The *request* part is a SHA-256 over
/// length-prefixed parts. The *caller* part is a separate hash of the credentials, used only
/// where no scope tells callers apart; all zeros otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::LEN]);

/// How two fingerprints of one key relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FingerprintMatch {
    /// The same request.
    Same,
    /// Made by other settings, so that nothing can be said. Treated as the same request.
    OtherRecipe,
    /// The same request with other credentials.
    OtherCaller,
    /// Another request.
    Different,
}

const RECIPE: usize = 4;
const REQUEST: usize = 32;
const CALLER: usize = 16;

impl Fingerprint {
    /// How many bytes a fingerprint has.
    pub const LEN: usize = RECIPE + REQUEST + CALLER;

    /// The fingerprint of these parts, each length-prefixed so that `["ab", "c"]` and `["a", "bc"]`
    /// differ. For jobs and webhooks; HTTP requests are fingerprinted by the layer.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self::from_parts([0; RECIPE], hasher.finalize().into(), [0; CALLER])
    }

    pub(crate) fn from_parts(
        recipe: [u8; RECIPE],
        request: [u8; REQUEST],
        caller: [u8; CALLER],
    ) -> Self {
        let mut bytes = [0; Self::LEN];
        bytes[..RECIPE].copy_from_slice(&recipe);
        bytes[RECIPE..RECIPE + REQUEST].copy_from_slice(&request);
        bytes[RECIPE + REQUEST..].copy_from_slice(&caller);
        Self(bytes)
    }

    /// The fingerprint with these bytes, as a store reads them back.
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// The bytes, as a store writes them.
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// How a later request's fingerprint relates to this one.
    pub fn compare(&self, other: &Self) -> FingerprintMatch {
        if self.0 == other.0 {
            FingerprintMatch::Same
        } else if self.0[..RECIPE] != other.0[..RECIPE] {
            FingerprintMatch::OtherRecipe
        } else if self.0[..RECIPE + REQUEST] == other.0[..RECIPE + REQUEST] {
            FingerprintMatch::OtherCaller
        } else {
            FingerprintMatch::Different
        }
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = &self.0[RECIPE..RECIPE + 4];
        f.write_str("Fingerprint(")?;
        for byte in prefix {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…)")
    }
}
