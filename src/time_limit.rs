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
    within_if_any(Some(limit), future)
}

/// The same where there may be no limit.
pub(crate) fn within_if_any<F: Future>(limit: Option<Duration>, future: F) -> Within<F> {
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
        limit: Option<Duration>,
        // Boxed, because it is large and most work is done before it is needed.
        sleep: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Result<F::Output, TimedOut>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Ok(output));
        }
        let Some(limit) = *this.limit else {
            return Poll::Pending;
        };
        let sleep = this.sleep.get_or_insert_with(|| Box::pin(sleep(limit)));
        sleep.as_mut().poll(cx).map(|()| Err(TimedOut))
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};

    use futures_util::FutureExt;
    use tokio::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn work_that_is_ready_needs_no_timer_and_no_runtime() {
        let output = within(LIMIT, ready(7)).now_or_never().unwrap();
        assert_eq!(output.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_in_time_is_awaited() {
        let output = within(LIMIT, sleep(LIMIT / 2)).await;
        assert!(output.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_does_not_end_is_given_up_at_the_limit() {
        let begun = Instant::now();
        let output = within(LIMIT, pending::<()>()).await;
        assert!(output.is_err());
        assert_eq!(begun.elapsed(), LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_counts_from_the_first_poll() {
        let limited = within(LIMIT, pending::<()>());
        sleep(2 * LIMIT).await;
        let begun = Instant::now();
        assert!(limited.await.is_err());
        assert_eq!(begun.elapsed(), LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_at_the_limit_has_ended() {
        let begun = Instant::now();
        // Ready in the same poll in which the timer is.
        let work = poll_fn(|_| match begun.elapsed() < LIMIT {
            true => Poll::Pending,
            false => Poll::Ready(()),
        });
        assert!(within(LIMIT, work).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn no_limit_overflows_the_clock() {
        let output = within(Duration::MAX, sleep(LIMIT)).await;
        assert!(output.is_ok());
    }
}
