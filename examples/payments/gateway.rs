//! A fake payment gateway: it takes time, it fails in the ways that gateways fail, and it counts what
//! it took. It charges as often as it is asked, so that it hides no fault of the service.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::oneshot;
use tower_idempotency::IdempotencyKey;

use crate::auth::Account;

/// Cheap to clone; clones are one gateway.
#[derive(Clone)]
pub struct Gateway {
    inner: Arc<Inner>,
}

struct Inner {
    takes: Duration,
    hold: Mutex<Option<Hold>>,
    ledger: Mutex<Ledger>,
}

#[derive(Default)]
struct Ledger {
    charges: Vec<Charge>,
    /// The newest attempt that asked, by the reference of the order.
    attempts: HashMap<String, u32>,
}

/// What the service asks for.
pub struct Order {
    /// What the order is known by, the same in every attempt. A better gateway takes it for its own
    /// idempotency key.
    pub reference: IdempotencyKey,
    /// The fencing token: an older attempt than the newest is refused.
    pub attempt: u32,
    pub account: Account,
    /// In the smallest unit of the currency.
    pub amount: u64,
    pub currency: String,
    pub card: String,
}

/// Money that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Charge {
    pub id: String,
    #[serde(skip)]
    pub account: Account,
    /// In the smallest unit of the currency.
    pub amount: u64,
    pub currency: String,
}

#[derive(Debug, PartialEq, Eq)]
pub enum GatewayError {
    /// Nothing was taken, and nothing will be.
    Declined,
    /// The gateway did not answer: the money may have been taken.
    TimedOut,
    /// A newer attempt has asked for the same order.
    Superseded,
}

impl Gateway {
    /// A gateway that takes this long for a charge.
    pub fn new(takes: Duration) -> Self {
        Self {
            inner: Arc::new(Inner {
                takes,
                hold: Mutex::default(),
                ledger: Mutex::default(),
            }),
        }
    }

    pub async fn charge(&self, order: Order) -> Result<Charge, GatewayError> {
        let held = lock(&self.inner.hold).take();
        match held {
            Some(hold) => hold.wait().await,
            None => tokio::time::sleep(self.inner.takes).await,
        }
        let card = order.card.clone();
        let charge = lock(&self.inner.ledger).book(order)?;
        match &*card {
            "timeout" => Err(GatewayError::TimedOut),
            "crash" => std::panic::panic_any(CRASH),
            _ => Ok(charge),
        }
    }

    /// What was taken so far, from everybody.
    pub fn charges(&self) -> Vec<Charge> {
        lock(&self.inner.ledger).charges.clone()
    }

    /// Lets the next charge wait until it is told to go on. For the demo, where no clock may decide
    /// who comes first.
    pub fn hold_next(&self) -> Held {
        let (reached, has_reached) = oneshot::channel();
        let (go_on, may_go_on) = oneshot::channel();
        *lock(&self.inner.hold) = Some(Hold { reached, may_go_on });
        Held { has_reached, go_on }
    }
}

impl Ledger {
    fn book(&mut self, order: Order) -> Result<Charge, GatewayError> {
        let newest = self
            .attempts
            .entry(order.reference.as_str().to_owned())
            .or_default();
        if order.attempt < *newest {
            return Err(GatewayError::Superseded);
        }
        *newest = order.attempt;
        if order.card == "declined" {
            return Err(GatewayError::Declined);
        }
        let charge = Charge {
            id: format!("ch_{}", self.charges.len() + 1),
            account: order.account,
            amount: order.amount,
            currency: order.currency,
        };
        self.charges.push(charge.clone());
        Ok(charge)
    }
}

/// What the card `crash` makes the service say.
pub const CRASH: &str = "the money was taken, and the receipt cannot be read";

struct Hold {
    reached: oneshot::Sender<()>,
    may_go_on: oneshot::Receiver<()>,
}

impl Hold {
    async fn wait(self) {
        let _ = self.reached.send(());
        // An error: whoever held the charge is gone.
        let _ = self.may_go_on.await;
    }
}

/// A charge that is held, or will be. Dropped, it goes on.
pub struct Held {
    has_reached: oneshot::Receiver<()>,
    go_on: oneshot::Sender<()>,
}

impl Held {
    /// Returns when the charge has reached the gateway.
    pub async fn reached(&mut self) {
        let _ = (&mut self.has_reached).await;
    }

    pub fn go_on(self) {
        let _ = self.go_on.send(());
    }
}

/// The data is whole after a panic elsewhere: nothing panics while it is changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
