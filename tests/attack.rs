//! Attacks that once worked, or might have: one test each.

#[path = "support/app.rs"]
mod app;

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use tower::{BoxError, service_fn};
use tower_idempotency::{
    AbandonedPage, Claim, ClaimRequest, Claimed, Completion, Cursor, Fenced, Fingerprint,
    FingerprintRecipe, Idempotency, IdempotencyKey, IdempotencyLayer, MemoryStore, Owner,
    ProblemKind, Purged, Record, RequestBody, Resolution, RetentionOverride, State, Store,
    StoreError, StoreProperties, Timestamp, async_trait,
};

use crate::app::*;

/// Memory that counts itself.
struct Pinned(Arc<AtomicUsize>, Vec<u8>);

impl Pinned {
    fn frame(alive: &Arc<AtomicUsize>, bytes: usize) -> Bytes {
        alive.fetch_add(1, Ordering::SeqCst);
        // A slice without bytes would let go of its buffer.
        let buffer = if bytes == 0 { 0 } else { 256 };
        Bytes::from_owner(Self(Arc::clone(alive), vec![b'x'; buffer])).slice(..bytes)
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        &self.1
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A body of so many frames of this size, each a slice of a receive buffer of its own.
fn sliced(alive: &Arc<AtomicUsize>, frames: usize, bytes: usize) -> Body {
    let alive = Arc::clone(alive);
    Body::new(StreamBody::new(stream::iter((0..frames).map(move |_| {
        Ok::<_, Infallible>(Frame::data(Pinned::frame(&alive, bytes)))
    }))))
}

/// How many receive buffers are held while the handler runs.
async fn buffers_held(recipe: FingerprintRecipe, frames: usize, bytes: usize) -> usize {
    let alive = Arc::new(AtomicUsize::new(0));
    let seen = Arc::new(AtomicUsize::new(usize::MAX));
    let layer = IdempotencyLayer::builder(MemoryStore::new()).fingerprint(recipe);
    let (counting, saw) = (Arc::clone(&alive), Arc::clone(&seen));
    let handler = service_fn(move |request: Request<RequestBody<Body>>| {
        saw.store(counting.load(Ordering::SeqCst), Ordering::SeqCst);
        async move {
            let body = http_body_util::BodyExt::collect(request.into_body()).await;
            let bytes = body.map_err(BoxError::from)?.to_bytes();
            assert!(bytes.iter().all(|byte| *byte == b'x'));
            Ok::<_, BoxError>(Response::new(Body::from(bytes.len().to_string())))
        }
    });
    let app = App::around(&layer.build().unwrap(), handler);
    let ask = pay("k").header("content-type", "application/json");
    let answer = app.send(ask.stream(sliced(&alive, frames, bytes))).await;
    assert_eq!(answer.text(), (frames * bytes).to_string());
    seen.load(Ordering::SeqCst)
}

#[tokio::test]
async fn a_body_of_tiny_frames_does_not_hold_a_buffer_for_each() {
    for recipe in [FingerprintRecipe::raw(), FingerprintRecipe::raw().json()] {
        let held = buffers_held(recipe, 10_000, 1).await;
        assert!(held < 100, "{held} buffers for 10,000 bytes");
    }
}

#[tokio::test]
async fn empty_frames_are_not_held() {
    for recipe in [FingerprintRecipe::raw(), FingerprintRecipe::raw().json()] {
        let held = buffers_held(recipe, 10_000, 0).await;
        assert_eq!(held, 0);
    }
}

#[tokio::test]
async fn empty_frames_are_not_held_while_the_body_is_read() {
    let alive = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let layer =
        IdempotencyLayer::builder(MemoryStore::new()).fingerprint(FingerprintRecipe::raw().json());
    let app = App::behind(&layer.build().unwrap(), paid);
    let (counting, peak) = (Arc::clone(&alive), Arc::clone(&most));
    let body = Body::new(StreamBody::new(stream::iter((0..10_000).map(move |_| {
        peak.fetch_max(counting.load(Ordering::SeqCst), Ordering::SeqCst);
        Ok::<_, Infallible>(Frame::data(Pinned::frame(&counting, 0)))
    }))));
    let ask = pay("k").header("content-type", "application/json");
    app.send(ask.stream(body)).await;
    let most = most.load(Ordering::SeqCst);
    assert!(most < 10, "{most} buffers for an empty body");
}

#[tokio::test]
async fn a_response_of_tiny_frames_does_not_hold_a_buffer_for_each() {
    let alive = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (counting, peak) = (Arc::clone(&alive), Arc::clone(&most));
    let app = App::new(move |_| {
        let (counting, peak) = (Arc::clone(&counting), Arc::clone(&peak));
        async move {
            Body::new(StreamBody::new(stream::iter((0..10_000).map(move |_| {
                peak.fetch_max(counting.load(Ordering::SeqCst), Ordering::SeqCst);
                Ok::<_, Infallible>(Frame::data(Pinned::frame(&counting, 1)))
            }))))
        }
    });
    let first = app.send(pay("k")).await;
    assert_eq!(first.body.len(), 10_000);
    app.send(pay("k")).await.assert_replays(&first);
    let most = most.load(Ordering::SeqCst);
    assert!(most < 100, "{most} buffers for 10,000 bytes");
}

fn two_recipes() -> (App, App) {
    let store = MemoryStore::new();
    let app = |recipe| {
        let layer = IdempotencyLayer::builder(store.clone()).fingerprint(recipe);
        App::behind(&layer.build().unwrap(), paid)
    };
    (
        app(FingerprintRecipe::raw()),
        app(FingerprintRecipe::raw().json()),
    )
}

#[tokio::test]
async fn another_path_is_another_request_under_another_recipe_too() {
    let (charges, refunds) = two_recipes();
    charges.send(post("/charges").key("k").body("1")).await;
    for ask in [
        post("/refunds").key("k").body("1"),
        post("/charges?dry").key("k").body("1"),
        ask("PATCH", "/charges").key("k").body("1"),
    ] {
        let other = refunds.send(ask).await;
        other.assert_problem(ProblemKind::KeyReused);
    }
    assert!(
        refunds
            .send(post("/charges").key("k").body("1"))
            .await
            .is_replay()
    );
}

#[tokio::test]
async fn another_caller_gets_no_answer_after_a_change_of_recipe() {
    let (before, after) = two_recipes();
    let alice = pay("k").header("authorization", "Bearer alice");
    before.send(alice.clone()).await;
    assert!(after.send(alice).await.is_replay());
    for stranger in [pay("k").header("authorization", "Bearer mallory"), pay("k")] {
        let answer = after.send(stranger).await;
        answer.assert_problem(ProblemKind::CallerChanged);
    }
}

#[tokio::test]
async fn a_response_with_very_many_header_lines_is_replayed() {
    let app = App::new(|_| async {
        let mut response = Response::new(Body::from("many"));
        for n in 0..30_000 {
            response
                .headers_mut()
                .append("x-line", HeaderValue::from(n));
        }
        response
    });
    let first = app.send(pay("k")).await;
    assert_eq!(first.headers.len(), 30_000);
    app.send(pay("k")).await.assert_replays(&first);
}

/// A store whose clock says what no calendar can.
#[derive(Clone, Debug)]
struct FarStore(MemoryStore, Arc<Mutex<u64>>);

#[async_trait]
impl Store for FarStore {
    fn properties(&self) -> StoreProperties {
        self.0.properties()
    }
    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        Ok(match self.0.claim(request).await? {
            Claimed::Existing(mut record) => {
                if let State::Completed { completed_at, .. } = &mut record.state {
                    *completed_at = Timestamp::from_micros(*self.1.lock().unwrap());
                }
                Claimed::Existing(record)
            }
            acquired @ Claimed::Acquired { .. } => acquired,
        })
    }
    async fn renew(&self, claim: &Claim, lease: Duration) -> Result<Fenced, StoreError> {
        self.0.renew(claim, lease).await
    }
    async fn complete(
        &self,
        claim: &Claim,
        outcome: &tower_idempotency::Outcome,
        retention: Option<Duration>,
    ) -> Result<Completion, StoreError> {
        self.0.complete(claim, outcome, retention).await
    }
    async fn release(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.0.release(claim).await
    }
    async fn abandon(&self, claim: &Claim) -> Result<Fenced, StoreError> {
        self.0.abandon(claim).await
    }
    async fn annotate(&self, claim: &Claim, correlation: &str) -> Result<Fenced, StoreError> {
        self.0.annotate(claim, correlation).await
    }
    async fn checkpoint(
        &self,
        claim: &Claim,
        name: &str,
        data: &Bytes,
    ) -> Result<Fenced, StoreError> {
        self.0.checkpoint(claim, name, data).await
    }
    async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        self.0.abandoned(after, limit).await
    }
    async fn resolve(
        &self,
        record: &Record,
        resolution: &Resolution,
    ) -> Result<Fenced, StoreError> {
        self.0.resolve(record, resolution).await
    }
    async fn lookup(
        &self,
        key: &tower_idempotency::ScopedKey,
    ) -> Result<Option<Record>, StoreError> {
        self.0.lookup(key).await
    }
    async fn remove(&self, key: &tower_idempotency::ScopedKey) -> Result<bool, StoreError> {
        self.0.remove(key).await
    }
    async fn erase(&self, within: &str, scope: &str, limit: usize) -> Result<usize, StoreError> {
        self.0.erase(within, scope, limit).await
    }

