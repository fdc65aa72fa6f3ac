//! What makes two requests the same request.

use http::header::IF_MATCH;
use tower_idempotency::{FingerprintRecipe, ProblemKind};

use crate::app::{App, Ask, ask, data, paid, pay, post, steps};

/// An app with this recipe that has answered `first`.
async fn after(recipe: FingerprintRecipe, first: Ask) -> App {
    let app = App::with(|s| s.fingerprint(recipe), paid);
    assert_eq!(app.send(first).await.status, 201);
    app
}

async fn assert_same(app: &App, request: Ask) {
    let shown = format!("{request:?}");
    assert!(app.send(request).await.is_replay(), "{shown}");
    assert_eq!(app.runs(), 1);
}

async fn assert_other(app: &App, request: Ask) {
    app.send(request)
        .await
        .assert_problem(ProblemKind::KeyReused);
    assert_eq!(app.runs(), 1);
}

fn order(body: &'static str) -> Ask {
    post("/orders").key("k").json(body)
}

#[tokio::test]
async fn method_path_query_type_and_body_count_by_default() {
    let first = post("/orders?dry=1").key("k").json("{}");
    let app = after(FingerprintRecipe::raw(), first.clone()).await;
    assert_same(&app, first.header("user-agent", "retry/2")).await;
    for other in [
        ask("PATCH", "/orders?dry=1").key("k").json("{}"),
        post("/orders/?dry=1").key("k").json("{}"),
        post("/orders").key("k").json("{}"),
        post("/orders?").key("k").json("{}"),
        post("/orders?dry=2").key("k").json("{}"),
        post("/orders?dry=1").key("k").json("{ }"),
        post("/orders?dry=1").key("k").body("{}"),
        post("/orders?dry=1")
            .key("k")
            .header("content-type", "text/plain")
            .body("{}"),
    ] {
        assert_other(&app, other).await;
    }
}

#[tokio::test]
async fn what_moves_from_one_part_into_the_next_is_noticed() {
    let app = after(FingerprintRecipe::raw(), post("/a?b").key("k").body("c")).await;
    for other in [
        post("/a").key("k").body("?bc"),
        post("/a?bc").key("k").body(""),
        post("/a?").key("k").body("bc"),
        post("/").key("k").body("a?bc"),
    ] {
        assert_other(&app, other).await;
    }
}

#[tokio::test]
async fn how_the_body_is_cut_into_frames_does_not_count() {
    let app = after(
        FingerprintRecipe::raw(),
        post("/orders").key("k").body("abcdef"),
    )
    .await;
    let cut =
        post("/orders")
            .key("k")
            .stream(steps([data("a"), data(""), data("bcde"), data("f")]));
    assert!(app.send(cut).await.is_replay());
    let other = post("/orders")
        .key("k")
        .stream(steps([data("a"), data("bcdeF")]));
    app.send(other).await.assert_problem(ProblemKind::KeyReused);
}

#[tokio::test]
async fn trailers_of_the_request_do_not_count() {
    use crate::app::trailers;
    let app = after(FingerprintRecipe::raw(), post("/orders").key("k").body("a")).await;
    let with = post("/orders")
        .key("k")
        .stream(steps([data("a"), trailers("x-sum", "1")]));
    assert!(app.send(with).await.is_replay());
}

