//! Which answers are kept: `grpc-status` decides, whether it comes at once or at the end.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tokio::time::advance;
use tonic::{Code, Status};
use tower_idempotency::{
    Disposition, GrpcCode, ProblemKind, RetentionOverride, RetentionPolicy, State,
};

use crate::app::{App, Call, Settings, broken, data, steps, trailers};
use crate::refusals::assert_status;
use crate::shop::{CHARGE, Shop, assert_refused, defaults, pay};

/// What became of the first answer, as a retry sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Became {
    Kept,
    Released,
    Unknown,
}

use Became::{Kept, Released, Unknown};

/// By number of the code.
const STANDARD: [Became; 17] = [
    Kept, Unknown, Unknown, Kept, Unknown, Kept, Kept, Released, Released, Kept, Released, Kept,
    Kept, Released, Released, Unknown, Released,
];

/// Ends at once: one block of fields.
fn at_once(status: &str) -> Response {
    let fields = [
        ("content-type", "application/grpc"),
        ("grpc-status", status),
    ];
    (fields, Body::empty()).into_response()
}

/// A message, and then the status.
fn at_the_end(status: &str) -> Response {
    let status: &'static str = status.to_owned().leak();
    let body = steps([data("\0\0\0\0\0"), trailers("grpc-status", status)]);
    ([("content-type", "application/grpc")], body).into_response()
}

fn call() -> crate::app::Ask {
    let call = crate::app::post(CHARGE).key("k");
    call.header("content-type", "application/grpc")
        .body(&[0; 5][..])
}

/// Sends the call twice.
async fn became<F>(settings: impl FnOnce(Settings) -> Settings, answer: F) -> Became
where
    F: Fn() -> Response + Clone + Send + Sync + 'static,
{
    let app = App::with(settings, move |_: Call| {
        let answer = answer();
        async move { answer }
    });
    let first = app.send(call()).await;
    let again = app.send(call()).await;
    match app.runs() {
        2 => {
            assert!(!again.is_replay());
            Released
        }
        _ if again.is_replay() => {
            again.assert_replays(&first);
            Kept
        }
        _ => {
            assert_status(&again, ProblemKind::OutcomeUnknown);
            Unknown
        }
    }
}

#[tokio::test]
async fn each_code_is_decided_on_whether_it_comes_at_once_or_at_the_end() {
    for (code, expected) in STANDARD.into_iter().enumerate() {
        let status = code.to_string();
        let early = became(|settings| settings, {
            let status = status.clone();
            move || at_once(&status)
        });
        assert_eq!(early.await, expected, "{code} at once");
        let late = became(|settings| settings, move || at_the_end(&status));
        assert_eq!(late.await, expected, "{code} at the end");
    }
}

#[tokio::test]
async fn each_code_of_a_tonic_handler_is_decided_on() {
    for (code, expected) in (1..).zip(&STANDARD[1..]) {
        let code = Code::from(code);
        let shop = Shop::unary(defaults, move |run, _| async move {
            Err(Status::new(code, format!("run {run}")))
        })
        .await;
        let client = shop.client().await;
        let first = client.charge(pay("k")).await.unwrap_err();
        assert_eq!((first.code(), first.message()), (code, "run 1"));
        let again = client.charge(pay("k")).await;
        if *expected == Unknown {
            assert_refused(&again, ProblemKind::OutcomeUnknown);
            continue;
        }
        let run = if *expected == Kept { "run 1" } else { "run 2" };
        let again = again.unwrap_err();
        assert_eq!((again.code(), again.message()), (code, run));
    }
}

#[tokio::test]
async fn a_status_that_is_absent_or_unreadable_is_unknown() {
    for status in ["17", "-1", "zero", ""] {
        for answer in [at_once, at_the_end] {
            let answer = became(|settings| settings, move || answer(status));
            assert_eq!(answer.await, Unknown, "{status}");
        }
    }
    let none = || {
        let body = steps([data("\0\0\0\0\0")]);
        ([("content-type", "application/grpc")], body).into_response()
    };
    assert_eq!(became(|settings| settings, none).await, Unknown);
    let other = || {
        let body = steps([data("\0\0\0\0\0"), trailers("x-status", "0")]);
        ([("content-type", "application/grpc")], body).into_response()
    };
    assert_eq!(became(|settings| settings, other).await, Unknown);
}

