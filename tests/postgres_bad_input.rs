//! What the store on PostgreSQL says to URLs, servers, tables and rows that are not as they should be.

#[path = "support/claims.rs"]
mod claims;
#[path = "support/postgres.rs"]
mod postgres;

use std::error::Error;
use std::net::TcpListener;
use std::time::Duration;

use claims::{acquire, existing, finish, key, of_kind, outcome, request, unavailable};
use deadpool_postgres::{Manager, Pool};
use postgres::{Bouncer, Fresh, Leftovers, Server, raw, shared, unused_name};
use tokio_postgres::{Config, NoTls};
use tower_idempotency::StoreErrorKind::{Corrupt, Other};
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    ClaimRequest, Fenced, Outcome, PostgresSchemaError, PostgresStore, PreparedStatements,
    Resolution, Store, StoreError,
};

#[tokio::test]
async fn a_url_that_leads_nowhere_is_told_from_one_that_cannot_be_read() {
    for unreadable in [
        "",
        "nonsense",
        "postgres://h:notaport/d",
        "postgres://h/d?nonsense=1",
    ] {
        of_kind(Other, PostgresStore::connect(unreadable).await);
    }
    // Bound and not listened to by PostgreSQL: the connection is refused, or never answered.
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    unavailable(PostgresStore::connect(&format!("postgres://u@127.0.0.1:{closed}/d")).await);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("postgres://u@{}/d", silent.local_addr().unwrap());
    let limit = PostgresStore::options().time_limit(Duration::from_millis(200));
    unavailable(limit.connect(&silent).await);
    let missing = of_kind(
        Other,
        PostgresStore::connect(&shared().url_of("no_such")).await,
    );
    assert!(
        missing.to_string().contains("database does not exist"),
        "{missing}"
    );
    let none = PostgresStore::options().pool_size(0);
    of_kind(Other, none.connect(shared().url()).await);
    let name = PostgresStore::options().table("keys\"; DROP TABLE keys; --");
    of_kind(Other, name.connect(shared().url()).await);
}

#[tokio::test]
async fn a_wrong_password_is_refused_and_shown_nowhere() {
    let server = Server::start();
    let create = "CREATE ROLE with_password LOGIN PASSWORD 'right'";
    raw(server.url()).await.batch_execute(create).await.unwrap();
    let url = |password: &str| server.url_by("with_password", password);
    let right = PostgresStore::connect(&url("right")).await.unwrap();
    let refused = of_kind(Other, PostgresStore::connect(&url("canary")).await);
    for text in [
        format!("{right:?}"),
        format!("{refused} {refused:?}"),
        chain(&refused),
    ] {
        assert!(
            !text.contains("canary") && !text.contains("right"),
            "{text}"
        );
    }
    assert!(refused.to_string().contains("password"), "{refused}");
}

#[tokio::test]
async fn missing_tables_are_named_with_what_to_do() {
    let schema = unused_name();
    let _leftovers = Leftovers::schema(shared().url(), &schema);
    let options = PostgresStore::options().schema(&schema);
    let store = options.connect(shared().url()).await.unwrap();
    for error in [
        of_kind(Other, store.claim(&request("key")).await),
        of_kind(Other, store.check().await),
    ] {
        assert_eq!(problem(&error), &PostgresSchemaError::Missing);
        assert!(error.to_string().contains("migrate()"), "{error}");
    }
    // Nothing has to be restarted.
    store.migrate().await.unwrap();
    let _ = acquire(&store, &request("key")).await;
    // And they may go again.
    let drop = format!("DROP SCHEMA {schema} CASCADE");
    raw(shared().url())
        .await
        .batch_execute(&drop)
        .await
        .unwrap();
    let error = of_kind(Other, store.claim(&request("key")).await);
    assert_eq!(problem(&error), &PostgresSchemaError::Missing);
    store.migrate().await.unwrap();
    let _ = acquire(&store, &request("key")).await;
}

