//! Clients that send a call again: later, at once, or after they gave up.

use std::time::Duration;

use futures_util::future::join_all;
use tonic::{Code, Status};
use tower_idempotency::{GrpcCode, InFlight, ProblemKind};

use crate::app::{Gate, Settings};
use crate::patience::patient;
use crate::shop::{Shop, assert_refused, assert_replay, defaults, paid, pay, said, wire};

fn waiting(settings: Settings) -> Settings {
    settings.in_flight(InFlight::Wait(Duration::from_secs(60)))
}

/// A shop whose handlers wait at the gate.
async fn held(settings: impl FnOnce(Settings) -> Settings) -> (Shop, Gate) {
    let gate = Gate::new();
    let held = gate.clone();
    let shop = Shop::unary(settings, move |run, call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(run, call).await
        }
    })
    .await;
    (shop, gate)
}

#[tokio::test]
async fn what_grpc_adds_to_an_attempt_is_not_part_of_the_call() {
    let shop = Shop::unary(defaults, paid).await;
    shop.raw(wire("k").header("grpc-timeout", "9S")).await;
    for (name, value) in [
        ("grpc-timeout", "5S"),
        ("grpc-previous-rpc-attempts", "2"),
        ("grpc-accept-encoding", "identity,gzip"),
        ("user-agent", "another/1"),
    ] {
        let (answer, _) = shop.raw(wire("k").header(name, value)).await;
        assert!(answer.is_replay(), "{name}");
    }
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn of_hedged_copies_one_runs_and_the_others_are_told_when_to_come_back() {
    let (shop, gate) = held(defaults).await;
    let client = shop.client().await;
    let mut copies: Vec<_> = (0..5)
        .map(|_| {
            let client = client.clone();
            Box::pin(async move { client.charge(pay("k")).await })
        })
        .collect();
    let mut answers = Vec::new();
    for _ in 0..4 {
        let next = futures_util::future::select_all(copies);
        let (answer, _, left) = patient("a copy", next).await;
        assert_eq!(assert_refused(&answer, ProblemKind::InProgress), Some(1000));
        answers.push(answer);
        copies = left;
    }
    gate.open();
    let first = copies.pop().unwrap().await.unwrap();
    assert_eq!(first.get_ref(), "run 1");
    assert_replay(&client.charge(pay("k")).await, "run 1");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn hedged_copies_that_wait_get_the_first_ones_answer() {
    let (shop, gate) = held(waiting).await;
    let client = shop.client().await;
    let copies = join_all((0..5).map(|_| client.charge(pay("k"))));
    let opens = async {
        gate.entered().await;
        gate.open();
    };
    let (answers, ()) = patient("the copies", async { tokio::join!(copies, opens) }).await;
    let mut replays = 0;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!(answer.get_ref(), "run 1");
        replays += usize::from(answer.metadata().contains_key("idempotency-replayed"));
    }
    assert_eq!((shop.runs(), replays), (1, 4));
}

#[tokio::test]
async fn in_progress_can_be_the_code_that_clients_retry_by_themselves() {
    let unavailable = |settings: Settings| {
        settings
            .retry_after(Duration::from_millis(250))
            .problems(|problem| {
                if problem.kind == ProblemKind::InProgress {
                    problem.grpc_status = GrpcCode::Unavailable;
                }
            })
    };
    let (shop, gate) = held(unavailable).await;
    let client = shop.client().await;
    let first = tokio::spawn({
        let client = client.clone();
        async move { client.charge(pay("k")).await }
    });
    gate.entered().await;
    let status = client.charge(pay("k")).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(said(status.metadata(), "idempotency-error"), "in_progress");
    assert_eq!(said(status.metadata(), "grpc-retry-pushback-ms"), "250");
    gate.open();
    first.await.unwrap().unwrap();
}

#[tokio::test]
async fn past_its_deadline_a_call_goes_on_and_the_retry_gets_its_answer() {
    let (shop, gate) = held(waiting).await;
    let client = shop.client().await;
    let mut call = pay("k");
    call.set_timeout(Duration::from_millis(500));
    let late = client.charge(call).await.unwrap_err();
    assert!(matches!(
        late.code(),
        Code::Cancelled | Code::DeadlineExceeded
    ));

    gate.entered().await;
    let opens = async { gate.open() };
    let (retry, ()) = patient("the retry", async {
        tokio::join!(client.charge(pay("k")), opens)
    })
    .await;
    assert_replay(&retry, "run 1");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_call_that_is_cancelled_goes_on_and_the_retry_gets_its_answer() {
    let (shop, gate) = held(waiting).await;
    let client = shop.client().await;
    tokio::select! {
        _ = client.charge(pay("k")) => unreachable!("the handler is held up"),
        () = gate.entered() => {}
    }
    gate.open();
    let retry = patient("the retry", client.charge(pay("k"))).await;
    assert_replay(&retry, "run 1");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_deadline_in_the_handler_is_no_release() {
    let shop = Shop::unary(defaults, |_, _| async {
        Err(Status::deadline_exceeded("the gateway did not answer"))
    })
    .await;
    let client = shop.client().await;
    client.charge(pay("k")).await.unwrap_err();
    let retry = client.charge(pay("k")).await;
    assert_eq!(
        assert_refused(&retry, ProblemKind::OutcomeUnknown),
        Some(30_000)
    );
    assert_eq!(shop.runs(), 1);
}
