//! A worker stalls past its lease, another one takes its key over, and the first one comes back: on
//! every store.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fenced, Idempotency, IdempotencyKey,
    IdempotencyLayer, NoteError, OnAbandoned, Resolution, ScopedKey, State, Store,
};

use crate::app::{Answer, App, Call, Gate, pay};
use crate::engine::{key, outcome, request};
use crate::places::{Place, over_every_store};

over_every_store! {
    no_move_of_a_lost_claim_is_applied
    the_client_of_a_stalled_handler_gets_the_outcome_that_stands
    the_client_of_a_stalled_handler_is_told_when_nothing_stands_yet
    a_handler_hears_that_its_claim_was_taken_over
    a_stalled_handler_cannot_complete_what_was_reconciled
    a_stalled_handler_cannot_undo_what_was_found_to_have_happened
}

type Layer = IdempotencyLayer<std::sync::Arc<dyn Store>>;

const LEASE: Duration = Duration::from_secs(600);
/// Longer than a lease, shorter than a retention.
const STALL: Duration = Duration::from_secs(60 * 60);

/// One process of several that share a store.
fn process(place: &Place, lease: Duration) -> Layer {
    let engine = Idempotency::builder(place.store.clone())
        .lease(lease)
        .on_abandoned(OnAbandoned::Rerun)
        .build();
    IdempotencyLayer::new(engine.unwrap())
}

fn filed() -> ScopedKey {
    IdempotencyKey::new("k").unwrap().scoped("http")
}

async fn acquire(place: &Place) -> Claim {
    let mut request = ClaimRequest::new(key("k"), request("r"));
    request.on_abandoned = OnAbandoned::Rerun;
    match place.store.claim(&request).await.unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("not acquired: {record:?}"),
    }
}

async fn no_move_of_a_lost_claim_is_applied(place: &Place) {
    let store = &place.store;
    let stalled = acquire(place).await;
    place.age(stalled.key(), STALL).await;
    let abandoned = store.lookup(stalled.key()).await.unwrap().unwrap();
    let second = acquire(place).await;
    assert!(second.attempt() > stalled.attempt());

    let lost = |fenced: Fenced| assert_eq!(fenced, Fenced::ClaimLost);
    for _ in 0..2 {
        lost(store.renew(&stalled, LEASE).await.unwrap());
        lost(store.annotate(&stalled, "late").await.unwrap());
        let data = Bytes::from_static(b"late");
        lost(store.checkpoint(&stalled, "late", &data).await.unwrap());
        lost(store.abandon(&stalled).await.unwrap());
        lost(store.release(&stalled).await.unwrap());
        lost(
            store
                .resolve(&abandoned, &Resolution::Released)
                .await
                .unwrap(),
        );
        let late = store.complete(&stalled, &outcome("late"), None).await;
        assert_eq!(late.unwrap(), Completion::ClaimLost);
    }
    let record = store.lookup(stalled.key()).await.unwrap().unwrap();
    assert_eq!(
        (record.owner, record.attempt),
        (*second.owner(), second.attempt())
    );
    assert!(record.notes.is_empty() && !record.is_abandoned());
    let kept = store.complete(&second, &outcome("2"), None).await;
    assert_eq!(kept.unwrap(), Completion::Recorded);
    let late = store.complete(&stalled, &outcome("late"), None).await;
    assert!(!matches!(late.unwrap(), Completion::Recorded));
    let record = store.lookup(stalled.key()).await.unwrap().unwrap();
    assert!(matches!(record.state, State::Completed { outcome: kept, .. } if kept == outcome("2")));
}

/// A handler that waits at the gate and then tries everything that needs its claim.
fn stalling(layer: &Layer, gate: &Gate) -> App<std::sync::Arc<dyn Store>> {
    let gate = gate.clone();
    App::behind(layer, move |call: Call| {
        let gate = gate.clone();
        async move {
            let attempt = call.attempt().unwrap().clone();
            gate.pass().await;
            let late = attempt.checkpoint("late", b"late").await;
            assert!(matches!(late, Err(NoteError::ClaimLost)), "{late:?}");
            attempt.claim_lost().await;
            assert!(attempt.is_claim_lost());
            let late = attempt.annotate("late").await;
            assert!(matches!(late, Err(NoteError::ClaimLost)), "{late:?}");
            "of the stalled one"
        }
    })
}

fn quick(layer: &Layer) -> App<std::sync::Arc<dyn Store>> {
    App::behind(layer, |call: Call| async move {
        assert_eq!(call.attempt().unwrap().number(), 2);
        "of the second one"
    })
}

