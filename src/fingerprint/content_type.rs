//! The little of `Content-Type` and `Content-Disposition` that fingerprints need.

/// The media type without its parameters: `application/json` of `application/json; charset=utf-8`.
pub(super) fn essence(value: &[u8]) -> &[u8] {
    split_while(value, |byte| byte != b';').0.trim_ascii()
}

/// Whether a media type is JSON: `application/json`, or one with the suffix of RFC 6839, section
/// 3.1. `charset` says nothing, since RFC 8259 defines no such parameter.
pub(super) fn is_json(essence: &[u8]) -> bool {
    let suffix = essence.len().saturating_sub(JSON_SUFFIX.len());
    essence.eq_ignore_ascii_case(b"application/json")
        || (essence.contains(&b'/') && essence[suffix..].eq_ignore_ascii_case(JSON_SUFFIX))
}

/// Whether a media type is a form in parts (RFC 7578).
pub(super) fn is_form_data(essence: &[u8]) -> bool {
    essence.eq_ignore_ascii_case(b"multipart/form-data")
}

/// The boundary of a multipart body (RFC 2046, section 5.1.1). `None` if it is missing, given
/// twice, or not one that may be used.
pub(super) fn boundary(content_type: &[u8]) -> Option<&[u8]> {
    let parameters = parameters(content_type)?;
    let mut boundaries = parameters
        .iter()
        .filter(|(name, _)| name.eq_ignore_ascii_case(b"boundary"));
    let &(_, boundary) = boundaries.next()?;
    let usable = (1..=70).contains(&boundary.len())
        && !boundary.ends_with(b" ")
        && boundary
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || BOUNDARY_SIGNS.contains(byte));
    (usable && boundaries.next().is_none()).then_some(boundary)
}

/// Name and value of each parameter after the first `;`, in order. `None` if the list is not
/// well-formed, or longer than [`MAX_PARAMETERS`].
///
/// The value of a quoted string is what stands between the quotes, backslashes included: browsers
/// and RFCs disagree on what a backslash in a file name means, and nothing is lost this way.
pub(super) fn parameters(value: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut parameters = Vec::new();
    let (_, mut rest) = split_while(value, |byte| byte != b';');
    while let Some(after) = rest.strip_prefix(b";") {
        rest = after.trim_ascii_start();
        // Empty parameters are allowed: RFC 9110, section 5.6.6.
        if !rest.is_empty() && !rest.starts_with(b";") {
            if parameters.len() == MAX_PARAMETERS {
                return None;
            }
            let (parameter, after) = parameter(rest)?;
            parameters.push(parameter);
            rest = after.trim_ascii_start();
        }
    }
    rest.is_empty().then_some(parameters)
}

/// Whether a byte may stand in a token (RFC 9110, section 5.6.2).
pub(super) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The longest beginning whose bytes all pass, and the rest.
pub(super) fn split_while(bytes: &[u8], mut passes: impl FnMut(u8) -> bool) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|&byte| !passes(byte));
    bytes.split_at(end.unwrap_or(bytes.len()))
}

type Parameter<'v> = (&'v [u8], &'v [u8]);

fn parameter(text: &[u8]) -> Option<(Parameter<'_>, &[u8])> {
    let (name, rest) = split_while(text, is_token);
    let rest = rest.strip_prefix(b"=")?;
    if let Some(quoted) = rest.strip_prefix(b"\"") {
        let mut escaped = false;
        let (value, rest) = split_while(quoted, |byte| {
            let inside = escaped || byte != b'"';
            escaped = byte == b'\\' && !escaped;
            inside
        });
        let rest = rest.strip_prefix(b"\"")?;
        return (!name.is_empty()).then_some(((name, value), rest));
    }
    // Clients leave the quotes away round boundaries and names that are no tokens. White space,
    // quotes and backslashes in there would be read differently by different servers.
    let (value, rest) = split_while(rest, |byte| {
        !byte.is_ascii_control() && !b" ;\"\\".contains(&byte)
    });
    (!name.is_empty() && !value.is_empty()).then_some(((name, value), rest))
}

// Far more than any client sends: a hostile body is not to become a list many times its size.
const MAX_PARAMETERS: usize = 16;
const JSON_SUFFIX: &[u8] = b"+json";
const BOUNDARY_SIGNS: &[u8] = b"'()+_,-./:=? ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_known_by_its_name_or_suffix_in_any_case() {
        for value in [
            "application/json",
            "Application/JSON",
            " application/json ;charset=utf-8",
            "application/merge-patch+json",
            "application/vnd.api+JSON; ext=\"a;b\"",
        ] {
            assert!(is_json(essence(value.as_bytes())), "{value}");
        }
        for value in [
            "",
            "json",
            "+json",
            "text/plain",
            "application/jsonl",
            "application/json-seq",
            "application/json, text/plain",
            "text/plain; a=application/json",
        ] {
            assert!(!is_json(essence(value.as_bytes())), "{value}");
        }
    }

    #[test]
    fn boundaries_are_read_bare_and_quoted() {
        for (value, expected) in [
            ("multipart/form-data; boundary=abc", "abc"),
            ("multipart/form-data;BOUNDARY=\"a b:c\" ; x=y", "a b:c"),
            ("multipart/form-data; charset=utf-8; boundary=a=b", "a=b"),
            ("multipart/form-data;; ;boundary=abc;", "abc"),
        ] {
            assert_eq!(boundary(value.as_bytes()), Some(expected.as_bytes()));
        }
    }

    #[test]
    fn unusable_boundaries_are_refused() {
        let long = format!("multipart/form-data; boundary={}", "a".repeat(71));
        for value in [
            "multipart/form-data",
            "multipart/form-data; boundary",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=\"\"",
            "multipart/form-data; boundary=\"ab",
            "multipart/form-data; boundary=\"ab\"c",
            "multipart/form-data; boundary=\"ab \"",
            "multipart/form-data; boundary=\"a\\b\"",
            "multipart/form-data; boundary=a b",
            "multipart/form-data; boundary=a; boundary=a",
            "multipart/form-data; boundary=a; x",
            "multipart/form-data; boundary=a; =x",
            "multipart/form-data; boundary=a; =\"x\"",
            "multipart/form-data; boundary=\u{e4}",
            long.as_str(),
        ] {
            assert_eq!(boundary(value.as_bytes()), None, "{value}");
        }
    }

    #[test]
    fn quoted_values_keep_their_backslashes() {
        let value = br#"form-data; name="a\"b;c"; filename="x\\"; filename*=UTF-8''%C3%A4"#;
        let expected: Vec<(&[u8], &[u8])> = vec![
            (b"name", br#"a\"b;c"#),
            (b"filename", br"x\\"),
            (b"filename*", b"UTF-8''%C3%A4"),
        ];
        assert_eq!(parameters(value), Some(expected));
        assert_eq!(parameters(br#"form-data; name="a\""#), None);
    }

    #[test]
    fn a_list_of_parameters_has_a_limit() {
        let list = |count| format!("form-data{}", "; a=b".repeat(count));
        let count = |text: String| parameters(text.as_bytes()).map(|list| list.len());
        assert_eq!(count(list(MAX_PARAMETERS)), Some(MAX_PARAMETERS));
        assert_eq!(count(list(MAX_PARAMETERS + 1)), None);
        assert_eq!(count(list(1) + &";".repeat(100)), Some(1));
    }
}
