//! Rules 1 to 5: who gets the key.

use super::*;

/// Rule 2: a key without a record is acquired, and what was asked for is on record.
pub async fn a_fresh_key_is_acquired_as_attempt_one<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_fresh_key_is_acquired_as_attempt_one");
    let (claim, notes) = case.acquire_with_notes(&case.request("key")).await;
    case.equal(claim.attempt(), 1, "the attempt");
    case.equal(notes, Notes::default(), "the notes");
}

/// Rule 1: no claim is granted that is not on record.
pub async fn a_granted_claim_is_on_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_granted_claim_is_on_record");
    let request = case.request("key");
    let claim = case.acquire(&request).await;
    let record = case.record(&request.key).await;
    case.equal(&record.key, &request.key, "the key on record");
    case.equal(&record.owner, claim.owner(), "the owner on record");
    case.equal(record.attempt, claim.attempt(), "the attempt on record");
    case.equal(
        record.fingerprint,
        request.fingerprint,
        "the fingerprint on record",
    );
    let left = case.lease_left(&record);
    case.check(
        left > HOUR / 2 && left <= HOUR,
        "the lease is not as long as was asked for",
    );
}

/// Rule 1: 64 owners, one winner, and all others see it.
pub async fn of_many_concurrent_claims_one_is_acquired<H: Harness>(harness: &H) {
    let case = Case::new(harness, "of_many_concurrent_claims_one_is_acquired");
    let requests = (0..64).map(|_| case.request("key")).collect();
    let answers = case.race(requests).await;
    let winner = case.one_winner(answers).await;
    case.equal(winner.attempt(), 1, "the winner's attempt");
}

/// Rule 1, where the record is there already and was released.
pub async fn of_concurrent_claims_of_a_released_key_one_is_acquired<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "of_concurrent_claims_of_a_released_key_one_is_acquired",
    );
    let _ = case.released("key").await;
    let requests = (0..16).map(|_| case.request("key")).collect();
    let answers = case.race(requests).await;
    let winner = case.one_winner(answers).await;
    case.equal(winner.attempt(), 2, "the winner's attempt");
}

/// Rule 1, where the record is there already and is expired.
pub async fn of_concurrent_claims_of_an_expired_record_one_is_acquired<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "of_concurrent_claims_of_an_expired_record_one_is_acquired",
    );
    let (old, _) = case.finished("key").await;
    case.age(old.key(), 2 * DAY).await;
    let requests = (0..16).map(|_| case.request("key")).collect();
    let answers = case.race(requests).await;
    let _ = case.one_winner(answers).await;
}

/// Rules 1 and 4: one takes over, and all others see it.
pub async fn of_concurrent_takeovers_one_is_acquired<H: Harness>(harness: &H) {
    let case = Case::new(harness, "of_concurrent_takeovers_one_is_acquired");
    let _ = case.stalled("key").await;
    let requests = (0..16).map(|_| case.rerun("key")).collect();
    let answers = case.race(requests).await;
    let winner = case.one_winner(answers).await;
    case.equal(winner.attempt(), 2, "the winner's attempt");
}

/// Rule 5.
pub async fn a_live_claim_of_another_owner_is_shown_and_left_alone<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "a_live_claim_of_another_owner_is_shown_and_left_alone",
    );
    let claim = case.started("key").await;
    let before = case.record(claim.key()).await;
    let shown = case.existing(&case.request("key")).await;
    case.unchanged(&before, &shown, "the record that was shown");
    case.check(
        !case.lease_left(&shown).is_zero(),
        "the live lease is shown as over",
    );
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after another's claim");
    case.applied(case.renew(&claim, HOUR).await, "the first owner's renewal");
}

/// Rule 4: only a lease that is over.
pub async fn a_live_claim_is_not_taken_over<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_live_claim_is_not_taken_over");
    let claim = case.started("key").await;
    let before = case.record(claim.key()).await;
    case.existing(&case.rerun("key")).await;
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after a refused takeover");
}

/// Rule 5: whatever stands under the key, another request does not replace it.
pub async fn another_fingerprint_replaces_nothing<H: Harness>(harness: &H) {
    let case = Case::new(harness, "another_fingerprint_replaces_nothing");
    let _ = case.started("live").await;
    let _ = case.stalled("abandoned").await;
    let _ = case.finished("completed").await;
    for name in ["live", "abandoned", "completed"] {
        let before = case.record(&case.key(name)).await;
        let other = ClaimRequest {
            fingerprint: other_fingerprint(),
            ..case.request(name)
        };
        let shown = case.existing(&other).await;
        case.unchanged(&before, &shown, &format!("the {name} record as shown"));
        let after = case.record(&other.key).await;
        case.unchanged(&before, &after, &format!("the {name} record"));
    }
    // And the one who asked the honest question still gets the answer.
    let shown = case.existing(&case.request("completed")).await;
    case.equal(
        case.outcome(&shown),
        &response(201, b"first"),
        "the outcome afterwards",
    );
}

