//! What an earlier release has stored is what this release reads.
//!
//! The fixtures were made once, from the documented layouts and not by this crate, and are never made
//! again: a release that cannot read them strands the records of the one before. Each holds fields with
//! their lengths in front, 32 bits, big endian. The rules are in DESIGN.md.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tower_idempotency::{DecodeError, Outcome};

#[test]
fn outcomes_of_version_1_are_read_as_they_were_meant() {
    let frames = fields(OUTCOMES);
    let expected = outcomes();
    assert_eq!(frames.len(), expected.len() + 1);
    for (frame, expected) in frames.iter().zip(expected) {
        let read = Outcome::decode(Bytes::from_static(frame)).unwrap();
        assert_eq!(read.status(), expected.status());
        assert_eq!(read.is_tombstone(), expected.is_tombstone());
        assert!(read.headers().eq(expected.headers()));
        assert!(read.trailers().eq(expected.trailers()));
        assert_eq!(read.body(), expected.body());
    }
    // Lines of one name apart from each other: a `HeaderMap` does not make such a frame, others may.
    let apart = Outcome::decode(Bytes::from_static(frames[frames.len() - 1])).unwrap();
    let lines = apart
        .headers()
        .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
    let expected =
        [("a", "1"), ("b", ""), ("a", "2")].map(|(name, value)| (name.to_owned(), value.into()));
    assert!(lines.eq(expected));
}

/// What it writes is what the release before can read, so that it can be rolled back.
#[test]
fn outcomes_are_written_in_version_1() {
    for (frame, outcome) in fields(OUTCOMES).iter().zip(outcomes()) {
        assert_eq!(&outcome.as_bytes()[..], *frame);
    }
}

#[test]
fn an_outcome_of_a_newer_version_is_refused_and_named() {
    for version in [0, 2, 3, 255] {
        for frame in fields(OUTCOMES) {
            let mut newer = frame.to_vec();
            newer[0] = version;
            let refused = Outcome::decode(newer.into());
            assert_eq!(refused, Err(DecodeError::UnknownVersion(version)));
        }
    }
}

#[cfg(all(feature = "encrypt", feature = "memory"))]
#[tokio::test]
async fn fields_that_were_sealed_in_version_1_are_opened() {
    use tower_idempotency::{
        ClaimRequest, Claimed, EncryptedStore, Fingerprint, IdempotencyKey, Keyring, MemoryStore,
        ScopedKey, State, Store,
    };

    let [outcome, correlation, checkpoint] = fields(SEALED)[..] else {
        panic!("three fields");
    };
    let key = IdempotencyKey::new("order-1").unwrap();
    let key = ScopedKey::new("http", "alice", &key);
    let inside = MemoryStore::new();
    let request = ClaimRequest::new(key.clone(), Fingerprint::of(&[]));
    let Claimed::Acquired { claim, .. } = inside.claim(&request).await.unwrap() else {
        panic!("a fresh key was not granted");
    };
    let hex: String = correlation
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let _ = inside.annotate(&claim, &hex).await.unwrap();
    let data = Bytes::from_static(checkpoint);
    let _ = inside.checkpoint(&claim, "charged", &data).await.unwrap();
    let sealed = Outcome::value(outcome);
    let _ = inside.complete(&claim, &sealed, None).await.unwrap();

    let master = std::array::from_fn(|n| n as u8);
    let store = EncryptedStore::new(inside, Keyring::new(2027, [0; 32]).old(2026, master));
    let record = store.lookup(&key).await.unwrap().unwrap();
    assert_eq!(record.notes.correlation.as_deref(), Some("pi_1"));
    assert_eq!(
        record.notes.checkpoint("charged").unwrap()[..],
        *b"\x00\xff"
    );
    assert!(matches!(record.state, State::Completed { outcome, .. } if outcome == outcomes()[0]));
}

/// The outcomes that the fixture holds.
fn outcomes() -> Vec<Outcome> {
    let status = |status| StatusCode::from_u16(status).unwrap();
    let json = map(&[
        ("content-type", b"application/json"),
        ("x-name", b"Z\xfcrich"),
        ("x-name", b""),
        ("link", b"<a>"),
        ("link", b"<b>"),
    ]);
    let grpc = map(&[
        ("content-type", b"application/grpc"),
        ("x-long", &[b'v'; 300]),
    ]);
    let trailers = map(&[("grpc-status", b"0"), ("grpc-message", b"")]);
    let none = HeaderMap::new();
    let every_byte: Vec<u8> = (0..=255).collect();
    vec![
        Outcome::response(status(201), &json, &[b"{\"paid\":true}"], None),
        Outcome::response(status(204), &none, &[], None),
        Outcome::response(status(200), &grpc, &[&every_byte], Some(&trailers)),
        Outcome::tombstone(status(202)),
        Outcome::value(b"{\"Ok\":100}"),
        Outcome::value(b""),
        Outcome::response(status(999), &none, &[&[b'x'; 20_000]], None),
    ]
}

fn map(lines: &[(&'static str, &[u8])]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        let value = HeaderValue::from_bytes(value).unwrap();
        map.append(HeaderName::from_static(name), value);
    }
    map
}

fn fields(mut fixture: &'static [u8]) -> Vec<&'static [u8]> {
    let mut fields = Vec::new();
    while let Some((length, rest)) = fixture.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        let (field, rest) = rest.split_at(length);
        fields.push(field);
        fixture = rest;
    }
    assert!(fixture.is_empty(), "a field is cut off");
    fields
}

const OUTCOMES: &[u8] = include_bytes!("fixtures/outcome_v1.bin");
#[cfg(all(feature = "encrypt", feature = "memory"))]
const SEALED: &[u8] = include_bytes!("fixtures/sealed_v1.bin");
