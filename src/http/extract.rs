//! Extractors for axum 0.8.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::attempt::Attempt;
use crate::key::IdempotencyKey;
use crate::outcome::Outcome;
use crate::transaction::Transaction;

/// No [`IdempotencyLayer`](crate::IdempotencyLayer) guards this request: it is missing on the route,
/// or the request has no key and the layer lets it pass. Extract an `Option` where that is allowed.
type Rejection = (StatusCode, &'static str);

const NOT_GUARDED: Rejection = (
    StatusCode::INTERNAL_SERVER_ERROR,
    "this operation cannot be processed safely",
);

impl<S: Sync> FromRequestParts<S> for Attempt {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or(NOT_GUARDED)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Attempt {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

impl<S: Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        let attempt = parts.extensions.get::<Attempt>().ok_or(NOT_GUARDED)?;
        Ok(attempt.idempotency_key())
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        let attempt = parts.extensions.get::<Attempt>();
        Ok(attempt.map(Attempt::idempotency_key))
    }
}

impl<S: Sync, C: Send + 'static> FromRequestParts<S> for Transaction<C> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        let attempt = parts.extensions.get::<Attempt>().ok_or(NOT_GUARDED)?;
        attempt.transaction().map_err(|_| NOT_GUARDED)
    }
}

impl IntoResponse for Outcome {
    /// What a handler answers with that has recorded this outcome in its own transaction. The value
    /// of a job is no response: 500.
    fn into_response(self) -> Response {
        match self.to_response() {
            Some(response) => response.map(Body::from),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}
