//! Processes and servers that are killed, and what those that come after them find.

use std::time::Duration;

use crate::h1::with_length;
use crate::message::Request;
use crate::patience::patient;
use crate::place::Place;
use crate::puppet::{Count, Puppet, WIRES, Wire, ran};

/// Makes a test of each, for each of these places.
macro_rules! at {
    ($($place:ident $condition:tt: $($test:ident),*;)*) => { $(
        #[cfg $condition]
        mod $place {
            $(#[tokio::test] async fn $test() { super::$test(super::Place::$place()).await; })*
        }
    )* };
}

at! {
    sqlite (feature = "sqlite-system"):
        a_kept_answer_outlives_its_process_and_its_server,
        an_attempt_whose_process_was_killed_is_in_flight_for_its_lease_and_then_unknown,
        two_processes_run_each_key_once;
    postgres (all(feature = "postgres", feature = "testing")):
        an_attempt_whose_process_was_killed_is_in_flight_for_its_lease_and_then_unknown,
        two_processes_run_each_key_once;
    postgres_of_its_own (all(feature = "postgres", feature = "testing")):
        a_kept_answer_outlives_its_process_and_its_server,
        while_the_server_is_away_nothing_runs_and_afterwards_everything_is_there,
        an_answer_that_the_server_missed_is_marked_and_recorded_once_it_is_back;
    redis (feature = "redis"):
        a_kept_answer_outlives_its_process_and_its_server,
        an_attempt_whose_process_was_killed_is_in_flight_for_its_lease_and_then_unknown,
        two_processes_run_each_key_once,
        while_the_server_is_away_nothing_runs_and_afterwards_everything_is_there,
        an_answer_that_the_server_missed_is_marked_and_recorded_once_it_is_back;
}

async fn a_kept_answer_outlives_its_process_and_its_server(place: Place) {
    let puppet = place.puppet(&[]);
    let request = Request::post("kept")
        .key("kept")
        .header("x-puppet-status", "201")
        .header("x-puppet-header", "location: /charges/1");
    let first = puppet.send(Wire::H1, &request).await;
    first.fresh(201);
    drop(puppet);
    let puppet = place.puppet(&[]);
    puppet
        .send(Wire::H1, &request)
        .await
        .is_replay_of(&first, &[]);

    place.kill();
    place.restart();
    puppet
        .send(Wire::H1, &request)
        .await
        .is_replay_of(&first, &[]);
    let again = puppet.send(Wire::H2, &request).await;
    assert!(again.is_replay(), "{again:?}");
    assert_eq!((again.status, again.body), (first.status, first.body));
    let other = request.body("amount=1");
    puppet
        .send(Wire::H1, &other)
        .await
        .problem(422, "key_reused");
    assert_eq!(puppet.count("kept").await, ran(0));
}

async fn an_attempt_whose_process_was_killed_is_in_flight_for_its_lease_and_then_unknown(
    place: Place,
) {
    let request = |name: &str| Request::post(name).key(name);
    let killed = async |name: &str, lease: &str| {
        let puppet = place.puppet(&["--lease-ms", lease]);
        let slow = request(name).header("x-puppet-delay-ms", "3600000");
        let mut connection = puppet.h1().await;
        connection.write(&with_length(&slow)).await;
        puppet.until_started(name, 1).await;
    };
    killed("long", "3600000").await;
    killed("short", "200").await;
    let puppet = place.puppet(&[]);
    for wire in WIRES {
        let again = puppet.send(wire, &request("long")).await;
        again.problem(409, "in_progress");
        patient("the end of the lease", async {
            loop {
                let again = puppet.send(wire, &request("short")).await;
                if again.header("idempotency-error") != Some("in_progress") {
                    return again.problem(409, "outcome_unknown");
                }
            }
        })
        .await;
        for name in ["long", "short"] {
            let other = request(name).body("amount=1");
            puppet.send(wire, &other).await.problem(422, "key_reused");
            assert_eq!(puppet.count(name).await, ran(0));
        }
    }
    // Where running again is said to be safe, it is run once, by whoever asks first.
    let puppet = place.puppet(&["--on-abandoned", "rerun"]);
    let first = puppet.send(Wire::H1, &request("short")).await;
    first.fresh(200);
    puppet
        .send(Wire::H1, &request("short"))
        .await
        .is_replay_of(&first, &[]);
    assert_eq!(puppet.count("short").await, ran(1));
    let still = puppet.send(Wire::H1, &request("long")).await;
    still.problem(409, "in_progress");
}

async fn two_processes_run_each_key_once(place: Place) {
    let wait = ["--in-flight", "wait:60000"];
    let puppets = [place.puppet(&wait), place.puppet(&wait)];
    let request = |name: &str| Request::post(name).key(name);
    let slow = request("slow").header("x-puppet-delay-ms", "300");
    let waiting = async {
        puppets[0].until_started("slow", 1).await;
        puppets[1].send(Wire::H1, &request("slow")).await
    };
    let (first, again) = tokio::join!(puppets[0].send(Wire::H1, &slow), waiting);
    again.is_replay_of(&first, &[]);
    assert_eq!(puppets[1].count("slow").await, ran(0));
    for n in 0..20 {
        let name = format!("both-{n}");
        let both = puppets.each_ref().map(|puppet| {
            let request = request(&name);
            async move { puppet.send(Wire::H1, &request).await }
        });
        let [one, two] = both;
        let (one, two) = tokio::join!(one, two);
        let (first, again) = if one.is_replay() {
            (two, one)
        } else {
            (one, two)
        };
        again.is_replay_of(&first, &[]);
        let started = puppets[0].count(&name).await.started + puppets[1].count(&name).await.started;
        assert_eq!(started, 1, "{name}");
    }
}

async fn while_the_server_is_away_nothing_runs_and_afterwards_everything_is_there(place: Place) {
    let puppet = place.puppet(&[]);
    let careless = place.puppet(&["--on-outage", "pass-through"]);
    let request = |name: &str| Request::post(name).key(name);
    let first = puppet.send(Wire::H1, &request("kept")).await;
    first.fresh(200);

    place.kill();
    for name in ["kept", "new"] {
        let away = puppet.send(Wire::H1, &request(name)).await;
        away.problem(503, "store_unavailable");
        assert!(away.header("retry-after").is_some(), "{away:?}");
    }
    assert_eq!(puppet.count("new").await, ran(0));
    let unprotected = careless.send(Wire::H1, &request("careless")).await;
    unprotected.fresh(200);
    assert_eq!(unprotected.header("idempotency-unprotected"), Some("true"));

    place.restart();
    // The process that saw the server go needs no help to find it again.
    puppet
        .send(Wire::H1, &request("kept"))
        .await
        .is_replay_of(&first, &[]);
    let new = puppet.send(Wire::H1, &request("new")).await;
    new.fresh(200);
    puppet
        .send(Wire::H1, &request("new"))
        .await
        .is_replay_of(&new, &[]);
    assert_eq!(puppet.count("new").await, ran(1));
}

async fn an_answer_that_the_server_missed_is_marked_and_recorded_once_it_is_back(place: Place) {
    let puppet = place.puppet(&[]);
    let request = Request::post("missed").key("missed");
    // Longer than it takes to kill a server.
    let slow = request.clone().header("x-puppet-delay-ms", "3000");
    let running = Count {
        started: 1,
        finished: 0,
    };
    let kill = async {
        puppet.until_started("missed", 1).await;
        place.kill();
        assert_eq!(puppet.count("missed").await, running, "it was too fast");
    };
    let (answer, ()) = tokio::join!(puppet.send(Wire::H1, &slow), kill);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        answer.header("idempotency-result"),
        Some("not-saved"),
        "{answer:?}"
    );
    let away = puppet.send(Wire::H1, &request).await;
    away.problem(503, "store_unavailable");

    place.restart();
    let again = until_replayed(&puppet, &request).await;
    assert_eq!(again.body, answer.body);
    assert_eq!(puppet.count("missed").await, ran(1));
}

async fn until_replayed(puppet: &Puppet, request: &Request) -> crate::message::Answer {
    patient("the outcome to be recorded", async {
        loop {
            let again = puppet.send(Wire::H1, request).await;
            if again.is_replay() {
                return again;
            }
            again.problem(409, "in_progress");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}
