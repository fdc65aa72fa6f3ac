//! Claims that raced, and claims that stood without anybody knowing.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use http::StatusCode;
use tokio::sync::Barrier;
use tokio::time::sleep;
use tower_idempotency::ProblemKind;

use crate::app::{Answer, App, Ask, paid, pay};

async fn slowly_paid(call: crate::app::Call) -> impl axum::response::IntoResponse {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    paid(call).await
}

/// These requests, released at once from tasks of their own.
async fn at_once(app: &App, requests: Vec<Ask>) -> Vec<Answer> {
    let start = Arc::new(Barrier::new(requests.len()));
    let tasks = requests.into_iter().map(|request| {
        let (app, start) = (app.clone(), Arc::clone(&start));
        tokio::spawn(async move {
            start.wait().await;
            app.send(request).await
        })
    });
    let answers = join_all(tasks.collect::<Vec<_>>()).await;
    answers.into_iter().map(Result::unwrap).collect()
}

/// Two requests in one instant both missed the cache.
/// <https://github.com/square1-io/laravel-idempotency/issues/1>
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_64_requests_in_one_instant_one_runs() {
    for _ in 0..20 {
        let app = App::new(slowly_paid);
        let answers = at_once(&app, vec![pay("k"); 64]).await;
        assert_eq!(app.runs(), 1);
        for answer in answers {
            if answer.status != StatusCode::CREATED {
                answer.assert_problem(ProblemKind::InProgress);
            }
        }
    }
}

/// The second request came before the end of the first, and both made a status.
/// <https://github.com/mastodon/mastodon/pull/37879>
#[tokio::test(start_paused = true)]
async fn a_second_request_before_the_end_of_the_first_does_not_run() {
    let app = App::new(|call| async move {
        sleep(Duration::from_secs(1)).await;
        paid(call).await
    });
    let second = async {
        sleep(Duration::from_millis(100)).await;
        app.send(pay("k"))
            .await
            .assert_problem(ProblemKind::InProgress);
    };
    join(app.send(pay("k")), second).await;
    assert_eq!(app.runs(), 1);
}

/// The loser of the race was taken for an outage, and answered 503.
/// <https://github.com/idempot-dev/idempot-js/pull/186>
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn losing_a_race_is_never_an_outage() {
    let app = App::new(slowly_paid);
    for answer in at_once(&app, vec![pay("k"); 64]).await {
        assert_ne!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    }
}

/// Another body was answered 409 while the first request was in flight.
/// <https://github.com/idempot-dev/idempot-js/pull/191>
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn another_body_is_a_mismatch_in_flight_and_for_the_loser_of_a_race_too() {
    for _ in 0..20 {
        let app = App::new(slowly_paid);
        let mut requests = vec![pay("k").body("a"); 32];
        requests.extend(vec![pay("k").body("b"); 32]);
        let answers = at_once(&app, requests).await;
        let (a, b) = answers.split_at(32);
        let (winners, losers) = match a.iter().any(|answer| answer.status.is_success()) {
            true => (a, b),
            false => (b, a),
        };
        for answer in winners.iter().filter(|answer| !answer.status.is_success()) {
            answer.assert_problem(ProblemKind::InProgress);
        }
        for answer in losers {
            answer.assert_problem(ProblemKind::KeyReused);
        }
        assert_eq!(app.runs(), 1);
    }
}

/// With stores whose replies get lost or come too late.
#[cfg(feature = "testing")]
mod lost_replies {
    use tower_idempotency::testing::{Calls, Fault, FaultyStore, Move};
    use tower_idempotency::{IdempotencyLayer, MemoryStore, OnOutage};

    use super::*;

    fn app(claims: Calls, go_wrong: Fault, on_outage: OnOutage) -> App<FaultyStore<MemoryStore>> {
        let store = FaultyStore::new(MemoryStore::new());
        store.inject(Move::Claim, claims, go_wrong);
        let layer = IdempotencyLayer::builder(store).on_outage(on_outage);
        App::behind(&layer.build().unwrap(), paid)
    }

    /// The claim was committed and its reply lost; the retry met its own row and was refused.
    /// <https://github.com/idempot-dev/idempot-js/pull/204>
    #[tokio::test(start_paused = true)]
    async fn a_claim_whose_reply_was_lost_is_the_same_requests_own() {
        for fault in [Fault::LoseReply, Fault::DelayReply(Duration::from_secs(1))] {
            let app = app(Calls::Nth(1), fault, OnOutage::Reject);
            let first = app.send(pay("k")).await;
            assert_eq!(first.status, StatusCode::CREATED, "{fault:?}");
            app.send(pay("k")).await.assert_replays(&first);
            assert_eq!(app.runs(), 1);
        }
    }

    /// Under load the store timed out, which was taken for a miss, and the handler ran again.
    /// <https://github.com/ikyriak/IdempotentAPI/issues/23>
    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_too_slow_is_down_and_nothing_runs() {
        let closed = app(Calls::Every, Fault::Hang, OnOutage::Reject);
        let answer = closed.send(pay("k")).await;
        answer.assert_problem(ProblemKind::StoreUnavailable);
        assert_eq!(closed.runs(), 0);

        let open = app(Calls::Every, Fault::Hang, OnOutage::PassThrough);
        let answer = open.send(pay("k")).await;
        assert_eq!(answer.header("idempotency-unprotected"), "true");
        assert_eq!(open.runs(), 1);
    }
}
