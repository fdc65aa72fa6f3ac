//! Rule 7: what was kept stays.

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

use super::*;

/// The one thing that recognises a reused key must survive the write of the outcome.
pub async fn completing_keeps_the_fingerprint<H: Harness>(harness: &H) {
    let case = Case::new(harness, "completing_keeps_the_fingerprint");
    let _ = case.finished("key").await;
    let shown = case.existing(&case.request("key")).await;
    case.equal(shown.fingerprint, fingerprint(), "the fingerprint");
    let other = ClaimRequest {
        fingerprint: other_fingerprint(),
        ..case.request("key")
    };
    let shown = case.existing(&other).await;
    case.equal(
        shown.fingerprint,
        fingerprint(),
        "the fingerprint that another request is shown",
    );
}

/// Rule 7.
pub async fn completing_keeps_owner_attempt_and_notes<H: Harness>(harness: &H) {
    let case = Case::new(harness, "completing_keeps_owner_attempt_and_notes");
    let (_, claim) = case.taken_over("key").await;
    case.applied(case.annotate(&claim, "charge 7").await, "annotating");
    case.applied(case.checkpoint(&claim, "paid", b"7").await, "checkpointing");
    let before = case.record(claim.key()).await;
    let completion = case.complete(&claim, &response(201, b"done"), None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let after = case.record(claim.key()).await;
    case.equal(&after.owner, claim.owner(), "the owner");
    case.equal(after.attempt, 2, "the attempt");
    case.equal(&after.notes, &before.notes, "the notes");
    case.equal(after.created_at, before.created_at, "the creation");
}

/// Rule 7: byte for byte, with order, repeated lines, bytes that are no text, and trailers.
pub async fn every_form_of_outcome_round_trips<H: Harness>(harness: &H) {
    let case = Case::new(harness, "every_form_of_outcome_round_trips");
    let mut headers = HeaderMap::new();
    headers.append(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    let repeated = HeaderName::from_static("x-repeated");
    headers.append(&repeated, HeaderValue::from_static("two"));
    headers.append(&repeated, HeaderValue::from_static("one"));
    if let Ok(latin) = HeaderValue::from_bytes(b"caf\xe9") {
        headers.append(&repeated, latin);
    }
    let mut trailers = HeaderMap::new();
    trailers.append("x-checksum", HeaderValue::from_static("7"));
    let body: Vec<u8> = (0..=255).collect();
    let outcomes = [
        Outcome::response(StatusCode::CREATED, &headers, &[&body], Some(&trailers)),
        Outcome::response(StatusCode::NO_CONTENT, &HeaderMap::new(), &[], None),
        Outcome::tombstone(StatusCode::OK),
        Outcome::value(b"\x00\xff"),
        Outcome::value(b""),
    ];
    for (n, outcome) in outcomes.iter().enumerate() {
        let name = n.to_string();
        let claim = case.started(&name).await;
        let completion = case.complete(&claim, outcome, None).await;
        case.equal(completion, Completion::Recorded, "completing");
        let shown = case.existing(&case.request(&name)).await;
        case.equal(
            case.outcome(&shown).as_bytes(),
            outcome.as_bytes(),
            "the bytes of the outcome that is replayed",
        );
        let completion = case.complete(&claim, outcome, None).await;
        case.equal(
            completion,
            Completion::Standing(outcome.clone()),
            "completing again",
        );
    }
}

/// The default limit of a response is a size that every store must take.
pub async fn an_outcome_of_one_mebibyte_round_trips<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_outcome_of_one_mebibyte_round_trips");
    let claim = case.started("key").await;
    // Not compressible, and not the same in any two places.
    let body: Vec<u8> = (0..1_u32 << 20)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let outcome = response(200, &body);
    let completion = case.complete(&claim, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let shown = case.existing(&case.request("key")).await;
    case.check(
        case.outcome(&shown).as_bytes() == outcome.as_bytes(),
        "the outcome that is replayed is another one",
    );
}

/// Rules 7 and 15: by the owner whose reply was lost, with the same outcome or another one, and by
/// somebody else.
pub async fn completing_again_returns_the_outcome_that_stands<H: Harness>(harness: &H) {
    let case = Case::new(harness, "completing_again_returns_the_outcome_that_stands");
    let (claim, outcome) = case.finished("key").await;
    let standing = Completion::Standing(outcome.clone());
    let again = case.complete(&claim, &outcome, None).await;
    case.equal(&again, &standing, "the owner's repetition");
    let another = response(500, b"second thoughts");
    let again = case.complete(&claim, &another, None).await;
    case.equal(&again, &standing, "the owner's second thoughts");
    let foreign = Claim::new(claim.key().clone(), stranger(), 1);
    let again = case.complete(&foreign, &another, None).await;
    case.equal(&again, &standing, "another owner's completion");
}

/// Rule 7: nothing that comes later leaves a trace, the retention of a repetition included.
pub async fn an_outcome_is_never_overwritten<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_outcome_is_never_overwritten");
    let (stale, fresh) = case.taken_over("key").await;
    let outcome = response(201, b"first");
    let completion = case.complete(&fresh, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let before = case.record(fresh.key()).await;
    let another = response(500, b"later");
    for late in [&fresh, &stale] {
        let _ = case.complete(late, &another, Some(HOUR)).await;
        let _ = case.release(late).await;
    }
    let _ = case.claim(&case.rerun("key")).await;
    let _ = case
        .resolve(&before, Resolution::Completed(another.clone()))
        .await;
    let after = case.record(fresh.key()).await;
    case.unchanged(&before, &after, "the record after all of them");
    case.equal(case.outcome(&after), &outcome, "the outcome");
}

/// Rules 1 and 7: one completion is recorded, and all others are told which.
pub async fn of_concurrent_completions_one_is_recorded<H: Harness>(harness: &H) {
    let case = Case::new(harness, "of_concurrent_completions_one_is_recorded");
    let claim = case.started("key").await;
    let start = Arc::new(Barrier::new(16));
    let racing: Vec<_> = (0..16)
        .map(|n| {
            let (store, claim) = (case.store().clone(), claim.clone());
            let start = Arc::clone(&start);
            tokio::spawn(async move {
                let outcome = response(200, &[n]);
                start.wait().await;
                let completion = store.complete(&claim, &outcome, None).await;
                (outcome, completion)
            })
        })
        .collect();
    let mut recorded = Vec::new();
    let mut told = Vec::new();
    for completing in racing {
        let (outcome, completion) = completing.await.expect("a completion panicked");
        match case.answered("complete", completion) {
            Completion::Recorded => recorded.push(outcome),
            Completion::Standing(outcome) => told.push(outcome),
            Completion::ClaimLost => case.broken("the owner was told that its claim is lost"),
        }
    }
    case.equal(recorded.len(), 1, "the number of outcomes recorded");
    let stands = case.record(claim.key()).await;
    let stands = case.outcome(&stands);
    case.equal(&recorded[0], stands, "the outcome that was recorded");
    case.check(
        told.iter().all(|told| told == stands),
        "somebody was told of another outcome than the one that stands",
    );
}
