//! The fingerprint itself, as stores keep it.

use std::fmt;

use sha2::{Digest, Sha256};

/// What a request asked for: taken once, at the claim, and kept with the record.
///
/// It has four parts. The *recipe* (4 bytes) names how it was made, so that a change of settings
/// in a rolling deploy is not mistaken for a changed request. The *request* part (32 bytes) is a
/// SHA-256, see the [module](super) for what goes in. The *caller* part (12 bytes) is a separate
/// hash of the credentials, used only where no scope tells callers apart; all zeros otherwise. The
/// *target* part (4 bytes) is a hash of method, path and query, which every recipe takes alike.
///
/// It is compared with [`compare`](Self::compare), which says how two of them differ; `==` is for
/// bytes. `Debug` shows the beginning of the request part.
///
/// ```
/// use tower_idempotency::fingerprint::{Fingerprint, FingerprintMatch};
///
/// let first = Fingerprint::of(&[b"points", b"42"]);
/// let again = Fingerprint::of(&[b"points", b"42"]);
/// let other = Fingerprint::of(&[b"points", b"43"]);
/// assert_eq!(first.compare(&again), FingerprintMatch::Same);
/// assert_eq!(first.compare(&other), FingerprintMatch::Different);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::LEN]);

/// How two fingerprints of one key relate, see [`Fingerprint::compare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FingerprintMatch {
    /// The same request.
    Same,
    /// Made by other settings, so that nothing can be said of the content. Treated as the same
    /// request.
    OtherRecipe,
    /// The same request with other credentials: another caller, or a token that was renewed.
    OtherCaller,
    /// Another request.
    Different,
}

const RECIPE: usize = 4;
const REQUEST: usize = 32;
const CALLER: usize = 12;
const TARGET: usize = 4;

const CALLER_AT: usize = RECIPE + REQUEST;
const TARGET_AT: usize = CALLER_AT + CALLER;

impl Fingerprint {
    /// How many bytes a fingerprint has.
    pub const LEN: usize = TARGET_AT + TARGET;

    /// The fingerprint of these parts, each length-prefixed so that `["ab", "c"]` and `["a", "bc"]`
    /// differ. For jobs and webhooks; HTTP requests are fingerprinted by the layer, as a
    /// [`FingerprintRecipe`](super::FingerprintRecipe) says.
    ///
    /// The value stays the same between releases. The other parts are all zeros.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let request = hasher.finalize().into();
        Self::from_parts([0; RECIPE], request, [0; CALLER], [0; TARGET])
    }

    pub(crate) fn from_parts(
        recipe: [u8; RECIPE],
        request: [u8; REQUEST],
        caller: [u8; CALLER],
        target: [u8; TARGET],
    ) -> Self {
        let mut bytes = [0; Self::LEN];
        bytes[..RECIPE].copy_from_slice(&recipe);
        bytes[RECIPE..CALLER_AT].copy_from_slice(&request);
        bytes[CALLER_AT..TARGET_AT].copy_from_slice(&caller);
        bytes[TARGET_AT..].copy_from_slice(&target);
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
    ///
    /// The request parts of two recipes say nothing about each other and are not looked at. The
    /// target and caller parts do, because no recipe changes how they are made: a change of settings
    /// makes no refund of a charge, and gives nobody another caller's answer.
    pub fn compare(&self, other: &Self) -> FingerprintMatch {
        let [recipe, request, caller, target] = [
            0..RECIPE,
            RECIPE..CALLER_AT,
            CALLER_AT..TARGET_AT,
            TARGET_AT..Self::LEN,
        ]
        .map(|part| self.0[part.clone()] == other.0[part]);
        match (recipe, request, caller, target) {
            (true, true, true, true) => FingerprintMatch::Same,
            (true, false, ..) | (_, _, _, false) => FingerprintMatch::Different,
            (_, _, false, _) => FingerprintMatch::OtherCaller,
            (false, ..) => FingerprintMatch::OtherRecipe,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(recipe: u8, request: u8, caller: u8) -> Fingerprint {
        at(recipe, request, caller, 4)
    }

    fn at(recipe: u8, request: u8, caller: u8, target: u8) -> Fingerprint {
        Fingerprint::from_parts(
            [recipe; RECIPE],
            [request; REQUEST],
            [caller; CALLER],
            [target; TARGET],
        )
    }

    #[test]
    fn the_first_part_that_differs_says_how_two_relate() {
        let one = fingerprint(1, 2, 3);
        for (other, expected) in [
            (fingerprint(1, 2, 3), FingerprintMatch::Same),
            (fingerprint(1, 2, 9), FingerprintMatch::OtherCaller),
            (fingerprint(1, 9, 3), FingerprintMatch::Different),
            (fingerprint(1, 9, 9), FingerprintMatch::Different),
            (fingerprint(9, 2, 3), FingerprintMatch::OtherRecipe),
            (fingerprint(9, 9, 3), FingerprintMatch::OtherRecipe),
            (fingerprint(9, 2, 9), FingerprintMatch::OtherCaller),
            (fingerprint(9, 9, 9), FingerprintMatch::OtherCaller),
            (at(9, 9, 3, 9), FingerprintMatch::Different),
            (at(9, 9, 9, 9), FingerprintMatch::Different),
            (at(1, 2, 3, 9), FingerprintMatch::Different),
        ] {
            assert_eq!(one.compare(&other), expected);
            assert_eq!(other.compare(&one), expected);
        }
    }

    #[test]
    fn bytes_are_read_back_as_they_were_written() {
        let one = fingerprint(1, 2, 3);
        assert_eq!(one.as_bytes()[..5], [1, 1, 1, 1, 2]);
        assert_eq!(Fingerprint::from_bytes(*one.as_bytes()), one);
    }

    #[test]
    fn parts_of_a_job_do_not_run_into_each_other() {
        let all = [
            Fingerprint::of(&[]),
            Fingerprint::of(&[b""]),
            Fingerprint::of(&[b"", b""]),
            Fingerprint::of(&[b"abc"]),
            Fingerprint::of(&[b"ab", b"c"]),
            Fingerprint::of(&[b"a", b"bc"]),
            Fingerprint::of(&[b"abc", b""]),
            Fingerprint::of(&[b"", b"abc"]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{index}");
        }
    }

    #[test]
    fn a_job_has_the_same_fingerprint_in_every_release() {
        let fingerprint = Fingerprint::of(&[b"ab", b"c"]);
        // SHA-256 of the lengths as 64 bits, little endian, and the parts; by another program.
        assert_eq!(fingerprint.as_bytes()[..RECIPE], [0; RECIPE]);
        assert_eq!(fingerprint.as_bytes()[RECIPE..][..REQUEST], GOLDEN);
        assert_eq!(fingerprint.as_bytes()[CALLER_AT..], [0; CALLER + TARGET]);
    }

    #[test]
    fn debug_shows_a_beginning_only() {
        assert_eq!(
            format!("{:?}", fingerprint(1, 0xab, 3)),
            "Fingerprint(abababab…)"
        );
    }

    const GOLDEN: [u8; REQUEST] = [
        0x43, 0xee, 0x65, 0x55, 0x79, 0xde, 0x01, 0xca, 0x73, 0x9b, 0x3f, 0x95, 0xc1, 0xc2, 0xd3,
        0xf4, 0x6d, 0x35, 0x3b, 0x2c, 0x0d, 0xf8, 0x18, 0x06, 0x4e, 0xa5, 0x94, 0x50, 0x6c, 0xdb,
        0x26, 0x17,
    ];
}
