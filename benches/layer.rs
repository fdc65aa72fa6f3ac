//! What the layer costs: CPU time of a request through it, beside a bare handler and beside the work
//! that no implementation can leave out.
//!
//! ```sh
//! cargo bench --bench layer
//! cargo bench --bench layer -- --rounds 101
//! cargo bench --bench layer -- --only first --rounds 1000     # for a profiler: the one subject, at 256 B
//! ```
//!
//! `benches/README.md` says how to read what it prints. A harness of its own: what is compared has
//! to alternate, because on a shared machine two things that are measured one after the other
//! differ by more than the layer costs. Under `cargo test` it runs one short round.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::future::pending;
use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use cpu_time::ProcessTime;
use futures_util::FutureExt;
use http::header::{AUTHORIZATION, CONTENT_TYPE, LOCATION};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tower::ServiceExt;
use tower::layer::layer_fn;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
use tower_service::Service;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("layer: {problem}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime can be built");
    if !arguments.quick {
        grow_the_heap();
    }
    if let Some(subject) = arguments.only {
        let mut bench = runtime.block_on(async { Bench::new(SIZES[0]) });
        runtime.block_on(bench.check(subject));
        for _ in 0..arguments.rounds {
            let sample = runtime.block_on(bench.time(subject, 1_000));
            black_box(sample);
        }
        // Emptying a full store is not what is profiled.
        std::mem::forget(bench);
        return ExitCode::SUCCESS;
    }
    println!("{}", machine());
    for size in SIZES {
        let mut bench = runtime.block_on(async { Bench::new(size) });
        for subject in SUBJECTS {
            runtime.block_on(bench.check(subject));
        }
        let measured = runtime.block_on(bench.measure(&arguments));
        println!("{}", table(size, &measured));
        if !arguments.quick {
            println!("{}", targets(size, &measured));
        }
    }
    ExitCode::SUCCESS
}

const SIZES: [usize; 3] = [256, 16 << 10, 1 << 20];

/// Lets the allocator own memory that was written to before, as that of a service which has been up
/// for a while. Otherwise the page faults of a growing heap, a third of a microsecond for each first
/// request, are charged to whoever allocates next.
fn grow_the_heap() {
    let mut pieces: Vec<Vec<u8>> = (0..400_000).map(|_| vec![1; 600]).collect();
    // The last piece stays, so that what lies before it is not given back.
    std::mem::forget(pieces.pop());
}

/// What is measured, in the order of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Bare,
    NoOp,
    PassThrough,
    First,
    FirstScoped,
    FirstCredentials,
    Replay,
    InFlight,
    Mismatch,
    Hash,
    Map,
}

const SUBJECTS: [Subject; 11] = [
    Subject::Bare,
    Subject::NoOp,
    Subject::PassThrough,
    Subject::First,
    Subject::FirstScoped,
    Subject::FirstCredentials,
    Subject::Replay,
    Subject::InFlight,
    Subject::Mismatch,
    Subject::Hash,
    Subject::Map,
];

impl Subject {
    const fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare handler",
            Self::NoOp => "layer that does nothing",
            Self::PassThrough => "pass-through, no key",
            Self::First => "first request",
            Self::FirstScoped => "first request, with a scope",
            Self::FirstCredentials => "first request, `Authorization` and no scope",
            Self::Replay => "replay",
            Self::InFlight => "in flight (409)",
            Self::Mismatch => "mismatch (422)",
            Self::Hash => "floor: SHA-256 of the body",
            Self::Map => "floor: `Mutex<HashMap>` claim and complete",
        }
    }

    const fn status(self) -> u16 {
        match self {
            Self::InFlight => 409,
            Self::Mismatch => 422,
            _ => 201,
        }
    }
}

/// `None` while the claim stands.
type Kept = Option<Arc<[u8]>>;

/// The services of one body size, and what their requests are made of.
///
/// The routers have their state, as `axum::serve` gives it to them; without it they apply their
/// layers anew for each request.
struct Bench {
    bare: Router,
    no_op: Router,
    layered: Router,
    scoped: Router,
    body: Bytes,
    other_body: Bytes,
    held_body: Bytes,
    map: Mutex<HashMap<[u8; 36], Kept>>,
    fresh: u64,
}

impl Bench {
    fn new(size: usize) -> Self {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let scoped = IdempotencyLayer::builder(MemoryStore::new())
            .scope(Scope::extension::<Account>())
            .build()
            .expect("the settings are right");
        Self {
            bare: service().with_state(()),
            no_op: service().layer(layer_fn(NoOp)).with_state(()),
            layered: service().layer(layer).with_state(()),
            scoped: service().layer(scoped).with_state(()),
            body: Bytes::from(vec![b'a'; size]),
            other_body: Bytes::from(vec![b'b'; size]),
            held_body: Bytes::from(vec![HELD; size]),
            map: Mutex::default(),
            fresh: 0,
        }
    }

