//! Refusals as problem documents (RFC 9457).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, LINK, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::{Map, Value};

use super::header;
use crate::grpc_code::GrpcCode;

/// Why the layer refused a request. It stands in the response's extensions too, so that outer
/// layers can tell the layer's own 409 from the handler's.
///
/// | kind | status | gRPC | code | what the client may do |
/// |---|---|---|---|---|
/// | `MissingKey` | 400 | INVALID_ARGUMENT | `missing_key` | send a key |
/// | `EventIdMissing` | 400 | INVALID_ARGUMENT | `event_id_missing` | nothing: an event without an id is not delivered |
/// | `InvalidKey` | 400 | INVALID_ARGUMENT | `invalid_key` | mend the key |
/// | `BodyUnreadable` | 400 | UNAVAILABLE | `body_unreadable` | send the request again |
/// | `InProgress` | 409 | ABORTED | `in_progress` | the same request again, after Retry-After |
/// | `OutcomeUnknown` | 409 | ABORTED | `outcome_unknown` | ask for the operation's state; never a new key |
/// | `ResponseNotKept` | 409 | ALREADY_EXISTS | `response_not_kept` | nothing: it is done; ask for its state |
/// | `BodyTooLarge` | 413 | RESOURCE_EXHAUSTED | `body_too_large` | send less |
/// | `KeyReused` | 422 | FAILED_PRECONDITION | `key_reused` | a new key for a new operation |
/// | `CallerChanged` | 422 | FAILED_PRECONDITION | `caller_changed` | the first credentials again; never a new key |
/// | `TooEarly` | 425 | UNAVAILABLE | `too_early` | again after the TLS handshake |
/// | `ScopeUnavailable` | 500 | INTERNAL | `scope_unavailable` | nothing |
/// | `RecordUnreadable` | 500 | DATA_LOSS | `record_unreadable` | nothing: an operator must look |
/// | `StoreUnavailable` | 503 | UNAVAILABLE | `store_unavailable` | the same request again |
/// | `Overloaded` | 503 | UNAVAILABLE | `overloaded` | the same request again |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProblemKind {
    /// The route requires a key and there is none (draft section 2.7).
    MissingKey,
    /// A webhook's event carries no id, or none that can be read for certain.
    EventIdMissing,
    /// The key does not follow the syntax, the length or the format (draft section 2.1).
    InvalidKey,
    /// The request's body broke off.
    BodyUnreadable,
    /// The first request is being processed (draft section 2.7).
    InProgress,
    /// The first request was begun and nobody knows how it ended.
    OutcomeUnknown,
    /// The operation ended and its response could not be kept.
    ResponseNotKept,
    /// The body exceeds the limit up to which bodies are fingerprinted.
    BodyTooLarge,
    /// The key was used for another request (draft section 2.7).
    KeyReused,
    /// The key was used for the same request with other credentials.
    CallerChanged,
    /// A request without a key came in TLS early data, where it may be a copy (RFC 8470).
    TooEarly,
    /// The request carries no identity to tell callers apart by.
    ScopeUnavailable,
    /// The stored record cannot be decoded.
    RecordUnreadable,
    /// The store did not answer. The handler did not run.
    StoreUnavailable,
    /// Too many attempts go on without their clients. The handler did not run.
    Overloaded,
}

