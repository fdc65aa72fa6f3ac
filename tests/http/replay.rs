//! What a retry is given: the first answer, less what belonged to one exchange.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::{join, join_all};
use http::header::{CACHE_CONTROL, HeaderName, SET_COOKIE};
use http::{HeaderValue, Response, StatusCode};
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, OnNoStore, Outcome, ProblemKind, Replay, State, Store,
};

use crate::app::{App, Gate, Settings, paid, pay};

/// An app whose handler answers with these header lines.
fn app_with_headers(
    settings: impl FnOnce(Settings) -> Settings,
    lines: &'static [(&'static str, &'static [u8])],
) -> App {
    App::with(settings, move |_| async move {
        let mut response = Response::new(Body::from("paid"));
        for (name, value) in lines {
            let value = HeaderValue::from_bytes(value).unwrap();
            let name = HeaderName::from_static(name);
            response.headers_mut().append(name, value);
        }
        response
    })
}

fn app_with_status(settings: impl FnOnce(Settings) -> Settings, status: u16) -> App {
    App::with(settings, move |call| async move {
        (
            StatusCode::from_u16(status).unwrap(),
            format!("run {}", call.run),
        )
    })
}

#[tokio::test]
async fn every_kept_status_is_replayed_with_its_headers_and_bytes() {
    for status in [
        200, 201, 202, 203, 206, 299, 303, 307, 400, 402, 404, 409, 410, 412, 422, 451,
    ] {
        let app = app_with_status(|s| s, status);
        let first = app.send(pay("k")).await;
        assert_eq!(first.status, status);
        for _ in 0..3 {
            app.send(pay("k")).await.assert_replays(&first);
        }
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test]
async fn statuses_without_content_are_replayed_without_a_body() {
    for status in [204, 205, 304] {
        let app = app_with_status(|s| s, status);
        app.send(pay("k")).await;
        let retry = app.send(pay("k")).await;
        assert_eq!(retry.status, status);
        assert!(retry.is_replay());
        // Even though the handler put one there.
        assert!(retry.body.is_empty());
        assert!(!retry.headers.contains_key("content-length"));
        assert_eq!(app.runs(), 1);
    }
}

#[tokio::test]
async fn header_lines_keep_their_order_their_repetitions_and_their_bytes() {
    let app = app_with_headers(
        |s| s,
        &[
            ("x-b", b"1"),
            ("location", b"/payments/1"),
            ("link", b"</a>; rel=\"next\""),
            ("x-a", b"caf\xe9 \xff"),
            ("link", b"</b>; rel=\"prev\""),
            ("x-b", b"2"),
            ("etag", b"\"1\""),
            ("content-type", b"text/csv; charset=latin-1"),
            ("content-encoding", b"gzip"),
            ("vary", b"accept"),
            ("vary", b"accept-language"),
            ("content-location", b"/payments/1"),
            ("last-modified", b"Tue, 01 Jan 2030 00:00:00 GMT"),
            ("x-empty", b""),
        ],
    );
    let first = app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    retry.assert_replays(&first);
    let links: Vec<_> = retry.headers.get_all("link").iter().collect();
    assert_eq!(links, ["</a>; rel=\"next\"", "</b>; rel=\"prev\""]);
    assert_eq!(retry.headers["x-a"].as_bytes(), b"caf\xe9 \xff");
    assert_eq!(retry.headers.len(), 14 + 1);
}

#[tokio::test]
async fn bytes_that_are_no_text_are_replayed_unchanged() {
    let app = App::new(|_| async { (0..=255).collect::<Vec<u8>>() });
    let first = app.send(pay("k")).await;
    assert_eq!(first.body.len(), 256);
    app.send(pay("k")).await.assert_replays(&first);
}

/// What belongs to one hop, one exchange or one client: RFC 9110 sections 6.6.1, 7.6.1 and 11.6,
/// RFC 9111 section 5.1, RFC 6265 section 4.1, and what outer layers add to every response.
const OF_ONE_EXCHANGE: &[(&str, &[u8])] = &[
    ("connection", b"keep-alive, X-Hop"),
    ("x-hop", b"1"),
    ("keep-alive", b"timeout=5"),
    ("proxy-connection", b"keep-alive"),
    ("te", b"trailers"),
    ("trailer", b"x-sum"),
    ("transfer-encoding", b"chunked"),
    ("upgrade", b"h2c"),
    ("content-length", b"4"),
    ("date", b"Tue, 15 Nov 1994 08:12:31 GMT"),
    ("age", b"3"),
    ("set-cookie", b"session=1"),
    ("set-cookie", b"csrf=2"),
    ("www-authenticate", b"Basic"),
    ("authentication-info", b"nextnonce=1"),
    ("proxy-authenticate", b"Basic"),
    ("proxy-authentication-info", b"a=1"),
    ("access-control-allow-origin", b"https://a.example"),
    ("access-control-expose-headers", b"etag"),
    ("x-request-id", b"1"),
    ("traceparent", b"00-1-1-00"),
    ("tracestate", b"a=1"),
    ("server-timing", b"db;dur=5"),
    ("ratelimit", b"\"a\";r=1"),
    ("ratelimit-limit", b"10"),
    ("x-ratelimit-remaining", b"9"),
    ("retry-after", b"5"),
    ("server", b"a/1"),
    ("idempotency-replayed", b"true"),
    ("idempotency-error", b"in_progress"),
    ("idempotency-result", b"not-saved"),
    ("idempotency-unprotected", b"true"),
    ("idempotency-original-date", b"x"),
];

#[tokio::test]
async fn what_belongs_to_one_exchange_is_given_to_the_first_client_only() {
    let app = app_with_headers(|s| s, OF_ONE_EXCHANGE);
    let first = app.send(pay("k")).await;
    for (name, _) in OF_ONE_EXCHANGE {
        // But for the marker: the first answer is no replay, whatever the handler passes on.
        let given = *name != "idempotency-replayed";
        assert_eq!(first.headers.contains_key(*name), given, "{name}");
    }
    let retry = app.send(pay("k")).await;
    let names: Vec<_> = retry.headers.keys().map(HeaderName::as_str).collect();
    assert_eq!(names, ["idempotency-replayed"]);
    assert_eq!(retry.body, first.body);
}

#[tokio::test]
async fn a_length_that_the_body_does_not_have_is_not_declared() {
    let app = app_with_headers(|s| s, &[("content-length", b"99")]);
    let first = app.send(pay("k")).await;
    assert!(!first.headers.contains_key("content-length"));
    app.send(pay("k")).await.assert_replays(&first);
}

#[tokio::test]
async fn cookies_can_be_kept_and_keep_their_lines() {
    let app = app_with_headers(|s| s.also_store(SET_COOKIE), OF_ONE_EXCHANGE);
    app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    let cookies: Vec<_> = retry.headers.get_all(SET_COOKIE).iter().collect();
    assert_eq!(cookies, ["session=1", "csrf=2"]);
    assert!(!retry.headers.contains_key("www-authenticate"));
}

#[tokio::test]
async fn what_frames_a_message_or_belongs_to_its_hop_can_never_be_kept() {
    let names = [
        "connection",
        "x-hop",
        "keep-alive",
        "transfer-encoding",
        "content-length",
    ];
    let app = app_with_headers(
        |settings| {
            names.iter().fold(settings, |settings, name| {
                settings.also_store(HeaderName::from_static(name))
            })
        },
        OF_ONE_EXCHANGE,
    );
    app.send(pay("k")).await;
    let retry = app.send(pay("k")).await;
    for name in names {
        assert!(!retry.headers.contains_key(name), "{name}");
    }
}

#[tokio::test]
async fn further_headers_can_be_left_out() {
    let app = app_with_headers(
        |s| s.never_store(HeaderName::from_static("x-node")),
        &[("x-node", b"7"), ("etag", b"1")],
    );
    assert_eq!(app.send(pay("k")).await.header("x-node"), "7");
    let retry = app.send(pay("k")).await;
    assert!(!retry.headers.contains_key("x-node"));
    assert_eq!(retry.header("etag"), "1");
}

#[tokio::test]
async fn the_marker_is_on_replays_only() {
    let app = App::new(paid);
    assert!(!app.send(pay("k")).await.is_replay());
    assert!(app.send(pay("k")).await.is_replay());
    assert!(!app.send(pay("other")).await.is_replay());
    assert!(!app.send(crate::app::post("/pay")).await.is_replay());
}

#[tokio::test]
async fn the_marker_can_have_another_name() {
    let app = App::with(|s| s.replay_marker("Idempotent-Replayed"), paid);
    let first = app.send(pay("k")).await;
    assert!(!first.headers.contains_key("idempotent-replayed"));
    let retry = app.send(pay("k")).await;
    assert_eq!(retry.header("idempotent-replayed"), "true");
    assert!(!retry.headers.contains_key("idempotency-replayed"));
}

#[tokio::test]
async fn a_marker_that_the_handler_sent_itself_is_not_kept() {
    let app = app_with_headers(
        |s| s.replay_marker("x-again"),
        &[("x-again", b"true"), ("x-again", b"no")],
    );
    app.send(pay("k")).await;
    assert_eq!(app.send(pay("k")).await.header("x-again"), "true");
}

#[tokio::test(start_paused = true)]
async fn a_replayed_error_says_when_it_was_given_first() {
    for (status, dated) in [(201, false), (303, false), (402, true), (500, true)] {
        let app = app_with_status(
            |s| s.retention(tower_idempotency::RetentionPolicy::draft()),
            status,
        );
        app.send(pay("k")).await;
        tokio::time::advance(std::time::Duration::from_secs(3_600)).await;
        let retry = app.send(pay("k")).await;
        assert_eq!(
            retry.headers.contains_key("idempotency-original-date"),
            dated
        );
        let replay = retry.extensions.get::<Replay>().unwrap();
        if dated {
            let date = httpdate::fmt_http_date(replay.completed_at);
            assert_eq!(retry.header("idempotency-original-date"), date);
        }
        let State::Completed { completed_at, .. } = app.record("k").await.unwrap().state else {
            panic!("not completed");
        };
        assert_eq!(replay.completed_at, completed_at.to_system_time());
    }
}

#[tokio::test]
async fn fifty_replays_at_once_are_all_answered() {
    let app = App::new(paid);
    let first = app.send(pay("k")).await;
    let retries = join_all((0..50).map(|_| app.send(pay("k")))).await;
    for retry in retries {
        retry.assert_replays(&first);
    }
    assert_eq!(app.runs(), 1);
}

fn refuse() -> Response<Bytes> {
    let response = Response::builder().status(403);
    response.body(Bytes::from("revoked")).unwrap()
}

#[tokio::test]
async fn a_caller_whose_rights_were_revoked_gets_a_403_and_the_record_stays() {
    let revoked = Arc::new(AtomicUsize::new(0));
    let asked = Arc::clone(&revoked);
    let app = App::with(
        |s| {
            s.authorize_replay(move |head, outcome: &Outcome| {
                assert_eq!(head.uri.path(), "/pay");
                assert_eq!(outcome.status(), Some(StatusCode::CREATED));
                let asked = Arc::clone(&asked);
                async move {
                    tokio::task::yield_now().await;
                    match asked.load(Ordering::SeqCst) {
                        0 => Ok(()),
                        _ => Err(refuse()),
                    }
                }
            })
        },
        paid,
    );
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);

    revoked.store(1, Ordering::SeqCst);
    let refused = app.send(pay("k")).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    assert_eq!(refused.text(), "revoked");
    assert!(!refused.is_replay());
    assert!(refused.extensions.get::<ProblemKind>().is_none());

    revoked.store(0, Ordering::SeqCst);
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn rights_are_asked_about_before_a_tombstone_is_shown_too() {
    let app = App::with(
        |s| {
            s.response_limit(0)
                .authorize_replay(|_, _| async { Err(refuse()) })
        },
        paid,
    );
    assert_eq!(app.send(pay("k")).await.status, 201);
    assert_eq!(app.send(pay("k")).await.status, 403);
}

#[tokio::test]
async fn what_is_kept_can_be_redacted_and_the_first_client_gets_it_whole() {
    let app = App::with(
        |s| {
            s.redact(|status, headers, body| {
                assert_eq!(status, StatusCode::CREATED);
                headers.remove("location");
                let text = String::from_utf8(body.to_vec()).unwrap();
                Bytes::from(text.replace("secret", "******"))
            })
        },
        |_| async {
            let headers = [("location", "/secret"), ("etag", "1")];
            (StatusCode::CREATED, headers, "the secret of alice")
        },
    );
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "the secret of alice");
    assert_eq!(first.header("location"), "/secret");
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "the ****** of alice");
    assert!(!retry.headers.contains_key("location"));
    assert_eq!(retry.header("etag"), "1");
    let State::Completed { outcome, .. } = app.record("k").await.unwrap().state else {
        panic!("not completed");
    };
    let stored = String::from_utf8_lossy(outcome.as_bytes());
    assert!(!stored.contains("secret"), "{stored}");
}

