//! draft-ietf-httpapi-idempotency-key-header-07, sentence by sentence, and the points on which it is
//! silent. What it asks of clients alone is not tested here.
//!
//! The draft expired on 18 April 2026 and never became an RFC.

#[path = "support/app.rs"]
mod app;

#[path = "draft/enforcement.rs"]
mod enforcement; // 2.6
#[path = "draft/errors.rs"]
mod errors; // 2.7
#[path = "draft/expiry.rs"]
mod expiry; // 2.3
#[path = "draft/fingerprint.rs"]
mod fingerprint; // 2.4
#[path = "draft/key.rs"]
mod key; // 2.1, 2.2, 3.1, 6
#[path = "draft/methods.rs"]
mod methods; // 1
#[path = "draft/responsibilities.rs"]
mod responsibilities; // 2.5
#[path = "draft/security.rs"]
mod security; // 5
#[path = "draft/silence.rs"]
mod silence;
