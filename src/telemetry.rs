//! Spans, events and metrics: the only place that knows whether `tracing` and `metrics` are there.
//!
//! Keys are shown as a prefix of their hash, never in clear: they can hold personal data. A hash is
//! computed only when somebody listens.

use std::error::Error;

use crate::error::StoreError;
use crate::reconciler::Reconciled;
use crate::record::Timestamp;
use crate::scope::ScopedKey;
use crate::store::Purged;
use crate::sweeper::Swept;

/// How a request was answered, in the label `outcome` of the counter `idempotency.requests` and in
/// the field `idempotency.outcome` of the span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    Executed,
    Replayed,
    InFlight,
    Mismatch,
    OutcomeUnknown,
    NotKept,
    MissingKey,
    Rejected,
    InvalidKey,
    Refused,
    StoreError,
    Unprotected,
}

impl Answered {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::InFlight => "in_flight",
            Self::Mismatch => "mismatch",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::NotKept => "response_not_kept",
            Self::MissingKey => "missing_key",
            Self::Rejected => "rejected",
            Self::InvalidKey => "invalid_key",
            Self::Refused => "replay_refused",
            Self::StoreError => "store_error",
            Self::Unprotected => "unprotected",
        }
    }
}

/// Things that went wrong although the client may not notice, in the label `kind` of the counter
/// `idempotency.faults`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// An attempt found that its claim is not its own any more.
    ClaimLost,
    /// An outcome could not be recorded in time.
    NotSaved,
    /// An attempt ended without anybody knowing how.
    Unknown,
    /// A claim could not be settled or freed before its lease ended.
    Unreleased,
    /// A renewal did not get through.
    NotRenewed,
    /// An attempt ran past the attempt limit and is renewed no more.
    AttemptLimit,
}

impl Fault {
    const fn label(self) -> &'static str {
        match self {
            Self::ClaimLost => "claim_lost",
            Self::NotSaved => "not_saved",
            Self::Unknown => "outcome_unknown",
            Self::Unreleased => "unreleased",
            Self::NotRenewed => "not_renewed",
            Self::AttemptLimit => "attempt_limit",
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::ClaimLost => "an attempt lost its claim: another one may have run",
            Self::NotSaved => {
                "an outcome could not be recorded in time; trying on in the background"
            }
            Self::Unknown => "an attempt ended without a known outcome: reconcile the key",
            Self::Unreleased => "a claim could not be settled and ages into an unknown outcome",
            Self::NotRenewed => "a lease could not be renewed; trying again",
            Self::AttemptLimit => "an attempt runs past the attempt limit and is renewed no more",
        }
    }
}

/// Counts one answered request.
#[inline]
pub(crate) fn answered(answer: Answered, store: &'static str) {
    metric::request(answer.label(), store);
}

/// Reports a fault at error level and counts it.
pub(crate) fn fault(fault: Fault, key: &ScopedKey, attempt: u32) {
    event::fault(fault, key, attempt);
    metric::fault(fault.label());
}

/// Reports a failed store call at warning level.
pub(crate) fn store_failed(op: &'static str, error: &StoreError) {
    event::store_failed(op, error);
}

/// Reports that a record was made with other fingerprint settings than those in force.
pub(crate) fn other_recipe(key: &ScopedKey) {
    event::other_recipe(key);
}

/// Reports a key that looks like personal data.
pub(crate) fn personal_data(key: &ScopedKey) {
    event::personal_data(key);
}

/// Reports records that expired although nobody ever said how they ended, at error level, and counts
/// all that were removed in the counter `idempotency.purged`, by `state`: `resolved`, `unresolved`.
pub(crate) fn purged(purged: &Purged) {
    if purged.unresolved > 0 {
        event::purged(purged.unresolved);
    }
    metric::purged(purged);
}

/// Counts one look at an abandoned record in the counter `idempotency.reconciled`, by `verdict`:
/// `happened`, `not_happened`, `unknown`, `failed` (the reconciler or the store), `overtaken` (the
/// record was somebody else's by then).
pub(crate) fn reconciled(
    reconciled: Reconciled,
    key: &ScopedKey,
    attempt: u32,
    store: &'static str,
) {
    event::reconciled(reconciled, key, attempt);
    metric::reconciled(reconciled.label(), store);
}

