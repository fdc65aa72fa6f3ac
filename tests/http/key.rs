//! The key: where it is read, which values are taken, what happens without it.

use tower_idempotency::{KeyFormat, KeySyntax, MissingKey, PersonalData, ProblemKind};

use crate::app::{App, broken, paid, pay, post, steps};

const UUID: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";

#[tokio::test]
async fn without_a_key_every_request_runs_and_nothing_is_stored() {
    let app = App::new(paid);
    for run in 1..=3 {
        let answer = app.send(post("/pay").body("100")).await;
        assert_eq!(answer.text(), format!("run {run}"));
        assert!(!answer.is_replay());
    }
    assert!(app.store().is_empty());
}

#[tokio::test]
async fn where_a_key_is_required_a_request_without_one_is_refused() {
    let app = App::with(|s| s.missing_key(MissingKey::Reject), paid);
    let answer = app.send(post("/pay")).await;
    answer.assert_problem(ProblemKind::MissingKey);
    assert_eq!(app.runs(), 0);
    assert_eq!(app.send(pay("k")).await.status, 201);
}

#[tokio::test]
async fn quoted_and_bare_are_one_key() {
    let app = App::new(paid);
    let first = app.send(pay(UUID)).await;
    for retry in [format!("\"{UUID}\""), format!("\"{UUID}\";attempt=2")] {
        app.send(pay(&retry)).await.assert_replays(&first);
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn the_strict_syntax_takes_structured_field_strings_only() {
    let app = App::with(|s| s.key_syntax(KeySyntax::Strict), paid);
    for bare in [
        "abc",
        UUID,
        "12345",
        "?1",
        ":YWJj:",
        "@1659578233",
        "%\"abc\"",
    ] {
        let answer = app.send(pay(bare)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 0);
    assert_eq!(app.send(pay("\"abc\"")).await.status, 201);
}

#[tokio::test]
async fn keys_are_compared_with_their_case_and_their_inner_spaces() {
    let app = App::new(paid);
    for key in ["abc", "ABC", "\" abc\"", "\"abc \"", "\"a%62c\""] {
        assert!(!app.send(pay(key)).await.is_replay(), "{key}");
    }
    assert_eq!(app.runs(), 5);
}

#[tokio::test]
async fn two_lines_of_the_header_are_refused_even_if_they_are_equal() {
    let app = App::new(paid);
    for (one, two) in [
        ("k", "k"),
        ("k", "l"),
        ("\"k\"", "\"k\""),
        ("\"foo", "bar\""),
    ] {
        let answer = app.send(pay(one).key(two)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
        assert_eq!(answer.json()["reason"], "multiple-lines");
    }
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn bytes_that_are_no_text_are_refused_and_do_not_panic() {
    let app = App::new(paid);
    for value in [
        &b"k\xc3\xa9y"[..],
        b"\"k\xc3\xa9y\"",
        b"\xff",
        b"\"a\tb\"",
        b"",
    ] {
        let answer = app
            .send(post("/pay").header("idempotency-key", value))
            .await;
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn a_malformed_key_is_never_taken_for_a_missing_one() {
    let app = App::new(paid);
    for value in ["", "\"\"", "a b", "a,b", "\"a", "a;v=1"] {
        let answer = app.send(pay(value)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
    }
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn the_longest_key_has_255_bytes_decoded() {
    let app = App::new(paid);
    let longest = "k".repeat(255);
    assert_eq!(app.send(pay(&longest)).await.status, 201);
    let quoted = app.send(pay(&format!("\"{longest}\""))).await;
    assert!(quoted.is_replay());
    // Counted as it is meant, not as it is written.
    let escaped = format!("\"{}\"", "\\\\".repeat(255));
    assert_eq!(app.send(pay(&escaped)).await.status, 201);

    for long in [
        "k".repeat(256),
        format!("\"{}\"", "k".repeat(256)),
        "k".repeat(8_000),
    ] {
        let answer = app.send(pay(&long)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
        assert_eq!(answer.json()["reason"], "too-long");
    }
    assert_eq!(app.runs(), 2);
}

#[tokio::test]
async fn a_refused_key_reaches_neither_the_store_nor_the_body() {
    let app = App::new(paid);
    // Reading this body would give another refusal.
    let request = pay("\"").stream(steps([broken()]));
    let answer = app.send(request).await;
    answer.assert_problem(ProblemKind::InvalidKey);
    assert!(app.store().is_empty());
}

#[tokio::test]
async fn another_header_can_carry_the_key() {
    let app = App::with(|s| s.header("X-Request-Key"), paid);
    let first = app.send(post("/pay").header("x-request-key", "k")).await;
    let retry = app.send(post("/pay").header("X-REQUEST-KEY", "k")).await;
    retry.assert_replays(&first);
    // The usual header means nothing then.
    let other = app.send(post("/pay").key("\"")).await;
    assert_eq!(other.status, 201);
    assert_eq!(app.runs(), 2);
}

#[tokio::test]
async fn a_format_can_demand_uuids() {
    let format = KeyFormat::new().uuid();
    let app = App::with(|s| s.key_format(format), paid);
    let answer = app.send(pay("abc")).await;
    answer.assert_problem(ProblemKind::InvalidKey);
    assert_eq!(answer.json()["reason"], "not-uuid");
    assert_eq!(app.send(pay(UUID)).await.status, 201);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_format_can_set_other_lengths() {
    let format = KeyFormat::new().min_len(4).max_len(8);
    let app = App::with(|s| s.key_format(format), paid);
    for (key, reason) in [("abc", "too-short"), ("abcdefghi", "too-long")] {
        let answer = app.send(pay(key)).await;
        assert_eq!(answer.json()["reason"], reason);
    }
    for key in ["abcd", "abcdefgh"] {
        assert_eq!(app.send(pay(key)).await.status, 201);
    }
}

#[tokio::test]
async fn a_format_can_have_rules_of_its_own_whose_words_reach_the_client() {
    let format = KeyFormat::new().check(|key| match key.starts_with("ord_") {
        true => Ok(()),
        false => Err("the key must begin with ord_"),
    });
    let app = App::with(|s| s.key_format(format), paid);
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::InvalidKey);
    let detail = answer.json()["detail"].to_string();
    assert!(detail.contains("the key must begin with ord_"), "{detail}");
    assert_eq!(app.send(pay("ord_1")).await.status, 201);
}

#[tokio::test]
async fn keys_that_look_like_personal_data_are_taken_or_refused_as_it_is_set() {
    let personal = ["a@example.com", "0812345678", "1101700230708"];
    let by_default = App::new(paid);
    let refusing = App::with(
        |s| s.key_format(KeyFormat::new().personal_data(PersonalData::Reject)),
        paid,
    );
    for key in personal {
        assert_eq!(by_default.send(pay(key)).await.status, 201);
        let answer = refusing.send(pay(key)).await;
        answer.assert_problem(ProblemKind::InvalidKey);
        assert_eq!(answer.json()["reason"], "personal-data");
    }
    assert_eq!(refusing.runs(), 0);
}

#[tokio::test]
async fn early_data_without_a_key_is_refused_and_with_a_key_is_harmless() {
    let app = App::new(paid);
    let answer = app.send(post("/pay").header("early-data", "1")).await;
    answer.assert_problem(ProblemKind::TooEarly);
    assert_eq!(app.runs(), 0);

    let first = app.send(pay("k").header("early-data", "1")).await;
    app.send(pay("k")).await.assert_replays(&first);
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn early_data_of_any_value_and_number_is_early_data() {
    let app = App::new(paid);
    for request in [
        post("/pay").header("early-data", "1, 1"),
        post("/pay").header("early-data", "?1"),
        post("/pay").header("early-data", " 1"),
        post("/pay")
            .header("early-data", "0")
            .header("early-data", "0"),
    ] {
        let answer = app.send(request).await;
        answer.assert_problem(ProblemKind::TooEarly);
    }
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn the_decoded_key_is_what_the_handler_is_given() {
    let app = App::new(|call| async move {
        let attempt = call.attempt().unwrap();
        attempt.key().key().to_owned()
    });
    assert_eq!(app.send(pay(r#""a\"b\\c";v=1"#)).await.text(), r#"a"b\c"#);
}

#[tokio::test]
async fn two_layers_with_their_own_namespaces_share_a_store_and_no_key() {
    use tower_idempotency::{IdempotencyLayer, MemoryStore};
    let store = MemoryStore::new();
    let app = |namespace: &str| {
        let layer = IdempotencyLayer::builder(store.clone()).namespace(namespace);
        App::behind(&layer.build().unwrap(), paid)
    };
    let (payments, refunds) = (app("payments"), app("refunds"));
    payments.send(pay("k")).await;
    assert!(!refunds.send(pay("k")).await.is_replay());
    assert!(app("payments").send(pay("k")).await.is_replay());
    assert_eq!(store.len(), 2);
}