/// The stalled handler's client got the answer of the second one.
#[track_caller]
fn assert_same(answer: &Answer, second: &Answer) {
    assert!(answer.is_replay() && !second.is_replay());
    assert_eq!((answer.status, &answer.body), (second.status, &second.body));
    assert_eq!(answer.header("idempotency-result"), "");
}

async fn the_client_of_a_stalled_handler_gets_the_outcome_that_stands(place: &Place) {
    let gate = Gate::new();
    let stalled = stalling(&process(place, LEASE), &gate);
    let client = tokio::spawn(async move { stalled.send(pay("k")).await });
    gate.entered().await;
    place.age(&filed(), STALL).await;
    let second = quick(&process(place, LEASE)).send(pay("k")).await;
    assert_eq!(second.text(), "of the second one");

    gate.open();
    assert_same(&client.await.unwrap(), &second);
    let retry = quick(&process(place, LEASE)).send(pay("k")).await;
    retry.assert_replays(&second);
}

async fn the_client_of_a_stalled_handler_is_told_when_nothing_stands_yet(place: &Place) {
    let (gate, second_gate) = (Gate::new(), Gate::new());
    let stalled = stalling(&process(place, LEASE), &gate);
    let client = tokio::spawn(async move { stalled.send(pay("k")).await });
    gate.entered().await;
    place.age(&filed(), STALL).await;
    let waiting = second_gate.clone();
    let second = App::behind(&process(place, LEASE), move |_: Call| {
        let gate = waiting.clone();
        async move {
            gate.pass().await;
            "of the second one"
        }
    });
    let second = tokio::spawn(async move { second.send(pay("k")).await });
    second_gate.entered().await;

    gate.open();
    let first = client.await.unwrap();
    assert_eq!(first.text(), "of the stalled one");
    assert_eq!(first.header("idempotency-result"), "claim-lost");
    second_gate.open();
    let second = second.await.unwrap();
    assert_eq!(second.text(), "of the second one");
    assert_eq!(second.header("idempotency-result"), "");
    let retry = quick(&process(place, LEASE)).send(pay("k")).await;
    retry.assert_replays(&second);
}

/// By the renewal of its lease, without a call of its own.
async fn a_handler_hears_that_its_claim_was_taken_over(place: &Place) {
    let gate = Gate::new();
    let entering = gate.clone();
    // Renewed soon, so that the test is not long.
    let layer = process(place, Duration::from_secs(1));
    let stalled = App::behind(&layer, move |call: Call| {
        let gate = entering.clone();
        async move {
            gate.pass().await;
            call.attempt().unwrap().claim_lost().await;
            "heard"
        }
    });
    let client = tokio::spawn(async move { stalled.send(pay("k")).await });
    gate.entered().await;
    gate.open();
    // A renewal may come between the ageing and the takeover: then once more.
    let taken_over = loop {
        place.age(&filed(), STALL).await;
        let second = quick(&process(place, LEASE)).send(pay("k")).await;
        if second.status == 200 {
            break second;
        }
    };
    assert_same(&client.await.unwrap(), &taken_over);
}

async fn a_stalled_handler_cannot_complete_what_was_reconciled(place: &Place) {
    let stalled = acquire(place).await;
    place.age(stalled.key(), STALL).await;
    let seen = place.store.lookup(stalled.key()).await.unwrap().unwrap();
    let freed = place.store.resolve(&seen, &Resolution::Released).await;
    assert_eq!(freed.unwrap(), Fenced::Applied);
    let renewed = place.store.renew(&stalled, LEASE).await;
    assert_eq!(renewed.unwrap(), Fenced::ClaimLost);
    let late = place.store.complete(&stalled, &outcome("late"), None).await;
    assert_eq!(late.unwrap(), Completion::ClaimLost);
    assert!(acquire(place).await.attempt() > stalled.attempt());
}

async fn a_stalled_handler_cannot_undo_what_was_found_to_have_happened(place: &Place) {
    let stalled = acquire(place).await;
    place.age(stalled.key(), STALL).await;
    let seen = place.store.lookup(stalled.key()).await.unwrap().unwrap();
    let found = Resolution::Completed(outcome("found"));
    let closed = place.store.resolve(&seen, &found).await;
    assert_eq!(closed.unwrap(), Fenced::Applied);
    let freed = place.store.release(&stalled).await;
    assert_eq!(freed.unwrap(), Fenced::ClaimLost);
    let late = place.store.complete(&stalled, &outcome("late"), None).await;
    assert_eq!(late.unwrap(), Completion::Standing(outcome("found")));
}
