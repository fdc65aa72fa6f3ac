//! A layer between the idempotency layer and the handler, which changes everything it can.
//!
//! The identity of a request is taken before: none of this may make a retry another request.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Request, Uri};
use http_body_util::{Either, Full};

/// Rewrites the URI, the headers and the body of a request that orders it.
pub fn rewrite<B>(request: Request<B>) -> Request<Either<B, Full<Bytes>>> {
    let ordered = request.headers().get("x-puppet-rewrite");
    if ordered.is_none_or(|value| value != "1") {
        return request.map(Either::Left);
    }
    let (mut parts, _) = request.into_parts();
    let path = parts.uri.path();
    let name = path.strip_prefix("/do/").unwrap_or(path);
    // A path stays a path with other segments before and a query after it.
    if let Ok(uri) = Uri::try_from(format!("/rewritten/{name}?by=an-inner-layer")) {
        parts.uri = uri;
    }
    let body = Bytes::from_static(b"rewritten");
    let headers = &mut parts.headers;
    headers.remove("idempotency-key");
    headers.remove("authorization");
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/rewritten"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    Request::from_parts(parts, Either::Right(Full::new(body)))
}
