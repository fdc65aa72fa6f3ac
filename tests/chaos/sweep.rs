//! Reconciles what is abandoned: asks the ledger, and resolves the record as it says.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use tower_idempotency::{Outcome, Resolution, Store};

use super::ledger::Ledger;

/// Sweeps for ever. Two of these may run at once.
pub async fn sweep(store: Arc<dyn Store>, ledger: Ledger) {
    loop {
        let mut after = None;
        // A store that does not answer is asked again in the next round.
        while let Ok(page) = store.abandoned(after.as_ref(), 100).await {
            for record in page.records {
                let body = ledger.reconcile(record.key.key(), record.attempt).await;
                let resolution = match body {
                    Some(body) => Resolution::Completed(outcome(&body)),
                    None => Resolution::Released,
                };
                // Its worker may have come back, or the other sweeper may have been faster.
                let _ = store.resolve(&record, &resolution).await;
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// What the handler answered, or would have answered.
fn outcome(body: &str) -> Outcome {
    let mut headers = HeaderMap::new();
    let json = HeaderValue::from_static("application/json");
    headers.insert(header::CONTENT_TYPE, json);
    Outcome::response(StatusCode::CREATED, &headers, &[body.as_bytes()], None)
}
