//! The key as it is sent: which values are keys, and which are refused before anything happens.

use crate::h1::head;
use crate::message::Request;
use crate::puppet::{Puppet, WIRES, Wire, ran};
use crate::raw_h2::{End, RawH2};

#[derive(Clone)]
enum Expected {
    Key(String),
    Refused(&'static str),
}

struct Row {
    lines: Vec<Vec<u8>>,
    strict: Expected,
    lenient: Expected,
    /// HTTP/1.1 takes spaces and tabs around a value away before the layer sees it.
    strict_h1: Option<Expected>,
}

fn key(key: &str) -> Expected {
    Expected::Key(key.to_owned())
}

const fn no(reason: &'static str) -> Expected {
    Expected::Refused(reason)
}

fn row(lines: &[&[u8]], strict: Expected, lenient: Expected) -> Row {
    Row {
        lines: lines.iter().map(|line| line.to_vec()).collect(),
        strict,
        lenient,
        strict_h1: None,
    }
}

/// Both syntaxes agree.
fn both(lines: &[&[u8]], expected: Expected) -> Row {
    row(lines, expected.clone(), expected)
}

/// A value that strict puppets refuse, and for lenient ones is the key as it stands.
fn bare(value: &str, strict: Expected) -> Row {
    row(&[value.as_bytes()], strict, key(value))
}

/// Everything that a header can hold; the few that none can hold have tests of their own.
fn rows() -> Vec<Row> {
    let k = |count: usize| "k".repeat(count);
    let quoted = |count: usize| format!("\"{}\"", k(count)).into_bytes();
    let tab = |value: &[u8]| Row {
        strict_h1: Some(key("abc")),
        ..row(&[value], no("sf-syntax"), key("abc"))
    };
    let uuid = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    let random = "clkyoesmbgybucifusbbtdsbohtyuuwz";
    vec![
        both(&[format!("\"{uuid}\"").as_bytes()], key(uuid)),
        both(&[format!("\"{random}\"").as_bytes()], key(random)),
        bare(uuid, no("sf-syntax")),
        bare("ae03978e-40d5-43e8-bc93-6894a57f9324", no("not-a-string")),
        bare("abc", no("not-a-string")),
        both(&[b"\"abc\""], key("abc")),
        row(&[b""], no("sf-syntax"), no("empty")),
        both(&[b"\"\""], no("empty")),
        both(&[b"\"   \""], no("blank")),
        both(&[b"  \"abc\"  "], key("abc")),
        tab(b"\t\"abc\""),
        tab(b"\"abc\"\t"),
        both(&[b"\" abc \""], key(" abc ")),
        both(&[br#""a\"b""#], key("a\"b")),
        both(&[br#""a\\b""#], key("a\\b")),
        both(&[br#""\"abc""#], key("\"abc")),
        both(&[br#""a\nb""#], no("sf-syntax")),
        both(&[br#""abc\""#], no("sf-syntax")),
        both(&[br#""abc\"#], no("sf-syntax")),
        both(&[b"\"abc"], no("sf-syntax")),
        both(&[b"\"abc\"def"], no("sf-syntax")),
        bare("'abc'", no("sf-syntax")),
        both(&[b"\"k\xc3\xa9y\""], no("sf-syntax")),
        both(&[b"\"a\xffb\""], no("sf-syntax")),
        row(&[b"k\xc3\xa9y"], no("sf-syntax"), no("bare-syntax")),
        both(&[b"\"a\tb\""], no("sf-syntax")),
        both(&[b"\"abc\";v=1"], key("abc")),
        both(&[b"\"abc\";  v=1"], key("abc")),
        both(&[b"\"abc\" ;v=1"], no("sf-syntax")),
        both(&[b"\"abc\";retry"], key("abc")),
        both(&[b"\"abc\";V=1"], no("sf-syntax")),
        both(&[b"\"abc\";d=@1659578233"], key("abc")),
        both(&[b"\"abc\";"], no("sf-syntax")),
        row(&[b"abc;v=1"], no("not-a-string"), no("bare-syntax")),
        both(&[b"\"abc\", \"abc\""], no("sf-syntax")),
        both(&[b"\"abc\"", b"\"abc\""], no("multiple-lines")),
        both(&[b"\"abc\"", b"\"def\""], no("multiple-lines")),
        both(&[b"\"foo", b"bar\""], no("multiple-lines")),
        both(&[b"abc", b""], no("multiple-lines")),
        both(&[b"\"foo, bar\""], key("foo, bar")),
        row(&[b"abc,def"], no("sf-syntax"), no("bare-syntax")),
        row(&[b"abc def"], no("sf-syntax"), no("bare-syntax")),
        bare("12345", no("not-a-string")),
        bare("-7", no("not-a-string")),
        bare("1234567890123456", no("sf-syntax")),
        bare("1.5", no("not-a-string")),
        bare("?1", no("not-a-string")),
        bare(":YWJj:", no("not-a-string")),
        bare("@1659578233", no("not-a-string")),
        row(&[b"%\"abc\""], no("not-a-string"), no("bare-syntax")),
        row(&[b"%\"k%c3%a9y\""], no("not-a-string"), no("bare-syntax")),
        both(&[b"\"k%c3%a9y\""], key("k%c3%a9y")),
        row(&[b"(\"abc\")"], no("sf-syntax"), no("bare-syntax")),
        bare("*abc/1:2", no("not-a-string")),
        bare("_V1StGXR8_Z5jdHi6B-myT", no("sf-syntax")),
        bare("q83vEjRWeJA=", no("sf-syntax")),
        bare("a@example.com", no("sf-syntax")),
        both(&[&quoted(255)], key(&k(255))),
        both(&[&quoted(256)], no("too-long")),
        both(&[&quoted(1024)], no("too-long")),
        row(&[k(256).as_bytes()], no("not-a-string"), no("too-long")),
    ]
}

/// A key as a Structured Field String, which both syntaxes read alike.
fn quote(key: &str) -> String {
    let escaped = key.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"")
}

async fn check(puppet: &Puppet, wire: Wire, number: usize, row: &Row, expected: &Expected) {
    let name = format!("{wire:?}-{number}");
    // Rows that hold the same key must not meet.
    let request = Request::post(&name).header("x-caller", &name);
    let sent = (row.lines.iter()).fold(request.clone(), |request, line| request.key(line));
    let answer = puppet.send(wire, &sent).await;
    match expected {
        Expected::Key(key) => {
            answer.fresh(200);
            let same = puppet.send(wire, &request.key(quote(key))).await;
            same.is_replay_of(&answer, &[]);
            assert_eq!(puppet.count(&name).await, ran(1), "{sent:?}");
        }
        Expected::Refused(reason) => {
            let problem = answer.problem(400, "invalid_key");
            assert_eq!(problem["reason"], *reason, "{sent:?}");
            assert_eq!(puppet.count(&name).await, ran(0), "{sent:?}");
        }
    }
}

#[tokio::test]
async fn each_value_is_the_same_key_or_refused_for_the_same_reason_over_both_versions() {
    let scope = ["--scope", "header:x-caller"];
    let strict = Puppet::start(&["--syntax", "strict", scope[0], scope[1]]);
    let lenient = Puppet::start(&["--syntax", "lenient", scope[0], scope[1]]);
    for (number, row) in rows().iter().enumerate() {
        for wire in WIRES {
            let expected = match wire {
                Wire::H1 => row.strict_h1.as_ref().unwrap_or(&row.strict),
                Wire::H2 => &row.strict,
            };
            check(&strict, wire, number, row, expected).await;
            check(&lenient, wire, number, row, &row.lenient).await;
        }
    }
}

#[tokio::test]
async fn a_line_break_in_the_key_ends_the_header_line_and_nothing_is_injected() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("evil").key("\"a\r\nX-Evil: 1\"");
    let answer = puppet.send(Wire::H1, &request).await;
    let problem = answer.problem(400, "invalid_key");
    assert_eq!(problem["reason"], "sf-syntax");
    assert_eq!(puppet.count("evil").await, ran(0));
}

#[tokio::test]
async fn bytes_that_no_header_may_hold_never_reach_the_handler() {
    let puppet = Puppet::start(&[]);
    for value in [b"\"a\x7fb\"".as_slice(), b"\"a\x00b\""] {
        let request = Request::post("control").key(value);
        // The HTTP library refuses it before the layer sees it.
        let answer = puppet.send(Wire::H1, &request).await;
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    for value in [
        b"\"a\x7fb\"".as_slice(),
        b"\"a\x00b\"",
        b"\"a\r\nx-evil: 1\"",
    ] {
        let request = Request::post("control").key(value);
        let mut raw = RawH2::connect(puppet.addr()).await;
        raw.send(&request).await;
        assert_ne!(raw.end().await, End::Answered, "{value:?}");
    }
    // The same frames with a key that is one are answered.
    let mut raw = RawH2::connect(puppet.addr()).await;
    raw.send(&Request::post("control").key("\"ab\"")).await;
    assert_eq!(raw.end().await, End::Answered);
    assert_eq!(puppet.count("control").await, ran(1));
}

#[tokio::test]
async fn a_field_line_that_is_none_never_reaches_the_handler() {
    // A key that one server on the way sees and another does not would be no protection.
    let puppet = Puppet::start(&[]);
    for line in [
        "Idempotency-Key : abc",
        "Idempotency-Key: \"a\r\n b\"",
        "\u{a0}Idempotency-Key: a",
    ] {
        let request = Request::post("line");
        let framing = format!("{line}\r\nContent-Length: {}\r\n", request.body.len());
        let mut connection = puppet.h1().await;
        connection.write(&head(&request, &framing)).await;
        let answer = connection.answer(&request).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        assert_eq!(puppet.count("line").await, ran(0), "{line:?}");
    }
}

#[tokio::test]
async fn the_name_of_the_field_may_be_written_in_any_case() {
    let puppet = Puppet::start(&[]);
    let names = [
        "Idempotency-Key",
        "idempotency-key",
        "IDEMPOTENCY-KEY",
        "iDEMPOTENCY-kEY",
    ];
    let first = Request::post("case").header(names[0], "abc");
    let first = puppet.send(Wire::H1, &first).await;
    for name in &names[1..] {
        let again = Request::post("case").header(name, "abc");
        let again = puppet.send(Wire::H1, &again).await;
        again.is_replay_of(&first, &[]);
        // Two spellings are two lines of one field, also with others between them.
        let twice = Request::post("case")
            .header(names[0], "abc")
            .header("x-between", "1")
            .header(name, "abc");
        let twice = puppet.send(Wire::H1, &twice).await;
        let problem = twice.problem(400, "invalid_key");
        assert_eq!(problem["reason"], "multiple-lines");
    }
    assert_eq!(puppet.count("case").await, ran(1));
}

#[tokio::test]
async fn quoted_and_bare_are_one_key_for_a_lenient_puppet() {
    let puppet = Puppet::start(&[]);
    for (wire, other) in [(Wire::H1, Wire::H2), (Wire::H2, Wire::H1)] {
        let name = format!("{wire:?}");
        let bare = Request::post(&name).key(&name);
        let quoted = Request::post(&name).key(quote(&name));
        let first = puppet.send(wire, &bare).await;
        let again = puppet.send(wire, &quoted).await;
        again.is_replay_of(&first, &[]);
        // And the version of HTTP is no part of a request's identity.
        let again = puppet.send(other, &quoted).await;
        again.is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn without_a_key_each_request_runs_unless_a_key_is_required() {
    let open = Puppet::start(&["--missing-key", "pass-through"]);
    let required = Puppet::start(&["--missing-key=reject"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name);
        for run in 1..=2 {
            open.send(wire, &request).await.fresh(200);
            assert_eq!(open.count(&name).await, ran(run));
            let refused = required.send(wire, &request).await;
            refused.problem(400, "missing_key");
            let link = refused.header("link").expect("a link");
            assert!(link.contains("rel=\"describedby\""), "{link}");
        }
        assert_eq!(required.count(&name).await, ran(0));
        required.send(wire, &request.key(&name)).await.fresh(200);
    }
}

#[tokio::test]
async fn without_a_key_nothing_is_taken_from_early_data() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).header("early-data", "1");
        // It may be a copy of a request that was sent before (RFC 8470).
        puppet.send(wire, &request).await.problem(425, "too_early");
        assert_eq!(puppet.count(&name).await, ran(0));
        let request = request.key(&name);
        let first = puppet.send(wire, &request).await;
        puppet.send(wire, &request).await.is_replay_of(&first, &[]);
        // After the handshake it is the same request.
        let later = Request::post(&name).key(&name);
        puppet.send(wire, &later).await.is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn methods_that_are_idempotent_by_themselves_pass_with_whatever_key() {
    let puppet = Puppet::start(&["--missing-key", "reject", "--syntax", "strict"]);
    for wire in WIRES {
        for method in ["OPTIONS", "GET", "HEAD", "PUT", "DELETE", "QUERY"] {
            let name = format!("{wire:?}-{method}");
            let request = Request::new(method, &format!("/do/{name}"));
            let keys = [None, Some("\"same\""), Some("\"same\""), Some("not a key")];
            for (n, key) in (1..).zip(keys) {
                let request = match key {
                    None => request.clone(),
                    Some(key) => request.clone().key(key),
                };
                puppet.send(wire, &request).await.fresh(200);
                assert_eq!(puppet.count(&name).await, ran(n), "{request:?}");
            }
        }
        for method in ["POST", "PATCH"] {
            let name = format!("{wire:?}-{method}");
            let request = Request::new(method, &format!("/do/{name}"));
            puppet
                .send(wire, &request)
                .await
                .problem(400, "missing_key");
            let request = request.key(format!("\"{name}\""));
            let first = puppet.send(wire, &request).await;
            puppet.send(wire, &request).await.is_replay_of(&first, &[]);
            assert_eq!(puppet.count(&name).await, ran(1));
        }
    }
}
