//! 1,000 clients whose service is away for a while: when do they come back?

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_idempotency::client::{ClientLayer, RetryPolicy};

/// Plots both, and says how much jitter lowers the peak.
pub fn report(out: &mut impl Write) -> io::Result<()> {
    let (without, with) = (simulate(Jitter::None), simulate(Jitter::Full));
    writeln!(
        out,
        "{CLIENTS} clients send one request each; the service is away for {OUTAGE:?}.\n\
         Requests per {} ms, one # for 20:\n",
        ROW.as_millis()
    )?;
    writeln!(out, "   at  {:<59} full jitter", "no jitter")?;
    let (left, right) = (buckets(&without, ROW), buckets(&with, ROW));
    let shown = ROW * ROWS;
    for n in 0..ROWS {
        let at = ROW * n;
        let cell = |buckets: &[usize]| {
            let count = buckets.get(n as usize).copied().unwrap_or(0);
            format!("{count:>5} {}", "#".repeat(count.div_ceil(20)))
        };
        let (left, right) = (cell(&left), cell(&right));
        writeln!(
            out,
            "{:>4.1}s {left:<59} {}",
            at.as_secs_f64(),
            right.trim_end()
        )?;
    }
    let later = |arrivals: &[Duration]| arrivals.iter().filter(|at| **at >= shown).count();
    writeln!(out, "later {:>5} {:>59}", later(&without), later(&with))?;
    let (high, low) = (peak(&without), peak(&with));
    writeln!(
        out,
        "\nbusiest {} ms of retries: {high} without jitter, {low} with it, {} times less",
        MOMENT.as_millis(),
        high / low
    )
}

#[derive(Clone, Copy)]
pub enum Jitter {
    None,
    Full,
}

/// When each request arrived, counted from the begin.
///
/// Time goes on only when everybody waits; and it stands still from the begin, so that no fraction of a
/// millisecond makes two runs differ.
#[tokio::main(flavor = "current_thread", start_paused = true)]
pub async fn simulate(jitter: Jitter) -> Vec<Duration> {
    let begun = Instant::now();
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|seed| {
            // One program each, so that none knows of another: a policy and a budget of its own.
            let retry = match jitter {
                Jitter::None => RetryPolicy::new().jitter(|ceiling| ceiling),
                Jitter::Full => {
                    let random = Mutex::new(StdRng::seed_from_u64(seed));
                    RetryPolicy::new().jitter(move |ceiling| {
                        let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
                        random.random_range(Duration::ZERO..=ceiling)
                    })
                }
            };
            let arrivals = Arc::clone(&arrivals);
            let service = tower::service_fn(move |_: Request<Full<Bytes>>| {
                let at = begun.elapsed();
                arrivals
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(at);
                let status = match at < OUTAGE {
                    true => StatusCode::SERVICE_UNAVAILABLE,
                    false => StatusCode::CREATED,
                };
                let mut answer = Response::new(Full::<Bytes>::default());
                *answer.status_mut() = status;
                std::future::ready(Ok::<_, io::Error>(answer))
            });
            let client = ClientLayer::new().retry(retry).layer(service);
            let mut request = Request::new(Full::default());
            *request.method_mut() = http::Method::POST;
            tokio::spawn(client.oneshot(request))
        })
        .collect();
    for client in clients {
        // Those who give up after five retries give up.
        let _ = client.await;
    }
    let mut arrivals = arrivals.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *arrivals)
}

/// The number of requests in each stretch of time.
fn buckets(arrivals: &[Duration], width: Duration) -> Vec<usize> {
    let mut buckets = Vec::new();
    for at in arrivals {
        let n = usize::try_from(at.as_nanos() / width.as_nanos()).unwrap_or(usize::MAX);
        if buckets.len() <= n {
            buckets.resize(n + 1, 0);
        }
        buckets[n] += 1;
    }
    buckets
}

/// How many retries came in the busiest moment. First tries are not counted: nobody spreads those.
pub fn peak(arrivals: &[Duration]) -> usize {
    let mut moments = buckets(arrivals, MOMENT);
    if let Some(first) = moments.first_mut() {
        *first -= usize::try_from(CLIENTS).unwrap_or(usize::MAX);
    }
    moments.into_iter().max().unwrap_or(0)
}

pub const CLIENTS: u64 = 1_000;
const OUTAGE: Duration = Duration::from_secs(3);
const ROW: Duration = Duration::from_millis(100);
/// A second more than the outage.
const ROWS: u32 = 40;
const MOMENT: Duration = Duration::from_millis(10);
