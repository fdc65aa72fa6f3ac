//! The keys that seal and open records.

use std::fmt;
use std::sync::Arc;

use aes_gcm::{Aes256Gcm, KeyInit};
use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::scope::ScopedKey;

/// The keys of an [`EncryptedStore`](crate::EncryptedStore): one that seals, and old ones that only
/// open.
///
/// Every key has an id, which is written beside what it sealed. What the keyring holds of a key is
/// wiped from memory when its last clone is gone; `Debug` shows ids only.
///
/// # Rotation
///
/// While instances are replaced one by one, the new ones must not write what the others cannot read:
///
/// 1. Add the new key as an [`old`](Self::old) one, everywhere.
/// 2. Make it the active one, with the key before it as an old one, everywhere.
/// 3. When the retention of the last record of step 1 is over, and nothing is left to reconcile, remove
///    the old key.
///
/// A record whose key was removed too early is unreadable
/// ([`UnsealError::UnknownKey`](crate::UnsealError::UnknownKey) names the id) and stays where it is;
/// with its key back it is readable again.
///
/// # Example
///
/// ```
/// use tower_idempotency::Keyring;
///
/// # let (this_year, last_year) = ([26; 32], [25; 32]);
/// let keyring = Keyring::new(2026, this_year).old(2025, last_year);
/// assert_eq!(format!("{keyring:?}"), "Keyring { active: 2026, old: [2025] }");
/// ```
#[derive(Clone)]
pub struct Keyring {
    // The first one is the active one.
    keys: Arc<[(u32, Master)]>,
}

impl Keyring {
    /// A keyring with one key, which seals. Its bytes must be random: from a vault or a generator,
    /// never a password.
    pub fn new(id: u32, key: [u8; 32]) -> Self {
        Self {
            keys: Arc::new([(id, Master::new(key))]),
        }
    }

    /// Adds a key that only opens what it has sealed before.
    ///
    /// Where two keys have one id, each of them is tried.
    #[must_use]
    pub fn old(self, id: u32, key: [u8; 32]) -> Self {
        let old = (id, Master::new(key));
        Self {
            keys: self.keys.iter().cloned().chain([old]).collect(),
        }
    }

    /// The id of the key that seals.
    pub fn active(&self) -> u32 {
        self.keys[0].0
    }

    /// What seals the fields of one record.
    pub(super) fn sealing(&self, record: &ScopedKey) -> (u32, Aes256Gcm) {
        let (id, master) = &self.keys[0];
        (*id, master.cipher(record))
    }

    /// What may open a field of this record that was sealed with a key of this id.
    pub(super) fn opening(&self, id: u32, record: &ScopedKey) -> impl Iterator<Item = Aes256Gcm> {
        let candidates = self.keys.iter().filter(move |(known, _)| *known == id);
        candidates.map(|(_, master)| master.cipher(record))
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let old: Vec<u32> = self.keys.iter().skip(1).map(|(id, _)| *id).collect();
        f.debug_struct("Keyring")
            .field("active", &self.active())
            .field("old", &old)
            .finish()
    }
}

/// A key from which the keys of records are derived, in the state that HKDF keeps of it. That state
/// wipes itself.
#[derive(Clone)]
struct Master(Hkdf<Sha256>);

impl Master {
    fn new(key: [u8; 32]) -> Self {
        let key = Zeroizing::new(key);
        Self(Hkdf::new(Some(SALT), &*key))
    }

    /// A key of its own for every record (RFC 5869): random nonces of 96 bits are safe for some 2^32
    /// messages under one key (NIST SP 800-38D section 8.3), which a store may reach and a record
    /// does not.
    fn cipher(&self, record: &ScopedKey) -> Aes256Gcm {
        let mut key = Zeroizing::new([0; 32]);
        let derived = self.0.expand(record.as_bytes(), &mut *key);
        debug_assert!(derived.is_ok(), "one block is never too long");
        Aes256Gcm::new((&*key).into())
    }
}

/// Separates these keys from whatever else is derived from the same bytes.
const SALT: &[u8] = b"tower-idempotency sealed record 1";
