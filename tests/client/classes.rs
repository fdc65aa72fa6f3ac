//! What each answer is taken for.

use http::Method;
use tower_idempotency::ProblemKind;
use tower_idempotency::client::{ClientError, GaveUp, KeyForm, SetIdempotencyKeyLayer};

use crate::script::{Script, Step, answered, exact, pay, problem, request, status, unknown, with};

/// Asks once, then answers 201: whether a second try came is what the first answer was taken for.
async fn tries_after(first: Step) -> (usize, Result<u16, GaveUp>) {
    let script = Script::new([first, status(201)]);
    let result = script.ask(&with(exact()), pay()).await;
    let told = match result {
        Ok(answer) => Ok(answer.status().as_u16()),
        Err(ClientError::OutcomeUnknown(unknown)) => Err(unknown.why()),
        Err(other) => panic!("{other:?}"),
    };
    (script.tries(), told)
}

#[tokio::test(start_paused = true)]
async fn each_status_is_a_retry_an_answer_or_unknown() {
    for first in 200..=599 {
        let expected = match first {
            408 | 425 | 429 | 500 | 502 | 503 | 504 => (2, Ok(201)),
            506..=599 => (1, Err(GaveUp::Answer)),
            _ => (1, Ok(first)),
        };
        assert_eq!(tries_after(status(first)).await, expected, "{first}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_code_of_the_layer_counts_before_the_status() {
    for kind in ProblemKind::ALL {
        let expected = match kind {
            ProblemKind::InProgress
            | ProblemKind::OutcomeUnknown
            | ProblemKind::BodyUnreadable
            | ProblemKind::TooEarly
            | ProblemKind::StoreUnavailable
            | ProblemKind::Overloaded => (2, Ok(None)),
            ProblemKind::ResponseNotKept
            | ProblemKind::RecordUnreadable
            | ProblemKind::CallerChanged => (1, Err(GaveUp::Answer)),
            _ => (1, Ok(Some(()))),
        };
        // Whatever status a service has set for it.
        for other in [kind.status().as_u16(), 400, 409, 422, 500, 503] {
            let expected = (
                expected.0,
                expected.1.map(|kept| kept.map_or(201, |()| other)),
            );
            let seen = tries_after(problem(other, kind.code())).await;
            assert_eq!(seen, expected, "{kind:?} as {other}");
        }
        assert_eq!(ProblemKind::from_code(kind.code()), Some(*kind));
    }
    assert_eq!(ProblemKind::from_code("of_tomorrow"), None);
    assert_eq!(tries_after(problem(503, "of_tomorrow")).await, (2, Ok(201)));
}

#[tokio::test(start_paused = true)]
async fn a_replayed_answer_is_final_whatever_its_status() {
    for name in ["idempotency-replayed", "idempotent-replayed"] {
        for first in [201, 402, 409, 429, 500, 503, 599] {
            let seen = tries_after(status(first).with(name, "true")).await;
            assert_eq!(seen, (1, Ok(first)));
            let seen = tries_after(status(503).with(name, "false")).await;
            assert_eq!(seen, (2, Ok(201)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_ran_without_a_claim_is_not_tried_again() {
    let marker = "idempotency-unprotected";
    let seen = tries_after(status(503).with(marker, "true")).await;
    assert_eq!(seen, (1, Err(GaveUp::Answer)));
    let seen = tries_after(status(201).with(marker, "true")).await;
    assert_eq!(seen, (1, Ok(201)));
}

#[tokio::test(start_paused = true)]
async fn the_servers_own_order_counts_before_the_status_and_after_the_replay() {
    let name = "stripe-should-retry";
    let layer = with(exact().should_retry_header(name.parse().unwrap()));
    for (first, tries) in [
        (status(409).with(name, "true"), 2),
        (status(503).with(name, "false"), 1),
        (status(201).with(name, "true"), 1),
        (
            status(500)
                .with(name, "true")
                .with("idempotent-replayed", "true"),
            1,
        ),
        (problem(422, "key_reused").with(name, "true"), 1),
        (status(409).with(name, "maybe"), 1),
        (
            status(503)
                .with(name, "true")
                .with("idempotency-unprotected", "true"),
            1,
        ),
    ] {
        let script = Script::new([first.clone(), status(201)]);
        let _ = script.ask(&layer, pay()).await;
        assert_eq!(script.tries(), tries, "{first:?}");
    }
    // Nobody asked for it.
    assert_eq!(
        tries_after(status(409).with(name, "true")).await,
        (1, Ok(409))
    );
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_and_a_silent_one_are_retried_with_one_key() {
    for first in [Step::Reset, Step::Silence] {
        let script = Script::new([first.clone(), first, status(201)]);
        answered(script.ask(&with(exact()), pay()).await, 201);
        let seen = script.seen();
        assert_eq!(seen.len(), 3);
        assert!(!seen[0].key().is_empty());
        for seen in &seen[1..] {
            assert_eq!(
                (seen.key(), &seen.body),
                (script.seen()[0].key(), &script.seen()[0].body)
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn silence_ends_after_ten_seconds() {
    let script = Script::new([Step::Silence, status(201)]);
    answered(script.ask(&with(exact()), pay()).await, 201);
    assert_eq!(script.times(), [0, 10_500]);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_is_asked_for_once_more_after_the_hint_and_then_told() {
    let unsure = problem(409, "outcome_unknown").with("retry-after", "30");
    let script = Script::new([unsure]);
    let told = unknown(script.ask(&with(exact()), pay()).await, GaveUp::Answer);
    // All of the hint, which is how long a lease may last.
    assert_eq!(script.times(), [0, 30_500]);
    assert_eq!(told.problem(), Some(ProblemKind::OutcomeUnknown));
    assert_eq!(told.status().unwrap().as_u16(), 409);
    assert_eq!(told.tries(), 2);
    assert_eq!(
        format!("\"{}\"", told.key().unwrap().as_str()),
        script.seen()[1].key()
    );
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_is_not_waited_for_past_the_deadline() {
    let unsure = problem(409, "outcome_unknown").with("retry-after", "300");
    let script = Script::new([unsure]);
    unknown(script.ask(&with(exact()), pay()).await, GaveUp::Deadline);
    assert_eq!(script.times(), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_try_that_may_have_paid_is_no_answer() {
    for refusal in [
        status(401),
        status(403),
        status(404),
        status(409),
        status(307),
        problem(422, "key_reused"),
        problem(400, "missing_key"),
    ] {
        for before in [
            Step::Reset,
            Step::Silence,
            status(500),
            problem(409, "in_progress"),
        ] {
            let script = Script::new([before, refusal.clone()]);
            let told = script.ask(&with(exact()), pay()).await;
            unknown(told, GaveUp::Answer);
        }
        // Nothing ran before: the refusal is the answer.
        for before in [status(429), problem(503, "store_unavailable")] {
            let script = Script::new([before, refusal.clone()]);
            script.ask(&with(exact()), pay()).await.expect("a refusal");
        }
    }
    // What the handler says is an answer all the same.
    for answer in [201, 400, 402, 422] {
        let script = Script::new([Step::Reset, status(answer)]);
        answered(script.ask(&with(exact()), pay()).await, answer);
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_that_changes_something_is_retried_without_a_key() {
    // Without the layer that mints keys; the policy stands alone.
    use tower::{Layer, ServiceExt, retry::RetryLayer};
    use tower_idempotency::client::OneTry;
    for method in [
        Method::POST,
        Method::PATCH,
        Method::from_bytes(b"LOCK").unwrap(),
    ] {
        for step in [
            Step::Reset,
            Step::Silence,
            status(503),
            problem(409, "in_progress"),
        ] {
            let script = Script::new([step]);
            let service = RetryLayer::new(exact()).layer(OneTry::new(script.clone()));
            let told = service.oneshot(request(method.clone())).await;
            let told = unknown(told, GaveUp::NoKey);
            assert_eq!((script.tries(), told.key()), (1, None), "{method}");
        }
    }
    // A key that the server would refuse protects nothing either.
    for key in ["", "\"broken", "a,b"] {
        let script = Script::new([status(503)]);
        let service = RetryLayer::new(exact()).layer(OneTry::new(script.clone()));
        let mut request = pay();
        request
            .headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
        unknown(service.oneshot(request).await, GaveUp::NoKey);
    }
    // One that it takes does.
    let script = Script::new([status(503), status(201)]);
    let service = RetryLayer::new(exact()).layer(OneTry::new(script.clone()));
    let mut request = pay();
    request
        .headers_mut()
        .insert("idempotency-key", "order-1".parse().unwrap());
    answered(service.oneshot(request).await, 201);
}

#[tokio::test(start_paused = true)]
async fn a_key_layer_inside_of_the_retry_loop_makes_no_second_try() {
    use tower::{Layer, ServiceExt, retry::RetryLayer};
    use tower_idempotency::client::OneTry;
    let script = Script::new([Step::Reset, status(201)]);
    let inside = SetIdempotencyKeyLayer::new().form(KeyForm::Bare);
    let inside = inside.layer(OneTry::new(script.clone()));
    let service = RetryLayer::new(exact()).layer(inside);
    unknown(service.oneshot(pay()).await, GaveUp::NoKey);
    assert_eq!(script.tries(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_idempotent_is_retried_without_a_key_and_its_last_try_is_handed_on() {
    for method in ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "QUERY"] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let script = Script::new([Step::Reset, status(503), status(200)]);
        answered(
            script.ask(&with(exact()), request(method.clone())).await,
            200,
        );
        assert!(script.seen().iter().all(|seen| seen.key().is_empty()));
        let script = Script::new([status(503)]);
        answered(
            script.ask(&with(exact()), request(method.clone())).await,
            503,
        );
        assert_eq!(script.tries(), 6, "{method}");
        let script = Script::new([Step::Reset]);
        let told = script.ask(&with(exact()), request(method)).await;
        assert!(matches!(told, Err(ClientError::Transport(_))), "{told:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_over_the_limit_is_an_error_with_its_status_and_no_retry() {
    let layer = with(exact()).answer_limit("the answer".len());
    answered(Script::new([status(201)]).ask(&layer, pay()).await, 201);
    let layer = layer.answer_limit("the answer".len() - 1);
    let script = Script::new([status(201)]);
    let told = unknown(script.ask(&layer, pay()).await, GaveUp::Answer);
    assert_eq!((script.tries(), told.status().unwrap().as_u16()), (1, 201));
}
