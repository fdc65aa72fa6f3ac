//! What a layer enforces, as an API publishes it (draft section 2.5.2).

use std::time::Duration;

use http::{HeaderName, Method, StatusCode};
use serde_json::{Value, json};
use tower_idempotency::{
    Disposition, FingerprintRecipe, GrpcCode, Idempotency, IdempotencyLayer, InFlight, KeyFormat,
    KeySyntax, MemoryStore, MissingKey, OnAbandoned, OnOutage, PersonalData, Policy, ProblemKind,
    RetentionPolicy, Scope,
};

fn of(layer: &IdempotencyLayer<MemoryStore>) -> Value {
    serde_json::from_str(&layer.policy().to_json()).unwrap()
}

fn default_policy() -> Policy {
    IdempotencyLayer::new(MemoryStore::new()).policy()
}

#[test]
fn the_defaults_are_told_with_the_values_in_force() {
    let mut policy = of(&IdempotencyLayer::new(MemoryStore::new()));
    let problems = policy.as_object_mut().unwrap().remove("problems").unwrap();
    let left_out = policy
        .as_object_mut()
        .unwrap()
        .remove("headers_not_replayed");
    assert_eq!(
        policy,
        json!({
            "header": "Idempotency-Key",
            "syntax": "lenient",
            "key_min_bytes": 1,
            "key_max_bytes": 255,
            "key_format": "any",
            "personal_data_refused": false,
            "required": false,
            "methods": ["POST", "PATCH"],
            "scope": "by the caller's credentials",
            "fingerprint": ["method", "path", "query", "content-type", "body"],
            "retention_seconds": 86_400.0,
            "lease_seconds": 30.0,
            "kept": "standard",
            "released_statuses": released(),
            "grpc_released": ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL",
                              "UNAVAILABLE", "UNAUTHENTICATED"],
            "grpc_unknown": ["CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "DATA_LOSS"],
            "grpc_streaming": [],
            "max_request_bytes": 2 * 1024 * 1024,
            "max_response_bytes": 1024 * 1024,
            "in_flight": "reject",
            "wait_seconds": 0.0,
            "on_abandoned": "hold",
            "on_outage": "reject",
            "replay_marker": "Idempotency-Replayed",
            "error_header": "Idempotency-Error",
            "documentation": "https://docs.rs/tower-idempotency/latest/tower_idempotency/http/\
                              enum.ProblemKind.html",
        })
    );
    assert_eq!(problems.as_array().unwrap().len(), ProblemKind::ALL.len());
    let left_out = left_out.unwrap().to_string();
    for name in ["set-cookie", "access-control-*", "date", "www-authenticate"] {
        assert!(left_out.contains(name), "{name}");
    }
}

fn released() -> Vec<u16> {
    [401, 403, 407, 408, 425, 429]
        .into_iter()
        .chain(500..600)
        .collect()
}

