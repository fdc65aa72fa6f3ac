//! What a request asks for, in 52 bytes, so that a reused key is recognised.

mod value;

pub use value::{Fingerprint, FingerprintMatch};
