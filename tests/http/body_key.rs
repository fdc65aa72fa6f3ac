//! Keys in the body: of an API in which the number of an invoice names the payment.

use http::StatusCode;
use tower_idempotency::{KeySource, MissingKey, ProblemKind, Scope};

use crate::app::{App, Ask, Unread, broken, data, paid, post, steps, trailers};

fn invoices(missing_key: MissingKey) -> App {
    let source = KeySource::json(["/invoiceNo"]).unwrap();
    App::with(|s| s.key_source(source).missing_key(missing_key), paid)
}

fn invoice(body: &'static str) -> Ask {
    post("/pay").json(body)
}

const INVOICE: &str = r#"{"amount":"1500.00","invoiceNo":"INV-1"}"#;

#[tokio::test]
async fn a_request_with_the_same_value_is_the_same_operation() {
    let app = invoices(MissingKey::Reject);
    let first = app.send(invoice(INVOICE)).await;
    assert_eq!(first.status, StatusCode::CREATED);
    app.send(invoice(INVOICE)).await.assert_replays(&first);
    let other = invoice(r#"{"amount":"1500.00","invoiceNo":"INV-2"}"#);
    assert_eq!(app.send(other).await.text(), "run 2");
    assert!(app.record("INV-1").await.is_some());
}

#[tokio::test]
async fn the_rest_of_the_body_is_compared_as_with_any_key() {
    let app = invoices(MissingKey::Reject);
    app.send(invoice(INVOICE)).await;
    let other = invoice(r#"{"amount":"9900.00","invoiceNo":"INV-1"}"#);
    let answer = app.send(other).await;
    answer.assert_problem(ProblemKind::KeyReused);
    let title = answer.json()["title"].to_string();
    assert!(title.contains("Key in `/invoiceNo` was used"), "{title}");
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_key_in_the_default_header_counts_for_nothing() {
    let app = invoices(MissingKey::Reject);
    app.send(invoice(INVOICE).key("a")).await;
    assert!(app.send(invoice(INVOICE).key("b")).await.is_replay());
}

#[tokio::test]
async fn without_a_key_a_request_passes_with_its_body_unless_it_is_required() {
    let without = || post("/pay").body("no invoice");
    let app = App::with(
        |s| s.key_source(KeySource::json(["/invoiceNo"]).unwrap()),
        |call| async move {
            let keyed = call.attempt().is_some();
            format!("{keyed} {}", String::from_utf8_lossy(&call.body))
        },
    );
    for _ in 0..2 {
        let answer = app.send(without()).await;
        assert_eq!(answer.text(), "false no invoice");
        assert!(!answer.is_replay());
    }
    assert!(app.store().is_empty());
    // It may be a copy of a request that was sent before (RFC 8470).
    let early = app.send(without().header("early-data", "1")).await;
    early.assert_problem(ProblemKind::TooEarly);

    let app = invoices(MissingKey::Reject);
    let refused = app.send(without()).await;
    refused.assert_problem(ProblemKind::MissingKey);
    let detail = refused.json()["detail"].to_string();
    assert!(
        detail.contains("requires a key in `/invoiceNo`"),
        "{detail}"
    );
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn methods_and_routes_that_are_not_guarded_keep_their_bodies_unread() {
    let source = KeySource::json(["/invoiceNo"]).unwrap();
    let app = App::with(
        |s| {
            s.key_source(source)
                .guard_if(|head| head.uri.path() == "/pay")
        },
        paid,
    );
    for request in [crate::app::ask("PUT", "/pay"), post("/search")] {
        let answer = app.send(request.json(INVOICE)).await;
        assert!(!answer.is_replay());
    }
    assert!(app.store().is_empty());
}

#[tokio::test]
async fn the_body_is_read_within_its_limit_and_to_its_end() {
    let source = || KeySource::json(["/invoiceNo"]).unwrap();
    let app = App::with(|s| s.key_source(source()).request_limit(40), paid);
    assert_eq!(INVOICE.len(), 40);
    assert_eq!(app.send(invoice(INVOICE)).await.status, 201);
    let long = invoice(r#"{"amount":"1500.000","invoiceNo":"INV-1"}"#);
    let answer = app.send(long).await;
    answer.assert_problem(ProblemKind::BodyTooLarge);
    let unread = post("/pay").stream(axum::body::Body::new(Unread { at_least: 41 }));
    let answer = app.send(unread).await;
    answer.assert_problem(ProblemKind::BodyTooLarge);
    let breaks = post("/pay").stream(steps([data("{\"invoiceNo\":\"INV-1\""), broken()]));
    let answer = app.send(breaks).await;
    answer.assert_problem(ProblemKind::BodyUnreadable);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn the_handler_reads_what_was_sent_frames_and_trailers() {
    let source = KeySource::json(["/invoiceNo"]).unwrap();
    let app = App::with(
        |s| s.key_source(source),
        |call| async move {
            let trailers = call.trailers.expect("trailers");
            let sum = trailers["x-sum"].to_str().unwrap().to_owned();
            format!("{} {sum}", String::from_utf8_lossy(&call.body))
        },
    );
    let body = steps([
        data("{\"invoiceNo\":"),
        data("\"INV-1\"}"),
        trailers("x-sum", "7"),
    ]);
    let answer = app.send(post("/pay").stream(body)).await;
    assert_eq!(answer.text(), "{\"invoiceNo\":\"INV-1\"} 7");
    assert!(app.record("INV-1").await.is_some());
}

#[tokio::test]
async fn a_scope_separates_callers_as_with_any_key() {
    let source = KeySource::json(["/invoiceNo"]).unwrap();
    let scope = Scope::from_fn(|head| head.extensions.get::<String>().cloned());
    let app = App::with(|s| s.key_source(source).scope(scope), paid);
    for caller in ["alice", "bob"] {
        let request = || invoice(INVOICE).extension(caller.to_owned());
        assert!(!app.send(request()).await.is_replay());
        assert!(app.send(request()).await.is_replay());
    }
    let nobody = app.send(invoice(INVOICE)).await;
    nobody.assert_problem(ProblemKind::ScopeUnavailable);
    assert_eq!(app.runs(), 2);
}

#[tokio::test]
async fn a_client_that_leaves_while_the_handler_runs_finds_the_result() {
    let gate = crate::app::Gate::new();
    let held = gate.clone();
    let source = KeySource::json(["/invoiceNo"]).unwrap();
    let app = App::with(
        |s| s.key_source(source),
        move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                paid(call).await
            }
        },
    );
    tokio::select! {
        biased;
        _ = app.call(invoice(INVOICE)) => unreachable!("the handler is held up"),
        () = gate.entered() => {}
    }
    gate.open();
    assert!(app.idempotency.drain().await);
    let again = app.send(invoice(INVOICE)).await;
    assert!(again.is_replay());
    assert_eq!(again.text(), "run 1");
}

#[test]
fn pointers_are_pointers_to_one_value_each() {
    let none: [&str; 0] = [];
    for wrong in [
        &none[..],
        &["id"],
        &["/id", "$.id"],
        &["/~2"],
        &["/events/*/id"],
    ] {
        let error = KeySource::json(wrong).unwrap_err();
        assert_eq!(error.setting(), "KeySource::json", "{wrong:?}");
    }
}