#[test]
fn every_setting_is_told() {
    let engine = Idempotency::builder(MemoryStore::new())
        .retention(Duration::from_secs(7 * 86_400))
        .lease(Duration::from_millis(2_500))
        .on_abandoned(OnAbandoned::Rerun);
    let layer = IdempotencyLayer::builder(engine.build().unwrap())
        .header("x-request-key")
        .replay_marker("idempotent-replayed")
        .key_syntax(KeySyntax::Strict)
        .key_format(
            KeyFormat::new()
                .uuid()
                .min_len(36)
                .max_len(64)
                .personal_data(PersonalData::Reject),
        )
        .missing_key(MissingKey::Reject)
        .methods([Method::PUT])
        .scope(Scope::header(HeaderName::from_static("x-account")))
        .fingerprint(FingerprintRecipe::raw().except(["/at"]).unwrap())
        .retention(
            RetentionPolicy::from_fn("ours", |_| Disposition::Keep).grpc(|code| match code {
                GrpcCode::Ok => Disposition::KeepFor(Duration::from_secs(1)),
                GrpcCode::NotFound => Disposition::LeaveUnknown,
                _ => Disposition::Keep,
            }),
        )
        .grpc_streaming(["/shop.Orders/Watch"])
        .request_limit(10)
        .response_limit(20)
        .in_flight(InFlight::Wait(Duration::from_secs(3)))
        .on_outage(OnOutage::PassThrough)
        .never_store(HeaderName::from_static("x-node"))
        .also_store(http::header::SET_COOKIE)
        .documentation(Some("https://api.example.com/idempotency"))
        .problems(|problem| {
            if problem.kind == ProblemKind::KeyReused {
                problem.status = StatusCode::BAD_REQUEST;
                problem.grpc_status = GrpcCode::Aborted;
                problem.title = "Reused".into();
            }
        })
        .build()
        .unwrap();
    let policy = of(&layer);
    let left_out = policy["headers_not_replayed"].to_string();
    assert!(left_out.contains("x-node") && !left_out.contains("set-cookie"));
    for (member, expected) in [
        ("header", json!("X-Request-Key")),
        ("replay_marker", json!("Idempotent-Replayed")),
        ("syntax", json!("strict")),
        ("key_min_bytes", json!(36)),
        ("key_max_bytes", json!(64)),
        ("key_format", json!("uuid")),
        ("personal_data_refused", json!(true)),
        ("required", json!(true)),
        ("methods", json!(["PUT"])),
        ("scope", json!("one per authenticated caller")),
        ("retention_seconds", json!(604_800.0)),
        ("lease_seconds", json!(2.5)),
        ("on_abandoned", json!("rerun")),
        ("kept", json!("ours")),
        ("released_statuses", Value::Null),
        ("grpc_released", json!([])),
        ("grpc_unknown", json!(["NOT_FOUND"])),
        ("grpc_streaming", json!(["/shop.Orders/Watch"])),
        ("max_request_bytes", json!(10)),
        ("max_response_bytes", json!(20)),
        ("in_flight", json!("wait")),
        ("wait_seconds", json!(3.0)),
        ("on_outage", json!("pass-through")),
        (
            "documentation",
            json!("https://api.example.com/idempotency"),
        ),
    ] {
        assert_eq!(policy[member], expected, "{member}");
    }
    assert!(
        policy["fingerprint"]
            .to_string()
            .contains("json-except:/at")
    );
    let reused = json!({
        "status": 400,
        "grpc_status": "ABORTED",
        "code": "key_reused",
        "title": "Reused",
    });
    assert!(policy["problems"].as_array().unwrap().contains(&reused));
    let missing = policy["problems"][0]["title"].as_str().unwrap();
    assert_eq!(missing, "X-Request-Key is missing");
}

#[test]
fn each_preset_is_told_by_its_name_and_its_statuses() {
    for (preset, name, released) in [
        (RetentionPolicy::draft(), "draft", json!([])),
        (
            RetentionPolicy::stripe(),
            "stripe",
            json!([401, 403, 407, 409, 429]),
        ),
    ] {
        let layer = IdempotencyLayer::builder(MemoryStore::new()).retention(preset);
        let policy = of(&layer.build().unwrap());
        assert_eq!(policy["kept"], name);
        assert_eq!(policy["released_statuses"], released);
    }
}

#[test]
fn a_scope_for_everybody_is_told_as_such() {
    let layer = IdempotencyLayer::builder(MemoryStore::new()).scope(Scope::everybody());
    assert_eq!(
        of(&layer.build().unwrap())["scope"],
        "shared by all callers"
    );
}

#[test]
fn the_markdown_says_what_clients_must_know() {
    let text = default_policy().to_markdown();
    for part in [
        "## Idempotency\n",
        "methods POST, PATCH may carry the header `Idempotency-Key`",
        "1 to 255 bytes",
        "86400 seconds",
        "every response but 401, 403, 407–408, 425, 429, 500–599",
        "`Idempotency-Replayed: true`",
        "| 422 | `key_reused` | Idempotency-Key was used for another request |",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
    for kind in ProblemKind::ALL {
        let row = format!("| {} | `{}` |", kind.status().as_u16(), kind.code());
        assert!(text.contains(&row), "{row}");
    }
}

#[test]
fn a_required_key_is_one_that_must_be_sent() {
    let layer = IdempotencyLayer::builder(MemoryStore::new()).missing_key(MissingKey::Reject);
    let text = layer.build().unwrap().policy().to_markdown();
    assert!(text.contains("must carry"), "{text}");
}

#[test]
fn every_table_of_the_markdown_is_whole() {
    let text = default_policy().to_markdown();
    for table in text.split("\n\n").filter(|part| part.starts_with('|')) {
        let columns = |line: &str| line.matches('|').count();
        let mut lines = table.trim_end().lines();
        let expected = columns(lines.next().unwrap());
        for line in lines {
            assert_eq!(columns(line), expected, "{line}");
        }
    }
}
