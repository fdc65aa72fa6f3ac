//! Counters, gauges and histograms, by name and label.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use http::Response;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, MissingKey, OnOutage, RetentionOverride, Verdict,
};

use crate::app::{App, Gate, paid, pay, post};

/// Sums by name and labels; of histograms, how often something was recorded.
#[derive(Clone, Default)]
struct Sums(Arc<Mutex<BTreeMap<String, f64>>>);

impl Sums {
    fn get(&self, name: &str) -> f64 {
        self.0.lock().unwrap().get(name).copied().unwrap_or(0.0)
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().keys().cloned().collect()
    }

    fn cell(&self, key: &Key) -> Arc<Cell> {
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name += &format!(" {}={}", label.key(), label.value());
        }
        let sums = self.clone();
        Arc::new(Cell { sums, name })
    }
}

struct Cell {
    sums: Sums,
    name: String,
}

impl Cell {
    fn add(&self, value: f64) {
        let mut sums = self.sums.0.lock().unwrap();
        *sums.entry(self.name.clone()).or_default() += value;
    }
}

impl CounterFn for Cell {
    fn increment(&self, value: u64) {
        self.add(f64::from(u32::try_from(value).unwrap()));
    }
    fn absolute(&self, _: u64) {
        unreachable!("counters only grow");
    }
}

impl GaugeFn for Cell {
    fn increment(&self, value: f64) {
        self.add(value);
    }
    fn decrement(&self, value: f64) {
        self.add(-value);
    }
    fn set(&self, value: f64) {
        let mut sums = self.sums.0.lock().unwrap();
        sums.insert(self.name.clone(), value);
    }
}

impl HistogramFn for Cell {
    fn record(&self, value: f64) {
        assert!(value >= 0.0);
        self.add(1.0);
    }
}

impl Recorder for Sums {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.cell(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.cell(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.cell(key))
    }
}

/// Runs `work` with a recorder of its own.
fn measured(work: impl Future<Output = ()>) -> Sums {
    let sums = Sums::default();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().build().unwrap();
    metrics::with_local_recorder(&sums, || runtime.block_on(work));
    sums
}

fn with_word(word: RetentionOverride) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(word);
    response
}

#[test]
fn each_answer_is_counted_once_by_its_outcome() {
    let sums = measured(async {
        let app = App::with(
            |s| s.missing_key(MissingKey::Reject).request_limit(9),
            |call| async move {
                match call.head.uri.path() {
                    "/live" => with_word(RetentionOverride::Live),
                    "/unknown" => with_word(RetentionOverride::LeaveUnknown),
                    _ => Response::new(Body::empty()),
                }
            },
        );
        for path in ["/live", "/unknown", "/pay"] {
            for _ in 0..3 {
                app.send(post(path).key(path)).await;
            }
        }
        app.send(pay("/pay").body("other")).await;
        app.send(pay("/pay").body("far too long")).await;
        app.send(post("/pay")).await;
        app.send(pay("\"")).await;
        app.send(crate::app::ask("GET", "/pay").key("k")).await;
    });
    for (outcome, count) in [
        ("executed", 3.0),
        ("replayed", 2.0),
        ("response_not_kept", 2.0),
        ("outcome_unknown", 2.0),
        ("mismatch", 1.0),
        ("rejected", 1.0),
        ("missing_key", 1.0),
        ("invalid_key", 1.0),
        ("in_flight", 0.0),
        ("store_error", 0.0),
    ] {
        let name = format!("idempotency.requests outcome={outcome} store=memory");
        assert_eq!(sums.get(&name), count, "{name} of {:?}", sums.names());
    }
}

#[test]
fn the_loser_of_a_race_is_no_failure_of_the_store() {
    let sums = measured(async {
        let gate = Gate::new();
        let held = gate.clone();
        let app = App::new(move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                paid(call).await
            }
        });
        let losers = async {
            gate.entered().await;
            for _ in 0..4 {
                assert_eq!(app.send(pay("k")).await.status, 409);
            }
            gate.open();
        };
        tokio::join!(app.send(pay("k")), losers);
    });
    let in_flight = "idempotency.requests outcome=in_flight store=memory";
    assert_eq!(sums.get(in_flight), 4.0);
    for name in sums.names() {
        assert!(!name.contains("store_error"), "{name}");
    }
}

