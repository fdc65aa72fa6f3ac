//! Responses that were captured too early, too late, or not as they were.

use axum::body::Body;
use http::{Response, StatusCode};
use tower_idempotency::ProblemKind;

use crate::app::{App, broken, data, paid, pay, steps};

/// A stream was stored as an object that had been drained: the retry got an empty 200.
/// <https://github.com/pathosDev/actor-ts/issues/1308>
#[tokio::test]
async fn a_stream_is_replayed_whole_or_not_at_all_and_never_as_an_empty_200() {
    let app = App::new(|_| async { steps([data("one "), data("two "), data("three")]) });
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "one two three");
    app.send(pay("k")).await.assert_replays(&first);

    let too_long = App::with(
        |s| s.response_limit(5),
        |_| async { steps([data("one "), data("two "), data("three")]) },
    );
    let live = App::new(|_| async {
        let body = steps([data("data: 1\n\n")]);
        ([("content-type", "text/event-stream")], body)
    });
    let cut_off = App::new(|_| async { steps([data("one "), broken()]) });
    drop(cut_off.call(pay("k")).await.unwrap());
    for (app, kind) in [
        (too_long, ProblemKind::ResponseNotKept),
        (live, ProblemKind::ResponseNotKept),
        (cut_off, ProblemKind::OutcomeUnknown),
    ] {
        if app.runs() == 0 {
            assert!(!app.send(pay("k")).await.body.is_empty());
        }
        app.send(pay("k")).await.assert_problem(kind);
        assert_eq!(app.runs(), 1);
    }
}

/// Bodies were decoded as UTF-8, with losses, before they were stored.
/// <https://github.com/VibeTensor/attestix/pull/128>
#[tokio::test]
async fn bytes_of_any_coding_come_back_with_the_headers_that_name_it() {
    for (coding, kind, bytes) in [
        ("gzip", "application/json", &b"\x1f\x8b\x08\x00\xff"[..]),
        ("identity", "application/x-protobuf", b"\x08\x96\x01\x00"),
        ("identity", "text/plain; charset=iso-8859-1", b"caf\xe9"),
    ] {
        let app = App::new(move |_| async move {
            (
                [("content-encoding", coding), ("content-type", kind)],
                bytes,
            )
        });
        let first = app.send(pay("k")).await;
        let retry = app.send(pay("k")).await;
        retry.assert_replays(&first);
        assert_eq!(retry.body, bytes);
        assert_eq!(retry.header("content-encoding"), coding);
    }
}

/// Every replay said that it was JSON.
/// <https://github.com/chuanghiduoc/nestjs-fastify-nx/pull/127>
#[tokio::test]
async fn a_replay_has_the_content_type_of_the_first_answer() {
    let app = App::new(|_| async { ([("content-type", "text/csv")], "a,b") });
    app.send(pay("k")).await;
    assert_eq!(app.send(pay("k")).await.header("content-type"), "text/csv");
}

/// An empty body could not be stored: those routes had no protection, without anybody noticing.
/// <https://github.com/Sidarthapati/one_day_delivery/pull/61>
#[tokio::test]
async fn answers_without_a_body_are_kept_as_any_other() {
    for status in [200_u16, 202, 204, 205, 303, 304] {
        let app = App::new(move |_| async move { StatusCode::from_u16(status).unwrap() });
        let first = app.send(pay("k")).await;
        let retry = app.send(pay("k")).await;
        retry.assert_replays(&first);
        assert!(retry.body.is_empty());
        assert_eq!(app.runs(), 1, "{status}");
    }
}

/// A 201 lost its Location.
/// <https://github.com/VSN2015/concerns_on_rails/pull/47>
#[tokio::test]
async fn headers_that_describe_the_result_are_replayed() {
    let app = App::new(|_| async {
        Response::builder()
            .status(StatusCode::CREATED)
            .header("location", "/orders/1")
            .header("etag", "\"1\"")
            .header("link", "</orders/1/items>; rel=\"items\"")
            .header("content-location", "/orders/1")
            .header("link", "</orders>; rel=\"collection\"")
            .body(Body::empty())
            .unwrap()
    });
    let first = app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    retry.assert_replays(&first);
    assert_eq!(retry.header("location"), "/orders/1");
    assert_eq!(retry.headers.get_all("link").iter().count(), 2);
}

/// A 201 was replayed as a 200 with a wrapper round its body, since it was captured too early.
/// <https://github.com/fullstackhero/dotnet-starter-kit/pull/1333>
#[tokio::test]
async fn what_inner_layers_make_of_a_response_is_what_is_kept() {
    use http::Request;
    use tower::ServiceBuilder;
    use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody};

    let runs = std::sync::Arc::default();
    let service = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .map_response(|mut response: Response<Body>| {
            *response.status_mut() = StatusCode::CREATED;
            response.map(|_| Body::from("wrapped"))
        })
        .map_request(|request: Request<RequestBody<Body>>| request)
        .service(crate::app::counted(&runs, |_| async { "bare" }));
    let first = crate::app::send(&service, pay("k")).await;
    assert_eq!(
        (first.status, first.text()),
        (StatusCode::CREATED, "wrapped")
    );
    crate::app::send(&service, pay("k"))
        .await
        .assert_replays(&first);
}

/// There was no way to tell a replay.
/// <https://github.com/ietf-wg-httpapi/idempotency/issues/46>,
/// <https://github.com/ikyriak/IdempotentAPI/issues/85>
#[tokio::test]
async fn a_replay_can_be_told_and_a_first_answer_too() {
    let app = App::with(|s| s.replay_marker("x-again"), paid);
    assert!(!app.send(pay("k")).await.headers.contains_key("x-again"));
    assert_eq!(app.send(pay("k")).await.header("x-again"), "true");
}

/// A replayed failure looked fresh, and the client kept trying.
/// <https://github.com/KeeperHub/keeperhub/pull/1849>
#[tokio::test]
async fn a_replayed_failure_says_that_it_is_old_and_how_old() {
    let app = App::new(|_| async { StatusCode::PAYMENT_REQUIRED });
    let first = app.send(pay("k")).await;
    assert!(!first.headers.contains_key("idempotency-original-date"));
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    let date = retry.header("idempotency-original-date");
    assert!(httpdate::parse_http_date(date).is_ok(), "{date}");
}
