//! Two gateways, offline. They behave as far as their documentation says how they behave, and count
//! what they did; `GATEWAYS.md` says what is known and what is not.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A gateway that takes an idempotency key, as Stripe's API v1 does: the first result of a key is kept,
/// a 500 too, and another request under the same key is an error.
#[derive(Clone, Default)]
pub struct Keyed(Arc<Mutex<KeyedState>>);

#[derive(Default)]
struct KeyedState {
    results: HashMap<String, (Ask, Result<String, KeyedError>)>,
    charges: u32,
    asked: u32,
}

type Ask = (u64, String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyedError {
    /// 402: the card was declined. Kept.
    Declined,
    /// 500: nobody can say how far it came. Kept: the same key gets it again.
    Internal,
    /// 400 `idempotency_error`: the key belongs to another request.
    OtherRequest,
    /// No answer came. The gateway has one, and gives it to whoever asks with the same key.
    NoAnswer,
}

impl Keyed {
    pub fn charge(&self, key: &str, amount: u64, card: &str) -> Result<String, KeyedError> {
        let mut state = lock(&self.0);
        state.asked += 1;
        let ask = (amount, card.to_owned());
        if let Some((first, result)) = state.results.get(key) {
            return match *first == ask {
                true => result.clone(),
                false => Err(KeyedError::OtherRequest),
            };
        }
        let result = match card {
            "declined" => Err(KeyedError::Declined),
            "broken" => Err(KeyedError::Internal),
            _ => {
                state.charges += 1;
                Ok(format!("ch_{}", state.charges))
            }
        };
        state.results.insert(key.to_owned(), (ask, result.clone()));
        match card {
            "answer-lost" => Err(KeyedError::NoAnswer),
            _ => result,
        }
    }

    /// How often money was taken, and how often it was asked.
    pub fn counts(&self) -> (u32, u32) {
        let state = lock(&self.0);
        (state.charges, state.asked)
    }
}

/// A gateway whose key is the number of the invoice, as 2C2P's payment token request: it answers 9015
/// for an invoice that was paid. Refunds carry an `idempotencyID`.
#[derive(Clone, Default)]
pub struct Invoiced(Arc<Mutex<InvoicedState>>);

#[derive(Default)]
struct InvoicedState {
    invoices: HashSet<String>,
    paid: HashSet<String>,
    refunds: HashMap<String, String>,
    inquiries: u32,
}

/// "Existing invoice number".
pub const EXISTING_INVOICE: &str = "9015";

impl Invoiced {
    /// The token with which the customer pays, or a response code.
    pub fn payment_token(&self, invoice_no: &str) -> Result<String, &'static str> {
        let mut state = lock(&self.0);
        if state.paid.contains(invoice_no) {
            return Err(EXISTING_INVOICE);
        }
        state.invoices.insert(invoice_no.to_owned());
        Ok(format!("token-{invoice_no}"))
    }

    /// Whether the invoice was paid.
    pub fn inquiry(&self, invoice_no: &str) -> bool {
        let mut state = lock(&self.0);
        state.inquiries += 1;
        state.paid.contains(invoice_no)
    }

    /// The same id gets the first answer.
    pub fn refund(&self, idempotency_id: &str, invoice_no: &str) -> String {
        let mut state = lock(&self.0);
        let number = state.refunds.len() + 1;
        let refund = state.refunds.entry(idempotency_id.to_owned());
        refund
            .or_insert_with(|| format!("refund {number} of {invoice_no}"))
            .clone()
    }

    /// What the customer does with the token.
    pub fn customer_pays(&self, invoice_no: &str) {
        lock(&self.0).paid.insert(invoice_no.to_owned());
    }

    /// How many invoices were opened, refunds made and inquiries answered.
    pub fn counts(&self) -> (usize, usize, u32) {
        let state = lock(&self.0);
        (state.invoices.len(), state.refunds.len(), state.inquiries)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