#[tokio::test]
async fn older_and_newer_tables_are_told_apart() {
    let fresh = Fresh::store().await;
    let version = async |version: i32, oldest_reader: i32| {
        let versions = format!("{}_schema", fresh.table());
        let set = format!(
            "DELETE FROM {versions}; INSERT INTO {versions} VALUES ({version}, {oldest_reader})"
        );
        fresh.raw.batch_execute(&set).await.unwrap();
        let options = PostgresStore::options().schema(&fresh.schema);
        options.connect(shared().url()).await.unwrap()
    };
    let older = version(0, 0).await;
    let error = of_kind(Other, older.claim(&request("key")).await);
    let expected = PostgresSchemaError::Older {
        found: 0,
        needed: 1,
    };
    assert_eq!(problem(&error), &expected);
    older.migrate().await.unwrap();
    let _ = acquire(&older, &request("key")).await;
    // One release ahead, in a rolling deploy: it added something, and says that we may go on.
    let newer = version(2, 1).await;
    newer.migrate().await.unwrap();
    let _ = existing(&newer, &request("key")).await;
    let incompatible = version(3, 2).await;
    for error in [
        of_kind(Other, incompatible.claim(&request("key")).await),
        of_kind(Other, incompatible.migrate().await),
    ] {
        let (found, needed, known) = (3, 2, 1);
        let expected = PostgresSchemaError::Newer {
            found,
            needed,
            known,
        };
        assert_eq!(problem(&error), &expected);
    }
}

#[tokio::test]
async fn somebody_elses_table_is_not_mistaken_for_ours() {
    let fresh = Fresh::store().await;
    let rename = format!(
        "ALTER TABLE {} RENAME COLUMN lease_until TO until",
        fresh.table()
    );
    fresh.raw.batch_execute(&rename).await.unwrap();
    let error = of_kind(Other, fresh.store.check().await);
    assert_eq!(problem(&error), &PostgresSchemaError::Altered);

    let schema = unused_name();
    let _leftovers = Leftovers::schema(shared().url(), &schema);
    let table =
        format!("CREATE SCHEMA {schema}; CREATE TABLE {schema}.idempotency_keys (id bytea)");
    fresh.raw.batch_execute(&table).await.unwrap();
    let store = PostgresStore::options().schema(&schema);
    let store = store.connect(shared().url()).await.unwrap();
    of_kind(Other, store.migrate().await);
    of_kind(Other, store.claim(&request("key")).await);
    let column = format!(
        "SELECT count(*) FROM information_schema.columns WHERE table_schema = '{schema}' AND \
         table_name = 'idempotency_keys'"
    );
    let columns: i64 = fresh.raw.query_one(&column, &[]).await.unwrap().get(0);
    assert_eq!(columns, 1, "it was changed");
}

#[tokio::test]
async fn a_database_that_cannot_keep_every_text_is_refused() {
    let name = unused_name();
    let _leftovers = Leftovers::database(&name);
    let create = format!("CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0");
    raw(shared().url())
        .await
        .batch_execute(&create)
        .await
        .unwrap();
    let error = of_kind(Other, PostgresStore::connect(&shared().url_of(&name)).await);
    let found = "LATIN1".to_owned();
    assert_eq!(problem(&error), &PostgresSchemaError::Encoding { found });
}

#[tokio::test]
async fn a_read_only_server_a_full_disk_and_a_cancelled_statement_are_unavailable() {
    let fresh = Fresh::store().await;
    let claim = acquire(&fresh.store, &request("key")).await;
    for (code, hint) in [
        ("25006", "read only"),
        ("53100", "disk"),
        ("53300", "max_connections"),
        ("57014", "statement_timeout"),
        ("55P03", "lock_timeout"),
    ] {
        raise(&fresh, code).await;
        for error in [
            unavailable(fresh.store.claim(&request("new")).await),
            unavailable(fresh.store.renew(&claim, Duration::from_secs(60)).await),
        ] {
            assert!(error.to_string().contains(hint), "{error}");
            assert!(chain(&error).contains(code), "{}", chain(&error));
            assert!(!chain(&error).contains("canary"), "{}", chain(&error));
        }
    }
    // What only reads goes on.
    let _ = existing(&fresh.store, &request("key")).await;
}

