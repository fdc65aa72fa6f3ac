//! What the engine makes of what the store shows it.

use std::time::Duration;

use tokio::time::{Instant, advance, sleep};
use tower_idempotency::testing::Move;
use tower_idempotency::{
    Admission, Fingerprint, Idempotency, IdempotencyBuilder, MemoryStore, Settled, State, Store,
};

use crate::engine::*;

/// A fingerprint whose first three parts are told apart by one byte each.
fn parts(recipe: u8, request: u8, caller: u8) -> Fingerprint {
    let mut bytes = [0; Fingerprint::LEN];
    (bytes[0], bytes[4], bytes[36]) = (recipe, request, caller);
    Fingerprint::from_bytes(bytes)
}

#[tokio::test(start_paused = true)]
async fn the_first_request_gets_the_attempt() {
    let engine = engine();
    let attempt = begin(&engine).await;
    assert_eq!(attempt.attempt().number(), 1);
    assert_eq!(attempt.attempt().key(), &key("k"));
    assert_eq!(attempt.attempt().idempotency_key().as_str(), "k");
    assert!(!attempt.attempt().is_claim_lost());
}

#[tokio::test(start_paused = true)]
async fn a_repetition_gets_the_kept_outcome_and_when_it_was_kept() {
    let engine = engine();
    let attempt = begin(&engine).await;
    assert_eq!(attempt.complete(outcome("1")).await, Settled::Recorded);
    let Some(State::Completed { completed_at, .. }) = record(&engine).await.map(|it| it.state)
    else {
        panic!("not completed");
    };
    advance(Duration::from_secs(3600)).await;
    let Admission::Replay(replay) = admit(&engine).await else {
        panic!("not a replay");
    };
    assert_eq!(replay.outcome, outcome("1"));
    assert_eq!(replay.completed_at, completed_at.to_system_time());
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_worked_on_is_in_flight_with_what_is_left_of_the_lease() {
    let engine = engine();
    let _attempt = begin(&engine).await;
    advance(Duration::from_secs(4)).await;
    assert_eq!(lease_left(&admit(&engine).await), LEASE - 4 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn another_request_is_a_mismatch_whatever_became_of_the_first() {
    for on_abandoned in [engine, rerunning_engine] {
        let engine = on_abandoned();
        let attempt = begin(&engine).await;
        let other = async || engine.admit(&key("k"), request("other")).await.unwrap();
        let is_mismatch = |admission| {
            matches!(
                admission,
                Admission::Mismatch {
                    caller_changed: false
                }
            )
        };
        assert!(is_mismatch(other().await), "while the first is in flight");
        let _ = attempt.abandon().await;
        assert!(is_mismatch(other().await), "when the first is abandoned");
        engine.store().remove(&key("k")).await.unwrap();
        let _ = begin(&engine).await.complete(outcome("1")).await;
        assert!(is_mismatch(other().await), "when the first is kept");
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_request_with_other_credentials_is_told_apart() {
    let engine = engine();
    let admit = async |caller| engine.admit(&key("k"), parts(1, 1, caller)).await.unwrap();
    let attempt = first(admit(1).await);
    let is_other_caller = |admission| {
        matches!(
            admission,
            Admission::Mismatch {
                caller_changed: true
            }
        )
    };
    assert!(is_other_caller(admit(2).await));
    let _ = attempt.complete(outcome("1")).await;
    assert!(is_other_caller(admit(2).await));
    assert_eq!(replayed(admit(1).await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn a_record_of_other_settings_is_taken_for_the_same_request() {
    let engine = rerunning_engine();
    let deployed = async || engine.admit(&key("k"), parts(2, 9, 0)).await.unwrap();
    let attempt = first(engine.admit(&key("k"), parts(1, 1, 0)).await.unwrap());
    assert_eq!(lease_left(&deployed().await), LEASE);
    let _ = attempt.complete(outcome("1")).await;
    assert_eq!(replayed(deployed().await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn another_caller_is_told_apart_also_after_a_change_of_settings() {
    let engine = engine();
    let admit = async |recipe, caller| {
        let fingerprint = parts(recipe, recipe, caller);
        engine.admit(&key("k"), fingerprint).await.unwrap()
    };
    let settled = first(admit(1, 1).await).complete(outcome("1")).await;
    assert_eq!(settled, Settled::Recorded);
    // Nobody's credentials are somebody's too.
    for other in [0, 2] {
        let admission = admit(2, other).await;
        assert!(
            matches!(
                admission,
                Admission::Mismatch {
                    caller_changed: true
                }
            ),
            "{admission:?}"
        );
    }
    assert_eq!(replayed(admit(2, 1).await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_record_of_other_settings_is_never_run_again() {
    let engine = rerunning_engine();
    let attempt = first(engine.admit(&key("k"), parts(1, 1, 0)).await.unwrap());
    let _ = attempt.abandon().await;
    // Nobody can tell whether it asks for the same work.
    assert_unknown(&engine.admit(&key("k"), parts(2, 1, 0)).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_key_stays_unknown() {
    let engine = engine();
    let _ = begin(&engine).await.abandon().await;
    for _ in 0..3 {
        assert_unknown(&admit(&engine).await);
        advance(10 * LEASE).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_key_is_run_again_with_its_notes_where_that_is_allowed() {
    let engine = rerunning_engine();
    let attempt = begin(&engine).await;
    let handler = attempt.attempt();
    handler.annotate("charge-1").await.unwrap();
    handler.checkpoint("charged", b"ch_1").await.unwrap();
    let _ = attempt.abandon().await;

    let again = begin(&engine).await;
    assert_eq!(again.attempt().number(), 2);
    assert_eq!(
        again.attempt().finished("charged").as_deref(),
        Some(&b"ch_1"[..])
    );
    assert_eq!(again.attempt().finished("shipped"), None);
    assert_eq!(again.attempt().correlation().as_deref(), Some("charge-1"));
}

#[tokio::test(start_paused = true)]
async fn a_released_key_begins_afresh() {
    let engine = engine();
    let attempt = begin(&engine).await;
    attempt.attempt().checkpoint("charged", b"").await.unwrap();
    assert_eq!(attempt.release().await, Settled::Recorded);
    let other = engine.admit(&key("k"), request("other")).await.unwrap();
    let again = first(other);
    assert_eq!(again.attempt().number(), 2);
    assert_eq!(again.attempt().finished("charged"), None);
}

#[tokio::test(start_paused = true)]
async fn a_kept_outcome_is_forgotten_after_its_retention() {
    let engine = engine_with(|settings| settings.retention(3600 * SECOND));
    let _ = begin(&engine).await.complete(outcome("1")).await;
    advance(3599 * SECOND).await;
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
    advance(SECOND).await;
    let _ = begin(&engine).await;
}

#[tokio::test(start_paused = true)]
async fn of_many_callers_one_is_the_first() {
    let engine = engine();
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let engine = engine.clone();
        callers.spawn(async move { admit(&engine).await });
    }
    let mut admissions = callers.join_all().await;
    admissions.retain(|admission| matches!(admission, Admission::First(_)));
    assert_eq!(admissions.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_goes_on_as_soon_as_the_outcome_stands() {
    let engine = engine();
    let attempt = begin(&engine).await;
    let Admission::InFlight(holder) = admit(&engine).await else {
        panic!("not in flight");
    };
    let started = Instant::now();
    let settling = async {
        sleep(2 * SECOND).await;
        attempt.complete(outcome("1")).await
    };
    let key = key("k");
    let waiting = engine.wait(&key, &holder, Duration::MAX);
    let (settled, waited) = tokio::join!(settling, waiting);
    waited.unwrap();
    assert_eq!(settled, Settled::Recorded);
    assert_eq!(started.elapsed(), 2 * SECOND);
    assert_eq!(replayed(admit(&engine).await), outcome("1"));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gives_up_at_its_limit() {
    let engine = engine();
    let _attempt = begin(&engine).await;
    let Admission::InFlight(holder) = admit(&engine).await else {
        panic!("not in flight");
    };
    let started = Instant::now();
    engine.wait(&key("k"), &holder, 4 * SECOND).await.unwrap();
    assert!(started.elapsed() - 4 * SECOND < Duration::from_millis(2));
    assert!(lease_left(&admit(&engine).await) > Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_asked_for_once_when_the_store_answers() {
    let engine = engine();
    let _ = begin(&engine).await.complete(outcome("1")).await;
    let _ = admit(&engine).await;
    assert_eq!(engine.store().calls(Move::Claim), 2);
    assert_eq!(engine.store().calls(Move::Complete), 1);
    assert_eq!(engine.store().calls(Move::Lookup), 0);
    assert_eq!(engine.store().calls(Move::Release), 0);
}

#[cfg(feature = "tracing")]
#[tokio::test(start_paused = true)]
async fn a_purge_reports_what_nobody_resolved() {
    let engine = engine_with(|settings| settings.retention(3600 * SECOND));
    let _ = begin(&engine).await.abandon().await;
    let done = engine.admit(&key("done"), request("r")).await.unwrap();
    let _ = first(done).complete(outcome("1")).await;
    let events = crate::events::Events::listen();

    let purged = engine.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (0, 0));
    assert_eq!(events.errors(), [""; 0], "nothing is expired yet");

    advance(3600 * SECOND).await;
    let purged = engine.purge(10).await.unwrap();
    assert_eq!((purged.removed, purged.unresolved), (2, 1));
    assert_eq!(
        events.errors(),
        ["records with an unknown outcome expired unresolved"]
    );
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    type Change = fn(IdempotencyBuilder<MemoryStore>) -> IdempotencyBuilder<MemoryStore>;
    let century = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    assert!(
        Idempotency::builder(MemoryStore::new())
            .lease(Duration::from_millis(1))
            .attempt_limit(century)
            .retention(century)
            .store_timeout(century)
            .complete_wait(century)
            .drain_limit(century)
            .claim_retries(u32::MAX)
            .build()
            .is_ok()
    );
    let refused: [(&str, Change); 16] = [
        ("lease", |it| it.lease(Duration::ZERO)),
        ("lease", |it| it.lease(Duration::from_nanos(999_999))),
        ("lease", |it| it.lease(Duration::MAX)),
        ("lease", |it| it.lease(LEASE).retention(LEASE)),
        ("retention", |it| it.retention(Duration::ZERO)),
        ("retention", |it| it.retention(Duration::MAX)),
        ("attempt_limit", |it| {
            it.attempt_limit(LEASE - Duration::from_nanos(1))
        }),
        ("attempt_limit", |it| it.attempt_limit(Duration::MAX)),
        ("store_timeout", |it| it.store_timeout(Duration::ZERO)),
        ("store_timeout", |it| it.store_timeout(Duration::MAX)),
        ("complete_wait", |it| it.complete_wait(Duration::ZERO)),
        ("complete_wait", |it| it.complete_wait(Duration::MAX)),
        ("drain_limit", |it| it.drain_limit(Duration::ZERO)),
        ("drain_limit", |it| it.drain_limit(Duration::MAX)),
        ("detached_limit", |it| it.detached_limit(0)),
        ("secret", |it| it.secret(*b"fifteen bytes..")),
    ];
    for (setting, change) in refused {
        let error = change(Idempotency::builder(MemoryStore::new())).build();
        assert_eq!(error.unwrap_err().setting(), setting);
    }
}
