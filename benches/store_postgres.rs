//! What the store on PostgreSQL adds to the same work done by hand: a first request beside an INSERT
//! and an UPDATE, a replay beside a SELECT by the primary key.
//!
//! ```sh
//! cargo bench --features postgres,testing --bench store_postgres
//! ```
//!
//! It starts a server of its own, as durable as PostgreSQL ships it. Both sides use tokio-postgres, a
//! pool of 16 and prepared statements, on tables that are alike. They take turns, half a second each,
//! and what is compared is one turn with its neighbour: on a busy machine the ratios keep still
//! while the figures do not. `cargo test` only builds it.

#[path = "../tests/support/postgres.rs"]
mod postgres;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deadpool_postgres::{Manager, Pool};
use postgres::{Fresh, Server};
use tokio_postgres::NoTls;
use tower_idempotency::{
    ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, Owner, PostgresStore,
    ScopedKey, Store,
};

const CONNECTIONS: usize = 16;
const TURN: Duration = Duration::from_millis(500);
const TURNS: usize = 9;
/// More than are replayed in one turn.
const KEPT: u64 = 20_000;
/// Those of them that are replayed again and again.
const OFTEN: u64 = 1_000;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(measure());
}

async fn measure() {
    let server = Server::start_with(&[]);
    let sides = Sides::new(&server).await;
    println!(
        "{:<8} {:>7} {:>11} {:>11}   {:<20} {:>13} {:>13}   {:<9} target",
        "work",
        "callers",
        "store op/s",
        "bare op/s",
        "ratio (range)",
        "store µs",
        "bare µs",
        "µs ratio"
    );
    for (work, target) in [
        (Work::First, Some(0.85)),
        (Work::Replay, Some(0.75)),
        (Work::Foreign, None),
    ] {
        for callers in [1, 16, 64] {
            let mut pairs = Vec::new();
            for turn in 0..=TURNS {
                // Who begins changes, so that neither side always runs behind the other one.
                let order = [turn % 2 == 0, turn % 2 == 1];
                let first = sides.turn(&server, work, order[0], callers).await;
                let second = sides.turn(&server, work, order[1], callers).await;
                let (store, bare) = if order[0] {
                    (first, second)
                } else {
                    (second, first)
                };
                // The first pair warms up.
                if turn > 0 {
                    pairs.push((store, bare));
                }
            }
            report(work, callers, target, &pairs);
        }
    }
    println!("\nµs: CPU time for one operation, server + client; its ratio is the steadier one");
    println!(
        "load: {}",
        std::fs::read_to_string("/proc/loadavg")
            .unwrap_or_default()
            .trim()
    );
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    First,
    /// Of a key that this process has met.
    Replay,
    /// Of a key that only another process has met.
    Foreign,
}

#[derive(Clone, Copy)]
struct Turn {
    per_second: f64,
    /// CPU time for one operation: of the server, of this process.
    server: f64,
    client: f64,
}

fn report(work: Work, callers: usize, target: Option<f64>, pairs: &[(Turn, Turn)]) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let of = |value: fn(&(Turn, Turn)) -> f64| pairs.iter().map(value).collect::<Vec<_>>();
    let ratios = of(|(store, bare)| store.per_second / bare.per_second);
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    println!(
        "{:<8} {callers:>7} {:>11.0} {:>11.0}   {:.2} ({least:.2} to {most:.2})  {:>6.0} + {:<4.0} {:>6.0} + {:<4.0}   {:<9.2} {}",
        format!("{work:?}").to_lowercase(),
        median(of(|(store, _)| store.per_second)),
        median(of(|(_, bare)| bare.per_second)),
        median(ratios.clone()),
        median(of(|(store, _)| store.server)),
        median(of(|(store, _)| store.client)),
        median(of(|(_, bare)| bare.server)),
        median(of(|(_, bare)| bare.client)),
        median(of(
            |(store, bare)| (bare.server + bare.client) / (store.server + store.client)
        )),
        target
            .filter(|_| callers == 16)
            .map_or_else(String::new, |target| target.to_string()),
    );
}

/// The store and the work done by hand, each with a pool and a table of its own.
#[derive(Clone)]
struct Sides {
    store: PostgresStore,
    schema: String,
    pool: Pool,
    bare: Arc<Bare>,
    next: Arc<AtomicU64>,
}

impl Sides {
    async fn new(server: &Server) -> Self {
        let ours = Fresh::with(server.url(), |options| options).await;
        let pool_of_ours = pool(server);
        let store = PostgresStore::options().schema(&ours.schema);
        let store = store.from_pool(pool_of_ours.clone()).expect("a name");
        let theirs = Fresh::with(server.url(), |options| options).await;
        let bare = Arc::new(Bare::new(pool(server), &theirs.table()));
        let sides = Self {
            store,
            schema: ours.schema.clone(),
            pool: pool_of_ours,
            bare,
            next: Arc::new(AtomicU64::new(1)),
        };
        for ours in [true, false] {
            let filling = (0..16).map(|lane| {
                let sides = sides.clone();
                tokio::spawn(async move {
                    for n in (lane..KEPT).step_by(16) {
                        sides.first(ours, &kept(n)).await;
                    }
                })
            });
            for filling in filling.collect::<Vec<_>>() {
                filling.await.expect("it works");
            }
        }
        sides
    }

    /// With a store that has met no key yet.
    fn elsewhere(&self) -> Self {
        let options = PostgresStore::options().schema(&self.schema);
        let store = options.from_pool(self.pool.clone()).expect("a name");
        Self {
            store,
            ..self.clone()
        }
    }

