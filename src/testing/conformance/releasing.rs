//! Rules 6, 8 and 15: how an attempt ends without an outcome.

use super::*;

/// Rules 8 and 15.
pub async fn releasing_again_is_applied<H: Harness>(harness: &H) {
    let case = Case::new(harness, "releasing_again_is_applied");
    let claim = case.released("key").await;
    let before = case.record(claim.key()).await;
    case.equal(&before.state, &State::Released, "the state");
    case.equal(&before.owner, claim.owner(), "the last owner");
    case.equal(before.attempt, 1, "the attempt");
    case.applied(case.release(&claim).await, "releasing again");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after the repetition");
}

/// Rule 8: a claim that never reached the store is released as well.
pub async fn releasing_an_unknown_key_is_applied<H: Harness>(harness: &H) {
    let case = Case::new(harness, "releasing_an_unknown_key_is_applied");
    let claim = Claim::new(case.key("key"), stranger(), 1);
    case.applied(case.release(&claim).await, "releasing an unknown key");
    case.equal(case.lookup(claim.key()).await, None, "the record");
}

/// Rule 6: abandoned at once, not after the lease.
pub async fn abandoning_ends_the_lease<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandoning_ends_the_lease");
    let claim = case.started("key").await;
    case.applied(case.abandon(&claim).await, "abandoning");
    let record = case.record(claim.key()).await;
    case.check(record.is_abandoned(), "the record is not abandoned");
    case.equal(&record.owner, claim.owner(), "the owner");
    case.existing(&case.request("key")).await;
    let fresh = case.acquire(&case.rerun("key")).await;
    case.equal(fresh.attempt(), 2, "the attempt that takes over");
}

/// Rules 6 and 15: a repetition does not cross a sweeper that saw the lease in between.
pub async fn abandoning_again_changes_nothing<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandoning_again_changes_nothing");
    let claim = case.started("key").await;
    case.applied(case.abandon(&claim).await, "abandoning");
    let before = case.record(claim.key()).await;
    case.applied(case.abandon(&claim).await, "abandoning again");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after the repetition");
    let stalled = case.stalled("stalled").await;
    let before = case.record(stalled.key()).await;
    case.applied(case.abandon(&stalled).await, "abandoning late");
    let after = case.record(stalled.key()).await;
    case.unchanged(&before, &after, "the record that was abandoned late");
}
