//! Refusals: one form for all of them, every text and status settable.

use std::time::Duration;

use axum::body::Body;
use http::StatusCode;
use serde_json::json;
use tower_idempotency::{
    Idempotency, IdempotencyLayer, KeySource, MemoryStore, MissingKey, ProblemKind,
    RetentionOverride, Scope,
};

use crate::app::{Answer, App, Gate, Settings, broken, paid, pay, post, steps};

/// Each refusal that a sound store can bring about, met as a client meets it.
async fn refusal(kind: ProblemKind, settings: impl FnOnce(Settings) -> Settings) -> Answer {
    match kind {
        ProblemKind::MissingKey => {
            let app = App::with(|s| settings(s.missing_key(MissingKey::Reject)), paid);
            app.send(post("/pay")).await
        }
        ProblemKind::EventIdMissing => {
            let event_id = KeySource::json(["/id"]).unwrap();
            let events = IdempotencyLayer::webhooks(MemoryStore::new(), "sender", event_id);
            let layer = settings(events).build().unwrap();
            App::behind(&layer, paid).send(post("/pay")).await
        }
        ProblemKind::InvalidKey => App::with(settings, paid).send(pay("a,b")).await,
        ProblemKind::BodyUnreadable => {
            let request = pay("k").stream(steps([broken()]));
            App::with(settings, paid).send(request).await
        }
        ProblemKind::InProgress => in_progress(settings).await,
        ProblemKind::OutcomeUnknown => {
            let app = App::with(settings, |_| async {
                outcome(RetentionOverride::LeaveUnknown)
            });
            app.send(pay("k")).await;
            app.send(pay("k")).await
        }
        ProblemKind::ResponseNotKept => {
            let app = App::with(settings, |_| async { outcome(RetentionOverride::Live) });
            app.send(pay("k")).await;
            app.send(pay("k")).await
        }
        ProblemKind::BodyTooLarge => {
            let app = App::with(|s| settings(s.request_limit(3)), paid);
            app.send(pay("k").body("1234")).await
        }
        ProblemKind::KeyReused => {
            let app = App::with(settings, paid);
            app.send(pay("k")).await;
            app.send(pay("k").body("999 THB")).await
        }
        ProblemKind::CallerChanged => {
            let app = App::with(settings, paid);
            app.send(pay("k").header("authorization", "Bearer alice"))
                .await;
            app.send(pay("k").header("authorization", "Bearer bob"))
                .await
        }
        ProblemKind::TooEarly => {
            let app = App::with(settings, paid);
            app.send(post("/pay").header("early-data", "1")).await
        }
        ProblemKind::ScopeUnavailable => {
            let app = App::with(|s| settings(s.scope(Scope::from_fn(|_| None))), paid);
            app.send(pay("k")).await
        }
        ProblemKind::StoreUnavailable => {
            let full = MemoryStore::new().max_entries(0);
            let layer = settings(IdempotencyLayer::builder(full)).build().unwrap();
            App::behind(&layer, paid).send(pay("k")).await
        }
        ProblemKind::Overloaded => overloaded(settings).await,
        other => unreachable!("{other:?} needs a store that fails in its own way"),
    }
}

const REFUSALS: &[ProblemKind] = &[
    ProblemKind::MissingKey,
    ProblemKind::EventIdMissing,
    ProblemKind::InvalidKey,
    ProblemKind::BodyUnreadable,
    ProblemKind::InProgress,
    ProblemKind::OutcomeUnknown,
    ProblemKind::ResponseNotKept,
    ProblemKind::BodyTooLarge,
    ProblemKind::KeyReused,
    ProblemKind::CallerChanged,
    ProblemKind::TooEarly,
    ProblemKind::ScopeUnavailable,
    ProblemKind::StoreUnavailable,
    ProblemKind::Overloaded,
];

fn outcome(word: RetentionOverride) -> http::Response<Body> {
    let mut response = http::Response::new(Body::from("paid"));
    *response.status_mut() = StatusCode::CREATED;
    response.extensions_mut().insert(word);
    response
}

