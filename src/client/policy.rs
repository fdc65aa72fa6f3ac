//! Whether and when to try again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::header::HOST;
use http::{HeaderName, Method, Request, Response};
use tokio::time::{Instant, Sleep, sleep};
use tower::retry::Policy;

use super::backoff::Backoff;
use super::budget::Budget;
use super::error::{ClientError, GaveUp, OutcomeUnknown};
use super::key::{LIFETIME, Operation};
use super::replay::ReplayableBody;
use super::verdict::{Reading, Trace, Verdict};
use crate::http::IDEMPOTENCY_KEY;
use crate::key::{IdempotencyKey, KeySyntax};

/// When a request is sent again: a [`tower::retry::Policy`].
///
/// A try is read in this order: the header `Idempotency-Error`, the marker of a replay
/// (`Idempotency-Replayed` or `Idempotent-Replayed`), a header of the server's that
/// [orders](Self::should_retry_header) or forbids retries, the status. What each of them leads to stands
/// in [one table](crate::_documentation::readme#how-a-client-retries), for clients in other languages
/// too.
///
/// So `Ok` is the operation's answer or a refusal that changed nothing, and everything from which
/// nobody can tell is an error. A *refusal* is an answer only as long as no earlier try may have had
/// its effect: a 401 after a try that timed out does not say that nothing was paid, and is
/// [`ClientError::OutcomeUnknown`].
///
/// A request whose method is not idempotent (RFC 9110 section 9.2.2) is retried only with a key. One
/// that is, such as GET, is retried without one, and what its last try brought is returned as it is.
///
/// The delay before a retry is *full jitter*: anything from nothing to `min(cap, base × 2^n)`. A
/// `Retry-After` is a floor: up to 5 s of it are added to that delay. Added, because clients that
/// all take one floor would come back at one moment. For `outcome_unknown` all of it is waited for, once
/// (this crate's layer says 30 s by default), if the [deadline](Self::deadline) allows: a shorter one
/// returns at once.
///
/// To be placed inside of [`SetIdempotencyKeyLayer`](super::SetIdempotencyKeyLayer), so that all tries
/// have one key; without that layer a key in the header `Idempotency-Key` counts. Clones share their
/// budget. A wait ends when the future of the call is dropped.
///
/// # Panics
///
/// The calls do outside of a tokio runtime with its clock.
#[derive(Clone)]
pub struct RetryPolicy {
    backoff: Backoff,
    retries: u32,
    deadline: Duration,
    budget: Budget,
    should_retry: Option<HeaderName>,
    call: Call,
}

/// The state of one call. tower clones the policy for each.
#[derive(Clone)]
struct Call {
    begun: Instant,
    retries: u32,
    /// Whether a try may have had its effect without an answer that says so.
    unsettled: bool,
    /// Whether `outcome_unknown` was said once.
    waited: bool,
}

impl RetryPolicy {
    /// The defaults: 5 retries below ceilings of 0.5, 1, 2, 4 and 8 s, begun within 2 min.
    pub fn new() -> Self {
        Self {
            backoff: Backoff::default(),
            retries: 5,
            deadline: Duration::from_secs(120),
            budget: Budget::default(),
            should_retry: None,
            call: Call::new(),
        }
    }

    /// The first ceiling, 0.5 s by default. Each further one is twice as high.
    #[must_use]
    pub fn base(mut self, base: Duration) -> Self {
        self.backoff.base = base;
        self
    }

    /// The highest ceiling, 8 s by default.
    #[must_use]
    pub fn cap(mut self, cap: Duration) -> Self {
        self.backoff.cap = cap;
        self
    }

    /// How often to try again after the first try, 5 by default; 0 switches retries off.
    #[must_use]
    pub fn retries(mut self, retries: u32) -> Self {
        self.retries = retries;
        self
    }

    /// How long after its begin a call may begin a further try, 2 min by default.
    /// [`OneTry`](super::OneTry), as [`ClientLayer`](super::ClientLayer) sets it, ends the last try then
    /// too.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// A budget of its own for this policy and its clones: so many tokens for each host, 500 by
    /// default. A retry takes 5; an answer gives back what its retries took, or 1. With none left
    /// there is no retry, so that a service that is down for long gets each request once.
    #[must_use]
    pub fn budget(mut self, tokens: u32) -> Self {
        self.budget = Budget::new(tokens);
        self
    }

    /// What is picked for a ceiling, instead of full jitter: for tests and simulations. More than the
    /// ceiling counts as the ceiling.
    #[must_use]
    pub fn jitter<F>(mut self, pick: F) -> Self
    where
        F: Fn(Duration) -> Duration + Send + Sync + 'static,
    {
        self.backoff.pick = Arc::new(pick);
        self
    }

    /// A header of 4xx and 5xx answers in which the server says `true` or `false`, such as
    /// `Stripe-Should-Retry`. It counts before the status. None by default.
    #[must_use]
    pub fn should_retry_header(mut self, name: HeaderName) -> Self {
        self.should_retry = Some(name);
        self
    }

    /// The longest delay before retry `n`, from 0: `min(cap, base × 2^n)`.
    pub fn ceiling(&self, n: u32) -> Duration {
        self.backoff.ceiling(n)
    }

    /// The sum of all ceilings: 15.5 s by default. What a `Retry-After` adds is not in it, nor what
    /// the tries themselves take.
    pub fn max_total_delay(&self) -> Duration {
        self.backoff.total(self.retries)
    }

    pub(super) fn time_limit(&self) -> Duration {
        self.deadline
    }

