//! Headers, statuses and preflights.

use http::StatusCode;
use tower_idempotency::{MissingKey, ProblemKind, Scope};

use crate::app::{App, ask, paid, pay, post};

/// The same key in two lines became the key "k, k": a second payment.
/// <https://github.com/grimurrash/test-task2/issues/73>
#[tokio::test]
async fn two_lines_of_one_key_are_refused_and_names_have_no_case() {
    let app = App::new(paid);
    let first = app.send(post("/pay").header("Idempotency-KEY", "k")).await;
    for twice in [
        post("/pay").key("k").key("k"),
        post("/pay").key("k").key("l"),
        post("/pay").key("\"k\", \"k\""),
        post("/pay").key("k, k"),
    ] {
        app.send(twice)
            .await
            .assert_problem(ProblemKind::InvalidKey);
    }
    app.send(post("/pay").key("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

/// Preflights carry no key.
/// <https://github.com/superseriousbusiness/gotosocial/issues/1664>
#[tokio::test]
async fn a_preflight_passes_even_where_a_key_is_required() {
    let app = App::with(
        |s| s.missing_key(MissingKey::Reject),
        |_| async { StatusCode::NO_CONTENT },
    );
    let preflight = ask("OPTIONS", "/pay")
        .header("origin", "https://a.example")
        .header("access-control-request-headers", "idempotency-key");
    assert_eq!(app.send(preflight).await.status, StatusCode::NO_CONTENT);
}

/// 422 and 409 collide with what applications use them for.
/// <https://github.com/ietf-wg-httpapi/idempotency/issues/42>
#[tokio::test]
async fn statuses_can_be_changed_and_the_type_stays() {
    let app = App::with(
        |s| s.problems(|problem| problem.status = StatusCode::LOCKED),
        paid,
    );
    app.send(pay("k")).await;
    let answer = app.send(pay("k").body("1 THB")).await;
    assert_eq!(answer.status, StatusCode::LOCKED);
    let kind = answer.json()["type"].as_str().unwrap().to_owned();
    assert!(kind.ends_with("#key_reused"), "{kind}");
    assert_eq!(answer.header("idempotency-error"), "key_reused");
}

/// What clients can rely on in a response was never written down.
/// <https://github.com/ietf-wg-httpapi/idempotency/issues/51>,
/// <https://github.com/ietf-wg-httpapi/idempotency/issues/49>
#[tokio::test]
async fn a_refusal_looks_exactly_like_this() {
    let page = Some("https://api.example.com/idempotency");
    let app = App::with(|s| s.documentation(page), paid);
    app.send(pay("k")).await;
    let answer = app.send(pay("k").body("1 THB")).await;
    let mut headers: Vec<_> = answer
        .headers
        .iter()
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    headers.sort();
    assert_eq!(
        headers,
        [
            "cache-control: no-store",
            "content-type: application/problem+json",
            "idempotency-error: key_reused",
            "link: <https://api.example.com/idempotency>; rel=\"describedby\"; type=\"text/html\"",
        ]
    );
    assert_eq!(
        answer.json(),
        serde_json::json!({
            "type": "https://api.example.com/idempotency#key_reused",
            "title": "Idempotency-Key was used for another request",
            "status": 422,
            "detail": "This key belongs to a request with other content. Use a new key for a new \
                       operation; to retry, send the first request unchanged.",
            "code": "key_reused",
        })
    );
}

/// A retry of a capture made a new key for the gateway.
/// <https://github.com/medusajs/medusa/issues/16292>, <https://github.com/medusajs/medusa/issues/16681>
#[tokio::test]
async fn a_key_for_the_gateway_is_the_same_on_every_attempt_and_anothers_is_another() {
    let scope = Scope::from_fn(|head| head.extensions.get::<&str>().map(|user| (*user).to_owned()));
    let app = App::with_engine(
        |engine| engine.secret(*b"0123456789abcdef"),
        |s| s.scope(scope),
        |call| async move {
            let key = call.attempt().unwrap().derive("capture").unwrap();
            (StatusCode::BAD_GATEWAY, key.as_str().to_owned())
        },
    );
    let first = app.send(pay("order-1").extension("shop-a")).await;
    let retry = app.send(pay("order-1").extension("shop-a")).await;
    assert_eq!(first.text(), retry.text());
    assert_eq!(app.runs(), 2);
    for other in [
        pay("order-1").extension("shop-b"),
        pay("order-2").extension("shop-a"),
    ] {
        assert_ne!(app.send(other).await.text(), first.text());
    }
}

/// The result was no longer there, and the call ran again.
/// <https://github.com/restatedev/restate/issues/1324>
#[tokio::test]
async fn a_result_that_cannot_be_given_again_is_no_reason_to_run_again() {
    let app = App::with(|s| s.response_limit(0), paid);
    app.send(pay("k")).await;
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::ResponseNotKept);
    assert_eq!(app.runs(), 1);
}
