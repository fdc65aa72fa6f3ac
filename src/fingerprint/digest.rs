//! The hash that a fingerprint is taken with.

use sha2::{Digest as _, Sha256};

use super::encoder::Encoder;

/// What a recipe may ask for. Both are collision-resistant.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Algorithm {
    #[default]
    Sha256,
    #[cfg(feature = "blake3")]
    Blake3,
}

impl Algorithm {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "SHA-256",
            #[cfg(feature = "blake3")]
            Self::Blake3 => "BLAKE3",
        }
    }

    /// What is added to the list of what is hashed, of which the id is made. Nothing for the default, whose
    /// ids were there first.
    pub(super) const fn entry(self) -> Option<&'static str> {
        match self {
            Self::Sha256 => None,
            #[cfg(feature = "blake3")]
            Self::Blake3 => Some("hash:blake3"),
        }
    }

    /// A hash that has taken in what `begun` has, which `write` writes once more where it must be.
    #[cfg_attr(
        not(feature = "blake3"),
        expect(unused_variables, reason = "SHA-256 goes on where it is")
    )]
    pub(super) fn go_on(self, begun: Sha256, write: impl Fn(&mut Encoder<'_>)) -> Digest {
        match self {
            Self::Sha256 => Digest::Sha256(begun),
            #[cfg(feature = "blake3")]
            Self::Blake3 => {
                let mut digest = Digest::Blake3(Box::default());
                write(&mut Encoder::new(&mut digest));
                digest
            }
        }
    }
}

/// A hash in the making.
#[derive(Clone)]
pub(super) enum Digest {
    Sha256(Sha256),
    // Two kilobytes, which would travel with every future.
    #[cfg(feature = "blake3")]
    Blake3(Box<blake3::Hasher>),
}

impl Digest {
    pub(super) fn finish(self) -> [u8; 32] {
        match self {
            Self::Sha256(hash) => hash.finalize().into(),
            #[cfg(feature = "blake3")]
            Self::Blake3(hash) => hash.finalize().into(),
        }
    }
}

/// What bytes can be written into.
pub(super) trait Sink {
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for Sha256 {
    fn put(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }
}

impl Sink for Digest {
    fn put(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            #[cfg(feature = "blake3")]
            Self::Blake3(hash) => {
                hash.update(bytes);
            }
        }
    }
}