fn app_without_caching(on_no_store: OnNoStore, directives: &'static str) -> App {
    App::with(
        |s| s.on_no_store(on_no_store),
        move |_| async move { ([(CACHE_CONTROL, directives)], "the secret of alice") },
    )
}

#[tokio::test]
async fn no_store_speaks_to_caches_and_frees_no_key() {
    let app = app_without_caching(OnNoStore::Keep, "no-store");
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn no_store_can_keep_the_body_out_of_the_store() {
    for directives in ["no-store", "private, NO-STORE ,max-age=0"] {
        let app = app_without_caching(OnNoStore::Tombstone, directives);
        assert_eq!(app.send(pay("k")).await.text(), "the secret of alice");
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::ResponseNotKept);
        assert_eq!(app.runs(), 1, "freeing the key would repeat the payment");
    }
    let other = app_without_caching(OnNoStore::Tombstone, "no-cache, x=no-store");
    let first = other.send(pay("k")).await;
    other.send(pay("k")).await.assert_replays(&first);
}

/// A job's value under the same key, or bytes that were sealed by a store that this process does not
/// wrap: nothing of it was ever an answer.
#[tokio::test]
async fn a_value_is_never_sent_as_a_response() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    let record = app.record("k").await.unwrap();
    let store = app.store();
    assert!(store.remove(&record.key).await.unwrap());
    let request = ClaimRequest::new(record.key, record.fingerprint);
    let Claimed::Acquired { claim, .. } = store.claim(&request).await.unwrap() else {
        panic!("the key is not free");
    };
    let value = Outcome::value(b"sealed");
    let completed = store.complete(&claim, &value, None).await.unwrap();
    assert_eq!(completed, Completion::Recorded);

    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::RecordUnreadable);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_value_that_stands_is_not_sent_in_place_of_the_answer() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |call| {
        let held = held.clone();
        async move {
            held.pass().await;
            paid(call).await
        }
    });
    let meddle = async {
        gate.entered().await;
        let record = app.record("k").await.unwrap();
        let claim = Claim::new(record.key, record.owner, record.attempt);
        let value = Outcome::value(b"sealed");
        let completed = app.store().complete(&claim, &value, None).await;
        assert_eq!(completed.unwrap(), Completion::Recorded);
        gate.open();
    };
    let (answer, ()) = join(app.send(pay("k")), meddle).await;
    assert_eq!(answer.status, 201);
    assert_eq!(answer.text(), "run 1");
    assert!(!answer.is_replay());
}
