//! What a request costs: CPU time and wall time beside the bare handler, in rounds that alternate.

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use cpu_time::ProcessTime;
use http::header::{CONTENT_TYPE, COOKIE};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::BodyExt;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

use crate::peer::{self, Peer, Settings};
use crate::service::{self, HELD};

const SIZES: [(usize, &str); 3] = [(256, "256 B"), (16 << 10, "16 KiB"), (1 << 20, "1 MiB")];

/// The store of axum-idempotent looks at every record of a session when it writes one, so it depends
/// on how many a session has.
pub const KEYS_OF_A_SESSION: u64 = 50;

/// How long one subject is measured in a round.
const SLICE_NS: f64 = 3e6;

#[derive(Clone, Copy)]
struct Setting {
    threads: usize,
    tasks: usize,
}

const SETTINGS: [Setting; 4] = [
    Setting {
        threads: 1,
        tasks: 1,
    },
    Setting {
        threads: 1,
        tasks: 64,
    },
    Setting {
        threads: 2,
        tasks: 1,
    },
    Setting {
        threads: 2,
        tasks: 64,
    },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    PassThrough,
    First,
    Replay,
    InFlight,
}

const SUBJECTS: [(Peer, Work); 16] = [
    (Peer::Bare, Work::First),
    (Peer::Ours, Work::PassThrough),
    (Peer::Ours, Work::First),
    (Peer::Ours, Work::Replay),
    (Peer::Ours, Work::InFlight),
    (Peer::OursBlake3, Work::First),
    (Peer::OursBlake3, Work::Replay),
    (Peer::Idempotent, Work::PassThrough),
    (Peer::Idempotent, Work::First),
    (Peer::Idempotent, Work::Replay),
    (Peer::Idempotent, Work::InFlight),
    (Peer::Sessions, Work::First),
    (Peer::AxumKey, Work::PassThrough),
    (Peer::AxumKey, Work::First),
    (Peer::AxumKey, Work::Replay),
    (Peer::AxumHash, Work::First),
];
const BARE: usize = 0;

pub fn report(rounds: usize, quick: bool) -> String {
    let mut text = "### Cost\n\n".to_owned();
    text += "A cell: CPU in µs, **÷ bare handler**, wall in µs, each for one request.\n";
    for (size, name) in SIZES {
        let _ = write!(text, "\n#### Body of {name}\n\n|  |");
        for Setting { threads, tasks } in SETTINGS {
            let s = if threads == 1 { "" } else { "s" };
            let t = if tasks == 1 { "" } else { "s" };
            let _ = write!(text, " {threads} thread{s}, {tasks} task{t} |");
        }
        text += "\n|---|---:|---:|---:|---:|\n";
        let measured = SETTINGS.map(|setting| measure(size, setting, rounds, quick));
        for (index, (peer, work)) in SUBJECTS.into_iter().enumerate() {
            let _ = write!(text, "| {} |", label(peer, work));
            for setting in &measured {
                let of = |of: fn(&Sample) -> f64| median(setting[index].iter().map(of));
                let bare = setting[BARE].iter();
                let ratio = setting[index].iter().zip(bare);
                let ratio = median(ratio.map(|(sample, bare)| sample.cpu / bare.cpu));
                let (cpu, wall) = (of(|sample| sample.cpu), of(|sample| sample.wall));
                let _ = write!(
                    text,
                    " {} · **{}** · {} |",
                    digits(cpu / 1e3),
                    digits(ratio),
                    digits(wall / 1e3)
                );
            }
            text.push('\n');
        }
    }
    text
}

fn label(peer: Peer, work: Work) -> String {
    let work = match (peer, work) {
        (Peer::Bare | Peer::Sessions, _) => return peer.name().to_owned(),
        (_, Work::PassThrough) => "without a key",
        (_, Work::First) => "first request",
        (_, Work::Replay) => "replay",
        (_, Work::InFlight) => "in flight",
    };
    format!("{}: {work}", peer.name())
}

/// The rounds of each subject, in the order of [`SUBJECTS`].
type Measured = Vec<Vec<Sample>>;

/// Nanoseconds for one request.
#[derive(Clone, Copy)]
struct Sample {
    cpu: f64,
    wall: f64,
}

fn measure(size: usize, setting: Setting, rounds: usize, quick: bool) -> Measured {
    let runtime = runtime(setting.threads, quick);
    let bench = Arc::new(runtime.block_on(async { Bench::new(size) }));
    let mut repeats = [setting.tasks; SUBJECTS.len()];
    for (index, (peer, work)) in SUBJECTS.into_iter().enumerate() {
        runtime.block_on(Arc::clone(&bench).check(peer, work));
        if !quick {
            let one = warm_up(&runtime, &bench, setting, index);
            let fit = (SLICE_NS / one) as usize / setting.tasks;
            repeats[index] = fit.clamp(1, 20_000) * setting.tasks;
        }
    }
    let mut measured = vec![Vec::with_capacity(rounds); SUBJECTS.len()];
    for round in 0..rounds {
        for place in 0..SUBJECTS.len() {
            // Nobody always follows the same neighbour's leftovers in the caches.
            let index = (place * 5 + round) % SUBJECTS.len();
            measured[index].push(time(&runtime, &bench, setting, index, repeats[index]));
        }
    }
    // Emptying full stores, and held requests that never end, are not measured.
    std::mem::forget(bench);
    runtime.shutdown_background();
    measured
}

