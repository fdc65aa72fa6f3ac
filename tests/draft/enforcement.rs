//! Section 2.6: the three cases.

use http::StatusCode;
use tower_idempotency::{ProblemKind, RetentionPolicy};

use crate::app::{App, Gate, paid, pay};

/// Section 2.6: key and fingerprint were never seen: the request is processed as any other.
#[tokio::test]
async fn a_first_request_is_processed_as_if_there_were_no_layer() {
    let app = App::new(paid);
    let guarded = app.send(pay("k")).await;
    let plain = app.send(crate::app::post("/pay").body("100 THB")).await;
    assert_eq!(guarded.status, plain.status);
    assert_eq!(guarded.headers, plain.headers);
    assert_eq!((guarded.text(), plain.text()), ("run 1", "run 2"));
}

/// Section 2.6: the first request has ended: its result is given again, a success or an error.
#[tokio::test]
async fn a_retry_after_the_end_gets_the_result_success_or_error() {
    for status in [200_u16, 201, 204, 303, 400, 402, 404, 409, 422] {
        let app = App::new(move |_| async move { StatusCode::from_u16(status).unwrap() });
        let first = app.send(pay("k")).await;
        app.send(pay("k")).await.assert_replays(&first);
        assert_eq!(app.runs(), 1);
    }
}

/// Section 2.6, to the letter: with the preset of that name errors of the server are given again too.
#[tokio::test]
async fn the_draft_preset_gives_every_error_again() {
    for status in [401_u16, 403, 429, 500, 502, 503, 504] {
        let app = App::with(
            |s| s.retention(RetentionPolicy::draft()),
            move |_| async move { StatusCode::from_u16(status).unwrap() },
        );
        let first = app.send(pay("k")).await;
        app.send(pay("k")).await.assert_replays(&first);
        assert_eq!(app.runs(), 1);
    }
}

/// Section 2.6: the first request has not ended: a conflict error.
#[tokio::test]
async fn a_retry_before_the_end_gets_a_conflict() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let retry = async {
        gate.entered().await;
        let answer = app.send(pay("k")).await;
        assert_eq!(answer.status, StatusCode::CONFLICT);
        answer.assert_problem(ProblemKind::InProgress);
        gate.open();
    };
    let (first, ()) = tokio::join!(app.send(pay("k")), retry);
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(app.runs(), 1);
}
