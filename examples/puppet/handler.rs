//! The handler: does what it is ordered to, and counts.

use std::convert::Infallible;
use std::iter;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::header::{CONTENT_TYPE, TRAILER};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};

use crate::counts::Counts;
use crate::orders::{Content, Orders, Panic};

pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Handles a request for `/do/{name}`.
pub async fn handle<B>(counts: &Counts, request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    // Behind the second slash, because the rewriting layer changes what stands before it.
    let name = request.uri().path().splitn(3, '/').nth(2);
    let name = name.unwrap_or_default().to_owned();
    let run = counts.start(&name);
    let (parts, body) = request.into_parts();
    let orders = match Orders::read(&parts.headers) {
        Ok(orders) => orders,
        Err(problem) => {
            counts.finish(&name);
            return refuse(problem);
        }
    };
    let Some(read) = read(body).await else {
        counts.finish(&name);
        return refuse("the body of the request broke off".to_owned());
    };
    if orders.panic == Some(Panic::Before) {
        panic!("/do/{name} panics before its end, as ordered");
    }
    if !orders.delay.is_zero() {
        tokio::time::sleep(orders.delay).await;
    }
    counts.finish(&name);
    if orders.panic == Some(Panic::After) {
        panic!("/do/{name} panics after its end, as ordered");
    }
    let rewritten = orders.rewrite;
    let mut response = answer(orders, run, &name);
    if rewritten {
        let content_type = parts.headers.get(CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok());
        let saw = format!("{} {} {read} bytes", parts.uri, content_type.unwrap_or("-"));
        if let Ok(saw) = HeaderValue::try_from(saw) {
            response.headers_mut().insert(SAW, saw);
        }
    }
    response
}

/// What the handler saw of a request that was rewritten on its way.
const SAW: HeaderName = HeaderName::from_static("x-puppet-saw");

/// How many bytes the body has; `None` if it breaks off.
async fn read<B: http_body::Body<Data = Bytes> + Unpin>(mut body: B) -> Option<usize> {
    let mut bytes = 0;
    while let Some(frame) = body.frame().await {
        bytes += frame.ok()?.data_ref().map_or(0, Bytes::len);
    }
    Some(bytes)
}

fn refuse(problem: String) -> Response<Body> {
    let mut response = Response::new(Full::from(problem + "\n").boxed_unsync());
    *response.status_mut() = StatusCode::BAD_REQUEST;
    let plain = HeaderValue::from_static("text/plain");
    response.headers_mut().insert(CONTENT_TYPE, plain);
    response
}

fn answer(orders: Orders, run: u64, name: &str) -> Response<Body> {
    let Orders {
        status,
        content,
        mut headers,
        trailers,
        word,
        ..
    } = orders;
    let content_type = match &content {
        Some(Content::Text(_) | Content::Stream { .. }) => Some("text/plain"),
        Some(Content::Binary(_)) => Some("application/octet-stream"),
        None if has_no_content(status) => None,
        None => Some("application/json"),
    };
    if let Some(content_type) = content_type {
        headers
            .entry(CONTENT_TYPE)
            .or_insert(HeaderValue::from_static(content_type));
    }
    for name in trailers.keys() {
        headers.append(TRAILER, HeaderValue::from(name.clone()));
    }
    let content = content.unwrap_or_else(|| {
        Content::Text(if has_no_content(status) {
            Bytes::new()
        } else {
            let name = serde_json::Value::from(name);
            format!(r#"{{"run":{run},"name":{name}}}"#).into()
        })
    });
    let mut response = Response::new(body(content, trailers));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    if let Some(word) = word {
        response.extensions_mut().insert(word);
    }
    response
}

/// RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5.
fn has_no_content(status: StatusCode) -> bool {
    matches!(status.as_u16(), 204 | 205 | 304)
}

fn body(content: Content, trailers: HeaderMap) -> Body {
    let data = match content {
        // The length is known, so it is sent as Content-Length.
        Content::Text(bytes) | Content::Binary(bytes) if trailers.is_empty() => {
            return Full::new(bytes).boxed_unsync();
        }
        Content::Text(bytes) | Content::Binary(bytes) => stream::iter(iter::once(bytes)).boxed(),
        Content::Stream { chunks, pause } => stream::iter(0..chunks)
            .then(move |n| async move {
                if n > 0 {
                    tokio::time::sleep(pause).await;
                }
                Bytes::from(format!("chunk {n}\n"))
            })
            .boxed(),
    };
    let trailers = (!trailers.is_empty()).then(|| Frame::trailers(trailers));
    let frames = data.map(Frame::data).chain(stream::iter(trailers));
    StreamBody::new(frames.map(Ok)).boxed_unsync()
}
