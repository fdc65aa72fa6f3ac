//! Gateways: what to hand them as a key, and what to make of their answers.
//!
//! ```text
//! cargo run --example gateways
//! ```
//!
//! `shop.rs` is what you would copy; the gateways in `fakes.rs` are offline. The program plays the
//! customers, prints what came of each request, and exits with 0 only if that is what is promised.

mod fakes;
mod shop;

use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use tower::ServiceExt;
use tower_idempotency::{Idempotency, IdempotencyKey, MemoryStore, ScopedKey, Store};

use crate::shop::Shop;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// For how long gateways know a key, where it is published: see `GATEWAYS.md`.
const WINDOWS: &[(&str, Duration)] = &[
    ("Stripe API v1", Duration::from_secs(24 * HOUR)),
    ("Stripe API v2", Duration::from_secs(30 * 24 * HOUR)),
    ("Adyen", Duration::from_secs(7 * 24 * HOUR)),
    ("PayPal Orders v2", Duration::from_secs(6 * HOUR)),
    ("PayPal Payments v2", Duration::from_secs(45 * 24 * HOUR)),
];
const HOUR: u64 = 60 * 60;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match play().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gateways: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything came as it is promised.
async fn play() -> Result<bool, BoxError> {
    let engine = Idempotency::builder(MemoryStore::new())
        .secret(*b"the same on all instances")
        .retention(Duration::from_secs(7 * 24 * HOUR))
        .build()?;
    let shop = Shop::new(engine);
    let mut told = Told {
        app: shop.router()?,
        sound: true,
    };
    warn_of_longer_windows(Duration::from_secs(7 * 24 * HOUR));

    println!("\nA gateway that takes a key:");
    let lost = r#"{"amount":150000,"card":"answer-lost"}"#;
    told.line(
        "alice, key order-1; the answer is lost",
        "201 ch_1",
        ask("/charges", "alice", "order-1", lost),
    )
    .await?;
    told.fact("charges, questions", "(1, 2)", shop.keyed.counts());
    told.line(
        "the same again",
        "201 replayed ch_1",
        ask("/charges", "alice", "order-1", lost),
    )
    .await?;
    told.fact("charges, questions", "(1, 2)", shop.keyed.counts());
    told.line(
        "bob, the same key",
        "201 ch_2",
        ask("/charges", "bob", "order-1", lost),
    )
    .await?;
    let declined = r#"{"amount":1,"card":"declined"}"#;
    told.line(
        "a card that is declined",
        "402 ",
        ask("/charges", "alice", "order-2", declined),
    )
    .await?;
    told.line(
        "the same again",
        "402 replayed ",
        ask("/charges", "alice", "order-2", declined),
    )
    .await?;
    let broken = r#"{"amount":1,"card":"broken"}"#;
    told.line(
        "the gateway answers 500",
        "502 ",
        ask("/charges", "alice", "order-3", broken),
    )
    .await?;
    told.line(
        "the same again",
        "409 outcome_unknown",
        ask("/charges", "alice", "order-3", broken),
    )
    .await?;
    told.fact("charges, questions", "(2, 6)", shop.keyed.counts());

    println!("\nA gateway whose key is the invoice:");
    let invoice = r#"{"invoiceNo":"INV-1"}"#;
    let pay = || ask("/invoices", "alice", "", invoice);
    told.line("alice wants to pay INV-1", "201 token-INV-1", pay())
        .await?;
    told.line("the same again", "201 replayed token-INV-1", pay())
        .await?;
    shop.invoiced.customer_pays("INV-1");
    // A week later, or by another instance before there was a shared store.
    let key = ScopedKey::new("invoices", "alice", &IdempotencyKey::new("INV-1")?);
    shop.engine.store().remove(&key).await?;
    told.line(
        "paid, our record gone, the same again",
        "409 already paid",
        pay(),
    )
    .await?;
    told.fact("the order is paid", "true", shop.is_paid("INV-1"));
    told.fact(
        "invoices, refunds, inquiries",
        "(1, 0, 1)",
        shop.invoiced.counts(),
    );
    let refund = |key| ask("/refunds", "alice", key, invoice);
    told.line("a refund", "200 refund 1 of INV-1", refund("refund-1"))
        .await?;
    told.line(
        "the same again",
        "200 replayed refund 1 of INV-1",
        refund("refund-1"),
    )
    .await?;
    let id = "r".repeat(101);
    let long = format!(r#"{{"invoiceNo":"INV-1","id":"{id}"}}"#);
    told.line(
        "a refund with an id of 101 characters",
        "400 the key is too long; the longest that is taken has 100 bytes",
        ask("/refunds", "alice", "refund-2", &long),
    )
    .await?;
    told.fact(
        "invoices, refunds, inquiries",
        "(1, 1, 1)",
        shop.invoiced.counts(),
    );

    println!("\n3-D Secure:");
    let card = r#"{"amount":5000,"card":"4242"}"#;
    told.line(
        "a charge that needs the bank",
        "202 https://bank.example/3ds?charge=ch_3",
        ask("/charges/3ds", "alice", "order-4", card),
    )
    .await?;
    let key = ScopedKey::new("http", "alice", &IdempotencyKey::new("order-4")?);
    let record = shop.engine.store().lookup(&key).await?;
    let correlation = record.and_then(|record| record.notes.correlation);
    told.fact(
        "the record's correlation id",
        "ch_3",
        correlation.unwrap_or_default(),
    );
    for what in ["the customer comes back", "and presses reload"] {
        let back = Request::get("/3ds/return?order=order-4").body(Body::empty())?;
        told.line(what, "200 paid", Ok(back)).await?;
    }
    told.fact("mails", "1", shop.settled());
    Ok(told.sound)
}

/// A retry that comes when we have forgotten a key and the gateway has not is answered by the gateway
/// alone, if it gets the same key at all. So keep records for as long as the gateway keeps keys.
fn warn_of_longer_windows(ours: Duration) {
    for (gateway, theirs) in WINDOWS {
        if ours < *theirs {
            let [ours, theirs] = [ours, *theirs].map(|kept| kept.as_secs() / HOUR);
            println!("warning: {gateway} knows a key for {theirs} h, we for {ours} h");
        }
    }
}

fn ask(path: &str, account: &str, key: &str, body: &str) -> Result<Request<Body>, BoxError> {
    let mut request = Request::post(path)
        .header("content-type", "application/json")
        .header("x-account", account);
    if !key.is_empty() {
        request = request.header("idempotency-key", key);
    }
    Ok(request.body(Body::from(body.to_owned()))?)
}

struct Told {
    app: Router,
    sound: bool,
}

impl Told {
    async fn line(
        &mut self,
        what: &str,
        promised: &str,
        request: Result<Request<Body>, BoxError>,
    ) -> Result<(), BoxError> {
        let answer = self.app.clone().oneshot(request?).await?;
        let (head, body) = answer.into_parts();
        let body = to_bytes(body, 1024 * 1024).await?;
        let said = summary(head.status, &head.headers, &String::from_utf8_lossy(&body));
        self.fact(what, promised, said);
        Ok(())
    }

    fn fact(&mut self, what: &str, promised: &str, is: impl std::fmt::Debug) {
        let is = format!("{is:?}");
        let is = is.trim_matches('"');
        println!("  {what:40} {is}");
        if is != promised {
            println!("  promised: {promised}");
            self.sound = false;
        }
    }
}

fn summary(status: StatusCode, headers: &HeaderMap, body: &str) -> String {
    let code = status.as_u16();
    if let Some(error) = headers.get("idempotency-error") {
        return format!("{code} {}", String::from_utf8_lossy(error.as_bytes()));
    }
    match headers.contains_key("idempotency-replayed") {
        true => format!("{code} replayed {body}"),
        false => format!("{code} {body}"),
    }
}
