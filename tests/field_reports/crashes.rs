//! Crashes, timeouts, leases and clients that left.

use std::panic::AssertUnwindSafe;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use tokio::time::sleep;
use tower::BoxError;
use tower_idempotency::{
    Claim, ClaimRequest, Claimed, Completion, Fenced, Fingerprint, FingerprintRecipe, Idempotency,
    IdempotencyKey, IdempotencyLayer, MemoryStore, OnAbandoned, Outcome, ProblemKind, Record,
    RequestBody, Scope, ScopedKey, State, Store,
};

use crate::app::{App, Gate, broken, data, paid, pay, steps};

const SECOND: Duration = Duration::from_secs(1);

/// An app with one scope for everybody, so that a fingerprint can be made outside of it.
fn app(on_abandoned: OnAbandoned) -> App {
    App::with_engine(
        |engine| engine.on_abandoned(on_abandoned),
        |s| s.scope(Scope::everybody()),
        paid,
    )
}

/// Claims the key of `pay("k")` as a process does that then dies: nobody renews it.
async fn claim_and_die(store: &MemoryStore, on_abandoned: OnAbandoned) -> Claim {
    let request: Request<Body> = pay("k").into();
    let request = request.map(|_| Bytes::from("100 THB"));
    let fingerprint = FingerprintRecipe::raw().fingerprint(&request);
    let key = ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap());
    let mut claim = ClaimRequest::new(key, fingerprint);
    claim.on_abandoned = on_abandoned;
    let Claimed::Acquired { claim, .. } = store.claim(&claim).await.unwrap() else {
        panic!("the key is taken");
    };
    claim
}

/// A timeout left the key in progress, and all retries failed until its expiry.
/// <https://github.com/aws-powertools/powertools-lambda-python/issues/1038>,
/// <https://github.com/ikyriak/IdempotentAPI/issues/37>
#[tokio::test(start_paused = true)]
async fn a_dead_process_blocks_its_key_for_one_lease() {
    let app = app(OnAbandoned::Rerun);
    let _ = claim_and_die(app.store(), OnAbandoned::Rerun).await;
    sleep(29 * SECOND).await;
    let refused = app.send(pay("k")).await;
    refused.assert_problem(ProblemKind::InProgress);
    assert_eq!(
        refused.header("retry-after"),
        "1",
        "what is left of the lease"
    );
    sleep(SECOND).await;
    let first = app.send(pay("k")).await;
    assert_eq!(first.text(), "run 1");
    app.send(pay("k")).await.assert_replays(&first);
}

/// After a timeout the lease ended and a withdrawal was made again; its owner wants it to stay closed.
/// <https://github.com/aws-powertools/powertools-lambda-python/issues/8049>
#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_stays_closed_unless_it_is_set_to_run_again() {
    let app = app(OnAbandoned::Hold);
    let _ = claim_and_die(app.store(), OnAbandoned::Hold).await;
    for _ in 0..3 {
        sleep(3_600 * SECOND).await;
        let refused = app.send(pay("k")).await;
        refused.assert_problem(ProblemKind::OutcomeUnknown);
    }
    assert_eq!(app.runs(), 0);
}

/// A crash, an escaped rejection or a response on another path left the key locked for three days.
/// <https://github.com/VilledeMontreal/express-idempotency/issues/32>,
/// <https://github.com/square1-io/laravel-idempotency> (lock not released on errors)
mod no_way_out_leaves_a_key_locked {
    use super::*;

    async fn assert_settled(app: &App) {
        assert!(app.idempotency.drain().await);
        let record = app.record("k").await.unwrap();
        let settled = match record.state {
            State::Completed { .. } | State::Released => true,
            State::Started { .. } => record.is_abandoned(),
            _ => false,
        };
        assert!(settled, "{record:?}");
    }

    #[tokio::test]
    async fn a_panic() {
        let app = App::new(|_| async { panic!("out of cheese") as () });
        let _ = AssertUnwindSafe(app.call(pay("k"))).catch_unwind().await;
        assert_settled(&app).await;
    }

    #[tokio::test]
    async fn an_error_of_the_inner_service() {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let fails = |_: Request<RequestBody<Body>>| async {
            Err::<Response<Body>, _>(BoxError::from("no"))
        };
        let app = App::around(&layer, tower::service_fn(fails));
        assert!(app.call(pay("k")).await.is_err());
        assert_settled(&app).await;
    }

    #[tokio::test]
    async fn a_task_that_was_aborted() {
        let gate = Gate::new();
        let held = gate.clone();
        let app = App::new(move |call| {
            let held = held.clone();
            async move {
                held.pass().await;
                paid(call).await
            }
        });
        let task = tokio::spawn(app.call(pay("k")));
        gate.entered().await;
        task.abort();
        assert!(task.await.is_err());
        gate.open();
        assert_settled(&app).await;
        assert!(app.send(pay("k")).await.is_replay());
    }

