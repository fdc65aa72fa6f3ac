//! The core of the other modules once more, on each durable store.

use crate::place::Place;
use crate::puppet::with_flags;

/// Makes a test for each store of tests that are written for puppets with any store.
macro_rules! on_each_store {
    ($($module:ident :: $test:ident,)*) => {
        #[cfg(feature = "sqlite-system")]
        mod sqlite {
            $(#[test] fn $test() { super::at(&super::Place::sqlite(), crate::$module::$test); })*
        }
        #[cfg(all(feature = "postgres", feature = "testing"))]
        mod postgres {
            $(#[test] fn $test() { super::at(&super::Place::postgres(), crate::$module::$test); })*
        }
        #[cfg(feature = "redis")]
        mod redis {
            $(#[test] fn $test() { super::at(&super::Place::redis(), crate::$module::$test); })*
        }
    };
}

fn at(place: &Place, test: fn()) {
    with_flags(place.flags(), test);
}

on_each_store! {
    replay::status_headers_in_their_order_and_bytes_are_given_again,
    replay::trailers_are_announced_and_given_again,
    replay::the_handlers_own_refusals_are_results_and_say_when_they_were_given,
    replay::a_large_answer_is_given_again_over_both_versions,
    identity::each_part_of_a_request_is_part_of_its_identity,
    in_flight::a_retry_of_a_request_that_runs_is_told_when_to_come_back,
    in_flight::where_retries_wait_they_get_the_first_answer,
    disconnect::a_handler_whose_client_left_reaches_its_end_once_and_the_retry_gets_its_answer,
    disconnect::an_answer_that_nobody_read_is_there_for_the_retry,
    disconnect::a_client_that_leaves_at_any_moment_finds_one_run,
    outcome::a_handler_that_panics_closes_the_connection_and_is_never_run_again,
    process::sigterm_lets_a_handler_whose_client_left_reach_its_end,
}
