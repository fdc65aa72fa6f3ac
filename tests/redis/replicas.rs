//! Replicas that acknowledge, and a master that is replaced.

use tower_idempotency::Completion;

use super::support::{Server, eventually, options};
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn what_replicas_acknowledged_survives_a_failover_by_sentinel() {
    let master = Server::start();
    let replica = Server::replica_of(&master);
    replica.wait_until("replication", "master_link_status", "up");
    let sentinel = Server::sentinel_of(&master);
    sentinel.wait_until("sentinel", "sentinel_masters", "1");
    eventually("the Sentinel to know the replica", || {
        let line = sentinel.info("sentinel", "master0").unwrap_or_default();
        line.contains("slaves=1")
    });
    let url = format!("redis+sentinel://127.0.0.1:{}/main", sentinel.port());
    let store = options()
        .replicas(1)
        .replica_connections(2)
        .connect(&url)
        .await
        .unwrap();
    let live = request("live");
    let claim = acquire(&store, &live).await;
    let done = request("done");
    let completed = acquire(&store, &done).await;
    let outcome = large_outcome();
    let completion = store.complete(&completed, &outcome, None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);

    master.kill();
    let error = unavailable(store.claim(&another(&live)).await);
    assert!(!error.to_string().is_empty());
    replica.wait_until("replication", "role", "master");
    // The new master has no replica that could acknowledge: what is read is read without one.
    let store_without = {
        let mut connected = None;
        for _ in 0..100 {
            let prefix = prefix_of(&store);
            match options().key_prefix(prefix).connect(&url).await {
                Ok(store) => {
                    connected = Some(store);
                    break;
                }
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        connected.expect("the Sentinel names the new master")
    };
    let shown = existing(&store_without, &another(&live)).await;
    assert_eq!(shown.owner, live.owner);
    let shown = existing(&store_without, &another(&done)).await;
    assert_eq!(outcome_of(&shown), &outcome);
    // And the owner goes on, on the connection that it had: it finds the new master by itself.
    let completion = store_without.complete(&claim, &outcome, None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    assert_eq!(outcome_of(&record(&store, &live.key).await), &outcome);
}

/// The store's prefix, by what it calls a record.
fn prefix_of(store: &RedisStore) -> String {
    let name = store.record_key(&key("any"));
    name.split('{').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_too_few_replicas_acknowledge_is_unavailable() {
    let server = Server::start();
    let limit = Duration::from_secs(2);
    let options = options().replicas(1).replica_connections(1).timeout(limit);
    let store = options.connect(&server.url()).await.unwrap();
    let error = unavailable(store.claim(&request("key")).await);
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    // It was applied all the same: unknown is what the error means.
    assert_eq!(record(&store, &key("key")).await.attempt, 1);
}
