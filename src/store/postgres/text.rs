//! Text as PostgreSQL can keep it: everything but NUL.

use std::borrow::Cow;

/// Writes NUL as `\0` and a backslash as `\\`, so that every text has one form and every form one
/// text.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['\0', '\\']) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.replace('\\', "\\\\").replace('\0', "\\0"))
}

/// Reads [`escape`] back; `None` if this was not written by it.
pub(super) fn unescape(text: &str) -> Option<String> {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => match characters.next()? {
                '\\' => '\\',
                '0' => '\0',
                _ => return None,
            },
            other => other,
        });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_text_comes_back_and_holds_no_nul(text in "[a\\\\\u{0}0é]{0,8}") {
            let escaped = escape(&text);
            prop_assert!(!escaped.contains('\0'));
            prop_assert_eq!(unescape(&escaped), Some(text));
        }

        #[test]
        fn what_is_read_was_written_in_that_one_form(text in "[a\\\\0]{0,8}") {
            if let Some(plain) = unescape(&text) {
                prop_assert_eq!(escape(&plain), text);
            }
        }
    }

    #[test]
    fn ordinary_text_is_not_copied() {
        assert!(matches!(escape("order-1 ✓"), Cow::Borrowed("order-1 ✓")));
    }
}
