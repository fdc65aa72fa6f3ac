//! What sharing commits is worth: first requests per second through `SqliteStore`, beside the same rows
//! written bare into the same table of the same file, with a commit of its own for each claim and each
//! completion.
//!
//! `cargo bench --features sqlite --bench store_sqlite`
//!
//! Both keep `synchronous = FULL`. Slices of the two take turns, so that a machine that slows down
//! slows both; the printed ratio is the median of the ratios of neighbours. Under `cargo test` it runs
//! a few requests of each, to show that it works.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use http::{HeaderMap, HeaderValue, StatusCode};
use rusqlite::{Connection, params};
use tokio::sync::{mpsc, oneshot};
use tower_idempotency::{
    ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, ScopedKey,
    SqliteStore, Store,
};

fn main() {
    let measure = std::env::args().any(|argument| argument == "--bench");
    let (rounds, slice) = if measure {
        (15, Duration::from_millis(400))
    } else {
        (1, Duration::from_millis(20))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let folder = folder();
    let file = folder.join("bench.db");
    let store = SqliteStore::open(&file).expect("a new file");
    let bare = Bare::open(&file);
    println!(
        "first requests per second, synchronous = FULL, 260 bytes of body, medians of {rounds} slices"
    );
    println!(
        "{:>7} {:>16} {:>12} {:>7}",
        "callers", "commit per move", "SqliteStore", "ratio"
    );
    for callers in [1, 16, 64] {
        let mut slices = Vec::new();
        for _ in 0..rounds {
            let bare = runtime.block_on(per_second(callers, slice, &bare));
            let shared = runtime.block_on(per_second(callers, slice, &store));
            slices.push((bare, shared, shared / bare));
        }
        let median = |of: fn(&(f64, f64, f64)) -> f64| {
            let mut values: Vec<f64> = slices.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        println!(
            "{callers:>7} {:>16.0} {:>12.0} {:>6.1}x",
            median(|slice| slice.0),
            median(|slice| slice.1),
            median(|slice| slice.2),
        );
    }
    drop((store, bare));
    let _ = std::fs::remove_dir_all(folder);
}

/// One first request: a claim of a new key, and its completion.
trait First: Clone + Send + 'static {
    fn first(&self, key: ScopedKey, outcome: Outcome) -> impl Future<Output = ()> + Send;
}

async fn per_second(callers: usize, slice: Duration, first: &impl First) -> f64 {
    let done = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let calling: Vec<_> = (0..callers)
        .map(|_| {
            let (first, done) = (first.clone(), Arc::clone(&done));
            tokio::spawn(async move {
                while began.elapsed() < slice {
                    first.first(new_key(), outcome()).await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for caller in calling {
        caller.await.expect("a caller panicked");
    }
    done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}

impl First for SqliteStore {
    async fn first(&self, key: ScopedKey, outcome: Outcome) {
        let request = ClaimRequest::new(key, Fingerprint::of(&[b"bench"]));
        let Ok(Claimed::Acquired { claim, .. }) = self.claim(&request).await else {
            panic!("the key is new");
        };
        let completion = self.complete(&claim, &outcome, None).await;
        assert!(matches!(completion, Ok(Completion::Recorded)));
    }
}

/// A thread with one connection and prepared statements, which commits each move and checks nothing.
#[derive(Clone)]
struct Bare(mpsc::UnboundedSender<(Step, oneshot::Sender<()>)>);

enum Step {
    Claim(ScopedKey),
    Complete(ScopedKey, Outcome),
}

impl Bare {
    fn open(file: &Path) -> Self {
        let connection = Connection::open(file).expect("the file");
        connection
            .execute_batch("PRAGMA synchronous = FULL")
            .expect("a setting");
        let (sender, mut queue) = mpsc::unbounded_channel::<(Step, oneshot::Sender<()>)>();
        std::thread::spawn(move || {
            let mut claim = connection
                .prepare(
                    "INSERT INTO idempotency_records (lookup_key, namespace, scope, key, state,
                         attempt, owner, fingerprint, lease_until, created_at, expires_at,
                         retention, checksum)
                     VALUES (?1, ?2, ?3, ?4, 'started', 1, zeroblob(16), zeroblob(52),
                         ?5 + 30000000, ?5, ?5 + 86400000000, 86400000000, zeroblob(17))
                     ON CONFLICT (lookup_key) DO NOTHING",
                )
                .expect("a statement");
            let mut complete = connection
                .prepare(
                    "UPDATE idempotency_records
                     SET state = 'completed', status = 201, lease_until = NULL, completed_at = ?3,
                         checksum = zeroblob(17), outcome = ?2
                     WHERE lookup_key = ?1 AND state = 'started' AND owner = zeroblob(16)",
                )
                .expect("a statement");
            while let Some((step, reply)) = queue.blocking_recv() {
                let changed = match step {
                    Step::Claim(key) => claim.execute(params![
                        key.as_bytes(),
                        key.namespace(),
                        key.scope(),
                        key.key(),
                        now(),
                    ]),
                    Step::Complete(key, outcome) => {
                        complete.execute(params![key.as_bytes(), &outcome.as_bytes()[..], now()])
                    }
                };
                assert_eq!(changed, Ok(1));
                let _ = reply.send(());
            }
        });
        Self(sender)
    }

    async fn step(&self, step: Step) {
        let (reply, answer) = oneshot::channel();
        self.0.send((step, reply)).expect("the thread runs");
        answer.await.expect("the thread answers");
    }
}

impl First for Bare {
    async fn first(&self, key: ScopedKey, outcome: Outcome) {
        self.step(Step::Claim(key.clone())).await;
        self.step(Step::Complete(key, outcome)).await;
    }
}

fn now() -> i64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.map_or(0, |since| since.as_micros() as i64)
}

fn new_key() -> ScopedKey {
    ScopedKey::new("bench", "caller", &IdempotencyKey::random())
}

fn outcome() -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    Outcome::response(StatusCode::CREATED, &headers, &[&[b'x'; 260]], None)
}

fn folder() -> PathBuf {
    // Beside the program: a temporary directory may be kept in memory, where a flush costs nothing.
    let program = std::env::current_exe().expect("the path of this program");
    let parent = program.parent().expect("a directory");
    let folder = parent.join(format!("bench-sqlite-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a new directory");
    folder
}
