//! The key that a client sends.

mod error;
mod format;
mod personal;
mod syntax;
#[cfg(test)]
mod wire_values;

use std::borrow::Cow;
use std::fmt;

use http::{HeaderMap, HeaderName, HeaderValue};

pub use error::KeyError;
pub use format::{KeyAdvice, KeyFormat, PersonalData};
pub use syntax::KeySyntax;
pub(crate) use syntax::decode_headers;

use crate::scope::ScopedKey;

/// One operation's name, chosen by the client: decoded, validated, compared byte for byte.
///
/// It is printable ASCII and not only spaces, so that a Structured Field String can carry it. The
/// constructors here take 1 to 255 bytes, the lengths of the default [`KeyFormat`].
///
/// A key can hold personal data although it should not. So there is no `Display`, and `Debug` shows
/// nothing of it; logs get [`ScopedKey::log_id`].
///
/// ```
/// use http::HeaderValue;
/// use tower_idempotency::{IdempotencyKey, KeySyntax};
///
/// let quoted = HeaderValue::from_static("\"8e03978e-40d5-43e8-bc93-6894a57f9324\"");
/// let bare = HeaderValue::from_static("8e03978e-40d5-43e8-bc93-6894a57f9324");
/// let key = IdempotencyKey::parse(&quoted, KeySyntax::Strict)?;
/// assert_eq!(key.as_str(), "8e03978e-40d5-43e8-bc93-6894a57f9324");
/// assert_eq!(key, IdempotencyKey::parse(&bare, KeySyntax::Lenient)?);
/// assert_eq!(key.to_sf_string(), quoted);
/// # Ok::<(), tower_idempotency::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Box<str>);

impl IdempotencyKey {
    /// A key that was made here: the id of a job, an event, a row. Nothing is trimmed or unquoted.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if it is empty, only spaces, longer than 255 bytes, or holds a character
    /// outside of printable ASCII.
    pub fn new(key: &str) -> Result<Self, KeyError> {
        format::check_default_length(key)?;
        check_characters(key)?;
        Ok(Self(key.into()))
    }

    /// A new random key: a UUID of version 4 in lower case (RFC 9562, section 5.4), with 122 bits
    /// from the thread's cryptographic generator. Make one per operation, not one per attempt.
    ///
    /// # Panics
    ///
    /// If the operating system cannot supply randomness.
    pub fn random() -> Self {
        Self::uuid(rand::random(), 4)
    }

    /// Reads the value of one header line. The caller has to make sure that there is only one;
    /// [`from_headers`](Self::from_headers) does.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the value breaks the syntax, or if the decoded key is empty, only spaces, or
    /// longer than 255 bytes.
    pub fn parse(value: &HeaderValue, syntax: KeySyntax) -> Result<Self, KeyError> {
        let key = syntax::decode(value, syntax)?;
        format::check_default_length(&key)?;
        Ok(Self::from_decoded(key))
    }

    /// Reads the key of a request, `None` if it has no such field.
    ///
    /// # Errors
    ///
    /// [`KeyError::MultipleLines`] if the field has more than one line, equal or not; otherwise as
    /// [`parse`](Self::parse). A malformed field is never taken for a missing one: the request
    /// would run unprotected.
    pub fn from_headers(
        headers: &HeaderMap,
        name: &HeaderName,
        syntax: KeySyntax,
    ) -> Result<Option<Self>, KeyError> {
        let Some(key) = syntax::decode_headers(headers, name, syntax)? else {
            return Ok(None);
        };
        format::check_default_length(&key)?;
        Ok(Some(Self::from_decoded(key)))
    }

    /// A key that [`syntax::decode`] gave and whose length some [`KeyFormat`] has checked.
    pub(crate) fn from_decoded(key: Cow<'_, str>) -> Self {
        Self(key.into())
    }

    /// A key in the text form of a UUID (RFC 9562, section 4) made of these bytes.
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

    /// The decoded key: what a gateway is handed.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key as a Structured Field String (RFC 9651, section 4.1.6): between double quotes, with
    /// `"` and `\` escaped. The form that the draft demands of clients.
    ///
    /// The value is marked as sensitive: `Debug` hides it, and HTTP/2 keeps it out of its header
    /// table, where a value that never comes again only takes room.
    #[expect(
        clippy::expect_used,
        clippy::missing_panics_doc,
        reason = "every constructor refuses a key that is not printable ASCII"
    )]
    pub fn to_sf_string(&self) -> HeaderValue {
        let mut value = Vec::with_capacity(self.0.len() + 2);
        value.push(b'"');
        for byte in self.0.bytes() {
            if matches!(byte, b'"' | b'\\') {
                value.push(b'\\');
            }
            value.push(byte);
        }
        value.push(b'"');
        let mut value = HeaderValue::try_from(value).expect("a key is printable ASCII");
        value.set_sensitive(true);
        value
    }

    /// This key under a namespace, with everybody's scope: for jobs.
    pub fn scoped(&self, namespace: &str) -> ScopedKey {
        ScopedKey::new(namespace, "", self)
    }
}

