//! Connections that break after a command was applied, and replies that come too late.

use tower_idempotency::{Completion, Fenced, Resolution};

use super::proxy::{Mode, Proxy};
use super::support::{options, shared_url};
use super::*;

fn shared_port() -> u16 {
    let url = shared_url();
    let authority = url
        .rsplit_once("://")
        .map_or(&*url, |(_, authority)| authority);
    let authority = authority.split('/').next().unwrap_or_default();
    authority
        .rsplit_once(':')
        .map_or(6379, |(_, port)| port.parse().unwrap())
}

async fn behind_a_proxy() -> (Proxy, RedisStore) {
    let proxy = Proxy::before(shared_port()).await;
    let limit = Duration::from_secs(2);
    let store = options()
        .timeout(limit)
        .connect(&proxy.url())
        .await
        .unwrap();
    (proxy, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_reply_was_lost_is_granted_to_its_owner_and_to_nobody_else() {
    let (proxy, store) = behind_a_proxy().await;
    let request = request("key");
    proxy.set(Mode::CutReplies);
    unavailable(store.claim(&request).await);
    proxy.set(Mode::Pass);
    existing(&store, &another(&request)).await;
    assert_eq!(acquire(&store, &request).await.attempt(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_lost_reply_is_made_good_without_anybody_hearing_of_it() {
    let (proxy, store) = behind_a_proxy().await;
    proxy.set(Mode::CutOneReply);
    let claim = acquire(&store, &request("key")).await;
    assert_eq!(claim.attempt(), 1);
    for fenced in [
        store.renew(&claim, HOUR).await,
        store.annotate(&claim, "charge 7").await,
        store.abandon(&claim).await,
        store.renew(&claim, HOUR).await,
        store.release(&claim).await,
    ] {
        assert_eq!(fenced.unwrap(), Fenced::Applied);
        proxy.set(Mode::CutOneReply);
    }
    let claim = acquire(&store, &request("key")).await;
    assert_eq!(claim.attempt(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_whose_reply_was_lost_stands() {
    let (proxy, store) = behind_a_proxy().await;
    for (name, outcome) in [("small", outcome(b"paid")), ("large", large_outcome())] {
        let claim = acquire(&store, &request(name)).await;
        proxy.set(Mode::CutReplies);
        unavailable(store.complete(&claim, &outcome, None).await);
        proxy.set(Mode::Pass);
        let again = store.complete(&claim, &outcome, None).await.unwrap();
        assert_eq!(again, Completion::Standing(outcome.clone()), "{name}");
        let shown = existing(&store, &request(name)).await;
        assert_eq!(outcome_of(&shown), &outcome);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resolution_whose_reply_was_lost_is_unknown_and_not_lost() {
    let (proxy, store) = behind_a_proxy().await;
    for (name, resolution) in [
        ("completed", Resolution::Completed(outcome(b"found"))),
        ("released", Resolution::Released),
    ] {
        let claim = acquire(&store, &request(name)).await;
        assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        let seen = record(&store, claim.key()).await;
        proxy.set(Mode::CutReplies);
        unavailable(store.resolve(&seen, &resolution).await);
        proxy.set(Mode::Pass);
        let again = store.resolve(&seen, &resolution).await.unwrap();
        assert_eq!(again, Fenced::ClaimLost, "{name}: it stands already");
        assert!(!record(&store, claim.key()).await.is_abandoned());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_is_given_up_and_replaced() {
    let (proxy, store) = behind_a_proxy().await;
    let request = request("key");
    proxy.set(Mode::Silence);
    unavailable(store.claim(&request).await);
    // The old connection would stay silent: what was sent on it is lost.
    proxy.set(Mode::Pass);
    assert_eq!(acquire(&store, &request).await.attempt(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_comes_after_the_limit_is_unavailable() {
    let (proxy, store) = behind_a_proxy().await;
    let request = request("key");
    proxy.set(Mode::Delay(Duration::from_secs(600)));
    let error = unavailable(store.claim(&request).await);
    assert!(error.to_string().contains("timeout"), "{error}");
    proxy.set(Mode::Pass);
    existing(&store, &another(&request)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_sees_what_another_process_does() {
    let waiting = support::options().key_prefix("waiting:");
    let store = waiting.connect(&shared_url()).await.unwrap();
    let elsewhere = waiting.connect(&shared_url()).await.unwrap();
    let name = format!("{:x}", rand::random::<u64>());
    let claim = acquire(&elsewhere, &request(&name)).await;
    let waiter = tokio::spawn({
        let (store, claim) = (store.clone(), claim.clone());
        async move { store.changed(claim.key(), claim.owner(), HOUR).await }
    });
    let completion = elsewhere.complete(&claim, &outcome(b"paid"), None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    let waited = tokio::time::timeout(Duration::from_secs(60), waiter).await;
    waited.expect("the waiter was not woken").unwrap().unwrap();
}
