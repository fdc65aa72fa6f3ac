//! Webhooks: every event is handled once, however often it is delivered.
//!
//! ```text
//! cargo run --example webhook
//! ```
//!
//! Two senders. The first one delivers one event at a time, and the layer tells repetitions by the
//! event's id. The second one puts several events into one delivery, and the handler tells them one by
//! one. The program plays the senders too, prints what each delivery did, and exits with 0 only if
//! that is what is promised.
//!
//! Signatures are verified first, outside of the layer: a stranger must not be able to use up the id
//! of an event that is still to come.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use sha2::Sha256;
use tower::ServiceExt;
use tower_idempotency::{
    Advice, ConfigError, Failure, Fingerprint, Idempotency, IdempotencyKey, IdempotencyLayer,
    KeySource, MemoryStore, ScopedKey,
};

// --- What a service of yours would have too. ---

fn app(orders: Orders) -> Result<Router, ConfigError> {
    // A store that outlives the process in earnest: see the README's table.
    let engine = Idempotency::builder(MemoryStore::new())
        // As long as a sender can deliver an event again.
        .retention(Duration::from_secs(30 * 24 * 60 * 60))
        .build()?;
    let event_id = KeySource::json(["/id"])?;
    let charges = IdempotencyLayer::webhooks(engine.clone(), "gateway", event_id).build()?;
    let gateway = Router::new()
        .route("/webhooks/gateway", post(one_event))
        .layer(charges)
        .with_state(orders.clone());
    let points = Router::new()
        .route("/webhooks/points", post(several_events))
        .with_state((engine, orders));
    // A later `.layer` is an outer one: the signature is looked at before anything else.
    Ok(gateway.merge(points).layer(from_fn(verify_signature)))
}

/// Lets a delivery pass if its sender knows the secret. Real senders sign a time stamp as well.
async fn verify_signature(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, 1024 * 1024).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    if !is_signed(&head.headers, &body) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    next.run(Request::from_parts(head, Body::from(body))).await
}

#[derive(Deserialize)]
struct Event {
    key: String,
    order: String,
}

/// Runs once per event. Points are *added*, which is why running twice would do harm; setting the
/// status twice would not.
async fn one_event(State(orders): State<Orders>, Json(event): Json<Event>) -> StatusCode {
    match &*event.key {
        "charge.complete" => orders.update(&event.order, "paid", 100),
        "charge.expire" => orders.update(&event.order, "expired", 0),
        // Not ours. A 2xx, or its sender would deliver it again for days.
        _ => {}
    }
    StatusCode::OK
}

#[derive(Deserialize)]
struct Delivery {
    events: Vec<PointsEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PointsEvent {
    webhook_event_id: String,
    order: String,
    points: u64,
}

/// A delivery of several events, of which a redelivery may hold some: each of them runs once.
async fn several_events(
    State((engine, orders)): State<(Idempotency<MemoryStore>, Orders)>,
    Json(delivery): Json<Delivery>,
) -> Response {
    let mut come_again = None;
    for event in delivery.events {
        // No second delivery mends an id that is none.
        let Ok(id) = IdempotencyKey::new(&event.webhook_event_id) else {
            eprintln!("an event was left out: its id is no key");
            continue;
        };
        let key = ScopedKey::new("webhook", "points", &id);
        let orders = orders.clone();
        let work = move |_attempt| async move {
            orders.update(&event.order, "paid", event.points);
            Ok::<(), Failure<String>>(())
        };
        // The id alone says which event it is, as with the layer.
        let ran = engine.run(&key, Fingerprint::of(&[]), work).await;
        // One that did not run keeps none of the others from running.
        let Err(error) = ran else { continue };
        match error.advice() {
            Advice::RetryAfter(after) => come_again = come_again.max(Some(after)),
            // It failed for good, or no retry helps.
            _ => eprintln!("an event needs a look: {key:?}: {error}"),
        }
    }
    match come_again {
        None => StatusCode::OK.into_response(),
        Some(after) => {
            let after = [(RETRY_AFTER, after.as_secs().max(1).to_string())];
            (StatusCode::SERVICE_UNAVAILABLE, after).into_response()
        }
    }
}

/// The orders of a shop, in place of its database.
#[derive(Clone, Default)]
struct Orders(Arc<Mutex<BTreeMap<String, Order>>>);

#[derive(Clone, Default)]
struct Order {
    status: &'static str,
    points: u64,
    updates: u32,
}

impl Orders {
    fn update(&self, order: &str, status: &'static str, points: u64) {
        let mut orders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let order = orders.entry(order.to_owned()).or_default();
        order.status = status;
        order.points += points;
        order.updates += 1;
    }

    fn of(&self, order: &str) -> Order {
        let orders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        orders.get(order).cloned().unwrap_or_default()
    }
}

/// Shared with the senders.
const SECRET: &[u8] = b"a secret of this example";

fn signature(body: &[u8]) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).ok()?;
    mac.update(body);
    Some(mac)
}

