//! One slice of a round: many callers, one kind of work, one side.

use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use tower_idempotency::{ClaimRequest, Outcome};

use crate::side::Side;

/// What one caller does once.
pub enum Job<H> {
    Claim(ClaimRequest),
    Complete(H),
    First(ClaimRequest),
    Replay(ClaimRequest),
}

/// What a slice found.
#[derive(Default)]
pub struct Slice {
    pub per_second: f64,
    /// Nanoseconds; not of every job where a job is shorter than a look at the clock.
    pub latencies: Vec<u32>,
    /// Microseconds of CPU for one job: of this process, and of the server.
    pub client: f64,
    pub server: Option<f64>,
}

/// Lets so many callers work off the jobs, until they are done or the time is over. What was claimed
/// comes back.
pub async fn drive<S: Side>(
    side: &S,
    jobs: Vec<Job<S::Held>>,
    callers: usize,
    limit: Duration,
    stride: usize,
    processes: &[u32],
) -> (Slice, Vec<S::Held>) {
    let mut shares: Vec<Vec<Job<S::Held>>> = (0..callers).map(|_| Vec::new()).collect();
    for (n, job) in jobs.into_iter().enumerate() {
        shares[n % callers].push(job);
    }
    let outcome = crate::side::outcome();
    let (client, server) = (ProcessTime::now(), cpu_of(processes));
    let begun = Instant::now();
    let end = begun + limit;
    let working: Vec<_> = shares
        .into_iter()
        .map(|share| tokio::spawn(work_off(side.clone(), share, outcome.clone(), end, stride)))
        .collect();
    let mut slice = Slice::default();
    let (mut done, mut held) = (0, Vec::new());
    for working in working {
        let (of_one, latencies, claims) = working.await.expect("a caller");
        done += of_one;
        slice.latencies.extend(latencies);
        held.extend(claims);
    }
    let took = begun.elapsed().as_secs_f64();
    let done = f64::from(done);
    slice.per_second = done / took;
    slice.client = client.elapsed().as_secs_f64() * 1e6 / done;
    slice.server =
        Option::zip(cpu_of(processes), server).map(|(after, before)| (after - before) / done);
    (slice, held)
}

async fn work_off<S: Side>(
    side: S,
    jobs: Vec<Job<S::Held>>,
    outcome: Outcome,
    end: Instant,
    stride: usize,
) -> (u32, Vec<u32>, Vec<S::Held>) {
    let mut latencies = Vec::with_capacity(jobs.len() / stride + 1);
    let mut held = Vec::with_capacity(jobs.len());
    let mut done = 0;
    for (n, job) in jobs.into_iter().enumerate() {
        let timed = n.is_multiple_of(stride).then(Instant::now);
        if timed.is_some_and(|now| now >= end) {
            break;
        }
        match job {
            Job::Claim(request) => held.push(side.claim(&request).await),
            Job::Complete(claim) => side.complete(&claim, &outcome).await,
            Job::First(request) => {
                let claim = side.claim(&request).await;
                side.complete(&claim, &outcome).await;
            }
            Job::Replay(request) => side.replay(&request).await,
        }
        if let Some(begun) = timed {
            latencies.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        done += 1;
    }
    (done, latencies, held)
}

/// Calls `purge` until nothing is left. One job is one record; a latency is that of a call.
pub async fn purge<S: Side>(side: &S, batch: usize, processes: &[u32]) -> (Slice, usize) {
    let mut slice = Slice::default();
    let (client, server) = (ProcessTime::now(), cpu_of(processes));
    let begun = Instant::now();
    let mut removed = 0;
    loop {
        let call = Instant::now();
        let now = side.purge(batch).await;
        slice
            .latencies
            .push(u32::try_from(call.elapsed().as_nanos()).unwrap_or(u32::MAX));
        removed += now;
        if now < batch {
            break;
        }
    }
    let done = removed as f64;
    slice.per_second = done / begun.elapsed().as_secs_f64();
    slice.client = client.elapsed().as_secs_f64() * 1e6 / done;
    slice.server =
        Option::zip(cpu_of(processes), server).map(|(after, before)| (after - before) / done);
    (slice, removed)
}

/// Microseconds that these have used since they began, if the system tells.
fn cpu_of(processes: &[u32]) -> Option<f64> {
    let mut nanoseconds = None;
    for process in processes {
        let threads = std::fs::read_dir(format!("/proc/{process}/task"));
        for thread in threads.into_iter().flatten().flatten() {
            let used = std::fs::read_to_string(thread.path().join("schedstat"));
            let used = used
                .ok()
                .and_then(|used| used.split(' ').next()?.parse::<f64>().ok());
            if let Some(used) = used {
                *nanoseconds.get_or_insert(0.0) += used;
            }
        }
    }
    nanoseconds.map(|nanoseconds: f64| nanoseconds / 1_000.0)
}