/// Rule 3: a claim whose reply was lost is asked for again.
pub async fn the_same_owner_is_acquired_again_with_the_same_attempt<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "the_same_owner_is_acquired_again_with_the_same_attempt",
    );
    let request = case.request("key");
    let first = case.acquire(&request).await;
    let again = case.acquire(&request).await;
    case.equal(again, first, "the claim that was asked for again");
    // And once more where the attempt is not the first one.
    case.age(&request.key, 2 * HOUR).await;
    let takeover = case.rerun("key");
    let second = case.acquire(&takeover).await;
    let again = case.acquire(&takeover).await;
    case.equal(again, second, "the takeover that was asked for again");
}

/// Rule 3: whatever was left of the lease, and without permission to run anything twice.
pub async fn the_same_owner_is_acquired_again_after_its_lease_is_over<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "the_same_owner_is_acquired_again_after_its_lease_is_over",
    );
    let request = case.request("key");
    let first = case.acquire(&request).await;
    case.age(&request.key, 2 * HOUR).await;
    let again = case.acquire(&request).await;
    case.equal(again, first, "the claim that was asked for again");
    let record = case.record(&request.key).await;
    case.check(
        !case.lease_left(&record).is_zero(),
        "the lease did not start anew",
    );
}

/// Rule 3.
pub async fn claiming_again_starts_the_lease_anew<H: Harness>(harness: &H) {
    let case = Case::new(harness, "claiming_again_starts_the_lease_anew");
    let request = case.request("key");
    let _ = case.acquire(&request).await;
    case.age(&request.key, HOUR / 2).await;
    let _ = case.acquire(&request).await;
    let left = case.lease_left(&case.record(&request.key).await);
    case.check(
        left > HOUR * 3 / 4 && left <= HOUR,
        "the lease did not start anew",
    );
}

/// Rule 3: the notes are its own.
pub async fn claiming_again_hands_back_the_notes<H: Harness>(harness: &H) {
    let case = Case::new(harness, "claiming_again_hands_back_the_notes");
    let request = case.request("key");
    let claim = case.acquire(&request).await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating");
    case.applied(case.checkpoint(&claim, "paid", b"7").await, "checkpointing");
    let (_, notes) = case.acquire_with_notes(&request).await;
    case.equal(
        notes.correlation.as_deref(),
        Some("charge 7"),
        "the correlation",
    );
    case.equal(
        notes.checkpoint("paid"),
        Some(&Bytes::from_static(b"7")),
        "the checkpoint",
    );
}

/// Rules 3 and 5: an owner stands for one request.
pub async fn the_same_owner_with_another_fingerprint_is_not_acquired<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "the_same_owner_with_another_fingerprint_is_not_acquired",
    );
    let request = case.request("key");
    let _ = case.acquire(&request).await;
    let other = ClaimRequest {
        fingerprint: other_fingerprint(),
        ..request
    };
    let shown = case.existing(&other).await;
    case.equal(
        shown.fingerprint,
        fingerprint(),
        "the fingerprint on record",
    );
}

/// Rules 3 and 7: a late repetition of a claim does not start a finished record again.
pub async fn the_same_owner_is_shown_the_outcome_once_it_completed<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "the_same_owner_is_shown_the_outcome_once_it_completed",
    );
    let request = case.request("key");
    let claim = case.acquire(&request).await;
    let outcome = response(200, b"done");
    let completion = case.complete(&claim, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let shown = case.existing(&request).await;
    case.equal(case.outcome(&shown), &outcome, "the outcome that was shown");
}

/// Rule 4: nobody runs again what may have happened, unless told that this is harmless.
pub async fn an_abandoned_record_is_held<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_abandoned_record_is_held");
    let claim = case.stalled("key").await;
    let before = case.record(claim.key()).await;
    let shown = case.existing(&case.request("key")).await;
    case.check(shown.is_abandoned(), "the record is not shown as abandoned");
    case.equal(&shown.owner, claim.owner(), "the owner that was shown");
    let after = case.record(claim.key()).await;
    case.unchanged(&before, &after, "the record after a claim under `Hold`");
}

/// Rule 4.
pub async fn an_abandoned_record_is_taken_over_under_rerun<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_abandoned_record_is_taken_over_under_rerun");
    let stale = case.stalled("key").await;
    let request = case.rerun("key");
    let fresh = case.acquire(&request).await;
    case.equal(fresh.attempt(), stale.attempt() + 1, "the attempt");
    let record = case.record(&request.key).await;
    case.equal(record.owner, request.owner, "the owner on record");
    case.equal(record.attempt, fresh.attempt(), "the attempt on record");
    let left = case.lease_left(&record);
    case.check(
        left > HOUR / 2 && left <= HOUR,
        "the lease is not a new one",
    );
}

