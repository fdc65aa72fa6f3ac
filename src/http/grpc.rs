//! gRPC calls through [`IdempotencyLayer`](super::IdempotencyLayer): put it into
//! `tonic::transport::Server::layer`, and send the key as the metadata `idempotency-key`.
//!
//! There is nothing to switch on. A POST whose content type is `application/grpc`, alone or with a suffix
//! such as `+proto`, is a gRPC call, and for it the layer differs from what it does over HTTP in three
//! things:
//!
//! * **Refusals are statuses.** HTTP 200 with `grpc-status`, `grpc-message`, the code in
//!   `idempotency-error`, and in `grpc-status-details-bin` what
//!   [AIP-193](https://google.aip.dev/193) asks for: an `ErrorInfo` with the code in capitals as its
//!   reason and the domain `idempotency-key`, a `Help` with the link to the documentation, and a
//!   `RetryInfo` where a retry helps. [`ProblemKind`] has the table.
//! * **`grpc-status` decides** what is kept, whether it comes at once or in the trailers at the end;
//!   [`RetentionPolicy`](crate::RetentionPolicy) has the table.
//! * **Streams** have to be named:
//!   [`grpc_streaming`](super::IdempotencyLayerBuilder::grpc_streaming).
//!
//! A unary call is kept and replayed with its messages, its metadata and its trailers as they were, and
//! with `idempotency-replayed: true` in the metadata. One that failed at once (*Trailers-Only*) is
//! replayed as that.
//!
//! ```
//! use std::time::Duration;
//! use tonic::transport::Server;
//! use tower_idempotency::{GrpcCode, IdempotencyLayer, MemoryStore, MissingKey, ProblemKind};
//!
//! # fn main() -> Result<(), tower_idempotency::ConfigError> {
//! let idempotency = IdempotencyLayer::builder(MemoryStore::new())
//!     .missing_key(MissingKey::Reject)
//!     .grpc_streaming(["/shop.Orders/Watch"])
//!     // Clients whose retry policy lists UNAVAILABLE alone come back for the first call's answer.
//!     .problems(|problem| {
//!         if problem.kind == ProblemKind::InProgress {
//!             problem.grpc_status = GrpcCode::Unavailable;
//!         }
//!     })
//!     .build()?;
//! let server = Server::builder().layer(idempotency); // .add_service(…)
//! # Ok(()) }
//! ```
//!
//! # In the handler
//!
//! tonic hands the request's extensions on, so [`Attempt`](crate::Attempt) is there:
//! `request.extensions().get::<Attempt>()`. A response takes a
//! [`RetentionOverride`](crate::RetentionOverride) as its extension. A `tonic::Status` has no
//! extensions: **the code is the handler's word.**
//!
//! | what happened | what to return |
//! |---|---|
//! | the operation failed for good | INVALID_ARGUMENT, FAILED_PRECONDITION, NOT_FOUND, … : kept, every retry gets it |
//! | nothing was done, a retry may succeed | UNAVAILABLE, ABORTED, RESOURCE_EXHAUSTED: the key is free |
//! | nobody knows | UNKNOWN or DEADLINE_EXCEEDED: retries get ABORTED `outcome_unknown`, and nothing runs again |
//!
//! Do not hand a gateway's status on with `?`:
//!
//! ```ignore
//! let paid = gateway.charge(payment).await?; // a NOT_FOUND of the gateway is now yours, for a day
//! ```
//!
//! Nor one that frees the key: of a stream that was reset, or ended too early, a client makes INTERNAL, and
//! of a connection that does not answer its pings UNAVAILABLE. The gateway may have paid.
//!
//! Say what it means for *this* operation:
//!
//! ```
//! # use tonic::{Code, Status};
//! fn of_gateway(status: Status) -> Status {
//!     match status.code() {
//!         // Refused for good.
//!         Code::InvalidArgument | Code::FailedPrecondition => {
//!             Status::failed_precondition("the gateway refused the payment")
//!         }
//!         // Refused before it began.
//!         Code::ResourceExhausted => Status::unavailable("try again later"),
//!         // A connection that broke, a time that was over: it may be paid.
//!         _ => Status::unknown("the gateway did not say whether it paid"),
//!     }
//! }
//! ```
//!
//! # Streams
//!
//! The path does not tell whether a method streams. Requests are read to their end before the key is
//! claimed, within [`request_limit`](super::IdempotencyLayerBuilder::request_limit); a longer stream of
//! messages gets RESOURCE_EXHAUSTED and does not run. So a method with a stream of requests and one
//! response needs nothing.
//!
//! A method whose *response* streams is to be listed. Its stream passes as it is produced, and a retry
//! gets ALREADY_EXISTS `response_not_kept` with `grpc-retry-pushback-ms: -1`, whatever status the stream
//! ended with: work that must be done belongs before the response is returned. An error before the
//! stream begins is decided on as that of a unary call. Not listed, a stream is held until it is whole
//! and replayed whole, which suits short ones; one over
//! [`response_limit`](super::IdempotencyLayerBuilder::response_limit) passes as a listed one does.
//!
//! A method in which the client waits for an answer before it sends its next message cannot be guarded,
//! because its request never ends: leave it out with
//! [`guard_if`](super::IdempotencyLayerBuilder::guard_if).
//!
//! # Retries
//!
//! Every refusal says in `grpc-retry-pushback-ms` when to come back; `-1` where a retry is of no use.
//! gRPC libraries heed it (proposal A6), and retry the codes that their service config lists.
//!
//! * *Do* make the key before the first attempt and put it into the request's metadata. *Do not* make it in an
//!   interceptor that every attempt passes: each attempt would be an operation of its own.
//! * *Do* list ABORTED among the codes that a hedging policy takes as not fatal: of the copies that
//!   it sends at once, one runs and the others get it. Or let them wait:
//!   [`InFlight::Wait`](super::InFlight::Wait).
//! * *Do* retry after a deadline with the same key: the handler goes on without its client, and the retry
//!   gets its answer. *Do not* take DEADLINE_EXCEEDED for "not done".
//!
//! `grpc-timeout` and `grpc-previous-rpc-attempts` differ between attempts and are not part of the
//! fingerprint; neither is any metadata that the recipe does not name.
//!
//! # What is the same call
//!
//! Protobuf has no canonical encoding: two encoders may order the entries of a map differently and both be right.
//! By default the frames are compared byte for byte, the compressed flag and the compressed bytes
//! included. That suits a client that sends the same buffer again, as gRPC libraries do when *they* retry. If a
//! client encodes its message anew, in another release or with another compression, give a recipe that reads
//! the message ([`messages`] takes the frames apart):
//!
//! ```
//! use std::io::Read;
//! use tower_idempotency::FingerprintRecipe;
//! use tower_idempotency::http::grpc;
//!
//! /// The one message of the call, decompressed within the limit of a message.
//! fn message(head: &http::request::Parts, body: &[u8]) -> Option<Vec<u8>> {
//!     let [message] = grpc::messages(body)?.try_into().ok()?;
//!     if !message.compressed {
//!         return Some(message.bytes.to_vec());
//!     }
//!     let mut bytes = Vec::new();
//!     match head.headers.get("grpc-encoding")?.as_bytes() {
//!         b"gzip" => flate2::read::GzDecoder::new(message.bytes)
//!             .take(4 << 20)
//!             .read_to_end(&mut bytes)
//!             .ok()?,
//!         _ => return None,
//!     };
//!     (bytes.len() < 4 << 20).then_some(bytes)
//! }
//!
//! let recipe = FingerprintRecipe::closure("message-1", |head, body| match message(head, body) {
//!     // Decode it here, and return its fields, to be free of the encoding too.
//!     Some(message) => [b"message".to_vec(), message].concat(),
//!     None => [b"frames:".to_vec(), body.to_vec()].concat(),
//! });
//! # let _ = recipe;
//! ```
//!
//! # Compressed answers
//!
//! An answer is kept as it was sent. A retry that does not list its `grpc-encoding` in
//! `grpc-accept-encoding` could not read it and gets ALREADY_EXISTS `response_not_kept` that names the
//! encoding. Compress all calls of a client or none.
//!
//! # Other layers
//!
//! * gRPC-Web has another framing (`application/grpc-web`): put `tonic_web::GrpcWebLayer` *outside* of
//!   this layer, so that calls are gRPC when they come here.
//! * An inner layer that answers with an HTTP status and no `grpc-status` is decided on by that status.
//! * [`authorize_replay`](super::IdempotencyLayerBuilder::authorize_replay) refuses with
//!   `tonic::Status::permission_denied("…").into_http()`.
//! * [`redact`](super::IdempotencyLayerBuilder::redact) gets the frames.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};

