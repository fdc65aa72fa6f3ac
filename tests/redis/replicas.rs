//! Replicas that acknowledge, and a master that is replaced.

use tower_idempotency::Completion;

use super::proxy::{Mode, Proxy};
use super::support::{Cluster, Server, eventually, options};
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
    let options = options().replica_connections(2);
    let acknowledged = options.clone().replicas(1);
    let acknowledged = acknowledged.connect(&url).await.unwrap();
    let live = request("live");
    let claim = acquire(&acknowledged, &live).await;
    let done = request("done");
    let completed = acquire(&acknowledged, &done).await;
    let outcome = large_outcome();
    let completion = acknowledged.complete(&completed, &outcome, None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    // The new master will have no replica that could acknowledge anything.
    let store = options.connect(&url).await.unwrap();

    master.kill();
    unavailable(store.claim(&another(&live)).await);
    unavailable(acknowledged.claim(&another(&live)).await);
    replica.wait_until("replication", "role", "master");
    let shown = once_it_is_back(&store, &another(&live)).await;
    assert_eq!(shown.owner, live.owner);
    let shown = existing(&store, &another(&done)).await;
    assert_eq!(outcome_of(&shown), &outcome);
    let completion = store.complete(&claim, &outcome, None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    // Applied, and not acknowledged.
    unavailable(acknowledged.claim(&request("new")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_replicas_acknowledged_survives_a_failover_within_a_cluster() {
    let cluster = Cluster::with_replicas(1);
    let options = options().replica_connections(2);
    let acknowledged = options.clone().replicas(1);
    let acknowledged = acknowledged.connect(&cluster.url()).await.unwrap();
    let store = options.connect(&cluster.url()).await.unwrap();
    let live = request("live");
    let claim = acquire(&acknowledged, &live).await;
    let master = cluster.master_of(&store.record_key(&live.key));
    // So many that some lie on the master that is going to be killed, and some do not.
    let mut kept = Vec::new();
    for n in 0..12 {
        let request = request(&format!("done {n}"));
        let completed = acquire(&acknowledged, &request).await;
        let completion = acknowledged
            .complete(&completed, &large_outcome(), None)
            .await;
        assert_eq!(completion.unwrap(), Completion::Recorded);
        kept.push(request);
    }
    let on_it = |request: &&ClaimRequest| {
        cluster.master_of(&store.record_key(&request.key)).port() == master.port()
    };
    let lost_at_first = kept.iter().filter(on_it).count();
    assert!((1..12).contains(&lost_at_first), "{lost_at_first} of 12");
    let replicas = cluster.replicas_of(master);
    assert_eq!(replicas.len(), 1);

    master.kill();
    replicas[0].wait_until("replication", "role", "master");
    let shown = once_it_is_back(&store, &another(&live)).await;
    assert_eq!(shown.owner, live.owner);
    assert!(!shown.is_abandoned());
    for request in &kept {
        let shown = once_it_is_back(&store, &another(request)).await;
        assert_eq!(outcome_of(&shown), &large_outcome());
    }
    let completion = store.complete(&claim, &outcome(b"paid"), None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    // A walk meets every master there is now, and each record once.
    let orphan = acquire(&store, &request("orphan")).await;
    assert_eq!(
        store.abandon(&orphan).await.unwrap(),
        tower_idempotency::Fenced::Applied
    );
    let page = store.abandoned(None, 100).await.unwrap();
    let names: Vec<&str> = page.records.iter().map(|record| record.key.key()).collect();
    assert_eq!(names, ["orphan"]);

    // The old master comes back without memory, as a replica; what it would say is not asked for.
    master.restart();
    master.wait_until("replication", "role", "slave");
    master.wait_until("replication", "master_link_status", "up");
    let shown = existing(&store, &another(&live)).await;
    assert_eq!(outcome_of(&shown), &outcome(b"paid"));
}

/// Asks until the store has found the new master, which its Sentinel may name a little late.
async fn once_it_is_back(store: &RedisStore, request: &ClaimRequest) -> Record {
    for _ in 0..600 {
        match store.claim(request).await {
            Ok(Claimed::Existing(record)) => return record,
            Ok(claimed) => panic!("the failover lost it: {claimed:?}"),
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the store did not find the new master");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_loses_a_claim_that_no_replica_acknowledged_and_only_replicas_says_so() {
    let master = Server::start();
    let network = Proxy::before(master.port()).await;
    let way = network.url();
    let port = way.rsplit(':').next().unwrap();
    let replica = Server::start_with(&["--replicaof", &format!("127.0.0.1 {port}")]);
    replica.wait_until("replication", "master_link_status", "up");
    let options = options().timeout(Duration::from_secs(2));
    let trusting = options.clone().connect(&master.url()).await.unwrap();
    let waiting = options.clone().replicas(1).replica_connections(1);
    let waiting = waiting.connect(&master.url()).await.unwrap();
    let _ = acquire(&waiting, &request("before")).await;

    // From here on the replica hears of nothing.
    network.set(Mode::Silence);
    let _ = acquire(&trusting, &request("trusted")).await;
    unavailable(waiting.claim(&request("waited for")).await);
    master.kill();
    replica.command(&["REPLICAOF", "NO", "ONE"]);

    let promoted = options.connect(&replica.url()).await.unwrap();
    existing(&promoted, &request("before")).await;
    // Granted twice: the first one was acknowledged, and is lost.
    let _ = acquire(&promoted, &request("trusted")).await;
    // Granted once: nobody was told that the first one was.
    let _ = acquire(&promoted, &request("waited for")).await;
}
