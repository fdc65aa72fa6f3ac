//! Rule 13, and what an operator sees and erases.

use super::*;

/// What was written is what is read, field for field.
pub async fn a_record_round_trips_every_field<H: Harness>(harness: &H) {
    let case = Case::new(harness, "a_record_round_trips_every_field");
    let mut bytes = [0; Fingerprint::LEN];
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = (n * 5) as u8 ^ 0x80;
    }
    let request = ClaimRequest {
        fingerprint: Fingerprint::from_bytes(bytes),
        owner: Owner::from_bytes([
            0, 255, 1, 254, 2, 253, 39, 92, 0, 0, 10, 13, 128, 127, 37, 42,
        ]),
        ..case.request("Schlüssel ✓")
    };
    let claim = case.acquire(&request).await;
    case.applied(case.annotate(&claim, "Gebühr ✓").await, "annotating");
    case.applied(
        case.checkpoint(&claim, "paid", b"\x00\xff").await,
        "checkpointing",
    );
    let started = case.record(&request.key).await;
    let outcome = response(201, b"\x00\xff");
    let completion = case.complete(&claim, &outcome, None).await;
    case.equal(completion, Completion::Recorded, "completing");
    let record = case.record(&request.key).await;
    case.equal(record.key.as_bytes(), request.key.as_bytes(), "the key");
    case.equal(record.fingerprint, request.fingerprint, "the fingerprint");
    case.equal(record.owner, request.owner, "the owner");
    case.equal(record.attempt, 1, "the attempt");
    let mut notes = Notes::default();
    notes.correlation = Some("Gebühr ✓".to_owned());
    notes.set_checkpoint("paid", Bytes::from_static(b"\x00\xff"));
    case.equal(&record.notes, &notes, "the notes");
    case.equal(record.created_at, started.created_at, "the creation");
    case.equal(record.expires_at, started.expires_at, "the expiry");
    case.equal(case.outcome(&record), &outcome, "the outcome");
    let State::Completed { completed_at, .. } = record.state else {
        case.broken("the record is not completed");
    };
    case.check(
        record.created_at <= completed_at && completed_at < record.expires_at,
        "creation, completion and expiry are not in this order",
    );
    let kept = record.expires_at.as_micros() - record.created_at.as_micros();
    case.check(
        Duration::from_micros(kept).abs_diff(request.retention) < HOUR,
        "the expiry is not the retention after the claim",
    );
}

/// Looking does not make a record.
pub async fn an_unknown_key_has_no_record<H: Harness>(harness: &H) {
    let case = Case::new(harness, "an_unknown_key_has_no_record");
    let key = case.key("key");
    case.equal(case.lookup(&key).await, None, "the record");
    case.check(
        !case.remove(&key).await,
        "something was removed where nothing was",
    );
    case.equal(case.lookup(&key).await, None, "the record");
}