/// Reports a reconciler that failed at warning level.
pub(crate) fn reconciler_failed(
    key: &ScopedKey,
    attempt: u32,
    error: &(dyn Error + Send + Sync + 'static),
) {
    event::reconciler_failed(key, attempt, error);
}

/// Says at the end of a walk how many records are still abandoned, in the gauge
/// `idempotency.abandoned`, and for how many seconds the oldest of them has been, in the gauge
/// `idempotency.abandoned.oldest`: by the clock of this process, against the store's.
pub(crate) fn abandoned(left: usize, oldest: Option<Timestamp>, store: &'static str) {
    metric::abandoned(left, oldest, store);
}

/// Reports what a sweeper did in one round, if it did something.
pub(crate) fn swept(swept: &Swept) {
    if *swept
        != (Swept {
            complete: swept.complete,
            ..Swept::default()
        })
    {
        event::swept(swept);
    }
}

/// Reports a round that failed at error level, in the counter `idempotency.sweep.errors`.
pub(crate) fn sweep_failed(error: &StoreError, store: &'static str) {
    event::sweep_failed(error);
    metric::sweep_failed(store);
}

/// Counts bytes of a response that was kept.
#[inline]
pub(crate) fn response_size(bytes: usize) {
    metric::response_size(bytes);
}

/// Counts an attempt that began (`1`) or ended (`-1`).
#[inline]
pub(crate) fn in_flight(change: i8) {
    metric::in_flight(change);
}

/// Measures one store call.
pub(crate) struct StoreTimer(metric::Timer);

impl StoreTimer {
    #[inline]
    pub(crate) fn start() -> Self {
        Self(metric::Timer::start())
    }

    #[inline]
    pub(crate) fn stop(self, op: &'static str, store: &'static str, failed: bool) {
        self.0.stop(op, store, failed);
    }
}

pub(crate) use event::RequestSpan;

#[cfg(feature = "tracing")]
mod event {
    use super::{Answered, Error, Fault, Reconciled, ScopedKey, StoreError, Swept};

    /// The span `idempotency` of one guarded request; entered at every poll, in place or detached.
    #[derive(Clone, Debug)]
    pub(crate) struct RequestSpan(tracing::Span);

    impl RequestSpan {
        pub(crate) fn new(store: &'static str, key: &ScopedKey) -> Self {
            let span = tracing::info_span!(
                "idempotency",
                store,
                key_hash = tracing::field::Empty,
                idempotency.outcome = tracing::field::Empty,
            );
            if !span.is_disabled() {
                span.record("key_hash", key.log_id());
            }
            Self(span)
        }

        pub(crate) fn record(&self, answer: Answered) {
            self.0.record("idempotency.outcome", answer.label());
        }

        #[inline]
        pub(crate) fn in_scope<T>(&self, work: impl FnOnce() -> T) -> T {
            self.0.in_scope(work)
        }
    }

    pub(super) fn fault(fault: Fault, key: &ScopedKey, attempt: u32) {
        let (kind, text) = (fault.label(), fault.text());
        match fault {
            Fault::NotRenewed => {
                tracing::warn!(kind, key_hash = %key.log_id(), attempt, "{text}");
            }
            _ => tracing::error!(kind, key_hash = %key.log_id(), attempt, "{text}"),
        }
    }

    pub(super) fn store_failed(op: &'static str, error: &StoreError) {
        let source = Error::source(error);
        tracing::warn!(op, %error, source, "a store call failed");
    }

    pub(super) fn purged(unresolved: usize) {
        tracing::error!(
            unresolved,
            "records with an unknown outcome expired unresolved"
        );
    }

    pub(super) fn reconciled(reconciled: Reconciled, key: &ScopedKey, attempt: u32) {
        let verdict = reconciled.label();
        if reconciled.is_closed() {
            tracing::info!(verdict, key_hash = %key.log_id(), attempt, "an abandoned key was closed");
        } else {
            tracing::debug!(verdict, key_hash = %key.log_id(), attempt, "an abandoned key stays held");
        }
    }

    pub(super) fn reconciler_failed(
        key: &ScopedKey,
        attempt: u32,
        error: &(dyn Error + Send + Sync + 'static),
    ) {
        let source = error.source();
        tracing::warn!(
            key_hash = %key.log_id(), attempt, %error, source,
            "the reconciler failed: the key stays held, and it is asked again later"
        );
    }

    pub(super) fn swept(swept: &Swept) {
        tracing::debug!(?swept, "a sweeper's round has ended");
    }

    pub(super) fn sweep_failed(error: &StoreError) {
        let source = Error::source(error);
        tracing::error!(%error, source, "a sweeper's round failed; it is tried again later");
    }

    pub(super) fn other_recipe(key: &ScopedKey) {
        tracing::warn!(
            key_hash = %key.log_id(),
            "a record was fingerprinted by other settings: the request is taken for the same one",
        );
    }

    pub(super) fn personal_data(key: &ScopedKey) {
        tracing::warn!(
            key_hash = %key.log_id(),
            "an idempotency key looks like personal data: tell the client to send random keys",
        );
    }
}

#[cfg(not(feature = "tracing"))]
mod event {
    use super::{Answered, Error, Fault, Reconciled, ScopedKey, StoreError, Swept};

    #[derive(Clone, Debug)]
    pub(crate) struct RequestSpan;

    impl RequestSpan {
        pub(crate) fn new(_: &'static str, _: &ScopedKey) -> Self {
            Self
        }
        pub(crate) fn record(&self, _: Answered) {}
        #[inline]
        pub(crate) fn in_scope<T>(&self, work: impl FnOnce() -> T) -> T {
            work()
        }
    }

    pub(super) fn fault(fault: Fault, _: &ScopedKey, _: u32) {
        let _ = fault.text();
    }
    pub(super) fn store_failed(_: &'static str, _: &StoreError) {}
    pub(super) fn purged(_: usize) {}
    pub(super) fn reconciled(_: Reconciled, _: &ScopedKey, _: u32) {}
    pub(super) fn reconciler_failed(
        _: &ScopedKey,
        _: u32,
        _: &(dyn Error + Send + Sync + 'static),
    ) {
    }
    pub(super) fn swept(_: &Swept) {}
    pub(super) fn sweep_failed(_: &StoreError) {}
    pub(super) fn other_recipe(_: &ScopedKey) {}
    pub(super) fn personal_data(_: &ScopedKey) {}
}

#[cfg(feature = "metrics")]
mod metric {
    use std::time::{Instant, SystemTime};

    use super::{Purged, Timestamp};

    pub(super) fn request(outcome: &'static str, store: &'static str) {
        metrics::counter!("idempotency.requests", "outcome" => outcome, "store" => store)
            .increment(1);
    }

    pub(super) fn fault(kind: &'static str) {
        metrics::counter!("idempotency.faults", "kind" => kind).increment(1);
    }

    pub(super) fn response_size(bytes: usize) {
        // A histogram takes floats; a size beyond 2^53 bytes does not exist.
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        metrics::histogram!("idempotency.response.size").record(bytes as f64);
    }

    pub(super) fn in_flight(change: i8) {
        metrics::gauge!("idempotency.in_flight").increment(f64::from(change));
    }

    pub(super) fn reconciled(verdict: &'static str, store: &'static str) {
        metrics::counter!("idempotency.reconciled", "verdict" => verdict, "store" => store)
            .increment(1);
    }

    #[allow(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    #[allow(
        clippy::disallowed_methods,
        reason = "nothing is decided by it: an operator looks at it"
    )]
    pub(super) fn abandoned(left: usize, oldest: Option<Timestamp>, store: &'static str) {
        let age = oldest.and_then(|oldest| {
            SystemTime::now()
                .duration_since(oldest.to_system_time())
                .ok()
        });
        metrics::gauge!("idempotency.abandoned", "store" => store).set(left as f64);
        metrics::gauge!("idempotency.abandoned.oldest", "store" => store)
            .set(age.unwrap_or_default().as_secs_f64());
    }

    pub(super) fn purged(purged: &Purged) {
        let resolved = purged.removed.saturating_sub(purged.unresolved);
        for (state, count) in [("resolved", resolved), ("unresolved", purged.unresolved)] {
            if count > 0 {
                metrics::counter!("idempotency.purged", "state" => state).increment(count as u64);
            }
        }
    }

    pub(super) fn sweep_failed(store: &'static str) {
        metrics::counter!("idempotency.sweep.errors", "store" => store).increment(1);
    }

    pub(super) struct Timer(Instant);

    impl Timer {
        #[allow(
            clippy::disallowed_methods,
            reason = "a duration that is measured is real time, also where tokio's is paused"
        )]
        pub(super) fn start() -> Self {
            Self(Instant::now())
        }

        pub(super) fn stop(self, op: &'static str, store: &'static str, failed: bool) {
            let error = if failed { "store_error" } else { "" };
            metrics::histogram!(
                "idempotency.store.duration",
                "op" => op, "store" => store, "error.type" => error,
            )
            .record(self.0.elapsed());
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod metric {
    use super::{Purged, Timestamp};

    pub(super) fn reconciled(_: &'static str, _: &'static str) {}
    pub(super) fn abandoned(_: usize, _: Option<Timestamp>, _: &'static str) {}
    pub(super) fn purged(_: &Purged) {}
    pub(super) fn sweep_failed(_: &'static str) {}
    #[inline]
    pub(super) fn request(_: &'static str, _: &'static str) {}
    pub(super) fn fault(_: &'static str) {}
    #[inline]
    pub(super) fn response_size(_: usize) {}
    #[inline]
    pub(super) fn in_flight(_: i8) {}

    pub(super) struct Timer;

    impl Timer {
        #[inline]
        pub(super) fn start() -> Self {
            Self
        }
        #[inline]
        pub(super) fn stop(self, _: &'static str, _: &'static str, _: bool) {}
    }
}