use super::config::Config;
use super::header;
use super::original_uri::original_uri;
use super::problem::{Problem, ProblemKind};
use crate::grpc_code::GrpcCode;
use crate::outcome::Outcome;

/// One message of a call's body, as it was framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message<'b> {
    /// Whether the bytes are compressed, by what `grpc-encoding` names.
    pub compressed: bool,
    /// The message.
    pub bytes: &'b [u8],
}

/// The messages of a call's body, in order; `None` if it is not made of whole messages.
///
/// For fingerprints of what a message says, see the [module](self).
///
/// ```
/// use tower_idempotency::http::grpc::messages;
///
/// let messages = messages(b"\0\0\0\0\x02hi\0\0\0\0\0").expect("two messages");
/// assert_eq!(messages[0].bytes, b"hi");
/// assert!(messages[1].bytes.is_empty() && !messages[1].compressed);
/// ```
pub fn messages(mut body: &[u8]) -> Option<Vec<Message<'_>>> {
    let mut messages = Vec::new();
    while let Some((flag, rest)) = body.split_first() {
        let compressed = match flag {
            0 => false,
            1 => true,
            _ => return None,
        };
        let (length, rest) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (bytes, rest) = rest.split_at_checked(length)?;
        messages.push(Message { compressed, bytes });
        body = rest;
    }
    Some(messages)
}

