//! A sweeper and a retry close what is abandoned: on every store.

use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::testing::Harness;
use tower_idempotency::{Admission, Idempotency, ScopedKey, Store, Verdict};

use crate::engine::{first, key, outcome, replayed, request};
use crate::places::{Place, over_every_store};

over_every_store! {
    a_sweeper_closes_each_record_as_the_reconciler_says
    sweepers_side_by_side_and_retries_agree
    a_retry_asks_at_once
    an_expired_record_is_asked_about_before_it_is_purged
}

const HOUR: Duration = Duration::from_secs(60 * 60);

/// One process of several that share a store. Its reconciler reads the answer from what the handler
/// attached.
fn process(place: &Place) -> Idempotency<Arc<dyn Store>> {
    let builder = Idempotency::builder(place.store.clone());
    builder
        .reconciler(|record| async move {
            match record.notes.correlation.as_deref() {
                Some("paid") => {
                    let receipt = record.notes.checkpoint("receipt").cloned();
                    let receipt = receipt.ok_or("no receipt")?;
                    let receipt = std::str::from_utf8(&receipt).map_err(|_| "no text")?;
                    Ok(Verdict::Happened(outcome(receipt)))
                }
                Some("not paid") => Ok(Verdict::NotHappened),
                Some("away") => Err("the gateway is away"),
                _ => Ok(Verdict::Unknown),
            }
        })
        .build()
        .unwrap()
}

/// A process claims the key, tells how it will have ended, and dies.
async fn die(place: &Place, key: &ScopedKey, ended: &str) {
    let engine = process(place);
    let guard = first(engine.admit(key, request("r")).await.unwrap());
    guard.attempt().annotate(ended).await.unwrap();
    let receipt = format!("receipt of {}", key.key());
    let noted = guard
        .attempt()
        .checkpoint("receipt", receipt.as_bytes())
        .await;
    noted.unwrap();
    let _ = guard.abandon().await;
}

async fn a_sweeper_closes_each_record_as_the_reconciler_says(place: &Place) {
    for ended in ["paid", "not paid", "away", "nobody knows"] {
        for n in 0..3 {
            die(
                place,
                &key(&format!("{ended} {n}").replace(' ', "-")),
                ended,
            )
            .await;
        }
    }
    let engine = process(place);
    let swept = engine.sweeper().concurrency(4).sweep().await.unwrap();
    assert_eq!((swept.seen, swept.complete), (12, true), "{swept:?}");
    assert_eq!((swept.happened, swept.not_happened), (3, 3), "{swept:?}");
    assert_eq!((swept.failed, swept.unknown), (3, 3), "{swept:?}");
    assert_eq!(swept.purged.removed, 0);
    for n in 0..3 {
        let paid = engine.admit(&key(&format!("paid-{n}")), request("r")).await;
        let receipt = format!("receipt of paid-{n}");
        assert_eq!(replayed(paid.unwrap()), outcome(&receipt));
        let free = engine
            .admit(&key(&format!("not-paid-{n}")), request("r"))
            .await;
        let again = first(free.unwrap());
        assert_eq!(again.attempt().number(), 2);
        let _ = again.complete(outcome("2")).await;
        let held = engine.admit(&key(&format!("away-{n}")), request("r")).await;
        assert!(matches!(held.unwrap(), Admission::OutcomeUnknown));
    }
}

async fn sweepers_side_by_side_and_retries_agree(place: &Place) {
    let keys: Vec<_> = (0..20).map(|n| key(&n.to_string())).collect();
    for key in &keys {
        die(place, key, "paid").await;
    }
    let sweepers: Vec<_> = (0..3)
        .map(|_| {
            let engine = process(place);
            tokio::spawn(async move { engine.sweeper().sweep().await.unwrap() })
        })
        .collect();
    let engine = process(place);
    for key in &keys {
        let expected = outcome(&format!("receipt of {}", key.key()));
        let admission = engine.admit(key, request("r")).await.unwrap();
        assert_eq!(replayed(admission), expected);
    }
    let mut happened = 0;
    for sweeper in sweepers {
        let swept = sweeper.await.unwrap();
        assert_eq!(swept.seen, swept.happened + swept.overtaken, "{swept:?}");
        happened += swept.happened;
    }
    assert!(happened <= keys.len());
}

async fn a_retry_asks_at_once(place: &Place) {
    die(place, &key("paid"), "paid").await;
    die(place, &key("free"), "not paid").await;
    die(place, &key("held"), "nobody knows").await;
    let engine = process(place);
    let admit = async |name| engine.admit(&key(name), request("r")).await.unwrap();
    assert_eq!(replayed(admit("paid").await), outcome("receipt of paid"));
    let again = first(admit("free").await);
    assert_eq!(again.attempt().number(), 2);
    assert_eq!(again.attempt().finished("receipt"), None);
    assert!(matches!(admit("held").await, Admission::OutcomeUnknown));
    let other = engine.admit(&key("held"), request("other")).await.unwrap();
    assert!(matches!(other, Admission::Mismatch { .. }));
    let _ = again.release().await;
}

async fn an_expired_record_is_asked_about_before_it_is_purged(place: &Place) {
    for (name, ended) in [("paid", "paid"), ("held", "nobody knows")] {
        die(place, &key(name), ended).await;
    }
    for name in ["paid", "held"] {
        place.age(&key(name), 48 * HOUR).await;
    }
    let engine = process(place);
    let swept = engine.sweeper().sweep().await.unwrap();
    assert_eq!((swept.happened, swept.unknown), (1, 1), "{swept:?}");
    assert_eq!((swept.purged.removed, swept.purged.unresolved), (1, 1));
    let paid = engine.admit(&key("paid"), request("r")).await.unwrap();
    assert_eq!(replayed(paid), outcome("receipt of paid"));
}
