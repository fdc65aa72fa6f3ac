//! A tonic service that charges once, and a client that sends everything again.
//!
//! `cargo run --example tonic`

use std::convert::Infallible;
use std::error::Error;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use futures_util::future::{Either, select};
use http::uri::PathAndQuery;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::client::Grpc as Caller;
use tonic::metadata::MetadataValue;
use tonic::server::{Grpc, NamedService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tower::service_fn;
use tower_idempotency::{Attempt, IdempotencyLayer, MemoryStore, MissingKey};

mod text;

use text::Text;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let idempotency = IdempotencyLayer::builder(MemoryStore::new())
        .missing_key(MissingKey::Reject)
        .build()?;
    let payments = Payments::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let server = Server::builder()
        .layer(idempotency)
        .add_service(payments.clone())
        .serve_with_incoming(TcpIncoming::from(listener));
    tokio::spawn(server);

    let channel = Endpoint::from_shared(format!("http://{addr}"))?
        .connect()
        .await?;
    let client = Client(Caller::new(channel));

    payments.gateway.add_permits(1);
    show("first", &client.charge("order-1", "100 THB").await);
    show("replay", &client.charge("order-1", "100 THB").await);
    show("mismatch", &client.charge("order-1", "999 THB").await);

    // Two copies at once. The gateway takes its time, so the one that does not run is answered first.
    let (one, two) = (client.clone(), client.clone());
    let one = pin!(one.charge("order-2", "50 THB"));
    let two = pin!(two.charge("order-2", "50 THB"));
    let (refused, running) = match select(one, two).await {
        Either::Left((refused, running)) | Either::Right((refused, running)) => (refused, running),
    };
    show("in flight", &refused);
    payments.gateway.add_permits(1);
    show("its twin", &running.await);
    show("replay", &client.charge("order-2", "50 THB").await);
    Ok(())
}

/// What the client got, in a line.
fn show(step: &str, answer: &Result<Response<String>, Status>) {
    match answer {
        Ok(answer) => {
            let replayed = answer.metadata().contains_key("idempotency-replayed");
            let mark = if replayed { " (replayed)" } else { "" };
            println!("{step}: {}{mark}", answer.get_ref());
        }
        Err(status) => {
            let said = |name| {
                let line = status.metadata().get(name);
                line.and_then(|line| line.to_str().ok()).unwrap_or("none")
            };
            let (code, pushback) = (said("idempotency-error"), said("grpc-retry-pushback-ms"));
            println!("{step}: {:?} {code}, back in {pushback} ms", status.code());
        }
    }
}

#[derive(Clone)]
struct Client(Caller<Channel>);

impl Client {
    /// The key is made with the order and kept with it, so that every retry sends the same one.
    async fn charge(&self, order: &str, amount: &str) -> Result<Response<String>, Status> {
        let mut call = Request::new(amount.to_owned());
        let key = MetadataValue::try_from(order);
        let key = key.map_err(|_| Status::invalid_argument("the order cannot be a key"))?;
        call.metadata_mut().insert("idempotency-key", key);
        let mut caller = self.0.clone();
        let ready = caller.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))?;
        caller
            .unary(call, PathAndQuery::from_static(CHARGE), Text)
            .await
    }
}

/// The service as a code generator would make it, with its one method.
#[derive(Clone)]
struct Payments {
    receipts: Arc<AtomicU32>,
    /// Answers as often as it has permits.
    gateway: Arc<Semaphore>,
}

impl Default for Payments {
    fn default() -> Self {
        Self {
            receipts: Arc::default(),
            gateway: Arc::new(Semaphore::new(0)),
        }
    }
}

impl Payments {
    async fn charge(self, call: Request<String>) -> Result<Response<String>, Status> {
        // `attempt.derive("charge")` makes the key for the gateway; see `Attempt`.
        let attempt = call.extensions().get::<Attempt>().cloned();
        let attempt = attempt.ok_or_else(|| Status::internal("the layer is missing"))?;
        // Not `?` on what a real gateway answers: say what it means for this operation.
        let permit = self.gateway.acquire().await;
        permit
            .map_err(|_| Status::unknown("the gateway did not say whether it paid"))?
            .forget();
        let receipt = self.receipts.fetch_add(1, Ordering::SeqCst) + 1;
        let (amount, attempt) = (call.into_inner(), attempt.number());
        let text = format!("receipt {receipt} for {amount}, attempt {attempt}");
        Ok(Response::new(text))
    }
}

impl NamedService for Payments {
    const NAME: &'static str = "shop.Payments";
}

impl tower::Service<http::Request<Body>> for Payments {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let payments = self.clone();
        Box::pin(async move {
            if request.uri().path() != CHARGE {
                return Ok(Status::unimplemented("").into_http());
            }
            let charge = service_fn(|call| payments.clone().charge(call));
            Ok(Grpc::new(Text).unary(charge, request).await)
        })
    }
}

const CHARGE: &str = "/shop.Payments/Charge";