/// CPU nanoseconds of a request, once waking a thread is no longer what most of them go into.
fn warm_up(runtime: &Runtime, bench: &Arc<Bench>, setting: Setting, index: usize) -> f64 {
    let mut repeats = setting.tasks.max(32);
    loop {
        let one = time(runtime, bench, setting, index, repeats).cpu;
        if one * repeats as f64 > SLICE_NS / 2.0 {
            return one;
        }
        repeats *= 2;
    }
}

fn runtime(threads: usize, quick: bool) -> Runtime {
    if threads == 1 {
        if !quick {
            grow_the_heap();
        }
        return Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime can be built");
    }
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(threads).enable_time();
    let ready = Arc::new(AtomicUsize::new(0));
    let started = Arc::clone(&ready);
    builder.on_thread_start(move || {
        if !quick {
            grow_the_heap();
        }
        started.fetch_add(1, Ordering::SeqCst);
    });
    let runtime = builder.build().expect("a runtime can be built");
    // What a thread does before its first task is not the first subject's.
    while ready.load(Ordering::SeqCst) < threads {
        std::thread::sleep(Duration::from_millis(1));
    }
    runtime
}

/// Lets the allocator own memory that was written to before, as that of a service which has been up
/// for a while. Otherwise the page faults of a growing heap are charged to whoever allocates next.
fn grow_the_heap() {
    let mut pieces: Vec<Vec<u8>> = (0..100_000).map(|_| vec![1; 600]).collect();
    // The last piece stays, so that what lies before it is not given back.
    std::mem::forget(pieces.pop());
}

/// CPU and wall time of `repeats` requests, by so many tasks at once as the setting says.
fn time(
    runtime: &Runtime,
    bench: &Arc<Bench>,
    setting: Setting,
    index: usize,
    repeats: usize,
) -> Sample {
    let (peer, work) = SUBJECTS[index];
    let each = repeats / setting.tasks;
    let run = async {
        let tasks: Vec<_> = (0..setting.tasks)
            .map(|_| {
                let bench = Arc::clone(bench);
                tokio::spawn(async move {
                    for _ in 0..each {
                        let response = bench.send(peer, work).await;
                        let body = response.into_body().collect().await;
                        black_box(body.expect("a whole body").to_bytes());
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no request panics");
        }
    };
    let (cpu, wall) = (ProcessTime::now(), Instant::now());
    runtime.block_on(run);
    let requests = (each * setting.tasks) as f64;
    Sample {
        cpu: cpu.elapsed().as_nanos() as f64 / requests,
        wall: wall.elapsed().as_nanos() as f64 / requests,
    }
}

/// The services of one body size, and what their requests are made of.
struct Bench {
    routers: [Router; Peer::ALL.len()],
    body: Bytes,
    held: Bytes,
    fresh: AtomicU64,
}

impl Bench {
    fn new(size: usize) -> Self {
        Self {
            routers: Peer::ALL.map(|peer| peer.before(service::charges(), Settings::default())),
            body: Bytes::from(vec![b'a'; size]),
            held: Bytes::from(vec![HELD; size]),
            fresh: AtomicU64::new(0),
        }
    }

    /// Sets the stage of a subject, and sees that it is what its name says.
    async fn check(self: Arc<Self>, peer: Peer, work: Work) {
        match work {
            Work::Replay => drop(self.send(peer, work).await),
            Work::InFlight => {
                let bench = Arc::clone(&self);
                tokio::spawn(async move { bench.send(peer, work).await });
                // Whoever answers 201 now has not met the one before; the next look tells.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Work::PassThrough | Work::First => {}
        }
        let response = self.send(peer, work).await;
        let status = if work == Work::InFlight { 409 } else { 201 };
        assert_eq!(response.status(), status, "{peer:?} {work:?}");
        let replayed = peer::is_replay(&response);
        assert_eq!(replayed, work == Work::Replay, "{peer:?} {work:?}");
    }

    async fn send(&self, peer: Peer, work: Work) -> Response<Body> {
        // Every subject draws a key and a session and sends as many headers, so that all of them
        // build the same request.
        let fresh = self.fresh.fetch_add(1, Ordering::Relaxed);
        let (name, key, session, body) = match work {
            Work::PassThrough => (NO_KEY, key(fresh), fresh / KEYS_OF_A_SESSION, &self.body),
            Work::First => (KEY, key(fresh), fresh / KEYS_OF_A_SESSION, &self.body),
            Work::Replay => (KEY, key(REPLAYED), REPLAYED, &self.body),
            Work::InFlight => (KEY, key(IN_FLIGHT), IN_FLIGHT, &self.held),
        };
        let key = HeaderValue::from_bytes(&key).expect("hexadecimal digits");
        let session = HeaderValue::from_str(&peer::session(session)).expect("digits");
        let request = Request::post("/charges")
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .header(COOKIE, session)
            .header(name, key)
            .body(Body::from(body.clone()))
            .expect("a request");
        let index = Peer::ALL.iter().position(|one| *one == peer);
        let router = &self.routers[index.expect("every peer is in the list")];
        let Ok(response) = router.clone().oneshot(request).await;
        response
    }
}

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const NO_KEY: HeaderName = HeaderName::from_static("x-not-the-key-x");
const REPLAYED: u64 = u64::MAX;
const IN_FLIGHT: u64 = u64::MAX - 1;

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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Three digits that count.
fn digits(value: f64) -> String {
    if value >= 100.0 {
        format!("{value:.0}")
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}