#[test]
fn every_store_call_is_timed_by_its_kind() {
    let sums = measured(async {
        let kept = App::new(paid);
        kept.send(pay("k")).await;
        kept.send(pay("k")).await;
        let released = App::new(|_| async { http::StatusCode::BAD_GATEWAY });
        released.send(pay("k")).await;
    });
    for (op, count) in [("claim", 3.0), ("complete", 1.0), ("release", 1.0)] {
        let name = format!("idempotency.store.duration op={op} store=memory error.type=");
        assert_eq!(sums.get(&name), count, "{name} of {:?}", sums.names());
    }
}

#[test]
fn a_failed_store_call_is_timed_as_such_and_unprotected_runs_are_counted() {
    let sums = measured(async {
        for on_outage in [OnOutage::Reject, OnOutage::PassThrough] {
            let layer = IdempotencyLayer::builder(MemoryStore::new().max_entries(0));
            let layer = layer.on_outage(on_outage).build().unwrap();
            App::behind(&layer, paid).send(pay("k")).await;
        }
    });
    let failed = "idempotency.store.duration op=claim store=memory error.type=store_error";
    assert!(sums.get(failed) >= 2.0, "{:?}", sums.names());
    for outcome in ["store_error", "unprotected"] {
        let name = format!("idempotency.requests outcome={outcome} store=memory");
        assert_eq!(sums.get(&name), 1.0, "{name}");
    }
}

#[test]
fn attempts_in_flight_are_counted_up_and_down_whatever_their_end() {
    let sums = measured(async {
        let app = App::new(|call| async move {
            assert_ne!(call.head.uri.path(), "/panic");
        });
        app.send(pay("k")).await;
        app.send(pay("k")).await;
        let panicking = post("/panic").key("p");
        let _ = AssertUnwindSafe(app.call(panicking)).catch_unwind().await;
        assert!(app.idempotency.drain().await);
    });
    let names = sums.names();
    assert!(
        names.contains(&"idempotency.in_flight".to_owned()),
        "{names:?}"
    );
    assert_eq!(sums.get("idempotency.in_flight"), 0.0);
}

#[test]
fn faults_are_counted_by_their_kind() {
    let sums = measured(async {
        let app = App::new(|_| async { panic!("out of cheese") as () });
        let _ = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
    });
    assert_eq!(sums.get("idempotency.faults kind=outcome_unknown"), 1.0);
}

#[test]
fn what_becomes_of_abandoned_keys_is_counted() {
    let sums = measured(async {
        let app = App::with_engine(
            |engine| {
                engine.reconciler(|record| async move {
                    match record.key.key() {
                        "a" => Ok(Verdict::NotHappened),
                        "b" => Ok(Verdict::Unknown),
                        _ => Err("the gateway is away"),
                    }
                })
            },
            |layer| layer,
            |_| async { panic!("out of cheese") as () },
        );
        tokio::time::pause();
        for key in ["a", "b", "c", "d"] {
            let _ = AssertUnwindSafe(app.call(pay(key))).catch_unwind().await;
        }
        let mut sweeper = app.idempotency.sweeper();
        let _ = sweeper.sweep().await.unwrap();
        tokio::time::advance(Duration::from_secs(48 * 60 * 60)).await;
        let _ = sweeper.sweep().await.unwrap();
    });
    for (verdict, count) in [("not_happened", 1.0), ("unknown", 2.0), ("failed", 4.0)] {
        let name = format!("idempotency.reconciled verdict={verdict} store=memory");
        assert_eq!(sums.get(&name), count, "{name}: {:?}", sums.names());
    }
    for (state, count) in [("resolved", 1.0), ("unresolved", 3.0)] {
        assert_eq!(
            sums.get(&format!("idempotency.purged state={state}")),
            count
        );
    }
    for gauge in ["idempotency.abandoned", "idempotency.abandoned.oldest"] {
        let name = format!("{gauge} store=memory");
        assert!(sums.names().contains(&name), "{:?}", sums.names());
    }
}

#[test]
fn the_sizes_of_kept_responses_are_recorded() {
    let sums = measured(async {
        let app = App::new(paid);
        app.send(pay("k")).await;
        app.send(pay("k")).await;
        let live = App::new(|_| async { with_word(RetentionOverride::Live) });
        live.send(pay("k")).await;
    });
    assert_eq!(sums.get("idempotency.response.size"), 1.0);
}

#[test]
fn no_name_and_no_label_holds_a_key() {
    let sums = measured(async {
        let app = App::new(paid);
        for request in [
            pay("canary"),
            pay("canary"),
            pay("canary").body("1"),
            pay("\"canary"),
        ] {
            app.send(request).await;
        }
    });
    assert!(!sums.names().is_empty());
    for name in sums.names() {
        assert!(!name.contains("canary"), "{name}");
    }
}
