//! The layer around a plain hyper 1 service, without axum.
//!
//! ```text
//! cargo run --example hyper [ADDR]           serves there; default 127.0.0.1:3001
//!
//! curl -i http://127.0.0.1:3001/orders -H 'Idempotency-Key: "o-1"' -d tea
//! ```

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::ServiceBuilder;
use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody, Scope};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let addr = std::env::args().nth(1);
    let Ok(addr) = addr.as_deref().unwrap_or("127.0.0.1:3001").parse() else {
        eprintln!("hyper: the argument is not an address such as 127.0.0.1:3001");
        return ExitCode::from(2);
    };
    match serve(addr).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hyper: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What hyper has read of a request, and the layer has read ahead.
type OrderRequest = Request<RequestBody<Incoming>>;

async fn order(request: OrderRequest) -> Result<Response<Full<Bytes>>, Infallible> {
    static ORDERS: AtomicUsize = AtomicUsize::new(0);
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::POST, "/orders") => match request.into_body().collect().await {
            Ok(body) => {
                let number = ORDERS.fetch_add(1, Ordering::Relaxed) + 1;
                let what = String::from_utf8_lossy(&body.to_bytes()).into_owned();
                (StatusCode::CREATED, format!("order {number}: {what}\n"))
            }
            Err(_) => (StatusCode::BAD_REQUEST, "the body broke off\n".to_owned()),
        },
        _ => (StatusCode::NOT_FOUND, "POST /orders\n".to_owned()),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    Ok(response)
}

async fn serve(addr: SocketAddr) -> Result<(), BoxError> {
    let layer = IdempotencyLayer::builder(MemoryStore::new())
        // One caller for the sake of a short example: with several, see `examples/payments`.
        .scope(Scope::everybody())
        .build()?;
    let idempotency = layer.idempotency().clone();
    let service = ServiceBuilder::new().layer(layer).service_fn(order);
    // hyper has a `Service` trait of its own.
    let service = TowerToHyperService::new(service);

    let listener = TcpListener::bind(addr).await?;
    println!("listening on {}", listener.local_addr()?);
    let server = auto::Builder::new(TokioExecutor::new());
    let connections = GracefulShutdown::new();
    let mut asked_to_stop = pin!(asked_to_stop());
    loop {
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                // Out of file descriptors, or a client that is gone already: serve the others.
                Err(error) => {
                    eprintln!("hyper: cannot accept: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            _ = &mut asked_to_stop => break,
        };
        let connection = server.serve_connection(TokioIo::new(stream), service.clone());
        let connection = connections.watch(connection.into_owned());
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("hyper: a connection failed: {error}");
            }
        });
    }
    drop(listener);
    // First the connections, then the attempts whose clients are gone.
    let _ = tokio::time::timeout(Duration::from_secs(30), connections.shutdown()).await;
    idempotency.drain().await;
    Ok(())
}

/// Returns at Ctrl-C or SIGTERM.
async fn asked_to_stop() {
    let interrupted = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminated) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = interrupted => {}
                _ = terminated.recv() => {}
            }
            return;
        }
    }
    let _ = interrupted.await;
}
