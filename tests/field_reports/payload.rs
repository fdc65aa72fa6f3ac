//! Fingerprints that were lost, read too early, or made of too little.

use tower_idempotency::{FingerprintRecipe, ProblemKind};

use crate::app::{App, Ask, paid, pay, post};

fn app(recipe: FingerprintRecipe) -> App {
    App::with(|s| s.fingerprint(recipe), paid)
}

fn order(body: &'static str) -> Ask {
    post("/orders").key("k").json(body)
}

/// Completing a record wrote it anew without its hash: identical retries were refused.
/// <https://github.com/aws-powertools/powertools-lambda-typescript/issues/5705>
#[tokio::test]
async fn a_completed_record_still_knows_its_fingerprint() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    for _ in 0..2 {
        app.send(pay("k")).await.assert_replays(&first);
        let other = app.send(pay("k").body("1 THB")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }
}

/// A request was remembered before it was validated.
/// <https://github.com/aws-powertools/powertools-lambda-python/issues/3821>
#[tokio::test]
async fn a_mismatch_does_not_spoil_the_honest_retry_after_it() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    app.send(pay("k").body("1 THB"))
        .await
        .assert_problem(ProblemKind::KeyReused);
    app.send(pay("k")).await.assert_replays(&first);
}

/// A "deterministic" key depended on the order of members, and took null for absent.
/// <https://github.com/apache/fineract/pull/5674>
#[tokio::test]
async fn json_is_compared_without_regard_to_order_at_all_depths_and_null_is_not_absent() {
    let app = app(FingerprintRecipe::raw().json());
    let first = app
        .send(order(r#"{"a":{"b":[{"c":1,"d":2}],"e":3},"f":4}"#))
        .await;
    let permuted = r#"{"f":4,"a":{"e":3,"b":[{"d":2,"c":1}]}}"#;
    app.send(order(permuted)).await.assert_replays(&first);
    for other in [
        r#"{"a":{"b":[{"c":1,"d":2}],"e":3},"f":4,"g":null}"#,
        r#"{"a":{"b":[{"c":1,"d":2}],"e":3},"f":4,"f":4}"#,
        r#"{"a":{"b":[{"d":2},{"c":1}],"e":3},"f":4}"#,
    ] {
        let answer = app.send(order(other)).await;
        answer.assert_problem(ProblemKind::KeyReused);
    }
}

/// The live call replayed the dry run before it, since only the query told them apart.
/// <https://github.com/theam/facility/pull/196>
#[tokio::test]
async fn a_dry_run_is_not_the_live_call() {
    let app = App::new(paid);
    app.send(post("/x?dry=1").key("k").body("a")).await;
    let live = app.send(post("/x").key("k").body("a")).await;
    live.assert_problem(ProblemKind::KeyReused);
    let app = App::new(paid);
    app.send(post("/x?a=1&b=2").key("k")).await;
    let swapped = app.send(post("/x?b=2&a=1").key("k")).await;
    swapped.assert_problem(ProblemKind::KeyReused);
}

fn form(boundary: &str, file_name: &str, file: &str) -> Ask {
    let body = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"f\"; filename=\"{file_name}\"\r\n\
         \r\n{file}\r\n--{boundary}--\r\n"
    );
    let kind = format!("multipart/form-data; boundary={boundary}");
    post("/upload")
        .key("k")
        .header("content-type", kind)
        .body(body)
}

/// A form has other bytes on every attempt, though it is the same form.
/// <https://github.com/chatvector-ai/chatvector-ai/issues/520>
#[tokio::test]
async fn a_form_is_the_same_under_a_new_boundary_and_another_with_another_file() {
    let app = app(FingerprintRecipe::raw().multipart());
    let first = app.send(form("1", "a.txt", "data")).await;
    app.send(form("2", "a.txt", "data"))
        .await
        .assert_replays(&first);
    for other in [form("1", "a.txt", "date"), form("1", "b.txt", "data")] {
        let answer = app.send(other).await;
        answer.assert_problem(ProblemKind::KeyReused);
    }
}

/// Each retry carried a new link to the same file.
/// <https://github.com/asimons81/wp-chatgpt-publisher/pull/14>
#[tokio::test]
async fn a_member_that_is_new_on_every_attempt_can_be_left_out() {
    let first = r#"{"post":1,"file":"https://tmp/1"}"#;
    let retry = r#"{"post":1,"file":"https://tmp/2"}"#;
    let leaving_out = app(FingerprintRecipe::raw().except(["/file"]).unwrap());
    let answer = leaving_out.send(order(first)).await;
    leaving_out.send(order(retry)).await.assert_replays(&answer);

    let by_default = App::new(paid);
    by_default.send(order(first)).await;
    let refused = by_default.send(order(retry)).await;
    refused.assert_problem(ProblemKind::KeyReused);
}

/// The body was part of the key, so that an edited retry ran.
/// <https://github.com/julik/idempo/issues/21>
#[tokio::test]
async fn another_body_with_the_same_key_never_runs() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    for body in ["", "100", "100 THB ", "200 THB"] {
        app.send(pay("k").body(body))
            .await
            .assert_problem(ProblemKind::KeyReused);
    }
    assert_eq!(app.runs(), 1);
}

/// A header that changes the answer was no part of the request's identity.
/// <https://github.com/NousResearch/hermes-agent/pull/24200>
#[tokio::test]
async fn a_header_that_changes_the_answer_can_be_made_to_count() {
    let session = http::HeaderName::from_static("x-session");
    let app = app(FingerprintRecipe::raw().headers([session]));
    let first = app.send(pay("k").header("x-session", "1")).await;
    app.send(pay("k").header("x-session", "1"))
        .await
        .assert_replays(&first);
    app.send(pay("k").header("x-session", "2"))
        .await
        .assert_problem(ProblemKind::KeyReused);
}