    async fn turn(&self, server: &Server, work: Work, ours: bool, callers: usize) -> Turn {
        let sides = match work {
            Work::Foreign => self.elsewhere(),
            Work::First | Work::Replay => self.clone(),
        };
        let processes = server.processes();
        let cpu = [cpu_micros(&processes), cpu_micros(&[std::process::id()])];
        let begun = Instant::now();
        let working: Vec<_> = (0..callers)
            .map(|_| {
                let sides = sides.clone();
                tokio::spawn(async move {
                    let mut done = 0_u32;
                    while begun.elapsed() < TURN {
                        let n = sides.next.fetch_add(1, Ordering::Relaxed);
                        match work {
                            Work::First => sides.first(ours, &format!("first {n}")).await,
                            Work::Replay => sides.replay(ours, &kept(n % OFTEN)).await,
                            Work::Foreign => sides.replay(ours, &kept(n % KEPT)).await,
                        }
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        let mut done = 0.0;
        for working in working {
            done += f64::from(working.await.expect("it works"));
        }
        Turn {
            per_second: done / begun.elapsed().as_secs_f64(),
            server: (cpu_micros(&processes) - cpu[0]) / done,
            client: (cpu_micros(&[std::process::id()]) - cpu[1]) / done,
        }
    }

    async fn first(&self, ours: bool, name: &str) {
        let request = request(name);
        let outcome = Outcome::value(&[7; 260]);
        if !ours {
            return self.bare.first(&request, &outcome).await;
        }
        let claimed = self.store.claim(&request).await.expect("an answer");
        let Claimed::Acquired { claim, .. } = claimed else {
            panic!("the key is not new");
        };
        let completion = self.store.complete(&claim, &outcome, None).await;
        assert_eq!(completion.expect("an answer"), Completion::Recorded);
    }

    async fn replay(&self, ours: bool, name: &str) {
        let request = request(name);
        if !ours {
            return self.bare.replay(&request).await;
        }
        let claimed = self.store.claim(&request).await.expect("an answer");
        assert!(matches!(claimed, Claimed::Existing(_)), "the key is new");
    }
}

/// What somebody writes by hand who needs nothing but these statements.
struct Bare {
    pool: Pool,
    insert: String,
    update: String,
    select: String,
}

impl Bare {
    fn new(pool: Pool, table: &str) -> Self {
        Self {
            pool,
            insert: format!(
                "INSERT INTO {table} (id, namespace, scope, key, state, attempt, fingerprint, owner, \
                 claim_sum, created_at, lease_until, expires_at, retention) VALUES ($1, $2, $3, $4, \
                 'started', 1, $5, $6, 0, now(), now() + interval '30 s', now() + interval '1 day', \
                 '1 day') ON CONFLICT (id) DO NOTHING"
            ),
            update: format!(
                "UPDATE {table} SET state = 'completed', outcome = $3, outcome_sum = 0, completed_at \
                 = now() WHERE id = $1 AND owner = $2 AND state = 'started'"
            ),
            select: format!("SELECT state, fingerprint, outcome FROM {table} WHERE id = $1"),
        }
    }

    async fn first(&self, request: &ClaimRequest, outcome: &Outcome) {
        let (key, digest) = (&request.key, request.key.digest());
        let owner = &request.owner.as_bytes()[..];
        let inserted = {
            let client = self.pool.get().await.expect("a connection");
            let insert = client
                .prepare_cached(&self.insert)
                .await
                .expect("it is right");
            let fingerprint = &request.fingerprint.as_bytes()[..];
            let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 6] = [
                &&digest[..],
                &key.namespace(),
                &key.scope(),
                &key.key(),
                &fingerprint,
                &owner,
            ];
            client
                .execute(&insert, &parameters)
                .await
                .expect("an answer")
        };
        assert_eq!(inserted, 1);
        let client = self.pool.get().await.expect("a connection");
        let update = client
            .prepare_cached(&self.update)
            .await
            .expect("it is right");
        let frame = &outcome.as_bytes()[..];
        let updated = client
            .execute(&update, &[&&digest[..], &owner, &frame])
            .await;
        assert_eq!(updated.expect("an answer"), 1);
    }

    async fn replay(&self, request: &ClaimRequest) {
        let client = self.pool.get().await.expect("a connection");
        let select = client
            .prepare_cached(&self.select)
            .await
            .expect("it is right");
        let digest = request.key.digest();
        let row = client
            .query_one(&select, &[&&digest[..]])
            .await
            .expect("a row");
        let (state, fingerprint): (&str, &[u8]) = (row.get(0), row.get(1));
        assert!(state == "completed" && fingerprint == request.fingerprint.as_bytes());
        let frame: Vec<u8> = row.get(2);
        Outcome::decode(frame.into()).expect("an outcome");
    }
}

fn kept(n: u64) -> String {
    format!("kept {n}")
}

fn request(name: &str) -> ClaimRequest {
    let key = IdempotencyKey::new(name).expect("a key");
    let key = ScopedKey::new("bench", "caller-42", &key);
    let mut request = ClaimRequest::new(key, Fingerprint::of(&[b"bench"]));
    request.owner = Owner::random();
    request
}

fn pool(server: &Server) -> Pool {
    let config: tokio_postgres::Config = server.url().parse().expect("a URL");
    let pool = Pool::builder(Manager::new(config, NoTls))
        .max_size(CONNECTIONS)
        .build();
    pool.expect("a pool")
}

/// What these have used of the processor since they began.
fn cpu_micros(processes: &[u32]) -> f64 {
    let nanoseconds = processes.iter().flat_map(|process| {
        let threads = std::fs::read_dir(format!("/proc/{process}/task"));
        threads
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|thread| {
                let used = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
                used.split(' ').next()?.parse::<f64>().ok()
            })
    });
    nanoseconds.sum::<f64>() / 1_000.0
}
