//! Who is asking. A real service verifies a signature or asks a session store.

use std::fmt;

use axum::Json;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// The customer whose token was presented. Its text form is the scope of the idempotency keys: it
/// must stay the same when the token is renewed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account(&'static str);

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Lets known customers in, and leaves their [`Account`] in the request's extensions.
pub async fn authenticate(mut request: Request, next: Next) -> Response {
    let presented = request.headers().get(AUTHORIZATION);
    let token = presented
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "));
    let Some((_, account)) = TOKENS.iter().find(|(known, _)| Some(*known) == token) else {
        return unauthorized();
    };
    request.extensions_mut().insert(Account(account));
    next.run(request).await
}

fn unauthorized() -> Response {
    let problem = serde_json::json!({
        "title": "Unknown token",
        "status": 401,
        "code": "unauthorized",
        "detail": "Send `Authorization: Bearer alice-token`.",
    });
    let headers = [
        (WWW_AUTHENTICATE, "Bearer"),
        (CONTENT_TYPE, "application/problem+json"),
    ];
    (StatusCode::UNAUTHORIZED, headers, Json(problem)).into_response()
}

const TOKENS: &[(&str, &str)] = &[("alice-token", "alice"), ("bob-token", "bob")];
