//! One guarded request, from its body to its answer.

use std::any::Any;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, TRAILER};
use http::request::Parts;
use http::{HeaderName, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;
use tower_service::Service;

use super::body::{Frames, RequestBody, ResponseBody, Trailers};
use super::config::{AskedBy, Config, InFlight, OnNoStore, OnOutage};
use super::grpc::{self, Protocol, Told};
use super::header;
use super::original_uri::original_uri;
use super::problem::{Problem, ProblemKind};
use super::service::refusal;
use crate::admission::{Admission, AdmitError, Holder, Replay, Settled};
use crate::attempt::AttemptGuard;
use crate::detach::{Detachable, PanicPayload, catch_panic, catch_panic_now};
use crate::error::StoreErrorKind;
use crate::fingerprint::{CallerPart, Fingerprint, caller_part};
use crate::idempotency::{Closing, Engine, pause_between_looks};
use crate::outcome::Outcome;
use crate::retention::{Disposition, RetentionOverride};
use crate::scope::ScopedKey;
use crate::settings::LONGEST;
use crate::telemetry::{self, Answered, RequestSpan};
use crate::time_limit::{TimedOut, within_if_any};

type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

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

/// Settles the claim of a handler that returned, failed or panicked, before anybody is answered.
async fn conclude<R, E>(
    config: &Config,
    attempt: AttemptGuard,
    method: &Method,
    protocol: Protocol,
    called: Result<Result<Response<R>, E>, PanicPayload>,
) -> Answer<R, E>
where
    R: Body<Data = Bytes> + Send + 'static,
    E: Send + 'static,
{
    match called {
        Ok(Ok(response)) => Ok(settle(config, attempt, method, protocol, response).await),
        Ok(Err(error)) => {
            let disposition = config
                .classify_error
                .as_ref()
                .and_then(|classify| classify(&error as &dyn Any));
            let closing = match disposition {
                Some(Disposition::Release) => Closing::Release,
                // There is no response that could be kept.
                _ => Closing::Abandon,
            };
            let _ = attempt.close(closing).await;
            Err(error)
        }
        Err(panic) => {
            let _ = attempt.abandon().await;
            resume_unwind(panic)
        }
    }
}

/// Decides by the head of a response what becomes of it, records that, and gives it to the client.
async fn settle<R>(
    config: &Config,
    attempt: AttemptGuard,
    method: &Method,
    protocol: Protocol,
    response: Response<R>,
) -> Response<ResponseBody<R>>
where
    R: Body<Data = Bytes> + Send + 'static,
{
    let (mut parts, body) = response.into_parts();
    // Their length is that of a body which is not sent (RFC 9110 section 8.6).
    let has_body = *method != Method::HEAD && parts.status != StatusCode::NOT_MODIFIED;
    let declared = header::declared_length(&parts.headers).filter(|_| has_body);
    let word = parts.extensions.get::<RetentionOverride>();
    let told = protocol.told_by(&parts);
    let mut by_trailers = false;
    let disposition = match word {
        // A protocol switch hands the connection over: there is no message to keep.
        _ if parts.status == StatusCode::SWITCHING_PROTOCOLS => Disposition::Release,
        Some(RetentionOverride::NotExecuted) => Disposition::Release,
        Some(RetentionOverride::LeaveUnknown) => Disposition::LeaveUnknown,
        Some(RetentionOverride::Keep | RetentionOverride::Live) => Disposition::Keep,
        // Another layer of this kind, further in, refused the request: nothing ran.
        None if parts.extensions.get::<ProblemKind>().is_some() => Disposition::Release,
        None => match told {
            Told::ByHttp => config.retention.decide(&parts),
            Told::By(code) => config.retention.decide_grpc(code),
            Told::ByTrailers => {
                by_trailers = true;
                Disposition::Keep
            }
        },
    };
    let retention = match disposition {
        Disposition::Release => {
            let settled = attempt.release().await;
            return answer(config, protocol, settled, parts, ResponseBody::passed(body));
        }
        Disposition::LeaveUnknown => {
            let settled = attempt.abandon().await;
            return answer(config, protocol, settled, parts, ResponseBody::passed(body));
        }
        Disposition::Keep => None,
        Disposition::KeepFor(retention) => Some(retention.min(LONGEST)),
    };
    let complete = |outcome| Closing::Complete { outcome, retention };
    let is_stream = protocol == Protocol::GrpcStreaming && told == Told::ByTrailers;
    if is_stream || is_known_not_to_be_kept(config, &parts, declared, &body, word) {
        let tombstone = complete(Outcome::tombstone(parts.status));
        let settled = attempt.close(tombstone).await;
        return answer(config, protocol, settled, parts, ResponseBody::passed(body));
    }
    let holding = catch_panic(hold(body, config.response_limit));
    let HeldBody { held, end } = match within_if_any(attempt.time_left(), holding).await {
        Ok(Ok(held)) => held,
        Err(TimedOut) => {
            attempt.give_up();
            return undone(config, protocol);
        }
        Ok(Err(panic)) => {
            let _ = attempt.abandon().await;
            resume_unwind(panic)
        }
    };
    let closing = match end {
        End::Whole if by_trailers => {
            let code = grpc::final_status(held.trailers.as_deref());
            let whole = || keep(config, &parts, &held.frames, held.trailers.as_deref());
            match config.retention.decide_grpc(code) {
                Disposition::Keep => complete(whole()),
                Disposition::KeepFor(retention) => Closing::Complete {
                    outcome: whole(),
                    retention: Some(retention.min(LONGEST)),
                },
                Disposition::Release => Closing::Release,
                Disposition::LeaveUnknown => Closing::Abandon,
            }
        }
        End::Whole => complete(keep(config, &parts, &held.frames, held.trailers.as_deref())),
        End::Lied | End::OverLimit(_) => complete(Outcome::tombstone(parts.status)),
        End::Broken(_) => Closing::Abandon,
    };
    let settled = attempt.close(closing).await;
    let (rest, error) = match end {
        End::Whole => (None, None),
        End::OverLimit(rest) => (Some(rest), None),
        End::Broken(error) => (None, Some(error)),
        End::Lied => {
            let problem = not_kept(config, Some(parts.status));
            let (parts, bytes) = config.refuse(problem, protocol).into_parts();
            return answer(
                config,
                protocol,
                settled,
                parts,
                ResponseBody::full(bytes, None),
            );
        }
    };
    if let (None, None) = (&rest, &error) {
        correct_length(&mut parts.headers, declared, held.frames.len());
    }
    let body = ResponseBody::held(held.frames, held.trailers, rest, error);
    answer(config, protocol, settled, parts, body)
}

/// Says that it is done, and with which status.
fn not_kept(config: &Config, status: Option<StatusCode>) -> Problem {
    let mut problem = config.problem(ProblemKind::ResponseNotKept);
    if let Some(status) = status {
        let member = "original_status".to_owned();
        problem.extensions.insert(member, status.as_u16().into());
        if config.asked_by == AskedBy::EventSender {
            problem.status = status;
        }
    }
    problem
}

/// A handler may declare another length than it produced. The whole body is known now, and it is
/// what the record says; hyper would panic or break the connection over the difference.
fn correct_length(headers: &mut HeaderMap, declared: Option<u64>, bytes: usize) {
    if declared.is_some_and(|declared| declared != bytes as u64) {
        headers.remove(CONTENT_LENGTH);
    }
}

/// Whether the head already tells that the body cannot or must not be kept.
fn is_known_not_to_be_kept<R: Body>(
    config: &Config,
    parts: &http::response::Parts,
    declared: Option<u64>,
    body: &R,
    word: Option<&RetentionOverride>,
) -> bool {
    let content_type = parts.headers.get(CONTENT_TYPE);
    matches!(word, Some(RetentionOverride::Live))
        || header::is_media_type(content_type, &config.live_types)
        || body.size_hint().lower() > config.response_limit as u64
        || declared.is_some_and(|declared| declared > config.response_limit as u64)
        || (config.on_no_store == OnNoStore::Tombstone && is_no_store(&parts.headers))
}

/// Whether `Cache-Control` has the directive `no-store` (RFC 9111 section 5.2.2.5).
fn is_no_store(headers: &HeaderMap) -> bool {
    headers.get_all(CACHE_CONTROL).iter().any(|line| {
        line.as_bytes()
            .split(|byte| *byte == b',')
            .any(|directive| directive.trim_ascii().eq_ignore_ascii_case(b"no-store"))
    })
}

struct HeldBody<R: Body> {
    held: Held,
    end: End<R>,
}

enum End<R: Body> {
    Whole,
    OverLimit(Pin<Box<R>>),
    /// Longer than the limit although its size hint promised less. What is left of it is lost: see
    /// `hold`.
    Lied,
    Broken(R::Error),
}

/// Drives a body to its end, whether the client is there or not.
async fn hold<R: Body<Data = Bytes>>(body: R, limit: usize) -> HeldBody<R> {
    let mut held = Held::default();
    let end = if body.is_end_stream() {
        End::Whole
    } else if body
        .size_hint()
        .upper()
        .is_some_and(|upper| upper <= limit as u64)
    {
        // Short by its own word, it never has to move on into the response, and the usual answer is
        // spared a box. One that breaks its word cannot move any more and is not read further: its
        // client gets what a retry would get, and no answer that looks whole and is not.
        match held.read(pin!(body), limit).await {
            Read::Broken(error) => End::Broken(error),
            Read::Whole => End::Whole,
            Read::OverLimit => End::Lied,
        }
    } else {
        // Boxed, because what is left at the limit has to move on into the response.
        let mut body = Box::pin(body);
        match held.read(body.as_mut(), limit).await {
            Read::Broken(error) => End::Broken(error),
            Read::Whole => End::Whole,
            Read::OverLimit => End::OverLimit(body),
        }
    };
    HeldBody { held, end }
}

#[derive(Default)]
struct Held {
    frames: Frames,
    trailers: Trailers,
}

enum Read<E> {
    Whole,
    OverLimit,
    Broken(E),
}

impl Held {
    /// Reads until the body ends, breaks, or is longer than `limit`.
    async fn read<R: Body<Data = Bytes>>(
        &mut self,
        mut body: Pin<&mut R>,
        limit: usize,
    ) -> Read<R::Error> {
        loop {
            match body.frame().await {
                None => return Read::Whole,
                Some(Err(error)) => return Read::Broken(error),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        self.frames.push(data);
                        if self.frames.len() > limit {
                            return Read::OverLimit;
                        }
                    }
                    Err(frame) => self.trailers = frame.into_trailers().ok().map(Box::new),
                },
            }
        }
    }
}