/// Rule 13: nothing in a key means anything to the store.
pub async fn keys_are_literal<H: Harness>(harness: &H) {
    let case = Case::new(harness, "keys_are_literal");
    let long = "k".repeat(255);
    let longer = format!("{long}k");
    let names = [
        // Case, white space and normal forms are kept.
        "key",
        "KEY",
        " key",
        "key ",
        "key\n",
        "k\u{e9}y",
        "ke\u{301}y",
        "\u{1f511}",
        // SQL.
        "'",
        "''",
        "\"",
        "'; DROP TABLE records; --",
        "%",
        "_",
        "k%",
        "k_y",
        "\\",
        "\\'",
        "$1",
        "?",
        // Patterns, tags and protocols of key-value stores.
        "*",
        "k*",
        "[a-z]ey",
        "{key}",
        "{}key",
        "key:1",
        ":",
        "\r\nDEL key\r\n",
        "\0",
        "key\0",
        // Formats and markup.
        "%s",
        "{0}",
        "<b>key</b>",
        "&amp;",
        "../key",
        "null",
        "0",
        "-1",
        &long,
        &longer,
    ];
    let as_scope = |name: &str| ScopedKey::join("conformance", name, &format!("{:x}", case.run));
    let keys: Vec<_> = names
        .iter()
        .flat_map(|name| [case.key(name), as_scope(name)])
        .collect();
    for (n, key) in keys.iter().enumerate() {
        let request = ClaimRequest {
            key: key.clone(),
            ..case.request("key")
        };
        let claim = case.acquire(&request).await;
        case.equal(claim.attempt(), 1, &format!("the attempt of key {n}"));
        let outcome = response(200, &n.to_be_bytes());
        let completion = case.complete(&claim, &outcome, None).await;
        case.equal(completion, Completion::Recorded, "completing");
    }
    for (n, key) in keys.iter().enumerate() {
        let record = case.record(key).await;
        case.equal(record.key.as_bytes(), key.as_bytes(), "the key on record");
        let outcome = response(200, &n.to_be_bytes());
        case.equal(
            case.outcome(&record),
            &outcome,
            &format!("key {n}'s outcome"),
        );
    }
}

/// Rule 13: the three parts are told apart, wherever one ends and the next begins.
pub async fn scopes_do_not_collide<H: Harness>(harness: &H) {
    let case = Case::new(harness, "scopes_do_not_collide");
    let run = format!("{:016x}", case.run);
    let triples = [
        ("a", "bc", ""),
        ("ab", "c", ""),
        ("a", "b", "c"),
        ("abc", "", ""),
        ("", "abc", ""),
        ("", "", "abc"),
        ("a:b", "c", ""),
        ("a", "b:c", ""),
        ("a/b", "", "c"),
        ("a", "/b", "c"),
        ("alice", "", ""),
        ("", "alice", ""),
    ];
    for (namespace, scope, key) in triples {
        let request = ClaimRequest {
            key: ScopedKey::join(namespace, scope, &format!("{key}{run}")),
            ..case.request("key")
        };
        let claim = case.acquire(&request).await;
        case.equal(claim.attempt(), 1, "the attempt");
        let record = case.record(&request.key).await;
        case.equal(record.key.namespace(), namespace, "the namespace on record");
        case.equal(record.key.scope(), scope, "the scope on record");
    }
}

/// For an operator or a legal duty: afterwards the key was never seen.
pub async fn remove_erases_a_record_in_every_state<H: Harness>(harness: &H) {
    let case = Case::new(harness, "remove_erases_a_record_in_every_state");
    let live = case.started("live").await;
    let _ = case.stalled("abandoned").await;
    let _ = case.finished("completed").await;
    let _ = case.released("released").await;
    for name in ["live", "abandoned", "completed", "released"] {
        let key = case.key(name);
        case.check(case.remove(&key).await, "there was nothing to remove");
        case.equal(case.lookup(&key).await, None, "the removed record");
        case.check(!case.remove(&key).await, "it was there to remove again");
    }
    let late = case.complete(&live, &response(200, b""), None).await;
    case.equal(
        late,
        Completion::ClaimLost,
        "the completion of a removed claim",
    );
    for name in ["live", "abandoned", "completed", "released"] {
        let claim = case.started(name).await;
        case.equal(claim.attempt(), 1, "the attempt after a removal");
    }
}

/// Rule 13: the name of a key is no pattern, and scopes are apart.
pub async fn remove_erases_one_key_only<H: Harness>(harness: &H) {
    let case = Case::new(harness, "remove_erases_one_key_only");
    let names = ["*", "?", "%", "_", "a", "ab", "a*"];
    for name in names {
        let _ = case.started(name).await;
    }
    for (n, name) in names.iter().enumerate() {
        case.check(
            case.remove(&case.key(name)).await,
            "there was nothing to remove",
        );
        for left in &names[n + 1..] {
            case.record(&case.key(left)).await;
        }
    }
}
