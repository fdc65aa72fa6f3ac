//! Values that are damaged, foreign, or older than this release.

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use tower_idempotency::{Completion, Fenced, OnAbandoned, Owner, Resolution, State};

use super::support::{shared_url, store_at};
use super::*;

struct Place {
    store: RedisStore,
    raw: MultiplexedConnection,
}

impl Place {
    async fn new() -> Self {
        let url = shared_url();
        let client = redis::Client::open(&*url).unwrap();
        Self {
            store: store_at(&url).await,
            raw: client.get_multiplexed_async_connection().await.unwrap(),
        }
    }

    async fn value(&mut self, key: &ScopedKey) -> Vec<u8> {
        self.raw.get(self.store.record_key(key)).await.unwrap()
    }

    async fn put(&mut self, key: &ScopedKey, value: &[u8], millis: u64) {
        let name = self.store.record_key(key);
        let () = self.raw.pset_ex(name, value, millis).await.unwrap();
    }
}

/// A started record with notes, and the same one completed, and released.
async fn records(place: &mut Place) -> [(ClaimRequest, Vec<u8>); 3] {
    let mut records = Vec::new();
    for name in ["started", "completed", "released"] {
        let request = request(name);
        let claim = acquire(&place.store, &request).await;
        let noted = place.store.annotate(&claim, "charge 7").await.unwrap();
        assert_eq!(noted, Fenced::Applied);
        let data = bytes::Bytes::from_static(b"7");
        let noted = place.store.checkpoint(&claim, "paid", &data).await.unwrap();
        assert_eq!(noted, Fenced::Applied);
        if name == "completed" {
            let completion = place.store.complete(&claim, &outcome(b"paid"), None).await;
            assert_eq!(completion.unwrap(), Completion::Recorded);
        }
        if name == "released" {
            assert_eq!(place.store.release(&claim).await.unwrap(), Fenced::Applied);
        }
        let value = place.value(&request.key).await;
        records.push((request, value));
    }
    records.try_into().unwrap()
}

