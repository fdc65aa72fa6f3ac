//! How often each handler began, and reached its end.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Counts(Mutex<HashMap<String, Count>>);

#[derive(Clone, Copy, Default)]
pub struct Count {
    pub started: u64,
    pub finished: u64,
}

impl Counts {
    /// Counts one more beginning, and says how many there were with it.
    pub fn start(&self, name: &str) -> u64 {
        let mut counts = self.lock();
        let count = counts.entry(name.to_owned()).or_default();
        count.started += 1;
        count.started
    }

    pub fn finish(&self, name: &str) {
        self.lock().entry(name.to_owned()).or_default().finished += 1;
    }

    pub fn of(&self, name: &str) -> Count {
        self.lock().get(name).copied().unwrap_or_default()
    }

    pub fn total(&self) -> Count {
        self.lock()
            .values()
            .fold(Count::default(), |total, count| Count {
                started: total.started + count.started,
                finished: total.finished + count.finished,
            })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Count>> {
        // Numbers: a panic elsewhere leaves them whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Count {
    pub fn to_json(self) -> String {
        let Self { started, finished } = self;
        format!(r#"{{"started":{started},"finished":{finished}}}"#)
    }
}
