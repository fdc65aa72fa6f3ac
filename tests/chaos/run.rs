//! One run: operations and both lanes of faults until all are through, a quiet time, and the checker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::{Instant, sleep, timeout};

use super::check::{Findings, History};
use super::child::Variant;
use super::clients::Clients;
use super::fleet::{Fleet, Start};
use super::ledger::Ledger;
use super::plan::{Kind, Operation, Plan, Size};
use super::world::World;

/// What a run came to.
pub struct Report {
    pub kind: Kind,
    pub variant: Variant,
    pub seed: u64,
    pub operations: usize,
    pub faults: BTreeMap<String, usize>,
    pub effects: usize,
    pub reconciled: usize,
    pub answers: BTreeMap<String, usize>,
    pub recoveries: Vec<Duration>,
    pub took: Duration,
    pub history: History,
    pub findings: Findings,
}

pub async fn run(kind: Kind, variant: Variant, seed: u64, size: Size) -> Report {
    let began = Instant::now();
    let plan = Plan::new(seed, kind, size);
    let world = World::start(kind).await;
    let ledger_file = world.folder.path().join("ledger.db");
    let ledger = Ledger::open(&ledger_file);
    let fleet = Fleet::start(Start {
        kind,
        variant,
        urls: world.urls(),
        ledger: ledger_file,
    })
    .await;
    let clients = Clients::new(fleet.addresses.clone());
    let faults_are_over = Arc::new(AtomicBool::new(false));
    let begun = Arc::new(AtomicUsize::new(0));
    let performing = {
        let (clients, begun) = (clients.clone(), Arc::clone(&begun));
        let over = Arc::clone(&faults_are_over);
        let operations = stream::iter(0..).take_while(move |index| {
            let go_on = *index < size.operations || !over.load(Ordering::SeqCst);
            std::future::ready(go_on)
        });
        tokio::spawn(async move {
            let performed = operations.for_each_concurrent(size.in_flight, |index| {
                begun.fetch_max(index + 1, Ordering::SeqCst);
                let clients = clients.clone();
                let operation = Operation::nth(seed, index);
                async move {
                    // In a task of its own, so that they all share both processors.
                    let _ = tokio::spawn(async move { clients.perform(&operation).await }).await;
                }
            });
            performed.await;
        })
    };
    let process_lane = async {
        let mut fleet = fleet;
        let mut happened = Vec::new();
        for step in &plan.process_lane {
            sleep(step.after).await;
            if fleet.suffer(step).await {
                happened.push(step.fault.name());
            }
        }
        (fleet, happened)
    };
    let store_lane = async {
        let mut happened = Vec::new();
        for step in &plan.store_lane {
            sleep(step.after).await;
            world.suffer(step).await;
            happened.push(step.fault.name().to_owned());
        }
        happened
    };
    let ((fleet, of_processes), of_store) = tokio::join!(process_lane, store_lane);
    faults_are_over.store(true, Ordering::SeqCst);
    let rest = size.operations.saturating_sub(begun.load(Ordering::SeqCst));
    let quiet = QUIET + Duration::from_millis(100) * u32::try_from(rest).unwrap_or(u32::MAX);
    // What has no answer by then is stuck, and the checker will say so.
    let _ = timeout(quiet, performing).await;

    let operations = begun.load(Ordering::SeqCst);
    let at_last = stream::iter(0..operations).map(|index| {
        let clients = clients.clone();
        async move {
            let operation = Operation::nth(seed, index);
            let answer = clients.ask_at_last(&operation).await;
            (operation.name, answer)
        }
    });
    let at_last = at_last.buffer_unordered(32).collect().await;
    drop(fleet);

    let seen = clients.seen();
    let history = History {
        effects: ledger.effects(),
        rulings: ledger.rulings(),
        successes: seen.successes,
        at_last,
    };
    let mut faults = BTreeMap::new();
    for fault in of_processes.into_iter().chain(of_store) {
        *faults.entry(fault).or_default() += 1;
    }
    Report {
        kind,
        variant,
        seed,
        operations,
        faults,
        effects: history.effects.len(),
        reconciled: history.rulings.len(),
        answers: seen.answers,
        recoveries: seen.recoveries,
        took: began.elapsed(),
        findings: history.check(),
        history,
    }
}

/// More than enough for every lease to end, every sweep to come round, and every client to ask again.
const QUIET: Duration = Duration::from_secs(30);
