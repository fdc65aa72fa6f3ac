//! A scope is erased from among many other records, further apart than one step of a walk.

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

use claims::{acquire, existing, request};
use tower_idempotency::{ClaimRequest, ScopedKey, Store};

/// A customer's, one of every so many.
fn of_customer(n: usize) -> ClaimRequest {
    let mut request = request(&format!("{n}"));
    let joined = format!("\0\0\0\x04\0\0\0\x06httpuser-7{n}");
    request.key = ScopedKey::from_bytes(joined.as_bytes()).unwrap();
    request
}

const OF_CUSTOMER: usize = 20;

/// So many records of others, with those of the customer between them.
async fn fill<S: Store + Clone>(store: &S, others: usize) {
    let every = others / OF_CUSTOMER;
    for from in (0..others).step_by(64) {
        let claims = (from..others.min(from + 64)).map(async |n| {
            let _ = acquire(store, &request(&format!("{n}"))).await;
            if n % every == 0 {
                let _ = acquire(store, &of_customer(n)).await;
            }
        });
        futures_util::future::join_all(claims).await;
    }
}

async fn erase_in_steps(store: &impl Store, limit: usize) -> usize {
    let mut total = 0;
    loop {
        match store.erase("", "user-7", limit).await.unwrap() {
            0 => return total,
            erased => {
                assert!(erased <= limit);
                total += erased;
            }
        }
    }
}

#[cfg(any(feature = "sqlite-system", feature = "redis"))]
async fn a_scope_goes_and_the_others_stay<S: Store + Clone>(store: &S, others: usize) {
    fill(store, others).await;
    assert_eq!(erase_in_steps(store, 7).await, OF_CUSTOMER);
    for n in (0..others).step_by(others / OF_CUSTOMER) {
        assert_eq!(store.lookup(&of_customer(n).key).await.unwrap(), None);
    }
    for n in 0..others {
        existing(store, &request(&format!("{n}"))).await;
    }
}

#[cfg(feature = "sqlite-system")]
mod on_sqlite {
    use tower_idempotency::{SqliteStore, StoreErrorKind};

    use super::*;
    use claims::of_kind;

    #[tokio::test]
    async fn a_scope_is_erased_from_among_many_records() {
        let folder = sqlite::Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        a_scope_goes_and_the_others_stay(&store, 2_500).await;
    }

    #[tokio::test]
    async fn a_record_whose_key_cannot_be_read_keeps_it_from_saying_that_none_is_left() {
        let folder = sqlite::Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        let _ = acquire(&store, &of_customer(1)).await;
        let _ = acquire(&store, &request("damaged")).await;
        let file = rusqlite::Connection::open(folder.file()).unwrap();
        let spoil = "UPDATE idempotency_records SET lookup_key = x'00' WHERE key = 'damaged'";
        file.execute(spoil, []).unwrap();
        assert_eq!(store.erase("", "user-7", 10).await.unwrap(), 1);
        of_kind(StoreErrorKind::Corrupt, store.erase("", "user-7", 10).await);
        file.execute("DELETE FROM idempotency_records", []).unwrap();
        assert_eq!(store.erase("", "user-7", 10).await.unwrap(), 0);
    }
}

#[cfg(feature = "postgres")]
mod on_postgres {
    use postgres::Fresh;

    use super::*;

    #[tokio::test]
    async fn a_scope_is_erased_from_among_many_records() {
        let fresh = Fresh::store().await;
        fresh.insert_completed(25_000, "1 day").await;
        fill(&fresh.store, 100).await;
        assert_eq!(erase_in_steps(&fresh.store, 7).await, OF_CUSTOMER);
        let count = format!(
            "SELECT count(*), count(*) FILTER (WHERE scope = 'user-7') FROM {}",
            fresh.table()
        );
        let left = fresh.raw.query_one(&count, &[]).await.unwrap();
        assert_eq!((left.get(0), left.get(1)), (25_100_i64, 0_i64));
    }
}

#[cfg(feature = "redis")]
mod on_redis {
    use ::redis::AsyncCommands;
    use tower_idempotency::StoreErrorKind;

    use super::*;
    use claims::of_kind;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_scope_is_erased_from_among_many_records() {
        let server = redis::Server::start();
        let store = redis::store_at(&server.url()).await;
        a_scope_goes_and_the_others_stay(&store, 1_500).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_scope_is_erased_on_every_master_of_a_cluster() {
        let store = redis::store_at(&redis::shared_cluster().url()).await;
        a_scope_goes_and_the_others_stay(&store, 1_500).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_record_that_cannot_be_read_keeps_it_from_saying_that_none_is_left() {
        let server = redis::Server::start();
        let store = redis::store_at(&server.url()).await;
        let _ = acquire(&store, &of_customer(1)).await;
        let damaged = request("damaged");
        let _ = acquire(&store, &damaged).await;
        let client = ::redis::Client::open(server.url()).unwrap();
        let mut raw = client.get_multiplexed_async_connection().await.unwrap();
        let () = raw
            .setrange(store.record_key(&damaged.key), 100, b"\xff\xff\xff")
            .await
            .unwrap();
        // Its head can be read, and so can its key.
        assert_eq!(store.erase("", "user-7", 10).await.unwrap(), 1);
        assert_eq!(store.erase("", "user-7", 10).await.unwrap(), 0);
        let () = raw
            .setrange(store.record_key(&damaged.key), 0, b"\xff")
            .await
            .unwrap();
        of_kind(StoreErrorKind::Corrupt, store.erase("", "user-7", 10).await);
        assert!(store.remove(&damaged.key).await.unwrap());
        assert_eq!(store.erase("", "user-7", 10).await.unwrap(), 0);
    }
}
