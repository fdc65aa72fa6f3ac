//! From the bytes of a header field to the decoded key.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::KeyError;

/// How the header field is written.
///
/// In both, the *decoded* value is the key: it is compared byte for byte, with upper and lower case
/// distinct, and `"abc"` and `abc` are one key. Without that, a client that upgrades its SDK
/// between two attempts would be charged twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeySyntax {
    /// A Structured Field String, or a bare key as most clients send it. The default.
    ///
    /// Spaces and tabs around the value are dropped. What begins with a double quote is read by the
    /// rules of [`Strict`](Self::Strict) and refused if it breaks them. Everything else is a bare
    /// key: visible ASCII without `"`, `,`, `;` and `\`, characters that would hide a second
    /// folded line, a parameter or a broken quote. It is opaque, not a Structured Field Token: those
    /// may not begin with a digit, as ten of sixteen UUIDs do.
    #[default]
    Lenient,
    /// A Structured Field Item that is a String, as draft-ietf-httpapi-idempotency-key-header-07,
    /// section 2.1 demands, read by RFC 9651, section 4.2. Its parameters are ignored.
    Strict,
}

/// The decoded key of a request, or `None` if the field is absent; without a limit on its length.
///
/// Borrows from the header unless the key has escapes or parameters, so that a lookup key is the
/// only allocation that a request pays for.
pub(crate) fn decode_headers<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
    syntax: KeySyntax,
) -> Result<Option<Cow<'h, str>>, KeyError> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => decode(value, syntax).map(Some),
        // Even where the lines joined by a comma are one String (RFC 9651, section 4.2): its first
        // half does not parse alone, and then a recipient may fail.
        (Some(_), Some(_)) => Err(KeyError::MultipleLines),
    }
}

/// The decoded key of one field line, without a limit on its length.
pub(crate) fn decode(value: &HeaderValue, syntax: KeySyntax) -> Result<Cow<'_, str>, KeyError> {
    decode_bytes(value.as_bytes(), syntax)
}

/// [`decode`] for bytes that a `HeaderValue` may not hold; hyper hands most others through.
pub(super) fn decode_bytes(bytes: &[u8], syntax: KeySyntax) -> Result<Cow<'_, str>, KeyError> {
    match syntax {
        KeySyntax::Strict => decode_string_item(bytes, 0),
        KeySyntax::Lenient => {
            // HTTP/2 hands the value over with the white space around it.
            let front = bytes.iter().take_while(|byte| is_space(**byte)).count();
            let back = bytes[front..].iter().rev();
            let back = back.take_while(|byte| is_space(**byte)).count();
            let trimmed = &bytes[front..bytes.len() - back];
            match trimmed.first() {
                None => Err(KeyError::Empty),
                Some(b'"') => decode_string_item(trimmed, front),
                Some(_) => decode_bare(trimmed),
            }
        }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn decode_bare(bytes: &[u8]) -> Result<Cow<'_, str>, KeyError> {
    if !bytes.iter().all(|byte| BARE[usize::from(*byte)]) {
        return Err(KeyError::BareSyntax);
    }
    std::str::from_utf8(bytes)
        .map(Cow::Borrowed)
        .map_err(|_| KeyError::BareSyntax)
}

/// `front` bytes were dropped before `bytes` began.
fn decode_string_item(bytes: &[u8], front: usize) -> Result<Cow<'_, str>, KeyError> {
    let text = match plain_string(bytes) {
        Some(text) => Cow::Borrowed(text),
        None => match sfv_string(bytes) {
            Ok(Some(text)) => Cow::Owned(text),
            Ok(None) => return Err(KeyError::NotAString),
            Err(error) => {
                let offset = error.index().map(|index| front + index);
                return Err(KeyError::SfSyntax { offset });
            }
        },
    };
    if text.is_empty() {
        Err(KeyError::Empty)
    } else if is_blank(&text) {
        Err(KeyError::Blank)
    } else {
        Ok(text)
    }
}

/// The String in an Item, `None` if the Item is of another type.
fn sfv_string(bytes: &[u8]) -> Result<Option<String>, sfv::Error> {
    let item: sfv::Item = sfv::Parser::new(bytes).parse()?;
    Ok(match item.bare_item {
        sfv::BareItem::String(text) => Some(text.into()),
        _ => None,
    })
}

/// The content of a String without escapes and without parameters, the form that clients send;
/// `None` if only the whole parser can tell. It must say nothing that the whole parser would not.
fn plain_string(bytes: &[u8]) -> Option<&str> {
    let content = bytes.strip_prefix(b"\"")?;
    let end = content
        .iter()
        .position(|byte| *byte == b'"' || *byte == b'\\' || !is_printable(*byte))?;
    let (content, rest) = content.split_at(end);
    (rest == b"\"").then_some(())?;
    std::str::from_utf8(content).ok()
}

/// Whether a String can carry this character: RFC 9651, section 3.3.3.
pub(super) fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x20..=0x7e)
}

