//! Spans and events: what they tell, and what they never show.

use std::fmt::{self, Write as _};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use futures_util::FutureExt;
use http::Response;
use tower_idempotency::{
    FingerprintRecipe, IdempotencyKey, IdempotencyLayer, MemoryStore, MissingKey, OnOutage,
    RetentionOverride, Scope, ScopedKey,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::app::{App, Gate, data, paid, pay, post, steps};

/// Everything that was told, one line for each span, record and event.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    /// Listens on this thread until the guard is dropped.
    fn listen() -> (Self, tracing::subscriber::DefaultGuard) {
        let told = Self::default();
        let subscriber = tracing_subscriber::registry().with(told.clone());
        (told, tracing::subscriber::set_default(subscriber))
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn add(&self, start: String, fields: impl FnOnce(&mut Line)) {
        let mut line = Line(start);
        fields(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    #[track_caller]
    fn assert_one(&self, parts: &[&str]) {
        let lines = self.lines();
        let matches = |line: &&String| parts.iter().all(|part| line.contains(part));
        let found = lines.iter().filter(matches).count();
        assert_eq!(found, 1, "{parts:?} in {lines:#?}");
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> tracing_subscriber::Layer<S> for Told {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let start = format!("span {}", attributes.metadata().name());
        self.add(start, |line| attributes.record(line));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let name = context.span(id).map_or("", |span| span.name());
        self.add(format!("record {name}"), |line| values.record(line));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let inside = context
            .event_span(event)
            .map_or("nothing", |span| span.name());
        let start = format!("{} in {inside}", event.metadata().level());
        self.add(start, |line| event.record(line));
    }
}

fn with_word(word: RetentionOverride) -> Response<Body> {
    let mut response = Response::new(Body::from("secret-answer"));
    response.extensions_mut().insert(word);
    response
}

#[tokio::test]
async fn neither_key_nor_scope_nor_body_nor_credentials_are_ever_shown() {
    let (told, _guard) = Told::listen();
    let scope = || Scope::from_fn(|_| Some("secret-scope".to_owned()));
    let request = || {
        pay("secret-key@example.com")
            .header("authorization", "Bearer secret-token")
            .body("secret-body")
    };
    for path in ["/kept", "/live", "/unknown", "/panic"] {
        let app = App::with(
            |s| s.scope(scope()),
            |call| async move {
                let attempt = call.attempt().unwrap();
                attempt.annotate("secret-order").await.unwrap();
                attempt
                    .checkpoint("secret-step", b"secret-data")
                    .await
                    .unwrap();
                match call.head.uri.path() {
                    "/kept" => Response::new(Body::from("secret-answer")),
                    "/live" => with_word(RetentionOverride::Live),
                    "/unknown" => with_word(RetentionOverride::LeaveUnknown),
                    _ => panic!("secret-panic"),
                }
            },
        );
        let call = |ask: crate::app::Ask| AssertUnwindSafe(app.call(ask)).catch_unwind();
        let here = || {
            let mut ask = post(path).key("secret-key@example.com").body("secret-body");
            ask = ask.header("authorization", "Bearer secret-token");
            ask
        };
        for ask in [
            here(),
            here(),
            here().body("secret-other"),
            here().key("secret-key"),
        ] {
            let _ = call(ask).await;
        }
    }
    let full = IdempotencyLayer::builder(MemoryStore::new().max_entries(0));
    let full = App::behind(&full.scope(scope()).build().unwrap(), paid);
    full.send(request()).await;

    let lines = told.lines();
    let hash = ScopedKey::new(
        "http",
        "secret-scope",
        &IdempotencyKey::new("secret-key@example.com").unwrap(),
    );
    assert!(
        lines.iter().any(|line| line.contains(&hash.log_id())),
        "{lines:#?}"
    );
    for line in &lines {
        assert!(!line.contains("secret"), "{line}");
    }
}

#[tokio::test]
async fn the_span_names_the_store_the_hash_of_the_key_and_the_outcome() {
    let (told, _guard) = Told::listen();
    let app = App::new(paid);
    app.send(pay("k")).await;
    let key = ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap());
    told.assert_one(&["span idempotency", "store=\"memory\""]);
    told.assert_one(&[
        "record idempotency",
        &format!("key_hash=\"{}\"", key.log_id()),
    ]);
    told.assert_one(&["record idempotency", "idempotency.outcome=\"executed\""]);
}

#[tokio::test]
async fn each_way_to_be_answered_has_its_own_outcome() {
    let (told, _guard) = Told::listen();
    let kept = App::with(
        |s| s.request_limit(9),
        |call| async move {
            match call.head.uri.path() {
                "/live" => with_word(RetentionOverride::Live),
                "/unknown" => with_word(RetentionOverride::LeaveUnknown),
                _ => Response::new(Body::empty()),
            }
        },
    );
    let refusing = App::with(
        |s| {
            let refused = || Response::new(bytes::Bytes::new());
            s.authorize_replay(move |_, _| async move { Err(refused()) })
        },
        paid,
    );
    let full = |on_outage| {
        let layer = IdempotencyLayer::builder(MemoryStore::new().max_entries(0));
        App::behind(&layer.on_outage(on_outage).build().unwrap(), paid)
    };
    let ask = |path: &str| post(path).key(path);
    for (app, request, outcome) in [
        (&kept, pay("k"), "executed"),
        (&kept, pay("k"), "replayed"),
        (&kept, pay("k").body("1 THB"), "mismatch"),
        (&kept, pay("k").body("1,000 THB!"), "rejected"),
        (&kept, ask("/live"), "executed"),
        (&kept, ask("/live"), "response_not_kept"),
        (&kept, ask("/unknown"), "executed"),
        (&kept, ask("/unknown"), "outcome_unknown"),
        (&refusing, pay("k"), "executed"),
        (&refusing, pay("k"), "replay_refused"),
        (&full(OnOutage::Reject), pay("k"), "store_error"),
        (&full(OnOutage::PassThrough), pay("k"), "unprotected"),
    ] {
        let before = told.lines().len();
        app.send(request).await;
        let lines = told.lines().split_off(before);
        let outcomes: Vec<_> = lines
            .iter()
            .filter_map(|line| line.split("idempotency.outcome=").nth(1))
            .collect();
        assert_eq!(outcomes, [format!("{outcome:?}")], "{lines:#?}");
    }
}

#[tokio::test]
async fn what_the_handler_tells_is_inside_the_span_with_and_without_its_client() {
    let (told, _guard) = Told::listen();
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |_| {
        let held = held.clone();
        async move {
            tracing::info!("before");
            held.pass().await;
            tracing::info!("after");
        }
    });
    tokio::select! {
        biased;
        _ = app.call(pay("k")) => unreachable!("the handler is held up"),
        () = gate.entered() => {}
    }
    gate.open();
    assert!(app.idempotency.drain().await);
    told.assert_one(&["INFO in idempotency", "before"]);
    told.assert_one(&["INFO in idempotency", "after"]);
}

#[tokio::test]
async fn a_panic_is_an_error_event_with_the_hash_of_its_key() {
    let (told, _guard) = Told::listen();
    let app = App::new(|_| async { panic!("out of cheese") as () });
    let _ = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
    let key = ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap());
    told.assert_one(&[
        "ERROR",
        "kind=\"outcome_unknown\"",
        &format!("key_hash={}", key.log_id()),
        "attempt=1",
    ]);
}

#[tokio::test]
async fn a_body_that_fails_while_it_is_held_is_an_error_event() {
    let (told, _guard) = Told::listen();
    let app = App::new(|_| async { steps([data("1"), crate::app::broken()]) });
    drop(app.call(pay("k")).await.unwrap());
    told.assert_one(&["ERROR", "kind=\"outcome_unknown\""]);
}

#[tokio::test]
async fn a_key_that_looks_like_personal_data_is_warned_of() {
    let (told, _guard) = Told::listen();
    App::new(paid).send(pay("0812345678")).await;
    told.assert_one(&["WARN", "looks like personal data", "key_hash="]);
}

#[tokio::test]
async fn after_a_change_of_recipe_a_retry_is_replayed_and_said_to_be_not_comparable() {
    let (told, _guard) = Told::listen();
    let store = MemoryStore::new();
    let app = |recipe| {
        let layer = IdempotencyLayer::builder(store.clone()).fingerprint(recipe);
        App::behind(&layer.build().unwrap(), paid)
    };
    let first = app(FingerprintRecipe::raw()).send(pay("k")).await;
    let retry = app(FingerprintRecipe::raw().json()).send(pay("k")).await;
    retry.assert_replays(&first);
    told.assert_one(&["WARN", "other settings", "key_hash="]);
}

#[tokio::test]
async fn a_store_that_takes_no_key_is_warned_of() {
    let (told, _guard) = Told::listen();
    let layer = IdempotencyLayer::new(MemoryStore::new().max_entries(0));
    App::behind(&layer, paid).send(pay("k")).await;
    let lines = told.lines();
    let warned = lines.iter().filter(|line| line.contains("op=\"claim\""));
    assert!(warned.clone().count() > 0, "{lines:#?}");
    assert!(
        warned
            .clone()
            .all(|line| line.starts_with(&Level::WARN.to_string()))
    );
}

#[tokio::test]
async fn ordinary_traffic_warns_of_nothing() {
    let (told, _guard) = Told::listen();
    let app = App::with(|s| s.missing_key(MissingKey::Reject), paid);
    for request in [
        pay("k"),
        pay("k"),
        pay("k").body("1"),
        pay("\""),
        post("/pay"),
    ] {
        app.send(request).await;
    }
    for line in told.lines() {
        assert!(
            !line.starts_with("WARN") && !line.starts_with("ERROR"),
            "{line}"
        );
    }
}
