//! Every history of one key up to a bound: that the protocol keeps its promises in all of them, and
//! that it would not without any one of its guards.
//!
//! `protocol_model` plays random histories against a real store; this plays all histories of a small
//! world against the protocol itself.

mod model;
mod search;

use self::model::{Bounds, Guard, Mode, Protocol};
use self::search::search;

const SMALL: Bounds = Bounds {
    workers: 2,
    stranger: false,
    sweepers: 1,
    sendings: 2,
    renewals: 1,
    jumps: 1,
    expiries: 1,
};

#[track_caller]
fn keeps_its_promises(mode: Mode, bounds: Bounds) {
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

#[test]
fn two_requests_keep_all_promises_in_every_history() {
    for mode in [Mode::Hold, Mode::Rerun, Mode::Transaction] {
        keeps_its_promises(mode, SMALL);
    }
}
