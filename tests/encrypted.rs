//! What an encrypting store leaves in the store inside, and what it makes of a store that was
//! tampered with.

#[path = "support/app.rs"]
mod app;

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};
use tower_idempotency::{
    Admission, Claim, ClaimRequest, Claimed, Completion, EncryptedStore, Fenced, Fingerprint,
    Idempotency, IdempotencyKey, IdempotencyLayer, Keyring, MemoryStore, Notes, OnAbandoned,
    Outcome, ProblemKind, Record, Resolution, ScopedKey, Settled, State, Store, StoreError,
    StoreErrorKind, UnsealError,
};

use app::{App, paid, pay};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::test]
async fn nothing_that_was_answered_or_noted_is_in_the_store() {
    let (inside, store) = pair();
    let outcome = secret_outcome();
    for ending in ["started", "completed", "resolved"] {
        let key = key(ending);
        let claim = acquire(&store, &key).await;
        annotate(&store, &claim, "canary-correlation").await;
        checkpoint(&store, &claim, "charged", b"canary-checkpoint").await;
        match ending {
            "completed" => complete(&store, &claim, &outcome).await,
            "resolved" => {
                assert!(inside.age(&key, DAY / 2));
                let record = store.lookup(&key).await.unwrap().unwrap();
                let resolution = Resolution::Completed(outcome.clone());
                let resolved = store.resolve(&record, &resolution).await;
                assert_eq!(resolved.unwrap(), Fenced::Applied);
            }
            _ => {}
        }
        let dumped = dump(&inside.lookup(&key).await.unwrap().unwrap());
        assert!(dumped.contains("charged"), "names of checkpoints are plain");
        assert!(!dumped.contains("canary"), "{ending}: {dumped}");
        assert!(!dumped.contains(&hex(b"canary")), "{ending}: {dumped}");

        let opened = dump(&store.lookup(&key).await.unwrap().unwrap());
        assert_eq!(
            opened.matches("canary").count(),
            if ending == "started" { 2 } else { 6 }
        );
    }
}

#[tokio::test]
async fn the_status_is_not_in_the_store() {
    let (inside, store) = pair();
    for outcome in [
        Outcome::response(StatusCode::PAYMENT_REQUIRED, &HeaderMap::new(), &[], None),
        Outcome::tombstone(StatusCode::CREATED),
    ] {
        let key = random_key();
        let claim = acquire(&store, &key).await;
        complete(&store, &claim, &outcome).await;
        let kept = kept(&inside, &key).await;
        assert_eq!((kept.status(), kept.is_tombstone()), (None, false));
    }
}

#[tokio::test]
async fn outcomes_and_notes_come_back_whole() {
    let (_, store) = pair();
    let mebibyte: Vec<u8> = (0..1 << 20).map(|n: u32| n.to_le_bytes()[1]).collect();
    let none = HeaderMap::new();
    for outcome in [
        secret_outcome(),
        Outcome::response(StatusCode::NO_CONTENT, &none, &[], None),
        Outcome::response(StatusCode::OK, &none, &[&mebibyte], None),
        Outcome::tombstone(StatusCode::CREATED),
        Outcome::value(b"{\"Ok\":1}"),
        Outcome::value(b""),
    ] {
        let key = random_key();
        let claim = acquire(&store, &key).await;
        annotate(&store, &claim, "").await;
        checkpoint(&store, &claim, "empty", b"").await;
        checkpoint(&store, &claim, "", b"no name").await;
        complete(&store, &claim, &outcome).await;
        let mut notes = Notes::default();
        notes.correlation = Some(String::new());
        notes.set_checkpoint("empty", Bytes::new());
        notes.set_checkpoint("", Bytes::from_static(b"no name"));

        let found = store.lookup(&key).await.unwrap().unwrap();
        let shown = store.claim(&request(&key)).await.unwrap();
        let Claimed::Existing(shown) = shown else {
            panic!("a completed key was granted");
        };
        for record in [found, shown] {
            assert_eq!(record.notes, notes);
            assert!(
                matches!(record.state, State::Completed { outcome: kept, .. } if kept == outcome)
            );
        }
        let again = store.complete(&claim, &Outcome::value(b"late"), None).await;
        assert_eq!(again.unwrap(), Completion::Standing(outcome));
    }
}

