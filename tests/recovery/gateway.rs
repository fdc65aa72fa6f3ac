//! The other side of a reconciler: what it is asked, and what it answers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{IdempotencyBuilder, Outcome, Record, ScopedKey, Store, Verdict};

use crate::engine::*;

/// What the reconciler does when it is asked about a key.
#[derive(Clone, Debug)]
pub enum Says {
    Happened(Outcome),
    NotHappened,
    Unknown,
    Fails,
    Panics,
    PanicsAtOnce,
    Hangs,
    /// After this long.
    Later(Duration, Box<Says>),
}

/// Answers the questions of any number of engines.
#[derive(Clone)]
pub struct Gateway {
    state: Arc<Mutex<State>>,
}

struct State {
    says: Says,
    of: HashMap<ScopedKey, Says>,
    asked: Vec<Record>,
    open: usize,
    most_open: usize,
}

impl Gateway {
    /// It says this of every key.
    pub fn that(says: Says) -> Self {
        let state = State {
            says,
            of: HashMap::new(),
            asked: Vec::new(),
            open: 0,
            most_open: 0,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub fn says(&self, says: Says) {
        self.state.lock().unwrap().says = says;
    }

    pub fn says_of(&self, key: &ScopedKey, says: Says) {
        self.state.lock().unwrap().of.insert(key.clone(), says);
    }

    pub fn asked(&self) -> Vec<Record> {
        self.state.lock().unwrap().asked.clone()
    }

    pub fn questions(&self) -> usize {
        self.state.lock().unwrap().asked.len()
    }

    /// How many questions were open at once at the most.
    pub fn most_open(&self) -> usize {
        self.state.lock().unwrap().most_open
    }

    /// An engine's settings with this as the reconciler.
    pub fn asked_by<S: Store>(&self, settings: IdempotencyBuilder<S>) -> IdempotencyBuilder<S> {
        let gateway = self.clone();
        settings.reconciler(move |record| gateway.ask(record))
    }

    fn ask(
        &self,
        record: Record,
    ) -> impl Future<Output = Result<Verdict, std::io::Error>> + Send + use<> {
        let mut says = {
            let mut state = self.state.lock().unwrap();
            let says = state.of.get(&record.key).unwrap_or(&state.says).clone();
            state.asked.push(record);
            says
        };
        assert!(!matches!(says, Says::PanicsAtOnce), "asked in vain");
        let open = Open::of(&self.state);
        async move {
            let _open = open;
            loop {
                says = match says {
                    Says::Later(after, then) => {
                        sleep(after).await;
                        *then
                    }
                    Says::Happened(outcome) => return Ok(Verdict::Happened(outcome)),
                    Says::NotHappened => return Ok(Verdict::NotHappened),
                    Says::Unknown => return Ok(Verdict::Unknown),
                    Says::Fails => return Err(std::io::Error::other("the gateway is away")),
                    Says::Panics | Says::PanicsAtOnce => panic!("asked in vain"),
                    Says::Hangs => pending::<Infallible>().await.into(),
                };
            }
        }
    }
}

impl From<Infallible> for Says {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

struct Open(Arc<Mutex<State>>);

impl Open {
    fn of(state: &Arc<Mutex<State>>) -> Self {
        let mut locked = state.lock().unwrap();
        locked.open += 1;
        locked.most_open = locked.most_open.max(locked.open);
        Self(Arc::clone(state))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().unwrap().open -= 1;
    }
}

/// An engine that asks this gateway.
pub fn asking(gateway: &Gateway) -> Engine {
    engine_with(|settings| gateway.asked_by(settings))
}

/// Leaves this key behind as a process that died would.
pub async fn leave(engine: &Engine, name: &str) {
    let attempt = first(engine.admit(&key(name), request("r")).await.unwrap());
    let _ = attempt.abandon().await;
}
