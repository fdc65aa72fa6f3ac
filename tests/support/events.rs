//! Listens to the crate's events.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::{Layer, Registry};

/// The faults that are reported on this thread while it lives, in their order.
pub struct Events {
    heard: Arc<Mutex<Vec<String>>>,
    _guard: DefaultGuard,
}

impl Events {
    pub fn listen() -> Self {
        let heard = Arc::<Mutex<Vec<String>>>::default();
        let subscriber = Registry::default().with(Listener(Arc::clone(&heard)));
        Self {
            heard,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// The `kind` of every event at error level since the last call, or its message if it has none.
    pub fn errors(&self) -> Vec<String> {
        std::mem::take(&mut *self.heard.lock().unwrap())
    }
}

struct Listener(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR {
            let mut words = Words::default();
            event.record(&mut words);
            let word = words.kind.or(words.message).unwrap_or_default();
            self.0.lock().unwrap().push(word);
        }
    }
}

#[derive(Default)]
struct Words {
    kind: Option<String>,
    message: Option<String>,
}

impl Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "kind" {
            self.kind = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = Some(format!("{value:?}"));
        }
    }
}