#[tokio::test]
async fn one_outcome_is_never_sealed_twice_to_the_same_bytes() {
    let (inside, store) = pair();
    let mut sealed = Vec::new();
    for name in ["a", "a", "b"] {
        let key = key(name);
        let _ = store.remove(&key).await.unwrap();
        let claim = acquire(&store, &key).await;
        complete(&store, &claim, &secret_outcome()).await;
        sealed.push(kept(&inside, &key).await.body());
    }
    // The magic, the version and the key's id are the same; from the nonce on nothing is.
    for (one, two) in [(0, 1), (0, 2), (1, 2)] {
        assert_eq!(sealed[one][..8], sealed[two][..8]);
        let equal = sealed[one].iter().zip(&sealed[two]).skip(8);
        let equal = equal.filter(|(one, two)| one == two).count();
        assert!(equal < sealed[one].len() / 8, "{equal} bytes are equal");
    }
}

/// The engine asks again when the reply to its completion is lost. What stands then was sealed from
/// the same outcome to other bytes.
#[tokio::test(start_paused = true)]
async fn a_completion_whose_reply_was_lost_is_recognised_as_our_own() {
    let inside = FaultyStore::new(MemoryStore::new());
    let idempotency = Idempotency::new(EncryptedStore::new(inside.clone(), keyring()));
    let key = key("k");
    let Ok(Admission::First(attempt)) = idempotency.admit(&key, fingerprint()).await else {
        panic!("a fresh key was not granted");
    };
    inside.inject(Move::Complete, Calls::Next(2), Fault::LoseReply);
    let settled = attempt.complete(secret_outcome()).await;
    assert_eq!(settled, Settled::Recorded);
    assert_eq!(inside.calls(Move::Complete), 3);
}

#[tokio::test]
async fn every_changed_byte_of_an_outcome_is_corrupt_and_the_record_stays() {
    let (inside, store) = pair();
    let key = key("k");
    let claim = acquire(&store, &key).await;
    complete(&store, &claim, &secret_outcome()).await;
    let frame = kept(&inside, &key).await.as_bytes().to_vec();
    let mut reached = 0;
    for at in 0..frame.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut changed = frame.clone();
            changed[at] ^= flip;
            // What is no frame any more is refused by the store inside.
            let Ok(changed) = Outcome::decode(changed.into()) else {
                continue;
            };
            reached += 1;
            put_back(&inside, &key, &changed).await;
            assert_unreadable(&store, &inside, &key).await;
        }
    }
    // All but the frame's own head of nine bytes.
    assert!(
        reached >= 3 * (frame.len() - 9),
        "{reached} of {}",
        3 * frame.len()
    );
    put_back(&inside, &key, &Outcome::decode(frame.into()).unwrap()).await;
    assert_opens(&store, &key, &secret_outcome()).await;
}

#[tokio::test]
async fn an_outcome_that_was_cut_or_that_grew_is_corrupt() {
    let (inside, store) = pair();
    let key = key("k");
    let claim = acquire(&store, &key).await;
    complete(&store, &claim, &Outcome::value(b"")).await;
    let sealed = kept(&inside, &key).await.body().to_vec();
    for end in 0..sealed.len() {
        put_back(&inside, &key, &Outcome::value(&sealed[..end])).await;
        assert_unreadable(&store, &inside, &key).await;
    }
    let longer = [&sealed[..], b"\0"].concat();
    put_back(&inside, &key, &Outcome::value(&longer)).await;
    assert_unreadable(&store, &inside, &key).await;
}

#[tokio::test]
async fn every_changed_byte_of_a_note_is_corrupt() {
    let (inside, store) = pair();
    let key = key("k");
    let claim = acquire(&store, &key).await;
    annotate(&store, &claim, "pi_1").await;
    checkpoint(&store, &claim, "charged", b"1").await;
    let notes = inside.lookup(&key).await.unwrap().unwrap().notes;
    let correlation = notes.correlation.clone().unwrap();
    for at in 0..correlation.len() {
        for digit in ["0", "e", "E", "x", "é"] {
            let mut changed = correlation.clone();
            changed.replace_range(at..=at, digit);
            if changed == correlation {
                continue;
            }
            annotate(&inside, &claim, &changed).await;
            assert_unreadable(&store, &inside, &key).await;
        }
    }
    annotate(&inside, &claim, &correlation).await;
    let data = notes.checkpoint("charged").unwrap();
    for at in 0..data.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut changed = data.to_vec();
            changed[at] ^= flip;
            checkpoint(&inside, &claim, "charged", &changed).await;
            assert_unreadable(&store, &inside, &key).await;
        }
    }
    checkpoint(&inside, &claim, "charged", data).await;
    assert!(store.lookup(&key).await.is_ok());
}

