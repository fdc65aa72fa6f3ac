//! Outcomes that were kept and should not have been, and the other way round.

use axum::Extension;
use axum::response::IntoResponse;
use http::StatusCode;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, OnOutage, ProblemKind, RetentionOverride, RetentionPolicy,
};

use crate::app::{App, Call, paid, pay};

async fn check_code(call: Call, word: Option<RetentionOverride>) -> axum::response::Response {
    match (call.body.as_ref(), word) {
        (b"1234", _) => StatusCode::OK.into_response(),
        (_, Some(word)) => (StatusCode::BAD_REQUEST, Extension(word)).into_response(),
        (_, None) => StatusCode::BAD_REQUEST.into_response(),
    }
}

/// A wrong one-time code was kept as 400, and the right one with the same key got it again.
/// <https://github.com/KanishJebaMathewM/Truxify/issues/2869>
#[tokio::test]
async fn a_corrected_request_is_told_to_use_a_new_key_or_runs_with_the_same() {
    let kept = App::new(|call| check_code(call, None));
    assert_eq!(kept.send(pay("k").body("0000")).await.status, 400);
    let told = kept.send(pay("k").body("1234")).await;
    told.assert_problem(ProblemKind::KeyReused);
    assert!(told.text().contains("new key"), "{}", told.text());

    let freed = App::new(|call| check_code(call, Some(RetentionOverride::NotExecuted)));
    assert_eq!(freed.send(pay("k").body("0000")).await.status, 400);
    assert_eq!(freed.send(pay("k").body("1234")).await.status, 200);
}

/// A transient 500 was pinned for a day.
/// <https://github.com/C-Address-Onboarding-Bridge/C-Address-Onboarding-Bridge-Backend/issues/380>
#[tokio::test]
async fn a_transient_failure_is_not_pinned_unless_it_is_set() {
    for (policy, runs) in [
        (RetentionPolicy::standard(), 2),
        (RetentionPolicy::stripe(), 1),
    ] {
        let app = App::with(
            |s| s.retention(policy),
            |_| async { StatusCode::INTERNAL_SERVER_ERROR },
        );
        app.send(pay("k")).await;
        app.send(pay("k")).await;
        assert_eq!(app.runs(), runs);
    }
}

/// Some want a 503 when idempotency cannot be honoured, others want it to fail open.
/// <https://github.com/novuhq/novu/pull/4531>
#[tokio::test(start_paused = true)]
async fn without_a_store_it_is_closed_or_open_as_it_is_set_and_open_says_so() {
    for (on_outage, status, unprotected) in [
        (OnOutage::Reject, StatusCode::SERVICE_UNAVAILABLE, ""),
        (OnOutage::PassThrough, StatusCode::CREATED, "true"),
    ] {
        let full = MemoryStore::new().max_entries(0);
        let layer = IdempotencyLayer::builder(full).on_outage(on_outage);
        let app = App::behind(&layer.build().unwrap(), paid);
        let answer = app.send(pay("k")).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("idempotency-unprotected"), unprotected);
    }
}
