//! One try: from the request to the last byte of its answer, within a time limit.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tower::BoxError;
use tower_service::Service;

use super::error::ClientError;
use super::key::Operation;

/// A client whose answer is whole or an error: it waits for the body, and for everything else, within
/// one time limit. Trailers are left out.
///
/// An answer that breaks off half-way is a try that failed. A client that reads the body after the
/// retry loop learns it too late to try again. Where the server shows the end of a body only by
/// closing the connection, which it may in HTTP/1, no client can tell.
///
/// [`ClientLayer`](super::ClientLayer) puts it inside of the retry loop.
#[derive(Clone, Debug)]
pub struct OneTry<S> {
    inner: S,
    timeout: Duration,
    deadline: Duration,
    answer_limit: usize,
}

impl<S> OneTry<S> {
    /// A try of `inner` may take 10 s, and its answer may have 1 MiB.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            timeout: TIMEOUT,
            deadline: Duration::MAX,
            answer_limit: ANSWER_LIMIT,
        }
    }

    /// How long one try may take, 10 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long after the begin of its operation a try may last, counted from
    /// [`SetIdempotencyKeyLayer`](super::SetIdempotencyKeyLayer). No limit by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The longest body of an answer in bytes, 1 MiB by default.
    #[must_use]
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.answer_limit = bytes;
        self
    }

    fn time_left<B>(&self, request: &Request<B>) -> Duration {
        let operation = request.extensions().get::<Operation>();
        operation.map_or(self.timeout, |operation| {
            let left = self.deadline.saturating_sub(operation.begun.elapsed());
            self.timeout.min(left)
        })
    }
}

impl<S, B, R> Service<Request<B>> for OneTry<S>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    B: Send + 'static,
    R: Body<Error: Into<BoxError>> + Send + 'static,
    R::Data: Send,
{
    type Response = Response<Bytes>;
    type Error = ClientError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Bytes>, ClientError>> + Send>>;

    /// Always: a client that is not ready is waited for within the time limit of the try.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let limit = self.time_left(&request);
        let whole = exchange(self.inner.clone(), request, self.answer_limit);
        Box::pin(async move {
            match tokio::time::timeout(limit, whole).await {
                Ok(answer) => answer,
                Err(_) => Err(ClientError::TimedOut { limit }),
            }
        })
    }
}

async fn exchange<S, B, R>(
    mut client: S,
    request: Request<B>,
    limit: usize,
) -> Result<Response<Bytes>, ClientError>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Error: Into<BoxError>,
    R: Body<Error: Into<BoxError>>,
{
    let ready = poll_fn(|cx| client.poll_ready(cx)).await;
    ready.map_err(ClientError::transport)?;
    let answer = client.call(request).await.map_err(ClientError::transport)?;
    let (head, body) = answer.into_parts();
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(Response::from_parts(head, body.to_bytes())),
        Err(error) if error.is::<LengthLimitError>() => Err(ClientError::AnswerTooLong {
            status: head.status,
            limit,
        }),
        Err(error) => Err(ClientError::transport(error)),
    }
}

const TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: usize = 1 << 20;