#[tokio::test]
async fn nothing_can_be_moved_to_another_record() {
    let (inside, store) = pair();
    let (mine, other) = (
        key("mine"),
        ScopedKey::new("http", "bob", &IdempotencyKey::new("mine").unwrap()),
    );
    for key in [&mine, &other] {
        let claim = acquire(&store, key).await;
        annotate(&store, &claim, "pi_1").await;
        checkpoint(&store, &claim, "charged", b"1").await;
        complete(&store, &claim, &Outcome::value(key.scope().as_bytes())).await;
    }
    let from = inside.lookup(&other).await.unwrap().unwrap();
    let State::Completed { outcome, .. } = &from.state else {
        panic!("not completed");
    };
    put_back(&inside, &mine, outcome).await;
    assert_unreadable(&store, &inside, &mine).await;

    let claim = reclaim(&inside, &mine).await;
    annotate(&inside, &claim, from.notes.correlation.as_ref().unwrap()).await;
    assert_unreadable(&store, &inside, &mine).await;

    let claim = reclaim(&inside, &mine).await;
    let data = from.notes.checkpoint("charged").unwrap();
    checkpoint(&inside, &claim, "charged", data).await;
    assert_unreadable(&store, &inside, &mine).await;
}

#[tokio::test]
async fn nothing_can_be_moved_to_another_field_of_its_record() {
    let (inside, store) = pair();
    let key = key("k");
    let claim = acquire(&store, &key).await;
    annotate(&store, &claim, "one").await;
    checkpoint(&store, &claim, "a", b"one").await;
    checkpoint(&store, &claim, "b", b"two").await;
    let notes = inside.lookup(&key).await.unwrap().unwrap().notes;
    let (a, b) = (
        notes.checkpoint("a").unwrap(),
        notes.checkpoint("b").unwrap(),
    );

    checkpoint(&inside, &claim, "a", b).await;
    assert_unreadable(&store, &inside, &key).await;
    checkpoint(&inside, &claim, "a", a).await;
    annotate(&inside, &claim, &hex(a)).await;
    assert_unreadable(&store, &inside, &key).await;
    annotate(&inside, &claim, notes.correlation.as_ref().unwrap()).await;
    assert!(store.lookup(&key).await.is_ok());
    complete(&inside, &claim, &Outcome::value(a)).await;
    assert_unreadable(&store, &inside, &key).await;
}

/// A claim that is granted and then fails would be released by whoever asked for it, and the notes
/// with it.
#[tokio::test]
async fn notes_that_cannot_be_opened_are_not_taken_over() {
    let (inside, store) = pair();
    let idempotency = Idempotency::builder(store).on_abandoned(OnAbandoned::Rerun);
    let idempotency = idempotency.build().unwrap();
    let key = key("k");
    let claim = acquire(idempotency.store(), &key).await;
    checkpoint(idempotency.store(), &claim, "charged", b"1").await;
    let data = inside.lookup(&key).await.unwrap().unwrap().notes;
    let data = data.checkpoint("charged").unwrap().clone();
    checkpoint(&inside, &claim, "charged", b"changed").await;
    assert!(inside.age(&key, DAY / 2));
    let before = inside.lookup(&key).await.unwrap();

    assert!(idempotency.admit(&key, fingerprint()).await.is_err());
    assert!(idempotency.drain().await);
    assert_eq!(inside.lookup(&key).await.unwrap(), before);

    checkpoint(&inside, &claim, "charged", &data).await;
    let admitted = idempotency.admit(&key, fingerprint()).await;
    let Ok(Admission::First(attempt)) = admitted else {
        panic!("not taken over: {admitted:?}");
    };
    assert_eq!(attempt.attempt().number(), 2);
    let _ = attempt.release().await;
}

