//! Requests whose key is in the body: read first, then guarded as any other.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::{RequestBody, ResponseBody};
use super::config::{Config, MissingKey};
use super::grpc::Protocol;
use super::guarded::{Guarded, guard, read_within};
use super::problem::Problem;
use super::service::{is_early_data, refusal};
use crate::idempotency::Engine;
use crate::key::check_characters;
use crate::scope::ScopedKey;
use crate::telemetry::{self, Answered};

/// A request whose key is not known yet, on its way to the handler.
pub(super) struct Unkeyed<T> {
    pub(super) config: Arc<Config>,
    pub(super) engine: Arc<Engine>,
    pub(super) inner: T,
    pub(super) protocol: Protocol,
}

/// Reads the body, finds the key, and guards the request. Dropped before that, nothing has happened.
#[expect(clippy::manual_async_fn, reason = "see `guard`")]
pub(super) fn guard_unkeyed<T, B, R>(
    unkeyed: Unkeyed<T>,
    parts: Parts,
    body: B,
) -> impl Future<Output = Result<Response<ResponseBody<R>>, T::Error>> + Send
where
    T: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    T::Future: Send + 'static,
    T::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    async move {
        let Unkeyed {
            config,
            engine,
            mut inner,
            protocol,
        } = unkeyed;
        let (frames, trailers) = match read_within(&config, &parts.headers, body, |_| {}).await {
            Ok(read) => read,
            Err(kind) => {
                telemetry::answered(Answered::Rejected, engine.store_name);
                return Ok(refusal(config.refuse(config.problem(kind), protocol)));
            }
        };
        let key = find(&config, &parts, &frames.join(), engine.store_name);
        let body = RequestBody::held(frames, trailers);
        match key {
            Ok(Some(key)) => {
                let guarded = Guarded {
                    config,
                    engine,
                    inner,
                    key,
                    protocol,
                };
                guard(guarded, parts, body).await
            }
            Ok(None) => {
                let response = inner.call(Request::from_parts(parts, body)).await?;
                Ok(response.map(ResponseBody::passed))
            }
            Err(problem) => Ok(refusal(config.refuse(*problem, protocol))),
        }
    }
}

/// The lookup key; `None` if there is no key and the request may pass without one.
fn find(
    config: &Config,
    parts: &Parts,
    body: &[u8],
    store: &'static str,
) -> Result<Option<ScopedKey>, Box<Problem>> {
    let Some(key) = config.source.find(parts, body) else {
        let passes =
            config.missing_key == MissingKey::PassThrough && !is_early_data(&parts.headers);
        return match passes {
            true => Ok(None),
            false => Err(config.missing_key(store)),
        };
    };
    check_characters(&key).map_err(|error| config.invalid_key(&error, store))?;
    config.admit_key(&key, parts, store).map(Some)
}