async fn in_progress(settings: impl FnOnce(Settings) -> Settings) -> Answer {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::with(settings, move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let twin = async {
        gate.entered().await;
        let answer = app.send(pay("k")).await;
        gate.open();
        answer
    };
    tokio::join!(app.send(pay("k")), twin).1
}

async fn overloaded(settings: impl FnOnce(Settings) -> Settings) -> Answer {
    let engine = Idempotency::builder(MemoryStore::new()).detached_limit(1);
    let layer = settings(IdempotencyLayer::builder(engine.build().unwrap()));
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::behind(&layer.build().unwrap(), move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    tokio::select! {
        biased;
        _ = app.call(pay("first")) => unreachable!("the handler is held up"),
        () = gate.entered() => {}
    }
    let answer = app.send(pay("second")).await;
    gate.open();
    answer
}

#[tokio::test]
async fn every_refusal_is_a_problem_document_with_all_its_parts() {
    for kind in REFUSALS {
        let answer = refusal(*kind, |settings| settings).await;
        answer.assert_problem(*kind);
    }
}

#[tokio::test]
async fn codes_and_statuses_are_those_that_clients_were_told() {
    let expected = [
        ("missing_key", 400),
        ("event_id_missing", 400),
        ("invalid_key", 400),
        ("body_unreadable", 400),
        ("in_progress", 409),
        ("outcome_unknown", 409),
        ("response_not_kept", 409),
        ("body_too_large", 413),
        ("key_reused", 422),
        ("caller_changed", 422),
        ("too_early", 425),
        ("scope_unavailable", 500),
        ("record_unreadable", 500),
        ("store_unavailable", 503),
        ("overloaded", 503),
    ];
    let kinds = ProblemKind::ALL.iter();
    let told: Vec<_> = kinds
        .map(|kind| (kind.code(), kind.status().as_u16()))
        .collect();
    assert_eq!(told, expected);
}

#[tokio::test]
async fn only_refusals_that_pass_by_themselves_say_when_to_come_back() {
    for kind in REFUSALS {
        let answer = refusal(*kind, |settings| settings).await;
        let expected = match kind {
            ProblemKind::InProgress | ProblemKind::StoreUnavailable | ProblemKind::Overloaded => {
                "1"
            }
            // As long as a lease, within which a reconciler may close the record.
            ProblemKind::OutcomeUnknown => "30",
            _ => "",
        };
        assert_eq!(answer.header("retry-after"), expected, "{kind:?}");
    }
}

#[tokio::test]
async fn no_refusal_repeats_what_the_client_sent() {
    let secrets = ["k-canary", "100 THB", "alice", "bob"];
    let app = App::new(paid);
    app.send(pay("k-canary").header("authorization", "Bearer alice"))
        .await;
    for request in [
        pay("k-canary").body("1"),
        pay("k-canary").header("authorization", "Bearer bob"),
        pay("k-canary, k-canary"),
        pay("\"k-canary"),
    ] {
        let answer = app.send(request).await;
        assert!(answer.status.is_client_error());
        let said = format!("{:?} {}", answer.headers, answer.text());
        for secret in secrets {
            assert!(!said.contains(secret), "{said}");
        }
    }
}

#[tokio::test]
async fn a_refused_key_says_why_in_a_word_for_programs_too() {
    let app = App::new(paid);
    for (value, reason) in [
        ("\"abc", "sf-syntax"),
        ("a b", "bare-syntax"),
        ("\"\"", "empty"),
        ("\"  \"", "blank"),
    ] {
        let answer = app.send(pay(value)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
        assert_eq!(answer.json()["reason"], reason);
    }
}

#[tokio::test]
async fn a_response_that_was_not_kept_names_the_status_that_it_had() {
    let answer = refusal(ProblemKind::ResponseNotKept, |settings| settings).await;
    assert_eq!(answer.json()["original_status"], 201);
}

#[tokio::test]
async fn the_types_of_two_problems_are_never_the_same() {
    let mut types = std::collections::HashSet::new();
    for kind in REFUSALS {
        let document = refusal(*kind, |settings| settings).await.json();
        assert!(types.insert(document["type"].as_str().unwrap().to_owned()));
    }
}

#[tokio::test]
async fn type_and_link_lead_to_the_documentation_that_was_set() {
    let page = Some("https://api.example.com/docs/idempotency");
    let answer = refusal(ProblemKind::KeyReused, |s| s.documentation(page)).await;
    answer.assert_problem(ProblemKind::KeyReused);
    assert_eq!(
        answer.json()["type"],
        "https://api.example.com/docs/idempotency#key_reused"
    );
    assert_eq!(
        answer.header("link"),
        "<https://api.example.com/docs/idempotency>; rel=\"describedby\"; type=\"text/html\""
    );
}

#[tokio::test]
async fn without_documentation_the_type_is_blank_and_no_link_is_sent() {
    let answer = refusal(ProblemKind::KeyReused, |s| s.documentation(None)).await;
    assert_eq!(answer.json()["type"], "about:blank");
    assert!(!answer.headers.contains_key("link"));
    assert_eq!(answer.json()["code"], "key_reused");
}

#[tokio::test]
async fn status_texts_and_members_can_be_reworded_and_the_code_in_the_header_stays() {
    let answer = refusal(ProblemKind::KeyReused, |settings| {
        settings.problems(|problem| {
            problem.status = StatusCode::BAD_REQUEST;
            problem.title = "Key reused".into();
            problem.detail = "Ask support.".into();
            problem.type_uri = "urn:example:reused".to_owned();
            problem.retry_after = Some(Duration::from_millis(1_500));
            problem.documentation = None;
            problem.extensions.insert("support".to_owned(), 4711.into());
        })
    })
    .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(
        answer.json(),
        json!({
            "type": "urn:example:reused",
            "title": "Key reused",
            "status": 400,
            "detail": "Ask support.",
            "code": "key_reused",
            "support": 4711,
        })
    );
    assert_eq!(answer.header("idempotency-error"), "key_reused");
    assert_eq!(answer.header("retry-after"), "2");
    assert!(!answer.headers.contains_key("link"));
}

#[tokio::test]
async fn the_statuses_of_other_vendors_are_one_line_away() {
    for status in [StatusCode::BAD_REQUEST, StatusCode::CONFLICT] {
        let answer = refusal(ProblemKind::KeyReused, |settings| {
            settings.problems(move |problem| problem.status = status)
        })
        .await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.json()["status"], status.as_u16());
    }
}

#[tokio::test]
async fn the_texts_name_the_header_that_was_set() {
    let app = App::with(
        |settings| {
            settings
                .header("x-request-key")
                .missing_key(MissingKey::Reject)
        },
        paid,
    );
    let missing = app.send(post("/pay")).await;
    missing.assert_problem(ProblemKind::MissingKey);
    let invalid = app.send(post("/pay").header("x-request-key", "\"a")).await;
    invalid.assert_problem(ProblemKind::InvalidKey);
    for answer in [missing, invalid] {
        let document = answer.json();
        for text in [&document["title"], &document["detail"]] {
            let text = text.as_str().unwrap();
            assert!(text.contains("X-Request-Key"), "{text}");
            assert!(!text.contains("Idempotency-Key"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_title_is_the_same_in_the_problem_and_in_the_published_policy() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let policy = serde_json::to_value(layer.policy()).unwrap();
    for kind in REFUSALS {
        let answer = refusal(*kind, |settings| settings).await;
        let listed = policy["problems"].as_array().unwrap();
        let listed = listed.iter().find(|listed| listed["code"] == kind.code());
        assert_eq!(answer.json()["title"], listed.unwrap()["title"]);
    }
}

#[tokio::test]
async fn the_layers_own_409_can_be_told_from_the_handlers() {
    let app = App::new(|_| async { (StatusCode::CONFLICT, "sold out") });
    let own = app.send(pay("k")).await;
    assert_eq!(own.status, StatusCode::CONFLICT);
    assert!(own.extensions.get::<ProblemKind>().is_none());
    assert!(!own.headers.contains_key("idempotency-error"));
    let layers = refusal(ProblemKind::InProgress, |settings| settings).await;
    assert_eq!(layers.status, StatusCode::CONFLICT);
    layers.assert_problem(ProblemKind::InProgress);
}

#[tokio::test(start_paused = true)]
async fn a_hint_is_in_whole_seconds_rounded_up_and_never_beyond_the_lease() {
    for (set, expected) in [(1, "1"), (1_001, "2"), (29_000, "29"), (90_000, "30")] {
        let answer = refusal(ProblemKind::InProgress, |settings| {
            settings.retry_after(Duration::from_millis(set))
        })
        .await;
        assert_eq!(answer.header("retry-after"), expected);
    }
}
