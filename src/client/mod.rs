//! The other half.

mod backoff;
mod budget;
mod error;
mod file_journal;
mod journal;
mod key;
mod one_try;
mod policy;
mod replay;
mod retry_after;
mod stack;
mod verdict;

pub use error::{ClientError, GaveUp, OutcomeUnknown};
pub use file_journal::FileJournal;
pub use journal::{KeyJournal, MemoryJournal, OperationName, SavedKey};
pub use key::{KeyForm, SetIdempotencyKey, SetIdempotencyKeyLayer};
pub use one_try::OneTry;
pub use policy::RetryPolicy;
pub use replay::ReplayableBody;
pub use stack::{ClientLayer, RetryingClient};