#[tokio::test]
async fn an_abandoned_record_that_cannot_be_opened_does_not_hide_the_others() {
    let (inside, store) = pair();
    for name in ["a", "b", "c"] {
        let claim = acquire(&store, &key(name)).await;
        annotate(&store, &claim, name).await;
        assert_eq!(store.abandon(&claim).await.unwrap(), Fenced::Applied);
        if name == "b" {
            annotate(&inside, &claim, "changed").await;
        }
    }
    let page = store.abandoned(None, 10).await.unwrap();
    let mut seen: Vec<_> = page.records.iter().map(|record| record.key.key()).collect();
    seen.sort_unstable();
    assert_eq!(seen, ["a", "c"]);
    for record in &page.records {
        assert_eq!(record.notes.correlation.as_deref(), Some(record.key.key()));
    }
}

#[tokio::test]
async fn keys_are_rotated_while_records_live() {
    let inside = MemoryStore::new();
    let first = EncryptedStore::new(inside.clone(), Keyring::new(1, [1; 32]));
    let prepared = EncryptedStore::new(inside.clone(), Keyring::new(1, [1; 32]).old(2, [2; 32]));
    let second = EncryptedStore::new(inside.clone(), Keyring::new(2, [2; 32]).old(1, [1; 32]));
    let done = EncryptedStore::new(inside.clone(), Keyring::new(2, [2; 32]));
    let outcome = secret_outcome();

    let (old, new) = (key("old"), key("new"));
    let claim = acquire(&first, &old).await;
    complete(&first, &claim, &outcome).await;
    let claim = acquire(&second, &new).await;
    complete(&second, &claim, &outcome).await;

    // In a rolling deployment each step reads what the step before it and the one after it write.
    for (store, key) in [
        (&prepared, &old),
        (&prepared, &new),
        (&second, &old),
        (&second, &new),
        (&done, &new),
    ] {
        assert_opens(store, key, &outcome).await;
    }
    let error = done.lookup(&old).await.unwrap_err();
    assert_eq!(unsealed(&error), UnsealError::UnknownKey(1));
    assert!(unsealed(&error).to_string().contains("key 1,"), "{error:?}");
    assert_unreadable(&done, &inside, &old).await;
    // With its key back it is what it was.
    assert_opens(&second, &old, &outcome).await;
}

#[tokio::test]
async fn a_wrong_key_under_a_known_id_opens_nothing() {
    let inside = MemoryStore::new();
    let right = EncryptedStore::new(inside.clone(), Keyring::new(1, [1; 32]));
    let wrong = EncryptedStore::new(inside.clone(), Keyring::new(1, [2; 32]));
    let key = key("k");
    let claim = acquire(&right, &key).await;
    complete(&right, &claim, &secret_outcome()).await;
    let error = wrong.lookup(&key).await.unwrap_err();
    assert_eq!(unsealed(&error), UnsealError::NotAuthentic);
    assert_unreadable(&wrong, &inside, &key).await;
    // Where two keys came to have one id, both are tried.
    let both = EncryptedStore::new(inside, Keyring::new(1, [2; 32]).old(1, [1; 32]));
    assert_opens(&both, &key, &secret_outcome()).await;
}

#[tokio::test]
async fn a_newer_version_is_refused_and_named() {
    let (inside, store) = pair();
    let key = key("k");
    let claim = acquire(&store, &key).await;
    complete(&store, &claim, &secret_outcome()).await;
    let mut sealed = kept(&inside, &key).await.body().to_vec();
    assert_eq!(sealed[3], 1, "the version");
    sealed[3] = 2;
    put_back(&inside, &key, &Outcome::value(&sealed)).await;
    let error = store.lookup(&key).await.unwrap_err();
    assert_eq!(unsealed(&error), UnsealError::UnknownVersion(2));
    assert_unreadable(&store, &inside, &key).await;
}

#[tokio::test]
async fn records_from_before_are_read_where_that_is_asked_for() {
    let inside = MemoryStore::new();
    let strict = EncryptedStore::new(inside.clone(), keyring());
    let lenient = EncryptedStore::new(inside.clone(), keyring()).accept_unsealed();
    for before in ["response", "value", "correlation", "checkpoint"] {
        let key = key(before);
        let claim = acquire(&inside, &key).await;
        match before {
            "response" => complete(&inside, &claim, &secret_outcome()).await,
            "value" => complete(&inside, &claim, &Outcome::value(b"1")).await,
            "correlation" => annotate(&inside, &claim, "pi_1").await,
            _ => checkpoint(&inside, &claim, "charged", b"1").await,
        }
        let error = strict.lookup(&key).await.unwrap_err();
        assert_eq!(unsealed(&error), UnsealError::NotSealed, "{before}");
        assert_unreadable(&strict, &inside, &key).await;
        let record = inside.lookup(&key).await.unwrap().unwrap();
        let read = lenient.lookup(&key).await.unwrap().unwrap();
        assert_eq!(without_lease(read), without_lease(record), "{before}");
    }
    // What is written from now on is sealed, and what is sealed is checked.
    let new = key("new");
    let claim = acquire(&lenient, &new).await;
    complete(&lenient, &claim, &secret_outcome()).await;
    assert_opens(&strict, &new, &secret_outcome()).await;
    let mut sealed = kept(&inside, &new).await.body().to_vec();
    *sealed.last_mut().unwrap() ^= 1;
    put_back(&inside, &new, &Outcome::value(&sealed)).await;
    assert_unreadable(&lenient, &inside, &new).await;
}

