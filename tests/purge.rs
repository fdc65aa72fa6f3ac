//! Expired records are removed while claims go on.
//!
//! The short tests run with all others and assert on structure: who waits for what, and in which
//! order things end. The long ones remove a million records each and print figures:
//!
//! ```sh
//! cargo test --release --all-features --test purge -- --ignored --nocapture --test-threads=1
//! ```

#[path = "support/claims.rs"]
mod claims;
#[cfg(feature = "postgres")]
#[path = "support/postgres.rs"]
mod postgres;
#[cfg(feature = "redis")]
#[path = "support/redis.rs"]
mod redis;
#[cfg(feature = "sqlite-system")]
#[path = "support/sqlite.rs"]
mod sqlite;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use claims::{acquire, existing, finish, request};
use tower_idempotency::{Outcome, Purged, Store};

const MILLION: usize = 1_000_000;

/// Two purges, as two instances would, and claims beside them until nothing is left to remove. What
/// is claimed meanwhile stands afterwards.
async fn purge_beside_claims<S: Store + Clone>(store: &S, expired: usize) -> Purged {
    let idle = {
        let claimed = AtomicUsize::new(0);
        claim_until(store, "idle", || {
            claimed.fetch_add(1, Ordering::Relaxed) >= 1_000
        })
        .await
    };
    let purging = AtomicBool::new(true);
    let began = Instant::now();
    let purge = async || {
        let mut total = Purged::default();
        loop {
            let purged = store.purge(10_000).await.unwrap();
            assert!(purged.removed <= 10_000);
            total.removed += purged.removed;
            total.unresolved += purged.unresolved;
            if purged.removed == 0 {
                return total;
            }
        }
    };
    let purges = async {
        let (one, two) = tokio::join!(purge(), purge());
        purging.store(false, Ordering::Relaxed);
        (
            Purged::new(one.removed + two.removed, one.unresolved + two.unresolved),
            began.elapsed(),
        )
    };
    let claims = claim_until(store, "beside", || !purging.load(Ordering::Relaxed));
    let ((purged, took), during) = tokio::join!(purges, claims);
    assert_eq!(purged.removed, expired);
    // A purge in a few large steps would have let a few claims between them.
    assert!(
        during.len() >= 20,
        "{} claims beside the purge",
        during.len()
    );
    for (name, count) in [("idle", idle.len()), ("beside", during.len())] {
        for n in (0..count / LANES).step_by(97) {
            existing(store, &request(&format!("{name}-0-{n}"))).await;
        }
    }
    println!(
        "{}: {expired} removed in {took:.1?}; claims idle {}, beside it {}",
        store.properties().name,
        Shown(idle),
        Shown(during)
    );
    purged
}

const LANES: usize = 4;

/// How long each claim took, of several lanes that claim and complete one after another.
async fn claim_until<S: Store + Clone>(
    store: &S,
    name: &str,
    is_over: impl Fn() -> bool,
) -> Vec<Duration> {
    let lane = async |lane: usize| {
        let mut took = Vec::new();
        while !is_over() {
            let request = request(&format!("{name}-{lane}-{}", took.len()));
            let began = Instant::now();
            let claim = acquire(store, &request).await;
            took.push(began.elapsed());
            finish(store, &claim, &Outcome::value(b"paid")).await;
        }
        took
    };
    let lanes = futures_util::future::join_all((0..LANES).map(lane)).await;
    lanes.concat()
}

struct Shown(Vec<Duration>);

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort();
        let at = |percent: usize| sorted[(sorted.len() - 1) * percent / 100];
        write!(
            f,
            "p50 {:.1?} p99 {:.1?} ({})",
            at(50),
            at(99),
            sorted.len()
        )
    }
}

/// So many records whose lease and retention are over, and whose attempts nobody resolved.
#[cfg(any(feature = "sqlite-system", feature = "redis"))]
async fn fill<S: Store + Clone>(store: &S, records: usize, lived: Duration) {
    let next = AtomicUsize::new(0);
    let lane = async |_| {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= records {
                return;
            }
            let mut request = request(&format!("expired-{n}"));
            (request.lease, request.retention) = (lived, lived);
            let _ = acquire(store, &request).await;
        }
    };
    futures_util::future::join_all((0..256).map(lane)).await;
}

#[cfg(feature = "sqlite-system")]
mod on_sqlite {
    use tower_idempotency::SqliteStore;

    use super::*;

    async fn run(expired: usize) {
        let folder = sqlite::Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        fill(&store, expired, Duration::from_micros(1)).await;
        let before = store.commits();
        let purged = purge_beside_claims(&store, expired).await;
        assert_eq!(purged.unresolved, expired);
        assert!(store.commits() - before >= 20);
    }

    #[tokio::test]
    async fn claims_go_on_while_expired_records_are_purged() {
        run(20_000).await;
    }

    #[tokio::test]
    #[ignore = "long: see the head of this file"]
    async fn a_million_expired_records_are_purged_while_claims_go_on() {
        run(MILLION).await;
    }

