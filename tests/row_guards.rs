//! The SQL of the guide on jobs: insert-or-get on a natural key, and the look at a row under its lock.
//! It is tested as it stands there, with callers who hold old copies.

#![cfg(all(feature = "postgres", feature = "sqlite-system", feature = "testing"))]

#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/sqlite.rs"]
mod sqlite;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior};
use tokio_postgres::Client;

const GUIDE: &str = include_str!("../JOBS.md");

/// A statement of the guide: the one that begins so.
fn statement(begin: &str) -> &'static str {
    let mut found = GUIDE
        .split("```")
        .filter_map(|block| block.strip_prefix("sql\n"));
    let found = found.find(|block| block.starts_with(begin));
    found.unwrap_or_else(|| panic!("the guide has no statement that begins with {begin:?}"))
}

const TABLES: &str = "
    CREATE TABLE orders (id bigint PRIMARY KEY, paid_at text);
    CREATE TABLE points (order_id bigint NOT NULL, points bigint NOT NULL);
    CREATE TABLE mails (order_id bigint NOT NULL);
    CREATE TABLE invoices (
        id INTEGER PRIMARY KEY, order_id bigint NOT NULL UNIQUE, amount bigint NOT NULL
    );
    INSERT INTO orders (id) VALUES (1);
";

/// What a caller loaded some time ago.
#[derive(Clone, Copy)]
struct OldCopy {
    is_paid: bool,
}

// PostgreSQL

async fn tables() -> (postgres::Fresh, Client, Client) {
    let fresh = postgres::Fresh::store().await;
    let connect = async || {
        let client = postgres::raw(postgres::shared().url()).await;
        let path = format!("SET search_path = \"{}\"", fresh.schema);
        client.batch_execute(&path).await.unwrap();
        client
    };
    let (one, two) = (connect().await, connect().await);
    // Ids that the database gives.
    let tables = TABLES.replace("id INTEGER PRIMARY KEY", "id bigserial PRIMARY KEY");
    one.batch_execute(&tables).await.unwrap();
    (fresh, one, two)
}

async fn load(client: &Client) -> OldCopy {
    let select = "SELECT paid_at IS NOT NULL FROM orders WHERE id = 1";
    let row = client.query_one(select, &[]).await.unwrap();
    let is_paid = row.get(0);
    OldCopy { is_paid }
}

async fn pay(client: &Client) {
    client
        .batch_execute(
            "UPDATE orders SET paid_at = 'now' WHERE id = 1;
             INSERT INTO points VALUES (1, 100);
             INSERT INTO mails VALUES (1)",
        )
        .await
        .unwrap();
}

/// The mistake: the state is looked at on the copy.
async fn pay_by_the_copy(client: &Client, copy: OldCopy) {
    client.batch_execute("BEGIN").await.unwrap();
    if !copy.is_paid {
        pay(client).await;
    }
    client.batch_execute("COMMIT").await.unwrap();
}

/// As the guide says: the state is looked at on the row that was locked.
async fn pay_by_the_locked_row(client: &Client, _copy: OldCopy) {
    client.batch_execute("BEGIN").await.unwrap();
    let locked = client.query_one(statement("SELECT paid_at"), &[&1_i64]);
    let is_paid: bool = locked.await.unwrap().get(0);
    if !is_paid {
        pay(client).await;
    }
    client.batch_execute("COMMIT").await.unwrap();
}

