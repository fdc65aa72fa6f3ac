//! Events that their sender delivers at least once: handled once each, and answered so that the
//! sender stops, or delivers again.

use std::time::Duration;

use futures_util::future::join;
use http::{HeaderName, StatusCode};
use serde_json::json;
use tokio::time::advance;
use tower_idempotency::{
    Idempotency, IdempotencyKey, IdempotencyLayer, KeySource, MemoryStore, ProblemKind,
    RetentionOverride, ScopedKey, Store, Verdict,
};

use crate::app::{Answer, App, Ask, Call, Gate, Settings, paid, post};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn by_id() -> KeySource {
    KeySource::json(["/id"]).unwrap()
}

fn events(sender: &str, event_id: KeySource) -> Settings {
    IdempotencyLayer::webhooks(MemoryStore::new(), sender, event_id)
}

fn app() -> App {
    App::behind(&events("omise", by_id()).build().unwrap(), paid)
}

fn deliver(body: &'static str) -> Ask {
    post("/webhooks/omise").json(body)
}

const COMPLETE: &str = r#"{"object":"event","id":"evnt_1","key":"charge.complete"}"#;

/// A refusal that lets every sender deliver again.
#[track_caller]
fn assert_comes_again(answer: &Answer, code: &str) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.json()["status"], 503);
    assert_eq!(answer.header("idempotency-error"), code);
    assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1);
}

