//! What an application demands of a key beyond its syntax.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::{KeyError, personal};
use crate::error::ConfigError;

type Rule = dyn Fn(&str) -> Result<(), Cow<'static, str>> + Send + Sync;

/// A rule for decoded keys, applied before any call to a store.
///
/// The draft (draft-ietf-httpapi-idempotency-key-header-07, section 5) advises to fix a format, to
/// publish it and to check it first.
///
/// The default takes 1 to 255 bytes and warns of keys that look like personal data.
///
/// ```
/// use tower_idempotency::{KeyFormat, PersonalData};
///
/// let format = KeyFormat::new()
///     .min_len(16)
///     .max_len(64)
///     .personal_data(PersonalData::Reject)
///     .check(|key| match key.starts_with("ord_") {
///         true => Ok(()),
///         false => Err("the key must begin with ord_"),
///     });
///
/// assert!(format.verify().is_ok());
/// assert!(format.validate("ord_9f3c1b7a6d2e4f50").is_ok());
/// let refused = format.validate("pay_9f3c1b7a6d2e4f50").unwrap_err();
/// assert_eq!(refused.reason(), "refused");
/// ```
#[derive(Clone)]
pub struct KeyFormat {
    min_len: usize,
    max_len: usize,
    uuid: bool,
    personal_data: PersonalData,
    checks: Vec<Arc<Rule>>,
}

impl KeyFormat {
    /// The greatest length that a format may be set to, in bytes. RFC 9651, section 3.3.3 has every
    /// parser take Strings of this length, and no more is to be relied on.
    pub const LONGEST: usize = 1024;

    /// The default: 1 to 255 bytes, any content, a warning for personal data.
    pub const fn new() -> Self {
        Self {
            min_len: MIN_LEN,
            max_len: MAX_LEN,
            uuid: false,
            personal_data: PersonalData::Warn,
            checks: Vec::new(),
        }
    }

    /// The smallest length of the decoded key in bytes: 1 by default. Longer random keys cannot be
    /// guessed by other clients.
    #[must_use]
    pub const fn min_len(mut self, bytes: usize) -> Self {
        self.min_len = bytes;
        self
    }

    /// The greatest length of the decoded key in bytes: 255 by default,
    /// [`LONGEST`](Self::LONGEST) at most. Set it to what the systems behind take, where the key is
    /// handed on.
    #[must_use]
    pub const fn max_len(mut self, bytes: usize) -> Self {
        self.max_len = bytes;
        self
    }

    /// Takes UUIDs only: hexadecimal digits in groups of 8-4-4-4-12, of any version and in any
    /// case. The case stays significant: a client has to repeat the key as it sent it first.
    #[must_use]
    pub const fn uuid(mut self) -> Self {
        self.uuid = true;
        self
    }

    /// What to do with keys that look like personal data: [`PersonalData::Warn`] by default.
    #[must_use]
    pub const fn personal_data(mut self, choice: PersonalData) -> Self {
        self.personal_data = choice;
        self
    }

    /// Adds a rule of the application's own; it runs after all others, and after rules that were
    /// added earlier.
    ///
    /// The text of a refusal is sent **to the client**, as the detail of a 400. Let it say how to
    /// correct the key; do not put the key, a secret or anything internal into it.
    #[must_use]
    pub fn check<F, E>(mut self, rule: F) -> Self
    where
        F: Fn(&str) -> Result<(), E> + Send + Sync + 'static,
        E: Into<Cow<'static, str>>,
    {
        self.checks
            .push(Arc::new(move |key| rule(key).map_err(Into::into)));
        self
    }

    pub(crate) const fn min(&self) -> usize {
        self.min_len
    }

    pub(crate) const fn max(&self) -> usize {
        self.max_len
    }

    pub(crate) const fn is_uuid(&self) -> bool {
        self.uuid
    }

    pub(crate) const fn personal(&self) -> PersonalData {
        self.personal_data
    }

