//! What a handler may do with the attempt that it runs under.

use std::collections::HashSet;

use tower_idempotency::testing::{Calls, Fault, Move};
use tower_idempotency::{
    Fingerprint, Idempotency, IdempotencyKey, MemoryStore, MissingSecret, NoteError, ScopedKey,
    Store,
};

use crate::engine::*;

const SECRET: &[u8; 16] = b"sixteen bytes...";

/// The derived keys of some triples and steps, on an engine of its own.
async fn derived(secret: &[u8], triples: &[[&str; 3]], steps: &[&str]) -> Vec<String> {
    let engine = Idempotency::builder(MemoryStore::new())
        .secret(secret)
        .build()
        .unwrap();
    let mut keys = Vec::new();
    for [namespace, scope, text] in triples {
        let key = ScopedKey::new(namespace, scope, &IdempotencyKey::new(text).unwrap());
        let admission = engine.admit(&key, Fingerprint::of(&[])).await.unwrap();
        let attempt = first(admission);
        for step in steps {
            let key = attempt.attempt().derive(step).unwrap();
            keys.push(key.as_str().to_owned());
        }
        let _ = attempt.release().await;
    }
    keys
}

#[tokio::test(start_paused = true)]
async fn notes_are_read_back_and_the_last_one_of_a_name_counts() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let handler = attempt.attempt();
    assert_eq!(handler.correlation(), None);
    assert_eq!(handler.finished("charged"), None);
    for word in ["a", "b"] {
        handler.annotate(word).await.unwrap();
        handler
            .checkpoint("charged", word.as_bytes())
            .await
            .unwrap();
        handler.checkpoint(word, b"").await.unwrap();
    }
    let notes = record(&engine).await.unwrap().notes;
    assert_eq!(notes.correlation.as_deref(), Some("b"));
    let names: Vec<_> = notes
        .checkpoints
        .iter()
        .map(|(name, _)| &name[..])
        .collect();
    assert_eq!(names, ["charged", "a", "b"]);
    assert_eq!(handler.correlation().as_deref(), Some("b"));
    assert_eq!(handler.finished("charged").as_deref(), Some(&b"b"[..]));
    let clone = handler.clone();
    assert_eq!(clone.finished("a").as_deref(), Some(&b""[..]));
}

#[tokio::test(start_paused = true)]
async fn a_note_that_the_store_did_not_acknowledge_is_an_error_and_may_be_tried_again() {
    for fault in [Fault::Fail, Fault::LoseReply, Fault::Hang] {
        let engine = engine();
        let attempt = begin(&engine).await;
        let handler = attempt.attempt();
        engine
            .store()
            .inject(Move::Checkpoint, Calls::Next(1), fault);
        engine.store().inject(Move::Annotate, Calls::Next(1), fault);
        let error = handler.checkpoint("charged", b"1").await.unwrap_err();
        assert!(matches!(error, NoteError::Store(_)), "{error:?}");
        assert_eq!(handler.finished("charged"), None);
        let error = handler.annotate("ch_1").await.unwrap_err();
        assert!(matches!(error, NoteError::Store(_)), "{error:?}");
        assert_eq!(handler.correlation(), None);
        assert!(!handler.is_claim_lost());

        handler.checkpoint("charged", b"1").await.unwrap();
        handler.annotate("ch_1").await.unwrap();
        assert!(handler.finished("charged").is_some());
        assert!(handler.correlation().is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_note_that_is_refused_tells_that_the_claim_is_lost() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let handler = attempt.attempt();
    engine.store().remove(&key("k")).await.unwrap();
    let error = handler.annotate("ch_1").await.unwrap_err();
    assert!(matches!(error, NoteError::ClaimLost), "{error:?}");
    assert!(handler.is_claim_lost());
    handler.claim_lost().await;
    let error = handler.checkpoint("charged", b"1").await.unwrap_err();
    assert!(matches!(error, NoteError::ClaimLost), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn debug_shows_no_key() {
    let engine = engine();
    let key = key("order-4711");
    let attempt = first(engine.admit(&key, request("r")).await.unwrap());
    let text = format!("{attempt:?}");
    assert!(text.contains(&key.log_id()), "{text}");
    assert!(!text.contains("4711"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn without_a_secret_there_is_no_derived_key() {
    let engine = engine();
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().derive("charge"), Err(MissingSecret));
}

#[tokio::test(start_paused = true)]
async fn a_derived_key_is_the_same_on_every_attempt_of_every_instance() {
    let triple = ["http", "u1", "k"];
    let twice = derived(SECRET, &[triple, triple], &["charge"]).await;
    let elsewhere = derived(SECRET, &[triple], &["charge"]).await;
    assert_eq!(twice, [elsewhere[0].clone(), elsewhere[0].clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_derived_key_is_the_same_in_every_release() {
    // HMAC-SHA-256 of the length of the lookup key as 64 bits, little endian, the lookup key and the
    // step; the first 16 bytes with the version and the variant of a UUID. By another program.
    let keys = derived(SECRET, &[["http", "u1", "k"]], &["charge"]).await;
    assert_eq!(keys, ["b2448339-d719-80bb-8b5e-687751d9912c"]);
}

#[tokio::test(start_paused = true)]
async fn derived_keys_differ_by_step_key_scope_namespace_and_secret() {
    let triples = [
        ["http", "u1", "k"],
        ["http", "u1", "kc"],
        ["http", "u2", "k"],
        ["jobs", "u1", "k"],
        ["http", "u", "1k"],
        ["httpu", "1", "k"],
    ];
    // The borders between the parts and the step count too.
    let steps = ["charge", "refund", "", "harge"];
    let mut keys = derived(SECRET, &triples, &steps).await;
    keys.extend(derived(b"another secret...", &triples, &steps).await);
    let all = keys.len();
    let different: HashSet<_> = keys.into_iter().collect();
    assert_eq!(different.len(), all);
}

#[tokio::test(start_paused = true)]
async fn a_derived_key_is_a_version_8_uuid() {
    let steps: Vec<String> = (0..100).map(|step| step.to_string()).collect();
    let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
    for key in derived(SECRET, &[["http", "", "k"]], &steps).await {
        assert_eq!(key.len(), 36, "{key}");
        for (at, letter) in key.char_indices() {
            match at {
                8 | 13 | 18 | 23 => assert_eq!(letter, '-', "{key}"),
                14 => assert_eq!(letter, '8', "{key}"),
                19 => assert!("89ab".contains(letter), "{key}"),
                _ => assert!(matches!(letter, '0'..='9' | 'a'..='f'), "{key}"),
            }
        }
    }
}