    /// Sets the stage of a subject, and sees that it is what its name says.
    async fn check(&mut self, subject: Subject) {
        match subject {
            Subject::Replay => {
                let first = self.request(&self.body, KEY, key(REPLAYED));
                self.layered
                    .clone()
                    .oneshot(first)
                    .await
                    .expect("infallible");
            }
            Subject::InFlight => {
                let held = self.request(&self.held_body, KEY, key(IN_FLIGHT));
                // Left alone, its attempt goes on, detached, until the process ends.
                let held = self.layered.clone().oneshot(held);
                assert!(held.now_or_never().is_none());
            }
            Subject::Mismatch => {
                let first = self.request(&self.other_body, KEY, key(MISMATCHED));
                self.layered
                    .clone()
                    .oneshot(first)
                    .await
                    .expect("infallible");
            }
            Subject::Hash | Subject::Map => return,
            _ => {}
        }
        let response = self.send(subject).await;
        assert_eq!(response.status().as_u16(), subject.status(), "{subject:?}");
        let replayed = response.headers().contains_key("idempotency-replayed");
        assert_eq!(replayed, subject == Subject::Replay, "{subject:?}");
    }

    async fn measure(&mut self, arguments: &Arguments) -> Measured {
        let mut repeats = [1_u32; SUBJECTS.len()];
        let mut samples = vec![Vec::new(); SUBJECTS.len()];
        if !arguments.quick {
            for (subject, repeats) in SUBJECTS.iter().zip(&mut repeats) {
                // A warm-up that also tells how often fits into a slice.
                let one = self.time(*subject, 64).await.cpu / 64.0;
                *repeats = (SLICE_NS / one).clamp(4.0, 20_000.0) as u32;
            }
        }
        for _ in 0..arguments.rounds {
            for (index, subject) in SUBJECTS.iter().enumerate() {
                let sample = self.time(*subject, repeats[index]).await;
                samples[index].push(Sample {
                    cpu: sample.cpu / f64::from(repeats[index]),
                    wall: sample.wall / f64::from(repeats[index]),
                });
            }
            // The engine's renewals want the thread now and then.
            tokio::task::yield_now().await;
        }
        Measured(samples)
    }

    async fn time(&mut self, subject: Subject, repeats: u32) -> Sample {
        let (cpu, wall) = (ProcessTime::now(), Instant::now());
        match subject {
            Subject::Hash => {
                for _ in 0..repeats {
                    black_box(Sha256::digest(black_box(&self.body)));
                }
            }
            Subject::Map => {
                for _ in 0..repeats {
                    self.claim_and_complete();
                }
            }
            _ => {
                for _ in 0..repeats {
                    let response = self.send(subject).await;
                    let body = response.into_body().collect().await;
                    black_box(body.expect("the body is whole").to_bytes());
                }
            }
        }
        Sample {
            cpu: cpu.elapsed().as_nanos() as f64,
            wall: wall.elapsed().as_nanos() as f64,
        }
    }

    async fn send(&mut self, subject: Subject) -> Response<Body> {
        // Every subject draws a key and sends as many headers, so that all of them build the same
        // request.
        self.fresh += 1;
        let fresh = key(self.fresh);
        let router = match subject {
            Subject::Bare => &self.bare,
            Subject::NoOp => &self.no_op,
            Subject::FirstScoped => &self.scoped,
            _ => &self.layered,
        };
        let mut request = match subject {
            Subject::Replay => self.request(&self.body, KEY, key(REPLAYED)),
            Subject::InFlight => self.request(&self.held_body, KEY, key(IN_FLIGHT)),
            Subject::Mismatch => self.request(&self.body, KEY, key(MISMATCHED)),
            Subject::PassThrough => self.request(&self.body, NO_KEY, fresh),
            _ => self.request(&self.body, KEY, fresh),
        };
        match subject {
            Subject::FirstScoped => {
                request.extensions_mut().insert(Account(4711));
            }
            Subject::FirstCredentials => {
                let token = HeaderValue::from_static("Bearer 3f9a7c1e5b8d4f2a9c6e1b3d5f7a9c2e");
                request.headers_mut().insert(AUTHORIZATION, token);
            }
            _ => {}
        }
        let Ok(response) = router.clone().oneshot(request).await;
        response
    }

