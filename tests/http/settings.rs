//! Settings that cannot work are refused when the layer is built, by their names.

use std::time::Duration;

use http::Method;
use tower_idempotency::{
    ConfigError, FingerprintRecipe, Idempotency, IdempotencyBuilder, IdempotencyLayer,
    IdempotencyLayerBuilder, InFlight, KeyFormat, MemoryStore,
};

const SECOND: Duration = Duration::from_secs(1);

type Engine = IdempotencyBuilder<MemoryStore>;
type Layer = IdempotencyLayerBuilder<MemoryStore>;

fn engine(set: impl FnOnce(Engine) -> Engine) -> Result<(), ConfigError> {
    set(Idempotency::builder(MemoryStore::new()))
        .build()
        .map(drop)
}

fn layer(set: impl FnOnce(Layer) -> Layer) -> Result<(), ConfigError> {
    let layer = IdempotencyLayer::builder(MemoryStore::new());
    set(layer).build().map(drop)
}

#[track_caller]
fn assert_refused(built: Result<(), ConfigError>, setting: &str) {
    let error = built.expect_err("refused");
    assert_eq!(error.setting(), setting, "{error}");
    // The line to change is found by searching for the name.
    assert!(
        error.to_string().contains(&format!("`{setting}`")),
        "{error}"
    );
}

#[test]
fn the_defaults_are_sound() {
    assert_eq!(engine(|e| e), Ok(()));
    assert_eq!(layer(|l| l), Ok(()));
}

#[test]
fn durations_are_longer_than_zero_and_overflow_no_clock() {
    for wrong in [Duration::ZERO, Duration::MAX] {
        assert_refused(engine(|e| e.lease(wrong)), "lease");
        assert_refused(engine(|e| e.retention(wrong)), "retention");
        assert_refused(engine(|e| e.attempt_limit(wrong)), "attempt_limit");
        assert_refused(engine(|e| e.store_timeout(wrong)), "store_timeout");
        assert_refused(engine(|e| e.complete_wait(wrong)), "complete_wait");
        assert_refused(engine(|e| e.drain_limit(wrong)), "drain_limit");
        assert_refused(layer(|l| l.in_flight(InFlight::Wait(wrong))), "in_flight");
        assert_refused(layer(|l| l.retry_after(wrong)), "retry_after");
    }
    assert_refused(engine(|e| e.lease(Duration::from_micros(999))), "lease");
}

#[test]
fn a_record_outlives_its_claim() {
    for lease in [60, 61] {
        let built = engine(|e| e.lease(lease * SECOND).retention(60 * SECOND));
        let text = built.as_ref().unwrap_err().to_string();
        assert!(text.contains("`retention`"), "{text}");
        assert_refused(built, "lease");
    }
    assert_eq!(
        engine(|e| e.lease(59 * SECOND).retention(60 * SECOND)),
        Ok(())
    );
}

#[test]
fn an_attempt_may_last_as_long_as_its_lease_at_least() {
    let built = engine(|e| e.lease(30 * SECOND).attempt_limit(29 * SECOND));
    assert_refused(built, "attempt_limit");
    assert_eq!(
        engine(|e| e.lease(30 * SECOND).attempt_limit(30 * SECOND)),
        Ok(())
    );
}

#[test]
fn one_attempt_at_least_may_go_on_without_its_client() {
    assert_refused(engine(|e| e.detached_limit(0)), "detached_limit");
    assert_eq!(engine(|e| e.detached_limit(1)), Ok(()));
}

#[test]
fn a_secret_cannot_be_guessed() {
    for secret in [&b""[..], b"0123456789abcde"] {
        assert_refused(engine(|e| e.secret(secret)), "secret");
    }
    assert_eq!(engine(|e| e.secret(*b"0123456789abcdef")), Ok(()));
}

#[test]
fn the_names_of_headers_are_names() {
    for wrong in ["", " ", "a b", "käse", "a:b", "x\n"] {
        assert_refused(layer(|l| l.header(wrong)), "header");
        assert_refused(layer(|l| l.replay_marker(wrong)), "replay_marker");
    }
}

#[test]
fn some_method_is_guarded_and_none_without_a_response_to_keep() {
    assert_refused(layer(|l| l.methods([])), "methods");
    assert_refused(layer(|l| l.methods([Method::CONNECT])), "methods");
    // A preflight carries no key, and every one would be refused.
    assert_refused(
        layer(|l| l.methods([Method::POST, Method::OPTIONS])),
        "methods",
    );
}

#[test]
fn live_types_are_types() {
    for wrong in ["", "  ", "text/event-stream; charset=utf-8"] {
        assert_refused(
            layer(|l| l.live_types(["text/event-stream", wrong])),
            "live_types",
        );
    }
    assert_eq!(layer(|l| l.live_types([""; 0])), Ok(()));
}

#[test]
fn the_documentation_is_a_url_that_a_header_can_carry() {
    for wrong in [
        "",
        "a b",
        "https://a/>; rel=x",
        "https://ä",
        "https://a\r\n",
    ] {
        assert_refused(layer(|l| l.documentation(Some(wrong))), "documentation");
    }
    assert_eq!(layer(|l| l.documentation(None)), Ok(()));
}

#[test]
fn formats_that_no_key_can_meet_are_refused_with_the_layer() {
    for (format, setting) in [
        (KeyFormat::new().min_len(0), "KeyFormat::min_len"),
        (KeyFormat::new().max_len(0), "KeyFormat::max_len"),
        (KeyFormat::new().max_len(usize::MAX), "KeyFormat::max_len"),
        (KeyFormat::new().min_len(9).max_len(8), "KeyFormat::min_len"),
        (KeyFormat::new().uuid().max_len(35), "KeyFormat::uuid"),
    ] {
        assert_refused(layer(|l| l.key_format(format)), setting);
    }
}

#[test]
fn pointers_that_leave_nothing_are_refused() {
    let no_pointers: [&str; 0] = [];
    let recipe = FingerprintRecipe::raw;
    for built in [
        recipe().only(no_pointers),
        recipe().only(["amount"]),
        recipe().only(["/a/*"]),
    ] {
        assert_refused(built.map(drop), "FingerprintRecipe::only");
    }
    for built in [
        recipe().except([""]),
        recipe().only(["/a/b"]).unwrap().except(["/a"]),
    ] {
        assert_refused(built.map(drop), "FingerprintRecipe::except");
    }
}

#[test]
fn debug_forms_show_settings_and_no_secret() {
    let engine = Idempotency::builder(MemoryStore::new()).secret(*b"canary-canary-canary");
    let shown = format!("{engine:?}");
    let layer = IdempotencyLayer::new(engine.build().unwrap());
    let shown = format!("{shown} {layer:?}");
    assert!(
        shown.contains("lease") && shown.contains("idempotency-key"),
        "{shown}"
    );
    let bytes = format!("{:?}", b"canary");
    let bytes = bytes.trim_matches(['[', ']']);
    assert!(
        !shown.contains("canary") && !shown.contains(bytes),
        "{shown}"
    );
}
