//! What the moves cost on PostgreSQL, in things that can be counted: bytes of write-ahead log,
//! transactions, index entries, scans.

#[path = "support/claims.rs"]
mod claims;
#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/proxy.rs"]
mod proxy;

use std::time::Duration;

use claims::{acquire, existing, finish, key, request, rerun};
use postgres::{Fresh, Server, raw, shared, wait_for};
use proxy::Proxy;
use tokio_postgres::Client;
use tower_idempotency::testing::Harness;
use tower_idempotency::{Fenced, Fingerprint, Outcome, Store};

#[tokio::test]
async fn a_replay_a_duplicate_in_flight_and_a_mismatch_write_nothing() {
    // Of its own: whatever another test writes would be counted.
    let server = Server::start();
    let fresh = Fresh::with(server.url(), |options| options).await;
    let (store, raw) = (&fresh.store, &fresh.raw);
    let done = acquire(store, &request("done")).await;
    finish(store, &done, &Outcome::value(&[7; 260])).await;
    let _ = acquire(store, &request("running")).await;
    let mut mismatch = request("done");
    mismatch.fingerprint = Fingerprint::of(&[b"another"]);

    let mut written = Vec::new();
    // The server writes something of its own now and then, which is not what is counted.
    for _ in 0..5 {
        let before = written_so_far(raw).await;
        for _ in 0..50 {
            existing(store, &request("done")).await;
            existing(store, &request("running")).await;
            existing(store, &mismatch).await;
            store.lookup(&key("done")).await.unwrap();
            store.abandoned(None, 10).await.unwrap();
            store.purge(10).await.unwrap();
        }
        let after = written_so_far(raw).await;
        written.push((after.0 - before.0, after.1 - before.1));
    }
    assert!(
        written.contains(&(0, 0)),
        "bytes and transaction ids: {written:?}"
    );

    // And the measure sees what is written.
    let before = written_so_far(raw).await;
    let _ = acquire(store, &request("first")).await;
    let after = written_so_far(raw).await;
    assert!(
        after.0 > before.0 && after.1 > before.1,
        "nothing was counted"
    );
}

#[tokio::test]
async fn a_claim_takes_as_many_round_trips_as_it_is_said_to_take() {
    let proxy = Proxy::before(shared().address().1).await;
    let url = shared().url_through(proxy.port());
    let mut fresh = Fresh::with(&url, |options| options.pool_size(1)).await;
    fresh.raw = raw(shared().url()).await;
    let store = &fresh.store;
    for (state, expected) in [
        ("first", 1),
        ("replay", 1),
        ("in flight", 1),
        ("mismatch", 1),
        ("again", 2),
        ("stalled", 2),
        ("expired", 2),
        ("released", 2),
    ] {
        let mut taken = 0;
        // The first time every statement is prepared, which is a round trip more.
        for n in 0..2 {
            let name = format!("{state} {n}");
            let (first, mut next) = (request(&name), rerun(&name));
            if state != "first" {
                let claim = acquire(store, &first).await;
                match state {
                    "replay" => finish(store, &claim, &Outcome::value(b"")).await,
                    "mismatch" => next.fingerprint = Fingerprint::of(&[b"another"]),
                    "again" => next.owner = first.owner,
                    "stalled" => fresh.age(claim.key(), Duration::from_secs(3600)).await,
                    "expired" => fresh.age(claim.key(), Duration::from_secs(48 * 3600)).await,
                    "released" => {
                        let released = store.release(&claim).await.unwrap();
                        assert_eq!(released, Fenced::Applied);
                    }
                    _ => {}
                }
            }
            let before = proxy.round_trips();
            let _ = store.claim(&next).await.unwrap();
            taken = proxy.round_trips() - before;
        }
        assert_eq!(taken, expected, "{state}");
    }
    let claim = acquire(store, &request("completed")).await;
    let before = proxy.round_trips();
    finish(store, &claim, &Outcome::value(b"")).await;
    assert_eq!(proxy.round_trips() - before, 1, "completing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_touches_no_index() {
    let fresh = Fresh::store().await;
    let completing: Vec<_> = (0..8)
        .map(|worker| {
            let store = fresh.store.clone();
            tokio::spawn(async move {
                for n in 0..250 {
                    let claim = acquire(&store, &request(&format!("{worker}-{n}"))).await;
                    finish(&store, &claim, &Outcome::value(&[7; 260])).await;
                }
            })
        })
        .collect();
    for completing in completing {
        completing.await.unwrap();
    }
    let counts = format!(
        "FROM pg_stat_user_tables WHERE schemaname = '{}' AND relname = 'idempotency_keys'",
        fresh.schema
    );
    let Fresh { store, raw, .. } = fresh;
    // Backends tell what they did when they end.
    drop(store);
    wait_for(&raw, &format!("SELECT n_tup_upd >= 2000 {counts}")).await;
    let counted = format!("SELECT n_tup_upd, n_tup_hot_upd {counts}");
    let row = raw.query_one(&counted, &[]).await.unwrap();
    let (updates, heap_only): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(updates, 2_000);
    assert!(heap_only * 10 >= updates * 9, "{heap_only} of {updates}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_searches_the_index_whether_anything_is_expired_or_not() {
    for analyzed in [false, true] {
        let fresh = Fresh::store().await;
        fresh.insert_completed(50_000, "1 day").await;
        if analyzed {
            let analyze = format!("ANALYZE {}", fresh.table());
            fresh.raw.batch_execute(&analyze).await.unwrap();
        }
        let purged = fresh.store.purge(1_000).await.unwrap();
        assert_eq!(purged.removed, 0);
        fresh.insert_completed(5_000, "-1 day").await;
        let purged = fresh.store.purge(2_500).await.unwrap();
        assert_eq!(purged.removed, 2_500);
        let Fresh {
            store, raw, schema, ..
        } = fresh;
        drop(store);
        let statistics = format!(
            "FROM pg_stat_user_tables t JOIN pg_stat_user_indexes i USING (relid) WHERE \
             t.schemaname = '{schema}' AND i.indexrelname = 'idempotency_keys_expires_at'"
        );
        // One look and three batches; the table as a whole is read by nobody.
        wait_for(&raw, &format!("SELECT i.idx_scan >= 4 {statistics}")).await;
        let counted = format!("SELECT t.seq_scan {statistics}");
        let whole: i64 = raw.query_one(&counted, &[]).await.unwrap().get(0);
        // Making the index and analysing read it; a purge would have added four.
        assert!(
            whole <= 2,
            "analyzed: {analyzed}; read as a whole {whole} times"
        );
    }
}

#[tokio::test]
async fn a_walk_through_a_large_table_goes_in_pages_that_end() {
    let fresh = Fresh::store().await;
    fresh.insert_completed(35_000, "1 day").await;
    for n in 0..3 {
        let claim = acquire(&fresh.store, &request(&n.to_string())).await;
        fresh.age(claim.key(), Duration::from_secs(3600)).await;
    }
    let (mut pages, mut found) = (0, 0);
    let mut after = None;
    loop {
        let page = fresh.store.abandoned(after.as_ref(), 100).await.unwrap();
        pages += 1;
        found += page.records.len();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!((pages, found), (4, 3));
}

/// Bytes of write-ahead log, and transaction ids that were given out.
async fn written_so_far(raw: &Client) -> (i64, i64) {
    let row = raw
        .query_one(
            "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, \
             pg_snapshot_xmax(pg_current_snapshot())::text::bigint",
            &[],
        )
        .await
        .unwrap();
    (row.get(0), row.get(1))
}