/// What a request is, and so how it is refused and how its answer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    GrpcUnary,
    GrpcStreaming,
}

/// By what an answer tells how the call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    ByHttp,
    /// By its head: nothing follows.
    By(GrpcCode),
    ByTrailers,
}

impl Protocol {
    pub(super) fn of(parts: &Parts, streaming: &[Box<str>]) -> Self {
        if parts.method != Method::POST || !is_grpc(&parts.headers) {
            return Self::Http;
        }
        // The path that the client named, as everywhere.
        let is_listed = |path: &str| streaming.iter().any(|listed| **listed == *path);
        if !streaming.is_empty() && is_listed(original_uri(parts).path()) {
            Self::GrpcStreaming
        } else {
            Self::GrpcUnary
        }
    }

    pub(crate) fn is_grpc(self) -> bool {
        self != Self::Http
    }

    /// Of a gRPC call the HTTP status says nothing, unless the answer is none of gRPC.
    pub(super) fn told_by(self, parts: &http::response::Parts) -> Told {
        if !self.is_grpc() {
            return Told::ByHttp;
        }
        match status(&parts.headers) {
            Some(code) => Told::By(code),
            None if parts.status == StatusCode::OK && is_grpc(&parts.headers) => Told::ByTrailers,
            None => Told::ByHttp,
        }
    }
}

/// Whether the content type is gRPC's; `application/grpc-web` has another framing and is not.
fn is_grpc(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let parted = value.and_then(|value| value.split_at_checked(GRPC.len()));
    parted.is_some_and(|(kind, rest)| {
        kind.eq_ignore_ascii_case(GRPC.as_bytes())
            && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

/// How a call ended, by the last block of fields: absent or unreadable is UNKNOWN.
pub(super) fn final_status(trailers: Option<&HeaderMap>) -> GrpcCode {
    trailers.and_then(status).unwrap_or(GrpcCode::Unknown)
}

fn status(fields: &HeaderMap) -> Option<GrpcCode> {
    let value = fields.get(STATUS)?.as_bytes();
    let number = std::str::from_utf8(value)
        .ok()
        .and_then(|value| value.parse().ok());
    let code = number.and_then(GrpcCode::from_number);
    Some(code.unwrap_or(GrpcCode::Unknown))
}

/// Whether a path names a method: `/package.Service/Method`.
pub(super) fn is_path(path: &str) -> bool {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/'))
    else {
        return false;
    };
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
    is_name(service) && is_name(method) && !method.contains(['/', '?'])
}

/// The encoding of a kept answer, if the call does not accept it.
pub(super) fn not_accepted(request: &HeaderMap, outcome: &Outcome) -> Option<HeaderValue> {
    let (_, encoding) = outcome.headers().find(|(name, _)| *name == ENCODING)?;
    let accepted = request.get_all(ACCEPT_ENCODING).iter().any(|line| {
        let mut listed = line.as_bytes().split(|byte| *byte == b',');
        listed.any(|listed| listed.trim_ascii() == encoding.as_bytes())
    });
    (encoding.as_bytes() != IDENTITY && !accepted).then_some(encoding)
}

/// The problem of an answer that the call could not read.
pub(super) fn undecodable(config: &Config, encoding: &HeaderValue) -> Problem {
    let mut problem = config.problem(ProblemKind::ResponseNotKept);
    let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
    problem.detail = format!(
        "The first request with this key has ended. Its response was kept in the encoding \
         {encoding}, which this call does not accept. Accept it, or ask for the state of the \
         operation."
    )
    .into();
    problem
        .extensions
        .insert("grpc_encoding".to_owned(), encoding.into());
    problem
}

/// Lets the texts of a problem speak of what gRPC has.
pub(super) fn reword(problem: &mut Problem) {
    problem.extensions.remove("original_status");
    for (http, grpc) in [
        ("Retry-After", "grpc-retry-pushback-ms"),
        (" with the status in `original_status`", ""),
    ] {
        if problem.detail.contains(http) {
            problem.detail = problem.detail.replace(http, grpc).into();
        }
    }
}

/// The answer that refuses a call: one block of fields and no message (*Trailers-Only*).
pub(super) fn refusal(problem: &Problem) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    response.extensions_mut().insert(problem.kind);
    let message = format!("{}. {}", problem.title, problem.detail);
    let details = base64(&details(problem, &message));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
    headers.insert(STATUS, problem.grpc_status.number().into());
    headers.insert(header::ERROR, HeaderValue::from_static(problem.kind.code()));
    let pushback = pushback(problem).map(HeaderValue::from);
    for (name, value) in [
        (
            MESSAGE,
            HeaderValue::try_from(percent_encoded(&message)).ok(),
        ),
        (DETAILS, HeaderValue::try_from(details).ok()),
        (PUSHBACK, pushback),
    ] {
        if let Some(value) = value {
            headers.insert(name, value);
        }
    }
    response
}

/// When to come back, in milliseconds; negative for never (proposal A6). Where nothing is said the
/// client's own policy holds.
fn pushback(problem: &Problem) -> Option<i32> {
    match (problem.retry_after, problem.grpc_status) {
        // Clients read 32 bits, and take what they cannot read for "never".
        (Some(after), _) => {
            let millis = after.as_micros().div_ceil(1000).max(1);
            Some(i32::try_from(millis).unwrap_or(i32::MAX))
        }
        (None, GrpcCode::Aborted | GrpcCode::Unavailable) => None,
        (None, _) => Some(-1),
    }
}

/// A `grpc-message`: all but %x20-24 and %x26-7E is percent-encoded (PROTOCOL-HTTP2.md, "Responses").
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'$' | b'&'..=b'~' => encoded.push(char::from(byte)),
            _ => {
                encoded.push('%');
                for digit in [byte >> 4, byte & 0xf] {
                    encoded.push(char::from(b"0123456789ABCDEF"[usize::from(digit)]));
                }
            }
        }
    }
    encoded
}

