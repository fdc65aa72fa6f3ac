//! A replay is the first answer, byte for byte, but for what belongs to one message or one client.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use crate::h1::with_length;
use crate::message::{Answer, Request};
use crate::puppet::{Puppet, WIRES, Wire, ran};

/// Sends a request over each version, its retry over both, and compares.
async fn replays(puppet: &Puppet, name: &str, request: &Request, left_out: &[&str]) -> Vec<Answer> {
    let mut firsts = Vec::new();
    for wire in WIRES {
        let name = format!("{name}-{wire:?}");
        let mut request = request.clone().key(&name);
        request.path = format!("/do/{name}");
        let first = puppet.send(wire, &request).await;
        for _ in 0..2 {
            puppet
                .send(wire, &request)
                .await
                .is_replay_of(&first, left_out);
        }
        let other = match wire {
            Wire::H1 => Wire::H2,
            Wire::H2 => Wire::H1,
        };
        let other = puppet.send(other, &request).await;
        assert!(other.is_replay(), "{other:?}");
        assert_eq!(other.status, first.status);
        assert_eq!(other.body, first.body);
        assert_eq!(other.trailers, first.trailers);
        assert_eq!(puppet.count(&name).await, ran(1));
        firsts.push(first);
    }
    firsts
}

#[tokio::test]
pub async fn status_headers_in_their_order_and_bytes_are_given_again() {
    let puppet = Puppet::start(&[]);
    // Compressed, so that a body that is taken for text is noticed.
    let bytes: Vec<u8> = (0..=255).rev().chain(0..=255).collect();
    let headers: [&[u8]; 12] = [
        b"location: /charges/1?a=%20&b=\xc3\xa9#top",
        b"content-type: text/csv; charset=latin1",
        b"x-second: 1",
        b"content-encoding: gzip",
        b"link: </a>; rel=next",
        b"etag: \"v1\"",
        b"link: </b>; rel=prev",
        b"x-bytes: \xff\xfe caf\xe9 \x80",
        b"content-language: th",
        b"vary: accept, accept-encoding",
        b"cache-control: no-store",
        b"x-second: 2",
    ];
    let request = headers.into_iter().fold(
        Request::post("")
            .header("x-puppet-status", "201")
            .header("x-puppet-body-base64", BASE64_STANDARD.encode(&bytes)),
        |request, header| request.header("x-puppet-header", header),
    );
    for first in replays(&puppet, "exact", &request, &[]).await {
        assert_eq!(first.status, 201);
        assert_eq!(first.body, bytes);
        let location = b"/charges/1?a=%20&b=\xc3\xa9#top".as_slice();
        assert_eq!(first.lines("location"), [location]);
        assert_eq!(first.lines("x-bytes"), [b"\xff\xfe caf\xe9 \x80"]);
        assert_eq!(
            first.lines("link"),
            ["</a>; rel=next", "</b>; rel=prev"].map(str::as_bytes)
        );
        assert_eq!(first.lines("x-second"), [b"1", b"2"]);
    }
}