#[tokio::test]
async fn an_answer_that_is_none_of_grpc_is_decided_on_by_its_http_status() {
    for (status, expected) in [
        (StatusCode::OK, Kept),
        (StatusCode::NOT_FOUND, Kept),
        (StatusCode::UNAUTHORIZED, Released),
        (StatusCode::BAD_GATEWAY, Released),
    ] {
        let answer = move || (status, "from a layer inside").into_response();
        assert_eq!(became(|settings| settings, answer).await, expected);
    }
    let answer = || {
        let kind = [("content-type", "application/grpc")];
        (StatusCode::SERVICE_UNAVAILABLE, kind).into_response()
    };
    assert_eq!(became(|settings| settings, answer).await, Released);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_unknown() {
    let broken = || {
        let body = steps([data("\0\0\0\0\0"), broken()]);
        ([("content-type", "application/grpc")], body).into_response()
    };
    let app = App::new(move |_: Call| async move { broken() });
    let first = app.call(call()).await.unwrap();
    assert!(axum::body::to_bytes(first.into_body(), 100).await.is_err());
    assert_status(&app.send(call()).await, ProblemKind::OutcomeUnknown);
}

#[tokio::test]
async fn the_rule_can_be_changed() {
    let upside_down = |settings: Settings| {
        settings.retention(RetentionPolicy::standard().grpc(|code| match code {
            GrpcCode::Ok => Disposition::Release,
            GrpcCode::NotFound => Disposition::LeaveUnknown,
            _ => Disposition::Keep,
        }))
    };
    for answer in [at_once, at_the_end] {
        for (code, expected) in [("0", Released), ("5", Unknown), ("14", Kept), ("4", Kept)] {
            assert_eq!(became(upside_down, move || answer(code)).await, expected);
        }
        for (policy, code, expected) in [
            (RetentionPolicy::draft(), "2", Kept),
            (RetentionPolicy::stripe(), "13", Kept),
            (RetentionPolicy::stripe(), "10", Released),
            (
                RetentionPolicy::from_fn("own", |_| Disposition::Release),
                "0",
                Kept,
            ),
        ] {
            let settings = move |settings: Settings| settings.retention(policy);
            assert_eq!(became(settings, move || answer(code)).await, expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_can_be_kept_for_a_time_of_its_own() {
    for answer in [at_once, at_the_end] {
        let policy =
            RetentionPolicy::standard().grpc(|_| Disposition::KeepFor(Duration::from_secs(60)));
        let settings = |settings: Settings| settings.retention(policy);
        let app = App::with(settings, move |_: Call| async move { answer("5") });
        let first = app.send(call()).await;
        advance(Duration::from_secs(59)).await;
        app.send(call()).await.assert_replays(&first);
        advance(Duration::from_secs(2)).await;
        assert!(!app.send(call()).await.is_replay());
        assert_eq!(app.runs(), 2);
    }
}

#[tokio::test]
async fn the_handlers_word_is_stronger_than_the_status() {
    for (word, expected) in [
        (RetentionOverride::NotExecuted, Released),
        (RetentionOverride::LeaveUnknown, Unknown),
    ] {
        let shop = Shop::unary(defaults, move |run, _| async move {
            let mut answer = tonic::Response::new(format!("run {run}"));
            answer.extensions_mut().insert(word);
            Ok(answer)
        })
        .await;
        let client = shop.client().await;
        assert_eq!(client.charge(pay("k")).await.unwrap().get_ref(), "run 1");
        let again = client.charge(pay("k")).await;
        if expected == Unknown {
            assert_refused(&again, ProblemKind::OutcomeUnknown);
        } else {
            assert_eq!(again.unwrap().get_ref(), "run 2");
        }
    }
    for answer in [at_once, at_the_end] {
        let kept = move || {
            let mut answer = answer("14");
            answer.extensions_mut().insert(RetentionOverride::Keep);
            answer
        };
        assert_eq!(became(|settings| settings, kept).await, Kept);
    }
}

#[tokio::test]
async fn what_an_inner_layer_refuses_frees_the_key_of_the_outer_one() {
    let inner = || {
        let mut answer = at_once("9");
        answer.extensions_mut().insert(ProblemKind::KeyReused);
        answer
    };
    assert_eq!(became(|settings| settings, inner).await, Released);
}

#[tokio::test]
async fn a_released_key_is_free_before_the_client_is_answered() {
    let app = App::new(|_: Call| async { at_the_end("14") });
    let _unread = app.call(call()).await.unwrap();
    let record = app.record("k").await.unwrap();
    assert_eq!(record.state, State::Released);
}
