//! One-commit mode: no record exists while the handler runs, and its rows and the outcome are
//! committed together.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::admission::{Admission, AdmitError, Holder, Settled};
use crate::attempt::{AttemptGuard, Inner};
use crate::claim::ClaimRequest;
use crate::error::StoreError;
use crate::idempotency::{Closing, Engine, judge};
use crate::store::{Begun, Committed, OneCommit, OpenTransaction};
use crate::telemetry::{self, Fault};

/// [`OneCommit`] without its type parameter.
pub(crate) trait Begin: fmt::Debug + Send + Sync {
    fn begin<'a>(
        &'a self,
        request: &'a ClaimRequest,
    ) -> Pin<Box<dyn Future<Output = Result<Begun, StoreError>> + Send + 'a>>;
}

impl<O: OneCommit> Begin for O {
    fn begin<'a>(
        &'a self,
        request: &'a ClaimRequest,
    ) -> Pin<Box<dyn Future<Output = Result<Begun, StoreError>> + Send + 'a>> {
        OneCommit::begin(self, request)
    }
}

impl Engine {
    /// Opens a transaction for the request, or says what stands in its way.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        transactions: &dyn Begin,
        request: ClaimRequest,
    ) -> Result<Admission, AdmitError> {
        let begun = self.call("begin", transactions.begin(&request)).await;
        match begun.map_err(AdmitError::Store)? {
            Begun::Open(transaction) => Ok(Admission::First(AttemptGuard::in_transaction(
                self,
                request,
                transaction,
            ))),
            Begun::Existing(record) => {
                judge(record, &request.fingerprint).map_err(AdmitError::Store)
            }
            // Nobody can tell who it is, nor for how long: the attempt has no lease.
            Begun::Held => Ok(Admission::InFlight(Holder {
                owner: request.owner,
                lease_left: self.settings.lease,
            })),
        }
    }

    /// Commits or rolls back.
    pub(crate) async fn close_transaction(
        &self,
        attempt: &Inner,
        transaction: Box<dyn OpenTransaction>,
        closing: &Closing,
    ) -> Settled {
        let Closing::Complete { outcome, retention } = closing else {
            transaction.roll_back().await;
            return Settled::Recorded;
        };
        match transaction.commit(outcome, *retention).await {
            Ok(Committed::Both) => Settled::Recorded,
            // The rows of this answer are gone, so it cannot stand in for the one that was not kept.
            Ok(Committed::Standing(outcome)) if outcome.is_tombstone() => Settled::Undone,
            Ok(Committed::Standing(outcome)) => Settled::Standing(outcome),
            Ok(Committed::Neither) => Settled::Undone,
            Ok(Committed::Unknown) => {
                let claim = attempt.claim();
                telemetry::fault(Fault::Unknown, claim.key(), claim.attempt());
                Settled::Unknown
            }
            Err(error) => {
                telemetry::store_failed("commit", &error);
                Settled::Undone
            }
        }
    }
}