pub(super) fn is_blank(text: &str) -> bool {
    text.bytes().all(|byte| byte == b' ')
}

/// Which bytes a bare key may hold.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the loop ends at 0x7e, and a const has no try_from"
)]
const BARE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0x21;
    while byte <= 0x7e {
        table[byte] = !matches!(byte as u8, b'"' | b',' | b';' | b'\\');
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes in which quotes, escapes, parameters and white space are frequent.
    fn wire_bytes() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            4 => proptest::sample::select(&b"\"\\;= \t,ab1*@%:?-.()"[..]),
            2 => 0x20..=0x7e_u8,
            1 => any::<u8>(),
        ];
        proptest::collection::vec(byte, 0..24)
    }

    /// The same rules by the shortest way: everything through the parser.
    fn by_sfv_alone(bytes: &[u8]) -> Result<String, &'static str> {
        match sfv::Parser::new(bytes).parse::<sfv::Item>() {
            Err(_) => Err("sf-syntax"),
            Ok(item) => match item.bare_item {
                sfv::BareItem::String(text) if text.as_str().is_empty() => Err("empty"),
                sfv::BareItem::String(text) if text.as_str().trim_matches(' ').is_empty() => {
                    Err("blank")
                }
                sfv::BareItem::String(text) => Ok(text.into()),
                _ => Err("not-a-string"),
            },
        }
    }

    fn answer(bytes: &[u8], syntax: KeySyntax) -> Result<String, &'static str> {
        decode_bytes(bytes, syntax)
            .map(Cow::into_owned)
            .map_err(|error| error.reason())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn strict_answers_as_sfv_does(bytes in wire_bytes()) {
            prop_assert_eq!(answer(&bytes, KeySyntax::Strict), by_sfv_alone(&bytes));
        }

        #[test]
        fn lenient_answers_as_sfv_does_once_there_is_a_quote(
            front in "[ \t]{0,2}",
            rest in wire_bytes(),
        ) {
            let mut bytes = front.into_bytes();
            bytes.push(b'"');
            bytes.extend_from_slice(&rest);
            let trimmed = std::str::from_utf8(&bytes).ok().map(|text| text.trim_matches([' ', '\t']));
            // Bytes that are no text are refused by both, wherever their white space is.
            let expected = by_sfv_alone(trimmed.map_or(&bytes[..], str::as_bytes));
            prop_assert_eq!(answer(&bytes, KeySyntax::Lenient), expected);
        }

        #[test]
        fn the_whole_parser_agrees_with_the_short_way(
            content in proptest::collection::vec(
                prop_oneof![6 => 0x20..=0x7e_u8, 1 => any::<u8>()], 0..12),
            tail in proptest::sample::select(&["\"", "\" ", "\"\t", "\";a", "\"\"", ""][..]),
        ) {
            let bytes = [b"\"", &content[..], tail.as_bytes()].concat();
            if let Some(text) = plain_string(&bytes) {
                prop_assert_eq!(sfv_string(&bytes).unwrap(), Some(text.to_owned()));
            }
        }

        #[test]
        fn a_bare_key_is_taken_exactly_when_all_its_characters_are(text in "[ -~\u{80}\u{e9}]{1,12}") {
            let trimmed = text.trim_matches(' ');
            prop_assume!(!trimmed.is_empty() && !trimmed.starts_with('"'));
            let fits = trimmed
                .chars()
                .all(|c| c.is_ascii_graphic() && !['"', ',', ';', '\\'].contains(&c));
            let expected = if fits { Ok(trimmed.to_owned()) } else { Err("bare-syntax") };
            prop_assert_eq!(answer(text.as_bytes(), KeySyntax::Lenient), expected);
        }

        #[test]
        fn no_bytes_make_it_panic_and_no_key_is_empty_or_blank(bytes: Vec<u8>) {
            for syntax in [KeySyntax::Lenient, KeySyntax::Strict] {
                if let Ok(key) = decode_bytes(&bytes, syntax) {
                    prop_assert!(key.bytes().all(is_printable));
                    prop_assert!(!is_blank(&key));
                }
            }
        }
    }

    #[test]
    fn the_usual_forms_are_borrowed() {
        for value in ["abc", " abc ", "\"abc\"", "\t\"a b\" "] {
            let decoded = decode_bytes(value.as_bytes(), KeySyntax::Lenient);
            assert!(matches!(decoded, Ok(Cow::Borrowed(_))), "{value:?}");
        }
        assert!(matches!(
            decode_bytes(b"\"abc\"", KeySyntax::Strict),
            Ok(Cow::Borrowed("abc"))
        ));
    }

    #[test]
    fn an_error_counts_bytes_from_the_start_of_the_field() {
        assert_eq!(
            decode_bytes(b" \t\"ab\x01\"", KeySyntax::Lenient),
            Err(KeyError::SfSyntax { offset: Some(5) })
        );
        assert_eq!(
            decode_bytes(b"  \"ab\x01\"", KeySyntax::Strict),
            Err(KeyError::SfSyntax { offset: Some(5) })
        );
    }
}