#[tokio::test]
async fn a_retry_of_a_record_that_was_tampered_with_is_answered_and_not_run() {
    let (inside, store) = pair();
    let app = App::behind(&IdempotencyLayer::new(store), paid);
    let first = app.send(pay("k")).await;
    app.send(pay("k")).await.assert_replays(&first);
    let record = app.record("k").await.unwrap();
    let mut sealed = kept(&inside, &record.key).await.body().to_vec();
    *sealed.last_mut().unwrap() ^= 1;
    replace(&inside, &record, &Outcome::value(&sealed)).await;
    let answer = app.send(pay("k")).await;
    answer.assert_problem(ProblemKind::RecordUnreadable);
    assert_eq!(app.runs(), 1);
}

/// A release without the wrapper, beside one with it or after it.
#[tokio::test]
async fn a_service_that_does_not_decrypt_sends_nothing_that_is_sealed() {
    let (inside, store) = pair();
    let sealing = App::behind(&IdempotencyLayer::new(store), paid);
    let plain = App::behind(&IdempotencyLayer::new(inside), paid);
    let first = sealing.send(pay("k")).await;
    let answer = plain.send(pay("k")).await;
    answer.assert_problem(ProblemKind::RecordUnreadable);
    assert_eq!(plain.runs(), 0);
    sealing.send(pay("k")).await.assert_replays(&first);
}

#[test]
fn debug_shows_ids_and_no_key() {
    let keyring = Keyring::new(7, [171; 32]).old(6, [205; 32]);
    let store = EncryptedStore::new(MemoryStore::new(), keyring);
    let text = format!("{store:?} {store:#?}");
    assert!(
        text.contains("active: 7") && text.contains("old: [6]"),
        "{text}"
    );
    for secret in ["171", "205", "ab", "AB", "cd", "CD"] {
        let shown = text.replace("EncryptedStore", "");
        assert!(!shown.contains(secret), "{secret} in {text}");
    }
}

/// The store inside, and the one that encrypts.
fn pair() -> (MemoryStore, EncryptedStore<MemoryStore>) {
    let inside = MemoryStore::new();
    let store = EncryptedStore::new(inside.clone(), keyring());
    (inside, store)
}

fn keyring() -> Keyring {
    Keyring::new(1, [1; 32])
}

fn key(key: &str) -> ScopedKey {
    ScopedKey::new("http", "alice", &IdempotencyKey::new(key).unwrap())
}

fn random_key() -> ScopedKey {
    ScopedKey::new("http", "alice", &IdempotencyKey::random())
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of(&[b"pay"])
}

fn request(key: &ScopedKey) -> ClaimRequest {
    ClaimRequest::new(key.clone(), fingerprint())
}

/// Says `canary` in a header's name and value, in the body and in a trailer.
fn secret_outcome() -> Outcome {
    let line = |name, value| {
        let mut map = HeaderMap::new();
        map.insert(name, HeaderValue::from_static(value));
        map
    };
    let headers = line("x-canary", "canary-value");
    let trailers = line("x-trailer", "canary-trailer");
    Outcome::response(
        StatusCode::CREATED,
        &headers,
        &[b"canary-body"],
        Some(&trailers),
    )
}

