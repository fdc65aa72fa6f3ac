//! What becomes of a handler's answer: kept, released or left unknown, and only then sent.

use std::any::Any;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, TRAILER};
use http::{HeaderName, Method, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;

use super::body::{Frames, ResponseBody, Trailers};
use super::config::{AskedBy, Config, OnNoStore};
use super::grpc::{self, Protocol, Told};
use super::guarded::Answer;
use super::header;
use super::problem::{Problem, ProblemKind};
use super::service::refusal;
use crate::admission::Settled;
use crate::attempt::AttemptGuard;
use crate::detach::{PanicPayload, catch_panic};
use crate::idempotency::Closing;
use crate::outcome::Outcome;
use crate::retention::{Disposition, RetentionOverride};
use crate::settings::LONGEST;
use crate::telemetry;
use crate::time_limit::{TimedOut, within_if_any};

/// Settles the claim of a handler that returned, failed or panicked, before anybody is answered.
pub(super) async fn conclude<R, E>(
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
pub(super) fn not_kept(config: &Config, status: Option<StatusCode>) -> Problem {
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
pub(super) fn undone<R: Body<Data = Bytes>>(
    config: &Config,
    protocol: Protocol,
) -> Response<ResponseBody<R>> {
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
pub(super) fn give_again<R: Body<Data = Bytes>>(
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
