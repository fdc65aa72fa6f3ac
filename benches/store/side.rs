//! The two sides of a comparison: a store, and the same work done bare.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, Owner,
    ScopedKey, Store,
};

/// Who does the work. Everything that is asked of it succeeds, or the bench ends.
pub trait Side: Clone + Send + Sync + 'static {
    /// What a claim gives and a completion takes.
    type Held: Send + 'static;

    /// Claims a key that has no record.
    fn claim(&self, request: &ClaimRequest) -> impl Future<Output = Self::Held> + Send;

    fn complete(&self, held: &Self::Held, outcome: &Outcome) -> impl Future<Output = ()> + Send;

    /// Claims a key whose outcome is kept, and decodes that.
    fn replay(&self, request: &ClaimRequest) -> impl Future<Output = ()> + Send;

    /// Removes at most so many expired records, and says how many it removed.
    fn purge(&self, limit: usize) -> impl Future<Output = usize> + Send;

    /// Called before each round.
    fn begin(&mut self) {}

    /// The same in another process, which has met no key.
    fn elsewhere(&self) -> Self {
        self.clone()
    }
}

/// A store of the crate.
#[derive(Clone)]
pub struct Ours<S> {
    pub store: S,
    /// Makes the store that the next round uses, or the one of another process.
    pub anew: Option<fn(&S) -> S>,
    pub other: Option<fn(&S) -> S>,
}

impl<S> Ours<S> {
    pub fn new(store: S) -> Self {
        Self {
            store,
            anew: None,
            other: None,
        }
    }
}

impl<S: Store + Clone + 'static> Side for Ours<S> {
    type Held = Claim;

    async fn claim(&self, request: &ClaimRequest) -> Claim {
        match self.store.claim(request).await {
            Ok(Claimed::Acquired { claim, .. }) => claim,
            other => panic!("a new key was not acquired: {other:?}"),
        }
    }

    async fn complete(&self, held: &Claim, outcome: &Outcome) {
        let completion = self.store.complete(held, outcome, None).await;
        assert!(
            matches!(completion, Ok(Completion::Recorded)),
            "{completion:?}"
        );
    }

    async fn replay(&self, request: &ClaimRequest) {
        let claimed = self.store.claim(request).await;
        assert!(matches!(claimed, Ok(Claimed::Existing(_))), "{claimed:?}");
    }

    async fn purge(&self, limit: usize) -> usize {
        self.store.purge(limit).await.expect("a purge").removed
    }

    fn begin(&mut self) {
        if let Some(anew) = self.anew {
            self.store = anew(&self.store);
        }
    }

    fn elsewhere(&self) -> Self {
        let mut elsewhere = self.clone();
        if let Some(other) = self.other {
            elsewhere.store = other(&self.store);
        }
        elsewhere
    }
}

/// A request with a key that nobody has used: a UUID, by a caller with a name.
pub fn new_request() -> ClaimRequest {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    // Spread, as random keys are.
    let spread = next.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let key = format!("{:08x}-40d5-43dd-bc93-{next:012x}", spread >> 32);
    let key = IdempotencyKey::new(&key).expect("a key");
    let key = ScopedKey::new("http", "user-17", &key);
    ClaimRequest::new(key, Fingerprint::of(&[b"POST", b"/charges"]))
}

/// Another request with the same key.
pub fn again(request: &ClaimRequest) -> ClaimRequest {
    let mut again = request.clone();
    again.owner = Owner::random();
    again
}

/// A request whose record is expired, and unresolved, so much later.
pub fn short_lived(retention: Duration) -> ClaimRequest {
    let mut request = new_request();
    request.lease = Duration::from_millis(1);
    request.retention = retention;
    request
}

/// A body of 200 bytes.
pub fn outcome() -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Outcome::response(StatusCode::CREATED, &headers, &[&[b'x'; 200]], None)
}