    async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        self.0.purge(limit).await
    }
    async fn changed(
        &self,
        key: &tower_idempotency::ScopedKey,
        seen: &Owner,
        max: Duration,
    ) -> Result<(), StoreError> {
        self.0.changed(key, seen, max).await
    }
}

#[tokio::test]
async fn a_date_that_no_header_can_carry_is_left_out() {
    let at = Arc::new(Mutex::new(0));
    let layer = IdempotencyLayer::new(FarStore(MemoryStore::new(), Arc::clone(&at)));
    let app = App::behind(&layer, |_| async { (StatusCode::BAD_REQUEST, "no") });
    let first = app.send(pay("k")).await;
    for micros in [0, 253_402_300_800_000_000, u64::MAX] {
        *at.lock().unwrap() = micros;
        let retry = app.send(pay("k")).await;
        retry.assert_replays(&first);
        assert_eq!(
            retry.headers.contains_key("idempotency-original-date"),
            micros == 0
        );
    }
}

#[tokio::test]
async fn debug_shows_no_key_no_scope_and_no_note() {
    let store = MemoryStore::new();
    let mut owners = Vec::new();
    for n in 0..3 {
        let key = IdempotencyKey::new(&format!("secret-key-{n}")).unwrap();
        let key = tower_idempotency::ScopedKey::new("http", "secret-scope", &key);
        let request = ClaimRequest::new(key, Fingerprint::of(&[]));
        let Ok(Claimed::Acquired { claim, .. }) = store.claim(&request).await else {
            panic!("not acquired");
        };
        let _ = store.annotate(&claim, "secret-note").await.unwrap();
        let data = Bytes::from_static(b"secret-data");
        let _ = store.checkpoint(&claim, "charged", &data).await.unwrap();
        let _ = store.abandon(&claim).await.unwrap();
        owners.push(claim);
    }
    let page = store.abandoned(None, 1).await.unwrap();
    assert!(page.next.is_some());
    let shown = format!("{page:?} {owners:?}");
    assert!(!shown.contains("secret"), "{shown}");
}

