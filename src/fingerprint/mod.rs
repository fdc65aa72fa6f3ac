//! What a request asks for, in 52 bytes, so that a reused key is recognised.
//!
//! A key that comes back with another request must not be answered with the first one's result.
//! So the layer takes a [`Fingerprint`] of each guarded request before the claim, the store keeps
//! it with the record, and a retry is judged against it. What goes into it is said by a
//! [`FingerprintRecipe`]; without one it is the method, the path, the query, the content type and
//! the body, byte for byte.
//!
//! Exactness comes first. A fingerprint that differs although the client meant the same costs a
//! 422, which is seen at once; one that is equal although the client meant something else answers
//! an operation that never ran. Whatever a recipe cannot read for certain (JSON that does not
//! parse, a member that occurs twice, a form without its boundary) is hashed as raw bytes.
//!
//! # What is hashed
//!
//! The request part is one SHA-256 over these fields, in this order, or one BLAKE3 where the recipe asks
//! for it. It stays the same between releases; if it ever has to change, the recipe's id changes with it.
//!
//! | field | bytes |
//! |---|---|
//! | method | text |
//! | path | text |
//! | query | lines: none without a `?`, else one |
//! | each chosen header, by name | lines, in the order in which they were sent |
//! | content, raw | `R`, the lines of `Content-Type`, then the body to its end |
//! | content, JSON | `J`, text of the media type, then the value, or for each chosen pointer `0` or `1` and the value |
//! | content, multipart | `M`, then for each part: `1`, its parameters, the lines of its `Content-Type` and `Content-Transfer-Encoding`, its bytes as text; `0` after the last |
//! | content, closure | `C`, then what the closure returned to its end |
//! | content, left out | `N` |
//!
//! Where the key alone decides ([`FingerprintRecipe::key_only`]) there are no fields for method, path and query.
//!
//! The target part is the beginning of a SHA-256 over the first three whatever the recipe, so that requests of two recipes
//! can be told apart by it.
//!
//! *Text* is a length (64 bits, little endian) and that many bytes. *Lines* are, for each line, a
//! one and a text, and a zero after the last. `0` and `1` are single bytes of that value.
//!
//! No two inputs have one encoding: a recipe fixes how many fields there are, each field but the
//! last says itself where it ends, the letter says how to read the last one, and the last one is
//! either as self-delimiting or ends where the input ends. This is what a plain concatenation
//! lacks, for which the path `/a` with the body `b` and the path `/ab` without one are the same.

mod caller;
mod content_type;
mod digest;
mod encoder;
mod hasher;
mod json;
mod multipart;
mod pointer;
mod recipe;
mod value;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub(crate) use caller::{CallerPart, caller_part};
pub(crate) use json::scalars;
pub(crate) use pointer::Pointer;
pub use recipe::{FingerprintDescription, FingerprintRecipe};
pub use value::{Fingerprint, FingerprintMatch};
