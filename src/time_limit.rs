//! A time limit that costs nothing while the work is quick.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

/// The work did not end in time. It may have been done all the same.
#[derive(Debug)]
pub(crate) struct TimedOut;

/// Drops `future` after `limit`. The timer is made only when the first poll does not finish.
pub(crate) fn within<F: Future>(limit: Duration, future: F) -> Within<F> {
    Within {
        future,
        limit,
        sleep: None,
    }
}

pin_project! {
    pub(crate) struct Within<F> {
        #[pin]
        future: F,
        limit: Duration,
        #[pin]
        sleep: Option<Sleep>,
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Result<F::Output, TimedOut>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Ok(output));
        }
        if this.sleep.is_none() {
            this.sleep.set(Some(sleep(*this.limit)));
        }
        match this.sleep.as_pin_mut() {
            Some(sleep) => sleep.poll(cx).map(|()| Err(TimedOut)),
            None => Poll::Pending,
        }
    }
}
