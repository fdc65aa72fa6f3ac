//! The Redis store beside the same work done bare, in one run and in turns:
//!
//! ```sh
//! cargo bench --features redis --bench store_redis
//! ```
//!
//! *Bare* is what nobody can do without who keeps the contract in one round trip: `SET` with `NX` and
//! `GET`, and `PTTL`, in one pipeline; and for a first request a script that compares the holder and
//! sets. Both sides use the same kind of connection, and `given` is the very connection of the bare
//! side. Wall-clock figures of a busy machine say little; read the ratios.

#[path = "../tests/support/redis.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::{HeaderMap, StatusCode};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tower_idempotency::{
    ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, RedisStore, ScopedKey,
    Store,
};

const BODY: usize = 200;
const CALLERS: [usize; 3] = [1, 16, 64];
const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(150);
const TTL: u64 = 86_400_000;

fn main() {
    // `cargo test` runs it too: there is nothing to test.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(run());
}

async fn run() {
    let server = support::Server::start();
    let client = redis::Client::open(server.url()).expect("a URL");
    let bare = client
        .get_multiplexed_async_connection()
        .await
        .expect("a connection");
    let given = RedisStore::from_connection(bare.clone())
        .await
        .expect("a store");
    let connected = RedisStore::connect(&server.url()).await.expect("a store");
    let script = redis::Script::new(
        "if redis.call('GETRANGE', KEYS[1], 0, 48) == ARGV[1] then \
         redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) return 1 end return 0",
    );
    script
        .load_async(&mut bare.clone())
        .await
        .expect("a script");
    let hash: Arc<str> = script.get_hash().into();

    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let version = server.info("server", "redis_version").unwrap_or_default();
    println!(
        "Redis {version}, body of {BODY} bytes, load {}",
        load.trim()
    );
    println!();
    println!(
        "| work | callers | bare ops/s | given ops/s | ratio (quartiles) | connected ratio | server CPU µs/op, bare | given | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for work in [Work::First, Work::Replay] {
        for callers in CALLERS {
            let sides = [
                Side::Bare(bare.clone(), Arc::clone(&hash)),
                Side::Store(given.clone()),
                Side::Store(connected.clone()),
            ];
            for side in &sides {
                slice(&server, side, work, callers, SLICE / 3).await;
            }
            let mut rates: [Vec<f64>; 3] = Default::default();
            let mut cpu = [0.0; 3];
            let mut done = [0_u64; 3];
            for round in 0..ROUNDS {
                for turn in 0..3 {
                    let n = (round + turn) % 3;
                    let sliced = slice(&server, &sides[n], work, callers, SLICE).await;
                    rates[n].push(sliced.rate);
                    cpu[n] += sliced.cpu;
                    done[n] += sliced.done;
                }
            }
            let ratios = |n: usize| {
                let pairs = rates[n].iter().zip(&rates[0]);
                sorted(pairs.map(|(store, bare)| store / bare).collect())
            };
            let (of_given, of_connected) = (ratios(1), ratios(2));
            let per_op = |n: usize| cpu[n] * 1e6 / done[n] as f64;
            println!(
                "| {work:?} | {callers} | {:.0} | {:.0} | **{:.2}** ({:.2}–{:.2}) | {:.2} | {:.1} | {:.1} | {:.2} |",
                at(&sorted(rates[0].clone()), 2),
                at(&sorted(rates[1].clone()), 2),
                at(&of_given, 2),
                at(&of_given, 1),
                at(&of_given, 3),
                at(&of_connected, 2),
                per_op(0),
                per_op(1),
                per_op(0) / per_op(1),
            );
        }
    }
    walk(&server, &connected).await;
}

/// What a walk over many records costs that are none of its business.
async fn walk(server: &support::Server, store: &RedisStore) {
    println!();
    server.command(&["FLUSHALL"]);
    let mut kept = 0_usize;
    for thousands in [10, 100] {
        while kept < thousands * 1_000 {
            let filling = (0..64).map(|_| {
                let store = store.clone();
                tokio::spawn(async move { first(&store).await })
            });
            for filled in filling.collect::<Vec<_>>() {
                filled.await.expect("a first request");
            }
            kept += 64;
        }
        let before = server_cpu(server);
        let began = Instant::now();
        let purged = store.purge(1_000).await.expect("a purge");
        println!(
            "a purge that finds {} of {kept} records: {:.2} s, {:.2} s of the server's CPU",
            purged.removed,
            began.elapsed().as_secs_f64(),
            server_cpu(server) - before,
        );
    }
}

#[derive(Clone, Copy, Debug)]
enum Work {
    First,
    Replay,
}

#[derive(Clone)]
enum Side {
    Bare(MultiplexedConnection, Arc<str>),
    Store(RedisStore),
}

struct Sliced {
    rate: f64,
    done: u64,
    cpu: f64,
}