#[tokio::test]
async fn a_server_that_gives_no_writes_is_left_for_another_connection() {
    let name = unused_name();
    let _leftovers = Leftovers::database(&name);
    let setup = raw(shared().url()).await;
    setup
        .batch_execute(&format!("CREATE DATABASE {name}"))
        .await
        .unwrap();
    let fresh = Fresh::with(&shared().url_of(&name), |options| options).await;
    let set =
        |value: &str| format!("ALTER DATABASE {name} SET default_transaction_read_only = {value}");
    setup.batch_execute(&set("on")).await.unwrap();
    // A connection of before the change does not know of it.
    let options = PostgresStore::options().schema(&fresh.schema);
    let replica = options.connect(&shared().url_of(&name)).await.unwrap();
    let error = unavailable(replica.claim(&request("key")).await);
    assert!(
        error.to_string().contains("target_session_attrs"),
        "{error}"
    );
    // The failover is over: the name leads to the primary again.
    setup.batch_execute(&set("off")).await.unwrap();
    let _ = acquire(&replica, &request("key")).await;
}

#[tokio::test]
async fn a_user_without_the_rights_is_told_which() {
    let fresh = Fresh::store().await;
    let role = unused_name();
    let _leftovers = Leftovers::role(&role);
    let create = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'password'; GRANT USAGE ON SCHEMA {} TO {role}",
        fresh.schema
    );
    fresh.raw.batch_execute(&create).await.unwrap();
    let url = shared().url_by(&role, "password");
    let store = PostgresStore::options().schema(&fresh.schema);
    let store = store.connect(&url).await.unwrap();
    let error = of_kind(Other, store.claim(&request("key")).await);
    assert!(error.to_string().contains("grant SELECT"), "{error}");
    // With what is named, and no right to make tables, it works; `migrate` too.
    let grant = format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON {0} TO {role}; GRANT SELECT ON {0}_schema TO {role}",
        fresh.table()
    );
    fresh.raw.batch_execute(&grant).await.unwrap();
    store.migrate().await.unwrap();
    let claim = acquire(&store, &request("key")).await;
    finish(&store, &claim, &Outcome::value(b"paid")).await;
    assert!(store.remove(claim.key()).await.unwrap());
    store.purge(1).await.unwrap();
}

#[tokio::test]
async fn an_exhausted_pool_is_unavailable_and_a_handler_may_use_the_same_pool() {
    let fresh = Fresh::store().await;
    let pool = pool_of_one(shared().url());
    let options = PostgresStore::options().schema(&fresh.schema);
    let options = options.time_limit(Duration::from_millis(200));
    let store = options.from_pool(pool.clone()).unwrap();
    // The handler takes the only connection while the claim stands: the store holds none.
    let claim = acquire(&store, &request("key")).await;
    let handlers = pool.get().await.unwrap();
    let error = unavailable(store.complete(&claim, &Outcome::value(b""), None).await);
    assert!(error.to_string().contains("pool"), "{error}");
    drop(handlers);
    finish(&store, &claim, &Outcome::value(b"")).await;
    pool.close();
    unavailable(store.lookup(claim.key()).await);
}

#[tokio::test]
async fn statements_are_prepared_where_nothing_stands_between_and_nowhere_else() {
    let fresh = Fresh::store().await;
    let bouncer = Bouncer::before(shared(), 1);
    for (url, prepared, expected) in [
        (shared().url(), PreparedStatements::WhereDirect, true),
        (shared().url(), PreparedStatements::Never, false),
        (bouncer.url(), PreparedStatements::WhereDirect, false),
    ] {
        let pool = pool_of_one(url);
        let options = PostgresStore::options().schema(&fresh.schema);
        let options = options.prepared_statements(prepared);
        let store = options.from_pool(pool.clone()).unwrap();
        let _ = store.claim(&request("key")).await.unwrap();
        let client = pool.get().await.unwrap();
        // As text, so that the question itself prepares nothing.
        let known = client
            .simple_query("SELECT FROM pg_prepared_statements")
            .await
            .unwrap();
        // The last message ends the answer, the first one describes it.
        assert_eq!(known.len() > 2, expected, "{prepared:?} on {url}");
    }
}

#[tokio::test]
async fn a_statement_that_the_server_forgot_is_prepared_anew() {
    let fresh = Fresh::store().await;
    let pool = pool_of_one(shared().url());
    let options = PostgresStore::options().schema(&fresh.schema);
    let store = options.from_pool(pool.clone()).unwrap();
    let _ = acquire(&store, &request("key")).await;
    pool.get()
        .await
        .unwrap()
        .batch_execute("DEALLOCATE ALL")
        .await
        .unwrap();
    let _ = existing(&store, &request("key")).await;
    // A migration of a newer release changes the table under prepared plans.
    let alter = format!(
        "ALTER TABLE {} ALTER COLUMN state TYPE varchar",
        fresh.table()
    );
    fresh.raw.batch_execute(&alter).await.unwrap();
    let _ = existing(&store, &request("key")).await;
}

