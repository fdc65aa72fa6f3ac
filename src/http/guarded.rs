//! One guarded request, from its body to its answer.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderMap;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;
use tower_service::Service;

use super::body::{Frames, RequestBody, ResponseBody, Trailers};
use super::config::{Config, InFlight, OnOutage};
use super::grpc::{self, Protocol};
use super::header;
use super::original_uri::original_uri;
use super::problem::{Problem, ProblemKind};
use super::service::refusal;
use super::settling::{conclude, give_again, not_kept, undone};
use crate::admission::{Admission, AdmitError, Holder, Replay};
use crate::detach::{Detachable, catch_panic, catch_panic_now};
use crate::error::StoreErrorKind;
use crate::fingerprint::{CallerPart, Fingerprint, caller_part};
use crate::idempotency::{Engine, pause_between_looks};
use crate::scope::ScopedKey;
use crate::telemetry::{self, Answered, RequestSpan};
use crate::time_limit::{TimedOut, within_if_any};

pub(super) type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

/// A request whose key is known, on its way to the handler.
pub(super) struct Guarded<T> {
    pub(super) config: Arc<Config>,
    pub(super) engine: Arc<Engine>,
    pub(super) inner: T,
    pub(super) key: ScopedKey,
    pub(super) protocol: Protocol,
}

/// Reads the body, then tries for the key until there is an answer. Dropped before the key is asked
/// for, nothing has happened; dropped later, the attempt goes on without the client.
#[expect(
    clippy::manual_async_fn,
    reason = "an async function holds its arguments twice, and these are large"
)]
pub(super) fn guard<T, B, R>(
    guarded: Guarded<T>,
    parts: Parts,
    body: RequestBody<B>,
) -> impl Future<Output = Answer<R, T::Error>> + Send
where
    T: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    T::Future: Send + 'static,
    T::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    async move {
        let config = &guarded.config;
        let span = RequestSpan::new(guarded.engine.store_name, &guarded.key);
        let (fingerprint, body) = match read_request(config, &guarded.key, &parts, body).await {
            Ok(read) => read,
            Err(kind) => {
                return Ok(guarded.refuse(config.problem(kind), Answered::Rejected, &span));
            }
        };
        let tracker = Arc::clone(&guarded.engine.tracker);
        let trying = Trying {
            guarded,
            parts,
            body,
            fingerprint,
            span: span.clone(),
        };
        match Detachable::new(tracker, span, trying.once()).await {
            Tried::Answered(answer) => answer,
            Tried::InFlight(back, holder) => Box::pin(wait(back, holder)).await,
        }
    }
}

/// Waits for the attempt that holds the key, and tries again when it has changed.
async fn wait<T, B, R>(mut trying: Box<Trying<T, B>>, mut holder: Holder) -> Answer<R, T::Error>
where
    T: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    T::Future: Send + 'static,
    T::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let engine = Arc::clone(&trying.guarded.engine);
    let give_up = match trying.guarded.config.in_flight {
        InFlight::Reject => None,
        InFlight::Wait(max) => Some(Instant::now() + max),
    };
    let mut looks = 0_u32;
    loop {
        let left = give_up.map(|at| at.saturating_duration_since(Instant::now()));
        let Some(left) = left.filter(|left| !left.is_zero()) else {
            return Ok(trying.in_progress(&holder));
        };
        // Not detachable: a client that leaves here leaves nothing behind.
        if looks > 0 {
            pause_between_looks(looks).await;
        }
        looks = looks.saturating_add(1);
        if let Err(error) = engine.wait(&trying.guarded.key, &holder, left).await {
            return Ok(trying.store_failed(&error));
        }
        let span = trying.span.clone();
        let tracker = Arc::clone(&engine.tracker);
        match Detachable::new(tracker, span, trying.once()).await {
            Tried::Answered(answer) => return answer,
            Tried::InFlight(back, still) => (trying, holder) = (back, still),
        }
    }
}

/// Reads the whole body within the limit and takes the fingerprint as it arrives.
async fn read_request<B>(
    config: &Config,
    key: &ScopedKey,
    parts: &Parts,
    body: RequestBody<B>,
) -> Result<(Fingerprint, RequestBody<B>), ProblemKind>
where
    B: Body<Data = Bytes>,
{
    let uri = original_uri(parts);
    let caller = match &config.scope {
        Some(_) => CallerPart::Scoped,
        None => CallerPart::Credentials(caller_part(&parts.headers, key.as_bytes())),
    };
    let mut hasher = config
        .fingerprint
        .start(parts, uri.path(), uri.query(), caller);
    let (frames, trailers) =
        read_within(config, &parts.headers, body, |data| hasher.frame(data)).await?;
    let fingerprint = hasher.finish(|| frames.join());
    Ok((fingerprint, RequestBody::held(frames, trailers)))
}

