//! Rule 12: how the records are closed whose attempt nobody heard of again.

use std::collections::BTreeSet;

use super::*;

/// Page by page, unexpired and expired ones, and nothing else.
pub async fn abandoned_lists_each_abandoned_record_once<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandoned_lists_each_abandoned_record_once");
    let mut expected = BTreeSet::new();
    for n in 0..7 {
        let claim = case.stalled(&n.to_string()).await;
        expected.insert(claim.key().key().to_owned());
    }
    let expired = case.started("expired").await;
    expected.insert(expired.key().key().to_owned());
    let _ = case.started("live").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    // Last: a claim may drop what is expired.
    case.age(expired.key(), 2 * DAY).await;
    for limit in [1, 3, 8, 100] {
        let walked = case.walk(limit).await;
        let keys: BTreeSet<_> = walked
            .iter()
            .map(|record| record.key.key().to_owned())
            .collect();
        case.equal(keys.len(), walked.len(), "the number of different records");
        case.equal(&keys, &expected, "the records of the walk");
        case.check(
            walked.iter().all(Record::is_abandoned),
            "a listed record is not shown as abandoned",
        );
    }
    let nothing = case.answered("abandoned", case.store().abandoned(None, 0).await);
    case.check(
        nothing.records.is_empty() && nothing.next.is_none(),
        "a limit of zero does not end the walk",
    );
}

/// A sweeper closes one page before it asks for the next one.
pub async fn abandoned_misses_nothing_while_records_are_closed<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandoned_misses_nothing_while_records_are_closed");
    for n in 0..9 {
        let _ = case.stalled(&n.to_string()).await;
    }
    let mut closed = 0;
    let mut after = None;
    for n in 0..ENOUGH {
        let page = case.store().abandoned(after.as_ref(), 2).await;
        let page = case.answered("abandoned", page);
        for record in &page.records {
            let resolved = case.resolve(record, Resolution::Released).await;
            case.applied(resolved, "resolving a listed record");
            closed += 1;
        }
        after = page.next;
        if after.is_none() {
            break;
        }
        // What comes and goes beside the walk does not disturb it. Named by the page, which may be empty.
        let _ = case.started(&format!("new {n}")).await;
    }
    case.equal(closed, 9, "the records that were seen and closed");
}

/// What is listed is what a reconciler needs, and what `lookup` shows.
pub async fn abandoned_shows_whole_records<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandoned_shows_whole_records");
    let claim = case.started("key").await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating");
    case.applied(case.checkpoint(&claim, "paid", b"7").await, "checkpointing");
    case.age(claim.key(), 2 * HOUR).await;
    let walked = case.walk(10).await;
    case.equal(walked.len(), 1, "the number of abandoned records");
    let record = case.record(claim.key()).await;
    case.unchanged(&record, &walked[0], "the listed record");
}

/// Rules 7 and 12.
pub async fn resolving_as_completed_keeps_the_outcome<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolving_as_completed_keeps_the_outcome");
    let claim = case.stalled("key").await;
    let before = case.record(claim.key()).await;
    let outcome = response(201, b"found at the gateway");
    let resolution = Resolution::Completed(outcome.clone());
    case.applied(case.resolve(&before, resolution).await, "resolving");
    let shown = case.existing(&case.request("key")).await;
    case.equal(case.outcome(&shown), &outcome, "the outcome");
    case.equal(shown.fingerprint, before.fingerprint, "the fingerprint");
    case.equal(shown.owner, before.owner, "the owner");
    case.equal(shown.attempt, before.attempt, "the attempt");
    case.equal(shown.expires_at, before.expires_at, "the expiry");
    // The worker comes back.
    let late = case.complete(&claim, &response(500, b"late"), None).await;
    case.equal(late, Completion::Standing(outcome), "the late completion");
}

/// Rules 8 and 12.
pub async fn resolving_as_released_frees_the_key<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolving_as_released_frees_the_key");
    let claim = case.stalled("key").await;
    let before = case.record(claim.key()).await;
    let resolved = case.resolve(&before, Resolution::Released).await;
    case.applied(resolved, "resolving");
    // The worker comes back.
    let late = case.complete(&claim, &response(200, b"late"), None).await;
    case.equal(late, Completion::ClaimLost, "the late completion");
    let next = case.started("key").await;
    case.equal(next.attempt(), 2, "the next attempt");
}

/// Rules 9 and 12: an outcome that was found after the retention is kept for one more.
pub async fn resolving_after_the_expiry_counts_the_retention_once_more<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "resolving_after_the_expiry_counts_the_retention_once_more",
    );
    let claim = case.started("key").await;
    case.age(claim.key(), 2 * DAY).await;
    let walked = case.walk(10).await;
    case.equal(walked.len(), 1, "the number of abandoned records");
    let outcome = response(201, b"found at the gateway");
    let resolution = Resolution::Completed(outcome.clone());
    case.applied(case.resolve(&walked[0], resolution).await, "resolving");
    case.age(claim.key(), DAY - HOUR).await;
    let shown = case.existing(&case.request("key")).await;
    case.equal(
        case.outcome(&shown),
        &outcome,
        "the outcome almost a day later",
    );
}

