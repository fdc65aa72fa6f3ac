//! What a shop does between its customers and two gateways.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Query, State};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::Deserialize;
use tower_idempotency::{
    Attempt, ConfigError, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer,
    KeyFormat, KeySource, MemoryStore, MissingKey, RetentionOverride, Scope,
};

use crate::fakes::{EXISTING_INVOICE, Invoiced, Keyed, KeyedError};

#[derive(Clone)]
pub struct Shop {
    pub engine: Idempotency<MemoryStore>,
    pub keyed: Keyed,
    pub invoiced: Invoiced,
    paid: Arc<Mutex<BTreeSet<String>>>,
    settled: Arc<Mutex<u32>>,
}

impl Shop {
    pub fn new(engine: Idempotency<MemoryStore>) -> Self {
        Self {
            engine,
            keyed: Keyed::default(),
            invoiced: Invoiced::default(),
            paid: Arc::default(),
            settled: Arc::default(),
        }
    }

    pub fn router(&self) -> Result<Router, ConfigError> {
        // What a trusted proxy says of the caller; see the README for better scopes.
        let scope = || Scope::header(HeaderName::from_static("x-account"));
        let by_header = IdempotencyLayer::builder(self.engine.clone())
            .scope(scope())
            .missing_key(MissingKey::Reject)
            .build()?;
        let by_invoice = IdempotencyLayer::builder(self.engine.clone())
            .namespace("invoices")
            .scope(scope())
            // The key is a member of the body, as it is for the gateway.
            .key_source(KeySource::json(["/invoiceNo"])?)
            .missing_key(MissingKey::Reject)
            .build()?;
        let charges = Router::new()
            .route("/charges", post(charge))
            .route("/charges/3ds", post(charge_with_3ds))
            .route("/refunds", post(refund))
            .layer(by_header);
        let invoices = Router::new()
            .route("/invoices", post(pay_invoice))
            .layer(by_invoice);
        Ok(charges
            .merge(invoices)
            .route("/3ds/return", get(return_from_3ds))
            .with_state(self.clone()))
    }

    /// Sets the order to paid; harmless twice.
    fn order_is_paid(&self, order: &str) {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        paid.insert(order.to_owned());
    }

    pub fn is_paid(&self, order: &str) -> bool {
        let paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        paid.contains(order)
    }

    /// How often an order was settled after 3-D Secure: a mail goes out each time.
    pub fn settled(&self) -> u32 {
        *self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Deserialize)]
pub struct Charge {
    /// In the smallest unit of the currency: 1500.00 THB are 150000.
    amount: u64,
    card: String,
}

/// The gateway gets a key of its own: the same on every attempt, another one for each customer.
async fn charge(
    State(shop): State<Shop>,
    Extension(attempt): Extension<Attempt>,
    Json(charge): Json<Charge>,
) -> Result<Response, StatusCode> {
    let key = attempt
        .derive("charge")
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let ask = || shop.keyed.charge(key.as_str(), charge.amount, &charge.card);
    let mut result = ask();
    if result == Err(KeyedError::NoAnswer) {
        // Not "nothing happened": ask again, with the same key.
        result = ask();
    }
    Ok(match result {
        Ok(id) => (StatusCode::CREATED, id).into_response(),
        // Kept: the card is asked once.
        Err(KeyedError::Declined) => StatusCode::PAYMENT_REQUIRED.into_response(),
        // The same key would get the same 500, and another key might charge twice.
        Err(_) => {
            let word = Extension(RetentionOverride::LeaveUnknown);
            (StatusCode::BAD_GATEWAY, word).into_response()
        }
    })
}

/// The key covers the creation of the charge, and not what the customer does at the bank. What finds
/// the two together later is a correlation id, kept with the record.
async fn charge_with_3ds(
    State(shop): State<Shop>,
    Extension(attempt): Extension<Attempt>,
    Json(charge): Json<Charge>,
) -> Result<Response, StatusCode> {
    let failed = StatusCode::INTERNAL_SERVER_ERROR;
    let key = attempt.derive("charge").map_err(|_| failed)?;
    let charged = shop.keyed.charge(key.as_str(), charge.amount, &charge.card);
    let charge = charged.map_err(|_| StatusCode::BAD_GATEWAY)?;
    // For the reconciler, and for whoever looks at a customer who never came back.
    attempt.annotate(&charge).await.map_err(|_| failed)?;
    let bank = format!("https://bank.example/3ds?charge={charge}");
    Ok((StatusCode::ACCEPTED, bank).into_response())
}

#[derive(Deserialize)]
struct Return {
    order: String,
}

/// An operation of its own: customers press "reload" here, and the gateway's webhook would call
/// `settle` too.
async fn return_from_3ds(
    State(shop): State<Shop>,
    Query(back): Query<Return>,
) -> Result<&'static str, StatusCode> {
    // What the customer's browser says proves nothing: a real shop inquires here.
    let order = IdempotencyKey::new(&back.order).map_err(|_| StatusCode::BAD_REQUEST)?;
    let settling = shop.clone();
    let settle = move |_attempt| async move {
        settling.order_is_paid(&back.order);
        *settling
            .settled
            .lock()
            .unwrap_or_else(PoisonError::into_inner) += 1;
        Ok::<(), Failure<String>>(())
    };
    let key = order.scoped("settle");
    let ran = shop.engine.run(&key, Fingerprint::of(&[]), settle).await;
    ran.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok("paid")
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Invoice {
    // Made and saved with the order, long before this request.
    invoice_no: String,
}

async fn pay_invoice(State(shop): State<Shop>, Json(invoice): Json<Invoice>) -> Response {
    let number = &invoice.invoice_no;
    match shop.invoiced.payment_token(number) {
        Ok(token) => (StatusCode::CREATED, token).into_response(),
        // Never a new number for a paid order: ask, and tell the customer.
        Err(EXISTING_INVOICE) if shop.invoiced.inquiry(number) => {
            shop.order_is_paid(number);
            (StatusCode::CONFLICT, "already paid").into_response()
        }
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Refund {
    invoice_no: String,
    /// Of the shop's own making; absent, it is derived.
    id: Option<String>,
}

async fn refund(
    State(shop): State<Shop>,
    Extension(attempt): Extension<Attempt>,
    Json(refund): Json<Refund>,
) -> Result<String, Response> {
    let id = match refund.id {
        Some(id) => id,
        None => {
            let derived = attempt.derive("refund");
            let derived = derived.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())?;
            derived.as_str().to_owned()
        }
    };
    // Before it is sent: what the gateway makes of a longer one is not known.
    let format = KeyFormat::new().max_len(100);
    if let Err(error) = format.validate(&id) {
        // Nothing was done; a mended request may use its key.
        let word = Extension(RetentionOverride::NotExecuted);
        return Err((StatusCode::BAD_REQUEST, word, error.to_string()).into_response());
    }
    Ok(shop.invoiced.refund(&id, &refund.invoice_no))
}