#[tokio::test]
async fn json_is_compared_by_value_where_that_is_set() {
    let first = order(r#"{"amount": 100, "to": {"a": 1, "b": "é"}}"#);
    let app = after(FingerprintRecipe::raw().json(), first).await;
    for same in [
        r#"{"to":{"b":"é","a":1},"amount":100}"#,
        "\n{ \"to\" : {\"b\":\"\\u00e9\", \"a\":1} , \"amount\" : 100 }\n",
    ] {
        assert_same(&app, order(same)).await;
    }
    for other in [
        r#"{"amount": 100.0, "to": {"a": 1, "b": "é"}}"#,
        r#"{"amount": 1e2, "to": {"a": 1, "b": "é"}}"#,
        r#"{"amount": "100", "to": {"a": 1, "b": "é"}}"#,
        r#"{"amount": 100, "to": {"a": 1, "b": "e\u0301"}}"#,
        r#"{"amount": 100, "to": {"a": 1, "b": "é"}, "note": null}"#,
        r#"{"amount": 100, "amount": 100, "to": {"a": 1, "b": "é"}}"#,
        r#"{"amount": 100, "to": {"a": 1, "b": "é"}"#,
    ] {
        assert_other(&app, order(other)).await;
    }
}

#[tokio::test]
async fn json_by_value_leaves_other_content_types_as_they_are() {
    let first = post("/orders").key("k").body("{\"a\":1}");
    let app = after(FingerprintRecipe::raw().json(), first).await;
    assert_other(&app, post("/orders").key("k").body("{ \"a\":1}")).await;
}

#[tokio::test]
async fn chosen_members_decide_alone() {
    let recipe = FingerprintRecipe::raw().only(["/amount", "/to"]).unwrap();
    let app = after(recipe, order(r#"{"amount":1,"to":"x","at":"10:00"}"#)).await;
    assert_same(&app, order(r#"{"at":"10:05","to":"x","amount":1}"#)).await;
    assert_other(&app, order(r#"{"amount":2,"to":"x","at":"10:00"}"#)).await;
    assert_other(&app, order(r#"{"amount":1,"at":"10:00"}"#)).await;
}

#[tokio::test]
async fn excluded_members_may_change() {
    let recipe = FingerprintRecipe::raw()
        .except(["/at", "/file/url"])
        .unwrap();
    let first = r#"{"amount":1,"at":"10:00","file":{"url":"/t/1","name":"a"}}"#;
    let app = after(recipe, order(first)).await;
    let fresh = r#"{"amount":1,"at":"10:05","file":{"url":"/t/2","name":"a"}}"#;
    assert_same(&app, order(fresh)).await;
    let other = r#"{"amount":1,"at":"10:00","file":{"url":"/t/1","name":"b"}}"#;
    assert_other(&app, order(other)).await;
}

#[tokio::test]
async fn chosen_headers_count() {
    let recipe = FingerprintRecipe::raw().headers([IF_MATCH]);
    let app = after(recipe, pay("k").header("if-match", "\"1\"")).await;
    assert_same(&app, pay("k").header("if-match", "\"1\"")).await;
    for other in [
        pay("k").header("if-match", "\"2\""),
        pay("k"),
        pay("k")
            .header("if-match", "\"1\"")
            .header("if-match", "\"1\""),
    ] {
        assert_other(&app, other).await;
    }
}

fn form(boundary: &str, file_name: &str, file: &str) -> Ask {
    let body = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n100\r\n\
         --{boundary}\r\nContent-Disposition: form-data; name=\"slip\"; filename=\"{file_name}\"\r\n\
         Content-Type: image/png\r\n\r\n{file}\r\n--{boundary}--\r\n"
    );
    let content_type = format!("multipart/form-data; boundary={boundary}");
    post("/slips")
        .key("k")
        .header("content-type", content_type)
        .body(body)
}

#[tokio::test]
async fn forms_are_compared_by_their_parts_where_that_is_set() {
    let recipe = FingerprintRecipe::raw().multipart();
    let app = after(recipe, form("aaa", "slip.png", "bytes")).await;
    assert_same(&app, form("bbb", "slip.png", "bytes")).await;
    assert_other(&app, form("aaa", "slip.png", "bytez")).await;
    assert_other(&app, form("aaa", "other.png", "bytes")).await;
}

#[tokio::test]
async fn without_that_setting_another_boundary_is_another_request() {
    let app = after(FingerprintRecipe::raw(), form("aaa", "slip.png", "bytes")).await;
    assert_other(&app, form("bbb", "slip.png", "bytes")).await;
}

#[tokio::test]
async fn a_closure_can_decide() {
    let recipe = FingerprintRecipe::closure("first-word", |_, body| {
        let word = body.split(|byte| *byte == b' ').next();
        word.unwrap_or_default().to_vec()
    });
    let app = after(recipe, pay("k").body("100 at ten")).await;
    assert_same(&app, pay("k").body("100 at eleven")).await;
    assert_other(&app, pay("k").body("200 at ten")).await;
}

#[tokio::test]
async fn the_body_can_be_left_out() {
    let app = after(FingerprintRecipe::without_content(), pay("k")).await;
    assert_same(
        &app,
        pay("k").body("anything").header("content-type", "a/b"),
    )
    .await;
    assert_other(&app, post("/refund").key("k")).await;
}

#[tokio::test]
async fn the_handler_gets_the_body_byte_for_byte_whatever_was_hashed() {
    let app = App::with(
        |s| s.fingerprint(FingerprintRecipe::raw().json().multipart()),
        |call| async move { call.body },
    );
    let body = "{ \"b\": 1.0,\n\"a\":null }";
    assert_eq!(app.send(order(body)).await.text(), body);
}