impl ProblemKind {
    /// All kinds, for documentation.
    pub const ALL: &'static [Self] = &[
        Self::MissingKey,
        Self::EventIdMissing,
        Self::InvalidKey,
        Self::BodyUnreadable,
        Self::InProgress,
        Self::OutcomeUnknown,
        Self::ResponseNotKept,
        Self::BodyTooLarge,
        Self::KeyReused,
        Self::CallerChanged,
        Self::TooEarly,
        Self::ScopeUnavailable,
        Self::RecordUnreadable,
        Self::StoreUnavailable,
        Self::Overloaded,
    ];

    /// The machine-readable name: the member `code`, the fragment of `type`, and the header
    /// `Idempotency-Error`.
    pub const fn code(self) -> &'static str {
        self.facts().0
    }

    /// The kind with this [`code`](Self::code), for clients that read the header
    /// `Idempotency-Error`; `None` for a code that this release does not know.
    pub fn from_code(code: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|kind| kind.code() == code)
    }

    /// The default status.
    pub const fn status(self) -> StatusCode {
        self.facts().1
    }

    /// The default status where the request is a gRPC call.
    pub const fn grpc_status(self) -> GrpcCode {
        match self {
            Self::MissingKey | Self::EventIdMissing | Self::InvalidKey => GrpcCode::InvalidArgument,
            Self::InProgress | Self::OutcomeUnknown => GrpcCode::Aborted,
            Self::ResponseNotKept => GrpcCode::AlreadyExists,
            Self::BodyTooLarge => GrpcCode::ResourceExhausted,
            Self::KeyReused | Self::CallerChanged => GrpcCode::FailedPrecondition,
            Self::ScopeUnavailable => GrpcCode::Internal,
            Self::RecordUnreadable => GrpcCode::DataLoss,
            // Nothing was done, and the same call may succeed: the one code that clients retry by
            // themselves (AIP-194).
            Self::BodyUnreadable | Self::TooEarly | Self::StoreUnavailable | Self::Overloaded => {
                GrpcCode::Unavailable
            }
        }
    }

    const fn facts(self) -> (&'static str, StatusCode, &'static str, &'static str) {
        match self {
            Self::MissingKey => (
                "missing_key",
                StatusCode::BAD_REQUEST,
                "Idempotency-Key is missing",
                "This operation requires an Idempotency-Key header: send a unique key, and the \
                 same one on every retry.",
            ),
            Self::EventIdMissing => (
                "event_id_missing",
                StatusCode::BAD_REQUEST,
                "The event has no id",
                "The event carries no id by which a repeated delivery could be told. Nothing was \
                 done.",
            ),
            Self::InvalidKey => (
                "invalid_key",
                StatusCode::BAD_REQUEST,
                "Idempotency-Key is malformed",
                "The Idempotency-Key header cannot be used.",
            ),
            Self::BodyUnreadable => (
                "body_unreadable",
                StatusCode::BAD_REQUEST,
                "The request body broke off",
                "The request body could not be read to its end. Nothing was done: send the request \
                 again with the same key.",
            ),
            Self::InProgress => (
                "in_progress",
                StatusCode::CONFLICT,
                "A request with this Idempotency-Key is being processed",
                "The first request with this key has not ended. Send the same request again after \
                 the time that Retry-After names.",
            ),
            Self::OutcomeUnknown => (
                "outcome_unknown",
                StatusCode::CONFLICT,
                "The outcome of the first request is unknown",
                "The first request with this key was begun and broke off. Ask for the state of the \
                 operation, or send the same request again later. Do not use another key.",
            ),
            Self::ResponseNotKept => (
                "response_not_kept",
                StatusCode::CONFLICT,
                "The operation is done and its response was not kept",
                "The first request with this key has ended with the status in `original_status`. \
                 Its response cannot be given again. Ask for the state of the operation.",
            ),
            Self::BodyTooLarge => (
                "body_too_large",
                StatusCode::PAYLOAD_TOO_LARGE,
                "The request body is too large",
                "The request body exceeds the limit of this operation. Nothing was done.",
            ),
            Self::KeyReused => (
                "key_reused",
                StatusCode::UNPROCESSABLE_ENTITY,
                "Idempotency-Key was used for another request",
                "This key belongs to a request with other content. Use a new key for a new \
                 operation; to retry, send the first request unchanged.",
            ),
            Self::CallerChanged => (
                "caller_changed",
                StatusCode::UNPROCESSABLE_ENTITY,
                "Idempotency-Key was used with other credentials",
                "This key belongs to the same request, sent with other credentials. Retry with the \
                 first credentials. Do not use another key: it would repeat the operation.",
            ),
            Self::TooEarly => (
                "too_early",
                StatusCode::TOO_EARLY,
                "The request came too early",
                "A request that changes something and has no Idempotency-Key is not taken from TLS \
                 early data. Send it again after the handshake.",
            ),
            Self::ScopeUnavailable => (
                "scope_unavailable",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The caller could not be told",
                "The service could not tell whose Idempotency-Key this is. Nothing was done.",
            ),
            Self::RecordUnreadable => (
                "record_unreadable",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The record of this Idempotency-Key cannot be read",
                "Nothing was done now. The outcome of an earlier request with this key cannot be \
                 told.",
            ),
            Self::StoreUnavailable => (
                "store_unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                "The service cannot process the request safely now",
                "Nothing was done. Send the same request again with the same key.",
            ),
            Self::Overloaded => (
                "overloaded",
                StatusCode::SERVICE_UNAVAILABLE,
                "The service has too many requests to finish",
                "Nothing was done. Send the same request again with the same key.",
            ),
        }
    }
}