/// The outcome of a response that was held to its end.
fn keep(
    config: &Config,
    parts: &http::response::Parts,
    frames: &Frames,
    trailers: Option<&HeaderMap>,
) -> Outcome {
    let status = parts.status;
    // These statuses have no content (RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5), whatever the
    // handler put there.
    let empty = Frames::default();
    let frames = match status.as_u16() {
        204 | 205 | 304 => &empty,
        _ => frames,
    };
    let headers = &parts.headers;
    let kept = config.never_stored.kept(headers);
    let kept = |name: &HeaderName| kept(name) && *name != config.marker;
    let trailers: Option<HeaderMap> = trailers.map(|all| {
        let lines = all.iter().filter(|(name, _)| kept(name));
        lines
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    });
    let trailers = trailers.as_ref();
    telemetry::response_size(frames.len());
    let Some(redact) = &config.redact else {
        let mut single = frames.iter();
        return match (single.next(), single.next()) {
            (None, _) => Outcome::filtered(status, headers, kept, &[], trailers),
            (Some(one), None) => Outcome::filtered(status, headers, kept, &[one], trailers),
            _ => {
                let pieces: Vec<&[u8]> = frames.iter().collect();
                Outcome::filtered(status, headers, kept, &pieces, trailers)
            }
        };
    };
    let mut redacted = headers.clone();
    let body = redact(status, &mut redacted, frames.join());
    Outcome::filtered(status, &redacted, kept, &[&body], trailers)
}

