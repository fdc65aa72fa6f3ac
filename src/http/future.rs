//! The future of [`IdempotencyService`](super::IdempotencyService).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Response;
use http_body::Body;
use pin_project_lite::pin_project;

use super::body::ResponseBody;

type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

pin_project! {
    /// Answers a request: opaque, unboxed for requests that pass.
    pub struct ResponseFuture<F, R, E>
    where
        R: Body,
    {
        #[pin]
        kind: Kind<F, R, E>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<F, R, E>
    where
        R: Body,
    {
        Passed { #[pin] future: F },
        Refused { response: Option<Response<ResponseBody<R>>> },
        Guarded { future: Pin<Box<dyn Future<Output = Answer<R, E>> + Send>> },
    }
}

impl<F, R: Body, E> ResponseFuture<F, R, E> {
    pub(super) fn passed(future: F) -> Self {
        Self {
            kind: Kind::Passed { future },
        }
    }

    pub(super) fn refused(response: Response<ResponseBody<R>>) -> Self {
        Self {
            kind: Kind::Refused {
                response: Some(response),
            },
        }
    }

    pub(super) fn guarded(future: impl Future<Output = Answer<R, E>> + Send + 'static) -> Self {
        Self {
            kind: Kind::Guarded {
                future: Box::pin(future),
            },
        }
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Body<Data = Bytes>,
{
    type Output = Answer<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProj::Passed { future } => {
                let response = ready!(future.poll(cx))?;
                Poll::Ready(Ok(response.map(ResponseBody::passed)))
            }
            KindProj::Refused { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                // Polled again after it was ready.
                None => Poll::Pending,
            },
            KindProj::Guarded { future } => future.as_mut().poll(cx),
        }
    }
}

impl<F, R: Body, E> fmt::Debug for ResponseFuture<F, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