#[tokio::test]
async fn tls_is_verified_against_the_named_roots() {
    let names = vec!["localhost".to_owned()];
    let certified = rcgen::generate_simple_self_signed(names).unwrap();
    let (certificate, key) = (certified.cert.pem(), certified.signing_key.serialize_pem());
    let server = Server::start_with_files(
        &[
            "ssl=on",
            "ssl_cert_file=server.crt",
            "ssl_key_file=server.key",
        ],
        &[("server.crt", &certificate), ("server.key", &key)],
    );
    let roots = server.folder().join("roots.pem");
    std::fs::write(&roots, &certificate).unwrap();
    let create = "CREATE ROLE with_password LOGIN PASSWORD 'right'";
    let plain = format!("{}?sslmode=disable", server.url());
    let setup = raw(&plain).await;
    setup.batch_execute(create).await.unwrap();
    let (_, port) = server.address();
    let url = |user: &str, host: &str, options: &str| {
        format!("postgres://{user}@{host}:{port}/postgres?{options}")
    };
    let named = format!("sslrootcert={}", roots.display());

    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl";
    let verified = [
        url("postgres", "localhost", &format!("sslmode=require&{named}")),
        url(
            "postgres",
            "localhost",
            &format!("sslmode=verify-full&{named}"),
        ),
        url("postgres", "localhost", &named),
        url(
            "with_password:right",
            "localhost",
            &format!("channel_binding=require&{named}"),
        ),
    ];
    for (n, url) in (1..).zip(&verified) {
        let store = PostgresStore::connect(url).await.unwrap();
        let connections: i64 = setup.query_one(encrypted, &[]).await.unwrap().get(0);
        assert_eq!(connections, 1, "case {n} is not encrypted");
        drop(store);
        let gone = encrypted.replace("count(*)", "count(*) = 0");
        postgres::wait_for(&setup, &gone).await;
    }
    for refused in [
        // Nobody knows this certificate, or the host has another name than it says.
        url("postgres", "localhost", "sslmode=require"),
        url("postgres", "localhost", ""),
        url("postgres", "127.0.0.1", &format!("sslmode=require&{named}")),
        url("postgres", "localhost", "sslrootcert=/no/such/file"),
    ] {
        let error = of_kind(Other, PostgresStore::connect(&refused).await);
        assert!(error.to_string().contains("sslrootcert"), "{error}");
    }
    PostgresStore::connect(&plain).await.unwrap();
    let plaintext_server = format!("{}?sslmode=require", shared().url());
    of_kind(Other, PostgresStore::connect(&plaintext_server).await);
}

