//! Which outcomes are kept, and which free the key.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::response::Parts;

use crate::grpc_code::GrpcCode;

/// What becomes of an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disposition {
    /// Kept and replayed, as long as the engine's retention says.
    Keep,
    /// Kept and replayed for this long, counted from the completion.
    KeepFor(Duration),
    /// Not kept: nothing that lasts was done, the key is free for a retry.
    Release,
    /// Nobody knows: retries get *outcome unknown* until the key is reconciled.
    LeaveUnknown,
}

/// A handler's word about its own response, stronger than the [`RetentionPolicy`]: put it into the
/// response's extensions.
///
/// ```
/// use http::Response;
/// use tower_idempotency::RetentionOverride;
///
/// let mut response = Response::new("the card number has no digits");
/// // Nothing was charged: a corrected request may use the same key.
/// response.extensions_mut().insert(RetentionOverride::NotExecuted);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetentionOverride {
    /// The operation did not begin (validation, a quota): release the key.
    NotExecuted,
    /// The operation ended, whatever the status says: keep the response.
    Keep,
    /// The operation may have happened (a gateway timed out): hold the key until it is reconciled.
    LeaveUnknown,
    /// The operation ended and its response is a live stream: pass it on as it is produced, keep a
    /// tombstone.
    Live,
}

type Rule = dyn Fn(&Parts) -> Disposition + Send + Sync;
type GrpcRule = dyn Fn(GrpcCode) -> Disposition + Send + Sync;

/// Decides by status and headers what becomes of a response, and by its `grpc-status` what becomes
/// of the answer to a gRPC call.
///
/// The default, [`standard`](Self::standard), keeps everything that the handler returned except
/// 401, 403, 407, 408, 425, 429 and every 5xx: a transient failure that is pinned for a day is what
/// users complain about most. A handler that failed *after* its effect must say so with
/// [`RetentionOverride::Keep`] or [`RetentionOverride::LeaveUnknown`].
///
/// Of gRPC calls it does this, and [`grpc`](Self::grpc) changes it:
///
/// | `grpc-status` | what becomes of the answer |
/// |---|---|
/// | OK, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED | kept |
/// | PERMISSION_DENIED, UNAUTHENTICATED, RESOURCE_EXHAUSTED, ABORTED, UNAVAILABLE, INTERNAL | released |
/// | CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, DATA_LOSS | left unknown: these say that nobody knows |
#[derive(Clone)]
pub struct RetentionPolicy {
    name: &'static str,
    kind: Kind,
    grpc: Option<Arc<GrpcRule>>,
}

#[derive(Clone)]
enum Kind {
    Standard,
    Draft,
    Stripe,
    Rule(Arc<Rule>),
}

impl RetentionPolicy {
    /// Keeps all but 401, 403, 407, 408, 425, 429 and 5xx; of gRPC calls as the table above says.
    pub const fn standard() -> Self {
        Self {
            name: "standard",
            kind: Kind::Standard,
            grpc: None,
        }
    }

    /// Keeps every response, "success or an error", as draft-ietf-httpapi-idempotency-key-header-07
    /// section 2.6 has it; of gRPC calls whatever their status is.
    pub const fn draft() -> Self {
        Self {
            name: "draft",
            kind: Kind::Draft,
            grpc: None,
        }
    }

    /// Keeps all but 401, 403, 407, 409 and 429, 5xx included, as Stripe's API v1 does once an
    /// endpoint began (docs.stripe.com/api/idempotent_requests). Of gRPC calls all but
    /// UNAUTHENTICATED, PERMISSION_DENIED, ABORTED and RESOURCE_EXHAUSTED.
    pub const fn stripe() -> Self {
        Self {
            name: "stripe",
            kind: Kind::Stripe,
            grpc: None,
        }
    }

