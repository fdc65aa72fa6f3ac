//! An outcome in the application's own transaction, beside the rows that the handler wrote.

use std::sync::Arc;

use crate::attempt::Attempt;
use crate::idempotency::Idempotency;
use crate::outcome::Outcome;
use crate::store::{RecordingError, Transactional};

impl<S: Transactional> Idempotency<S> {
    /// The statement that records `outcome` as the result of `attempt`, to be run in a transaction of
    /// the application: with its `complete_in`, as the last statement before the commit. Then the
    /// handler's own rows and the outcome are committed both or neither, whatever breaks.
    ///
    /// The statement is fenced by the attempt's owner. If another attempt has taken the key over, it
    /// changes nothing and is [`RecordingError::ClaimLost`]: return early, and the transaction is
    /// rolled back with everything in it.
    ///
    /// The layer goes on as ever: when the handler has returned, it asks the store to complete, finds
    /// the outcome that stands, and sends that. So answer with what was recorded:
    /// [`Outcome::to_response`], or under the feature `axum` the outcome itself.
    ///
    /// # Where it works
    ///
    /// With `PostgresStore` and `SqliteStore`, whether behind [`PrefixedStore`](crate::PrefixedStore)
    /// and `EncryptedStore` or not; the key is prefixed and the outcome is sealed as they do it. Not
    /// behind `Arc<dyn Store>`, where nobody knows which database there is.
    ///
    /// # After a crash
    ///
    /// Of an attempt that died, either all was committed and a retry replays it, or nothing was, and
    /// the record alone says so: it is abandoned. If *all* that the handler does lies in this one
    /// transaction, that is as good as "it did not happen and can no longer happen", because a
    /// stalled attempt that wakes up is fenced: then
    /// [`OnAbandoned::Rerun`](crate::OnAbandoned::Rerun) is safe, and a reconciler may release such a
    /// record without asking anybody. Where the handler also calls a gateway, it is not.
    ///
    /// # Errors
    ///
    /// [`RecordingError::Misplaced`] if the attempt belongs to another engine, whose store may be
    /// another one; [`RecordingError::Store`] if the outcome cannot be kept.
    pub fn recording(
        &self,
        attempt: &Attempt,
        outcome: &Outcome,
    ) -> Result<S::Recording, RecordingError> {
        let attempt = attempt.inner();
        if !Arc::ptr_eq(attempt.engine(), &self.engine) {
            return Err(RecordingError::Misplaced(
                "another engine granted the attempt: use a clone of its layer's `idempotency()`",
            ));
        }
        let recording = self.store().recording(attempt.claim(), outcome);
        recording.map_err(RecordingError::Store)
    }
}