#[tokio::test]
async fn a_handlers_word_is_stronger_than_a_refusal_that_it_passes_on() {
    let app = App::new(|_| async {
        let mut response = Response::new(Body::from("done, but the copy was refused"));
        response.extensions_mut().insert(ProblemKind::InProgress);
        response.extensions_mut().insert(RetentionOverride::Keep);
        response
    });
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn what_is_never_stored_stays_out_whatever_is_also_stored() {
    let secret = HeaderName::from_static("x-secret");
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::builder(store)
        .never_store(secret.clone())
        .also_store(secret)
        .build()
        .unwrap();
    assert!(
        layer
            .policy()
            .headers_not_replayed
            .contains(&"x-secret".to_owned())
    );
    let app = App::behind(&layer, |_| async { [("x-secret", "1")] });
    app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    assert!(!retry.headers.contains_key("x-secret"));
}

#[tokio::test]
async fn the_policy_lists_every_header_that_is_not_replayed() {
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .also_store(HeaderName::from_static("access-control-allow-origin"))
        .build()
        .unwrap();
    let listed = layer.policy().headers_not_replayed;
    let names = [
        "idempotency-replayed",
        "idempotency-error",
        "idempotency-result",
        "idempotency-unprotected",
        "idempotency-original-date",
        "date",
        "x-kept",
    ];
    let app = App::behind(
        &layer,
        move |_| async move { names.map(|name| (name, "1")) },
    );
    app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    for name in names {
        let replayed = retry.headers.get(name).is_some_and(|value| value == "1");
        let is_listed = listed.iter().any(|entry| match entry.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => entry == name,
        });
        assert_eq!(replayed, !is_listed, "{name}");
    }
}