async fn slice(
    server: &support::Server,
    side: &Side,
    work: Work,
    callers: usize,
    length: Duration,
) -> Sliced {
    // The same key for all replays of one side; a new one for each first request.
    let kept = kept(side).await;
    let before = server_cpu(server);
    let began = Instant::now();
    let end = began + length;
    let callers: Vec<_> = (0..callers)
        .map(|_| {
            let (side, kept) = (side.clone(), kept.clone());
            tokio::spawn(async move {
                let mut done = 0_u64;
                while Instant::now() < end {
                    match (work, &side) {
                        (Work::First, Side::Store(store)) => first(store).await,
                        (Work::First, Side::Bare(connection, hash)) => {
                            bare_first(&mut connection.clone(), hash).await;
                        }
                        (Work::Replay, Side::Store(store)) => replay(store, &kept).await,
                        (Work::Replay, Side::Bare(connection, _)) => {
                            let name = kept.key.key();
                            let held = bare_claim(&mut connection.clone(), name).await;
                            assert!(held.is_some(), "not a replay");
                        }
                    }
                    done += 1;
                }
                done
            })
        })
        .collect();
    let mut done = 0;
    for caller in callers {
        done += caller.await.expect("a caller");
    }
    Sliced {
        rate: done as f64 / began.elapsed().as_secs_f64(),
        done,
        cpu: server_cpu(server) - before,
    }
}

fn request() -> ClaimRequest {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let key = format!(
        "8e03978e-40d5-43dd-bc93-{:012x}",
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let key = ScopedKey::new(
        "http",
        "user-17",
        &IdempotencyKey::new(&key).expect("a key"),
    );
    ClaimRequest::new(key, Fingerprint::of(&[b"POST", b"/charges"]))
}

fn outcome() -> Outcome {
    Outcome::response(
        StatusCode::CREATED,
        &HeaderMap::new(),
        &[&[b'x'; BODY]],
        None,
    )
}

async fn first(store: &RedisStore) {
    let request = request();
    let Ok(Claimed::Acquired { claim, .. }) = store.claim(&request).await else {
        panic!("not acquired");
    };
    let completion = store.complete(&claim, &outcome(), None).await;
    assert!(
        matches!(completion, Ok(Completion::Recorded)),
        "{completion:?}"
    );
}

async fn replay(store: &RedisStore, kept: &ClaimRequest) {
    let request = ClaimRequest::new(kept.key.clone(), kept.fingerprint);
    let claimed = store.claim(&request).await;
    assert!(matches!(claimed, Ok(Claimed::Existing(_))), "{claimed:?}");
}

async fn kept(side: &Side) -> ClaimRequest {
    let request = request();
    match side {
        Side::Store(store) => {
            let Ok(Claimed::Acquired { claim, .. }) = store.claim(&request).await else {
                panic!("not acquired");
            };
            let _ = store
                .complete(&claim, &outcome(), None)
                .await
                .expect("a completion");
        }
        Side::Bare(connection, _) => {
            let mut command = redis::cmd("SET");
            command
                .arg(request.key.key())
                .arg(completed(&[7; 49]))
                .arg("PX")
                .arg(TTL);
            connection
                .clone()
                .req_packed_command(&command)
                .await
                .expect("a record");
        }
    }
    request
}

async fn bare_first(connection: &mut MultiplexedConnection, hash: &str) {
    let request = request();
    let held = bare_claim(connection, request.key.key()).await;
    assert!(held.is_none(), "not a first one");
    let mut command = redis::cmd("EVALSHA");
    command.arg(hash).arg(1).arg(request.key.key());
    command
        .arg(&[7_u8; 49][..])
        .arg(completed(&[7; 49]))
        .arg(TTL);
    let reply = connection
        .req_packed_command(&command)
        .await
        .expect("a reply");
    assert_eq!(reply, redis::Value::Int(1));
}

async fn bare_claim(connection: &mut MultiplexedConnection, key: &str) -> Option<Vec<u8>> {
    let mut pipe = redis::Pipeline::with_capacity(2);
    let set = pipe.cmd("SET").arg(key).arg(&[7_u8; 49][..]);
    set.arg("NX").arg("PX").arg(TTL).arg("GET");
    pipe.cmd("PTTL").arg(key);
    let mut replies = connection
        .req_packed_commands(&pipe, 0, 2)
        .await
        .expect("replies");
    match replies.swap_remove(0) {
        redis::Value::Nil => None,
        redis::Value::BulkString(value) => Some(value),
        other => panic!("{other:?}"),
    }
}

/// The bare record: state, fingerprint and holder in 49 bytes, then the outcome.
fn completed(head: &[u8; 49]) -> Vec<u8> {
    [&head[..], outcome().as_bytes()].concat()
}

fn server_cpu(server: &support::Server) -> f64 {
    let field = |name| {
        server
            .info("cpu", name)
            .and_then(|value| value.parse::<f64>().ok())
    };
    field("used_cpu_user").unwrap_or(0.0) + field("used_cpu_sys").unwrap_or(0.0)
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn at(sorted: &[f64], quarter: usize) -> f64 {
    sorted[sorted.len() * quarter / 4]
}