/// Every byte of everything that is stored as bytes, and of the columns that are only for people.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_changed_byte_of_a_row_makes_another_answer() {
    let fresh = Fresh::store().await;
    let table = fresh.table();
    let kept = Outcome::response(
        http::StatusCode::CREATED,
        &http::HeaderMap::from_iter([(http::header::ETAG, "1".parse().unwrap())]),
        &[b"{\"id\":7}"],
        None,
    );
    for state in ["started", "completed"] {
        let request = request(state);
        let claim = acquire(&fresh.store, &request).await;
        let data = "7".into();
        let noted = fresh.store.checkpoint(&claim, "paid", &data).await.unwrap();
        assert_eq!(noted, Fenced::Applied);
        if state == "completed" {
            finish(&fresh.store, &claim, &kept).await;
        }
        let save = format!(
            "DROP TABLE IF EXISTS saved; CREATE TEMP TABLE saved AS SELECT * FROM {table} WHERE state \
             = '{state}'"
        );
        fresh.raw.batch_execute(&save).await.unwrap();
        let mut corrupt = 0;
        for column in [
            "fingerprint",
            "owner",
            "outcome",
            "claim_sum",
            "outcome_sum",
            "attempt",
        ] {
            let bytes = format!("SELECT length({column}::text::bytea) FROM saved");
            let is_bytes = ["fingerprint", "owner", "outcome"].contains(&column);
            let bytes = match is_bytes {
                true => format!("SELECT length({column}) FROM saved"),
                false => bytes,
            };
            let length: Option<i32> = fresh.raw.query_one(&bytes, &[]).await.unwrap().get(0);
            for at in 0..length.unwrap_or(0) {
                let changed = match is_bytes {
                    true => format!(
                        "set_byte({column}, {at}, get_byte({column}, {at}) # (1 << ({at} % 8)))"
                    ),
                    false => format!("{column} # (1 << {at})"),
                };
                let change =
                    format!("UPDATE {table} SET {column} = {changed} WHERE state = '{state}'");
                fresh.raw.batch_execute(&change).await.unwrap();
                of_kind(Corrupt, fresh.store.claim(&self::request(state)).await);
                of_kind(Corrupt, fresh.store.claim(&claims::rerun(state)).await);
                of_kind(Corrupt, fresh.store.lookup(&request.key).await);
                if state == "completed" {
                    of_kind(Corrupt, fresh.store.complete(&claim, &kept, None).await);
                }
                corrupt += 1;
                let back = format!(
                    "UPDATE {table} t SET {column} = s.{column} FROM saved s WHERE t.id = s.id"
                );
                fresh.raw.batch_execute(&back).await.unwrap();
            }
        }
        assert!(corrupt > 60, "{state}: only {corrupt} bytes were changed");
        // And what is not looked up by does no harm.
        let rename =
            format!("UPDATE {table} SET namespace = 'x', key = 'y' WHERE state = '{state}'");
        fresh.raw.batch_execute(&rename).await.unwrap();
        let record = existing(&fresh.store, &self::request(state)).await;
        assert_eq!(record.key, request.key);
    }
    let shown = existing(&fresh.store, &request("completed")).await;
    assert_eq!(*outcome(&shown), kept);
}

/// No checksum covers the columns that only the server computes or a person reads.
#[tokio::test]
async fn no_change_of_a_column_without_a_checksum_frees_a_key_that_is_held_or_done() {
    let fresh = Fresh::store().await;
    let table = fresh.table();
    for state in ["started", "completed"] {
        let request = request(state);
        let claim = acquire(&fresh.store, &request).await;
        let noted = fresh.store.annotate(&claim, "charge 7").await.unwrap();
        assert_eq!(noted, Fenced::Applied);
        let data = "7".into();
        let noted = fresh.store.checkpoint(&claim, "paid", &data).await.unwrap();
        assert_eq!(noted, Fenced::Applied);
        if state == "completed" {
            finish(&fresh.store, &claim, &Outcome::value(b"paid")).await;
        }
    }
    let mut changes: Vec<String> = (0..15)
        .map(|bit| format!("format = format # (1 << {bit})::smallint"))
        .collect();
    for bit in 0..62 {
        let by = format!("interval '{} microseconds'", 1_u64 << bit.min(58));
        for time in ["created_at", "completed_at"] {
            changes.push(format!("{time} = {time} - {by}"));
        }
        changes.push(format!("retention = retention + {by}"));
    }
    for bytes in 0..8 {
        changes.push(format!(
            "correlation = overlay(correlation placing '\\' from {bytes} + 1 for 1)"
        ));
        changes.push(format!("correlation = left(correlation, {bytes})"));
    }
    changes.extend(
        [
            "state = 'started'",
            "state = 'completed'",
            "state = 'done'",
            "state = ''",
            "status = 7",
            "status = NULL",
            "correlation = NULL",
            "completed_at = NULL",
            "checkpoint_names = NULL",
            "checkpoint_names = '{}'",
            "checkpoint_names = '{NULL}'",
            "checkpoint_names = '{{a},{b}}'",
            "checkpoint_data = NULL",
            "checkpoint_data = '{NULL}'",
            "checkpoint_data = '{}'",
            "outcome = NULL",
            "outcome_sum = NULL",
        ]
        .map(String::from),
    );
    let save = format!("CREATE TEMP TABLE saved AS SELECT * FROM {table}");
    fresh.raw.batch_execute(&save).await.unwrap();
    let mut tried = 0;
    for change in changes {
        // What the table's own types and checks refuse is nothing to test.
        let change_all = format!("UPDATE {table} SET {change}");
        if fresh.raw.batch_execute(&change_all).await.is_err() {
            continue;
        }
        for state in ["started", "completed"] {
            for asking in [request(state), claims::rerun(state)] {
                match fresh.store.claim(&asking).await {
                    Ok(tower_idempotency::Claimed::Existing(_)) => {}
                    Ok(claimed) => panic!("{change} of the {state} one: {claimed:?}"),
                    Err(error) => assert_eq!(error.kind(), Corrupt, "{change}: {error}"),
                }
            }
        }
        tried += 1;
        let restore = format!("DELETE FROM {table}; INSERT INTO {table} SELECT * FROM saved");
        fresh.raw.batch_execute(&restore).await.unwrap();
    }
    assert!(tried > 100, "only {tried} changes could be made");
}

