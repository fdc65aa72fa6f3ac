//! Servers that are killed, restarted, flushed, or stand still.

use tower_idempotency::{Completion, Fenced};

use super::support::{Server, store_at};
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_survives_a_killed_server_and_is_completed_by_its_owner() {
    let server = Server::durable();
    let store = store_at(&server.url()).await;
    for (name, outcome) in [("small", outcome(b"paid")), ("large", large_outcome())] {
        let request = request(name);
        let claim = acquire(&store, &request).await;
        server.kill();
        server.restart();
        let shown = existing(&store, &another(&request)).await;
        assert_eq!(shown.owner, request.owner);
        assert!(!shown.is_abandoned());
        // The scripts went with the server.
        let completion = store.complete(&claim, &outcome, None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_survives_a_killed_server_byte_for_byte() {
    let server = Server::durable();
    let store = store_at(&server.url()).await;
    for (name, outcome) in [("small", outcome(b"paid")), ("large", large_outcome())] {
        let request = request(name);
        let claim = acquire(&store, &request).await;
        let completion = store.complete(&claim, &outcome, None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded);
        let before = record(&store, &request.key).await;
        server.kill();
        server.restart();
        let shown = existing(&store, &another(&request)).await;
        assert_eq!(shown, before, "{name}");
        assert_eq!(outcome_of(&shown).as_bytes(), outcome.as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_released_abandoned_or_noted_survives_a_killed_server() {
    let server = Server::durable();
    let store = store_at(&server.url()).await;
    let released = acquire(&store, &request("released")).await;
    assert_eq!(store.release(&released).await.unwrap(), Fenced::Applied);
    let abandoned = acquire(&store, &request("abandoned")).await;
    assert_eq!(
        store.annotate(&abandoned, "charge 7").await.unwrap(),
        Fenced::Applied
    );
    assert_eq!(store.abandon(&abandoned).await.unwrap(), Fenced::Applied);
    let before = record(&store, abandoned.key()).await;
    server.kill();
    server.restart();
    assert_eq!(record(&store, abandoned.key()).await, before);
    assert_eq!(acquire(&store, &request("released")).await.attempt(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_unavailable_and_is_used_again_when_it_is_back() {
    let server = Server::durable();
    let store = store_at(&server.url()).await;
    let request = request("key");
    let claim = acquire(&store, &request).await;
    server.kill();
    unavailable(store.claim(&request).await);
    unavailable(store.complete(&claim, &outcome(b"paid"), None).await);
    unavailable(store.lookup(&request.key).await);
    unavailable(store.abandoned(None, 10).await);
    unavailable(store.purge(10).await);
    server.restart();
    let completion = store.complete(&claim, &outcome(b"paid"), None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stands_still_is_unavailable_and_a_claim_is_asked_for_again() {
    let server = Server::start();
    let options = support::options().timeout(Duration::from_millis(400));
    let store = options.connect(&server.url()).await.unwrap();
    let request = request("key");
    server.pause();
    let error = unavailable(store.claim(&request).await);
    assert!(error.to_string().contains("in time"), "{error}");
    server.resume();
    // It may have been applied meanwhile, or not: the same owner gets it either way.
    support::eventually("the server to answer", || {
        server.info("server", "run_id").is_some()
    });
    let claim = acquire(&store, &request).await;
    assert_eq!(claim.attempt(), 1);
    existing(&store, &another(&request)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_loses_the_claim_and_its_completion_says_so() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    for (name, outcome) in [("small", outcome(b"paid")), ("large", large_outcome())] {
        let request = request(name);
        let claim = acquire(&store, &request).await;
        server.command(&["FLUSHALL"]);
        let completion = store.complete(&claim, &outcome, None).await;
        assert_eq!(completion.unwrap(), Completion::ClaimLost, "{name}");
        assert_eq!(store.renew(&claim, HOUR).await.unwrap(), Fenced::ClaimLost);
        assert_eq!(store.lookup(&request.key).await.unwrap(), None);
        // Nothing was left beside it.
        assert_eq!(server.command(&["DBSIZE"]), redis::Value::Int(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_the_server_forgot_are_sent_again() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    for (name, outcome) in [("small", outcome(b"paid")), ("large", large_outcome())] {
        let claim = acquire(&store, &request(name)).await;
        server.command(&["SCRIPT", "FLUSH"]);
        assert_eq!(store.renew(&claim, HOUR).await.unwrap(), Fenced::Applied);
        server.command(&["SCRIPT", "FLUSH"]);
        let completion = store.complete(&claim, &outcome, None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_new_claims_and_completes_those_that_were_granted() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let small = acquire(&store, &request("small")).await;
    let large = acquire(&store, &request("large")).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = unavailable(store.claim(&request("new")).await);
    assert!(error.to_string().contains("maxmemory"), "{error}");
    existing(&store, &request("small")).await;
    assert_eq!(store.renew(&small, HOUR).await.unwrap(), Fenced::Applied);
    for (claim, outcome) in [(&small, outcome(b"paid")), (&large, large_outcome())] {
        let completion = store.complete(claim, &outcome, None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded);
    }
    let shown = existing(&store, &request("large")).await;
    assert_eq!(outcome_of(&shown), &large_outcome());
}
