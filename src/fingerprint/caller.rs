//! Who asked, for layers without a scope: a hash of the credentials.

use http::HeaderMap;
use http::header::{AUTHORIZATION, COOKIE, HeaderValue};
use sha2::{Digest, Sha256};

use super::encoder::Encoder;

/// What a layer knows of its callers when it takes a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallerPart {
    /// A scope tells them apart: two callers are two records, and no credentials are hashed.
    Scoped,
    /// No scope is set. The value is that of [`caller_part`].
    Credentials([u8; 12]),
}

impl CallerPart {
    pub(super) fn is_used(self) -> bool {
        matches!(self, Self::Credentials(_))
    }

    pub(super) fn bytes(self) -> [u8; 12] {
        match self {
            Self::Scoped => [0; 12],
            Self::Credentials(hash) => hash,
        }
    }
}

/// A hash of all `Authorization` and `Cookie` lines, so that another caller who sends the same key
/// is noticed; all zeros when the request has neither.
///
/// It is the beginning of a SHA-256 over the text of the lookup key, the lines of `Authorization`,
/// and `Cookie` as no line or one. The lookup key salts it: equal credentials look different in
/// every record, so that a copy of the store does not tell which records belong to one caller. It
/// is no password hash: a guess at weak credentials can still be tried against a record.
pub(crate) fn caller_part(headers: &HeaderMap, lookup_key: &[u8]) -> [u8; 12] {
    if !headers.contains_key(AUTHORIZATION) && !headers.contains_key(COOKIE) {
        return [0; 12];
    }
    let mut hash = Sha256::new();
    let mut encoder = Encoder::new(&mut hash);
    encoder.text(lookup_key);
    let authorization = headers.get_all(AUTHORIZATION);
    encoder.lines(authorization.iter().map(HeaderValue::as_bytes));
    write_cookies(headers, &mut encoder);
    drop(encoder);
    let mut part = [0; 12];
    part.copy_from_slice(&hash.finalize()[..12]);
    part
}

/// HTTP/2 and HTTP/3 may split one `Cookie` field into several lines, anew for each request; joined
/// with `"; "` they are what HTTP/1.1 would have carried (RFC 9113, section 8.2.3).
fn write_cookies(headers: &HeaderMap, encoder: &mut Encoder<'_>) {
    let lines = || headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes);
    if headers.contains_key(COOKIE) {
        encoder.tag(1);
        let separators = (lines().count() - 1) * SEPARATOR.len();
        encoder.length(lines().map(<[u8]>::len).sum::<usize>() + separators);
        for (index, line) in lines().enumerate() {
            if index > 0 {
                encoder.bytes(SEPARATOR);
            }
            encoder.bytes(line);
        }
    }
    encoder.tag(0);
}

const SEPARATOR: &[u8] = b"; ";

#[cfg(test)]
mod tests {
    use super::*;

    fn part(headers: &[(&'static str, &'static str)], lookup_key: &str) -> [u8; 12] {
        let headers: HeaderMap = headers
            .iter()
            .map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .fold(HeaderMap::new(), |mut all, (name, value)| {
                all.append::<http::HeaderName>(name, value);
                all
            });
        caller_part(&headers, lookup_key.as_bytes())
    }

    #[test]
    fn a_request_without_credentials_has_the_part_zero() {
        assert_eq!(part(&[("accept", "a")], "k"), [0; 12]);
        assert_ne!(part(&[("authorization", "")], "k"), [0; 12]);
        assert_ne!(part(&[("cookie", "")], "k"), [0; 12]);
    }

    #[test]
    fn every_credential_line_counts_and_nothing_else() {
        let one = part(&[("authorization", "a"), ("cookie", "c=1")], "k");
        let same = [("accept", "x"), ("cookie", "c=1"), ("authorization", "a")];
        assert_eq!(one, part(&same, "k"));
        for other in [
            &[("authorization", "b"), ("cookie", "c=1")][..],
            &[("authorization", "a"), ("cookie", "c=2")],
            &[("authorization", "a")],
            &[("cookie", "c=1")],
            &[
                ("authorization", "a"),
                ("authorization", "a"),
                ("cookie", "c=1"),
            ],
            &[("authorization", "a"), ("cookie", "")],
            &[("authorization", "ac=1"), ("cookie", "")],
            &[("cookie", "a"), ("authorization", "c=1")],
        ] {
            assert_ne!(one, part(other, "k"), "{other:?}");
        }
    }

    #[test]
    fn the_same_credentials_look_different_in_another_record() {
        let headers = [("authorization", "Bearer secret")];
        assert_ne!(part(&headers, "k1"), part(&headers, "k2"));
    }

    #[test]
    fn cookies_split_over_lines_are_one_field() {
        let joined = part(&[("cookie", "a=1; b=2; c=3")], "k");
        let split = [("cookie", "a=1"), ("cookie", "b=2; c=3")];
        assert_eq!(joined, part(&split, "k"));
        let swapped = [("cookie", "b=2; c=3"), ("cookie", "a=1")];
        assert_ne!(joined, part(&swapped, "k"));
    }

    #[test]
    fn the_hash_stays_the_same_between_releases() {
        let headers = [("authorization", "Bearer t"), ("cookie", "a=1; b=2")];
        assert_eq!(part(&headers, "key"), GOLDEN);
    }

    // Computed by another program from the description above.
    const GOLDEN: [u8; 12] = [
        0xdd, 0xc5, 0xa9, 0x0c, 0x46, 0xf0, 0x2f, 0x83, 0xa6, 0x35, 0x02, 0x17,
    ];
}
