//! Every history of one key up to a bound: that the protocol keeps its promises in all of them, and
//! that it would not without any one of its guards.
//!
//! `protocol_model` plays random histories against a real store; this plays all histories of a small
//! world against the protocol itself.

mod model;
mod search;

use self::model::{Bounds, Guard, Mode, Protocol};
use self::search::search;

/// Two requests for one key, and a sweeper; every move is sent once.
const SMALL: Bounds = Bounds {
    workers: 2,
    stranger: false,
    sweepers: 1,
    sendings: 1,
    renewals: 0,
    jumps: 0,
    expiries: 0,
};

const MODES: [Mode; 3] = [Mode::Hold, Mode::Rerun, Mode::Transaction];

#[track_caller]
fn keeps_its_promises(bounds: Bounds) {
    for mode in MODES {
        let protocol = Protocol {
            bounds,
            mode,
            broken: None,
        };
        let found = search(&protocol);
        if let Some(broken) = found.broken {
            panic!("{mode:?}: {}\n{}", broken.promise, broken.way);
        }
        println!("{mode:?}, {bounds:?}: {} states", found.states);
    }
}

#[test]
fn promises_are_kept_whatever_is_sent_again_or_arrives_late() {
    keeps_its_promises(Bounds {
        sendings: 2,
        ..SMALL
    });
}

#[test]
fn promises_are_kept_whenever_leases_end_begin_anew_or_are_moved_by_the_clock() {
    keeps_its_promises(Bounds {
        renewals: 1,
        jumps: 1,
        ..SMALL
    });
}

#[test]
fn promises_are_kept_over_an_expiry() {
    keeps_its_promises(Bounds {
        expiries: 1,
        ..SMALL
    });
}

#[test]
fn promises_are_kept_among_two_sweepers() {
    keeps_its_promises(Bounds {
        sweepers: 2,
        ..SMALL
    });
}

#[test]
fn promises_are_kept_with_another_request_under_the_same_key() {
    keeps_its_promises(Bounds {
        stranger: true,
        ..SMALL
    });
}

/// `cargo test --release --test protocol_states -- --ignored --nocapture`
#[test]
#[ignore = "takes minutes and gigabytes"]
fn promises_are_kept_in_larger_worlds() {
    keeps_its_promises(Bounds {
        workers: 3,
        ..SMALL
    });
    keeps_its_promises(Bounds {
        sendings: 2,
        renewals: 1,
        expiries: 1,
        jumps: 1,
        ..SMALL
    });
}

/// A guard that could go without anybody noticing would be no guard, or this model would be blind.
#[test]
fn without_any_one_of_its_guards_a_promise_is_broken() {
    let unnoticed = Guard::ALL.into_iter().filter(|guard| {
        let broken = WORLDS.iter().find_map(|bounds| {
            let protocol = Protocol {
                bounds: *bounds,
                mode: guard.mode(),
                broken: Some(*guard),
            };
            search(&protocol).broken
        });
        if let Some(broken) = &broken {
            println!("without {guard:?}, {}:\n{}", broken.promise, broken.way);
        }
        broken.is_none()
    });
    assert_eq!(unnoticed.collect::<Vec<_>>(), []);
}

/// From small to large, so that what is found is short.
const WORLDS: [Bounds; 5] = [
    SMALL,
    Bounds { jumps: 1, ..SMALL },
    Bounds {
        stranger: true,
        ..SMALL
    },
    Bounds {
        renewals: 1,
        ..SMALL
    },
    Bounds {
        sendings: 2,
        expiries: 1,
        ..SMALL
    },
];