/// How many rows were written beside the order's own.
async fn rows(client: &Client) -> i64 {
    let count = "SELECT (SELECT count(*) FROM points) + (SELECT count(*) FROM mails)";
    client.query_one(count, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_callers_with_old_copies_pay_twice_unless_they_look_at_the_locked_row() {
    let (_fresh, one, two) = tables().await;
    let copies = (load(&one).await, load(&two).await);
    pay_by_the_copy(&one, copies.0).await;
    pay_by_the_copy(&two, copies.1).await;
    assert_eq!(rows(&one).await, 4, "the harness catches the mistake");

    let (_fresh, one, two) = tables().await;
    let copies = (load(&one).await, load(&two).await);
    pay_by_the_locked_row(&one, copies.0).await;
    pay_by_the_locked_row(&two, copies.1).await;
    assert_eq!(rows(&one).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calling_twice_with_fresh_copies_does_not_catch_the_mistake() {
    let (_fresh, one, two) = tables().await;
    let copy = load(&one).await;
    pay_by_the_copy(&one, copy).await;
    let copy = load(&two).await;
    pay_by_the_copy(&two, copy).await;
    assert_eq!(rows(&one).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_caller_waits_for_the_first_ones_commit_and_then_sees_it() {
    let (fresh, one, two) = tables().await;
    one.batch_execute("BEGIN").await.unwrap();
    let locked = one.query_one(statement("SELECT paid_at"), &[&1_i64]).await;
    assert!(!locked.unwrap().get::<_, bool>(0));
    pay(&one).await;
    let copy = load(&two).await;
    assert!(!copy.is_paid, "not committed yet");
    let second = tokio::spawn(async move {
        pay_by_the_locked_row(&two, copy).await;
        two
    });
    let waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted \
                 AND locktype IN ('transactionid', 'tuple')";
    postgres::wait_for(&fresh.raw, waits).await;
    one.batch_execute("COMMIT").await.unwrap();
    let two = second.await.unwrap();
    assert_eq!(rows(&two).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_insert_one_natural_key_all_get_the_one_row() {
    let (fresh, one, _) = tables().await;
    let mut tasks = tokio::task::JoinSet::new();
    for amount in 0..8_i64 {
        let client = postgres::raw(postgres::shared().url()).await;
        let path = format!("SET search_path = \"{}\"", fresh.schema);
        client.batch_execute(&path).await.unwrap();
        tasks.spawn(async move {
            let insert = statement("INSERT INTO invoices");
            let row = client.query_one(insert, &[&7_i64, &amount]).await.unwrap();
            (row.get::<_, i64>(0), row.get::<_, i64>(1))
        });
    }
    let mut seen = tasks.join_all().await;
    seen.dedup();
    assert_eq!(seen.len(), 1, "two rows, or two amounts: {seen:?}");
    let count = one.query_one("SELECT count(*) FROM invoices", &[]).await;
    assert_eq!(count.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_that_were_paid_twice_in_the_past_are_found() {
    let (_fresh, one, _) = tables().await;
    pay(&one).await;
    one.batch_execute("INSERT INTO points VALUES (1, 100), (2, 100)")
        .await
        .unwrap();
    let found = one.query(statement("SELECT order_id"), &[]).await.unwrap();
    let found: Vec<(i64, i64)> = found.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(found, [(1, 2)]);
}

// SQLite

fn files() -> (sqlite::Folder, Connection, Connection) {
    let folder = sqlite::Folder::new();
    let connect = || Connection::open(folder.file()).unwrap();
    let (one, two) = (connect(), connect());
    one.execute_batch(TABLES).unwrap();
    (folder, one, two)
}

fn is_paid(connection: &Connection) -> bool {
    let select = "SELECT paid_at IS NOT NULL FROM orders WHERE id = 1";
    connection.query_row(select, [], |row| row.get(0)).unwrap()
}

fn pay_in(connection: &mut Connection, look_at: Option<OldCopy>) {
    // SQLite locks the whole file: IMMEDIATE takes the lock before the look, as FOR UPDATE does.
    let behavior = TransactionBehavior::Immediate;
    let transaction = connection.transaction_with_behavior(behavior).unwrap();
    let is_paid = match look_at {
        Some(copy) => copy.is_paid,
        None => is_paid(&transaction),
    };
    if !is_paid {
        let pay = "UPDATE orders SET paid_at = 'now' WHERE id = 1;
                   INSERT INTO points VALUES (1, 100); INSERT INTO mails VALUES (1)";
        transaction.execute_batch(pay).unwrap();
    }
    transaction.commit().unwrap();
}

fn rows_in(connection: &Connection) -> i64 {
    let count = "SELECT (SELECT count(*) FROM points) + (SELECT count(*) FROM mails)";
    connection.query_row(count, [], |row| row.get(0)).unwrap()
}

#[test]
fn two_callers_with_old_copies_pay_twice_on_sqlite_too_unless_they_look_under_the_lock() {
    for (look_at_copy, expected) in [(true, 4), (false, 2)] {
        let (_folder, mut one, mut two) = files();
        let copies = [&one, &two].map(|connection| OldCopy {
            is_paid: is_paid(connection),
        });
        pay_in(&mut one, look_at_copy.then_some(copies[0]));
        pay_in(&mut two, look_at_copy.then_some(copies[1]));
        assert_eq!(rows_in(&one), expected);
    }
}

#[test]
fn insert_or_get_is_one_statement_on_sqlite_too() {
    let (_folder, one, two) = files();
    let insert = statement("INSERT INTO invoices");
    let get = |connection: &Connection, amount: i64| {
        let row = connection.query_row(insert, [7, amount], |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))
        });
        row.optional().unwrap().expect("a row in either case")
    };
    assert_eq!(get(&one, 100), get(&two, 900));
}
