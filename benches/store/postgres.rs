//! The store on PostgreSQL, beside the INSERT, the UPDATE and the SELECT by the primary key that
//! somebody writes by hand who needs nothing but these: tokio-postgres, a pool of 16 and prepared statements
//! on both sides, on tables that are alike, with parameters and rows of the same size. The server is as
//! durable as PostgreSQL ships it.

#[path = "../../tests/support/postgres.rs"]
mod support;

use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use tokio_postgres::NoTls;
use tokio_postgres::types::ToSql;
use tower_idempotency::{ClaimRequest, Outcome, Owner, PostgresStore, ScopedKey};

use self::support::{Fresh, Server};
use crate::arguments::Arguments;
use crate::run::{Measured, Plan};
use crate::side::{Ours, Side};

const CONNECTIONS: usize = 16;

pub async fn measure(arguments: &Arguments) -> Vec<Measured> {
    let server = Arc::new(Server::start_with(&[]));
    let ours = Fresh::with(server.url(), |options| options).await;
    let version = ours.raw.query_one("SHOW server_version", &[]).await;
    let version: String = version.expect("a version").get(0);
    let pool_of_ours = pool(&server);
    *ELSEWHERE.lock().unwrap() = Some((ours.schema.clone(), pool_of_ours.clone()));
    let store = PostgresStore::options().schema(&ours.schema);
    let mut store = Ours::new(store.from_pool(pool_of_ours).expect("a name"));
    store.other = Some(elsewhere);
    let theirs = Fresh::with(server.url(), |options| options).await;
    let bare = Bare::new(pool(&server), &theirs.table());
    let plan = Plan {
        store: "postgres",
        about: format!(
            "PostgreSQL {version}: an INSERT and an UPDATE, a SELECT; pool of {CONNECTIONS}"
        ),
        slice: Duration::from_millis(200),
        jobs: 5_000,
        kept: 5_000,
        stride: 1,
        elsewhere: true,
        expired: 1_000,
        short_life: Duration::from_millis(2),
        processes: {
            let server = Arc::clone(&server);
            Box::new(move || server.processes())
        },
    };
    crate::run::measure(arguments, plan, store, bare).await
}

/// What a store of another process is made of.
static ELSEWHERE: LazyLock<Mutex<Option<(String, Pool)>>> = LazyLock::new(Mutex::default);

fn elsewhere(_: &PostgresStore) -> PostgresStore {
    let elsewhere = ELSEWHERE.lock().unwrap();
    let (schema, pool) = elsewhere.as_ref().expect("a store was made");
    let options = PostgresStore::options().schema(schema);
    options.from_pool(pool.clone()).expect("a name")
}

#[derive(Clone)]
struct Bare {
    pool: Pool,
    statements: Arc<Statements>,
}

struct Statements {
    insert: String,
    update: String,
    select: String,
    purge: String,
}

impl Bare {
    fn new(pool: Pool, table: &str) -> Self {
        let statements = Statements {
            insert: format!(
                "INSERT INTO {table} (id, namespace, scope, key, state, attempt, fingerprint, owner, \
                 claim_sum, created_at, lease_until, expires_at, retention) VALUES ($1, $2, $3, $4, \
                 'started', 1, $5, $6, $7, now(), now() + $8 * interval '1 ms', now() + $9 * interval \
                 '1 ms', $9 * interval '1 ms') ON CONFLICT (id) DO NOTHING"
            ),
            update: format!(
                "UPDATE {table} SET state = 'completed', status = $4, outcome = $3, outcome_sum = $5, \
                 completed_at = now() WHERE id = $1 AND owner = $2 AND state = 'started'"
            ),
            select: format!(
                "SELECT state, format, fingerprint, owner, attempt, claim_sum, created_at, expires_at, \
                 lease_until, completed_at, correlation, checkpoint_names, checkpoint_data, outcome, \
                 outcome_sum FROM {table} WHERE id = $1"
            ),
            purge: format!(
                "DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} WHERE expires_at \
                 <= now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))"
            ),
        };
        Self {
            pool,
            statements: Arc::new(statements),
        }
    }

    async fn execute(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> u64 {
        let client = self.pool.get().await.expect("a connection");
        let statement = client.prepare_cached(sql).await.expect("it is right");
        let changed = client.execute(&statement, parameters).await;
        changed.expect("an answer")
    }
}

impl Side for Bare {
    type Held = (ScopedKey, Owner);

    async fn claim(&self, request: &ClaimRequest) -> Self::Held {
        let (key, digest) = (&request.key, request.key.digest());
        let millis = |time: Duration| time.as_millis() as f64;
        let inserted = self
            .execute(
                &self.statements.insert,
                &[
                    &&digest[..],
                    &key.namespace(),
                    &key.scope(),
                    &key.key(),
                    &&request.fingerprint.as_bytes()[..],
                    &&request.owner.as_bytes()[..],
                    &0_i32,
                    &millis(request.lease),
                    &millis(request.retention),
                ],
            )
            .await;
        assert_eq!(inserted, 1);
        (request.key.clone(), request.owner)
    }

    async fn complete(&self, held: &Self::Held, outcome: &Outcome) {
        let updated = self
            .execute(
                &self.statements.update,
                &[
                    &&held.0.digest()[..],
                    &&held.1.as_bytes()[..],
                    &&outcome.as_bytes()[..],
                    &201_i16,
                    &0_i32,
                ],
            )
            .await;
        assert_eq!(updated, 1);
    }

    async fn replay(&self, request: &ClaimRequest) {
        let client = self.pool.get().await.expect("a connection");
        let select = client.prepare_cached(&self.statements.select).await;
        let digest = request.key.digest();
        let select = select.expect("it is right");
        let row = client.query_one(&select, &[&&digest[..]]).await;
        let row = row.expect("a row");
        let (state, fingerprint): (&str, &[u8]) = (row.get(0), row.get(2));
        assert!(state == "completed" && fingerprint == request.fingerprint.as_bytes());
        let frame: &[u8] = row.get(13);
        Outcome::decode(frame.to_vec().into()).expect("an outcome");
    }

    async fn purge(&self, limit: usize) -> usize {
        self.execute(&self.statements.purge, &[&(limit as i64)])
            .await as usize
    }
}

fn pool(server: &Server) -> Pool {
    let config: tokio_postgres::Config = server.url().parse().expect("a URL");
    let pool = Pool::builder(Manager::new(config, NoTls)).max_size(CONNECTIONS);
    pool.build().expect("a pool")
}
