//! A client that pays once over a network that fails.
//!
//! ```text
//! cargo run --example client --features client                  pays the service of `payments`
//! cargo run --example client --features client -- --simulate    1,000 clients and an outage
//! ```
//!
//! Read [`client`] below first: it is the part that a program of yours would have too.

#[path = "../payments/app.rs"]
mod app;
#[path = "../payments/auth.rs"]
mod auth;
#[path = "../payments/gateway.rs"]
mod gateway;
mod simulate;
mod unlucky;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_idempotency::client::{ClientError, ClientLayer, RetryPolicy};
use tower_idempotency::{IdempotencyKey, MemoryStore};

use gateway::Gateway;
use unlucky::{Luck, Unlucky};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match *arguments {
        [] => pay_through_faults(),
        ["--simulate"] => simulate::report(&mut io::stdout()).map_err(Into::into),
        _ => {
            eprintln!("client: the only flag is --simulate");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("client: {error}");
            ExitCode::FAILURE
        }
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A client that retries. Around it stands what a program of yours would write; inside, hyper-util's
/// client, and between them what this example records of each try.
fn client(
    tries: Tries,
) -> impl Service<Request<Full<Bytes>>, Response = Response<Bytes>, Error = ClientError, Future: Send>
+ Clone
+ Send {
    let http = Client::builder(TokioExecutor::new())
        // A connection for each try, because the network below fails by connections.
        .pool_max_idle_per_host(0)
        .build_http::<Full<Bytes>>();
    // Quick, to be watched. The defaults are made for production.
    let retry = RetryPolicy::new().base(Duration::from_millis(20));
    ServiceBuilder::new()
        .layer(ClientLayer::new().retry(retry))
        .map_result(move |result| tries.record(result))
        .service(http)
}

fn payment(
    server: SocketAddr,
    amount: u64,
    key: &IdempotencyKey,
) -> Result<Request<Full<Bytes>>, BoxError> {
    let body = format!(r#"{{"amount":{amount},"currency":"EUR","card":"visa"}}"#);
    Ok(Request::post(format!("http://{server}/payments"))
        .header(AUTHORIZATION, "Bearer alice-token")
        .header(CONTENT_TYPE, "application/json")
        // Of the order, so that another process that sends it again has the same one.
        .extension(key.clone())
        .body(Full::from(body))?)
}

#[tokio::main]
async fn pay_through_faults() -> Result<(), BoxError> {
    let mut out = io::stdout();
    let gateway = Gateway::new(Duration::ZERO);
    let service = app::router(app::layer(Arc::new(MemoryStore::new()))?, gateway.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, service).await });

    for (amount, what, plan) in FAULTS {
        let server = Unlucky::before(upstream, plan).await?;
        let tries = Tries::new();
        let request = payment(server, *amount, &IdempotencyKey::random())?;
        let answer = client(tries.clone()).oneshot(request).await?;
        line(&mut out, what, &tries, &answer, &gateway)?;
    }

    // The same payment from two places at once: the second one waits for the first one's answer.
    let server = Unlucky::before(upstream, &[]).await?;
    let key = IdempotencyKey::random();
    let (one, two) = (Tries::new(), Tries::new());
    let mut held = gateway.hold_next();
    let first = client(one).oneshot(payment(server, 40_00, &key)?);
    let first = tokio::spawn(first);
    held.reached().await;
    let second = client(two.clone()).oneshot(payment(server, 40_00, &key)?);
    let second = tokio::spawn(second);
    two.first().await;
    held.go_on();
    first.await??;
    let answer = second.await??;
    line(
        &mut out,
        "the same payment runs already",
        &two,
        &answer,
        &gateway,
    )?;
    Ok(())
}

/// Whether one more payment was charged than on the line before is checked too.
fn line(
    out: &mut impl Write,
    what: &str,
    tries: &Tries,
    answer: &Response<Bytes>,
    gateway: &Gateway,
) -> Result<(), BoxError> {
    let charges: Vec<u64> = gateway
        .charges()
        .iter()
        .map(|charge| charge.amount)
        .collect();
    let seen = tries.0.borrow().join(", ");
    writeln!(out, "{what:<38} {seen:<26} charged {charges:?}")?;
    let amounts = [10_00, 20_00, 30_00, 40_00];
    match answer.status() == StatusCode::CREATED && amounts.starts_with(&charges) {
        true => Ok(()),
        false => Err("that is not what was promised".into()),
    }
}

/// An amount, what the network does, and how.
const FAULTS: &[(u64, &str, &[Luck])] = &[
    (
        10_00,
        "the service is unavailable, twice",
        &[Luck::Unavailable, Luck::Unavailable],
    ),
    (
        20_00,
        "the connection breaks after the charge",
        &[Luck::CutBeforeAnswer],
    ),
    (
        30_00,
        "the connection breaks in the answer",
        &[Luck::CutInAnswer, Luck::CutBeforeRequest],
    ),
];

/// What each try brought, in order.
#[derive(Clone)]
struct Tries(watch::Sender<Vec<String>>);

impl Tries {
    fn new() -> Self {
        Self(watch::Sender::new(Vec::new()))
    }

    fn record<E>(&self, result: Result<Response<Incoming>, E>) -> Result<Response<Incoming>, E> {
        let seen = match &result {
            Ok(answer) if answer.headers().contains_key("idempotency-replayed") => {
                format!("{} replayed", answer.status().as_u16())
            }
            Ok(answer) => answer.status().as_u16().to_string(),
            Err(_) => "cut".to_owned(),
        };
        self.0.send_modify(|tries| tries.push(seen));
        result
    }

    /// Returns when the first try has ended.
    async fn first(&self) {
        let mut tries = self.0.subscribe();
        // An error: nobody is left to try.
        let _ = tries.wait_for(|tries| !tries.is_empty()).await;
    }
}
