//! The service itself: routes, layers, and a handler that says what its answers mean.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::{Deserialize, Serialize};
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{
    Attempt, ConfigError, Idempotency, IdempotencyLayer, MissingKey, RetentionOverride, Scope,
    Store,
};

use crate::auth::{Account, authenticate};
use crate::gateway::{Charge, Gateway, GatewayError, Order};

/// What makes the service charge once.
pub fn layer(store: Arc<dyn Store>) -> Result<IdempotencyLayer<Arc<dyn Store>>, ConfigError> {
    let idempotency = Idempotency::builder(store).secret(SECRET).build()?;
    IdempotencyLayer::builder(idempotency)
        // Two customers who send the same key are two keys.
        .scope(Scope::extension::<Account>())
        // A payment without a key could not be retried safely, so there is none.
        .missing_key(MissingKey::Reject)
        .build()
}

/// All routes.
pub fn router(layer: IdempotencyLayer<Arc<dyn Store>>, gateway: Gateway) -> Router {
    let policy = layer.policy().to_json();
    let payments = Router::new()
        .route("/payments", post(create).get(list))
        .route("/payments/{id}", get(show))
        // A later `.layer` is an outer one: a request meets the last one first.
        .layer(layer)
        // Outside: the scope is what it finds out.
        .layer(from_fn(authenticate))
        // Outside: the client stops waiting, the payment goes on, and a retry gets its result.
        // Inside, a timeout would end a payment in the middle.
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            Duration::from_secs(30),
        ))
        .with_state(gateway);
    // What a client may rely on is published; nobody needs a token to read it.
    let policy = get(async move || ([(CONTENT_TYPE, "application/json")], policy));
    Router::new().route("/policy", policy).merge(payments)
}

/// What a client sends. A member that is misspelt is an error and not a default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewPayment {
    /// In the smallest unit of the currency: 10.00 EUR are 1000.
    amount: u64,
    currency: String,
    card: String,
}

#[derive(Serialize)]
struct Payment {
    status: &'static str,
    #[serde(flatten)]
    charge: Charge,
}

async fn create(
    State(gateway): State<Gateway>,
    Extension(account): Extension<Account>,
    // With the crate's feature `axum`, `attempt: Attempt` is an extractor of its own.
    Extension(attempt): Extension<Attempt>,
    payment: Result<Json<NewPayment>, JsonRejection>,
) -> Result<Response, Refused> {
    // A rejection of axum's own would be kept like every other answer, and the mended request could
    // not use its key.
    let Json(payment) = payment.map_err(|rejection| Refused::Invalid(rejection.body_text()))?;
    payment.check()?;
    // Not the client's key, which is unique among the keys of one customer only.
    let reference = attempt.derive("charge").map_err(|_| Refused::NotNow)?;
    // Should this process die now, the record says which charge to ask the gateway for.
    attempt
        .annotate(reference.as_str())
        .await
        .map_err(|_| Refused::NotNow)?;
    let order = Order {
        reference,
        attempt: attempt.number(),
        account,
        amount: payment.amount,
        currency: payment.currency,
        card: payment.card,
    };
    let charge = gateway.charge(order).await?;
    let location = format!("/payments/{}", charge.id);
    let payment = Json(Payment::from(charge));
    Ok((StatusCode::CREATED, [(LOCATION, location)], payment).into_response())
}

async fn list(
    State(gateway): State<Gateway>,
    Extension(account): Extension<Account>,
) -> Json<Vec<Payment>> {
    Json(own(&gateway, &account).collect())
}

async fn show(
    State(gateway): State<Gateway>,
    Extension(account): Extension<Account>,
    Path(id): Path<String>,
) -> Result<Json<Payment>, StatusCode> {
    own(&gateway, &account)
        .find(|payment| payment.charge.id == id)
        .map(Json)
        .ok_or(StatusCode::NOT_FOUND)
}

fn own(gateway: &Gateway, account: &Account) -> impl Iterator<Item = Payment> {
    let charges = gateway.charges().into_iter();
    charges
        .filter(move |charge| charge.account == *account)
        .map(Payment::from)
}

impl NewPayment {
    fn check(&self) -> Result<(), Refused> {
        let invalid = |detail: &str| Err(Refused::Invalid(detail.to_owned()));
        if !(1..=MAX_AMOUNT).contains(&self.amount) {
            return invalid("`amount` must be from 1 to 99999999, in the smallest unit");
        }
        if self.currency.len() != 3 || !self.currency.bytes().all(|b| b.is_ascii_uppercase()) {
            return invalid("`currency` must be three upper case letters, such as EUR");
        }
        Ok(())
    }
}

impl From<Charge> for Payment {
    fn from(charge: Charge) -> Self {
        Self {
            status: "succeeded",
            charge,
        }
    }
}

/// Why there is no payment, and what that means for the key.
enum Refused {
    /// The request is wrong; nothing was done.
    Invalid(String),
    /// The bank says no, and would say so again.
    Declined,
    /// Nothing was done, for a reason of our own.
    NotNow,
    /// The money may have been taken.
    Unknown,
}

impl From<GatewayError> for Refused {
    fn from(error: GatewayError) -> Self {
        match error {
            GatewayError::Declined => Self::Declined,
            GatewayError::TimedOut | GatewayError::Superseded => Self::Unknown,
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (status, code, word) = match self {
            Self::Invalid(_) => (
                StatusCode::BAD_REQUEST,
                "invalid_payment",
                // Free the key, so that the mended request can use it.
                RetentionOverride::NotExecuted,
            ),
            Self::Declined => (
                StatusCode::PAYMENT_REQUIRED,
                "card_declined",
                RetentionOverride::Keep,
            ),
            Self::NotNow => (
                StatusCode::SERVICE_UNAVAILABLE,
                "not_now",
                RetentionOverride::NotExecuted,
            ),
            Self::Unknown => (
                StatusCode::GATEWAY_TIMEOUT,
                "gateway_timed_out",
                // A 5xx would free the key, and a retry would charge again.
                RetentionOverride::LeaveUnknown,
            ),
        };
        let detail = match self {
            Self::Invalid(detail) => detail,
            Self::Declined => "The card was declined. Use a new key for another card.".to_owned(),
            Self::NotNow => "Nothing was charged. Send the same request again.".to_owned(),
            Self::Unknown => "The payment may have been made. Look at GET /payments.".to_owned(),
        };
        let problem = serde_json::json!({
            "title": "No payment",
            "status": status.as_u16(),
            "code": code,
            "detail": detail,
        });
        let headers = [(CONTENT_TYPE, "application/problem+json")];
        (status, Extension(word), headers, Json(problem)).into_response()
    }
}

const MAX_AMOUNT: u64 = 99_999_999;

/// From your secret manager in a service of yours: the same on all instances, for as long as records
/// are kept.
const SECRET: &[u8] = b"not a secret, as everybody can read it";