fn is_signed(headers: &HeaderMap, body: &Bytes) -> bool {
    let claimed = headers
        .get("x-signature")
        .and_then(|value| hex(value.as_bytes()));
    let (Some(claimed), Some(mac)) = (claimed, signature(body)) else {
        return false;
    };
    // In constant time.
    mac.verify_slice(&claimed).is_ok()
}

fn hex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_chunks::<2>() else {
        return None;
    };
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok();
    pairs.iter().map(byte).collect()
}

// --- The senders. ---

struct Line {
    what: &'static str,
    path: &'static str,
    signed: bool,
    body: &'static str,
    order: &'static str,
    promised: &'static str,
}

const GATEWAY: &str = "/webhooks/gateway";
const POINTS: &str = "/webhooks/points";
const COMPLETE: &str = r#"{"id":"evnt_1","key":"charge.complete","order":"A","attempt":1}"#;
const COMPLETE_AGAIN: &str = r#"{"id":"evnt_1","key":"charge.complete","order":"A","attempt":2}"#;
const EXPIRE: &str = r#"{"id":"evnt_2","key":"charge.expire","order":"B","attempt":1}"#;
const EXPIRE_AGAIN: &str = r#"{"id":"evnt_2","key":"charge.expire","order":"B","attempt":2}"#;

#[rustfmt::skip]
const LINES: &[Line] = &[
    Line { what: "charge.complete", path: GATEWAY, signed: true, order: "A", body: COMPLETE,
        promised: "200            order A: paid, 100 points, 1 update" },
    Line { what: "the same again", path: GATEWAY, signed: true, order: "A", body: COMPLETE_AGAIN,
        promised: "200 replayed   order A: paid, 100 points, 1 update" },
    Line { what: "charge.expire", path: GATEWAY, signed: true, order: "B", body: EXPIRE,
        promised: "200            order B: expired, 0 points, 1 update" },
    Line { what: "the same again", path: GATEWAY, signed: true, order: "B", body: EXPIRE_AGAIN,
        promised: "200 replayed   order B: expired, 0 points, 1 update" },
    Line { what: "an event without an id", path: GATEWAY, signed: true, order: "A",
        body: r#"{"key":"charge.complete","order":"A"}"#,
        promised: "400 event_id_missing   order A: paid, 100 points, 1 update" },
    Line { what: "a stranger, id evnt_3", path: GATEWAY, signed: false, order: "C",
        body: r#"{"id":"evnt_3","key":"charge.expire","order":"C"}"#,
        promised: "401            order C: none, 0 points, 0 updates" },
    Line { what: "the sender, id evnt_3", path: GATEWAY, signed: true, order: "C",
        body: r#"{"id":"evnt_3","key":"charge.complete","order":"C"}"#,
        promised: "200            order C: paid, 100 points, 1 update" },
    Line { what: "two events in one delivery", path: POINTS, signed: true, order: "D",
        body: r#"{"events":[{"webhookEventId":"01H1","order":"D","points":10},{"webhookEventId":"01H2","order":"D","points":20}]}"#,
        promised: "200            order D: paid, 30 points, 2 updates" },
    Line { what: "one of them again, one new", path: POINTS, signed: true, order: "D",
        body: r#"{"events":[{"webhookEventId":"01H2","order":"D","points":20},{"webhookEventId":"01H3","order":"D","points":5}]}"#,
        promised: "200            order D: paid, 35 points, 3 updates" },
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match play().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("webhook: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every delivery did what was promised.
async fn play() -> Result<bool, Box<dyn std::error::Error>> {
    let orders = Orders::default();
    let app = app(orders.clone())?;
    let mut sound = true;
    for (number, line) in (1..).zip(LINES) {
        let answer = app.clone().oneshot(line.request()?).await?;
        let said = line.told(&answer, &orders);
        println!("{number} {:27} {said}", line.what);
        if said != line.promised {
            println!("  promised: {}", line.promised);
            sound = false;
        }
    }
    Ok(sound)
}

impl Line {
    fn request(&self) -> Result<Request, axum::http::Error> {
        let mut request = Request::post(self.path).header("content-type", "application/json");
        if let Some(mac) = signature(self.body.as_bytes()).filter(|_| self.signed) {
            let mac = mac.finalize().into_bytes();
            let digits: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
            request = request.header("x-signature", digits);
        }
        request.body(Body::from(self.body))
    }

    fn told(&self, answer: &Response, orders: &Orders) -> String {
        let headers = answer.headers();
        let code = headers
            .get("idempotency-error")
            .and_then(|code| code.to_str().ok());
        let marked = headers.contains_key("idempotency-replayed");
        let word = code.unwrap_or(if marked { "replayed" } else { "" });
        let status = format!("{} {word}", answer.status().as_u16());
        let Order {
            status: order,
            points,
            updates,
        } = orders.of(self.order);
        let order = if order.is_empty() { "none" } else { order };
        let s = if updates == 1 { "" } else { "s" };
        let name = self.order;
        format!("{status:12}   order {name}: {order}, {points} points, {updates} update{s}")
    }
}