    /// All moves take their turn in one queue; a purge takes a turn for each of its slices.
    #[tokio::test]
    async fn a_claim_that_is_queued_behind_a_purge_does_not_wait_for_its_end() {
        let folder = sqlite::Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        fill(&store, 20_000, Duration::from_micros(1)).await;
        let mut purge = Box::pin(store.purge(20_000));
        // Its first slice is in the queue.
        assert!(futures_util::poll!(&mut purge).is_pending());
        let _ = acquire(&store, &request("behind")).await;
        // Nobody has asked for the second slice yet.
        assert!(
            store.purge(1).await.unwrap().removed == 1,
            "all of it was one slice"
        );
        let rest = purge.await.unwrap();
        assert_eq!(rest.removed, 20_000 - 1);
    }
}

#[cfg(feature = "postgres")]
mod on_postgres {
    use postgres::{Fresh, Server, raw, wait_for};

    use super::*;

    async fn run(expired: usize) {
        let fresh = Fresh::store().await;
        fresh.insert_completed(expired, "-1 day").await;
        // Its retention is over, its lease is not.
        let live = acquire(&fresh.store, &request("live")).await;
        let outlived = format!(
            "UPDATE {} SET expires_at = now() WHERE key = 'live'",
            fresh.table()
        );
        fresh.raw.batch_execute(&outlived).await.unwrap();
        let purged = purge_beside_claims(&fresh.store, expired).await;
        assert_eq!(purged.unresolved, 0);
        let renewed = fresh.store.renew(&live, Duration::from_secs(60)).await;
        assert_eq!(renewed.unwrap(), tower_idempotency::Fenced::Applied);
    }

    #[tokio::test]
    async fn claims_go_on_while_expired_records_are_purged() {
        run(50_000).await;
    }

    #[tokio::test]
    #[ignore = "long: see the head of this file"]
    async fn a_million_expired_records_are_purged_while_claims_go_on() {
        run(MILLION).await;
    }

    /// A purge is held up in the middle of a batch, with every lock that it takes.
    #[tokio::test]
    async fn a_purge_holds_no_lock_that_a_claim_or_another_purge_waits_for() {
        let server = Server::start();
        // The one that is held up must not run into the store's own limit.
        let patient = Duration::from_secs(600);
        let fresh = Fresh::with(server.url(), |options| options.time_limit(patient)).await;
        let done = acquire(&fresh.store, &request("done")).await;
        finish(&fresh.store, &done, &Outcome::value(b"paid")).await;
        fresh.insert_completed(1_500, "-1 day").await;
        let (schema, table) = (&fresh.schema, fresh.table());
        // Holds up whoever deletes the first row that expires; another purge passes over it.
        let gate = format!(
            "CREATE FUNCTION {schema}.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM \
             pg_advisory_xact_lock(7); RETURN OLD; END $$; CREATE TRIGGER wait BEFORE DELETE ON \
             {table} FOR EACH ROW WHEN (OLD.key = '1') EXECUTE FUNCTION {schema}.wait(); \
             UPDATE {table} SET expires_at = expires_at - interval '1 day' WHERE key = '1'"
        );
        fresh.raw.batch_execute(&gate).await.unwrap();
        fresh
            .raw
            .batch_execute("SELECT pg_advisory_lock(7)")
            .await
            .unwrap();
        let purging = tokio::spawn({
            let store = fresh.store.clone();
            async move { store.purge(1_000).await }
        });
        let watcher = raw(server.url()).await;
        let waiting = "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted";
        wait_for(&watcher, waiting).await;

        // First requests, completions, replays, and the claim of an expired key of the next batch.
        for n in 0..100 {
            let claim = acquire(&fresh.store, &request(&format!("{n}"))).await;
            finish(&fresh.store, &claim, &Outcome::value(b"paid")).await;
            existing(&fresh.store, &request("done")).await;
        }
        let others = fresh.store.purge(1_000).await.unwrap();
        assert_eq!(others.removed, 500, "what the first purge has not locked");
        let row = watcher.query_one(waiting, &[]).await.unwrap();
        assert!(row.get::<_, bool>(0), "somebody else waits for a lock");
        assert!(!purging.is_finished(), "it was not held up");

        fresh
            .raw
            .batch_execute("SELECT pg_advisory_unlock(7)")
            .await
            .unwrap();
        assert_eq!(purging.await.unwrap().unwrap().removed, 1_000);
    }
}

#[cfg(feature = "redis")]
mod on_redis {
    use super::*;

    async fn run(expired: usize) {
        let server = redis::Server::start();
        let store = redis::store_at(&server.url()).await;
        fill(&store, expired, Duration::from_millis(1)).await;
        let purged = purge_beside_claims(&store, expired).await;
        assert_eq!(purged.unresolved, expired);
    }

    #[tokio::test]
    async fn claims_go_on_while_expired_records_are_purged() {
        run(5_000).await;
    }

    /// Redis ends what was resolved by itself; these are attempts whose end nobody knows.
    #[tokio::test]
    #[ignore = "long: see the head of this file"]
    async fn a_million_expired_records_are_purged_while_claims_go_on() {
        run(MILLION).await;
    }
}
