//! How fast your own store is from here: first requests, replays and live duplicates per second.
//!
//! ```text
//! cargo run --release --example loadtest
//! cargo run --release --example loadtest --features postgres -- --store postgres \
//!     --url postgres://user@host/database --concurrency 64 --seconds 10 --size 2000
//! ```
//!
//! It asks the store and nothing else: no HTTP, no layer. It writes into that store, one record for
//! each first request, in a namespace of its own; they expire five minutes later, and the store's purge
//! removes them.

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tower_idempotency::{
    ClaimRequest, Claimed, Completion, Fingerprint, IdempotencyKey, Outcome, Owner, ScopedKey,
    Store, StoreError, store,
};

const USAGE: &str = "\
Usage: loadtest [FLAG VALUE]...

  --store memory|sqlite|postgres|redis which store [memory]
  --url URL                            where it is: a path for sqlite, else a URL
  --concurrency N                      callers that ask one thing after the other [16]
  --seconds N                          how long each kind of request is asked [5]
  --size N                             bytes of a kept outcome [200]
  --help                               this text
";

#[tokio::main]
async fn main() -> ExitCode {
    let flags = match Flags::parse(std::env::args().skip(1)) {
        Ok(Some(flags)) => flags,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("loadtest: {problem}; --help lists the flags");
            return ExitCode::from(2);
        }
    };
    let store = match store::open(&flags.url).await {
        Ok(store) => store,
        Err(error) => {
            eprintln!("loadtest: {}", Chain(&error));
            return ExitCode::FAILURE;
        }
    };
    match load(store, &flags).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("loadtest: {}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}

async fn load(store: Arc<dyn Store>, flags: &Flags) -> Result<(), StoreError> {
    let name = store.properties().name;
    let Flags {
        concurrency, size, ..
    } = flags;
    println!("{name}, {concurrency} callers, outcomes of {size} bytes");
    let outcome = Outcome::value(&vec![b'x'; *size]);
    // What is asked for again: records that are completed, and claims that are held.
    let (mut kept, mut held) = (Vec::new(), Vec::new());
    for _ in 0..ASKED_AGAIN {
        let request = new_request();
        first(&*store, &request, &outcome).await?;
        kept.push(request);
        let request = new_request();
        let _ = store.claim(&request).await?;
        held.push(request);
    }
    let again = [Arc::new(Vec::new()), Arc::new(kept), Arc::new(held)];
    println!(
        "{:<10} {:>12} {:>10} {:>10}",
        "request", "per second", "p50 µs", "p99 µs"
    );
    for (kind, again) in [Kind::First, Kind::Replay, Kind::InFlight]
        .into_iter()
        .zip(&again)
    {
        let begun = Instant::now();
        let end = begun + flags.duration;
        let callers: Vec<_> = (0..flags.concurrency)
            .map(|caller| {
                let (store, outcome) = (Arc::clone(&store), outcome.clone());
                let again = Arc::clone(again);
                tokio::spawn(async move { ask(&*store, kind, &again, caller, &outcome, end).await })
            })
            .collect();
        let mut latencies = Vec::new();
        for caller in callers {
            let asked = caller.await.unwrap_or_else(|panic| {
                std::panic::resume_unwind(panic.into_panic());
            });
            latencies.extend(asked?);
        }
        let per_second = latencies.len() as f64 / begun.elapsed().as_secs_f64();
        latencies.sort_unstable();
        let at = |hundredth: usize| {
            let latency = latencies.get((latencies.len().saturating_sub(1)) * hundredth / 100);
            latency.copied().unwrap_or_default().as_micros()
        };
        println!(
            "{:<10} {per_second:>12.0} {:>10} {:>10}",
            kind.name(),
            at(50),
            at(99)
        );
    }
    for request in again.iter().flat_map(|requests| &**requests) {
        store.remove(&request.key).await?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Kind {
    First,
    Replay,
    InFlight,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Replay => "replay",
            Self::InFlight => "in flight",
        }
    }
}

/// One caller. How long each request took.
async fn ask(
    store: &dyn Store,
    kind: Kind,
    again: &[ClaimRequest],
    caller: usize,
    outcome: &Outcome,
    end: Instant,
) -> Result<Vec<Duration>, StoreError> {
    let mut latencies = Vec::new();
    for n in caller.. {
        let request = match kind {
            Kind::First => new_request(),
            Kind::Replay | Kind::InFlight => {
                let mut request = again[n % again.len()].clone();
                request.owner = Owner::random();
                request
            }
        };
        let begun = Instant::now();
        if begun >= end {
            break;
        }
        match kind {
            Kind::First => first(store, &request, outcome).await?,
            Kind::Replay | Kind::InFlight => {
                let _ = store.claim(&request).await?;
            }
        }
        latencies.push(begun.elapsed());
        // A store that never waits leaves the others no turn.
        tokio::task::yield_now().await;
    }
    Ok(latencies)
}

async fn first(
    store: &dyn Store,
    request: &ClaimRequest,
    outcome: &Outcome,
) -> Result<(), StoreError> {
    let Claimed::Acquired { claim, .. } = store.claim(request).await? else {
        return Err(StoreError::unavailable(
            "a key that was never used is taken",
        ));
    };
    match store.complete(&claim, outcome, None).await? {
        Completion::Recorded => Ok(()),
        other => Err(StoreError::unavailable(format!(
            "an outcome was not recorded: {other:?}"
        ))),
    }
}

fn new_request() -> ClaimRequest {
    let key = ScopedKey::new("loadtest", "caller", &IdempotencyKey::random());
    let mut request = ClaimRequest::new(key, Fingerprint::of(&[b"loadtest"]));
    request.lease = RETENTION / 2;
    request.retention = RETENTION;
    request
}

struct Flags {
    url: String,
    concurrency: usize,
    duration: Duration,
    size: usize,
}

impl Flags {
    /// `None`: the usage is asked for.
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let (mut store, mut url) = ("memory".to_owned(), None);
        let (mut concurrency, mut seconds, mut size) = (16, 5, 200);
        while let Some(flag) = arguments.next() {
            if flag == "--help" {
                return Ok(None);
            }
            let value = arguments
                .next()
                .ok_or_else(|| format!("`{flag}` needs a value"))?;
            match &*flag {
                "--store" => store = value,
                "--url" => url = Some(value),
                "--concurrency" => concurrency = number(&flag, &value)?,
                "--seconds" => seconds = number(&flag, &value)?,
                "--size" => size = number(&flag, &value)?,
                _ => return Err(format!("`{flag}` is no flag")),
            }
        }
        if concurrency == 0 {
            return Err("`--concurrency` needs at least one caller".to_owned());
        }
        let url = match (&*store, url) {
            ("memory", None) => "memory:".to_owned(),
            ("sqlite", Some(path)) if !path.starts_with("sqlite:") => format!("sqlite:{path}"),
            ("sqlite" | "postgres" | "redis", Some(url)) => url,
            ("sqlite" | "postgres" | "redis", None) => {
                return Err(format!("`--store {store}` needs `--url`"));
            }
            ("memory", Some(_)) => return Err("the store in memory has no URL".to_owned()),
            _ => return Err(format!("`{store}` is no store")),
        };
        Ok(Some(Self {
            url,
            concurrency,
            duration: Duration::from_secs(seconds),
            size,
        }))
    }
}

fn number<T: FromStr>(flag: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{flag}` needs a number"))
}

/// An error with what it comes from.
struct Chain<'a>(&'a dyn std::error::Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

const ASKED_AGAIN: usize = 1_000;
const RETENTION: Duration = Duration::from_secs(5 * 60);
