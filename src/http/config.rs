//! What a layer enforces, shared by all its services.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Response, StatusCode};

use super::grpc::{self, Protocol};
use super::header::NeverStored;
use super::key_source::KeySource;
use super::problem::{Problem, ProblemKind};
use super::scope::Scope;
use crate::fingerprint::FingerprintRecipe;
use crate::idempotency::Engine;
use crate::key::{KeyFormat, KeySyntax};
use crate::outcome::Outcome;
use crate::retention::{Disposition, RetentionPolicy};

/// What happens to a guarded request without a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// It passes, unprotected: the layer can be added to a running API. The default.
    #[default]
    PassThrough,
    /// 400 `missing_key`. What payments want.
    Reject,
}

/// What happens to a request whose key is being worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum InFlight {
    /// 409 `in_progress` with Retry-After at once. The default.
    #[default]
    Reject,
    /// It waits this long for the first result and gets it as a replay; after that, 409.
    Wait(Duration),
}

/// What happens to a request while the store does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOutage {
    /// 503 `store_unavailable`; nothing runs. The default.
    #[default]
    Reject,
    /// It runs **unprotected**: a retry may run it again. The response is marked
    /// `Idempotency-Unprotected: true` and counted.
    PassThrough,
}

/// What happens to a response that says `Cache-Control: no-store`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnNoStore {
    /// Kept as any other: the header speaks to caches, and this is none. The default.
    #[default]
    Keep,
    /// Kept as a tombstone, without its body: a retry gets 409 `response_not_kept`. The key is not
    /// freed, because that would repeat the operation.
    Tombstone,
}

/// Who reads what the layer answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskedBy {
    /// A client that reads codes.
    Client,
    /// The sender of events: it reads the status, and every one but 2xx makes it deliver again or,
    /// if it is a 4xx, give up.
    EventSender,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(crate) type Filter = dyn Fn(&Parts) -> bool + Send + Sync;
pub(crate) type Reword = dyn Fn(&mut Problem) + Send + Sync;
pub(crate) type AuthorizeReplay =
    dyn Fn(&Parts, &Outcome) -> BoxFuture<Result<(), Response<Bytes>>> + Send + Sync;
pub(crate) type Redact = dyn Fn(StatusCode, &mut HeaderMap, Bytes) -> Bytes + Send + Sync;
pub(crate) type ClassifyError = dyn Fn(&dyn Any) -> Option<Disposition> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) namespace: String,
    pub(crate) asked_by: AskedBy,
    pub(crate) source: KeySource,
    pub(crate) syntax: KeySyntax,
    pub(crate) format: KeyFormat,
    pub(crate) missing_key: MissingKey,
    pub(crate) methods: Vec<Method>,
    pub(crate) filter: Option<Arc<Filter>>,
    pub(crate) scope: Option<Scope>,
    pub(crate) fingerprint: FingerprintRecipe,
    pub(crate) request_limit: usize,
    pub(crate) response_limit: usize,
    pub(crate) retention: RetentionPolicy,
    /// How long a record is kept, if the engine keeps it for less.
    pub(crate) kept_at_least: Duration,
    pub(crate) live_types: Vec<Box<str>>,
    pub(crate) grpc_streaming: Vec<Box<str>>,
    pub(crate) in_flight: InFlight,
    pub(crate) retry_after: Duration,
    pub(crate) on_outage: OnOutage,
    pub(crate) on_no_store: OnNoStore,
    pub(crate) never_stored: NeverStored,
    pub(crate) marker: HeaderName,
    pub(crate) documentation: Option<String>,
    pub(crate) reword: Option<Arc<Reword>>,
    pub(crate) authorize_replay: Option<Arc<AuthorizeReplay>>,
    pub(crate) redact: Option<Arc<Redact>>,
    pub(crate) classify_error: Option<Arc<ClassifyError>>,
}

impl Config {
    /// A problem with all the settings' words, before it is made a response.
    pub(crate) fn problem(&self, kind: ProblemKind) -> Problem {
        let mut problem = Problem::new(kind, self.documentation.as_deref());
        if !self.source.is_default() {
            problem.rename_key(&self.source.phrase());
        }
        // Some senders take a 4xx for the last word and never deliver the event again.
        if self.asked_by == AskedBy::EventSender && problem.status == StatusCode::CONFLICT {
            problem.status = StatusCode::SERVICE_UNAVAILABLE;
        }
        problem
    }

    /// How long records of this layer are kept, counted from their claim.
    pub(crate) fn kept_for(&self, engine: &Engine) -> Duration {
        engine.settings.retention.max(self.kept_at_least)
    }

    /// The response of a problem, after the user's rewording.
    pub(crate) fn refuse(&self, mut problem: Problem, protocol: Protocol) -> Response<Bytes> {
        if protocol.is_grpc() {
            grpc::reword(&mut problem);
        }
        if let Some(reword) = &self.reword {
            reword(&mut problem);
        }
        if protocol.is_grpc() {
            grpc::refusal(&problem)
        } else {
            problem.into_response()
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("key_source", &self.source)
            .field("syntax", &self.syntax)
            .field("missing_key", &self.missing_key)
            .field("methods", &self.methods)
            .field("retention", &self.retention)
            .field("in_flight", &self.in_flight)
            .field("on_outage", &self.on_outage)
            .finish_non_exhaustive()
    }
}
