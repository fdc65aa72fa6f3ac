//! [`IdempotencyService`]: decides which requests are guarded.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::{Frames, RequestBody, ResponseBody};
use super::body_key::{Unkeyed, guard_unkeyed};
use super::config::{AskedBy, Config, MissingKey};
use super::future::ResponseFuture;
use super::grpc::Protocol;
use super::guarded::{Guarded, guard};
use super::problem::{Problem, ProblemKind};
use crate::idempotency::Idempotency;
use crate::key::{KeyAdvice, KeyError, decode_headers};
use crate::scope::ScopedKey;
use crate::store::Store;
use crate::telemetry::{self, Answered};

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes around another.
///
/// The inner service's error type stays as it is: refusals are responses.
pub struct IdempotencyService<S, T> {
    inner: T,
    idempotency: Idempotency<S>,
    config: Arc<Config>,
}

impl<S, T> IdempotencyService<S, T> {
    pub(super) fn new(inner: T, idempotency: Idempotency<S>, config: Arc<Config>) -> Self {
        Self {
            inner,
            idempotency,
            config,
        }
    }
}

impl<S, T: Clone> Clone for IdempotencyService<S, T> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            idempotency: self.idempotency.clone(),
            config: Arc::clone(&self.config),
        }
    }
}

impl<S, T: fmt::Debug> fmt::Debug for IdempotencyService<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService")
            .field("inner", &self.inner)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl<S, T, B, R> Service<Request<B>> for IdempotencyService<S, T>
where
    S: Store,
    T: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    T::Future: Send + 'static,
    T::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    type Response = Response<ResponseBody<R>>;
    type Error = T::Error;
    type Future = ResponseFuture<T::Future, R, T::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let config = &self.config;
        // Told without taking the request apart, because most requests of an API pass here.
        if !config.methods.contains(request.method()) || config.passes_unkeyed(request.headers()) {
            let request = request.map(RequestBody::passed);
            return ResponseFuture::passed(self.inner.call(request));
        }
        let (parts, body) = request.into_parts();
        if config.filter.as_ref().is_some_and(|filter| !filter(&parts)) {
            let request = Request::from_parts(parts, RequestBody::passed(body));
            return ResponseFuture::passed(self.inner.call(request));
        }
        let protocol = Protocol::of(&parts, &config.grpc_streaming);
        let Some(header) = config.source.as_header() else {
            let inner = self.take_ready();
            let unkeyed = Unkeyed {
                config: Arc::clone(&self.config),
                engine: Arc::clone(&self.idempotency.engine),
                inner,
                protocol,
            };
            return ResponseFuture::guarded(guard_unkeyed(unkeyed, parts, body));
        };
        match self.admit_head(&parts, header) {
            Ok(key) => {
                let inner = self.take_ready();
                let request = Guarded {
                    config: Arc::clone(&self.config),
                    engine: Arc::clone(&self.idempotency.engine),
                    inner,
                    key,
                    protocol,
                };
                ResponseFuture::guarded(guard(request, parts, RequestBody::passed(body)))
            }
            Err(problem) => {
                let response = self.config.refuse(*problem, protocol);
                ResponseFuture::refused(refusal(response))
            }
        }
    }
}

/// A response of the layer's own.
pub(super) fn refusal<R: Body<Data = Bytes>>(
    response: Response<Bytes>,
) -> Response<ResponseBody<R>> {
    response.map(|bytes| ResponseBody::held(Frames::one(bytes), None, None, None))
}

impl<S, T: Clone> IdempotencyService<S, T> {
    /// The ready service is the one to call; its clone has to become ready first.
    fn take_ready(&mut self) -> T {
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }
}

impl<S: Store, T> IdempotencyService<S, T> {
    /// Judges the head of a guarded request, before its body is touched: a client that asked with
    /// `Expect: 100-continue` does not send the body of a refused request (RFC 9110 section 10.1.1).
    fn admit_head(&self, parts: &Parts, header: &HeaderName) -> Result<ScopedKey, Box<Problem>> {
        let config = &*self.config;
        let store = self.idempotency.engine.store_name;
        let key = decode_headers(&parts.headers, header, config.syntax)
            .map_err(|error| config.invalid_key(&error, store))?;
        match key {
            Some(key) => config.admit_key(&key, parts, store),
            None => Err(config.missing_key(store)),
        }
    }
}

impl Config {
    /// Whether a request with these headers passes because it has no key and needs none.
    fn passes_unkeyed(&self, headers: &HeaderMap) -> bool {
        self.missing_key == MissingKey::PassThrough
            && self
                .source
                .as_header()
                .is_some_and(|header| !headers.contains_key(header))
            && !is_early_data(headers)
    }

    /// The lookup key of a request with this key, if it may be used.
    pub(super) fn admit_key(
        &self,
        key: &str,
        parts: &Parts,
        store: &'static str,
    ) -> Result<ScopedKey, Box<Problem>> {
        let advice = self
            .format
            .validate(key)
            .map_err(|error| self.invalid_key(&error, store))?;
        let scope = match &self.scope {
            None => "".into(),
            Some(scope) => scope.of(parts).ok_or_else(|| {
                telemetry::answered(Answered::Rejected, store);
                Box::new(self.problem(ProblemKind::ScopeUnavailable))
            })?,
        };
        let key = ScopedKey::join(&self.namespace, &scope, key);
        if advice == KeyAdvice::PersonalData {
            telemetry::personal_data(&key);
        }
        Ok(key)
    }

    pub(super) fn invalid_key(&self, error: &KeyError, store: &'static str) -> Box<Problem> {
        telemetry::answered(Answered::InvalidKey, store);
        let mut problem = self.problem(ProblemKind::InvalidKey);
        let phrase = self.source.phrase();
        problem.detail = format!("The {phrase} cannot be used: {error}.").into();
        let reason = error.reason().into();
        problem.extensions.insert("reason".to_owned(), reason);
        Box::new(problem)
    }

    /// The refusal of a guarded request without a key, where it may not pass.
    pub(super) fn missing_key(&self, store: &'static str) -> Box<Problem> {
        let (kind, answer) = match (self.missing_key, self.asked_by) {
            (MissingKey::Reject, AskedBy::Client) => {
                (ProblemKind::MissingKey, Answered::MissingKey)
            }
            (MissingKey::Reject, AskedBy::EventSender) => {
                (ProblemKind::EventIdMissing, Answered::MissingKey)
            }
            // Without a key, only early data comes here.
            (MissingKey::PassThrough, _) => (ProblemKind::TooEarly, Answered::Rejected),
        };
        telemetry::answered(answer, store);
        Box::new(self.problem(kind))
    }
}

/// `Early-Data`: the request may be a copy of one that was sent before. With a key that is harmless;
/// without one it is not. Several lines and other values mean what `1` means (RFC 8470 section 5.1).
pub(super) fn is_early_data(headers: &HeaderMap) -> bool {
    headers.contains_key(EARLY_DATA)
}

const EARLY_DATA: HeaderName = HeaderName::from_static("early-data");
