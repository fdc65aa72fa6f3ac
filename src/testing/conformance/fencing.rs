//! Rule 6: who may act on a claim.

use super::*;

/// An attempt that was replaced cannot keep its successor's claim alive.
pub async fn renew_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "renew_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    case.lost(case.renew(&stale, DAY).await, "the stale owner's renewal");
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// An attempt that was replaced cannot record its outcome as its successor's.
pub async fn complete_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "complete_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    let completion = case.complete(&stale, &response(200, b"stale"), None).await;
    case.equal(
        completion,
        Completion::ClaimLost,
        "the stale owner's completion",
    );
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
    let outcome = response(201, b"fresh");
    let completion = case.complete(&fresh, &outcome, None).await;
    case.equal(
        completion,
        Completion::Recorded,
        "the new owner's completion",
    );
}

/// An attempt that was replaced cannot free the key under its successor, nor once it is free.
pub async fn release_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "release_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    case.lost(case.release(&stale).await, "the stale owner's release");
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
    case.applied(case.release(&fresh).await, "the new owner's release");
    case.lost(
        case.release(&stale).await,
        "the stale owner's release of a released key",
    );
}

/// An attempt that was replaced cannot end its successor's lease.
pub async fn abandon_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "abandon_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    case.lost(case.abandon(&stale).await, "the stale owner's abandoning");
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// An attempt that was replaced cannot attach anything.
pub async fn annotate_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "annotate_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    case.lost(
        case.annotate(&stale, "stale").await,
        "the stale owner's note",
    );
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// An attempt that was replaced cannot report progress.
pub async fn checkpoint_needs_the_owner<H: Harness>(harness: &H) {
    let case = Case::new(harness, "checkpoint_needs_the_owner");
    let (stale, fresh) = case.taken_over("key").await;
    let before = case.record(fresh.key()).await;
    let checkpoint = case.checkpoint(&stale, "paid", b"stale").await;
    case.lost(checkpoint, "the stale owner's checkpoint");
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after it");
}

/// As long as nobody took over, the work that was done late counts.
pub async fn an_owner_may_act_after_its_lease_is_over<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_owner_may_act_after_its_lease_is_over");
    let claim = case.stalled("completed").await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating late");
    case.applied(
        case.checkpoint(&claim, "paid", b"7").await,
        "checkpointing late",
    );
    let completion = case.complete(&claim, &response(201, b"late"), None).await;
    case.equal(completion, Completion::Recorded, "completing late");
    let claim = case.stalled("released").await;
    case.applied(case.abandon(&claim).await, "abandoning late");
    case.applied(case.release(&claim).await, "releasing late");
}

/// The lease is counted from the renewal, whatever was left.
pub async fn renewing_starts_the_lease_anew<H: Harness>(harness: &H) {
    let case = Case::new(harness, "renewing_starts_the_lease_anew");
    let claim = case.started("key").await;
    for lease in [4 * HOUR, HOUR] {
        case.applied(case.renew(&claim, lease).await, "renewing");
        let left = case.lease_left(&case.record(claim.key()).await);
        case.check(
            left > lease * 3 / 4 && left <= lease,
            "the lease is not as long as was asked for",
        );
    }
    case.existing(&case.rerun("key")).await;
}

/// Rule 15.
pub async fn renewing_again_is_applied<H: Harness>(harness: &H) {
    let case = Case::new(harness, "renewing_again_is_applied");
    let claim = case.started("key").await;
    case.applied(case.renew(&claim, HOUR).await, "renewing");
    case.applied(case.renew(&claim, HOUR).await, "renewing again");
}

/// A renewal that comes late is better than none.
pub async fn renewing_revives_a_lease_that_is_over<H: Harness>(harness: &H) {
    let case = Case::new(harness, "renewing_revives_a_lease_that_is_over");
    let claim = case.stalled("key").await;
    case.applied(case.renew(&claim, HOUR).await, "renewing late");
    let shown = case.existing(&case.rerun("key")).await;
    case.equal(&shown.owner, claim.owner(), "the owner after the renewal");
}