/// Everything that the store has of a record, as text.
fn dump(record: &Record) -> String {
    let mut bytes = record.key.as_bytes().to_vec();
    bytes.extend_from_slice(record.fingerprint.as_bytes());
    bytes.extend_from_slice(record.owner.as_bytes());
    if let State::Completed { outcome, .. } = &record.state {
        bytes.extend_from_slice(outcome.as_bytes());
    }
    let notes = &record.notes;
    bytes.extend_from_slice(notes.correlation.as_deref().unwrap_or("").as_bytes());
    for (name, data) in &notes.checkpoints {
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(data);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn acquire(store: &impl Store, key: &ScopedKey) -> Claim {
    match store.claim(&request(key)).await.unwrap() {
        Claimed::Acquired { claim, .. } => claim,
        Claimed::Existing(record) => panic!("the key is taken: {record:?}"),
    }
}

async fn complete(store: &impl Store, claim: &Claim, outcome: &Outcome) {
    let completion = store.complete(claim, outcome, None).await.unwrap();
    assert_eq!(completion, Completion::Recorded);
}

async fn annotate(store: &impl Store, claim: &Claim, correlation: &str) {
    let annotated = store.annotate(claim, correlation).await.unwrap();
    assert_eq!(annotated, Fenced::Applied);
}

async fn checkpoint(store: &impl Store, claim: &Claim, name: &str, data: &[u8]) {
    let data = Bytes::copy_from_slice(data);
    let noted = store.checkpoint(claim, name, &data).await.unwrap();
    assert_eq!(noted, Fenced::Applied);
}

/// The outcome as the store inside has it.
async fn kept(inside: &MemoryStore, key: &ScopedKey) -> Outcome {
    match inside.lookup(key).await.unwrap().unwrap().state {
        State::Completed { outcome, .. } => outcome,
        state => panic!("not completed: {state:?}"),
    }
}

/// A fresh claim in the store inside, whatever was there.
async fn reclaim(inside: &MemoryStore, key: &ScopedKey) -> Claim {
    let _ = inside.remove(key).await.unwrap();
    acquire(inside, key).await
}

/// What somebody does who can write to the database.
async fn put_back(inside: &MemoryStore, key: &ScopedKey, outcome: &Outcome) {
    let claim = reclaim(inside, key).await;
    complete(inside, &claim, outcome).await;
}

/// The same, with everything else as it was.
async fn replace(inside: &MemoryStore, record: &Record, outcome: &Outcome) {
    let _ = inside.remove(&record.key).await.unwrap();
    let mut request = ClaimRequest::new(record.key.clone(), record.fingerprint);
    request.owner = record.owner;
    let claimed = inside.claim(&request).await.unwrap();
    let Claimed::Acquired { claim, .. } = claimed else {
        panic!("the key is taken: {claimed:?}");
    };
    complete(inside, &claim, outcome).await;
}

async fn assert_opens<S: Store>(store: &EncryptedStore<S>, key: &ScopedKey, outcome: &Outcome) {
    let record = store.lookup(key).await.unwrap().expect("a record");
    assert!(matches!(&record.state, State::Completed { outcome: kept, .. } if kept == outcome));
}

/// No move shows the record, and it is still what it was.
async fn assert_unreadable(
    store: &EncryptedStore<MemoryStore>,
    inside: &MemoryStore,
    key: &ScopedKey,
) {
    let before = inside.lookup(key).await.unwrap().expect("a record");
    let claimed = store.claim(&request(key)).await;
    let mut rerun = request(key);
    rerun.on_abandoned = OnAbandoned::Rerun;
    let rerun = store.claim(&rerun).await;
    let found = store.lookup(key).await.map(|_| ());
    let mut errors = vec![claimed.unwrap_err(), rerun.unwrap_err(), found.unwrap_err()];
    if matches!(before.state, State::Completed { .. }) && before.notes.is_empty() {
        let claim = Claim::new(key.clone(), before.owner, before.attempt);
        let completed = store.complete(&claim, &Outcome::value(b"late"), None).await;
        errors.push(completed.unwrap_err());
    }
    for error in errors {
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
        let _: UnsealError = unsealed(&error);
        assert!(!format!("{error} {error:?}").contains("canary"));
    }
    let after = inside
        .lookup(key)
        .await
        .unwrap()
        .expect("the record was lost");
    assert_eq!(without_lease(after), without_lease(before));
}

fn without_lease(mut record: Record) -> Record {
    if let State::Started { lease_left, .. } = &mut record.state {
        *lease_left = Duration::ZERO;
    }
    record
}

fn unsealed(error: &StoreError) -> UnsealError {
    let source = error.source().expect("a source");
    *source.downcast_ref().expect("an `UnsealError`")
}
