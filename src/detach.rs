//! Work that outlives the connection which asked for it.
//!
//! hyper and tonic drop a service's future when the client goes away (a closed HTTP/1.1 connection,
//! an HTTP/2 RST_STREAM, a gRPC deadline). An attempt that died half-way is the one case that no
//! retry can mend, so an attempt is polled where it was asked for, and moved into a task of its own
//! only when it is dropped early.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::telemetry::{self, RequestSpan};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A future that goes on in a task of its own when it is dropped after its first poll.
pub(crate) struct Detachable<T: Send + 'static> {
    future: Option<BoxFuture<T>>,
    runtime: Option<Handle>,
    span: RequestSpan,
    tracker: Arc<Tracker>,
    // Set while the future is polled: if it is still set on drop, the future is unwinding from its
    // own panic and must not be polled again.
    polling: bool,
    started: bool,
}

impl<T: Send + 'static> Detachable<T> {
    pub(crate) fn new(
        tracker: Arc<Tracker>,
        span: RequestSpan,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self {
            future: Some(Box::pin(future)),
            runtime: None,
            span,
            tracker,
            polling: false,
            started: false,
        }
    }
}

impl<T: Send + 'static> Future for Detachable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        if !this.started {
            this.started = true;
            // Dropped elsewhere, on a thread without a runtime, it still finds its way home.
            this.runtime = Handle::try_current().ok();
            this.tracker.enter();
        }
        let Some(future) = this.future.as_mut() else {
            // As for every future: polled again after it was ready.
            return Poll::Pending;
        };
        this.polling = true;
        let polled = this.span.in_scope(|| future.as_mut().poll(cx));
        this.polling = false;
        let output = ready!(polled);
        this.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for Detachable<T> {
    fn drop(&mut self) {
        if !self.started {
            return;
        }
        let unfinished = self.future.take().filter(|_| !self.polling);
        match (unfinished, self.runtime.take()) {
            (Some(future), Some(runtime)) => {
                let tracker = Arc::clone(&self.tracker);
                tracker.detached.fetch_add(1, Ordering::Relaxed);
                runtime.spawn(DetachedTask {
                    future,
                    span: self.span.clone(),
                    _counted: CountedDetached(tracker),
                });
            }
            // Finished, unwinding, or nowhere to go on: what is left unsaid ages with its lease.
            (unfinished, _) => {
                // Before it is counted as gone: its own drop may begin background work.
                drop(unfinished);
                self.tracker.leave();
            }
        }
    }
}

struct DetachedTask<T> {
    future: BoxFuture<T>,
    span: RequestSpan,
    // Last, so that the future is dropped before it is counted as gone: its own drop may begin
    // background work.
    _counted: CountedDetached,
}

impl<T> Future for DetachedTask<T> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let future = &mut this.future;
        // Nobody is left to answer: the result goes, and with it the rest of a streamed body.
        this.span.in_scope(|| future.as_mut().poll(cx)).map(|_| ())
    }
}

struct CountedDetached(Arc<Tracker>);

impl Drop for CountedDetached {
    fn drop(&mut self) {
        self.0.detached.fetch_sub(1, Ordering::Relaxed);
        self.0.leave();
    }
}

/// Counts everything that must finish before the process may end.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    running: AtomicUsize,
    detached: AtomicUsize,
    idle: Notify,
}

impl Tracker {
    fn enter(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
        telemetry::in_flight(1);
    }

    fn leave(&self) {
        telemetry::in_flight(-1);
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// Attempts and background work that have not ended.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Those among them whose client is gone.
    pub(crate) fn detached(&self) -> usize {
        self.detached.load(Ordering::Relaxed)
    }

    /// Returns when nothing runs.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            // Registered before the count is read, so that the last one to leave is not missed.
            idle.as_mut().enable();
            if self.running() == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Counts something until the value is dropped.
    pub(crate) fn count(self: &Arc<Self>) -> Counted {
        self.enter();
        Counted(Arc::clone(self))
    }

    /// Starts background work that belongs to no connection. Without a runtime it does not run.
    pub(crate) fn spawn(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let counted = self.count();
        runtime.spawn(async move {
            work.await;
            drop(counted);
        });
    }
}

/// Something that must finish before the process may end.
pub(crate) struct Counted(Arc<Tracker>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// What a handler threw.
pub(crate) type PanicPayload = Box<dyn Any + Send>;

/// Polls a future to its end and hands its panic over instead of unwinding.
pub(crate) async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, PanicPayload> {
    tokio::pin!(future);
    std::future::poll_fn(move |cx| {
        // The future is not polled again after a panic, so nothing half-changed is seen.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(payload) => Poll::Ready(Err(payload)),
        }
    })
    .await
}