/// Rules 6 and 7: once completed, nobody holds the claim any more, not even its owner.
pub async fn no_move_changes_a_completed_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "no_move_changes_a_completed_record");
    let (claim, _) = case.finished("key").await;
    let before = case.record(claim.key()).await;
    case.lost(case.renew(&claim, HOUR).await, "renewing");
    case.lost(case.release(&claim).await, "releasing");
    case.lost(case.abandon(&claim).await, "abandoning");
    case.lost(case.annotate(&claim, "late").await, "annotating");
    case.lost(case.checkpoint(&claim, "late", b"").await, "checkpointing");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after all of them");
}

/// Rules 6 and 8: once released, nobody holds the claim any more.
pub async fn no_move_but_a_claim_changes_a_released_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "no_move_but_a_claim_changes_a_released_record");
    let claim = case.released("key").await;
    let before = case.record(claim.key()).await;
    case.lost(case.renew(&claim, HOUR).await, "renewing");
    case.lost(case.abandon(&claim).await, "abandoning");
    case.lost(case.annotate(&claim, "late").await, "annotating");
    case.lost(case.checkpoint(&claim, "late", b"").await, "checkpointing");
    let completion = case.complete(&claim, &response(200, b"late"), None).await;
    case.equal(completion, Completion::ClaimLost, "completing");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after all of them");
    let next = case.started("key").await;
    case.equal(next.attempt(), 2, "the next attempt");
}

/// Rule 6: a claim whose record is gone is lost, and comes back by no other move.
pub async fn no_move_but_a_claim_makes_a_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "no_move_but_a_claim_makes_a_record");
    let claim = Claim::new(case.key("key"), stranger(), 1);
    case.lost(case.renew(&claim, HOUR).await, "renewing");
    case.lost(case.abandon(&claim).await, "abandoning");
    case.lost(case.annotate(&claim, "late").await, "annotating");
    case.lost(case.checkpoint(&claim, "late", b"").await, "checkpointing");
    let completion = case.complete(&claim, &response(200, b"late"), None).await;
    case.equal(completion, Completion::ClaimLost, "completing");
    case.applied(case.release(&claim).await, "releasing");
    case.equal(case.lookup(claim.key()).await, None, "the record");
    let first = case.started("key").await;
    case.equal(first.attempt(), 1, "the attempt of the first claim");
}

/// Rules 6 and 15.
pub async fn annotating_keeps_the_last_correlation<H: Harness>(harness: &H) {
    let case = Case::new(harness, "annotating_keeps_the_last_correlation");
    let claim = case.started("key").await;
    for correlation in ["charge 7", "charge 8", "charge 8", "Gebühr ✓ '8'"] {
        case.applied(case.annotate(&claim, correlation).await, "annotating");
        let notes = case.record(claim.key()).await.notes;
        case.equal(
            notes.correlation.as_deref(),
            Some(correlation),
            "the correlation",
        );
    }
}

/// Rule 6.
pub async fn checkpoints_keep_their_order<H: Harness>(harness: &H) {
    let case = Case::new(harness, "checkpoints_keep_their_order");
    let claim = case.started("key").await;
    let names = ["reserve", "charge", "", "Beleg ✓", "a 'quoted' name"];
    for name in names {
        let checkpoint = case.checkpoint(&claim, name, b"\x00\xff data").await;
        case.applied(checkpoint, "checkpointing");
    }
    let notes = case.record(claim.key()).await.notes;
    let recorded: Vec<_> = notes.checkpoints.iter().map(|(name, _)| &**name).collect();
    case.equal(&recorded[..], &names[..], "the names in order");
    case.check(
        notes
            .checkpoints
            .iter()
            .all(|(_, data)| &data[..] == b"\x00\xff data"),
        "the data is not what was recorded",
    );
}

/// Rules 6 and 15: in its place, so that a repetition changes nothing.
pub async fn a_repeated_checkpoint_replaces_its_data<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_repeated_checkpoint_replaces_its_data");
    let claim = case.started("key").await;
    for (name, data) in [
        ("first", &b"1"[..]),
        ("second", b"2"),
        ("first", b"one"),
        ("first", b"one"),
    ] {
        case.applied(case.checkpoint(&claim, name, data).await, "checkpointing");
    }
    let expected = vec![
        ("first".to_owned(), Bytes::from_static(b"one")),
        ("second".to_owned(), Bytes::from_static(b"2")),
    ];
    let notes = case.record(claim.key()).await.notes;
    case.equal(notes.checkpoints, expected, "the checkpoints");
}
