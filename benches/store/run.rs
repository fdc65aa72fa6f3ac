//! The rounds of one store, and what they come to.

use std::time::Duration;

use tower_idempotency::ClaimRequest;

use crate::arguments::Arguments;
use crate::drive::{Job, Slice, drive, purge};
use crate::side::{Side, again, new_request, short_lived};

/// How one store is measured.
pub struct Plan {
    pub store: &'static str,
    /// The version of what stands behind it, and what bare means.
    pub about: String,
    pub slice: Duration,
    /// More jobs than are done in a slice; where a slice is to end with its jobs, their number.
    pub jobs: usize,
    /// Records that are replayed.
    pub kept: usize,
    /// Every how many jobs the clock is looked at.
    pub stride: usize,
    /// Whether a replay by a process that has not met the key is another one.
    pub elsewhere: bool,
    /// Expired records for a purge, and for how long they live: longer than it takes to make them
    /// where a claim removes expired ones.
    pub expired: usize,
    pub short_life: Duration,
    /// Those that serve both sides.
    pub processes: Box<dyn Fn() -> Vec<u32>>,
}

pub const WORKS: [&str; 6] = ["claim", "complete", "first", "replay", "elsewhere", "purge"];

/// All rounds of one kind of work.
pub struct Measured {
    pub store: &'static str,
    pub about: String,
    pub work: &'static str,
    pub callers: usize,
    pub ours: Total,
    pub bare: Total,
    /// How many times the bare side's operations per second, and its CPU time for one, in each round.
    pub rates: Vec<f64>,
    pub costs: Vec<f64>,
}

#[derive(Default)]
pub struct Total {
    pub per_second: Vec<f64>,
    pub latencies: Vec<u32>,
    pub client: Vec<f64>,
    pub server: Vec<f64>,
}

struct Lane<S> {
    side: S,
    kept: Vec<ClaimRequest>,
}

impl<S: Side> Lane<S> {
    async fn new(side: S, records: usize) -> Self {
        let mut lane = Self {
            side,
            kept: Vec::new(),
        };
        lane.keep(records).await;
        lane
    }

    async fn keep(&mut self, records: usize) {
        self.kept = (0..records).map(|_| new_request()).collect();
        let jobs = self.kept.iter().cloned().map(Job::First).collect();
        drive(&self.side, jobs, 64, FOR_EVER, 64, &[]).await;
    }

    async fn slice(
        &self,
        work: &str,
        plan: &Plan,
        limit: Duration,
        callers: usize,
        held: Vec<S::Held>,
    ) -> (Slice, Vec<S::Held>) {
        let new = || (0..plan.jobs).map(|_| new_request());
        let kept = || (0..plan.jobs).map(|n| again(&self.kept[n % self.kept.len()]));
        let jobs: Vec<Job<S::Held>> = match work {
            "claim" => new().map(Job::Claim).collect(),
            "complete" => held.into_iter().map(Job::Complete).collect(),
            "first" => new().map(Job::First).collect(),
            _ => kept().map(Job::Replay).collect(),
        };
        // All that were claimed are completed.
        let limit = if work == "complete" { FOR_EVER } else { limit };
        let elsewhere;
        let side = if work == "elsewhere" {
            elsewhere = self.side.elsewhere();
            &elsewhere
        } else {
            &self.side
        };
        let processes = (plan.processes)();
        drive(side, jobs, callers, limit, plan.stride, &processes).await
    }
}

