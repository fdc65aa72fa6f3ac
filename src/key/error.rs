//! Why a key is refused, in words for the client.

use std::borrow::Cow;

/// A key that cannot be used. Nothing was asked of a store, and nothing ran.
///
/// [`reason`](Self::reason) is for programs. `Display` is for people: it says how to correct the
/// value and never repeats it, so that it can be sent to the client and written to a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The field has several lines, equal or not. Joined they would be another key: a second run.
    #[error("the key was sent in more than one header line; send it in exactly one")]
    MultipleLines,
    /// The value is not a Structured Field Item (RFC 9651, section 4.2).
    #[error(
        "the key is not a well-formed Structured Field String{}; send printable ASCII between \
         double quotes, with a backslash before each double quote and each backslash in it",
        at(*.offset)
    )]
    SfSyntax {
        /// The first byte of the field's value that does not fit, counted from 0, if it is known.
        offset: Option<usize>,
    },
    /// The value is an Item of another type than String: a token, a number, …
    #[error("the key is not a Structured Field String; put it between double quotes")]
    NotAString,
    /// There is no character in it.
    #[error("the key is empty; send a unique random value such as a UUID")]
    Empty,
    /// There are only spaces in it.
    #[error("the key holds nothing but spaces; send a unique random value such as a UUID")]
    Blank,
    /// A bare key has a character in it that only a String may carry, or that none may.
    #[error(
        "a key without double quotes takes visible ASCII characters other than double quote, \
         comma, semicolon and backslash; leave those out, or send a Structured Field String"
    )]
    BareSyntax,
    /// A key that was not read from a header holds a character that no String can carry.
    #[error("a key takes printable ASCII characters only, from space to tilde")]
    NotPrintable,
    /// It is longer than the format allows.
    #[error("the key is too long; the longest that is taken has {max} bytes")]
    TooLong {
        /// The greatest length in bytes, decoded.
        max: usize,
    },
    /// It is shorter than the format demands.
    #[error("the key is too short; it needs {min} bytes at least, best of them random")]
    TooShort {
        /// The smallest length in bytes, decoded.
        min: usize,
    },
    /// The format takes UUIDs only.
    #[error(
        "the key is not a UUID; send a random one, as hexadecimal digits in groups of 8-4-4-4-12"
    )]
    NotUuid,
    /// It looks like something that identifies a person, and the format refuses that.
    #[error(
        "the key looks like an e-mail address, a telephone number or a national id; \
         send a unique random value such as a UUID"
    )]
    PersonalData,
    /// A rule of the application's own refused it; the text is that rule's.
    #[error("{0}")]
    Refused(Cow<'static, str>),
}

impl KeyError {
    /// The machine-readable reason: stable, in lower case, with hyphens.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MultipleLines => "multiple-lines",
            Self::SfSyntax { .. } => "sf-syntax",
            Self::NotAString => "not-a-string",
            Self::Empty => "empty",
            Self::Blank => "blank",
            Self::BareSyntax => "bare-syntax",
            Self::NotPrintable => "not-printable",
            Self::TooLong { .. } => "too-long",
            Self::TooShort { .. } => "too-short",
            Self::NotUuid => "not-uuid",
            Self::PersonalData => "personal-data",
            Self::Refused(_) => "refused",
        }
    }
}

fn at(offset: Option<usize>) -> String {
    offset.map_or_else(String::new, |offset| format!(" (see byte {offset})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_byte_only_where_it_is_known() {
        let known = KeyError::SfSyntax { offset: Some(7) }.to_string();
        assert!(known.contains("(see byte 7)"), "{known}");
        let unknown = KeyError::SfSyntax { offset: None }.to_string();
        assert!(!unknown.contains("byte"), "{unknown}");
    }

    #[test]
    fn the_text_of_a_length_error_names_the_limit() {
        assert!(KeyError::TooLong { max: 100 }.to_string().contains("100"));
        assert!(KeyError::TooShort { min: 16 }.to_string().contains("16"));
    }
}