/// The answer to the first client, once the record stands.
fn answer<R: Body<Data = Bytes>>(
    config: &Config,
    protocol: Protocol,
    settled: Settled,
    parts: http::response::Parts,
    body: ResponseBody<R>,
) -> Response<ResponseBody<R>> {
    let mark = match settled {
        Settled::Recorded => None,
        Settled::Standing(outcome) if outcome.is_tombstone() || outcome.status().is_none() => None,
        // Another result stands for this key: everybody gets that one.
        Settled::Standing(outcome) => return give_again(&outcome, &config.marker),
        Settled::ClaimLost => Some(header::CLAIM_LOST),
        Settled::NotSaved => Some(header::NOT_SAVED),
        Settled::Undone => return undone(config, protocol),
        Settled::Unknown => return unsettled(config, protocol, ProblemKind::OutcomeUnknown),
    };
    let mut response = Response::from_parts(parts, body);
    // A handler that passes another service's answer on may pass its marker on too; but this answer
    // is no replay.
    response.headers_mut().remove(&config.marker);
    if let Some(mark) = mark {
        response.headers_mut().insert(header::RESULT, mark);
    }
    response
}

/// The handler ran in a transaction that came to nothing.
fn undone<R: Body<Data = Bytes>>(config: &Config, protocol: Protocol) -> Response<ResponseBody<R>> {
    unsettled(config, protocol, ProblemKind::StoreUnavailable)
}

