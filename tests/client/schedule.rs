//! When the next try comes.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tower_idempotency::client::{ClientLayer, GaveUp, RetryPolicy};

use crate::script::{Script, Step, answered, exact, pay, problem, status, unknown, with};

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn the_ceilings_are_half_a_second_doubled_up_to_eight() {
    let policy = RetryPolicy::new();
    let ceilings: Vec<_> = (0..7).map(|n| policy.ceiling(n).as_secs_f64()).collect();
    assert_eq!(ceilings, [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]);
    assert_eq!(policy.max_total_delay(), seconds(15.5));
}

#[test]
fn no_setting_overflows_a_ceiling_or_their_sum() {
    let policy = RetryPolicy::new().retries(u32::MAX);
    assert_eq!(policy.ceiling(u32::MAX), seconds(8.0));
    let expected = seconds(15.5) + (u32::MAX - 5) * seconds(8.0);
    assert_eq!(policy.max_total_delay(), expected);
    let policy = policy.base(Duration::MAX).cap(Duration::MAX);
    assert_eq!(policy.max_total_delay(), Duration::MAX);
    let policy = RetryPolicy::new().base(Duration::ZERO).retries(u32::MAX);
    assert_eq!(policy.max_total_delay(), Duration::ZERO);
    assert_eq!(
        RetryPolicy::new().retries(0).max_total_delay(),
        Duration::ZERO
    );
}

#[tokio::test(start_paused = true)]
async fn tries_without_jitter_come_at_the_ceilings_and_six_are_all() {
    let script = Script::new([status(503)]);
    let told = unknown(script.ask(&with(exact()), pay()).await, GaveUp::Retries);
    assert_eq!(script.times(), [0, 500, 1_500, 3_500, 7_500, 15_500]);
    assert_eq!((told.tries(), told.status().unwrap().as_u16()), (6, 503));
}

#[tokio::test(start_paused = true)]
async fn jitter_is_full_from_nothing_to_the_ceiling() {
    let layer = ClientLayer::new().retry(RetryPolicy::new().budget(u32::MAX));
    let mut shares = [const { Vec::new() }; 5];
    for _ in 0..400 {
        let script = Script::new([status(503)]);
        let _ = script.ask(&layer, pay()).await;
        let times = script.times();
        assert_eq!(times.len(), 6);
        for (n, two) in times.windows(2).enumerate() {
            let ceiling = RetryPolicy::new().ceiling(u32::try_from(n).unwrap());
            let delay = (two[1] - two[0]) as f64;
            // A timer fires on the next millisecond, and the times are cut to it.
            let ceiling = ceiling.as_millis() as f64;
            assert!(delay <= ceiling + 2.0, "{delay} of {ceiling}");
            shares[n].push(delay / ceiling);
        }
    }
    for shares in shares {
        // 400 draws: the chance that a tenth stays empty is 5e-19.
        for tenth in 0..10 {
            let low = f64::from(tenth) / 10.0;
            assert!(
                shares.iter().any(|share| (low..low + 0.1).contains(share)),
                "{low}"
            );
        }
        let mean = shares.iter().sum::<f64>() / 400.0;
        assert!((0.4..0.6).contains(&mean), "{mean}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_random_source_can_be_given_and_never_gets_above_the_ceiling() {
    let run = async |seed| {
        let random = std::sync::Mutex::new(StdRng::seed_from_u64(seed));
        let retry = RetryPolicy::new().jitter(move |ceiling| {
            random
                .lock()
                .unwrap()
                .random_range(Duration::ZERO..=ceiling)
        });
        let script = Script::new([status(503)]);
        let _ = script.ask(&with(retry), pay()).await;
        script.times()
    };
    assert_eq!(run(7).await, run(7).await);
    assert_ne!(run(7).await, run(8).await);
    let script = Script::new([status(503)]);
    let _ = script
        .ask(&with(RetryPolicy::new().jitter(|_| Duration::MAX)), pay())
        .await;
    assert_eq!(script.times(), [0, 500, 1_500, 3_500, 7_500, 15_500]);
}

/// When the second try comes after this answer, in milliseconds.
async fn second(first: Step, retry: RetryPolicy) -> u128 {
    let script = Script::new([first, status(201)]);
    answered(script.ask(&with(retry), pay()).await, 201);
    script.times()[1]
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_a_floor_below_the_jitter() {
    let none = RetryPolicy::new().jitter(|_| Duration::ZERO);
    let hinted = |after: &str| status(503).with("retry-after", after);
    assert_eq!(second(hinted("3"), none.clone()).await, 3_000);
    // Above it there is jitter still, or all clients would come back together.
    assert_eq!(second(hinted("3"), exact()).await, 3_500);
    let running = problem(409, "in_progress").with("retry-after", "1");
    assert_eq!(second(running, none.clone()).await, 1_000);
    let dated =
        hinted("Fri, 31 Dec 1999 23:59:59 GMT").with("date", "Fri, 31 Dec 1999 23:59:56 GMT");
    assert_eq!(second(dated, none).await, 3_000);
}

#[tokio::test(start_paused = true)]
async fn a_long_retry_after_is_cut_to_five_seconds_and_an_absurd_one_is_ignored() {
    let hinted = |after: &str| status(503).with("retry-after", after);
    for long in ["6", "3600", "Fri, 31 Dec 1999 23:59:59 GMT"] {
        let hinted = hinted(long).with("date", "Fri, 31 Dec 1999 23:00:00 GMT");
        assert_eq!(second(hinted, exact()).await, 5_500, "{long}");
    }
    for absurd in [
        "-5",
        "1e9",
        "99999999",
        "tomorrow",
        "",
        "Fri, 31 Dec 1999 23:59:59 GMT",
    ] {
        assert_eq!(second(hinted(absurd), exact()).await, 500, "{absurd}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_hint_is_told_when_the_retries_are_used_up() {
    let script = Script::new([status(429).with("retry-after", "120")]);
    let told = unknown(
        script.ask(&with(exact().retries(1)), pay()).await,
        GaveUp::Retries,
    );
    assert_eq!(told.retry_after(), Some(seconds(120.0)));
    assert!(!told.to_string().contains(told.key().unwrap().as_str()));
}