/// A refusal before it is sent: everything in it can be changed by
/// [`IdempotencyLayerBuilder::problems`](super::IdempotencyLayerBuilder::problems).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Problem {
    /// Why the request was refused.
    pub kind: ProblemKind,
    /// The status, in the status line and in the member `status`.
    pub status: StatusCode,
    /// The status where the request is a gRPC call.
    pub grpc_status: GrpcCode,
    /// The member `type`: the documentation's URL with the code as its fragment.
    pub type_uri: String,
    /// The member `title`: the same for every occurrence.
    pub title: Cow<'static, str>,
    /// The member `detail`: what to do about this occurrence.
    pub detail: Cow<'static, str>,
    /// Sent as Retry-After in whole seconds, rounded up, 1 at least; over gRPC as
    /// `grpc-retry-pushback-ms`.
    pub retry_after: Option<Duration>,
    /// The target of the `Link` header with the relation `describedby`.
    pub documentation: Option<String>,
    /// Further members. `code` is there always; `reason` and `original_status` where they apply.
    pub extensions: Map<String, Value>,
}

impl Problem {
    pub(crate) fn new(kind: ProblemKind, documentation: Option<&str>) -> Self {
        let (code, status, title, detail) = kind.facts();
        let mut extensions = Map::new();
        extensions.insert("code".to_owned(), code.into());
        Self {
            kind,
            status,
            grpc_status: kind.grpc_status(),
            type_uri: documentation.map_or_else(
                || "about:blank".to_owned(),
                |documentation| format!("{documentation}#{code}"),
            ),
            title: title.into(),
            detail: detail.into(),
            retry_after: None,
            documentation: documentation.map(str::to_owned),
            extensions,
        }
    }

    /// Lets the texts speak of where the layer finds the key: "X-Request-Key header", or "key in
    /// `/id`".
    pub(crate) fn rename_key(&mut self, phrase: &str) {
        let header = phrase.strip_suffix(" header");
        for text in [&mut self.title, &mut self.detail] {
            let mut renamed = match header {
                Some(header) => text.replace("Idempotency-Key", header),
                None => text
                    .replace("an Idempotency-Key header", &format!("a {phrase}"))
                    .replace("Idempotency-Key header", phrase)
                    .replace("Idempotency-Key", phrase),
            };
            if let Some(first) = renamed.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            *text = renamed.into();
        }
    }

    pub(crate) fn into_response(self) -> Response<Bytes> {
        let mut document = Map::new();
        document.insert("type".to_owned(), self.type_uri.into());
        document.insert("title".to_owned(), self.title.into());
        document.insert("status".to_owned(), self.status.as_u16().into());
        document.insert("detail".to_owned(), self.detail.into());
        document.extend(self.extensions);
        // These statuses have no content (RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5).
        let has_content = !matches!(self.status.as_u16(), 204 | 205 | 304);
        let content = has_content.then(|| Value::Object(document).to_string());
        let mut response = Response::new(Bytes::from(content.unwrap_or_default()));
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self.kind);
        let headers = response.headers_mut();
        if has_content {
            headers.insert(
                CONTENT_TYPE,
                HeaderValue::from_static("application/problem+json"),
            );
        }
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::ERROR, HeaderValue::from_static(self.kind.code()));
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        let link = self.documentation.and_then(|documentation| {
            let link = format!("<{documentation}>; rel=\"describedby\"; type=\"text/html\"");
            HeaderValue::try_from(link).ok()
        });
        if let Some(link) = link {
            headers.insert(LINK, link);
        }
        response
    }
}

/// Whole seconds, rounded up, 1 at least (RFC 9110 section 10.2.3).
pub(crate) fn whole_seconds(duration: Duration) -> u64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    duration.as_secs().saturating_add(up).max(1)
}