/// A `google.rpc.Status` that holds what AIP-193 asks for.
fn details(problem: &Problem, message: &str) -> Vec<u8> {
    let any = |kind: &str, value: Protobuf| {
        let kind = format!("type.googleapis.com/google.rpc.{kind}");
        Protobuf::default().text(1, &kind).message(2, &value)
    };
    let mut info = Protobuf::default()
        .text(1, &problem.kind.code().to_ascii_uppercase())
        .text(2, "idempotency-key");
    for (name, value) in &problem.extensions {
        if name != "code" {
            let value = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            info = info.message(3, &Protobuf::default().text(1, name).text(2, &value));
        }
    }
    let mut status = Protobuf::default()
        .number(1, u64::from(problem.grpc_status as u8))
        .text(2, message)
        .message(3, &any("ErrorInfo", info));
    if let Some(after) = problem.retry_after {
        let duration = Protobuf::default()
            .number(1, after.as_secs())
            .number(2, after.subsec_nanos().into());
        let retry = Protobuf::default().message(1, &duration);
        status = status.message(3, &any("RetryInfo", retry));
    }
    if let Some(url) = &problem.documentation {
        let link = Protobuf::default().text(1, &problem.title).text(2, url);
        let help = Protobuf::default().message(1, &link);
        status = status.message(3, &any("Help", help));
    }
    status.0
}

/// As much of protobuf as the details take: fields below 16 that are numbers or have a length.
#[derive(Default)]
struct Protobuf(Vec<u8>);

impl Protobuf {
    fn number(mut self, field: u8, value: u64) -> Self {
        // Zero is what an absent number is.
        if value != 0 {
            self.0.push(field << 3);
            self.varint(value);
        }
        self
    }

    fn text(self, field: u8, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    fn message(self, field: u8, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    fn bytes(mut self, field: u8, bytes: &[u8]) -> Self {
        self.0.push(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push((value & 0x7f) as u8);
    }
}

/// Base64 without padding, as gRPC sends binary metadata.
fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let group = at(0) << 16 | at(1) << 8 | at(2);
        for sixth in 0..=chunk.len() {
            let index = group >> (18 - 6 * sixth) & 0x3f;
            text.push(char::from(BASE64[index as usize]));
        }
    }
    text
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const GRPC: &str = "application/grpc";
const IDENTITY: &[u8] = b"identity";
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
