//! The named fault points of an attempt, and a store that has four of them.

use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Fenced, OnAbandoned, Outcome,
    Owner, Purged, Record, Resolution, ScopedKey, Store, StoreError, StoreProperties, async_trait,
};

/// Where a process can be told to end, to stop, or to lose a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    BeforeClaim,
    AfterClaim,
    InHandler,
    AfterEffect,
    BeforeCompletion,
    AfterCompletion,
    BeforeReply,
}

impl Point {
    pub const ALL: [Self; 7] = [
        Self::BeforeClaim,
        Self::AfterClaim,
        Self::InHandler,
        Self::AfterEffect,
        Self::BeforeCompletion,
        Self::AfterCompletion,
        Self::BeforeReply,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::BeforeClaim => "before-claim",
            Self::AfterClaim => "after-claim",
            Self::InHandler => "in-handler",
            Self::AfterEffect => "after-effect",
            Self::BeforeCompletion => "before-completion",
            Self::AfterCompletion => "after-completion",
            Self::BeforeReply => "before-reply",
        }
    }
}

/// What happens to the process that passes an armed point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, until somebody lets it go on.
    Stop,
    /// The store has done it, and its caller hears of a failure. Only after a claim or a completion.
    LoseReply,
}

impl Action {
    pub const ALL: [Self; 3] = [Self::Kill, Self::Stop, Self::LoseReply];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::LoseReply => "lose-reply",
        }
    }
}

/// The points of one process. One of them may be armed; it fires once.
#[derive(Clone, Debug, Default)]
pub struct Points(Arc<Mutex<Option<(Point, Action)>>>);

impl Points {
    /// Reads `action point`.
    pub fn arm(&self, order: &str) {
        let (action, point) = order.split_once(' ').expect("an action and a point");
        let action = Action::ALL.iter().find(|known| known.name() == action);
        let point = Point::ALL.iter().find(|known| known.name() == point);
        let armed = (*point.expect("a point"), *action.expect("an action"));
        *self.0.lock().unwrap() = Some(armed);
    }

    pub fn disarm(&self) {
        *self.0.lock().unwrap() = None;
    }

    /// Passes a point; the process may end or stand still here. `true` if the reply is lost.
    pub fn pass(&self, here: Point) -> bool {
        let mut armed = self.0.lock().unwrap();
        let Some((_, action)) = armed.take_if(|(point, _)| *point == here) else {
            return false;
        };
        drop(armed);
        tell("fired");
        match action {
            Action::Kill => {
                signal("-KILL", std::process::id());
                // The signal may take a moment; nothing happens here any more.
                std::thread::sleep(Duration::from_secs(60));
            }
            Action::Stop => _ = signal("-STOP", std::process::id()),
            Action::LoseReply => {}
        }
        action == Action::LoseReply
    }
}

/// Sends a signal; there is no safe call that does it without one more dependency.
pub fn signal(which: &str, process: u32) -> bool {
    let mut kill = Command::new("kill");
    kill.arg(which).arg(process.to_string());
    kill.stdin(Stdio::null()).stderr(Stdio::null());
    kill.status().is_ok_and(|status| status.success())
}

/// Tells whoever started this process.
pub fn tell(what: &str) {
    let mut out = std::io::stdout().lock();
    // They may be gone.
    let _ = writeln!(out, "{MARK}{what}").and_then(|()| out.flush());
}

/// Marks a child's own lines among those of the test runner.
pub const MARK: &str = "chaos: ";

/// A store with fault points around its claims and completions.
#[derive(Clone)]
pub struct PointedStore<S> {
    inner: S,
    points: Points,
    /// A fault of the store itself, which the checker has to find: a claim whose lease is over is
    /// always granted.
    grants_what_is_held: bool,
}

impl<S> PointedStore<S> {
    pub fn new(inner: S, points: Points, grants_what_is_held: bool) -> Self {
        Self {
            inner,
            points,
            grants_what_is_held,
        }
    }

    fn answer<T>(&self, at: Point, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        if self.points.pass(at) {
            return Err(StoreError::unavailable("the reply was lost"));
        }
        answer
    }
}

impl<S: fmt::Debug> fmt::Debug for PointedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for PointedStore<S> {
    fn properties(&self) -> StoreProperties {
        self.inner.properties()
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        self.points.pass(Point::BeforeClaim);
        let mut request = request.clone();
        if self.grants_what_is_held {
            request.on_abandoned = OnAbandoned::Rerun;
        }
        let claimed = self.inner.claim(&request).await;
        match claimed {
            Ok(Claimed::Acquired { .. }) => self.answer(Point::AfterClaim, claimed),
            _ => claimed,
        }
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        self.points.pass(Point::BeforeCompletion);
        let completion = self.inner.complete(claim, outcome, retention).await;
        self.answer(Point::AfterCompletion, completion)
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.inner.renew(claim, lease).await
    }

    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.release(claim).await
    }

    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.inner.abandon(claim).await
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        self.inner.annotate(claim, correlation).await
    }

    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        self.inner.checkpoint(claim, name, data).await
    }

    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.inner.abandoned(after, limit).await
    }

    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        self.inner.resolve(record, resolution).await
    }

    async fn lookup(&self, key: &ScopedKey) -> Result<Option<Record>, StoreError> {
        self.inner.lookup(key).await
    }

    async fn remove(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        self.inner.remove(key).await
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.inner.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.inner.purge(limit).await
    }

    async fn changed(
        &self,
        key: &ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.inner.changed(key, seen, max).await
    }
}
