//! Rules 9 to 11: how long a record lives.

use super::*;

/// Rule 9.
pub async fn renewing_does_not_move_the_expiry<H: Harness>(harness: &H) {
    let case = Case::new(harness, "renewing_does_not_move_the_expiry");
    let claim = case.started("key").await;
    case.age(claim.key(), HOUR / 2).await;
    let before = case.record(claim.key()).await.expires_at;
    case.applied(case.renew(&claim, HOUR).await, "renewing");
    let after = case.record(claim.key()).await.expires_at;
    case.equal(after, before, "the expiry after a renewal");
}

/// Rule 9.
pub async fn completing_does_not_move_an_expiry_that_is_ahead<H: Harness>(harness: &H) {
    let case = Case::new(harness, "completing_does_not_move_an_expiry_that_is_ahead");
    let claim = case.started("key").await;
    case.age(claim.key(), HOUR / 2).await;
    let before = case.record(claim.key()).await.expires_at;
    let completion = case.complete(&claim, &response(200, b""), None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let after = case.record(claim.key()).await.expires_at;
    case.equal(after, before, "the expiry after a completion");
}

/// Rule 9: the outcome of a handler that outlived the retention is kept for one more.
pub async fn completing_after_the_expiry_counts_the_retention_once_more<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "completing_after_the_expiry_counts_the_retention_once_more",
    );
    let claim = case.outlived("key").await;
    let outcome = response(201, b"late");
    let completion = case.complete(&claim, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    case.age(claim.key(), DAY - HOUR).await;
    let shown = case.existing(&case.request("key")).await;
    case.equal(
        case.outcome(&shown),
        &outcome,
        "the outcome almost a day later",
    );
    case.age(claim.key(), 2 * HOUR).await;
    case.equal(
        case.lookup(claim.key()).await,
        None,
        "the record a day later",
    );
}

/// Rule 9: shorter or longer, counted from the completion.
pub async fn completing_with_a_retention_replaces_the_expiry<H: Harness>(harness: &H) {
    let case = Case::new(harness, "completing_with_a_retention_replaces_the_expiry");
    for (name, retention) in [("shorter", 4 * HOUR), ("longer", 3 * DAY)] {
        let claim = case.stalled(name).await;
        let outcome = response(200, b"");
        let completion = case.complete(&claim, &outcome, Some(retention)).await;
        case.equal(completion, Completion::Recorded, "completing");
        case.age(claim.key(), retention - HOUR).await;
        case.record(claim.key()).await;
        case.age(claim.key(), 2 * HOUR).await;
        let later = case.lookup(claim.key()).await;
        case.equal(later, None, "the record after its own retention");
        let _ = case.started(name).await;
    }
}

/// Rule 9: zero is a number, not an absence of one.
pub async fn a_retention_of_zero_is_over_at_once<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_retention_of_zero_is_over_at_once");
    let claim = case.started("key").await;
    let zero = Some(Duration::ZERO);
    let completion = case.complete(&claim, &response(200, b""), zero).await;
    case.equal(completion, Completion::Recorded, "completing");
    case.equal(case.lookup(claim.key()).await, None, "the record");
    let _ = case.started("key").await;
}

/// Rule 9: a record is not expired as long as its lease is live.
pub async fn a_slow_handler_keeps_its_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_slow_handler_keeps_its_record");
    let claim = case.outlived("key").await;
    let before = case.record(claim.key()).await;
    for request in [case.request("key"), case.rerun("key")] {
        let shown = case.existing(&request).await;
        case.unchanged(&before, &shown, "the record that was shown");
    }
    case.applied(case.renew(&claim, HOUR).await, "the slow owner's renewal");
}

/// Rule 9: `lookup` and `claim` are of one mind, whether somebody purged or not.
pub async fn an_expired_record_is_not_shown<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_expired_record_is_not_shown");
    let _ = case.started("abandoned").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    for name in ["abandoned", "completed", "released"] {
        let key = case.key(name);
        case.age(&key, DAY - 2 * HOUR).await;
        case.record(&key).await;
        case.age(&key, 4 * HOUR).await;
        case.equal(case.lookup(&key).await, None, "the expired record");
    }
}

/// Rule 11: afterwards the keys are as if they had never been seen.
pub async fn purge_removes_what_is_expired<H: Harness>(harness: &H) {
    let case = Case::new(harness, "purge_removes_what_is_expired");
    let _ = case.started("abandoned").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    let names = ["abandoned", "completed", "released"];
    for name in names {
        case.age(&case.key(name), 2 * DAY).await;
    }
    case.purge_all().await;
    for name in names {
        let claim = case.started(name).await;
        case.equal(claim.attempt(), 1, "the attempt after a purge");
    }
    let purged = case.purge_all().await;
    case.equal(purged.removed, 0, "what there was to purge again");
}

/// Rule 11: a table is never emptied in one step.
pub async fn purge_removes_no_more_than_its_limit<H: Harness>(harness: &H) {
    let case = Case::new(harness, "purge_removes_no_more_than_its_limit");
    for n in 0..5 {
        let claim = case.started(&n.to_string()).await;
        case.age(claim.key(), 2 * DAY).await;
    }
    let nothing = case.purge(0).await;
    case.equal(nothing.removed, 0, "what a limit of zero removed");
    let mut left = case.walk(100).await.len();
    case.equal(left, 5, "the records before the purge");
    while left > 0 {
        let purged = case.purge(2).await;
        case.check(purged.removed > 0, "purge gave up while records were left");
        let after = case.walk(100).await.len();
        case.equal(left - after, purged.removed, "what is gone after a purge");
        left = after;
    }
}

/// Rule 11: work of which nobody will ever know how it ended.
pub async fn purge_counts_the_unresolved<H: Harness>(harness: &H) {
    let case = Case::new(harness, "purge_counts_the_unresolved");
    let _ = case.started("abandoned").await;
    let _ = case.started("abandoned too").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    for name in ["abandoned", "abandoned too", "completed", "released"] {
        case.age(&case.key(name), 2 * DAY).await;
    }
    let purged = case.purge_all().await;
    case.equal(purged.unresolved, 2, "the unresolved records");
}

/// Rule 11.
pub async fn purge_leaves_unexpired_records<H: Harness>(harness: &H) {
    let case = Case::new(harness, "purge_leaves_unexpired_records");
    let _ = case.started("live").await;
    let _ = case.stalled("abandoned").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    let mut before = Vec::new();
    for name in ["live", "abandoned", "completed", "released"] {
        before.push(case.record(&case.key(name)).await);
    }
    let purged = case.purge_all().await;
    case.equal(purged.removed, 0, "what was purged");
    for before in before {
        let after = case.record(&before.key).await;
        case.unchanged(&before, &after, "the record after a purge");
    }
}

/// Rules 9 and 11.
pub async fn purge_leaves_a_live_claim_whose_retention_is_over<H: Harness>(harness: &H) {
    let case = Case::new(harness, "purge_leaves_a_live_claim_whose_retention_is_over");
    let claim = case.outlived("key").await;
    case.purge_all().await;
    let completion = case.complete(&claim, &response(200, b""), None).await;
    case.equal(
        completion,
        Completion::Recorded,
        "the completion after a purge",
    );
}