/// Reads a whole body within the limit, and shows each of its frames as it arrives.
pub(super) async fn read_within<B>(
    config: &Config,
    headers: &HeaderMap,
    body: B,
    mut seen: impl FnMut(&Bytes),
) -> Result<(Frames, Trailers), ProblemKind>
where
    B: Body<Data = Bytes>,
{
    let limit = config.request_limit;
    let declared = header::declared_length(headers).unwrap_or(0);
    let at_least = declared.max(body.size_hint().lower());
    // Before the body is polled, so that a client that waits for 100 Continue need not send it.
    if at_least > limit as u64 {
        return Err(ProblemKind::BodyTooLarge);
    }
    let mut frames = Frames::default();
    let mut trailers = None;
    let mut body = pin!(body);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ProblemKind::BodyUnreadable)?;
        match frame.into_data() {
            Ok(data) => {
                if data.len() > limit - frames.len() {
                    return Err(ProblemKind::BodyTooLarge);
                }
                seen(&data);
                frames.push(data);
            }
            Err(frame) => trailers = frame.into_trailers().ok().map(Box::new),
        }
    }
    Ok((frames, trailers))
}

/// A request that was read, and tries for its key.
struct Trying<T, B> {
    guarded: Guarded<T>,
    parts: Parts,
    body: RequestBody<B>,
    fingerprint: Fingerprint,
    span: RequestSpan,
}

enum Tried<T, B, R: Body, E> {
    Answered(Answer<R, E>),
    /// The key is held and the layer is set to wait; the request comes back for another look.
    InFlight(Box<Trying<T, B>>, Holder),
}

impl<T> Guarded<T> {
    fn refuse<R: Body<Data = Bytes>>(
        &self,
        problem: Problem,
        answer: Answered,
        span: &RequestSpan,
    ) -> Response<ResponseBody<R>> {
        telemetry::answered(answer, self.engine.store_name);
        span.record(answer);
        refusal(self.config.refuse(problem, self.protocol))
    }
}

impl<T, B> Trying<T, B> {
    fn refuse<R: Body<Data = Bytes>>(
        &self,
        problem: Problem,
        answer: Answered,
    ) -> Response<ResponseBody<R>> {
        self.guarded.refuse(problem, answer, &self.span)
    }

    fn in_progress<R: Body<Data = Bytes>>(&self, holder: &Holder) -> Response<ResponseBody<R>> {
        let config = &self.guarded.config;
        let mut problem = config.problem(ProblemKind::InProgress);
        problem.retry_after = Some(config.retry_after.min(holder.lease_left));
        self.refuse(problem, Answered::InFlight)
    }

    fn store_failed<R: Body<Data = Bytes>>(&self, error: &AdmitError) -> Response<ResponseBody<R>> {
        let kind = match error {
            AdmitError::Overloaded => ProblemKind::Overloaded,
            AdmitError::Store(error) if error.kind() == StoreErrorKind::Corrupt => {
                ProblemKind::RecordUnreadable
            }
            AdmitError::Store(_) => ProblemKind::StoreUnavailable,
        };
        let mut problem = self.guarded.config.problem(kind);
        if problem.status == StatusCode::SERVICE_UNAVAILABLE {
            problem.retry_after = Some(Duration::from_secs(1));
        }
        self.refuse(problem, Answered::StoreError)
    }
}

