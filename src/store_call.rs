//! One call to the store: timed, limited and reported.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;

use crate::error::StoreError;
use crate::telemetry::{self, StoreTimer};
use crate::time_limit::{Within, within};

pin_project! {
    /// Written by hand, because an async function would hold the call twice, and every attempt holds
    /// several of these.
    pub(crate) struct StoreCall<F> {
        #[pin]
        call: Within<F>,
        limit: Duration,
        op: &'static str,
        store: &'static str,
        timer: Option<StoreTimer>,
    }
}

impl<F> StoreCall<F> {
    /// Gives `call` the time `limit`; after that it is an unavailable store.
    pub(crate) fn new(limit: Duration, op: &'static str, store: &'static str, call: F) -> Self
    where
        F: Future,
    {
        Self {
            call: within(limit, call),
            limit,
            op,
            store,
            timer: Some(StoreTimer::start()),
        }
    }
}

impl<T, F: Future<Output = Result<T, StoreError>>> Future for StoreCall<F> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let result = ready!(this.call.poll(cx)).unwrap_or_else(|_| {
            let message = format!("{} did not answer within {:?}", this.op, this.limit);
            Err(StoreError::unavailable(message))
        });
        if let Some(timer) = this.timer.take() {
            timer.stop(this.op, this.store, result.is_err());
        }
        if let Err(error) = &result {
            telemetry::store_failed(this.op, error);
        }
        Poll::Ready(result)
    }
}