#[tokio::test]
async fn rows_that_were_taken_from_another_key_or_cut_short_are_corrupt() {
    let fresh = Fresh::store().await;
    let table = fresh.table();
    for name in ["one", "two"] {
        let claim = acquire(&fresh.store, &request(name)).await;
        finish(&fresh.store, &claim, &Outcome::value(name.as_bytes())).await;
    }
    let damage = [
        // Whole, but those of the other one.
        format!(
            "UPDATE {table} t SET outcome = s.outcome, outcome_sum = s.outcome_sum FROM {table} s \
             WHERE t.key = 'one' AND s.key = 'two'"
        ),
        format!("UPDATE {table} SET outcome = substr(outcome, 1, 3) WHERE key = 'one'"),
        format!("UPDATE {table} SET outcome = '' WHERE key = 'one'"),
        format!("UPDATE {table} SET outcome_sum = NULL WHERE key = 'one'"),
        format!("UPDATE {table} SET owner = '' WHERE key = 'one'"),
        format!("UPDATE {table} SET attempt = -1 WHERE key = 'one'"),
        format!("UPDATE {table} SET format = 2 WHERE key = 'one'"),
        format!("UPDATE {table} SET completed_at = NULL WHERE key = 'one'"),
        format!("UPDATE {table} SET correlation = 'a\\b' WHERE key = 'one'"),
        format!("UPDATE {table} SET checkpoint_names = '{{a}}' WHERE key = 'one'"),
        format!(
            "ALTER TABLE {table} DROP CONSTRAINT idempotency_keys_state; UPDATE {table} SET state = \
             'paused', outcome = NULL WHERE key = 'one'"
        ),
    ];
    let save = format!("CREATE TEMP TABLE saved AS SELECT * FROM {table} WHERE key = 'one'");
    fresh.raw.batch_execute(&save).await.unwrap();
    for damage in damage {
        fresh.raw.batch_execute(&damage).await.unwrap();
        of_kind(Corrupt, fresh.store.claim(&request("one")).await);
        of_kind(Corrupt, fresh.store.lookup(&key("one")).await);
        // The row is still there, for a person to look at.
        let restored = fresh
            .raw
            .execute(&format!("DELETE FROM {table} WHERE key = 'one'"), &[])
            .await
            .unwrap();
        assert_eq!(restored, 1, "{damage}");
        let restore = format!("INSERT INTO {table} SELECT * FROM saved");
        fresh.raw.batch_execute(&restore).await.unwrap();
    }
}

#[tokio::test]
async fn a_record_that_cannot_be_read_does_not_hide_the_others_from_the_sweeper() {
    let fresh = Fresh::store().await;
    let table = fresh.table();
    for n in 0..5 {
        let claim = acquire(&fresh.store, &request(&n.to_string())).await;
        fresh.age(claim.key(), Duration::from_secs(3600)).await;
    }
    let damage = format!(
        "UPDATE {table} SET owner = '' WHERE key = '1'; UPDATE {table} SET scope = 'x' WHERE key = '3'"
    );
    fresh.raw.batch_execute(&damage).await.unwrap();
    for limit in [1, 2, 100] {
        let mut keys = Vec::new();
        let mut after = None;
        loop {
            let page = fresh.store.abandoned(after.as_ref(), limit).await.unwrap();
            keys.extend(
                page.records
                    .iter()
                    .map(|record| record.key.key().to_owned()),
            );
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        keys.sort();
        assert_eq!(keys, ["0", "2", "4"], "in pages of {limit}");
    }
    // They are not silent for ever: whoever asks is told, and so is the purge.
    of_kind(Corrupt, fresh.store.claim(&request("1")).await);
    let expire = format!("UPDATE {table} SET expires_at = now(), lease_until = now()");
    fresh.raw.batch_execute(&expire).await.unwrap();
    let purged = fresh.store.purge(100).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (5, 5));
}

