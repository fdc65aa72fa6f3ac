//! Section 2.4: the fingerprint.

use http::HeaderName;
use tower_idempotency::{FingerprintRecipe, ProblemKind};

use crate::app::{App, Ask, paid, post};

fn order(amount: &str, note: &str) -> Ask {
    let body = format!("{{\"amount\":{amount},\"note\":\"{note}\"}}");
    post("/orders").key("k").json(body)
}

/// Sends `first`, then `same`, which must be replayed, and `other`, which must be refused.
async fn compare(recipe: FingerprintRecipe, first: Ask, same: Ask, other: Ask) {
    let app = App::with(|s| s.fingerprint(recipe.clone()), paid);
    let answer = app.send(first).await;
    app.send(same).await.assert_replays(&answer);
    let refused = app.send(other).await;
    refused.assert_problem(ProblemKind::KeyReused);
    assert_eq!(app.runs(), 1, "{recipe:?}");
}

/// Section 2.4: a fingerprint may be combined with the key. It is by default, and can be left off.
#[tokio::test]
async fn a_fingerprint_decides_with_the_key_whether_two_requests_are_the_same() {
    let by_default = App::new(paid);
    by_default.send(order("1", "a")).await;
    let refused = by_default.send(order("2", "a")).await;
    refused.assert_problem(ProblemKind::KeyReused);

    let off = App::with(
        |s| s.fingerprint(FingerprintRecipe::without_content()),
        paid,
    );
    let first = off.send(order("1", "a")).await;
    off.send(order("2", "a")).await.assert_replays(&first);
}

/// Section 2.4: a checksum of the whole payload.
#[tokio::test]
async fn it_can_be_a_checksum_of_the_whole_payload() {
    let recipe = FingerprintRecipe::raw();
    let (first, same) = (order("1", "a"), order("1", "a"));
    compare(recipe, first, same, order("1", "b")).await;
}

/// Section 2.4: a checksum of chosen elements.
#[tokio::test]
async fn it_can_be_a_checksum_of_chosen_elements() {
    let recipe = FingerprintRecipe::raw().only(["/amount"]).unwrap();
    let (first, same) = (order("1", "a"), order("1", "b"));
    compare(recipe, first, same, order("2", "a")).await;
}

/// Section 2.4: a comparison of every field.
#[tokio::test]
async fn it_can_compare_every_field_by_its_value() {
    let recipe = FingerprintRecipe::raw().json();
    let same = post("/orders")
        .key("k")
        .json("{ \"note\": \"a\", \"amount\": 1 }");
    compare(recipe, order("1", "a"), same, order("1.0", "a")).await;
}

/// Section 2.4: a comparison of chosen fields.
#[tokio::test]
async fn it_can_compare_all_fields_but_some() {
    let recipe = FingerprintRecipe::raw().except(["/note"]).unwrap();
    let (first, same) = (order("1", "a"), order("1", "b"));
    compare(recipe, first, same, order("2", "a")).await;
}

/// Section 2.4: a request digest or signature.
#[tokio::test]
async fn it_can_be_a_digest_that_came_with_the_request() {
    let digest = HeaderName::from_static("content-digest");
    let recipe = FingerprintRecipe::without_content().headers([digest]);
    let with = |digest: &str| order("1", "a").header("content-digest", digest);
    compare(recipe, with("a"), with("a"), with("b")).await;
}

/// Section 2.4 leaves the computation to the resource.
#[tokio::test]
async fn it_can_be_whatever_a_function_makes_of_the_request() {
    let recipe = FingerprintRecipe::closure("length", |_, body| body.len().to_be_bytes().to_vec());
    let (first, same) = (order("1", "a"), order("2", "b"));
    compare(recipe, first, same, order("10", "a")).await;
}
