//! What `changed` promises to those who wait.

use futures_util::FutureExt;
use futures_util::future::{join, join_all};

use super::*;

/// Nothing to wait for: no record, another owner, or an end of any kind.
pub async fn changed_returns_at_once_unless_that_owner_holds_a_live_claim<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "changed_returns_at_once_unless_that_owner_holds_a_live_claim",
    );
    let unknown = Claim::new(case.key("unknown"), stranger(), 1);
    let foreign = case.started("foreign").await;
    let foreign = Claim::new(foreign.key().clone(), stranger(), 1);
    let (completed, _) = case.finished("completed").await;
    let released = case.released("released").await;
    let stalled = case.stalled("stalled").await;
    for seen in [unknown, foreign, completed, released, stalled] {
        let what = format!("changed did not return for {:?}", seen.key());
        case.in_time(&what, wait(&case, &seen)).await;
    }
}

/// The first result, as soon as it is there.
pub async fn changed_returns_when_the_claim_is_completed<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_returns_when_the_claim_is_completed");
    let claim = case.started("key").await;
    let outcome = response(200, b"");
    let completed = case.complete(&claim, &outcome, None);
    case.equal(
        wait_while(&case, &claim, completed).await,
        Completion::Recorded,
        "completing",
    );
}

/// The key is free.
pub async fn changed_returns_when_the_claim_is_released<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_returns_when_the_claim_is_released");
    let claim = case.started("key").await;
    let released = wait_while(&case, &claim, case.release(&claim)).await;
    case.applied(released, "releasing");
}

/// Nobody knows.
pub async fn changed_returns_when_the_claim_is_abandoned<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_returns_when_the_claim_is_abandoned");
    let claim = case.started("key").await;
    let abandoned = wait_while(&case, &claim, case.abandon(&claim)).await;
    case.applied(abandoned, "abandoning");
}

/// The record was erased.
pub async fn changed_returns_when_the_record_is_removed<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_returns_when_the_record_is_removed");
    let claim = case.started("key").await;
    let removed = wait_while(&case, &claim, case.remove(claim.key())).await;
    case.check(removed, "there was nothing to remove");
}

/// The owner died: nobody says anything, and time alone ends the claim.
pub async fn changed_returns_when_the_lease_ends<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_returns_when_the_lease_ends");
    let request = ClaimRequest {
        lease: Duration::from_millis(50),
        ..case.request("key")
    };
    let claim = case.acquire(&request).await;
    let what = "changed did not return after the end of the lease";
    case.in_time(what, wait(&case, &claim)).await;
    // However early it may return, waiting again until the end must come to one.
    let ended = async {
        while !case.record(claim.key()).await.is_abandoned() {
            wait(&case, &claim).await;
        }
    };
    case.in_time("the lease did not end", ended).await;
}

/// A waiter's own limit.
pub async fn changed_gives_up_after_its_time<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_gives_up_after_its_time");
    let claim = case.started("key").await;
    for max in [Duration::ZERO, Duration::from_millis(20)] {
        let given_up = case.store().changed(claim.key(), claim.owner(), max);
        let given_up = case.in_time("changed did not give up", given_up).await;
        case.answered("changed", given_up);
    }
    let record = case.record(claim.key()).await;
    case.check(!record.is_abandoned(), "giving up ended the claim");
}

/// All of them, not the first one.
pub async fn changed_wakes_every_waiter<H: Harness>(harness: &H) {
    let case = Case::new(harness, "changed_wakes_every_waiter");
    let claim = case.started("key").await;
    let waiting = join_all((0..8).map(|_| wait(&case, &claim)));
    let both = join(waiting, case.release(&claim));
    let (_, released) = case.in_time("not every waiter was woken", both).await;
    case.applied(released, "releasing");
}

/// A client that goes away takes its own waiting along, and nobody else's.
pub async fn a_waiter_that_leaves_disturbs_nobody<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_waiter_that_leaves_disturbs_nobody");
    let claim = case.started("key").await;
    let mut stays = Box::pin(wait(&case, &claim));
    // Polled once, so that it waits; it may have returned early.
    let returned = (&mut stays).now_or_never().is_some();
    for _ in 0..3 {
        let _ = wait(&case, &claim).now_or_never();
    }
    case.applied(case.release(&claim).await, "releasing");
    if !returned {
        case.in_time("the waiter that stayed was not woken", stays)
            .await;
    }
}

/// Waits for longer than anybody's patience: only the store can end it.
async fn wait<H: Harness>(case: &Case<'_, H>, seen: &Claim) {
    let max = 24 * PATIENCE;
    let changed = case.store().changed(seen.key(), seen.owner(), max).await;
    case.answered("changed", changed);
}

/// Waits, and lets something happen once the waiting has begun.
async fn wait_while<H: Harness, T>(
    case: &Case<'_, H>,
    seen: &Claim,
    happens: impl Future<Output = T>,
) -> T {
    let both = join(wait(case, seen), happens);
    let what = "changed did not return after the change";
    case.in_time(what, both).await.1
}
