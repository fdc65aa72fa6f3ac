//! [`IdempotencyService`]: decides which requests are guarded.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::{Frames, RequestBody, ResponseBody};
use super::config::{Config, MissingKey};
use super::future::ResponseFuture;
use super::grpc::Protocol;
use super::guarded::{Guarded, guard};
use super::header;
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
        match self.admit_head(&parts) {
            Ok(key) => {
                // The ready service is the one to call; its clone has to become ready first.
                let clone = self.inner.clone();
                let inner = std::mem::replace(&mut self.inner, clone);
                let request = Guarded {
                    config: Arc::clone(&self.config),
                    engine: Arc::clone(&self.idempotency.engine),
                    inner,
                    key,
                    protocol,
                };
                ResponseFuture::guarded(guard(request, parts, body))
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

impl<S: Store, T> IdempotencyService<S, T> {
    /// Judges the head of a guarded request, before its body is touched: a client that asked with
    /// `Expect: 100-continue` does not send the body of a refused request (RFC 9110 section 10.1.1).
    fn admit_head(&self, parts: &http::request::Parts) -> Result<ScopedKey, Box<Problem>> {
        let config = &*self.config;
        let store = self.idempotency.engine.store_name;
        let refuse = |kind, answer| {
            telemetry::answered(answer, store);
            Box::new(config.problem(kind))
        };
        let invalid = |error: &KeyError| {
            let mut problem = refuse(ProblemKind::InvalidKey, Answered::InvalidKey);
            let name = header::display_name(config.header.as_str());
            problem.detail = format!("The {name} header cannot be used: {error}.").into();
            let reason = error.reason().into();
            problem.extensions.insert("reason".to_owned(), reason);
            problem
        };
        let key = decode_headers(&parts.headers, &config.header, config.syntax)
            .map_err(|error| invalid(&error))?;
        let Some(key) = key else {
            return Err(if config.missing_key == MissingKey::Reject {
                refuse(ProblemKind::MissingKey, Answered::MissingKey)
            } else {
                // Without a key, only early data comes here.
                refuse(ProblemKind::TooEarly, Answered::Rejected)
            });
        };
        let advice = config
            .format
            .validate(&key)
            .map_err(|error| invalid(&error))?;
        let scope = match &config.scope {
            None => "".into(),
            Some(scope) => scope
                .of(parts)
                .ok_or_else(|| refuse(ProblemKind::ScopeUnavailable, Answered::Rejected))?,
        };
        let key = ScopedKey::join(&config.namespace, &scope, &key);
        if advice == KeyAdvice::PersonalData {
            telemetry::personal_data(&key);
        }
        Ok(key)
    }
}

impl Config {
    /// Whether a request with these headers passes because it has no key and needs none.
    fn passes_unkeyed(&self, headers: &HeaderMap) -> bool {
        self.missing_key == MissingKey::PassThrough
            && !headers.contains_key(&self.header)
            && !is_early_data(headers)
    }
}

/// `Early-Data`: the request may be a copy of one that was sent before. With a key that is harmless;
/// without one it is not. Several lines and other values mean what `1` means (RFC 8470 section 5.1).
fn is_early_data(headers: &HeaderMap) -> bool {
    headers.contains_key(EARLY_DATA)
}

const EARLY_DATA: HeaderName = HeaderName::from_static("early-data");