#[tokio::test]
async fn an_expired_record_is_claimed_whatever_it_holds() {
    let fresh = Fresh::store().await;
    let old = acquire(&fresh.store, &request("key")).await;
    finish(&fresh.store, &old, &Outcome::value(b"old")).await;
    let damage = format!(
        "UPDATE {} SET outcome = 'x', attempt = -7, owner = 'x', format = 9, expires_at = now()",
        fresh.table()
    );
    fresh.raw.batch_execute(&damage).await.unwrap();
    assert_eq!(acquire(&fresh.store, &request("key")).await.attempt(), 1);
    let record = fresh.store.lookup(old.key()).await.unwrap().unwrap();
    assert_eq!(record.fingerprint, claims::fingerprint());
}

/// Written by the first release; every later one reads them.
#[tokio::test]
async fn rows_of_version_one_are_read_as_they_were_written() {
    let schema = unused_name();
    let _leftovers = Leftovers::schema(shared().url(), &schema);
    let raw = raw(shared().url()).await;
    let fixture = include_str!("fixtures/postgres_v1.sql");
    let load = format!("CREATE SCHEMA {schema}; SET search_path TO {schema}; {fixture}");
    raw.batch_execute(&load).await.unwrap();
    let options = PostgresStore::options().schema(&schema);
    let store = options.connect(shared().url()).await.unwrap();
    store.migrate().await.unwrap();

    let shown = existing(&store, &frozen("completed")).await;
    assert_eq!(shown.attempt, 2);
    assert_eq!(shown.owner.as_bytes(), &[0x22; 16]);
    assert_eq!(shown.created_at.as_micros(), 1_798_761_600_000_001);
    assert_eq!(shown.notes.correlation.as_deref(), Some("charge\0\\7"));
    let checkpoints: Vec<_> = shown
        .notes
        .checkpoints
        .iter()
        .map(|(name, _)| &**name)
        .collect();
    assert_eq!(checkpoints, ["reserve", "charge ✓"]);
    assert_eq!(
        outcome(&shown).as_bytes()[..],
        b"\x01\x00\xc9\x00\x01\x04etag\x011\x00\x02{}"[..]
    );
    let claim = acquire(&store, &frozen("released")).await;
    assert_eq!(claim.attempt(), 4);
    let held = existing(&store, &frozen("abandoned")).await;
    assert!(held.is_abandoned());
    let released = store.resolve(&held, &Resolution::Released).await.unwrap();
    assert_eq!(released, Fenced::Applied);
    let live = existing(&store, &frozen("live")).await;
    assert!(!live.is_abandoned());
}

fn frozen(name: &str) -> ClaimRequest {
    let fingerprint = tower_idempotency::Fingerprint::from_bytes([0x11; 52]);
    let mut request = request(name);
    request.fingerprint = fingerprint;
    request
}

/// Lets every write to the table fail with this code, and with a piece of a row in its details.
async fn raise(fresh: &Fresh, code: &str) {
    let (schema, table) = (&fresh.schema, fresh.table());
    let trigger = format!(
        "CREATE OR REPLACE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         RAISE EXCEPTION 'injected' USING ERRCODE = '{code}', DETAIL = 'canary'; END $$; \
         CREATE OR REPLACE TRIGGER fail BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE \
         FUNCTION {schema}.fail()"
    );
    fresh.raw.batch_execute(&trigger).await.unwrap();
}

fn pool_of_one(url: &str) -> Pool {
    let config: Config = url.parse().unwrap();
    Pool::builder(Manager::new(config, NoTls))
        .max_size(1)
        .build()
        .unwrap()
}

fn problem(error: &StoreError) -> &PostgresSchemaError {
    let source = error.source().and_then(|source| source.downcast_ref());
    source.unwrap_or_else(|| panic!("no problem with the schema: {error:?}"))
}

/// Everything that a log would show.
fn chain(error: &StoreError) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