#[tokio::test]
async fn an_event_is_handled_once_and_each_repetition_gets_the_first_answer() {
    let app = app();
    let first = app.send(deliver(COMPLETE)).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "run 1"));
    for _ in 0..4 {
        app.send(deliver(COMPLETE)).await.assert_replays(&first);
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn whatever_a_repetition_changes_beside_the_id_the_event_is_the_same() {
    let app = app();
    let first = app.send(deliver(COMPLETE)).await;
    for again in [
        deliver(r#"{"id":"evnt_1","deliveryContext":{"isRedelivery":true},"sentAt":1700000099}"#),
        deliver(COMPLETE).header("x-signature", "t=2,v1=other"),
        deliver(COMPLETE).header("authorization", "Signature other"),
        deliver(COMPLETE).header("content-encoding", "identity"),
        post("/webhooks/omise?attempt=2").json(COMPLETE),
        post("/webhooks/v2/omise").json(COMPLETE),
        post("/webhooks/omise").body(COMPLETE),
    ] {
        app.send(again).await.assert_replays(&first);
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn other_ids_are_other_events() {
    let app = app();
    for (run, body) in [
        r#"{"id":"evnt_1"}"#,
        r#"{"id":"evnt_2"}"#,
        r#"{"id":"EVNT_1"}"#,
        // Digits that a float does not hold.
        r#"{"id":9007199254740992}"#,
        r#"{"id":9007199254740993}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let answer = app.send(deliver(body)).await;
        assert_eq!(answer.text(), format!("run {}", run + 1), "{body}");
    }
}

#[tokio::test]
async fn a_delivery_without_an_id_that_can_be_read_for_certain_is_refused() {
    let app = app();
    for body in [
        "",
        "id=evnt_1",
        "{}",
        r#"{"data":{"id":"evnt_1"}}"#,
        r#"{"id":null}"#,
        r#"{"id":""}"#,
        r#"{"id":true}"#,
        r#"{"id":{"v":"evnt_1"}}"#,
        r#"{"id":["evnt_1"]}"#,
        r#"{"id":"evnt_1""#,
        r#"{"id":"evnt_1","id":"evnt_2"}"#,
        r#"[{"id":"evnt_1"}]"#,
    ] {
        let answer = app.send(deliver(body)).await;
        answer.assert_problem(ProblemKind::EventIdMissing);
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(app.runs(), 0);
    assert!(app.store().is_empty());
}

#[tokio::test]
async fn an_id_that_can_be_no_key_is_refused_with_its_place_and_the_reason() {
    let long = format!(r#"{{"id":"{}"}}"#, "e".repeat(256));
    let app = app();
    for (body, reason) in [
        (r#"{"id":"évnt"}"#, "not-printable"),
        (r#"{"id":"e\nvnt"}"#, "not-printable"),
        (r#"{"id":"  "}"#, "blank"),
        (&*long, "too-long"),
    ] {
        let request = post("/webhooks/omise").json(body.to_owned());
        let answer = app.send(request).await;
        answer.assert_problem(ProblemKind::InvalidKey);
        assert_eq!(answer.json()["reason"], reason);
        let detail = answer.json()["detail"].to_string();
        assert!(
            detail.contains("The key in `/id` cannot be used"),
            "{detail}"
        );
    }
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn of_two_deliveries_at_once_one_is_handled_and_the_other_comes_again() {
    let gate = Gate::new();
    let held = gate.clone();
    let layer = events("omise", by_id()).build().unwrap();
    let app = App::behind(&layer, move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let twin = async {
        gate.entered().await;
        assert_comes_again(&app.send(deliver(COMPLETE)).await, "in_progress");
        gate.open();
    };
    let (first, ()) = join(app.send(deliver(COMPLETE)), twin).await;
    app.send(deliver(COMPLETE)).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn an_event_whose_outcome_is_unknown_comes_again_until_it_is_known() {
    let layer = events("omise", by_id()).build().unwrap();
    let app = App::behind(&layer, |_| async {
        word(200, RetentionOverride::LeaveUnknown)
    });
    app.send(deliver(COMPLETE)).await;
    assert_comes_again(&app.send(deliver(COMPLETE)).await, "outcome_unknown");
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn only_a_success_is_the_end_of_an_event() {
    for failed in [302, 400, 404, 409, 410, 422, 500, 503] {
        let layer = events("omise", by_id()).build().unwrap();
        let app = App::behind(&layer, move |call: Call| async move {
            match call.run {
                // An order that is not there yet, say.
                1 => StatusCode::from_u16(failed).unwrap(),
                _ => StatusCode::NO_CONTENT,
            }
        });
        assert_eq!(app.send(deliver(COMPLETE)).await.status, failed);
        let handled = app.send(deliver(COMPLETE)).await;
        assert_eq!(handled.status, 204);
        app.send(deliver(COMPLETE)).await.assert_replays(&handled);
        assert_eq!(app.runs(), 2, "{failed}");
    }
}

#[tokio::test]
async fn a_handler_can_say_that_a_refusal_is_final() {
    let layer = events("omise", by_id()).build().unwrap();
    let app = App::behind(&layer, |_| async { word(410, RetentionOverride::Keep) });
    let first = app.send(deliver(COMPLETE)).await;
    app.send(deliver(COMPLETE)).await.assert_replays(&first);
}

#[tokio::test]
async fn an_event_whose_answer_was_not_kept_is_answered_with_its_status() {
    let layer = events("omise", by_id()).build().unwrap();
    let app = App::behind(&layer, |_| async { word(202, RetentionOverride::Live) });
    app.send(deliver(COMPLETE)).await;
    let again = app.send(deliver(COMPLETE)).await;
    assert_eq!(again.status, StatusCode::ACCEPTED);
    assert_eq!(again.header("idempotency-error"), "response_not_kept");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_event_is_known_for_thirty_days_or_as_long_as_the_engine_keeps_results() {
    for (retention, known_for) in [(DAY, 30), (60 * DAY, 60)] {
        let engine = Idempotency::builder(MemoryStore::new()).retention(retention);
        let layer = IdempotencyLayer::webhooks(engine.build().unwrap(), "omise", by_id());
        let app = App::behind(&layer.build().unwrap(), paid);
        let first = app.send(deliver(COMPLETE)).await;
        advance(known_for * DAY - Duration::from_secs(1)).await;
        app.send(deliver(COMPLETE)).await.assert_replays(&first);
        advance(Duration::from_secs(2)).await;
        assert_eq!(app.send(deliver(COMPLETE)).await.text(), "run 2");
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_whose_outcome_is_unknown_is_known_as_long_as_others() {
    let layer = events("omise", by_id()).build().unwrap();
    let app = App::behind(&layer, |_| async {
        word(500, RetentionOverride::LeaveUnknown)
    });
    app.send(deliver(COMPLETE)).await;
    for _ in 0..29 {
        advance(DAY).await;
        assert_comes_again(&app.send(deliver(COMPLETE)).await, "outcome_unknown");
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_was_reconciled_is_known_as_long_as_others() {
    let happened = |_| async {
        let answer = http::Response::new(bytes::Bytes::from_static(b"handled"));
        Ok::<_, std::convert::Infallible>(Verdict::Happened(answer.into()))
    };
    let engine = Idempotency::builder(MemoryStore::new()).reconciler(happened);
    let layer = IdempotencyLayer::webhooks(engine.build().unwrap(), "omise", by_id());
    let app = App::behind(&layer.build().unwrap(), |_| async {
        word(500, RetentionOverride::LeaveUnknown)
    });
    app.send(deliver(COMPLETE)).await;
    assert_eq!(app.send(deliver(COMPLETE)).await.text(), "handled");
    advance(29 * DAY).await;
    assert_eq!(app.send(deliver(COMPLETE)).await.text(), "handled");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_event_whose_handler_gave_the_word_is_known_as_long_as_others() {
    for given in [RetentionOverride::Live, RetentionOverride::Keep] {
        let layer = events("omise", by_id()).build().unwrap();
        let app = App::behind(&layer, move |_| async move { word(202, given) });
        app.send(deliver(COMPLETE)).await;
        advance(29 * DAY).await;
        let again = app.send(deliver(COMPLETE)).await;
        assert_eq!(again.status, StatusCode::ACCEPTED);
        assert_eq!(app.runs(), 1, "{given:?}");
    }
}

#[tokio::test]
async fn an_event_whose_answer_had_no_content_is_answered_without_any() {
    for status in [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT] {
        let layer = events("omise", by_id()).build().unwrap();
        let app = App::behind(&layer, move |_| async move {
            word(status.as_u16(), RetentionOverride::Live)
        });
        app.send(deliver(COMPLETE)).await;
        let again = app.send(deliver(COMPLETE)).await;
        assert_eq!(again.status, status);
        assert_eq!(again.header("idempotency-error"), "response_not_kept");
        assert_eq!((again.text(), again.header("content-type")), ("", ""));
    }
}

#[tokio::test]
async fn two_senders_may_give_two_events_one_id() {
    let engine = Idempotency::new(MemoryStore::new());
    for sender in ["omise", "stripe"] {
        let layer = IdempotencyLayer::webhooks(engine.clone(), sender, by_id());
        let app = App::behind(&layer.build().unwrap(), paid);
        assert!(!app.send(deliver(COMPLETE)).await.is_replay());
        assert!(app.send(deliver(COMPLETE)).await.is_replay());
        let id = IdempotencyKey::new("evnt_1").unwrap();
        let key = ScopedKey::new("webhook", sender, &id);
        assert!(engine.store().lookup(&key).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn no_client_can_name_the_key_of_an_event() {
    let engine = Idempotency::new(MemoryStore::new());
    let events = IdempotencyLayer::webhooks(engine.clone(), "omise", by_id());
    let events = App::behind(&events.build().unwrap(), paid);
    events.send(deliver(COMPLETE)).await;
    let api = App::behind(&IdempotencyLayer::new(engine), paid);
    for key in ["evnt_1", "webhook:evnt_1", "webhook/omise/evnt_1"] {
        let answer = api.send(deliver(COMPLETE).key(key)).await;
        assert!(!answer.is_replay(), "{key}");
        assert_eq!(answer.status, StatusCode::CREATED);
    }
}

#[tokio::test]
async fn the_id_may_be_a_header() {
    let header = HeaderName::from_static("i-twilio-idempotency-token");
    let layer = events("twilio", KeySource::header(header)).build().unwrap();
    let app = App::behind(&layer, paid);
    let status = |token, body| {
        post("/sms")
            .header("I-Twilio-Idempotency-Token", token)
            .body(body)
    };
    let first = app.send(status("8e03978e", "CallStatus=busy")).await;
    app.send(status("8e03978e", "CallStatus=busy&Attempt=2"))
        .await
        .assert_replays(&first);
    assert!(
        !app.send(status("ae03978e", "CallStatus=busy"))
            .await
            .is_replay()
    );
    let without = app.send(post("/sms")).await;
    without.assert_problem(ProblemKind::EventIdMissing);
    let twice = status("a", "").header("i-twilio-idempotency-token", "b");
    let twice = app.send(twice).await;
    twice.assert_problem(ProblemKind::InvalidKey);
    let detail = twice.json()["detail"].to_string();
    assert!(
        detail.contains("The I-Twilio-Idempotency-Token header"),
        "{detail}"
    );
}

#[tokio::test]
async fn several_values_make_an_id_together_and_do_not_run_into_each_other() {
    let source = KeySource::json(["/charge/id", "/charge/status"]).unwrap();
    let layer = events("psp", source).build().unwrap();
    let app = App::behind(&layer, paid);
    let charge = |id: &str, status: &str| {
        let body = json!({"charge": {"id": id, "status": status}, "at": rand::random::<u32>()});
        post("/psp").json(body.to_string())
    };
    let events = [
        ("ch_1", "paid"),
        ("ch_1", "refunded"),
        // What a delimiter, or quotes without escapes, would make one id of.
        ("a", "b,c"),
        ("a,b", "c"),
        ("a", "b\",\"c"),
        ("a\",\"b", "c"),
    ];
    for _ in 0..2 {
        for (id, status) in events {
            app.send(charge(id, status)).await;
        }
    }
    assert_eq!(app.runs(), events.len());
    for (id, status) in [("ch_1", ""), ("", "paid")] {
        let answer = app.send(charge(id, status)).await;
        answer.assert_problem(ProblemKind::EventIdMissing);
    }
    let one = app
        .send(post("/psp").json(r#"{"charge":{"id":"ch_1"}}"#))
        .await;
    one.assert_problem(ProblemKind::EventIdMissing);
}

#[tokio::test]
async fn a_function_may_find_the_id_in_the_head_and_the_body() {
    let source = KeySource::from_fn(|head, body| {
        let kind = head.uri.path().rsplit('/').next()?;
        let body = std::str::from_utf8(body).ok()?;
        let id = body
            .split('&')
            .find_map(|field| field.strip_prefix("txn="))?;
        Some(format!("{kind}-{id}"))
    });
    let layer = events("bank", source).build().unwrap();
    let app = App::behind(&layer, paid);
    let form = |path, body| post(path).body(body);
    let first = app.send(form("/bank/qr", "txn=7&try=1")).await;
    app.send(form("/bank/qr", "try=2&txn=7"))
        .await
        .assert_replays(&first);
    assert!(!app.send(form("/bank/card", "txn=7")).await.is_replay());
    for without in ["try=1", "\u{e9}"] {
        let answer = app.send(form("/bank/qr", without)).await;
        answer.assert_problem(ProblemKind::EventIdMissing);
    }
    assert_eq!(app.runs(), 2);
}

#[test]
fn a_sender_has_a_name() {
    let error = events("", by_id()).build().unwrap_err();
    assert_eq!(error.setting(), "sender");
}

#[test]
fn the_policy_says_what_a_sender_meets() {
    let policy = events("omise", by_id()).build().unwrap().policy();
    let told = serde_json::to_value(&policy).unwrap();
    assert_eq!(told["key_in_body"], json!(["/id"]));
    assert!(told.get("header").is_none());
    assert_eq!(told["fingerprint"], json!([]));
    assert_eq!(told["kept"], "webhook");
    let text = policy.to_markdown();
    for part in [
        "must carry a key in the body (`/id`)",
        "same request means same | key, whatever else |",
        "| 503 | `in_progress` | A request with this key in `/id` is being processed |",
        "| 400 | `event_id_missing` | The event has no id |",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}

fn word(status: u16, word: RetentionOverride) -> http::Response<axum::body::Body> {
    let mut response = http::Response::new(axum::body::Body::from("handled"));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response.extensions_mut().insert(word);
    response
}
