//! The tables on PostgreSQL, as an operator sees them and as a team makes them that runs its own
//! migrations.

#[path = "support/claims.rs"]
mod claims;
#[path = "support/postgres.rs"]
mod postgres;

use claims::{acquire, finish, key};
use postgres::{Fresh, Leftovers, raw, shared, unused_name};
use tokio_postgres::Client;
use tower_idempotency::{
    ClaimRequest, Fenced, Fingerprint, IdempotencyKey, Outcome, PostgresStore, ScopedKey, Store,
};

const PUBLISHED: &str = include_str!("../migrations/postgres/0001_idempotency_keys.sql");

#[tokio::test]
async fn the_published_statements_make_the_tables_that_migrate_makes() {
    let migrated = Fresh::store().await;
    let schema = unused_name();
    let _leftovers = Leftovers::schema(shared().url(), &schema);
    let by_hand = raw(shared().url()).await;
    let prepare = format!("CREATE SCHEMA {schema}; SET search_path TO {schema}");
    by_hand.batch_execute(&prepare).await.unwrap();
    // Twice: it may be run again.
    for _ in 0..2 {
        by_hand.batch_execute(PUBLISHED).await.unwrap();
    }
    let described = describe(&by_hand, &schema).await;
    assert_eq!(described, describe(&by_hand, &migrated.schema).await);
    assert!(described.len() > 20, "{described:?}");

    let store = PostgresStore::options().schema(&schema);
    let store = store.connect(shared().url()).await.unwrap();
    let _ = acquire(&store, &claims::request("key")).await;
    // Without a schema, it is the first one of the search path.
    let url = format!(
        "{}?options=-csearch_path%3D{schema}",
        shared().url_of("postgres")
    );
    let found = PostgresStore::connect(&url).await.unwrap();
    assert!(found.lookup(&key("key")).await.unwrap().is_some());
}

#[tokio::test]
async fn table_and_schema_take_the_names_that_were_set() {
    let schema = format!("{}_Mixed", unused_name());
    let _leftovers = Leftovers::schema(shared().url(), &schema);
    let options = PostgresStore::options()
        .schema(&schema)
        .table("Request_Keys");
    let store = options.connect(shared().url()).await.unwrap();
    store.migrate().await.unwrap();
    store.migrate().await.unwrap();
    let claim = acquire(&store, &claims::request("key")).await;
    finish(&store, &claim, &Outcome::value(b"paid")).await;
    let raw = raw(shared().url()).await;
    let kept = format!("SELECT count(*) FROM \"{schema}\".\"Request_Keys\"");
    assert_eq!(raw.query_one(&kept, &[]).await.unwrap().get::<_, i64>(0), 1);
    let tables = "SELECT table_name::text FROM information_schema.tables WHERE table_schema = $1 ORDER \
                  BY 1";
    let tables = raw.query(tables, &[&schema]).await.unwrap();
    let tables: Vec<String> = tables.iter().map(|row| row.get(0)).collect();
    assert_eq!(tables, ["Request_Keys", "Request_Keys_schema"]);
}

#[tokio::test]
async fn a_person_can_read_what_stands_under_a_key() {
    let fresh = Fresh::store().await;
    let client_key = IdempotencyKey::new("order-7").unwrap();
    let key = ScopedKey::new("http", "tenant\\1", &client_key);
    let request = ClaimRequest::new(key, Fingerprint::of(&[b"charge"]));
    let claim = acquire(&fresh.store, &request).await;
    let annotated = fresh.store.annotate(&claim, "charge 7").await.unwrap();
    assert_eq!(annotated, Fenced::Applied);
    let paid = Outcome::response(
        http::StatusCode::CREATED,
        &http::HeaderMap::new(),
        &[b"{\"amount\": 1.0}"],
        None,
    );
    finish(&fresh.store, &claim, &paid).await;
    let select = format!(
        "SELECT namespace, scope, state, correlation, status, attempt, created_at <= completed_at AND \
         completed_at < expires_at AND expires_at - created_at BETWEEN '23:59' AND '24:01', \
         position('{{\"amount\": 1.0}}'::bytea IN outcome) > 0 FROM {} WHERE key = 'order-7'",
        fresh.table()
    );
    let row = fresh.raw.query_one(&select, &[]).await.unwrap();
    let text = |column: usize| row.get::<_, &str>(column);
    assert_eq!(
        [text(0), text(1), text(2), text(3)],
        ["http", "tenant\\\\1", "completed", "charge 7"]
    );
    assert_eq!((row.get::<_, i16>(4), row.get::<_, i64>(5)), (201, 1));
    assert!(row.get::<_, bool>(6), "the times are not in order");
    assert!(row.get::<_, bool>(7), "the body is not kept as it was");
}

#[tokio::test]
async fn one_index_is_for_the_key_and_one_for_the_purge() {
    let fresh = Fresh::store().await;
    let indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = $1 AND tablename = \
                   'idempotency_keys' ORDER BY indexname";
    let indexes = fresh.raw.query(indexes, &[&fresh.schema]).await.unwrap();
    let columns: Vec<&str> = indexes
        .iter()
        .map(|row| row.get::<_, &str>(0).rsplit('(').next().unwrap_or_default())
        .collect();
    assert_eq!(columns, ["expires_at)", "id)"]);
}

/// Columns, constraints, indexes and settings of the tables of a schema, without its name.
async fn describe(client: &Client, schema: &str) -> Vec<String> {
    let described = "
        SELECT format('%s.%s %s %s %s %s', c.relname, a.attname, format_type(atttypid, atttypmod),
            attnotnull, attstorage, pg_get_expr(adbin, adrelid))
        FROM pg_attribute a JOIN pg_class c ON a.attrelid = c.oid
            LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE relnamespace = $1::text::regnamespace AND relkind = 'r' AND attnum > 0
        UNION ALL
        SELECT format('%s %s', conname, pg_get_constraintdef(oid)) FROM pg_constraint
        WHERE connamespace = $1::text::regnamespace
        UNION ALL
        SELECT format('%s %s %s', relname, relkind, reloptions) FROM pg_class
        WHERE relnamespace = $1::text::regnamespace
        ORDER BY 1";
    let rows = client.query(described, &[&schema]).await.unwrap();
    let lines = rows.iter().map(|row| row.get::<_, String>(0));
    lines.filter(|line| !line.contains("pg_toast")).collect()
}