/// Rule 12: as long as somebody works on it, nobody else says how it ended.
pub async fn resolve_needs_a_lease_that_is_over<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolve_needs_a_lease_that_is_over");
    let claim = case.started("key").await;
    let before = case.record(claim.key()).await;
    let resolved = case.resolve(&before, Resolution::Released).await;
    case.lost(resolved, "resolving a live claim");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// Rule 12: a worker came back in between and stalled again.
pub async fn resolve_needs_the_lease_that_was_seen<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolve_needs_the_lease_that_was_seen");
    let claim = case.stalled("key").await;
    let seen = case.record(claim.key()).await;
    case.applied(case.renew(&claim, HOUR).await, "renewing");
    let resolution = || Resolution::Completed(response(200, b"too early"));
    let resolved = case.resolve(&seen, resolution()).await;
    case.lost(resolved, "resolving while the worker is back");
    case.applied(case.abandon(&claim).await, "abandoning");
    let before = case.record(claim.key()).await;
    let resolved = case.resolve(&seen, resolution()).await;
    case.lost(
        resolved,
        "resolving what was seen before the worker came back",
    );
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after it");
    let resolved = case.resolve(&after, resolution()).await;
    case.applied(resolved, "resolving what stands");
}

/// Rule 12: another attempt took over in between.
pub async fn resolve_needs_the_owner_that_was_seen<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolve_needs_the_owner_that_was_seen");
    let (_, fresh) = case.taken_over("key").await;
    case.age(fresh.key(), 2 * HOUR).await;
    let before = case.record(fresh.key()).await;
    // As the first attempt left it, but with the lease that stands: only the owner tells them apart.
    let mut seen = before.clone();
    seen.owner = stranger();
    let resolved = case.resolve(&seen, Resolution::Released).await;
    case.lost(resolved, "resolving another owner's record");
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// Rules 7, 12 and 15: completed, released or gone, and for a repetition too.
pub async fn resolve_leaves_a_closed_record_alone<H: Harness>(harness: &H) {
    let case = Case::new(harness, "resolve_leaves_a_closed_record_alone");
    for name in ["completed", "released", "resolved", "removed"] {
        let claim = case.stalled(name).await;
        let seen = case.record(claim.key()).await;
        match name {
            "completed" => {
                let completion = case.complete(&claim, &response(201, b""), None).await;
                case.equal(completion, Completion::Recorded, "completing");
            }
            "released" => case.applied(case.release(&claim).await, "releasing"),
            "resolved" => {
                let resolution = Resolution::Completed(response(201, b""));
                case.applied(case.resolve(&seen, resolution).await, "resolving");
            }
            _ => case.check(
                case.remove(claim.key()).await,
                "there was nothing to remove",
            ),
        }
        let before = case.lookup(claim.key()).await;
        for resolution in [
            Resolution::Released,
            Resolution::Completed(response(500, b"second")),
        ] {
            let resolved = case.resolve(&seen, resolution).await;
            case.lost(resolved, &format!("resolving a {name} record"));
        }
        let after = case.lookup(claim.key()).await;
        case.equal(after, before, &format!("the {name} record"));
    }
}

/// Rules 1 and 12: one of them applies, and it is the one that stands.
pub async fn two_sweepers_cannot_both_resolve<H: Harness>(harness: &H) {
    let case = Case::new(harness, "two_sweepers_cannot_both_resolve");
    let claim = case.stalled("key").await;
    let seen = Arc::new(case.record(claim.key()).await);
    let start = Arc::new(Barrier::new(8));
    let sweepers: Vec<_> = (0..8)
        .map(|n| {
            let (store, seen) = (case.store().clone(), Arc::clone(&seen));
            let start = Arc::clone(&start);
            tokio::spawn(async move {
                let outcome = response(200, &[n]);
                let resolution = Resolution::Completed(outcome.clone());
                start.wait().await;
                (outcome, store.resolve(&seen, &resolution).await)
            })
        })
        .collect();
    let mut applied = Vec::new();
    for sweeper in sweepers {
        let (outcome, resolved) = sweeper.await.expect("a resolution panicked");
        if case.answered("resolve", resolved) == Fenced::Applied {
            applied.push(outcome);
        }
    }
    case.equal(applied.len(), 1, "the number of resolutions that applied");
    let record = case.record(claim.key()).await;
    case.equal(
        case.outcome(&record),
        &applied[0],
        "the outcome that stands",
    );
}