#[tokio::test]
async fn the_length_of_a_head_response_stays() {
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        .methods([http::Method::HEAD])
        .build()
        .unwrap();
    let app = App::behind(&layer, |_| async {
        Response::builder()
            .header("content-length", "5000000")
            .body(Body::empty())
            .unwrap()
    });
    let first = app.send(ask("HEAD", "/").key("k")).await;
    assert_eq!(first.header("content-length"), "5000000");
    app.send(ask("HEAD", "/").key("k"))
        .await
        .assert_replays(&first);
}

/// The state of a record in which a closure of the settings has panicked.
async fn after_a_panic_of(settings: impl FnOnce(Settings) -> Settings) {
    let app = App::with(settings, paid);
    let call = app.call(pay("k"));
    assert!(tokio::spawn(call).await.is_err());
    assert!(app.idempotency.drain().await);
    let retry = app.send(pay("k")).await;
    retry.assert_problem(ProblemKind::OutcomeUnknown);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_setting_that_panics_after_the_handler_leaves_the_outcome_unknown_at_once() {
    after_a_panic_of(|s| s.redact(|_, _, _| panic!("redact"))).await;
    after_a_panic_of(|s| {
        s.retention(tower_idempotency::RetentionPolicy::from_fn("bad", |_| {
            panic!("retention")
        }))
    })
    .await;
}

#[test]
fn what_is_left_unsaid_outside_of_a_runtime_is_said_at_home() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let engine = Idempotency::new(MemoryStore::new());
    let key = IdempotencyKey::new("k").unwrap().scoped("job");
    let admission = runtime.block_on(engine.admit(&key, Fingerprint::of(&[])));
    std::thread::spawn(move || drop(admission)).join().unwrap();
    assert!(runtime.block_on(engine.drain()));
    let record = runtime.block_on(engine.store().lookup(&key)).unwrap();
    assert!(record.unwrap().is_abandoned());
}

#[test]
fn attempts_are_renewed_after_the_runtime_of_the_first_claim_is_gone() {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let engine = Idempotency::builder(MemoryStore::new())
        .lease(Duration::from_millis(300))
        .build()
        .unwrap();
    let key = |text: &str| IdempotencyKey::new(text).unwrap().scoped("job");
    let work = |engine: Idempotency<MemoryStore>, name: &'static str| async move {
        engine
            .run(&key(name), Fingerprint::of(&[]), |_| async {
                tokio::time::sleep(Duration::from_millis(1500)).await;
                Ok::<_, tower_idempotency::Failure<()>>(1)
            })
            .await
    };
    first.spawn(work(engine.clone(), "a"));
    std::thread::sleep(Duration::from_millis(50));
    let running = second.spawn(work(engine.clone(), "b"));
    std::thread::sleep(Duration::from_millis(50));
    first.shutdown_timeout(Duration::from_millis(100));
    std::thread::sleep(Duration::from_millis(700));
    let record = second.block_on(async { engine.store().lookup(&key("b")).await });
    assert!(!record.unwrap().unwrap().is_abandoned(), "not renewed");
    second.block_on(running).unwrap().unwrap();
}
