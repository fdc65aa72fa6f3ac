//! Section 2.7: the errors.

use http::StatusCode;
use tower_idempotency::{MissingKey, ProblemKind};

use crate::app::{Answer, App, Gate, paid, pay, post};

const PAGE: &str = "https://developer.example.com/idempotency";

fn app() -> App {
    App::with(
        |s| s.missing_key(MissingKey::Reject).documentation(Some(PAGE)),
        paid,
    )
}

/// The documentation is linked in both ways that the draft shows: the problem's `type`, and a `Link`
/// with the relation `describedby`.
fn assert_leads_to_the_documentation(answer: &Answer) {
    assert_eq!(answer.header("content-type"), "application/problem+json");
    let kind = answer.json()["type"].as_str().unwrap().to_owned();
    assert!(kind.starts_with(&format!("{PAGE}#")), "{kind}");
    let link = format!("<{PAGE}>; rel=\"describedby\"; type=\"text/html\"");
    assert_eq!(answer.header("link"), link);
}

/// Section 2.7: the key is required and missing: 400.
#[tokio::test]
async fn a_missing_key_is_a_400_that_leads_to_the_documentation() {
    let answer = app().send(post("/pay")).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    answer.assert_problem(ProblemKind::MissingKey);
    assert_eq!(answer.json()["title"], "Idempotency-Key is missing");
    assert_leads_to_the_documentation(&answer);
}

/// Section 2.7: the key is used again with another payload: 422.
#[tokio::test]
async fn a_reused_key_is_a_422_that_leads_to_the_documentation() {
    let app = app();
    app.send(pay("k")).await;
    let answer = app.send(pay("k").body("1 THB")).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    answer.assert_problem(ProblemKind::KeyReused);
    assert_leads_to_the_documentation(&answer);
}

/// Section 2.7: the request is retried while the first one is processed: 409.
#[tokio::test]
async fn a_request_in_progress_is_a_409_that_leads_to_the_documentation() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::with(
        |s| s.documentation(Some(PAGE)),
        move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                paid(call).await
            }
        },
    );
    let retry = async {
        gate.entered().await;
        let answer = app.send(pay("k")).await;
        gate.open();
        answer
    };
    let (_, answer) = tokio::join!(app.send(pay("k")), retry);
    assert_eq!(answer.status, StatusCode::CONFLICT);
    answer.assert_problem(ProblemKind::InProgress);
    assert_leads_to_the_documentation(&answer);
}

/// Section 2.7: a request that was not corrected fails again, with the same error.
#[tokio::test]
async fn a_request_that_was_not_corrected_fails_again_in_the_same_way() {
    let app = app();
    let first = app.send(pay("k")).await;
    for wrong in [post("/pay"), pay("\"k"), pay("k").body("1 THB")] {
        let refusals = [
            app.send(wrong.clone()).await,
            app.send(wrong.clone()).await,
            app.send(wrong).await,
        ];
        for again in &refusals[1..] {
            assert_eq!(again.status, refusals[0].status);
            assert_eq!(again.headers, refusals[0].headers);
            assert_eq!(again.body, refusals[0].body);
        }
        assert!(refusals[0].status.is_client_error());
    }
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}