fn unsettled<R: Body<Data = Bytes>>(
    config: &Config,
    protocol: Protocol,
    kind: ProblemKind,
) -> Response<ResponseBody<R>> {
    let mut problem = config.problem(kind);
    problem.retry_after = Some(Duration::from_secs(1));
    refusal(config.refuse(problem, protocol))
}

/// A kept response, as it was, with the marker.
fn give_again<R: Body<Data = Bytes>>(
    outcome: &Outcome,
    marker: &HeaderName,
) -> Response<ResponseBody<R>> {
    let headers = outcome.headers();
    let mut replayed = with_capacity(headers.len() + 2);
    // A record may hold more lines than a map takes; what does not fit is not worth a panic.
    for (name, value) in headers {
        let _ = replayed.try_append(name, value);
    }
    let _ = replayed.try_insert(marker.clone(), header::TRUE);
    let trailers: Trailers = (outcome.trailers().len() > 0).then(|| {
        let mut trailers = with_capacity(outcome.trailers().len());
        for (name, value) in outcome.trailers() {
            let _ = trailers.try_append(name, value);
        }
        Box::new(trailers)
    });
    if let Some(announced) = trailers.as_deref().and_then(announce) {
        let _ = replayed.try_insert(TRAILER, announced);
    }
    let mut response = Response::new(ResponseBody::full(outcome.body(), trailers));
    *response.status_mut() = outcome.status().unwrap_or(StatusCode::OK);
    *response.headers_mut() = replayed;
    response
}

/// A map for so many lines. A map has room for names; lines of one name may be more.
fn with_capacity(lines: usize) -> HeaderMap {
    HeaderMap::try_with_capacity(lines).unwrap_or_default()
}

/// The value of `Trailer` (RFC 9110 section 6.6.2); over HTTP/1.1 trailers that are not announced
/// are not sent. gRPC does not announce them.
fn announce(trailers: &HeaderMap) -> Option<HeaderValue> {
    if trailers.contains_key("grpc-status") {
        return None;
    }
    let names: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
    HeaderValue::try_from(names.join(", ")).ok()
}
