//! What each answer costs, counted by the server itself.

use std::collections::BTreeMap;

use tower_idempotency::OnAbandoned;

use super::support::{Server, store_at};
use super::*;

/// How often each command was called since the last look, by clients and by scripts.
struct Tally<'a>(&'a Server);

impl Tally<'_> {
    fn begin(&self) {
        self.0.command(&["CONFIG", "RESETSTAT"]);
    }

    fn calls(&self) -> BTreeMap<String, u64> {
        let reply = self.0.command(&["INFO", "commandstats"]);
        let text: String = redis::from_redis_value(reply).unwrap();
        let calls = text.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let calls = rest.split(',').next()?.parse().ok()?;
            Some((name.to_owned(), calls))
        });
        // What the tally itself sends.
        let own = [
            "info",
            "config|resetstat",
            "client|setinfo",
            "hello",
            "command",
        ];
        calls.filter(|(name, _)| !own.contains(&&**name)).collect()
    }
}

fn counted(calls: &[(&str, u64)]) -> BTreeMap<String, u64> {
    calls
        .iter()
        .map(|(name, n)| ((*name).to_owned(), *n))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn round_trips_are_as_few_as_promised() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let tally = Tally(&server);
    // So that the scripts are known to the server.
    let warm = acquire(&store, &request("warm")).await;
    let _ = store.complete(&warm, &outcome(b""), None).await.unwrap();
    let warm = acquire(&store, &request("warm 2")).await;
    let _ = store.release(&warm).await.unwrap();
    let _ = acquire(&store, &request("warm 2")).await;

    tally.begin();
    let first = request("key");
    let claim = acquire(&store, &first).await;
    assert_eq!(
        tally.calls(),
        counted(&[("set", 1), ("pttl", 1)]),
        "a claim"
    );
    tally.begin();
    let live = existing(&store, &another(&first)).await;
    assert!(!live.is_abandoned());
    assert_eq!(
        tally.calls(),
        counted(&[("set", 1), ("pttl", 1)]),
        "a live duplicate"
    );
    tally.begin();
    let mismatch = ClaimRequest::new(first.key.clone(), Fingerprint::of(&[b"another"]));
    existing(&store, &mismatch).await;
    assert_eq!(
        tally.calls(),
        counted(&[("set", 1), ("pttl", 1)]),
        "a mismatch"
    );
    tally.begin();
    let _ = store
        .complete(&claim, &outcome(b"paid"), None)
        .await
        .unwrap();
    let in_the_script = [("evalsha", 1), ("get", 1), ("pttl", 1), ("set", 1)];
    assert_eq!(tally.calls(), counted(&in_the_script), "a completion");
    tally.begin();
    existing(&store, &another(&first)).await;
    existing(&store, &mismatch).await;
    assert_eq!(
        tally.calls(),
        counted(&[("set", 2), ("pttl", 2)]),
        "a replay and a mismatch"
    );

    tally.begin();
    let again = request("again");
    let _ = acquire(&store, &again).await;
    let _ = acquire(&store, &again).await;
    let script = [("evalsha", 1), ("get", 1), ("pttl", 3), ("set", 3)];
    assert_eq!(
        tally.calls(),
        counted(&script),
        "a claim that is asked for again"
    );
    let mut takeover = another(&again);
    takeover.on_abandoned = OnAbandoned::Rerun;
    store.age(&again.key, HOUR).await.unwrap();
    tally.begin();
    assert_eq!(acquire(&store, &takeover).await.attempt(), 2);
    let script = [("evalsha", 1), ("get", 1), ("pttl", 2), ("set", 2)];
    assert_eq!(tally.calls(), counted(&script), "a takeover");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_outcome_does_not_pass_through_a_script() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let tally = Tally(&server);
    let warm = acquire(&store, &request("warm")).await;
    let _ = store.complete(&warm, &large_outcome(), None).await.unwrap();
    let claim = acquire(&store, &request("key")).await;
    tally.begin();
    let _ = store
        .complete(&claim, &large_outcome(), None)
        .await
        .unwrap();
    let calls = tally.calls();
    assert_eq!(calls.get("rename"), Some(&1), "{calls:?}");
    assert_eq!(calls.get("set"), Some(&1), "{calls:?}");
    assert_eq!(calls.get("evalsha"), Some(&1), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_live_duplicates_and_mismatches_write_nothing() {
    let server = Server::start();
    let store = store_at(&server.url()).await;
    let live = request("live");
    let _ = acquire(&store, &live).await;
    let done = request("done");
    let claim = acquire(&store, &done).await;
    let _ = store
        .complete(&claim, &outcome(b"paid"), None)
        .await
        .unwrap();
    let changes = || server.info("persistence", "rdb_changes_since_last_save");
    let before = changes();
    for request in [&live, &done] {
        existing(&store, &another(request)).await;
        let mismatch = ClaimRequest::new(request.key.clone(), Fingerprint::of(&[b"another"]));
        existing(&store, &mismatch).await;
    }
    assert_eq!(changes(), before);
    assert!(before.is_some());
}
