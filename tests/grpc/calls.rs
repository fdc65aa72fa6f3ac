//! Which requests are gRPC calls, and how they are replayed.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tonic::metadata::MetadataMap;
use tonic::{Code, Response, Status};
use tower_idempotency::{Attempt, ProblemKind};

use crate::app::{self, App, Settings};
use crate::shop::{CHARGE, Shop, assert_replay, defaults, paid, pay, said, wire};

#[test]
fn a_call_is_told_by_its_content_type_and_not_by_its_path() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.build().unwrap();
    let app = App::new(app::paid);
    let refused = |method: &str, kind: Option<&str>| {
        let mut request = app::ask(method, CHARGE).key("\"never closed");
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        runtime.block_on(app.send(request))
    };
    for kind in [
        "application/grpc",
        "application/grpc+proto",
        "application/grpc+json",
        "application/grpc+vnd.shop",
        "Application/gRPC",
        "application/grpc; charset=utf-8",
        "application/grpc ; a=b",
    ] {
        let answer = refused("POST", Some(kind));
        assert_eq!(answer.status, 200, "{kind}");
        assert_eq!(answer.header("grpc-status"), "3", "{kind}");
        assert_eq!(answer.header("idempotency-error"), "invalid_key");
    }
    let others = [
        "application/grpc-web",
        "application/grpc-web+proto",
        "application/grpc-web-text",
        "application/grpcs",
        "application/grp",
        "application/json",
        "",
    ];
    for kind in others.map(Some).into_iter().chain([None]) {
        refused("POST", kind).assert_problem(ProblemKind::InvalidKey);
    }
    // gRPC calls are POST.
    let patch = refused("PATCH", Some("application/grpc"));
    patch.assert_problem(ProblemKind::InvalidKey);
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn a_call_without_a_key_passes() {
    let shop = Shop::unary(defaults, paid).await;
    let client = shop.client().await;
    for run in ["run 1", "run 2"] {
        let answer = client
            .charge(tonic::Request::new("100 THB".to_owned()))
            .await;
        let answer = answer.unwrap();
        assert_eq!(answer.get_ref(), run);
        assert!(!answer.metadata().contains_key("idempotency-replayed"));
    }
}

#[tokio::test]
async fn an_answer_is_replayed_with_its_message_metadata_and_trailers() {
    let shop = Shop::unary(defaults, |run, _| async move {
        let mut answer = Response::new(format!("run {run}"));
        let metadata = answer.metadata_mut();
        metadata.append("x-receipt", "a, b".parse().unwrap());
        metadata.append("x-receipt", "c".parse().unwrap());
        let bytes = tonic::metadata::MetadataValue::from_bytes(&[0, 255, 10]);
        metadata.insert_bin("x-trace-bin", bytes);
        Ok(answer)
    })
    .await;
    let (first, _) = shop.raw(wire("k")).await;
    assert!(!first.is_replay());
    assert_eq!(first.status, 200);
    assert_eq!(first.body, &b"\0\0\0\0\x05run 1"[..]);
    assert_eq!(first.trailers.as_ref().unwrap()["grpc-status"], "0");
    assert!(!first.headers.contains_key("grpc-status"));
    for _ in 0..2 {
        let (again, _) = shop.raw(wire("k")).await;
        assert!(again.is_replay());
        assert_eq!(again.body, first.body);
        assert_eq!(again.trailers, first.trailers);
        let receipts: Vec<_> = again.headers.get_all("x-receipt").iter().collect();
        assert_eq!(receipts, ["a, b", "c"]);
        assert_eq!(again.header("x-trace-bin"), first.header("x-trace-bin"));
        assert_eq!(again.header("content-type"), "application/grpc");
        // gRPC announces no trailers.
        assert!(!again.headers.contains_key("trailer"));
    }
    assert_eq!(shop.runs(), 1);

    // As tonic's client reads it.
    let client = shop.client().await;
    let answer = client.charge(pay("k")).await;
    assert_replay(&answer, "run 1");
    let metadata = answer.unwrap().into_parts().0;
    assert_eq!(metadata.get_all("x-receipt").iter().count(), 2);
    assert_eq!(
        metadata.get_bin("x-trace-bin").unwrap().to_bytes().unwrap(),
        &[0, 255, 10][..]
    );
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn an_error_at_once_is_replayed_as_trailers_only() {
    let shop = Shop::unary(defaults, |_, _| async move {
        let mut metadata = MetadataMap::new();
        metadata.insert("x-account", "closed".parse().unwrap());
        let text = "บัญชีถูกปิด: 100% \"sure\"";
        let details = Bytes::from_static(b"\x08\x09details");
        let code = Code::FailedPrecondition;
        Err(Status::with_details_and_metadata(
            code, text, details, metadata,
        ))
    })
    .await;
    let (first, ended) = shop.raw(wire("k")).await;
    assert!(ended && !first.is_replay());
    let (again, ended) = shop.raw(wire("k")).await;
    assert!(ended && again.is_replay());
    for name in [
        "content-type",
        "grpc-status",
        "grpc-message",
        "grpc-status-details-bin",
        "x-account",
    ] {
        assert!(!first.header(name).is_empty());
        assert_eq!(again.header(name), first.header(name));
    }
    for answer in [&first, &again] {
        assert_eq!(answer.status, 200);
        assert!(answer.trailers.is_none() && answer.body.is_empty());
    }

    let status = shop.client().await.charge(pay("k")).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.message(), "บัญชีถูกปิด: 100% \"sure\"");
    assert_eq!(status.details(), b"\x08\x09details");
    assert_eq!(said(status.metadata(), "x-account"), "closed");
    assert_eq!(said(status.metadata(), "idempotency-replayed"), "true");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn a_key_is_one_with_quotes_and_without() {
    let shop = Shop::unary(defaults, paid).await;
    let client = shop.client().await;
    assert_eq!(
        client.charge(pay("\"k-1\"")).await.unwrap().get_ref(),
        "run 1"
    );
    assert_replay(&client.charge(pay("k-1")).await, "run 1");
    assert_eq!(client.charge(pay("k-2")).await.unwrap().get_ref(), "run 2");
}

#[tokio::test]
async fn a_replay_can_be_refused_with_a_status_of_tonics() {
    let asked = |settings: Settings| {
        settings.authorize_replay(|_, _| async {
            Err(Status::permission_denied("not yours any more").into_http())
        })
    };
    let shop = Shop::unary(asked, paid).await;
    let client = shop.client().await;
    client.charge(pay("k")).await.unwrap();
    let status = client.charge(pay("k")).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert_eq!(status.message(), "not yours any more");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn the_handler_finds_its_attempt() {
    let seen = Arc::new(Mutex::new(None));
    let at = Arc::clone(&seen);
    let shop = Shop::unary(defaults, move |run, call| {
        let attempt = call.extensions().get::<Attempt>().cloned();
        *at.lock().unwrap() = attempt.map(|attempt| attempt.number());
        paid(run, call)
    })
    .await;
    shop.client().await.charge(pay("k")).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), Some(1));
}