    /// Whether the settings can be met at all. A layer asks this when it is built; ask yourself
    /// where you use a format on its own.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] naming the setting: a length of 0 or over [`LONGEST`](Self::LONGEST), a
    /// minimum over the maximum, or lengths that no UUID has together with [`uuid`](Self::uuid).
    pub fn verify(&self) -> Result<(), ConfigError> {
        let Self {
            min_len, max_len, ..
        } = *self;
        let refuse = |setting, problem| Err(ConfigError::new(setting, problem));
        if min_len == 0 {
            return refuse(
                "KeyFormat::min_len",
                "is 0; an empty key is never taken, so use 1 or more".to_owned(),
            );
        }
        if max_len == 0 || max_len > Self::LONGEST {
            let longest = Self::LONGEST;
            return refuse(
                "KeyFormat::max_len",
                format!("is {max_len}; use a length from 1 to {longest}"),
            );
        }
        if min_len > max_len {
            return refuse(
                "KeyFormat::min_len",
                format!("is {min_len}, more than `KeyFormat::max_len`, which is {max_len}"),
            );
        }
        if self.uuid && !(min_len..=max_len).contains(&UUID_LEN) {
            return refuse(
                "KeyFormat::uuid",
                format!("needs keys of {UUID_LEN} bytes, but {min_len} to {max_len} are set"),
            );
        }
        Ok(())
    }

    /// Applies the rule to a decoded key. `Ok` may hold advice for the operator.
    ///
    /// # Errors
    ///
    /// [`KeyError`], from the cheapest check to the dearest: length, UUID, personal data, own rules.
    pub fn validate(&self, key: &str) -> Result<KeyAdvice, KeyError> {
        check_length(key, self.min_len, self.max_len)?;
        if self.uuid && !is_uuid(key) {
            return Err(KeyError::NotUuid);
        }
        let personal = self.personal_data != PersonalData::Ignore && personal::looks_personal(key);
        if personal && self.personal_data == PersonalData::Reject {
            return Err(KeyError::PersonalData);
        }
        for rule in &self.checks {
            rule(key).map_err(KeyError::Refused)?;
        }
        Ok(match personal {
            true => KeyAdvice::PersonalData,
            false => KeyAdvice::Sound,
        })
    }
}

impl Default for KeyFormat {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyFormat")
            .field("min_len", &self.min_len)
            .field("max_len", &self.max_len)
            .field("uuid", &self.uuid)
            .field("personal_data", &self.personal_data)
            .field("checks", &self.checks.len())
            .finish()
    }
}

/// What to do with a key that looks like personal data: one that holds an e-mail address, or is a
/// telephone number or a national id of 13 digits.
///
/// Such keys are not unique per operation, can be guessed, and end up wherever keys are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PersonalData {
    /// Do not look.
    Ignore,
    /// Take the key and tell the caller of [`KeyFormat::validate`]. The default: the lint guesses,
    /// and a guess should not stop payments.
    #[default]
    Warn,
    /// Refuse the key with [`KeyError::PersonalData`].
    Reject,
}

/// What there is to say of a key that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyAdvice {
    /// Nothing.
    Sound,
    /// It looks like personal data: worth a line in the log (without the key) and a word with the
    /// client's developers.
    PersonalData,
}

/// The lengths of the default format.
pub(super) fn check_default_length(key: &str) -> Result<(), KeyError> {
    check_length(key, MIN_LEN, MAX_LEN)
}

fn check_length(key: &str, min: usize, max: usize) -> Result<(), KeyError> {
    match key.len() {
        0 => Err(KeyError::Empty),
        len if len < min => Err(KeyError::TooShort { min }),
        len if len > max => Err(KeyError::TooLong { max }),
        _ => Ok(()),
    }
}

