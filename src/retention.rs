//! Which outcomes are kept, and which free the key.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http::response::Parts;

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

/// Decides by status and headers what becomes of a response.
///
/// The default, [`standard`](Self::standard), keeps everything that the handler returned except
/// 401, 403, 407, 408, 425, 429 and every 5xx: a transient failure that is pinned for a day is what
/// users complain about most. A handler that failed *after* its effect must say so with
/// [`RetentionOverride::Keep`] or [`RetentionOverride::LeaveUnknown`].
#[derive(Clone)]
pub struct RetentionPolicy {
    name: &'static str,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Standard,
    Draft,
    Stripe,
    Rule(Arc<Rule>),
}

impl RetentionPolicy {
    /// Keeps all but 401, 403, 407, 408, 425, 429 and 5xx.
    pub const fn standard() -> Self {
        Self {
            name: "standard",
            kind: Kind::Standard,
        }
    }

    /// Keeps every response, "success or an error", as draft-ietf-httpapi-idempotency-key-header-07
    /// section 2.6 has it.
    pub const fn draft() -> Self {
        Self {
            name: "draft",
            kind: Kind::Draft,
        }
    }

    /// Keeps all but 401, 403, 407, 409 and 429, 5xx included, as Stripe's API v1 does once an
    /// endpoint began (docs.stripe.com/api/idempotent_requests).
    pub const fn stripe() -> Self {
        Self {
            name: "stripe",
            kind: Kind::Stripe,
        }
    }

    /// A rule of your own. `name` stands in the published policy.
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
        }
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
}
