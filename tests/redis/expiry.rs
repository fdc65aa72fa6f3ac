//! Records that end, and what is told of those that nobody resolved.

use tower_idempotency::{Completion, Cursor, Fenced};

use super::support::{Server, shared_url, store_at};
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_resolved_ends_in_the_server_when_it_expires() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let completed = acquire(&store, &request("completed")).await;
    let completion = store
        .complete(&completed, &large_outcome(), Some(HOUR))
        .await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    let released = acquire(&store, &request("released")).await;
    assert_eq!(store.release(&released).await.unwrap(), Fenced::Applied);
    for (claim, limit) in [(&completed, HOUR), (&released, 24 * HOUR)] {
        let name = store.record_key(claim.key());
        let redis::Value::Int(left) = server.command(&["PTTL", &name]) else {
            panic!("no number");
        };
        let left = Duration::from_millis(u64::try_from(left).unwrap());
        assert!(left <= limit && left > limit - HOUR / 2, "{left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_unknown_that_a_claim_replaced_is_told_of_by_the_next_purge_of_any_process() {
    let options = support::options();
    let store = options.connect(&shared_url()).await.unwrap();
    for _ in 0..3 {
        let _ = acquire(&store, &request("key")).await;
        store.age(&key("key"), 48 * HOUR).await.unwrap();
    }
    let _ = acquire(&store, &request("key")).await;
    let elsewhere = options.connect(&shared_url()).await.unwrap();
    let told = elsewhere.purge(2).await.unwrap();
    assert_eq!(
        (told.removed, told.unresolved),
        (2, 2),
        "no more than the limit"
    );
    let told = elsewhere.purge(100).await.unwrap();
    assert_eq!((told.removed, told.unresolved), (1, 1));
    let told = store.purge(100).await.unwrap();
    assert_eq!(told.removed, 0, "nothing is told of twice");
    existing(&store, &request("key")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn erasing_a_record_leaves_no_key_behind() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let _ = acquire(&store, &request("key")).await;
    store.age(&key("key"), 48 * HOUR).await.unwrap();
    let _ = acquire(&store, &request("key")).await;
    assert!(store.remove(&key("key")).await.unwrap());
    assert_eq!(server.command(&["DBSIZE"]), redis::Value::Int(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_goes_on_over_a_restart_and_shows_no_record_twice() {
    let server = Server::durable();
    let store = store_at(&server.url()).await;
    for n in 0..1_500 {
        let claim = acquire(&store, &request(&format!("{n}"))).await;
        if n % 3 == 0 {
            assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        }
    }
    let mut shown = std::collections::BTreeSet::new();
    let mut after: Option<Cursor> = None;
    let mut pages = 0;
    loop {
        let page = store.abandoned(after.as_ref(), 40).await.unwrap();
        for record in page.records {
            assert!(record.is_abandoned());
            assert!(shown.insert(record.key.key().to_owned()), "shown twice");
        }
        pages += 1;
        if pages == 3 {
            // Another run of the server has another order of its keys.
            server.kill();
            server.restart();
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(shown.len(), 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_sees_the_records_of_every_node_of_a_cluster() {
    let store = store_at(&support::shared_cluster().url()).await;
    let mut expected = std::collections::BTreeSet::new();
    for n in 0..60 {
        let name = format!("{n}");
        let claim = acquire(&store, &request(&name)).await;
        assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        expected.insert(name);
    }
    let mut shown = Vec::new();
    let mut after: Option<Cursor> = None;
    loop {
        let page = store.abandoned(after.as_ref(), 7).await.unwrap();
        shown.extend(
            page.records
                .iter()
                .map(|record| record.key.key().to_owned()),
        );
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(shown.len(), 60);
    assert_eq!(
        shown.into_iter().collect::<std::collections::BTreeSet<_>>(),
        expected
    );
}

/// On a cluster of its own: a slot is taken from one node and given to another.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_slot_moves_is_found_where_it_went() {
    let cluster = support::Cluster::start();
    let store = store_at(&cluster.url()).await;
    let moving = request("key");
    let claim = acquire(&store, &moving).await;
    let name = store.record_key(&moving.key);
    let slot: u16 =
        redis::from_redis_value(cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", &name]))
            .unwrap();
    let slot = slot.to_string();
    let id = |node: &Server| -> String {
        redis::from_redis_value(node.command(&["CLUSTER", "MYID"])).unwrap()
    };
    let holds = |node: &&Server| node.try_command(&["EXISTS", &name]).is_ok();
    let from = cluster.nodes().iter().find(holds).unwrap();
    let to = cluster
        .nodes()
        .iter()
        .find(|node| node.port() != from.port())
        .unwrap();
    to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from)]);
    from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to)]);
    let port = to.port().to_string();
    from.command(&["MIGRATE", "127.0.0.1", &port, &name, "0", "5000"]);
    // Half-way: the old node knows the slot and not the key.
    let shown = existing(&store, &another(&moving)).await;
    assert_eq!(shown.owner, moving.owner);
    for node in [to, from] {
        node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id(to)]);
    }
    let completion = store.complete(&claim, &large_outcome(), None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    let shown = existing(&store, &another(&moving)).await;
    assert_eq!(outcome_of(&shown), &large_outcome());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_of_another_store_is_refused() {
    let store = store_at(&shared_url()).await;
    let error = store
        .abandoned(Some(&Cursor::new("nonsense")), 10)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
}
