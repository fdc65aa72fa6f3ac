//! How long a test waits for something that must happen before it fails.

use std::future::Future;
use std::time::Duration;

/// Waits for `future`. The bound decides nothing but how soon a test that hangs is reported.
pub async fn patient<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what} took longer than {PATIENCE:?}"),
    }
}

const PATIENCE: Duration = Duration::from_secs(60);