    fn request(&self, body: &Bytes, name: HeaderName, key: [u8; 36]) -> Request<Body> {
        let key = HeaderValue::from_bytes(&key).expect("hexadecimal digits");
        Request::post("/charges")
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .header(name, key)
            .body(Body::from(body.clone()))
            .expect("a request")
    }

    fn claim_and_complete(&mut self) {
        self.fresh += 1;
        let key = key(self.fresh);
        let mut map = self.map.lock().expect("nobody panics");
        let claimed = map.entry(key).or_insert(None);
        assert!(black_box(claimed).is_none());
        drop(map);
        let outcome: Arc<[u8]> = Arc::from([7; 260]);
        let mut map = self.map.lock().expect("nobody panics");
        *map.get_mut(&key).expect("it was just claimed") = Some(outcome);
    }
}

/// What an API of medium size does: reads the body, answers a small JSON document.
fn service() -> Router {
    Router::new().route("/charges", post(charge))
}

async fn charge(body: Bytes) -> (StatusCode, [(HeaderName, &'static str); 1], Json<Receipt>) {
    if body.first() == Some(&HELD) {
        pending::<()>().await;
    }
    let receipt = Receipt {
        id: "ch_3PXq2eKZ7vYx0a1b2c3d4e5f",
        amount: 4_999,
        currency: "eur",
        status: "succeeded",
        created: 1_764_460_800,
        description: "Order 4711, two items, shipped to the customer's address",
        bytes: body.len(),
    };
    let location = [(LOCATION, "/charges/ch_3PXq2eKZ7vYx0a1b2c3d4e5f")];
    (StatusCode::CREATED, location, Json(receipt))
}

/// 190 bytes of JSON.
#[derive(Serialize)]
struct Receipt {
    id: &'static str,
    amount: u64,
    currency: &'static str,
    status: &'static str,
    created: u64,
    description: &'static str,
    bytes: usize,
}

#[derive(Clone)]
struct Account(u64);

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "account-{}", self.0)
    }
}

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const NO_KEY: HeaderName = HeaderName::from_static("x-not-the-key-x");
const HELD: u8 = b'h';
const REPLAYED: u64 = u64::MAX;
const IN_FLIGHT: u64 = u64::MAX - 1;
const MISMATCHED: u64 = u64::MAX - 2;

/// A key in the form of a UUID, as most clients send it, without the cost of drawing one.
fn key(number: u64) -> [u8; 36] {
    let mut key = *b"6f9619ff-8b86-4011-b42d-000000000000";
    let mut rest = number;
    for (index, digit) in key.iter_mut().enumerate().rev().take(17) {
        if index != 23 {
            *digit = b"0123456789abcdef"[(rest & 15) as usize];
            rest >>= 4;
        }
    }
    key
}

/// What axum takes for any layer at all: it boxes each layered service and its future.
#[derive(Clone)]
struct NoOp<T>(T);

impl<T: Service<R>, R> Service<R> for NoOp<T> {
    type Response = T::Response;
    type Error = T::Error;
    type Future = T::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), T::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: R) -> T::Future {
        self.0.call(request)
    }
}

/// Nanoseconds for one request.
#[derive(Clone, Copy)]
struct Sample {
    cpu: f64,
    wall: f64,
}

/// The rounds of each subject, in the order of [`SUBJECTS`].
struct Measured(Vec<Vec<Sample>>);

impl Measured {
    fn of(&self, subject: Subject) -> &[Sample] {
        let index = SUBJECTS.iter().position(|one| *one == subject);
        index.map_or(&[], |index| &self.0[index])
    }

    fn cpu(&self, subject: Subject) -> Quartiles {
        Quartiles::of(self.of(subject).iter().map(|sample| sample.cpu))
    }

    fn wall(&self, subject: Subject) -> Quartiles {
        Quartiles::of(self.of(subject).iter().map(|sample| sample.wall))
    }

    /// A quantity that is made of several subjects of one round, over all rounds.
    fn each_round(&self, of: impl Fn(&dyn Fn(Subject) -> f64) -> f64) -> Quartiles {
        let rounds = self.of(Subject::Bare).len();
        Quartiles::of((0..rounds).map(|round| of(&|subject| self.of(subject)[round].cpu)))
    }
}

#[derive(Clone, Copy)]
struct Quartiles {
    min: f64,
    lower: f64,
    median: f64,
    upper: f64,
}

impl Quartiles {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
        Self {
            min: at(0.0),
            lower: at(0.25),
            median: at(0.5),
            upper: at(0.75),
        }
    }
}