    #[tokio::test]
    async fn a_body_that_fails() {
        let app = App::new(|_| async { steps([data("1"), broken()]) });
        drop(app.call(pay("k")).await.unwrap());
        assert_settled(&app).await;
    }

    #[tokio::test]
    async fn an_empty_body() {
        let app = App::new(|_| async { StatusCode::NO_CONTENT });
        app.send(pay("k")).await;
        assert_settled(&app).await;
    }

    #[tokio::test]
    async fn an_upgrade() {
        let app = App::new(|_| async { StatusCode::SWITCHING_PROTOCOLS });
        app.send(pay("k")).await;
        assert_settled(&app).await;
    }

    #[tokio::test]
    async fn a_service_that_never_became_ready() {
        #[derive(Clone)]
        struct Broken;
        impl tower::Service<Request<RequestBody<Body>>> for Broken {
            type Response = Response<Body>;
            type Error = BoxError;
            type Future = std::future::Ready<Result<Response<Body>, BoxError>>;
            fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), BoxError>> {
                Poll::Ready(Err("not ready".into()))
            }
            fn call(&mut self, _: Request<RequestBody<Body>>) -> Self::Future {
                unreachable!("not ready")
            }
        }
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let app = App::around(&layer, Broken);
        assert!(app.call(pay("k")).await.is_err());
        assert!(app.store().is_empty());
    }
}

/// One duration served as lease and as retention.
/// <https://github.com/fullstackhero/dotnet-starter-kit/pull/1333>
#[test]
fn a_lease_as_long_as_the_retention_is_refused() {
    let engine = Idempotency::builder(MemoryStore::new());
    let day = Duration::from_secs(86_400);
    let error = engine.lease(day).retention(day).build().unwrap_err();
    assert_eq!(error.setting(), "lease");
}

/// The client left, the write of the record was cancelled with its request, the retry did it again.
/// <https://github.com/caura-ai/caura/pull/1629>
#[cfg(feature = "testing")]
#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_while_the_outcome_is_recorded_finds_it_recorded() {
    use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};

    let store = FaultyStore::new(MemoryStore::new());
    store.inject(Move::Complete, Calls::Every, Fault::Delay(SECOND));
    let app = App::behind(&IdempotencyLayer::new(store.clone()), paid);
    // The handler has returned; the client leaves half-way through the recording.
    let left = tokio::time::timeout(SECOND / 2, app.call(pay("k"))).await;
    assert!(left.is_err());
    assert_eq!((app.runs(), store.calls(Move::Complete)), (1, 1));

    assert!(app.idempotency.drain().await);
    let retry = app.send(pay("k")).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "run 1");
}

/// The handler had committed when its next step was cancelled by the client's leaving.
/// <https://github.com/fullstackhero/dotnet-starter-kit/pull/1333>
#[tokio::test(start_paused = true)]
async fn a_handler_that_has_committed_reaches_its_end_without_its_client() {
    let app = App::new(|call| async move {
        // The charge is made; what follows must not get lost.
        sleep(SECOND / 5).await;
        paid(call).await
    });
    let left = tokio::time::timeout(SECOND / 20, app.call(pay("k"))).await;
    assert!(left.is_err());
    // A shutdown waits for it.
    assert!(app.idempotency.drain().await);
    let retry = app.send(pay("k")).await;
    assert_eq!(
        (retry.status, retry.is_replay()),
        (StatusCode::CREATED, true)
    );
    assert_eq!(app.runs(), 1);
}

