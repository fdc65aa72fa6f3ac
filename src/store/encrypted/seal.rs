//! What a sealed field looks like.
//!
//! ```text
//! 4 bytes   00 't' 'i', version = 1
//! 4 bytes   id of the key, big endian
//! 12 bytes  nonce, random
//! …         AES-256-GCM of the field, under the record's own key
//! 16 bytes  tag
//! ```
//!
//! Authenticated beside it: the first eight bytes, which field it is, and the lookup key. A sealed
//! field that is moved to another record, or to another field of the same record, does not open.

use aes_gcm::{AeadInOut, Nonce, Tag};

use super::error::UnsealError;
use super::keyring::Keyring;
use crate::scope::ScopedKey;

/// What is sealed of a record.
#[derive(Clone, Copy)]
pub(super) enum Field<'a> {
    Outcome,
    Correlation,
    /// The data of the checkpoint with this name.
    Checkpoint(&'a str),
}

impl Keyring {
    /// `None` if the field is too long to be sealed: 64 GiB.
    pub(super) fn seal(
        &self,
        record: &ScopedKey,
        field: Field<'_>,
        plain: &[u8],
    ) -> Option<Vec<u8>> {
        let (id, cipher) = self.sealing(record);
        let nonce: [u8; NONCE] = rand::random();
        let mut sealed = Vec::with_capacity(OVERHEAD + plain.len());
        sealed.extend_from_slice(&MAGIC);
        sealed.push(VERSION);
        sealed.extend_from_slice(&id.to_be_bytes());
        let associated = associated(&sealed, field, record);
        sealed.extend_from_slice(&nonce);
        let at = sealed.len();
        sealed.extend_from_slice(plain);
        let text = sealed[at..].as_mut().into();
        let tag = cipher.encrypt_inout_detached(&nonce.into(), &associated, text);
        sealed.extend_from_slice(&tag.ok()?);
        Some(sealed)
    }

    pub(super) fn open(
        &self,
        record: &ScopedKey,
        field: Field<'_>,
        sealed: &[u8],
    ) -> Result<Vec<u8>, UnsealError> {
        let Some((header, rest)) = sealed.split_first_chunk::<HEADER>() else {
            return Err(UnsealError::NotSealed);
        };
        let [m, a, g, version, id @ ..] = *header;
        if [m, a, g] != MAGIC {
            return Err(UnsealError::NotSealed);
        }
        if version != VERSION {
            return Err(UnsealError::UnknownVersion(version));
        }
        let Some((nonce, rest)) = rest.split_first_chunk::<NONCE>() else {
            return Err(UnsealError::NotAuthentic);
        };
        let Some((text, tag)) = rest.split_last_chunk::<TAG>() else {
            return Err(UnsealError::NotAuthentic);
        };
        let (nonce, tag): (Nonce<_>, Tag) = ((*nonce).into(), (*tag).into());
        let associated = associated(header, field, record);
        let id = u32::from_be_bytes(id);
        let mut why = UnsealError::UnknownKey(id);
        for cipher in self.opening(id, record) {
            let mut plain = text.to_vec();
            let opened = cipher.decrypt_inout_detached(
                &nonce,
                &associated,
                plain.as_mut_slice().into(),
                &tag,
            );
            if opened.is_ok() {
                return Ok(plain);
            }
            why = UnsealError::NotAuthentic;
        }
        Err(why)
    }
}

/// One text for each field of each record: everything but the last part has a length of its own.
fn associated(header: &[u8], field: Field<'_>, record: &ScopedKey) -> Vec<u8> {
    let (kind, name) = match field {
        Field::Outcome => (0, ""),
        Field::Correlation => (1, ""),
        Field::Checkpoint(name) => (2, name),
    };
    let record = record.as_bytes();
    let length = (record.len() as u64).to_be_bytes();
    [header, &[kind], &length, record, name.as_bytes()].concat()
}

/// Begins with a byte that no text has.
const MAGIC: [u8; 3] = *b"\0ti";
const VERSION: u8 = 1;
const HEADER: usize = MAGIC.len() + 1 + 4;
const NONCE: usize = 12;
const TAG: usize = 16;
const OVERHEAD: usize = HEADER + NONCE + TAG;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FIELDS: [Field<'_>; 4] = [
        Field::Outcome,
        Field::Correlation,
        Field::Checkpoint(""),
        Field::Checkpoint("a"),
    ];

    fn key(text: &str) -> ScopedKey {
        ScopedKey::join("http", "", text)
    }

    proptest! {
        #[test]
        fn a_field_is_opened_as_itself_and_as_nothing_else(
            plain: Vec<u8>,
            sealed_as in 0..FIELDS.len(),
            opened_as in 0..FIELDS.len(),
            record in "[ab]",
        ) {
            let keyring = Keyring::new(1, [1; 32]);
            let sealed = keyring.seal(&key("a"), FIELDS[sealed_as], &plain).unwrap();
            prop_assert_eq!(sealed.len(), plain.len() + OVERHEAD);
            let opened = keyring.open(&key(&record), FIELDS[opened_as], &sealed);
            let expected = if record == "a" && sealed_as == opened_as {
                Ok(plain)
            } else {
                Err(UnsealError::NotAuthentic)
            };
            prop_assert_eq!(opened, expected);
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_never_open(bytes: Vec<u8>, id in 0..3_u32) {
            let keyring = Keyring::new(1, [1; 32]).old(2, [2; 32]);
            // Most random bytes end at the magic; the second ones get past it.
            let begun = [&MAGIC[..], &[VERSION], &id.to_be_bytes(), &bytes].concat();
            for bytes in [bytes, begun] {
                prop_assert!(keyring.open(&key("a"), Field::Outcome, &bytes).is_err());
            }
        }
    }
}