fn table(size: usize, measured: &Measured) -> String {
    let mut text = format!("\n### Body of {}\n\n", bytes(size));
    text += "| | CPU, median | CPU, least | wall, median | ÷ bare |\n|---|---:|---:|---:|---:|\n";
    for subject in SUBJECTS {
        let cpu = measured.cpu(subject);
        let wall = measured.wall(subject);
        let ratio = measured.each_round(|cpu| cpu(subject) / cpu(Subject::Bare));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {:.2} |",
            subject.name(),
            time(cpu.median),
            time(cpu.min),
            time(wall.median),
            ratio.median,
        );
    }
    text
}

/// A promise about one body size: a quantity of each round, and how large its median may be.
struct Target {
    what: &'static str,
    limit: f64,
    unit: &'static str,
    measured: Quartiles,
}

fn targets(size: usize, measured: &Measured) -> String {
    use Subject::{Bare, First, Hash, NoOp, PassThrough, Replay};
    let mut targets = Vec::new();
    let first_limit = match size {
        256 => Some(1.5),
        0x4000 => Some(1.25),
        _ => None,
    };
    if let Some(limit) = first_limit {
        targets.push(Target {
            what: "(first − bare) ÷ (SHA-256 + 1 µs)",
            limit,
            unit: "",
            measured: measured.each_round(|cpu| (cpu(First) - cpu(Bare)) / (cpu(Hash) + 1_000.0)),
        });
    }
    targets.push(Target {
        what: "(replay − SHA-256) ÷ bare",
        limit: 0.9,
        unit: "",
        measured: measured.each_round(|cpu| (cpu(Replay) - cpu(Hash)) / cpu(Bare)),
    });
    for (what, floor) in [
        ("pass-through − bare", Bare),
        ("pass-through − layer that does nothing", NoOp),
    ] {
        targets.push(Target {
            what,
            limit: 100.0,
            unit: " ns",
            measured: measured.each_round(|cpu| cpu(PassThrough) - cpu(floor)),
        });
    }
    let mut text = format!("Targets at {}:\n\n", bytes(size));
    text += "| | target | median (quartiles) | |\n|---|---:|---:|---|\n";
    for target in targets {
        let Target {
            what,
            limit,
            unit,
            measured,
        } = target;
        let digits = if unit.is_empty() { 2 } else { 0 };
        let _ = writeln!(
            text,
            "| {what} | ≤ {limit}{unit} | {:.digits$}{unit} ({:.digits$} – {:.digits$}) | {} |",
            measured.median,
            measured.lower,
            measured.upper,
            if measured.median <= limit {
                "met"
            } else {
                "**not met**"
            },
        );
    }
    text
}

fn bytes(size: usize) -> String {
    match size {
        0x10_0000.. => format!("{} MiB", size >> 20),
        0x400.. => format!("{} KiB", size >> 10),
        _ => format!("{size} B"),
    }
}

fn time(nanoseconds: f64) -> String {
    if nanoseconds < 100_000.0 {
        format!("{nanoseconds:.0} ns")
    } else {
        format!("{:.0} µs", nanoseconds / 1_000.0)
    }
}

/// One line on where this ran; numbers of another machine, or of a busy one, are other numbers.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown CPU", |model| model.trim_matches(['\t', ' ', ':']));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    let rustc = Command::new("rustc").arg("--version").output();
    let rustc = rustc.map_or_else(
        |_| "rustc unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    );
    format!("{model}, {cores} cores, load {load}, {rustc}, one current-thread runtime")
}

/// How long one subject is measured in a round: long enough for the clock, short enough that a
/// disturbance meets few of them.
const SLICE_NS: f64 = 3e6;

struct Arguments {
    rounds: usize,
    quick: bool,
    only: Option<Subject>,
}

impl Arguments {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        // `cargo bench` says so; `cargo test` does not.
        let mut parsed = Self {
            rounds: 1,
            quick: true,
            only: None,
        };
        let mut rounds = 41;
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => parsed.quick = false,
                "--rounds" => {
                    let number = arguments.next().and_then(|number| number.parse().ok());
                    rounds = number
                        .filter(|rounds| *rounds > 0)
                        .ok_or("--rounds needs a number")?;
                }
                "--only" => {
                    let name = arguments.next().unwrap_or_default();
                    let named =
                        |subject: &Subject| format!("{subject:?}").eq_ignore_ascii_case(&name);
                    parsed.only = SUBJECTS.into_iter().find(named);
                    parsed
                        .only
                        .ok_or_else(|| format!("--only needs one of {SUBJECTS:?}"))?;
                }
                // What is meant for libtest goes to all targets.
                _ => {}
            }
        }
        if !parsed.quick {
            parsed.rounds = rounds;
        }
        Ok(parsed)
    }
}