#[track_caller]
fn corrupt<T: std::fmt::Debug>(result: Result<T, StoreError>, what: &str) {
    let error = result.expect_err(what);
    assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_with_any_byte_flipped_is_corrupt_and_is_left_alone() {
    let mut place = Place::new().await;
    let ttl = 31 * 24 * 60 * 60 * 1_000;
    for (request, value) in records(&mut place).await {
        let claim = Claim::new(request.key.clone(), request.owner, 1);
        for at in 0..value.len() {
            let mut damaged = value.clone();
            damaged[at] ^= 1 << (at % 8);
            place.put(&request.key, &damaged, ttl).await;
            let what = format!("byte {at} of {} flipped", value.len());
            corrupt(place.store.claim(&another(&request)).await, &what);
            corrupt(place.store.lookup(&request.key).await, &what);
            // The owner's own repetition is not granted on it either.
            let again = place.store.claim(&request).await;
            corrupt(again, &what);
            let kept: Vec<u8> = place.value(&request.key).await;
            assert!(kept == damaged, "{what}: the value was touched");
            // What a move does not read it may keep, damage and all, but never mend.
            let _ = place.store.complete(&claim, &outcome(b"late"), None).await;
            corrupt(place.store.lookup(&request.key).await, &what);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_was_cut_or_grew_is_corrupt() {
    let mut place = Place::new().await;
    let ttl = 31 * 24 * 60 * 60 * 1_000;
    for (request, value) in records(&mut place).await {
        for end in 0..value.len() {
            place.put(&request.key, &value[..end], ttl).await;
            corrupt(
                place.store.claim(&another(&request)).await,
                &format!("cut at {end}"),
            );
        }
        let longer = [&value[..], b"\0"].concat();
        place.put(&request.key, &longer, ttl).await;
        corrupt(
            place.store.claim(&another(&request)).await,
            "one byte longer",
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_disturbs_no_walk() {
    let mut place = Place::new().await;
    let [(started, value), ..] = records(&mut place).await;
    let mut damaged = value.clone();
    damaged[100] ^= 1;
    place.put(&started.key, &damaged, 1_000_000).await;
    let fine = acquire(&place.store, &request("fine")).await;
    assert_eq!(place.store.abandon(&fine).await.unwrap(), Fenced::Applied);
    let page = place.store.abandoned(None, 10).await.unwrap();
    assert_eq!(page.records.len(), 1);
    assert_eq!(page.records[0].key, *fine.key());
    assert_eq!(place.store.purge(10).await.unwrap().removed, 0);
    assert!(place.store.remove(&started.key).await.unwrap());
    let _ = acquire(&place.store, &started).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_holds_something_else_is_corrupt_and_is_left_alone() {
    let mut place = Place::new().await;
    let request = request("key");
    let name = place.store.record_key(&request.key);
    let () = place.raw.lpush(&name, "not ours").await.unwrap();
    let claim = Claim::new(request.key.clone(), request.owner, 1);
    corrupt(place.store.claim(&request).await, "a list");
    corrupt(place.store.lookup(&request.key).await, "a list");
    corrupt(place.store.renew(&claim, HOUR).await, "a list");
    corrupt(
        place.store.complete(&claim, &outcome(b""), None).await,
        "a list",
    );
    assert_eq!(place.store.purge(10).await.unwrap().removed, 0);
    assert!(
        place
            .store
            .abandoned(None, 10)
            .await
            .unwrap()
            .records
            .is_empty()
    );
    let left: Vec<String> = place.raw.lrange(&name, 0, -1).await.unwrap();
    assert_eq!(left, ["not ours"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_time_to_live_was_taken_away_is_corrupt() {
    let mut place = Place::new().await;
    let request = request("key");
    let claim = acquire(&place.store, &request).await;
    let () = place
        .raw
        .persist(place.store.record_key(&request.key))
        .await
        .unwrap();
    corrupt(place.store.claim(&another(&request)).await, "persisted");
    corrupt(place.store.renew(&claim, HOUR).await, "persisted");
    corrupt(
        place.store.complete(&claim, &outcome(b""), None).await,
        "persisted",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_version_is_named_and_left_alone() {
    let mut place = Place::new().await;
    let [(request, mut value), ..] = records(&mut place).await;
    (value[0], value[40]) = (2, 2);
    place.put(&request.key, &value, 1_000_000).await;
    let error = place.store.claim(&another(&request)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    assert!(error.to_string().contains("version 2"), "{error}");
    let claim = Claim::new(request.key.clone(), request.owner, 1);
    corrupt(place.store.release(&claim).await, "a newer version");
    assert_eq!(place.value(&request.key).await, value);
}

/// Values as the first release wrote them: this and every later one must read them, and go on from them.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_version_1_are_read_and_carried_on() {
    let mut place = Place::new().await;
    let fixture = include_str!("../fixtures/redis_v1.txt");
    let mut values = std::collections::BTreeMap::new();
    for line in fixture.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let [name, left, hex] = [(); 3].map(|()| words.next().unwrap());
        let bytes = (0..hex.len() / 2).map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16));
        let bytes: Vec<u8> = bytes.map(Result::unwrap).collect();
        values.insert(name.to_owned(), (left.parse::<u64>().unwrap(), bytes));
    }
    for (name, (left, value)) in &values {
        place.put(&key(name), value, *left).await;
    }
    let owner = Owner::from_bytes(*b"owner of fixture");
    let store = &place.store;
    let created = 1_700_000_000_000_000;
    for name in ["started", "abandoned", "completed", "released"] {
        let record = record(store, &key(name)).await;
        assert_eq!(record.owner, owner, "{name}");
        assert_eq!(record.fingerprint, Fingerprint::of(&[b"the same for all"]));
        assert_eq!(record.attempt, 1);
        assert_eq!(record.created_at.as_micros(), created);
        assert_eq!(record.expires_at.as_micros(), created + 86_400_000_000);
        assert_eq!(record.is_abandoned(), name == "abandoned");
        if name != "released" {
            assert_eq!(record.notes.correlation.as_deref(), Some("charge 7"));
            assert_eq!(record.notes.checkpoint("paid").unwrap(), "7");
        }
    }
    let done = record(store, &key("completed")).await;
    assert_eq!(outcome_of(&done), &outcome(b"paid"));
    let State::Completed { completed_at, .. } = done.state else {
        panic!("not completed");
    };
    assert_eq!(completed_at.as_micros(), created + 5_000_000);
    let claim = |name: &str| Claim::new(key(name), owner, 1);
    let completion = store
        .complete(&claim("started"), &outcome(b"late"), None)
        .await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    let seen = record(store, &key("abandoned")).await;
    let resolved = store
        .resolve(&seen, &Resolution::Completed(outcome(b"found")))
        .await;
    assert_eq!(resolved.unwrap(), Fenced::Applied);
    assert_eq!(acquire(store, &request("released")).await.attempt(), 2);
    let mut rerun = request("completed");
    rerun.on_abandoned = OnAbandoned::Rerun;
    existing(store, &rerun).await;
}