#[tokio::test]
async fn what_belongs_to_one_exchange_is_not_given_again() {
    let puppet = Puppet::start(&[]);
    let headers = [
        ("set-cookie", "session=secret"),
        ("set-cookie", "theme=dark"),
        ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("age", "7"),
        ("server", "inner/1"),
        ("retry-after", "120"),
        ("www-authenticate", "Basic realm=\"x\""),
        ("authentication-info", "nextnonce=\"1\""),
        ("proxy-authenticate", "Basic"),
        ("access-control-allow-origin", "*"),
        ("x-request-id", "r1"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("tracestate", "a=b"),
        ("server-timing", "db;dur=1"),
        ("ratelimit", "\"default\";r=50;t=30"),
        ("ratelimit-policy", "\"default\";q=100;w=60"),
        ("x-ratelimit-remaining", "5"),
    ];
    let of_one_hop = [
        ("connection", "x-hop, X-Other-Hop"),
        ("x-hop", "1"),
        ("x-other-hop", "2"),
        ("keep-alive", "timeout=5"),
    ];
    let request = (headers.iter().chain(&of_one_hop)).fold(
        Request::post("").header("x-puppet-header", "x-kept: yes"),
        |request, (name, value)| request.header("x-puppet-header", format!("{name}: {value}")),
    );
    let names = headers.iter().chain(&of_one_hop).map(|(name, _)| *name);
    let left_out: Vec<&str> = names.filter(|name| *name != "date").collect();
    for first in replays(&puppet, "left-out", &request, &left_out).await {
        // The first client gets all that its version of HTTP allows.
        for (name, value) in headers {
            assert!(
                first.lines(name).contains(&value.as_bytes()),
                "{name}: {first:?}"
            );
        }
        assert_eq!(first.header("x-kept"), Some("yes"));
    }
    for wire in WIRES {
        let again = Request::post(&format!("left-out-{wire:?}")).key(format!("left-out-{wire:?}"));
        let again = puppet.send(wire, &again).await;
        let date = again.header("date").expect("a date");
        assert!(
            !date.contains("1994"),
            "the date of another message: {date}"
        );
    }
}

#[tokio::test]
async fn answers_without_content_have_none_again() {
    let puppet = Puppet::start(&[]);
    for (status, empty) in [
        ("204", false),
        ("205", false),
        ("304", false),
        ("202", true),
        ("200", true),
    ] {
        let mut request = Request::post("")
            .header("x-puppet-status", status)
            .header("x-puppet-header", "etag: \"v1\"");
        if empty {
            request = request.header("x-puppet-body", "");
        }
        for first in replays(&puppet, status, &request, &[]).await {
            assert_eq!(first.body, b"");
            assert_eq!(first.header("etag"), Some("\"v1\""));
        }
        // Over HTTP/1.1 the framing is one that the status allows (RFC 9110 section 8.6,
        // RFC 9112 section 6.3), and the connection goes on behind it.
        let request = request.key(format!("{status}-H1"));
        let request = Request {
            path: format!("/do/{status}-H1"),
            ..request
        };
        let mut connection = puppet.h1().await;
        for _ in 0..2 {
            let again = connection.send(&request).await;
            let expected = match status {
                "204" | "304" => vec![],
                _ => vec![("content-length", "0")],
            };
            assert_eq!(again.framing(), expected, "{again:?}");
        }
    }
}

#[tokio::test]
async fn a_body_that_the_status_forbids_is_not_given_again() {
    let puppet = Puppet::start(&[]);
    for status in ["204", "205", "304"] {
        let request = Request::post(status)
            .key(status)
            .header("x-puppet-status", status)
            .header("x-puppet-body", "illegal");
        // What the first client gets is between the handler and the HTTP library.
        let mut connection = puppet.h1().await;
        connection.write(&with_length(&request)).await;
        let first = connection.head().await.expect("an answer");
        assert_eq!(first.status.to_string(), status);
        for wire in WIRES {
            let again = puppet.send(wire, &request).await;
            assert!(again.is_replay(), "{again:?}");
            assert_eq!(again.status.to_string(), status);
            assert_eq!(again.body, b"");
            for (name, value) in again.framing() {
                assert_eq!((name, value), ("content-length", "0"), "{again:?}");
                assert_eq!(status, "205", "{again:?}");
            }
        }
        assert_eq!(puppet.count(status).await, ran(1));
    }
}

#[tokio::test]
pub async fn trailers_are_announced_and_given_again() {
    let puppet = Puppet::start(&[]);
    let contents = [
        ("text", ("x-puppet-body", "hello")),
        ("stream", ("x-puppet-stream", "3,1")),
        ("nothing-else", ("x-puppet-body", "")),
    ];
    for (name, content) in contents {
        let request = Request::post("")
            .header("te", "trailers")
            .header(content.0, content.1)
            .header("x-puppet-trailer", "x-sum: 1")
            .header("x-puppet-trailer", "x-sum: 2")
            .header("x-puppet-trailer", "x-other: caf\u{e9}");
        let both = replays(&puppet, name, &request, &[]).await;
        for first in &both {
            let sums = [("x-sum", "1"), ("x-sum", "2"), ("x-other", "caf\u{e9}")];
            let sums = sums.map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()));
            assert_eq!(first.trailers, sums);
            assert!(first.framing().contains(&("trailer", "x-sum")), "{first:?}");
            assert!(
                first.framing().contains(&("trailer", "x-other")),
                "{first:?}"
            );
        }
        assert!(
            both[0]
                .framing()
                .contains(&("transfer-encoding", "chunked"))
        );
    }
}

#[tokio::test]
async fn trailers_are_kept_although_the_first_client_did_not_take_them() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("te")
        .key("te")
        .header("x-puppet-trailer", "x-sum: 1");
    // Over HTTP/1.1 nobody gets trailers who has not asked for them.
    let first = puppet.send(Wire::H1, &request).await;
    first.fresh(200);
    assert_eq!(first.trailers, []);
    let asking = request.clone().header("te", "trailers");
    let again = puppet.send(Wire::H1, &asking).await;
    assert_eq!(again.trailers, [("x-sum".to_owned(), b"1".to_vec())]);
    assert_eq!(again.body, first.body);
    let again = puppet.send(Wire::H1, &request).await;
    again.is_replay_of(&first, &[]);
    assert_eq!(puppet.count("te").await, ran(1));
}

#[tokio::test]
async fn a_streamed_answer_under_the_limit_is_given_again_whole() {
    let puppet = Puppet::start(&["--max-response-bytes", "80"]);
    // Ten chunks of eight bytes: exactly the limit.
    let request = Request::post("").header("x-puppet-stream", "10,1");
    let whole: String = (0..10).map(|n| format!("chunk {n}\n")).collect();
    for first in replays(&puppet, "stream", &request, &[]).await {
        assert_eq!(first.text(), whole);
        assert_eq!(first.header("content-type"), Some("text/plain"));
    }
    let request = Request::post("").header("x-puppet-body-size", "80");
    for first in replays(&puppet, "sized", &request, &[]).await {
        assert_eq!(first.body.len(), 80);
    }
}

#[tokio::test]
pub async fn the_handlers_own_refusals_are_results_and_say_when_they_were_given() {
    let puppet = Puppet::start(&[]);
    for status in ["303", "400", "402", "404", "409", "410", "412", "422"] {
        let request = Request::post("")
            .header("x-puppet-status", status)
            .header("x-puppet-header", "content-type: application/problem+json")
            .header("x-puppet-body", r#"{"title":"declined"}"#);
        replays(&puppet, status, &request, &[]).await;
    }
}

#[tokio::test]
pub async fn a_large_answer_is_given_again_over_both_versions() {
    let puppet = Puppet::start(&[]);
    // The default limit, to the byte; over HTTP/2 it needs many frames and several windows.
    let request = Request::post("").header("x-puppet-body-size", (1024 * 1024).to_string());
    for first in replays(&puppet, "large", &request, &[]).await {
        assert_eq!(first.body.len(), 1024 * 1024);
    }
}
