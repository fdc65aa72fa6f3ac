//! What the store on PostgreSQL does when the server, or the way to it, fails.

#[path = "support/claims.rs"]
mod claims;
#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/proxy.rs"]
mod proxy;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use claims::{LEASE, acquire, existing, finish, request, unavailable};
use postgres::{Fresh, Server, raw, shared, wait_for};
use proxy::{Mode, Proxy};
use tower_idempotency::{
    Claimed, Completion, Fenced, Outcome, PostgresStore, PreparedStatements, ScopedKey, State,
    Store, StoreError,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_outlives_a_server_that_is_killed() {
    let server = Server::start();
    let fresh = Fresh::with(server.url(), |options| options).await;
    let store = &fresh.store;
    let [claimed, renewed, finished, released] =
        ["claimed", "renewed", "finished", "released"].map(request);
    let [claim, renewal, completed, release] = [
        acquire(store, &claimed).await,
        acquire(store, &renewed).await,
        acquire(store, &finished).await,
        acquire(store, &released).await,
    ];
    assert_eq!(
        store.renew(&renewal, 9 * LEASE).await.unwrap(),
        Fenced::Applied
    );
    let outcome = Outcome::value(b"paid");
    finish(store, &completed, &outcome).await;
    assert_eq!(store.release(&release).await.unwrap(), Fenced::Applied);

    server.kill();
    for key in [&claimed, &renewed, &finished, &released] {
        unavailable(store.lookup(&key.key).await);
        unavailable(store.claim(key).await);
        unavailable(store.complete(&claim, &outcome, None).await);
    }
    server.restart();

    // The window between claim and completion: the attempt goes on where it was.
    let shown = existing(store, &request("claimed")).await;
    assert_eq!((shown.owner, shown.attempt), (*claim.owner(), 1));
    finish(store, &claim, &outcome).await;
    let State::Started { lease_left, .. } = existing(store, &request("renewed")).await.state else {
        panic!("the renewed claim is not started");
    };
    assert!(lease_left > 8 * LEASE, "the renewal was lost");
    // After the completion: a replay, also of our own repetition.
    let again = store
        .complete(&completed, &Outcome::value(b"other"), None)
        .await;
    assert_eq!(again.unwrap(), Completion::Standing(outcome));
    let next = acquire(store, &request("released")).await;
    assert_eq!(next.attempt(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_while_it_works_leaves_no_half_of_anything() {
    let server = Arc::new(Server::start());
    let fresh = Fresh::with(server.url(), |options| options).await;
    for round in 0..3 {
        let workers: Vec<_> = (0..8)
            .map(|worker| {
                let store = fresh.store.clone();
                tokio::spawn(async move {
                    let mut asked = Vec::new();
                    for n in 0.. {
                        let request = request(&format!("{round}-{worker}-{n}"));
                        let claimed = store.claim(&request).await;
                        let Ok(Claimed::Acquired { claim, .. }) = claimed else {
                            asked.push((request, None));
                            return asked;
                        };
                        let outcome = Outcome::value(format!("{round}-{worker}-{n}").as_bytes());
                        let completed = store.complete(&claim, &outcome, None).await;
                        asked.push((request, Some((claim, outcome))));
                        if completed.is_err() {
                            return asked;
                        }
                    }
                    asked
                })
            })
            .collect();
        let busy = raw(server.url()).await;
        wait_for(
            &busy,
            &format!("SELECT count(*) > 50 FROM {}", fresh.table()),
        )
        .await;
        server.kill();
        let mut asked = Vec::new();
        for worker in workers {
            asked.extend(worker.await.unwrap());
        }
        server.restart();
        for (request, done) in asked {
            match done {
                // Granted: on record, and completing again tells the same outcome.
                Some((claim, outcome)) => {
                    let completion = fresh.store.complete(&claim, &outcome, None).await.unwrap();
                    let right = completion == Completion::Recorded
                        || completion == Completion::Standing(outcome);
                    assert!(right, "{completion:?}");
                }
                // Unknown: asking again with the same owner is safe and answers.
                None => assert_eq!(acquire(&fresh.store, &request).await.attempt(), 1),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_reply_was_lost_is_granted_to_the_same_owner_again() {
    let (proxy, fresh) = behind_a_proxy(LIMIT).await;
    let request = request("key");
    proxy.set(Mode::CutReplies);
    unavailable(fresh.store.claim(&request).await);
    let row = owner_on_record(&fresh, &request.key).await;
    assert_eq!(
        row.as_deref(),
        Some(&request.owner.as_bytes()[..]),
        "it was not applied"
    );
    proxy.set(Mode::Pass);
    assert_eq!(acquire(&fresh.store, &request).await.attempt(), 1);
    let shown = existing(&fresh.store, &self::request("key")).await;
    assert_eq!(shown.owner, request.owner);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_lost_reply_is_made_up_for_by_the_store_itself() {
    let (proxy, fresh) = behind_a_proxy(LIMIT).await;
    let store = &fresh.store;
    let request = request("key");
    proxy.set(Mode::CutOneReply);
    let claim = acquire(store, &request).await;
    assert_eq!(claim.attempt(), 1);
    let outcome = Outcome::value(b"paid");
    proxy.set(Mode::CutOneReply);
    let completion = store.complete(&claim, &outcome, None).await.unwrap();
    assert_eq!(completion, Completion::Standing(outcome.clone()));
    proxy.set(Mode::CutRequests);
    let cut = store.release(&claim).await;
    unavailable(cut);
    proxy.set(Mode::Pass);
    assert_eq!(store.release(&claim).await.unwrap(), Fenced::ClaimLost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_move_may_be_repeated_after_its_reply_was_lost() {
    let (proxy, fresh) = behind_a_proxy(LIMIT).await;
    let store = &fresh.store;
    let outcome = Outcome::value(b"paid");
    let claim = acquire(store, &request("key")).await;
    macro_rules! twice {
        ($call:expr) => {{
            proxy.set(Mode::CutReplies);
            unavailable($call.await);
            proxy.set(Mode::Pass);
            $call.await.unwrap()
        }};
    }
    assert_eq!(twice!(store.renew(&claim, LEASE)), Fenced::Applied);
    assert_eq!(twice!(store.annotate(&claim, "charge 7")), Fenced::Applied);
    let data = "7".into();
    assert_eq!(
        twice!(store.checkpoint(&claim, "paid", &data)),
        Fenced::Applied
    );
    let record = store.lookup(claim.key()).await.unwrap().unwrap();
    assert_eq!(
        record.notes.checkpoints.len(),
        1,
        "the repetition was counted"
    );
    assert_eq!(twice!(store.abandon(&claim)), Fenced::Applied);
    let completion = twice!(store.complete(&claim, &outcome, None));
    assert_eq!(completion, Completion::Standing(outcome));
    assert!(
        !twice!(store.remove(claim.key())),
        "it was there to remove again"
    );
    let claim = acquire(store, &request("key")).await;
    assert_eq!(twice!(store.release(&claim)), Fenced::Applied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_takes_longer_than_the_limit_is_unavailable() {
    let (proxy, fresh) = behind_a_proxy(Duration::from_millis(300)).await;
    let claim = acquire(&fresh.store, &request("key")).await;
    proxy.set(Mode::Delay(Duration::from_secs(600)));
    unavailable(fresh.store.claim(&request("key")).await);
    unavailable(
        fresh
            .store
            .complete(&claim, &Outcome::value(b""), None)
            .await,
    );
    proxy.set(Mode::Freeze);
    unavailable(fresh.store.claim(&request("key")).await);
    // And afterwards the store is none the worse: what was late is not taken for what is asked.
    proxy.set(Mode::Pass);
    let record = existing(&fresh.store, &request("key")).await;
    assert_eq!(record.key, *claim.key());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_is_unavailable_and_comes_back() {
    let server = Server::start();
    let limit = Duration::from_millis(300);
    let fresh = Fresh::with(server.url(), |options| options.time_limit(limit)).await;
    let claim = acquire(&fresh.store, &request("key")).await;
    server.freeze();
    for _ in 0..10 {
        unavailable(fresh.store.claim(&request("key")).await);
    }
    let connecting = PostgresStore::options()
        .time_limit(limit)
        .connect(server.url());
    unavailable(connecting.await);
    server.thaw();
    let mut renewed = fresh.store.renew(&claim, LEASE).await;
    // It has a backlog to work off, for which the limit of this test may be too short.
    while renewed.as_ref().is_err_and(StoreError::is_transient) {
        renewed = fresh.store.renew(&claim, LEASE).await;
    }
    assert_eq!(renewed.unwrap(), Fenced::Applied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_an_administrator_ends_are_replaced_without_an_error() {
    let fresh = Fresh::store().await;
    let mut claims = Vec::new();
    for round in 0..5 {
        let claim = acquire(&fresh.store, &request(&round.to_string())).await;
        claims.push(claim);
        end_other_connections(&fresh).await;
        for claim in &claims {
            assert_eq!(
                fresh.store.renew(claim, LEASE).await.unwrap(),
                Fenced::Applied
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_gave_up_waiting_for_another_transaction_is_taken_back() {
    let limit = Duration::from_millis(300);
    let fresh = Fresh::with(shared().url(), |options| options.time_limit(limit)).await;
    let request = request("key");
    fresh.hold_uncommitted(&request.key).await;
    unavailable(fresh.store.claim(&request).await);
    let watcher = raw(shared().url()).await;
    let nobody_waits = format!(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE \
         '%{}%'",
        fresh.schema
    );
    wait_for(&watcher, &nobody_waits).await;
    fresh.raw.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(fresh.store.lookup(&request.key).await.unwrap(), None);
}

async fn behind_a_proxy(limit: Duration) -> (Proxy, Fresh) {
    let proxy = Proxy::before(shared().address().1).await;
    let url = shared().url_through(proxy.port());
    // Not prepared, so that the first reply is that of the move.
    let mut fresh = Fresh::with(&url, |options| {
        let options = options.prepared_statements(PreparedStatements::Never);
        options.time_limit(limit).pool_size(2)
    })
    .await;
    fresh.raw = raw(shared().url()).await;
    (proxy, fresh)
}

async fn end_other_connections(fresh: &Fresh) {
    let end = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%{}%' AND pid <> \
         pg_backend_pid()",
        fresh.schema
    );
    let ended = fresh.raw.query(&end, &[]).await.unwrap();
    assert!(!ended.is_empty(), "the store has no connection");
}

async fn owner_on_record(fresh: &Fresh, key: &ScopedKey) -> Option<Vec<u8>> {
    let select = format!("SELECT owner FROM {} WHERE id = $1", fresh.table());
    let row = fresh
        .raw
        .query_opt(&select, &[&&key.digest()[..]])
        .await
        .unwrap();
    row.map(|row| row.get(0))
}

/// Long enough for a busy machine; nothing that is expected to work waits for it.
const LIMIT: Duration = Duration::from_secs(5);

#[tokio::test]
async fn calls_that_give_up_do_not_each_begin_a_connection() {
    // It accepts, and says nothing.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepted = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&accepted);
    tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            counting.fetch_add(1, Ordering::SeqCst);
            connections.push(connection);
        }
    });
    let mut config = tokio_postgres::Config::new();
    config.host("127.0.0.1").port(port).user("postgres");
    let manager = deadpool_postgres::Manager::new(config, tokio_postgres::NoTls);
    let pool = deadpool_postgres::Pool::builder(manager).max_size(1);
    let options = PostgresStore::options().time_limit(Duration::from_millis(300));
    let store = options.from_pool(pool.build().unwrap()).unwrap();
    // The second one begins while the connection of the first one may still be made.
    for _ in 0..2 {
        unavailable(store.lookup(&request("key").key).await);
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 1);
}