/// Whether a text that no header carried can be a key, its length left aside.
pub(crate) fn check_characters(key: &str) -> Result<(), KeyError> {
    if !key.bytes().all(syntax::is_printable) {
        return Err(KeyError::NotPrintable);
    }
    if syntax::is_blank(key) {
        return Err(KeyError::Blank);
    }
    Ok(())
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_comes_back_from_its_string_form(text in "[ -~]{1,255}") {
            prop_assume!(text.bytes().any(|byte| byte != b' '));
            let key = IdempotencyKey::new(&text).unwrap();
            prop_assert_eq!(key.as_str(), &text);
            let wire = key.to_sf_string();
            for syntax in [KeySyntax::Lenient, KeySyntax::Strict] {
                prop_assert_eq!(&IdempotencyKey::parse(&wire, syntax).unwrap(), &key);
            }
        }

        #[test]
        fn bare_and_quoted_are_one_key(text in "[!#-+\\--:<-\\[\\]-~]{1,255}") {
            let bare = HeaderValue::from_str(&text).unwrap();
            let bare = IdempotencyKey::parse(&bare, KeySyntax::Lenient).unwrap();
            let quoted = HeaderValue::from_str(&format!("\"{text}\"")).unwrap();
            let quoted = IdempotencyKey::parse(&quoted, KeySyntax::Lenient).unwrap();
            prop_assert_eq!(&bare, &quoted);
            prop_assert_eq!(bare.as_str(), &text);
        }

        #[test]
        fn what_new_takes_is_what_a_string_can_carry(text in "[ -~\t\u{7f}\u{e9}]{0,8}") {
            let carried = !text.trim_matches(' ').is_empty()
                && text.chars().all(|c| (' '..='~').contains(&c));
            prop_assert_eq!(IdempotencyKey::new(&text).is_ok(), carried);
        }
    }

    #[test]
    fn new_says_why_it_refuses() {
        let reason = |key: &str| IdempotencyKey::new(key).unwrap_err().reason();
        assert_eq!(reason(""), "empty");
        assert_eq!(reason("   "), "blank");
        assert_eq!(reason("kéy"), "not-printable");
        assert_eq!(reason("a\tb"), "not-printable");
        assert_eq!(reason(&"k".repeat(256)), "too-long");
        assert!(IdempotencyKey::new(&"k".repeat(255)).is_ok());
    }

    #[test]
    fn new_takes_the_text_as_it_is() {
        assert_eq!(IdempotencyKey::new(" a\"b ").unwrap().as_str(), " a\"b ");
    }

    #[test]
    fn random_keys_are_uuids_of_version_4_and_differ() {
        let mut seen = HashSet::new();
        let mut variants = HashSet::new();
        for _ in 0..1_000 {
            let key = IdempotencyKey::random();
            let text = key.as_str();
            assert!(KeyFormat::new().uuid().validate(text).is_ok(), "{text}");
            assert_eq!(&text[14..15], "4", "{text}");
            variants.insert(text.as_bytes()[19]);
            assert!(!text.bytes().any(|byte| byte.is_ascii_uppercase()));
            assert!(seen.insert(key));
        }
        assert_eq!(variants, HashSet::from(*b"89ab"));
    }

    #[test]
    fn a_uuid_keeps_all_bytes_but_the_version_and_the_variant() {
        // The example of RFC 9562, appendix A.3, with the six fixed bits spoilt.
        let bytes = 0x919108f7_52d1_f320_1bac_f847db4148a8_u128.to_be_bytes();
        let key = IdempotencyKey::uuid(bytes, 4);
        assert_eq!(key.as_str(), "919108f7-52d1-4320-9bac-f847db4148a8");
    }

    #[test]
    fn every_digit_of_a_random_key_but_the_version_varies() {
        let keys: Vec<_> = (0..200).map(|_| IdempotencyKey::random()).collect();
        for at in (0..36).filter(|at| ![8, 13, 14, 18, 23].contains(at)) {
            let digits: HashSet<_> = keys.iter().map(|key| key.as_str().as_bytes()[at]).collect();
            assert!(digits.len() > 1, "digit {at} never changes");
        }
    }

    #[test]
    fn neither_debug_form_shows_the_key() {
        let key = IdempotencyKey::new("alice@example.com").unwrap();
        for text in [format!("{key:?}"), format!("{:?}", key.to_sf_string())] {
            assert!(!text.contains("alice"), "{text}");
        }
    }

    #[test]
    fn an_error_does_not_repeat_the_key() {
        for value in [
            "\"canary",
            "canary,canary",
            "canary;a=1",
            "\"canary\", \"canary\"",
        ] {
            let value = HeaderValue::from_str(value).unwrap();
            let error = IdempotencyKey::parse(&value, KeySyntax::Lenient).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
    }

    #[test]
    fn keys_that_differ_in_case_differ() {
        assert_ne!(IdempotencyKey::new("abc"), IdempotencyKey::new("ABC"));
    }
}