    /// A rule of your own. `name` stands in the published policy. gRPC calls are decided on as by
    /// [`standard`](Self::standard), or by the rule of [`grpc`](Self::grpc).
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_idempotency::{Disposition, RetentionPolicy};
    ///
    /// let policy = RetentionPolicy::from_fn("accepted-only", |parts| match parts.status {
    ///     StatusCode::ACCEPTED => Disposition::Keep,
    ///     _ => Disposition::Release,
    /// });
    /// assert_eq!(policy.name(), "accepted-only");
    /// ```
    pub fn from_fn(
        name: &'static str,
        rule: impl Fn(&Parts) -> Disposition + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            kind: Kind::Rule(Arc::new(rule)),
            grpc: None,
        }
    }

    /// A rule of your own for gRPC calls, by their `grpc-status`. It is asked about every code for
    /// the published policy too, so it must depend on nothing else.
    ///
    /// ```
    /// use tower_idempotency::{Disposition, GrpcCode, RetentionPolicy};
    ///
    /// // The handlers of this service return UNKNOWN only before they begin.
    /// let standard = RetentionPolicy::standard();
    /// let policy = standard.clone().grpc(move |code| match code {
    ///     GrpcCode::Unknown => Disposition::Release,
    ///     code => standard.decide_grpc(code),
    /// });
    /// assert_eq!(policy.decide_grpc(GrpcCode::Unknown), Disposition::Release);
    /// ```
    #[must_use]
    pub fn grpc(mut self, rule: impl Fn(GrpcCode) -> Disposition + Send + Sync + 'static) -> Self {
        self.grpc = Some(Arc::new(rule));
        self
    }

    /// `standard`, `draft`, `stripe`, or the name of a rule of your own.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What becomes of a response with these head parts.
    pub fn decide(&self, parts: &Parts) -> Disposition {
        match &self.kind {
            Kind::Rule(rule) => rule(parts),
            preset if preset.releases(parts.status) => Disposition::Release,
            _ => Disposition::Keep,
        }
    }

    /// What becomes of the answer to a gRPC call that ended with this status. One without a status,
    /// or with one that is no number of a code, ended with [`GrpcCode::Unknown`].
    pub fn decide_grpc(&self, code: GrpcCode) -> Disposition {
        match &self.grpc {
            Some(rule) => rule(code),
            None => self.kind.decide_grpc(code),
        }
    }

    /// The statuses that free the key, for the published policy; `None` for a rule of your own.
    pub fn released_statuses(&self) -> Option<Vec<u16>> {
        if matches!(self.kind, Kind::Rule(_)) {
            return None;
        }
        let statuses = (200..600).filter(|code| {
            StatusCode::from_u16(*code).is_ok_and(|status| self.kind.releases(status))
        });
        Some(statuses.collect())
    }
}

impl Kind {
    fn releases(&self, status: StatusCode) -> bool {
        match self {
            Self::Standard => {
                status.is_server_error()
                    || matches!(status.as_u16(), 401 | 403 | 407 | 408 | 425 | 429)
            }
            Self::Stripe => matches!(status.as_u16(), 401 | 403 | 407 | 409 | 429),
            Self::Draft | Self::Rule(_) => false,
        }
    }

    fn decide_grpc(&self, code: GrpcCode) -> Disposition {
        use GrpcCode::{
            Aborted, Cancelled, DataLoss, DeadlineExceeded, Internal, PermissionDenied,
            ResourceExhausted, Unauthenticated, Unavailable, Unknown,
        };
        match (self, code) {
            (Self::Draft, _) => Disposition::Keep,
            (_, Unauthenticated | PermissionDenied | ResourceExhausted | Aborted) => {
                Disposition::Release
            }
            (Self::Stripe, _) => Disposition::Keep,
            (_, Unavailable | Internal) => Disposition::Release,
            // A client library makes these when a call broke off or its time was over, and `?` hands
            // on what a gateway's client made. None of them says that nothing was done.
            (_, Cancelled | Unknown | DeadlineExceeded | DataLoss) => Disposition::LeaveUnknown,
            _ => Disposition::Keep,
        }
    }
}

impl Default for RetentionPolicy {
    fn default() -> Self {
        Self::standard()
    }
}

impl fmt::Debug for RetentionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RetentionPolicy").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(status: u16) -> Parts {
        let response = http::Response::builder().status(status).body(());
        response.expect("a status").into_parts().0
    }

    #[test]
    fn each_preset_releases_the_statuses_that_it_lists_and_no_others() {
        let server_errors: Vec<u16> = (500..600).collect();
        let standard = [&[401, 403, 407, 408, 425, 429], &server_errors[..]].concat();
        for (policy, released) in [
            (RetentionPolicy::standard(), standard),
            (RetentionPolicy::draft(), vec![]),
            (RetentionPolicy::stripe(), vec![401, 403, 407, 409, 429]),
        ] {
            assert_eq!(policy.released_statuses(), Some(released.clone()));
            for status in 200..600 {
                let expected = if released.contains(&status) {
                    Disposition::Release
                } else {
                    Disposition::Keep
                };
                assert_eq!(
                    policy.decide(&parts(status)),
                    expected,
                    "{policy:?} {status}"
                );
            }
        }
    }

    #[test]
    fn each_preset_keeps_releases_or_leaves_unknown_each_code_of_grpc() {
        use Disposition::{Keep, LeaveUnknown as Open, Release as Free};
        let standard = [
            Keep, Open, Open, Keep, Open, Keep, Keep, Free, Free, Keep, Free, Keep, Keep, Free,
            Free, Open, Free,
        ];
        let mut stripe = [Keep; 17];
        for code in [7, 8, 10, 16] {
            stripe[code] = Free;
        }
        for (policy, expected) in [
            (RetentionPolicy::standard(), standard),
            (RetentionPolicy::from_fn("own", |_| Keep), standard),
            (RetentionPolicy::draft(), [Keep; 17]),
            (RetentionPolicy::stripe(), stripe),
            (RetentionPolicy::draft().grpc(|_| Free), [Free; 17]),
        ] {
            let decided: Vec<_> = GrpcCode::ALL
                .iter()
                .map(|code| policy.decide_grpc(*code))
                .collect();
            assert_eq!(decided, expected, "{policy:?}");
        }
    }
}