    /// The delay before the next try, or why there is none.
    fn next<B>(&mut self, asked: &Asked<'_, B>, reading: &Reading) -> Result<Duration, GaveUp> {
        if !asked.may_be_repeated() {
            return Err(GaveUp::NoKey);
        }
        if self.call.retries >= self.retries {
            return Err(GaveUp::Retries);
        }
        let hint = reading.retry_after.unwrap_or_default();
        let floor = match reading.verdict {
            Verdict::RetryOnce => hint,
            _ => hint.min(LONGEST_FLOOR),
        };
        let delay = floor.saturating_add(self.backoff.delay(self.call.retries));
        let (elapsed, age) = match asked.operation {
            Some(operation) => (operation.begun.elapsed(), operation.age_at_begin),
            None => (self.call.begun.elapsed(), Duration::ZERO),
        };
        let lifetime = asked.operation.map_or(LIFETIME, |known| known.lifetime);
        let then = elapsed.saturating_add(delay);
        if asked.key.is_some() && age.saturating_add(then) >= lifetime {
            return Err(GaveUp::KeyExpired);
        }
        if then >= self.deadline {
            return Err(GaveUp::Deadline);
        }
        if !self.budget.take(asked.host()) {
            return Err(GaveUp::Budget);
        }
        Ok(delay)
    }

    fn unknown<R, B>(
        &self,
        asked: &Asked<'_, B>,
        why: GaveUp,
        reading: &Reading,
        result: &mut Result<Response<R>, ClientError>,
    ) {
        // Whoever asks for an idempotent thing without a key can read the last try as well as we.
        if asked.key.is_none() && asked.may_be_repeated() {
            return;
        }
        let unknown = OutcomeUnknown {
            why,
            key: asked.key.clone(),
            tries: self.call.retries.saturating_add(1),
            status: reading.status,
            problem: reading.problem,
            retry_after: reading.retry_after,
            source: None,
        };
        let last = std::mem::replace(result, Err(unknown.into()));
        if let (Err(ClientError::OutcomeUnknown(unknown)), Err(error)) = (result, last) {
            unknown.source = Some(error);
        }
    }
}

impl<B, R> Policy<Request<B>, Response<R>, ClientError> for RetryPolicy
where
    B: ReplayableBody,
{
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<B>,
        result: &mut Result<Response<R>, ClientError>,
    ) -> Option<Sleep> {
        let asked = Asked::new(request);
        let reading = Reading::of(result, self.should_retry.as_ref());
        let unsettled = self.call.unsettled || asked.operation.is_some_and(Operation::is_resumed);
        let why = match reading.verdict {
            Verdict::NotTried => return None,
            Verdict::Final => {
                self.budget.give_back(asked.host(), self.call.retries);
                return None;
            }
            Verdict::Refusal => {
                self.budget.give_back(asked.host(), self.call.retries);
                if !unsettled {
                    return None;
                }
                GaveUp::Answer
            }
            Verdict::Unknown => GaveUp::Answer,
            Verdict::RetryOnce if self.call.waited => GaveUp::Answer,
            Verdict::RetryOnce | Verdict::Retry(_) => match self.next(&asked, &reading) {
                Ok(delay) => {
                    self.call.retries += 1;
                    self.call.waited |= reading.verdict == Verdict::RetryOnce;
                    self.call.unsettled |= reading.verdict != Verdict::Retry(Trace::Nothing);
                    return Some(sleep(delay));
                }
                Err(why) => why,
            },
        };
        self.unknown(&asked, why, &reading, result);
        None
    }

    fn clone_request(&mut self, request: &Request<B>) -> Option<Request<B>> {
        // tower asks the shared policy before the first try and its own clone before each further.
        if self.call.retries == 0 {
            self.call = Call::new();
        }
        let mut again = Request::new(request.body().replay());
        *again.method_mut() = request.method().clone();
        *again.uri_mut() = request.uri().clone();
        *again.version_mut() = request.version();
        *again.headers_mut() = request.headers().clone();
        *again.extensions_mut() = request.extensions().clone();
        Some(again)
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("backoff", &self.backoff)
            .field("retries", &self.retries)
            .field("deadline", &self.deadline)
            .field("budget", &self.budget)
            .field("should_retry", &self.should_retry)
            .finish_non_exhaustive()
    }
}

impl Call {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            retries: 0,
            unsettled: false,
            waited: false,
        }
    }
}

/// What a decision needs to know of the request.
struct Asked<'r, B> {
    request: &'r Request<B>,
    operation: Option<&'r Operation>,
    key: Option<IdempotencyKey>,
}

impl<'r, B> Asked<'r, B> {
    fn new(request: &'r Request<B>) -> Self {
        let operation = request.extensions().get::<Operation>();
        let key = match operation {
            Some(operation) => Some(operation.key.clone()),
            // A key that the server would refuse protects nothing.
            None => {
                let (headers, syntax) = (request.headers(), KeySyntax::Lenient);
                let key = IdempotencyKey::from_headers(headers, &IDEMPOTENCY_KEY, syntax);
                key.ok().flatten()
            }
        };
        Self {
            request,
            operation,
            key,
        }
    }

    fn may_be_repeated(&self) -> bool {
        self.key.is_some() || is_idempotent(self.request.method())
    }

    fn host(&self) -> &str {
        let authority = self.request.uri().authority();
        authority.map_or_else(
            || {
                let host = self.request.headers().get(HOST);
                let host = host.and_then(|host| std::str::from_utf8(host.as_bytes()).ok());
                host.unwrap_or_default()
            },
            |authority| authority.as_str(),
        )
    }
}

/// RFC 9110 section 9.2.2, and QUERY, which is safe.
fn is_idempotent(method: &Method) -> bool {
    method.is_idempotent() || method.as_str() == "QUERY"
}

/// How much of a `Retry-After` is waited for.
const LONGEST_FLOOR: Duration = Duration::from_secs(5);
