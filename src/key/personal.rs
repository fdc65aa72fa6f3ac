//! Keys that name a person instead of an operation.

/// Whether the key holds an e-mail address, or *is* a telephone number or a national id.
///
/// Numbers are looked at only where they are the whole key: `order-1234567890` and
/// `invoice-1700000000000` are common and innocent. An e-mail address is unmistakable, so it is
/// found anywhere.
pub(super) fn looks_personal(key: &str) -> bool {
    has_email_address(key) || is_telephone_number(key) || is_national_id(key)
}

fn has_email_address(key: &str) -> bool {
    key.match_indices('@').any(|(at, _)| {
        let local = key[..at].bytes().next_back();
        let domain = &key[at + 1..];
        let end = domain
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '-')
            .unwrap_or(domain.len());
        let domain = domain[..end].trim_end_matches(['.', '-']);
        local.is_some_and(|byte| byte.is_ascii_alphanumeric() || b"._%+-".contains(&byte))
            && domain.rsplit_once('.').is_some_and(|(host, top)| {
                // A top-level domain has letters only; this leaves `package@1.2.3` alone.
                !host.is_empty() && top.len() >= 2 && top.bytes().all(|b| b.is_ascii_alphabetic())
            })
    })
}

/// `+` and 8 to 15 digits (E.164), or a national number: 9 to 11 digits after a single leading 0.
fn is_telephone_number(key: &str) -> bool {
    let (international, number) = match key.strip_prefix('+') {
        Some(number) => (true, number),
        None => (false, key),
    };
    let Some(digits) = digits_of(number, b" -.()") else {
        return false;
    };
    match digits.first {
        [b'1'..=b'9', _] if international => (8..=15).contains(&digits.count),
        [b'0', b'1'..=b'9'] if !international => (9..=11).contains(&digits.count),
        _ => false,
    }
}

/// Thirteen digits, as several countries number their citizens. The check digit is not looked at: a
/// lint that spares nine wrong numbers of ten would refuse keys at random.
fn is_national_id(key: &str) -> bool {
    digits_of(key, b" -").is_some_and(|digits| digits.count == 13)
}

/// What is asked of a number.
#[derive(Default)]
struct Digits {
    first: [u8; 2],
    count: usize,
}

/// The digits of a text that holds nothing but digits and separators, as long as they can belong
/// to one number.
fn digits_of(text: &str, separators: &[u8]) -> Option<Digits> {
    let mut digits = Digits::default();
    for byte in text.bytes() {
        match byte {
            b'0'..=b'9' if digits.count < 15 => {
                if let Some(first) = digits.first.get_mut(digits.count) {
                    *first = byte;
                }
                digits.count += 1;
            }
            _ if separators.contains(&byte) => {}
            _ => return None,
        }
    }
    Some(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_name_a_person_are_recognised() {
        for key in [
            "a@b.co",
            "alice@example.com",
            "mailto:alice.b+shop@mail.example.co.th",
            "order-1-alice@example.com/retry",
            "<alice@example.com.>",
            "0812345678",
            "021234567",
            "081-234-5678",
            "(081) 234 5678",
            "+66812345678",
            "+66 81 234 5678",
            "+14155552671",
            "1234567890123",
            "1-2345-67890-12-3",
        ] {
            assert!(looks_personal(key), "{key}");
        }
    }

    #[test]
    fn keys_that_name_an_operation_are_left_alone() {
        for key in [
            "8e03978e-40d5-43e8-bc93-6894a57f9324",
            "00000000-0000-0000-0000-000000000000",
            "01234567-0123-4123-8123-012345678901",
            "order-1234567890",
            "invoice-1700000000000",
            "pay-0812345678",
            "1234567890",
            "12345678901234",
            "0000000001",
            "+0812345678",
            "+1234567",
            "+1234567890123456",
            "01234567",
            "012345678901",
            "clkyoesmbgybucifusbbtdsbohtyuuwz",
            "q83vEjRWeJA=",
            "@1659578233",
            "package@1.2.3",
            "build@v1.b",
            "user@localhost",
            "a@.com",
            "@example.com",
            "evt_1NG8Du2eZvKYlo2CUI79vXWy",
            "123e4567e89b",
            "-",
            "+",
        ] {
            assert!(!looks_personal(key), "{key}");
        }
    }
}
