//! Outcomes that a reconciler makes itself.

use bytes::Bytes;
use http::Response;
use serde::{Deserialize, Serialize};
use tower_idempotency::{Failure, Outcome, Ran, RunError};

use crate::app::{App, paid, pay};
use crate::engine::*;
use crate::gateway::*;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Receipt {
    charge: String,
    amount: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Declined {
    NoFunds,
}

async fn run(engine: &Engine) -> Result<Ran<Receipt>, RunError<Declined>> {
    let work = |_| async { Err::<Receipt, _>(Failure::Unknown(Declined::NoFunds)) };
    engine.run(&key("k"), request("r"), work).await
}

#[tokio::test(start_paused = true)]
async fn a_value_is_what_the_work_would_have_returned() {
    let receipt = Receipt {
        charge: "ch_1".to_owned(),
        amount: Some(100),
    };
    let kept = Outcome::of_value(&receipt).unwrap();
    let engine = asking(&Gateway::that(Says::Happened(kept.clone())));
    assert!(matches!(run(&engine).await, Err(RunError::Unknown(_))));
    assert_eq!(run(&engine).await.unwrap(), Ran::Repeat(receipt.clone()));

    // And it is what the engine itself keeps.
    let engine = asking(&Gateway::that(Says::Unknown));
    let work = |_| async move { Ok::<_, Failure<Declined>>(receipt) };
    engine.run(&key("k"), request("r"), work).await.unwrap();
    assert_eq!(replayed(admit(&engine).await), kept);
}

#[tokio::test(start_paused = true)]
async fn an_error_is_how_the_work_would_have_failed() {
    let kept = Outcome::of_error(&Declined::NoFunds).unwrap();
    let engine = asking(&Gateway::that(Says::Happened(kept.clone())));
    assert!(matches!(run(&engine).await, Err(RunError::Unknown(_))));
    let repeated = run(&engine).await.unwrap_err();
    assert!(
        matches!(
            repeated,
            RunError::Terminal {
                error: Declined::NoFunds,
                repeat: true
            }
        ),
        "{repeated:?}"
    );

    let engine = asking(&Gateway::that(Says::Unknown));
    let work = |_| async { Err::<Receipt, _>(Failure::Terminal(Declined::NoFunds)) };
    let _ = engine.run(&key("k"), request("r"), work).await;
    assert_eq!(replayed(admit(&engine).await), kept);
}

#[tokio::test(start_paused = true)]
async fn a_response_is_what_the_client_gets() {
    let response = Response::builder()
        .status(201)
        .header("content-type", "application/json")
        .header("location", "/payments/1")
        // Of another exchange, and wrong for this body.
        .header("content-length", "3")
        .header("connection", "close")
        .body(Bytes::from_static(b"{\"paid\":true}"))
        .unwrap();
    let gateway = Gateway::that(Says::Happened(Outcome::from(response)));
    let app = App::with_engine(
        |engine| gateway.asked_by(engine),
        |layer| layer,
        |call| async move {
            assert!(call.run > 1, "the first one dies");
            paid(call).await
        },
    );
    let died = tokio::spawn(app.call(pay("k"))).await;
    assert!(died.unwrap_err().is_panic());
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(
        (retry.status.as_u16(), retry.text()),
        (201, "{\"paid\":true}")
    );
    assert_eq!(retry.header("content-type"), "application/json");
    assert_eq!(retry.header("location"), "/payments/1");
    assert_eq!(
        (retry.header("content-length"), retry.header("connection")),
        ("", "")
    );
}
