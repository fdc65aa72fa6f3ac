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
    // So that the server knows the script, and the first reply that is lost is that of the move.
    let warm = acquire(&store, &request("warm")).await;
    assert_eq!(store.release(&warm).await.unwrap(), Fenced::Applied);
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
    proxy.set(Mode::CutOneReply { after: 0 });
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
        proxy.set(Mode::CutOneReply { after: 0 });
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
async fn a_resolution_that_is_repeated_after_a_lost_reply_does_not_cross_the_claim_that_followed_it()
 {
    let (proxy, store) = behind_a_proxy().await;
    let claim = acquire(&store, &request("key")).await;
    assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
    let seen = record(&store, claim.key()).await;
    proxy.set(Mode::CutReplies);
    unavailable(store.resolve(&seen, &Resolution::Released).await);
    proxy.set(Mode::Pass);
    // Released: somebody claims the key before the sweeper asks again.
    let next = acquire(&store, &request("key")).await;
    assert_eq!(next.attempt(), 2);
    for resolution in [Resolution::Released, Resolution::Completed(outcome(b"old"))] {
        let again = store.resolve(&seen, &resolution).await.unwrap();
        assert_eq!(again, Fenced::ClaimLost);
    }
    let standing = record(&store, claim.key()).await;
    assert_eq!((standing.owner, standing.attempt), (*next.owner(), 2));
    assert!(!standing.is_abandoned());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_whose_reply_was_lost_is_not_made_again_unasked() {
    let (proxy, store) = behind_a_proxy().await;
    let old = acquire(&store, &request("key")).await;
    // The store itself does not ask again: meanwhile the key could belong to somebody else.
    proxy.set(Mode::CutOneReply { after: 0 });
    unavailable(store.remove(old.key()).await);
    assert_eq!(proxy.mode(), Mode::Pass, "the reply was not cut");
    assert_eq!(
        store.lookup(old.key()).await.unwrap(),
        None,
        "it was applied"
    );
    assert!(
        !store.remove(old.key()).await.unwrap(),
        "it is gone already"
    );
    assert_eq!(acquire(&store, &request("key")).await.attempt(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_that_loses_any_one_reply_may_be_repeated_and_touches_nothing_else() {
    const EXPIRED: usize = 4;
    let mut cut = 0;
    for after in 0.. {
        let (proxy, store) = behind_a_proxy().await;
        for n in 0..EXPIRED {
            let expired = request(&format!("expired {n}"));
            let _ = acquire(&store, &expired).await;
            store.age(&expired.key, 48 * HOUR).await.unwrap();
        }
        let live = acquire(&store, &request("live")).await;
        let kept = acquire(&store, &request("kept")).await;
        let completion = store.complete(&kept, &outcome(b"paid"), None).await;
        assert_eq!(completion.unwrap(), Completion::Recorded);

        proxy.set(Mode::CutOneReply { after });
        let first = store.purge(100).await;
        let was_cut = proxy.mode() == Mode::Pass;
        proxy.set(Mode::Pass);
        let told = match first {
            Ok(purged) => purged.unresolved,
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
                0
            }
        };
        let told = told + store.purge(100).await.unwrap().unresolved;
        assert_eq!(told, EXPIRED, "each is told of once, reply {after} lost");
        for n in 0..EXPIRED {
            let left = store.lookup(&key(&format!("expired {n}"))).await.unwrap();
            assert_eq!(left, None);
        }
        assert_eq!(store.purge(100).await.unwrap().removed, 0);
        assert_eq!(store.renew(&live, HOUR).await.unwrap(), Fenced::Applied);
        assert_eq!(
            outcome_of(&existing(&store, &request("kept")).await),
            &outcome(b"paid")
        );
        if !was_cut {
            break;
        }
        cut += 1;
    }
    // An answer about the server, a step of the walk, two looks, the reading, the removal.
    assert!(cut >= 6, "only {cut} replies were cut");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_that_cannot_hear_the_answer_is_told_of_it_by_the_next_one() {
    const EXPIRED: usize = 4;
    let mut late = 0;
    for after in 0.. {
        let (proxy, store) = behind_a_proxy().await;
        for n in 0..EXPIRED {
            let expired = request(&format!("expired {n}"));
            let _ = acquire(&store, &expired).await;
            store.age(&expired.key, 48 * HOUR).await.unwrap();
        }
        // Replaced by a claim, and counted beside it.
        let _ = acquire(&store, &request("expired 0")).await;
        proxy.set(Mode::CutRepliesFrom { after });
        let first = store.purge(100).await.map_or(0, |first| first.unresolved);
        let was_cut = proxy.mode() == Mode::CutReplies;
        proxy.set(Mode::Pass);
        let left = store.abandoned(None, 100).await.unwrap().records;
        late += usize::from(first < EXPIRED && left.is_empty());
        // What is owed is told within the limit too.
        let second = store.purge(1).await.unwrap().unresolved;
        let third = store.purge(100).await.unwrap().unresolved;
        assert!(second <= 1, "{second} told at once");
        assert_eq!(
            first + second + third,
            EXPIRED,
            "replies lost from {after} on"
        );
        assert_eq!(store.purge(100).await.unwrap().removed, 0);
        if !was_cut {
            break;
        }
    }
    assert!(late > 0, "no answer to a removal was lost");
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