fn is_uuid(key: &str) -> bool {
    key.len() == UUID_LEN
        && key.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

const MIN_LEN: usize = 1;
// What the large payment APIs take.
const MAX_LEN: usize = 255;
const UUID_LEN: usize = 36;

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";

    #[test]
    fn the_default_takes_1_to_255_bytes() {
        let format = KeyFormat::default();
        assert_eq!(format.validate("k"), Ok(KeyAdvice::Sound));
        assert_eq!(format.validate(&"k".repeat(255)), Ok(KeyAdvice::Sound));
        assert_eq!(
            format.validate(&"k".repeat(256)),
            Err(KeyError::TooLong { max: 255 })
        );
        assert_eq!(format.validate(""), Err(KeyError::Empty));
    }

    #[test]
    fn lengths_are_inclusive_at_both_ends() {
        let format = KeyFormat::new().min_len(16).max_len(100);
        assert_eq!(
            format.validate(&"k".repeat(15)),
            Err(KeyError::TooShort { min: 16 })
        );
        assert!(format.validate(&"k".repeat(16)).is_ok());
        assert!(format.validate(&"k".repeat(100)).is_ok());
        assert_eq!(
            format.validate(&"k".repeat(101)),
            Err(KeyError::TooLong { max: 100 })
        );
    }

    #[test]
    fn the_uuid_format_takes_uuids_and_nothing_else() {
        let format = KeyFormat::new().uuid();
        for key in [
            UUID,
            "AE03978E-40D5-43E8-BC93-6894A57F9324",
            "00000000-0000-0000-0000-000000000000",
        ] {
            assert_eq!(format.validate(key), Ok(KeyAdvice::Sound), "{key}");
        }
        for key in [
            "abc",
            "8e03978e40d543e8bc936894a57f9324",
            "8e03978e-40d5-43e8-bc93-6894a57f932",
            "8e03978e-40d5-43e8-bc93-6894a57f93244",
            "8e03978e-40d5-43e8-bc93-6894a57f932g",
            "8e03978e-40d5-43e8-bc93+6894a57f9324",
            "8e03978-e40d5-43e8-bc93-6894a57f9324",
            "{8e03978e-40d5-43e8-bc93-6894a57f93}",
        ] {
            assert_eq!(format.validate(key), Err(KeyError::NotUuid), "{key}");
        }
    }

    #[test]
    fn personal_data_is_reported_refused_or_ignored_as_it_is_set() {
        let key = "alice@example.com";
        assert_eq!(
            KeyFormat::new().validate(key),
            Ok(KeyAdvice::PersonalData),
            "the default warns"
        );
        let set = |choice| KeyFormat::new().personal_data(choice).validate(key);
        assert_eq!(set(PersonalData::Warn), Ok(KeyAdvice::PersonalData));
        assert_eq!(set(PersonalData::Reject), Err(KeyError::PersonalData));
        assert_eq!(set(PersonalData::Ignore), Ok(KeyAdvice::Sound));
    }

    #[test]
    fn a_refusal_of_the_own_rule_is_the_text_that_the_client_reads() {
        let format = KeyFormat::new().check(|key| match key.strip_prefix("ord_") {
            Some(_) => Ok(()),
            None => Err("begin the key with ord_"),
        });
        assert!(format.validate("ord_1").is_ok());
        let error = format.validate("pay_1").unwrap_err();
        assert_eq!(error.reason(), "refused");
        assert_eq!(error.to_string(), "begin the key with ord_");
    }

    #[test]
    fn every_own_rule_has_to_agree() {
        let format = KeyFormat::new()
            .check(|key| key.contains('a').then_some(()).ok_or("no a"))
            .check(|key| {
                let len = key.len();
                (len % 2 == 0)
                    .then_some(())
                    .ok_or_else(|| format!("{len} is odd"))
            });
        assert!(format.validate("ab").is_ok());
        assert_eq!(format.validate("bb").unwrap_err().to_string(), "no a");
        assert_eq!(format.validate("aba").unwrap_err().to_string(), "3 is odd");
    }

    #[test]
    fn own_rules_see_only_keys_that_passed_the_others() {
        let format = KeyFormat::new()
            .max_len(3)
            .check(|_| -> Result<(), &str> { panic!("must not be asked") });
        assert_eq!(format.validate("long"), Err(KeyError::TooLong { max: 3 }));
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        for (format, setting) in [
            (KeyFormat::new().min_len(0), "KeyFormat::min_len"),
            (KeyFormat::new().max_len(0), "KeyFormat::max_len"),
            (KeyFormat::new().max_len(1025), "KeyFormat::max_len"),
            (KeyFormat::new().min_len(256), "KeyFormat::min_len"),
            (KeyFormat::new().min_len(9).max_len(8), "KeyFormat::min_len"),
            (KeyFormat::new().max_len(35).uuid(), "KeyFormat::uuid"),
            (KeyFormat::new().min_len(37).uuid(), "KeyFormat::uuid"),
        ] {
            let error = format.verify().expect_err(setting);
            assert_eq!(error.setting(), setting, "{format:?}");
            assert!(error.to_string().contains(setting), "{error}");
        }
        for format in [
            KeyFormat::new(),
            KeyFormat::new().max_len(1024),
            KeyFormat::new().min_len(8).max_len(8),
            KeyFormat::new().min_len(36).max_len(36).uuid(),
        ] {
            assert_eq!(format.verify(), Ok(()), "{format:?}");
        }
    }
}
