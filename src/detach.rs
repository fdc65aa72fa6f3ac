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

use pin_project_lite::pin_project;
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
            // Hears of everything from here on, before it is polled: made before the count is read,
            // so that the last one to leave is not missed.
            let idle = self.idle.notified();
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

    /// Starts background work that belongs to no connection: on the runtime at hand, or else at
    /// `home`. Without either it does not run.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        home: Option<&Handle>,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let Some(runtime) = Handle::try_current().ok().or_else(|| home.cloned()) else {
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

/// Calls something and hands its panic over instead of unwinding.
pub(crate) fn catch_panic_now<T>(call: impl FnOnce() -> T) -> Result<T, PanicPayload> {
    // Nobody calls it again after a panic, so nothing half-changed is seen.
    catch_unwind(AssertUnwindSafe(call))
}

/// Polls a future to its end and hands its panic over instead of unwinding.
pub(crate) fn catch_panic<F: Future>(future: F) -> CatchPanic<F> {
    CatchPanic { future }
}

pin_project! {
    pub(crate) struct CatchPanic<F> {
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for CatchPanic<F> {
    type Output = Result<F::Output, PanicPayload>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.project().future;
        match catch_panic_now(|| future.poll(cx)) {
            Ok(polled) => polled.map(Ok),
            Err(payload) => Poll::Ready(Err(payload)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use futures_util::FutureExt;
    use tokio::runtime::{Builder, Runtime};
    use tokio::time::{Instant, sleep, timeout};

    use super::*;
    use crate::scope::ScopedKey;

    const SECOND: Duration = Duration::from_secs(1);

    /// Work that says how far it came, and whether it was dropped.
    #[derive(Clone, Default)]
    struct Work {
        begun: Arc<AtomicBool>,
        ended: Arc<AtomicBool>,
        held: Arc<()>,
    }

    impl Work {
        fn of(&self, seconds: u32) -> impl Future<Output = u32> + Send + use<> {
            let work = self.clone();
            async move {
                work.begun.store(true, Ordering::SeqCst);
                sleep(SECOND * seconds).await;
                work.ended.store(true, Ordering::SeqCst);
                drop(work);
                seconds
            }
        }

        fn has_begun(&self) -> bool {
            self.begun.load(Ordering::SeqCst)
        }

        fn has_ended(&self) -> bool {
            self.ended.load(Ordering::SeqCst)
        }

        fn is_dropped(&self) -> bool {
            Arc::strong_count(&self.held) == 1
        }
    }

    fn detachable<T: Send + 'static>(
        tracker: &Arc<Tracker>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Detachable<T> {
        let span = RequestSpan::new("test", &ScopedKey::join("test", "", "k"));
        Detachable::new(Arc::clone(tracker), span, work)
    }

    fn counts(tracker: &Tracker) -> (usize, usize) {
        (tracker.running(), tracker.detached())
    }

    fn paused_runtime() -> Runtime {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_awaited_is_done_in_place() {
        let (tracker, work) = (Arc::default(), Work::default());
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let done = detachable(&tracker, work.of(2)).await;
        assert_eq!((done, tasks()), (2, 0));
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_dropped_before_its_first_poll_never_begins() {
        let (tracker, work) = (Arc::default(), Work::default());
        let detached = detachable(&tracker, work.of(2));
        assert_eq!(counts(&tracker), (0, 0));
        drop(detached);
        sleep(10 * SECOND).await;
        assert!(work.is_dropped() && !work.has_begun());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_dropped_later_goes_on() {
        let (tracker, work) = (Arc::default(), Work::default());
        let given_up = timeout(SECOND, detachable(&tracker, work.of(3))).await;
        assert!(given_up.is_err());
        assert_eq!(counts(&tracker), (1, 1));
        let dropped = Instant::now();
        tracker.idle().await;
        assert_eq!(dropped.elapsed(), 2 * SECOND);
        assert!(work.has_ended() && work.is_dropped());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_ended_is_not_begun_again_by_its_drop() {
        let (tracker, work) = (Arc::default(), Work::default());
        let mut detached = Box::pin(detachable(&tracker, work.of(1)));
        (&mut detached).await;
        assert_eq!(counts(&tracker), (1, 0));
        drop(detached);
        assert_eq!(counts(&tracker), (0, 0));
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_panicked_is_not_polled_again() {
        let tracker = Arc::default();
        let panicking = detachable(&tracker, async {
            tokio::task::yield_now().await;
            panic!("in the work");
        });
        let caught = AssertUnwindSafe(panicking).catch_unwind().await;
        assert!(caught.is_err());
        assert_eq!(counts(&tracker), (0, 0));
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_dropped_by_the_panic_of_something_else_goes_on() {
        let (tracker, work) = (Arc::default(), Work::default());
        let detached = detachable(&tracker, work.of(3));
        let connection = async {
            let panicking = async {
                sleep(SECOND).await;
                panic!("beside the work");
            };
            tokio::join!(detached, panicking)
        };
        assert!(AssertUnwindSafe(connection).catch_unwind().await.is_err());
        assert_eq!(counts(&tracker), (1, 1));
        tracker.idle().await;
        assert!(work.has_ended());
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_without_a_client_ends_the_count() {
        let tracker = Arc::default();
        let panicking = detachable(&tracker, async {
            sleep(2 * SECOND).await;
            panic!("in the work");
        });
        let given_up: Result<(), _> = timeout(SECOND, panicking).await;
        assert!(given_up.is_err());
        assert_eq!(counts(&tracker), (1, 1));
        tracker.idle().await;
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[test]
    fn what_is_dropped_on_a_thread_without_a_runtime_goes_on_where_it_began() {
        let runtime = paused_runtime();
        let (tracker, work) = (Arc::default(), Work::default());
        let mut detached = Box::pin(detachable(&tracker, work.of(1)));
        runtime.block_on(async {
            assert!((&mut detached).now_or_never().is_none());
        });
        thread::spawn(move || drop(detached)).join().unwrap();
        assert_eq!(counts(&tracker), (1, 1));
        runtime.block_on(tracker.idle());
        assert!(work.has_ended());
    }

    #[test]
    fn what_began_on_no_runtime_ends_with_its_drop() {
        let (tracker, work) = (Arc::default(), Work::default());
        let held = work.clone();
        let mut waiting = Box::pin(detachable(&tracker, async move {
            std::future::pending::<()>().await;
            drop(held);
        }));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(counts(&tracker), (1, 0));
        drop(waiting);
        assert!(work.is_dropped());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[test]
    fn what_outlives_its_runtime_ends_with_its_drop() {
        let runtime = paused_runtime();
        let (tracker, work) = (Arc::default(), Work::default());
        let mut detached = Box::pin(detachable(&tracker, work.of(1)));
        runtime.block_on(async {
            assert!((&mut detached).now_or_never().is_none());
        });
        drop(runtime);
        drop(detached);
        assert!(work.is_dropped() && !work.has_ended());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[test]
    fn what_goes_on_ends_with_its_runtime() {
        let runtime = paused_runtime();
        let (tracker, work) = (Arc::default(), Work::default());
        runtime.block_on(async {
            let given_up = timeout(SECOND, detachable(&tracker, work.of(3))).await;
            assert!(given_up.is_err());
        });
        assert_eq!(counts(&tracker), (1, 1));
        drop(runtime);
        assert!(work.is_dropped() && !work.has_ended());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_wakes_everybody_when_the_last_one_leaves() {
        let tracker = Arc::<Tracker>::default();
        let (first, second) = (tracker.count(), tracker.count());
        let waiting: Vec<_> = (0..10)
            .map(|_| {
                let tracker = Arc::clone(&tracker);
                tokio::spawn(async move { tracker.idle().await })
            })
            .collect();
        sleep(SECOND).await;
        drop(first);
        sleep(SECOND).await;
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        drop(second);
        for waiting in waiting {
            waiting.await.unwrap();
        }
        tracker.idle().await;
    }

    #[test]
    fn background_work_needs_a_runtime() {
        let (tracker, work) = (Arc::<Tracker>::default(), Work::default());
        let left = work.of(1);
        tracker.spawn(None, async move {
            left.await;
        });
        assert!(work.is_dropped());
        assert_eq!(counts(&tracker), (0, 0));
    }

    #[tokio::test]
    async fn a_panic_is_handed_over_and_anything_else_is_passed_on() {
        assert_eq!(catch_panic(async { 7 }).await.unwrap(), 7);
        let payload = catch_panic(async {
            tokio::task::yield_now().await;
            panic!("in the work");
        })
        .await
        .unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&"in the work"));
    }
}