impl<T, B, R> Trying<T, B>
where
    T: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    T::Future: Send + 'static,
    T::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    /// Asks for the key once and does what the answer says, to its end.
    #[expect(clippy::manual_async_fn, reason = "see `guard`")]
    fn once(self) -> impl Future<Output = Tried<T, B, R, T::Error>> + Send {
        async move {
            let Guarded { config, engine, .. } = &self.guarded;
            let kept_for = config.kept_for(engine);
            let admitting = engine.admit_for(kept_for, &self.guarded.key, self.fingerprint);
            let admission = admitting.await;
            let response = match admission {
                Ok(Admission::First(attempt)) => {
                    telemetry::answered(Answered::Executed, engine.store_name);
                    self.span.record(Answered::Executed);
                    let Guarded {
                        config,
                        mut inner,
                        protocol,
                        ..
                    } = self.guarded;
                    let mut parts = self.parts;
                    parts.extensions.insert(attempt.attempt().clone());
                    let method = parts.method.clone();
                    let request = Request::from_parts(parts, self.body);
                    let called = match catch_panic_now(|| inner.call(request)) {
                        Ok(called) => {
                            let limited = within_if_any(attempt.time_left(), catch_panic(called));
                            match limited.await {
                                Ok(called) => called,
                                Err(TimedOut) => {
                                    attempt.give_up();
                                    return Tried::Answered(Ok(undone(&config, protocol)));
                                }
                            }
                        }
                        Err(panic) => Err(panic),
                    };
                    return Tried::Answered(
                        conclude(&config, attempt, &method, protocol, called).await,
                    );
                }
                Ok(Admission::Replay(replay)) => {
                    let authorized = match &config.authorize_replay {
                        // Not asked about what is no response.
                        Some(authorize) if replay.outcome.status().is_some() => {
                            authorize(&self.parts, &replay.outcome).await
                        }
                        _ => Ok(()),
                    };
                    self.replay(replay, authorized)
                }
                Ok(Admission::InFlight(holder))
                    if matches!(config.in_flight, InFlight::Wait(_)) =>
                {
                    return Tried::InFlight(Box::new(self), holder);
                }
                Ok(Admission::InFlight(holder)) => self.in_progress(&holder),
                Ok(Admission::Mismatch { caller_changed }) => {
                    let kind = if caller_changed {
                        ProblemKind::CallerChanged
                    } else {
                        ProblemKind::KeyReused
                    };
                    self.refuse(config.problem(kind), Answered::Mismatch)
                }
                Ok(Admission::OutcomeUnknown) => {
                    let mut problem = config.problem(ProblemKind::OutcomeUnknown);
                    problem.retry_after = Some(engine.settings.sweep_interval());
                    self.refuse(problem, Answered::OutcomeUnknown)
                }
                Err(AdmitError::Store(error))
                    if config.on_outage == OnOutage::PassThrough
                        && error.kind() != StoreErrorKind::Corrupt =>
                {
                    // Boxed, because it is rare and would make the future of every attempt larger.
                    return Tried::Answered(Box::pin(self.run_unprotected()).await);
                }
                Err(error) => self.store_failed(&error),
            };
            Tried::Answered(Ok(response))
        }
    }

    async fn run_unprotected(self) -> Answer<R, T::Error> {
        let Self {
            guarded: Guarded {
                engine, mut inner, ..
            },
            parts,
            body,
            span,
            ..
        } = self;
        let request = Request::from_parts(parts, body);
        telemetry::answered(Answered::Unprotected, engine.store_name);
        span.record(Answered::Unprotected);
        let response = inner.call(request).await?;
        let mut response = response.map(ResponseBody::passed);
        let headers = response.headers_mut();
        headers.insert(header::UNPROTECTED, header::TRUE);
        Ok(response)
    }

    fn replay(
        &self,
        replay: Replay,
        authorized: Result<(), Response<Bytes>>,
    ) -> Response<ResponseBody<R>> {
        let config = &self.guarded.config;
        // The value of a job, or what an encrypting store has sealed and this process does not open:
        // whatever the bytes are, no client was ever answered with them.
        if replay.outcome.status().is_none() {
            let problem = config.problem(ProblemKind::RecordUnreadable);
            return self.refuse(problem, Answered::StoreError);
        }
        if let Err(refused) = authorized {
            telemetry::answered(Answered::Refused, self.guarded.engine.store_name);
            self.span.record(Answered::Refused);
            return refusal(refused);
        }
        if replay.outcome.is_tombstone() {
            let problem = not_kept(config, replay.outcome.status());
            return self.refuse(problem, Answered::NotKept);
        }
        let is_grpc = self.guarded.protocol.is_grpc();
        if is_grpc && let Some(encoding) = grpc::not_accepted(&self.parts.headers, &replay.outcome)
        {
            let problem = grpc::undecodable(config, &encoding);
            return self.refuse(problem, Answered::NotKept);
        }
        telemetry::answered(Answered::Replayed, self.guarded.engine.store_name);
        self.span.record(Answered::Replayed);
        let mut response = give_again(&replay.outcome, &config.marker);
        let is_error = response.status().is_client_error() || response.status().is_server_error();
        if is_error && let Some(date) = header::http_date(replay.completed_at) {
            let _ = response
                .headers_mut()
                .try_insert(header::ORIGINAL_DATE, date);
        }
        response.extensions_mut().insert(replay);
        response
    }
}
