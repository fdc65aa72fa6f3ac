//! A breadth-first search through every state of a model, up to its own bounds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{Debug, Write};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Something with states, and with steps that lead from one to others.
pub trait Model {
    type State: Copy + Eq + Hash;
    type Step: Copy + Debug;

    fn start(&self) -> Self::State;

    /// Every step that can be made, and where it leads, or which promise it breaks.
    fn steps(&self, state: &Self::State) -> Steps<Self::State, Self::Step>;

    /// What must hold in every state.
    fn check(&self, state: &Self::State) -> Result<(), &'static str>;
}

/// Each step with where it leads, or with the promise that it breaks.
pub type Steps<State, Step> = Vec<(Step, Result<State, &'static str>)>;

/// What a search found.
#[derive(Debug)]
pub struct Found {
    /// How many states it visited.
    pub states: usize,
    /// The first broken promise, with the shortest way to it.
    pub broken: Option<Broken>,
}

#[derive(Debug)]
pub struct Broken {
    pub promise: &'static str,
    pub way: String,
}

/// Visits every state that can be reached, nearest first, until a promise is broken.
pub fn search<M: Model>(model: &M) -> Found {
    let start = model.start();
    let mut known: HashMap<M::State, (), BuildHasherDefault<Fast>> = HashMap::default();
    known.insert(start, ());
    let mut visited = vec![start];
    // How each state was reached first.
    let mut ways: Vec<Option<(usize, M::Step)>> = vec![None];
    let mut next = 0;
    let broken = loop {
        let Some(state) = visited.get(next).copied() else {
            break None;
        };
        if let Err(promise) = model.check(&state) {
            break Some(broken(&ways, next, None, promise));
        }
        for (step, led_to) in model.steps(&state) {
            match led_to {
                Err(promise) => {
                    let broken = broken(&ways, next, Some(step), promise);
                    return Found {
                        states: visited.len(),
                        broken: Some(broken),
                    };
                }
                Ok(state) => {
                    if let Entry::Vacant(vacant) = known.entry(state) {
                        vacant.insert(());
                        visited.push(state);
                        ways.push(Some((next, step)));
                    }
                }
            }
        }
        next += 1;
    };
    Found {
        states: visited.len(),
        broken,
    }
}

fn broken<S: Copy + Debug>(
    ways: &[Option<(usize, S)>],
    mut at: usize,
    last: Option<S>,
    promise: &'static str,
) -> Broken {
    let mut steps: Vec<S> = last.into_iter().collect();
    while let Some((before, step)) = ways[at] {
        steps.push(step);
        at = before;
    }
    let mut way = String::new();
    for (n, step) in steps.iter().rev().enumerate() {
        let _ = writeln!(way, "{:>3}. {step:?}", n + 1);
    }
    Broken { promise, way }
}

/// A hash that costs little: what is hashed here comes from nobody.
#[derive(Default)]
struct Fast(u64);

impl Fast {
    fn mix(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for Fast {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.mix(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.mix(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.mix(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