/// Recording the outcome failed, was taken for a failure of the handler, and freed the key.
/// `CHANGELOG.md` 0.1.3 of <https://github.com/nestarc/idempotency>; `middleware/idempotency` of
/// <https://github.com/gofiber/fiber>
#[cfg(feature = "testing")]
mod an_outcome_that_cannot_be_recorded {
    use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};

    use super::*;

    fn app(completions: Calls, go_wrong: Fault) -> App<FaultyStore<MemoryStore>> {
        let store = FaultyStore::new(MemoryStore::new());
        store.inject(Move::Complete, completions, go_wrong);
        App::behind(&IdempotencyLayer::new(store), paid)
    }

    #[tokio::test(start_paused = true)]
    async fn is_tried_again_and_the_client_sees_nothing_of_it() {
        for fault in [Fault::Fail, Fault::LoseReply] {
            let app = app(Calls::Nth(1), fault);
            let first = app.send(pay("k")).await;
            assert_eq!(first.status, StatusCode::CREATED);
            assert!(!first.headers.contains_key("idempotency-result"));
            app.send(pay("k")).await.assert_replays(&first);
            assert_eq!(app.runs(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn never_frees_the_key() {
        let app = app(Calls::Every, Fault::Fail);
        let first = app.send(pay("k")).await;
        // The client gets its answer all the same, and is told.
        assert_eq!(first.status, StatusCode::CREATED);
        assert_eq!(first.header("idempotency-result"), "not-saved");
        sleep(120 * SECOND).await;
        let retry = app.send(pay("k")).await;
        retry.assert_problem(ProblemKind::OutcomeUnknown);
        assert_eq!(app.runs(), 1);
    }
}

/// The heartbeat of a stale worker extended, its release stripped, and its result overwrote what its
/// replacement had. <https://github.com/aegra/aegra/pull/547>
#[tokio::test(start_paused = true)]
async fn a_worker_that_was_replaced_can_neither_renew_nor_release_nor_complete() {
    let app = app(OnAbandoned::Rerun);
    let stale = claim_and_die(app.store(), OnAbandoned::Rerun).await;
    sleep(30 * SECOND).await;
    let standing = app.send(pay("k")).await;
    assert_eq!(standing.text(), "run 1");
    let before: Record = app.record("k").await.unwrap();

    let store = app.store();
    assert_eq!(
        store.renew(&stale, SECOND).await.unwrap(),
        Fenced::ClaimLost
    );
    assert_eq!(store.release(&stale).await.unwrap(), Fenced::ClaimLost);
    assert_eq!(store.abandon(&stale).await.unwrap(), Fenced::ClaimLost);
    let late = Outcome::value(b"late");
    let completed = store.complete(&stale, &late, None).await.unwrap();
    assert!(matches!(completed, Completion::Standing(outcome) if outcome != late));
    assert_eq!(app.record("k").await.unwrap(), before);
    app.send(pay("k")).await.assert_replays(&standing);
}

/// Workers did not learn that their lease was lost.
/// <https://github.com/pikkujs/pikku/issues/1742>, <https://github.com/Altinn/altinn-studio/pull/18507>
#[tokio::test(start_paused = true)]
async fn a_handler_learns_that_its_claim_was_lost() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |call| {
        let held = held.clone();
        async move {
            let attempt = call.attempt().unwrap();
            assert!(!attempt.is_claim_lost());
            held.pass().await;
            attempt.claim_lost().await;
            assert!(attempt.is_claim_lost());
            assert!(attempt.checkpoint("late", b"").await.is_err());
            StatusCode::CREATED
        }
    });
    let erase = async {
        gate.entered().await;
        let key = ScopedKey::new("http", "", &IdempotencyKey::new("k").unwrap());
        assert!(app.store().remove(&key).await.unwrap());
        gate.open();
    };
    let (answer, ()) = tokio::join!(app.send(pay("k")), erase);
    assert_eq!(answer.status, StatusCode::CREATED);
    assert_eq!(answer.header("idempotency-result"), "claim-lost");
}

/// The store removed the row under a slow handler, and its response was dropped without a word.
/// <https://github.com/adzubla/blocks-idempotency> (`docs/issues/032`)
#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_three_leases_is_recorded() {
    let app = App::new(|call| async move {
        sleep(90 * SECOND).await;
        paid(call).await
    });
    let first = app.send(pay("k")).await;
    assert!(!first.headers.contains_key("idempotency-result"));
    app.send(pay("k")).await.assert_replays(&first);
}

/// What was left of a time was zero, and zero meant "not set".
/// A comment on issue 4759 in <https://github.com/aws-powertools/powertools-lambda-python>
#[tokio::test(start_paused = true)]
async fn nothing_left_of_a_time_is_no_time() {
    use tower_idempotency::{Disposition, RetentionPolicy};
    let policy = RetentionPolicy::from_fn("none", |_| Disposition::KeepFor(Duration::ZERO));
    let app = App::with(|s| s.retention(policy), paid);
    app.send(pay("k")).await;
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
}

/// The set of claims never expired: 409 for ever after the record was gone.
/// <https://github.com/snok/asgi-idempotency-header>
#[tokio::test(start_paused = true)]
async fn when_the_time_is_over_nothing_is_left_of_a_key() {
    let app = App::new(paid);
    app.send(pay("k")).await;
    sleep(86_400 * SECOND).await;
    app.idempotency.purge(10).await.unwrap();
    assert_eq!((app.store().len(), app.store().bytes()), (0, 0));
    assert_eq!(app.send(pay("k")).await.text(), "run 2");
}

/// A claim of another process with this fingerprint is what [`claim_and_die`] makes.
#[tokio::test]
async fn a_fingerprint_made_outside_is_the_layers_own() {
    let app = app(OnAbandoned::Hold);
    app.send(pay("k")).await;
    let request = Request::from(pay("k")).map(|_: Body| Bytes::from("100 THB"));
    let outside: Fingerprint = FingerprintRecipe::raw().fingerprint(&request);
    assert_eq!(app.record("k").await.unwrap().fingerprint, outside);
}
