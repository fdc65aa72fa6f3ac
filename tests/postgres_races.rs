//! What becomes of claims on PostgreSQL when others are quicker: other transactions, other processes,
//! and records that vanish.

#[path = "support/claims.rs"]
mod claims;
#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/proxy.rs"]
mod proxy;

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use claims::{acquire, existing, finish, key, outcome, request, rerun, unavailable};
use postgres::{Fresh, Server, database_with_isolation, raw, shared, unused_name, wait_for};
use proxy::{Mode, Proxy};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    Claimed, Completion, Fenced, Fingerprint, Outcome, PostgresStore, Resolution, State, Store,
};

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_a_transaction_that_inserted_the_key_and_shows_what_it_committed() {
    for level in LEVELS {
        let (fresh, url) = with_isolation(level).await;
        let request = request("key");
        fresh.hold_uncommitted(&request.key).await;
        let claiming = tokio::spawn({
            let (store, request) = (fresh.store.clone(), request.clone());
            async move { store.claim(&request).await }
        });
        wait_for_a_waiter(&fresh, &url).await;
        fresh.raw.batch_execute("COMMIT").await.unwrap();
        let claimed = claiming.await.unwrap().unwrap();
        let Claimed::Existing(record) = claimed else {
            panic!("{level}: two claims of one key were granted");
        };
        assert_ne!(record.owner, request.owner, "{level}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_a_transaction_that_inserted_the_key_and_takes_what_it_gave_up() {
    for level in LEVELS {
        let (fresh, url) = with_isolation(level).await;
        let request = request("key");
        fresh.hold_uncommitted(&request.key).await;
        let claiming = tokio::spawn({
            let (store, request) = (fresh.store.clone(), request.clone());
            async move { acquire(&store, &request).await }
        });
        wait_for_a_waiter(&fresh, &url).await;
        fresh.raw.batch_execute("ROLLBACK").await.unwrap();
        let claim = claiming.await.unwrap();
        let record = fresh.store.lookup(&request.key).await.unwrap().unwrap();
        assert_eq!(record.owner, *claim.owner(), "{level}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_no_longer_than_its_limit_and_is_answered_when_asked_again() {
    for level in LEVELS {
        let limit = Duration::from_millis(300);
        let url = database_with_isolation(level).await;
        let fresh = Fresh::with(&url, |options| options.time_limit(limit)).await;
        let request = request("key");
        fresh.hold_uncommitted(&request.key).await;
        unavailable(fresh.store.claim(&request).await);
        fresh.raw.batch_execute("COMMIT").await.unwrap();
        let record = existing(&fresh.store, &request).await;
        assert_ne!(record.owner, request.owner, "{level}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fenced_move_goes_on_with_what_another_transaction_left() {
    for level in LEVELS {
        let (fresh, url) = with_isolation(level).await;
        let claim = acquire(&fresh.store, &request("key")).await;
        // Somebody, a person perhaps, touches the row and takes a while.
        let touch = format!("BEGIN; UPDATE {} SET correlation = 'seen'", fresh.table());
        fresh.raw.batch_execute(&touch).await.unwrap();
        let completing = tokio::spawn({
            let (store, claim) = (fresh.store.clone(), claim.clone());
            async move { store.complete(&claim, &Outcome::value(b"paid"), None).await }
        });
        wait_for_a_waiter(&fresh, &url).await;
        fresh.raw.batch_execute("COMMIT").await.unwrap();
        let completion = completing.await.unwrap().unwrap();
        assert_eq!(completion, Completion::Recorded, "{level}");
        let record = fresh.store.lookup(claim.key()).await.unwrap().unwrap();
        assert_eq!(record.notes.correlation.as_deref(), Some("seen"), "{level}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_are_those_after_the_wait_for_a_lock() {
    for level in LEVELS {
        let (fresh, url) = with_isolation(level).await;
        let claim = acquire(&fresh.store, &request("key")).await;
        let touch = format!("BEGIN; UPDATE {} SET correlation = 'seen'", fresh.table());
        fresh.raw.batch_execute(&touch).await.unwrap();
        let lease = Duration::from_secs(7_200);
        let renewing = tokio::spawn({
            let (store, claim) = (fresh.store.clone(), claim.clone());
            async move { store.renew(&claim, lease).await }
        });
        wait_for_a_waiter(&fresh, &url).await;
        let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let waited_until: i64 = fresh.raw.query_one(clock, &[]).await.unwrap().get(0);
        fresh.raw.batch_execute("COMMIT").await.unwrap();
        assert_eq!(renewing.await.unwrap().unwrap(), Fenced::Applied);
        let record = fresh.store.lookup(claim.key()).await.unwrap().unwrap();
        let State::Started { lease_until, .. } = record.state else {
            panic!("not started: {record:?}");
        };
        let counted_from = lease_until.as_micros() - lease.as_micros() as u64;
        assert!(
            counted_from >= waited_until as u64,
            "{level}: before the wait"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_vanishes_after_the_claim_lost_against_it_is_not_taken_for_a_grant() {
    let (proxy, fresh) = behind_a_proxy().await;
    let request = request("key");
    fresh.hold_uncommitted(&request.key).await;
    let claiming = tokio::spawn({
        let (store, request) = (fresh.store.clone(), request.clone());
        async move { acquire(&store, &request).await }
    });
    wait_for_a_waiter(&fresh, shared().url()).await;
    // The claim lost; before it hears of that, the record is gone.
    proxy.set(Mode::HoldReplies);
    fresh.raw.batch_execute("COMMIT").await.unwrap();
    proxy.holds_something().await;
    let delete = format!("DELETE FROM {}", fresh.table());
    fresh.raw.batch_execute(&delete).await.unwrap();
    proxy.set(Mode::Pass);
    let claim = claiming.await.unwrap();
    let record = fresh.store.lookup(&request.key).await.unwrap().unwrap();
    assert_eq!((record.owner, record.attempt), (*claim.owner(), 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_vanishes_before_it_is_taken_over_is_claimed_afresh() {
    for state in ["stalled", "released", "expired"] {
        let (proxy, fresh) = behind_a_proxy().await;
        let first = acquire(&fresh.store, &request("key")).await;
        match state {
            "stalled" => fresh.age(first.key(), Duration::from_secs(3600)).await,
            "released" => assert_eq!(fresh.store.release(&first).await.unwrap(), Fenced::Applied),
            _ => fresh.age(first.key(), Duration::from_secs(48 * 3600)).await,
        }
        proxy.set(Mode::HoldReplies);
        let claiming = tokio::spawn({
            let store = fresh.store.clone();
            async move { acquire(&store, &rerun("key")).await }
        });
        // It saw the record that may be claimed, but does not know it yet.
        proxy.holds_something().await;
        let delete = format!("DELETE FROM {}", fresh.table());
        fresh.raw.batch_execute(&delete).await.unwrap();
        proxy.set(Mode::Pass);
        assert_eq!(claiming.await.unwrap().attempt(), 1, "{state}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_somebody_else_took_first_is_shown() {
    for state in ["stalled", "released", "expired"] {
        let (proxy, fresh) = behind_a_proxy().await;
        let direct = PostgresStore::options().schema(&fresh.schema);
        let direct = direct.connect(shared().url()).await.unwrap();
        let first = acquire(&direct, &request("key")).await;
        match state {
            "stalled" => fresh.age(first.key(), Duration::from_secs(3600)).await,
            "released" => assert_eq!(direct.release(&first).await.unwrap(), Fenced::Applied),
            _ => fresh.age(first.key(), Duration::from_secs(48 * 3600)).await,
        }
        proxy.set(Mode::HoldReplies);
        let claiming = tokio::spawn({
            let store = fresh.store.clone();
            async move { existing(&store, &rerun("key")).await }
        });
        proxy.holds_something().await;
        let quicker = acquire(&direct, &rerun("key")).await;
        proxy.set(Mode::Pass);
        let shown = claiming.await.unwrap();
        assert_eq!(
            (shown.owner, shown.attempt),
            (*quicker.owner(), 2),
            "{state}"
        );
    }
}

/// Owner and attempt are still those that the claim saw: what it saw of the times is not true any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_whose_owner_came_back_first_is_not_taken_from_it() {
    for (state, hours) in [("stalled", 1), ("expired", 48)] {
        for back in ["renewed", "completed"] {
            let (proxy, fresh) = behind_a_proxy().await;
            let direct = PostgresStore::options().schema(&fresh.schema);
            let direct = direct.connect(shared().url()).await.unwrap();
            let first = acquire(&direct, &request("key")).await;
            fresh
                .age(first.key(), Duration::from_secs(hours * 3600))
                .await;
            proxy.set(Mode::HoldReplies);
            let claiming = tokio::spawn({
                let store = fresh.store.clone();
                async move { existing(&store, &rerun("key")).await }
            });
            proxy.holds_something().await;
            if back == "renewed" {
                let renewed = direct.renew(&first, Duration::from_secs(600)).await;
                assert_eq!(renewed.unwrap(), Fenced::Applied);
            } else {
                finish(&direct, &first, &Outcome::value(b"paid")).await;
            }
            proxy.set(Mode::Pass);
            let shown = claiming.await.unwrap();
            assert_eq!(shown.owner, *first.owner(), "{state}, {back}");
            assert_eq!(shown.attempt, 1, "{state}, {back}");
            assert!(!shown.is_abandoned(), "{state}, {back}");
        }
    }
}

#[tokio::test]
async fn neither_resolution_crosses_a_lease_that_is_live_or_has_moved() {
    let found = Resolution::Completed(Outcome::value(b"found"));
    for resolution in [found, Resolution::Released] {
        let fresh = Fresh::store().await;
        let store = &fresh.store;
        let claim = acquire(store, &request("key")).await;
        let live = store.lookup(claim.key()).await.unwrap().unwrap();
        let resolved = store.resolve(&live, &resolution).await.unwrap();
        assert_eq!(resolved, Fenced::ClaimLost, "a live lease");
        fresh.age(claim.key(), Duration::from_secs(3600)).await;
        let seen = store.lookup(claim.key()).await.unwrap().unwrap();
        // The owner comes back and goes again: there is another lease, which is over as well.
        let renewed = store.renew(&claim, Duration::from_secs(600)).await;
        assert_eq!(renewed.unwrap(), Fenced::Applied);
        assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        let resolved = store.resolve(&seen, &resolution).await.unwrap();
        assert_eq!(resolved, Fenced::ClaimLost, "a lease that has moved");
        let seen = store.lookup(claim.key()).await.unwrap().unwrap();
        let resolved = store.resolve(&seen, &resolution).await.unwrap();
        assert_eq!(resolved, Fenced::Applied);
    }
}

/// Every granted claim is on record, however often records come and go meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_claim_is_granted_without_a_record_while_somebody_deletes_all_the_time() {
    for level in LEVELS {
        let (fresh, url) = with_isolation(level).await;
        let deleting = tokio::spawn({
            let raw = raw(&url).await;
            // What is acquired is told apart from what may go by its state.
            let delete = format!("DELETE FROM {} WHERE state = 'completed'", fresh.table());
            async move {
                loop {
                    raw.batch_execute(&delete).await.unwrap();
                }
            }
        });
        let claiming: Vec<_> = (0..6)
            .map(|_| {
                let store = fresh.store.clone();
                tokio::spawn(async move {
                    let mut granted = 0;
                    for _ in 0..150 {
                        let request = request("key");
                        if let Claimed::Acquired { claim, .. } =
                            store.claim(&request).await.unwrap()
                        {
                            granted += 1;
                            let record = store.lookup(&request.key).await.unwrap();
                            let record = record.expect("a granted claim has a record");
                            assert_eq!(record.owner, request.owner);
                            finish(&store, &claim, &Outcome::value(b"")).await;
                        }
                    }
                    granted
                })
            })
            .collect();
        let mut granted = 0;
        for claiming in claiming {
            granted += claiming.await.unwrap();
        }
        assert!(granted > 1, "{level}: nothing raced");
        deleting.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_record_that_nobody_purged_is_renewed_by_one_of_two() {
    let fresh = Fresh::store().await;
    for n in 0..20 {
        let name = n.to_string();
        let old = acquire(&fresh.store, &request(&name)).await;
        finish(&fresh.store, &old, &Outcome::value(b"old")).await;
        fresh.age(old.key(), Duration::from_secs(48 * 3600)).await;
        let (one, two) = (request(&name), request(&name));
        let (one, two) = tokio::join!(fresh.store.claim(&one), fresh.store.claim(&two));
        let granted = [one.unwrap(), two.unwrap()]
            .iter()
            .filter(|claimed| matches!(claimed, Claimed::Acquired { .. }))
            .count();
        assert_eq!(granted, 1);
    }
}

/// Runs this program twice more, and lets both claim the same thousand keys at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_processes_one_wins_each_key() {
    if let Ok(racing) = std::env::var("TEST_RACE") {
        let (url, schema) = racing.split_once(' ').unwrap();
        return race(url, schema).await;
    }
    let fresh = Fresh::store().await;
    let mut racers = Vec::new();
    for _ in 0..2 {
        let mut racer = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "of_two_processes_one_wins_each_key",
                "--nocapture",
            ])
            .env("TEST_RACE", format!("{} {}", shared().url(), fresh.schema))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(racer.stdout.take().unwrap()).lines();
        racers.push((racer, lines));
    }
    for (_, lines) in &mut racers {
        while lines.next_line().await.unwrap().expect("the racer starts") != "ready" {}
    }
    for (racer, _) in &mut racers {
        racer
            .stdin
            .take()
            .unwrap()
            .write_all(b"go\n")
            .await
            .unwrap();
    }
    let mut won: Vec<BTreeSet<u32>> = Vec::new();
    for (racer, lines) in &mut racers {
        let mut keys = BTreeSet::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(key) = line.strip_prefix("won ") {
                keys.insert(key.parse().unwrap());
            }
        }
        assert!(racer.wait().await.unwrap().success());
        won.push(keys);
    }
    assert!(won[0].is_disjoint(&won[1]), "both won a key");
    assert_eq!(won[0].len() + won[1].len(), 1_000, "nobody won a key");
    assert!(won.iter().all(|keys| keys.len() > 10), "they did not race");
}

async fn race(url: &str, schema: &str) {
    let store = PostgresStore::options()
        .schema(schema)
        .connect(url)
        .await
        .unwrap();
    println!("ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin())
        .read_line(&mut line)
        .await
        .unwrap();
    let claiming: Vec<_> = (0..8)
        .map(|lane| {
            let store = store.clone();
            tokio::spawn(async move {
                for n in (lane..1_000).step_by(8) {
                    let request = request(&n.to_string());
                    match store.claim(&request).await.unwrap() {
                        Claimed::Acquired { claim, .. } => {
                            println!("won {n}");
                            finish(&store, &claim, &Outcome::value(b"")).await;
                        }
                        Claimed::Existing(record) => assert_ne!(record.owner, request.owner),
                    }
                }
            })
        })
        .collect();
    for claiming in claiming {
        claiming.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_of_another_process_sees_the_change_and_holds_no_connection() {
    let fresh = Fresh::with(shared().url(), |options| options.pool_size(1)).await;
    let other = PostgresStore::options().schema(&fresh.schema).pool_size(1);
    let other = other.connect(shared().url()).await.unwrap();
    let claim = acquire(&fresh.store, &request("key")).await;
    let max = Duration::from_secs(3600);
    let waiting = async {
        // More waiters than connections, and claims pass between them all the same.
        let waiting = (0..8).map(|_| other.changed(claim.key(), claim.owner(), max));
        futures_util::future::join_all(waiting).await
    };
    let working = async {
        for n in 0..20 {
            let _ = acquire(&other, &request(&n.to_string())).await;
        }
        finish(&fresh.store, &claim, &Outcome::value(b"paid")).await;
    };
    let (waited, ()) = tokio::join!(waiting, working);
    assert!(waited.iter().all(Result::is_ok), "{waited:?}");
    let shown = existing(&other, &request("key")).await;
    assert_eq!(*outcome(&shown), Outcome::value(b"paid"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_instances_that_start_at_once_migrate_once() {
    let server = Server::start();
    for level in LEVELS {
        let set = format!("ALTER DATABASE postgres SET default_transaction_isolation = '{level}'");
        raw(server.url()).await.batch_execute(&set).await.unwrap();
        let schema = unused_name();
        let migrating: Vec<_> = (0..10)
            .map(|_| {
                let (url, schema) = (server.url().to_owned(), schema.clone());
                tokio::spawn(async move {
                    let store = PostgresStore::options()
                        .schema(schema)
                        .connect(&url)
                        .await?;
                    store.migrate().await?;
                    store.check().await
                })
            })
            .collect();
        for migrating in migrating {
            migrating
                .await
                .unwrap()
                .unwrap_or_else(|error| panic!("{level}: {error:?}"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_gone_once_and_one_who_finds_it_gone_begins_anew() {
    let fresh = Fresh::store().await;
    let claim = acquire(&fresh.store, &request("key")).await;
    let gone = key("key");
    let (one, two) = tokio::join!(fresh.store.remove(&gone), fresh.store.remove(&gone));
    assert_ne!(one.unwrap(), two.unwrap());
    let late = fresh
        .store
        .complete(&claim, &Outcome::value(b""), None)
        .await;
    assert_eq!(late.unwrap(), Completion::ClaimLost);
    assert_eq!(acquire(&fresh.store, &request("key")).await.attempt(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_another_process_removed_or_replaced_is_not_remembered() {
    let fresh = Fresh::store().await;
    let other = PostgresStore::options().schema(&fresh.schema);
    let other = other.connect(shared().url()).await.unwrap();
    for _ in 0..3 {
        let claim = acquire(&fresh.store, &request("key")).await;
        finish(&fresh.store, &claim, &Outcome::value(b"ours")).await;
        assert!(other.remove(claim.key()).await.unwrap());
        let theirs = acquire(&other, &request("key")).await;
        finish(&other, &theirs, &Outcome::value(b"theirs")).await;
        let shown = existing(&fresh.store, &request("key")).await;
        assert_eq!(*outcome(&shown), Outcome::value(b"theirs"));
        assert!(other.remove(claim.key()).await.unwrap());
    }
}

/// Its reply was lost and its lease ended; while its second question is under way, somebody takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_who_asks_again_does_not_get_back_what_somebody_else_took_over() {
    let (proxy, fresh) = behind_a_proxy().await;
    let direct = PostgresStore::options().schema(&fresh.schema);
    let direct = direct.connect(shared().url()).await.unwrap();
    let asked = request("key");
    let _ = acquire(&direct, &asked).await;
    fresh.age(&asked.key, Duration::from_secs(3600)).await;
    proxy.set(Mode::HoldReplies);
    let claiming = tokio::spawn({
        let (store, asked) = (fresh.store.clone(), asked.clone());
        async move { existing(&store, &asked).await }
    });
    // It saw its own record, but does not know it yet.
    proxy.holds_something().await;
    let taken = acquire(&direct, &rerun("key")).await;
    let stands = direct.lookup(&asked.key).await.unwrap().unwrap();
    proxy.set(Mode::Pass);
    let shown = claiming.await.unwrap();
    assert_eq!((shown.owner, shown.attempt), (*taken.owner(), 2));
    let after = direct.lookup(&asked.key).await.unwrap().unwrap();
    let lease_until = |record: &tower_idempotency::Record| match record.state {
        State::Started { lease_until, .. } => lease_until,
        _ => panic!("not started: {record:?}"),
    };
    assert_eq!(lease_until(&after), lease_until(&stands));
    assert_eq!(after.expires_at, stands.expires_at);
}

/// Between the look and the takeover the key is removed and claimed anew for another request, by the
/// same owner and so with the same attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_another_request_is_not_taken_over_in_place_of_the_one_that_was_seen() {
    let (proxy, fresh) = behind_a_proxy().await;
    let direct = PostgresStore::options().schema(&fresh.schema);
    let direct = direct.connect(shared().url()).await.unwrap();
    let mut asked = request("key");
    let _ = acquire(&direct, &asked).await;
    fresh.age(&asked.key, Duration::from_secs(3600)).await;
    proxy.set(Mode::HoldReplies);
    let claiming = tokio::spawn({
        let store = fresh.store.clone();
        async move { store.claim(&rerun("key")).await }
    });
    proxy.holds_something().await;
    assert!(direct.remove(&asked.key).await.unwrap());
    asked.fingerprint = Fingerprint::of(&[b"another request"]);
    let _ = acquire(&direct, &asked).await;
    fresh.age(&asked.key, Duration::from_secs(3600)).await;
    proxy.set(Mode::Pass);
    let Claimed::Existing(shown) = claiming.await.unwrap().unwrap() else {
        panic!("the record of another request was taken over");
    };
    assert_eq!(shown.fingerprint, asked.fingerprint);
    assert_eq!((shown.owner, shown.attempt), (asked.owner, 1));
}

async fn with_isolation(level: &str) -> (Fresh, String) {
    let url = database_with_isolation(level).await;
    let limit = Duration::from_secs(30);
    let fresh = Fresh::with(&url, |options| options.time_limit(limit)).await;
    (fresh, url)
}

async fn behind_a_proxy() -> (Proxy, Fresh) {
    let proxy = Proxy::before(shared().address().1).await;
    let url = shared().url_through(proxy.port());
    // Not prepared, so that the first reply is that of the claim.
    let mut fresh = Fresh::with(&url, |options| {
        options
            .prepared_statements(tower_idempotency::PreparedStatements::Never)
            .time_limit(Duration::from_secs(30))
    })
    .await;
    fresh.raw = raw(shared().url()).await;
    (proxy, fresh)
}

/// Waits until a statement on this store's table waits for a lock.
async fn wait_for_a_waiter(fresh: &Fresh, url: &str) {
    let watcher = raw(url).await;
    let waits = format!(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE \
         '%{}%'",
        fresh.schema
    );
    wait_for(&watcher, &waits).await;
}
