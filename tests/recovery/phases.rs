//! A handler in phases that dies between them, and resumes after the last one: on every store.

use std::sync::{Arc, Mutex};

use tower_idempotency::testing::Harness;
use tower_idempotency::{Admission, Idempotency, IdempotencyLayer, OnAbandoned, Settled, Store};

use crate::app::{App, Call, pay};
use crate::engine::{first, key, outcome, replayed, request};
use crate::places::{Place, over_every_store};

over_every_store! {
    a_rerun_sees_the_finished_phases_and_derives_the_same_keys
    a_handler_that_dies_after_any_phase_resumes_after_it
}

/// One process of several that share a store.
fn process(place: &Place) -> Idempotency<Arc<dyn Store>> {
    let settings = Idempotency::builder(place.store.clone());
    let settings = settings.on_abandoned(OnAbandoned::Rerun);
    settings.secret(*b"sixteen bytes at least").build().unwrap()
}

async fn a_rerun_sees_the_finished_phases_and_derives_the_same_keys(place: &Place) {
    let stall = std::time::Duration::from_secs(60 * 60);
    let mut derived = Vec::new();
    // Processes that stall, and do not come back before the end.
    let mut stalled = Vec::new();
    for number in 1..=3_u32 {
        let engine = process(place);
        let admission = engine.admit(&key("k"), request("r")).await.unwrap();
        let guard = first(admission);
        let attempt = guard.attempt().clone();
        assert_eq!(attempt.number(), number);
        for phase in 1..4 {
            let finished = attempt.finished(&phase.to_string());
            let expected = (phase < number).then(|| format!("by {phase}"));
            assert_eq!(finished.as_deref(), expected.as_deref().map(str::as_bytes));
        }
        assert_eq!(attempt.correlation().is_some(), number > 1);
        derived.push((
            attempt.derive("charge").unwrap(),
            attempt.derive("mail").unwrap(),
        ));
        attempt.annotate("order-1").await.unwrap();
        let (phase, data) = (number.to_string(), format!("by {number}"));
        attempt.checkpoint(&phase, data.as_bytes()).await.unwrap();
        if number < 3 {
            place.age(&key("k"), stall).await;
            stalled.push(guard);
        } else {
            assert_eq!(guard.complete(outcome("3")).await, Settled::Recorded);
        }
    }
    assert!(
        derived.iter().all(|keys| *keys == derived[0]),
        "{derived:?}"
    );
    assert_ne!(derived[0].0, derived[0].1);
    for guard in stalled {
        let settled = guard.complete(outcome("late")).await;
        assert_eq!(settled, Settled::Standing(outcome("3")));
    }
    let admission = process(place).admit(&key("k"), request("r")).await.unwrap();
    assert!(matches!(admission, Admission::Replay(_)));
    assert_eq!(replayed(admission), outcome("3"));
}

const PHASES: [&str; 3] = ["reserve", "charge", "ship"];

/// What was done, under which key.
type Effects = Arc<Mutex<Vec<(String, String)>>>;

/// Does each phase that no attempt before has finished, and dies `dies_after` so many in all.
async fn in_phases(call: Call, effects: Effects, dies_after: usize) -> String {
    let attempt = call.attempt().unwrap().clone();
    let mut receipts = Vec::new();
    for phase in PHASES {
        let receipt = match attempt.finished(phase) {
            Some(receipt) => String::from_utf8(receipt.to_vec()).unwrap(),
            None => {
                let key = attempt.derive(phase).unwrap().as_str().to_owned();
                let done = {
                    let mut effects = effects.lock().unwrap();
                    effects.push((phase.to_owned(), key.clone()));
                    effects.len()
                };
                attempt.checkpoint(phase, key.as_bytes()).await.unwrap();
                assert!(call.run > 1 || done != dies_after, "dies");
                key
            }
        };
        receipts.push(receipt);
    }
    receipts.join(",")
}

async fn a_handler_that_dies_after_any_phase_resumes_after_it(place: &Place) {
    for dies_after in 1..=PHASES.len() {
        let effects = Effects::default();
        let layer = IdempotencyLayer::builder(process(place));
        let layer = layer
            .namespace(format!("dies-after-{dies_after}"))
            .build()
            .unwrap();
        let doing = Arc::clone(&effects);
        let app = App::behind(&layer, move |call: Call| {
            in_phases(call, Arc::clone(&doing), dies_after)
        });
        let died = tokio::spawn(app.call(pay("k"))).await;
        assert!(died.unwrap_err().is_panic());
        assert_eq!(effects.lock().unwrap().len(), dies_after);

        let retry = app.send(pay("k")).await;
        assert_eq!(retry.status, 200, "{}", retry.text());
        let effects = effects.lock().unwrap().clone();
        let phases: Vec<_> = effects.iter().map(|(phase, _)| phase.as_str()).collect();
        assert_eq!(phases, PHASES, "each once and in order");
        let keys: Vec<_> = effects.iter().map(|(_, key)| key.as_str()).collect();
        assert_eq!(
            retry.text(),
            keys.join(","),
            "later phases see what earlier ones left"
        );
        app.send(pay("k")).await.assert_replays(&retry);
        assert_eq!(app.runs(), 2);
    }
}