/// Rule 4: the fingerprint is part of the store's condition, not of a look before.
pub async fn takeover_needs_the_same_fingerprint<H: Harness>(harness: &H) {
    let case = Case::new(harness, "takeover_needs_the_same_fingerprint");
    let stale = case.stalled("key").await;
    let before = case.record(stale.key()).await;
    let other = ClaimRequest {
        fingerprint: other_fingerprint(),
        ..case.rerun("key")
    };
    case.existing(&other).await;
    let after = case.record(stale.key()).await;
    case.unchanged(&before, &after, "the record after a refused takeover");
}

/// Rule 4: the next attempt goes on where the last one got to.
pub async fn takeover_keeps_the_notes<H: Harness>(harness: &H) {
    let case = Case::new(harness, "takeover_keeps_the_notes");
    let claim = case.started("key").await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating");
    case.applied(case.checkpoint(&claim, "paid", b"7").await, "checkpointing");
    let before = case.record(claim.key()).await;
    case.age(claim.key(), 2 * HOUR).await;
    let (_, notes) = case.acquire_with_notes(&case.rerun("key")).await;
    case.equal(&notes, &before.notes, "the notes that were handed over");
    let record = case.record(claim.key()).await;
    case.equal(&record.notes, &before.notes, "the notes on record");
}

/// Rules 2 and 8: another request, other notes, and a token that keeps growing.
pub async fn a_released_key_is_claimed_afresh_with_the_next_attempt<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "a_released_key_is_claimed_afresh_with_the_next_attempt",
    );
    let claim = case.started("key").await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating");
    case.applied(case.checkpoint(&claim, "paid", b"7").await, "checkpointing");
    case.applied(case.release(&claim).await, "releasing");
    for attempt in 2..=3 {
        let other = ClaimRequest {
            fingerprint: Fingerprint::of(&[b"attempt", &[attempt as u8]]),
            ..case.request("key")
        };
        let (next, notes) = case.acquire_with_notes(&other).await;
        case.equal(next.attempt(), attempt, "the attempt");
        case.equal(&notes, &Notes::default(), "the notes");
        let record = case.record(claim.key()).await;
        case.equal(record.fingerprint, other.fingerprint, "the fingerprint");
        case.equal(record.notes, Notes::default(), "the notes on record");
        case.applied(case.release(&next).await, "releasing");
    }
}

/// Rule 2: an expired record that nobody removed yet is as good as none.
pub async fn an_expired_outcome_is_claimed_afresh<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_expired_outcome_is_claimed_afresh");
    let (old, _) = case.finished("key").await;
    claimed_afresh_once_expired(&case, &old).await;
}

/// Rule 2, where nobody knows how the last attempt ended: the promise not to run it again lasts as
/// long as the record.
pub async fn an_expired_unknown_is_claimed_afresh<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_expired_unknown_is_claimed_afresh");
    let old = case.started("key").await;
    case.applied(case.checkpoint(&old, "paid", b"7").await, "checkpointing");
    claimed_afresh_once_expired(&case, &old).await;
}

async fn claimed_afresh_once_expired<H: Harness>(case: &Case<'_, H>, old: &Claim) {
    let created_at = case.record(old.key()).await.created_at;
    case.age(old.key(), 2 * DAY).await;
    let other = ClaimRequest {
        fingerprint: other_fingerprint(),
        ..case.request("key")
    };
    let (claim, notes) = case.acquire_with_notes(&other).await;
    // A store that dropped the record by itself begins anew.
    case.check(
        claim.attempt() == 1 || claim.attempt() == old.attempt() + 1,
        "the attempt is neither 1 nor the next one",
    );
    case.equal(notes, Notes::default(), "the notes");
    let record = case.record(old.key()).await;
    case.equal(record.owner, other.owner, "the owner on record");
    case.equal(
        record.fingerprint,
        other.fingerprint,
        "the fingerprint on record",
    );
    case.equal(&record.notes, &Notes::default(), "the notes on record");
    case.check(
        record.created_at >= created_at,
        "the record is as old as the one before it",
    );
    case.check(
        !case.lease_left(&record).is_zero(),
        "the new lease is over already",
    );
}

/// Rule 9: a claim that is asked for again, a takeover and a claim of a released key keep the record
/// as long as a first one.
pub async fn every_acquired_claim_counts_its_retention_from_itself<H: Harness>(harness: &H) {
    let case = Case::new(
        harness,
        "every_acquired_claim_counts_its_retention_from_itself",
    );
    let again = case.request("again");
    let _ = case.acquire(&again).await;
    let _ = case.stalled("takeover").await;
    let _ = case.released("released").await;
    for next in [again, case.rerun("takeover"), case.request("released")] {
        case.age(&next.key, DAY - 4 * HOUR).await;
        let _ = case.acquire(&next).await;
        case.age(&next.key, DAY - 4 * HOUR).await;
        case.record(&next.key).await;
        case.age(&next.key, 8 * HOUR).await;
        case.equal(case.lookup(&next.key).await, None, "the record a day later");
    }
}
