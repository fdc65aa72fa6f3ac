//! Why something that was sealed cannot be opened.

/// Why a field of a record cannot be opened: the [`source`](std::error::Error::source) of the
/// [`StoreErrorKind::Corrupt`](crate::StoreErrorKind::Corrupt) that [`EncryptedStore`] answers.
///
/// [`EncryptedStore`]: crate::EncryptedStore
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsealError {
    /// It was written without encryption, or its beginning was changed.
    #[error(
        "it is not sealed: if it is from before encryption was switched on, \
         `EncryptedStore::accept_unsealed` reads it"
    )]
    NotSealed,
    /// It was sealed by a newer release.
    #[error("it was sealed in version {0}; this release opens version 1")]
    UnknownVersion(u8),
    /// The key with this id is not in the keyring.
    #[error("it was sealed with key {0}, which is not in the keyring: add it with `Keyring::old`")]
    UnknownKey(u32),
    /// It was changed, or moved here from another record or field, or another key has the id of the
    /// one that sealed it.
    #[error(
        "it was changed, belongs to another record or field, or was sealed with another key of the \
         same id"
    )]
    NotAuthentic,
}
