//! Section 2.3: how long a key is remembered.

use std::time::Duration;

use tokio::time::advance;
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, Store};

use crate::app::{App, paid, pay};

const HOUR: Duration = Duration::from_secs(3_600);

/// Section 2.3: a resource may limit the time of keys, so that they can be removed.
#[tokio::test(start_paused = true)]
async fn keys_are_kept_for_a_limited_time_and_then_removed() {
    let app = App::with_engine(|engine| engine.retention(HOUR), |s| s, paid);
    for key in ["a", "b", "c"] {
        app.send(pay(key)).await;
    }
    advance(HOUR - Duration::from_secs(1)).await;
    assert_eq!(app.store().purge(10).await.unwrap().removed, 0);
    advance(Duration::from_secs(1)).await;
    // In portions, so that no purge is long.
    assert_eq!(app.store().purge(2).await.unwrap().removed, 2);
    assert_eq!(app.store().purge(2).await.unwrap().removed, 1);
    assert!(app.store().is_empty());
}

/// Section 2.3: the expiry policy should be defined and published. There is no layer without one.
#[tokio::test]
async fn every_layer_has_an_expiry_and_publishes_it() {
    let default = IdempotencyLayer::new(MemoryStore::new());
    assert_eq!(default.policy().retention_seconds, 86_400.0);
    let week = Idempotency::builder(MemoryStore::new()).retention(7 * 24 * HOUR);
    let week = IdempotencyLayer::new(week.build().unwrap());
    assert_eq!(week.policy().retention_seconds, 604_800.0);
    assert!(week.policy().to_markdown().contains("604800 seconds"));

    let never = Idempotency::builder(MemoryStore::new()).retention(Duration::MAX);
    assert_eq!(never.build().unwrap_err().setting(), "retention");
}