pub async fn measure<A: Side, B: Side>(
    arguments: &Arguments,
    plan: Plan,
    ours: A,
    bare: B,
) -> Vec<Measured> {
    let kept = if arguments.quick { 50 } else { plan.kept };
    let mut lanes = (Lane::new(ours, kept).await, Lane::new(bare, kept).await);
    let limit = match arguments.slice {
        Some(limit) => limit,
        None if arguments.quick => Duration::from_millis(20),
        None => plan.slice,
    };
    let rounds = arguments
        .rounds
        .unwrap_or(if arguments.quick { 1 } else { ROUNDS });
    let mut measured = Vec::new();
    for callers in arguments.callers() {
        let mut of_these: Vec<Measured> = WORKS[..5]
            .iter()
            .filter(|work| {
                arguments.runs(plan.store, work) || wanted_for_completions(arguments, &plan, work)
            })
            .filter(|work| plan.elsewhere || **work != "elsewhere")
            .map(|work| Measured::new(&plan, work, callers))
            .collect();
        // The first round warms up.
        for round in 0..rounds + usize::from(!arguments.quick) {
            lanes.0.side.begin();
            lanes.1.side.begin();
            let (mut held_by_ours, mut held_by_bare) = (Vec::new(), Vec::new());
            for measured in &mut of_these {
                let work = measured.work;
                let (of_ours, of_bare);
                // Who begins changes, so that neither side always runs behind the other one.
                if round % 2 == 0 {
                    of_ours = lanes
                        .0
                        .slice(work, &plan, limit, callers, held_by_ours)
                        .await;
                    of_bare = lanes
                        .1
                        .slice(work, &plan, limit, callers, held_by_bare)
                        .await;
                } else {
                    of_bare = lanes
                        .1
                        .slice(work, &plan, limit, callers, held_by_bare)
                        .await;
                    of_ours = lanes
                        .0
                        .slice(work, &plan, limit, callers, held_by_ours)
                        .await;
                }
                (held_by_ours, held_by_bare) = (of_ours.1, of_bare.1);
                if arguments.quick || round > 0 {
                    measured.add(of_ours.0, of_bare.0);
                }
            }
        }
        of_these.retain(|measured| arguments.runs(plan.store, measured.work));
        measured.extend(of_these);
    }
    if arguments.runs(plan.store, "purge") {
        measured.push(purges(arguments, &plan, &mut lanes.0, &mut lanes.1).await);
    }
    measured
}

fn wanted_for_completions(arguments: &Arguments, plan: &Plan, work: &str) -> bool {
    work == "claim" && arguments.runs(plan.store, "complete")
}

async fn purges<A: Side, B: Side>(
    arguments: &Arguments,
    plan: &Plan,
    ours: &mut Lane<A>,
    bare: &mut Lane<B>,
) -> Measured {
    let mut measured = Measured::new(plan, "purge", 1);
    let rounds = if arguments.quick { 1 } else { PURGES };
    for _ in 0..rounds {
        let of_ours = one_purge(arguments, plan, ours).await;
        let of_bare = one_purge(arguments, plan, bare).await;
        measured.add(of_ours, of_bare);
    }
    measured
}

async fn one_purge<S: Side>(arguments: &Arguments, plan: &Plan, lane: &mut Lane<S>) -> Slice {
    let expired = if arguments.quick { 100 } else { plan.expired };
    lane.side.begin();
    let jobs = (0..expired)
        .map(|_| Job::Claim(short_lived(plan.short_life)))
        .collect();
    drive(&lane.side, jobs, 64, FOR_EVER, 64, &[]).await;
    tokio::time::sleep(plan.short_life + Duration::from_millis(20)).await;
    let (slice, removed) = purge(&lane.side, PURGED_AT_ONCE, &(plan.processes)()).await;
    assert_eq!(
        removed, expired,
        "{}: not all that was expired was removed",
        plan.store
    );
    slice
}

impl Measured {
    fn new(plan: &Plan, work: &'static str, callers: usize) -> Self {
        Self {
            store: plan.store,
            about: plan.about.clone(),
            work,
            callers,
            ours: Total::default(),
            bare: Total::default(),
            rates: Vec::new(),
            costs: Vec::new(),
        }
    }

    fn add(&mut self, ours: Slice, bare: Slice) {
        let cpu = |slice: &Slice| slice.client + slice.server.unwrap_or(0.0);
        self.rates.push(ours.per_second / bare.per_second);
        self.costs.push(cpu(&ours) / cpu(&bare));
        self.ours.add(ours);
        self.bare.add(bare);
    }
}

impl Total {
    fn add(&mut self, slice: Slice) {
        self.per_second.push(slice.per_second);
        self.latencies.extend(slice.latencies);
        self.client.push(slice.client);
        self.server.extend(slice.server);
    }
}

const ROUNDS: usize = 5;
const PURGES: usize = 3;
pub const PURGED_AT_ONCE: usize = 256;
const FOR_EVER: Duration = Duration::from_secs(3600);
