//! Processes that share a store are killed, stopped, drained and cut off, and so is the store, while
//! clients send their requests again and again. Then a checker looks whether every promise was kept.
//!
//! `scripts/chaos` makes a long run and prints its tables; see [`a_long_run`]. The short runs are the
//! same in small.

#![cfg(all(unix, feature = "axum", feature = "sqlite-system", feature = "testing"))]

#[cfg(feature = "postgres")]
#[path = "../support/postgres.rs"]
mod postgres_server;
#[cfg(any(feature = "postgres", feature = "redis"))]
#[path = "../support/proxy.rs"]
mod proxy;
#[cfg(feature = "redis")]
#[path = "../support/redis.rs"]
mod redis_server;
#[path = "../support/sqlite.rs"]
mod sqlite;

mod check;
mod child;
mod clients;
mod fleet;
mod ledger;
mod plan;
mod points;
mod report;
mod run;
mod world;

use std::time::Duration;

use self::child::Variant;
use self::plan::{Kind, Operation, Plan, Size};
use self::run::{Report, run};

const SHORT: Size = Size {
    operations: 100,
    in_flight: 24,
    faults: 6,
    pause: Duration::from_millis(150),
};

async fn short(kind: Kind, variant: Variant) -> Report {
    let seed = number("CHAOS_SEED", 1);
    println!("seed {seed}");
    let report = run(kind, variant, seed, SHORT).await;
    println!("{}", report.document());
    report
}

#[track_caller]
fn assert_clean(report: &Report) {
    assert!(report.findings.is_clean(), "{}", report.complaints());
    assert!(report.effects >= report.operations, "{}", report.document());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_sqlite_no_effect_is_repeated_or_lost_whatever_breaks() {
    assert_clean(&short(Kind::Sqlite, Variant::Hold).await);
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_postgres_no_effect_is_repeated_or_lost_whatever_breaks() {
    assert_clean(&short(Kind::Postgres, Variant::Hold).await);
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_redis_no_effect_is_repeated_or_lost_whatever_breaks() {
    assert_clean(&short(Kind::Redis, Variant::Hold).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ledger_that_refuses_stale_attempts_makes_reruns_safe() {
    assert_clean(&short(Kind::Sqlite, Variant::RerunFenced).await);
}

/// The checker can fail: this store breaks a promise, and it says which.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_grants_what_is_held_is_found_by_its_duplicates() {
    let report = short(Kind::Sqlite, Variant::BrokenStore).await;
    assert!(
        !report.findings.duplicates.is_empty(),
        "{}",
        report.document()
    );
}

#[test]
fn the_same_seed_gives_the_same_schedule() {
    for kind in Kind::ALL {
        let plan = Plan::new(7, *kind, SHORT);
        assert_eq!(plan, Plan::new(7, *kind, SHORT));
        assert_ne!(plan.process_lane, Plan::new(8, *kind, SHORT).process_lane);
    }
    let operations = |seed| {
        (0..100)
            .map(|n| Operation::nth(seed, n))
            .collect::<Vec<_>>()
    };
    assert_eq!(operations(7), operations(7));
    assert_ne!(operations(7), operations(8));
}

/// Every store that this was built with, or those that `CHAOS_STORES` names, as the other variables
/// say; see `scripts/chaos`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes some ten minutes for each store: scripts/chaos"]
async fn a_long_run() {
    let stores = std::env::var("CHAOS_STORES").unwrap_or_default();
    let named = |kind: &Kind| stores.is_empty() || stores.split(',').any(|one| one == kind.name());
    let variants = std::env::var("CHAOS_VARIANTS").unwrap_or_else(|_| "hold".to_owned());
    let size = Size {
        operations: number("CHAOS_OPERATIONS", 50_000),
        in_flight: number("CHAOS_IN_FLIGHT", 100),
        faults: number("CHAOS_FAULTS", 300),
        pause: Duration::from_millis(number("CHAOS_PAUSE_MS", 1_000)),
    };
    let seed = number("CHAOS_SEED", rand::random());
    println!("seed {seed}, {size:?}");
    let mut reports = Vec::new();
    for kind in Kind::ALL.iter().filter(|kind| named(kind)) {
        for variant in Variant::ALL {
            if variants.split(';').any(|one| one == variant.name()) {
                let report = run(*kind, variant, seed, size).await;
                println!("{}\n{}", report.document(), report.complaints());
                reports.push(report);
            }
        }
    }
    println!("\n{}", report::header());
    for report in &reports {
        println!("{}", report.row());
    }
    for report in &reports {
        if matches!(report.variant, Variant::Hold | Variant::RerunFenced) {
            assert_clean(report);
        }
    }
}

/// What the runs start as their processes.
#[test]
#[ignore = "started by the other tests"]
fn child_process() {
    child::serve_if_asked();
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    let set = std::env::var(name).ok();
    set.map_or(default, |set| {
        let parsed = set.parse().ok();
        parsed.unwrap_or_else(|| panic!("{name} is a number, not {set}"))
    })
}
