//! A payments service that charges once, however often and however badly a request is repeated.
//!
//! ```text
//! cargo run --example payments -- --demo     plays the life of a payment over real sockets
//! cargo run --example payments               serves, and prints curl lines to try
//! ```
//!
//! Read `app.rs` first: it is the part that a service of yours would have too.

mod app;
mod args;
mod auth;
mod demo;
mod gateway;
mod restart;
mod wire;

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tower_idempotency::{IdempotencyKey, PrefixedStore, Store, store};

use args::{Args, Mode};
use gateway::Gateway;

#[tokio::main]
async fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("payments: {problem}");
            return ExitCode::from(2);
        }
    };
    let store = args.store;
    let done = match args.mode {
        Mode::Help => io::stdout()
            .write_all(args::USAGE.as_bytes())
            .map(|()| true)
            .map_err(Into::into),
        Mode::Demo => play(store).await,
        Mode::Serve(addr) => serve(addr, store).await.map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("payments: {error}");
            ExitCode::FAILURE
        }
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Whether every line of the demo was what was promised.
async fn play(url: Option<String>) -> Result<bool, BoxError> {
    calm_the_panics_of_the_demo();
    let folder = restart::Folder::new()?;
    let url = url.unwrap_or_else(|| folder.sqlite_url());
    let store = store::open(&url).await?;
    let durable = store.properties().durable;
    // Keys of its own: what the demo of yesterday left behind must not answer for today's.
    let store = Arc::new(PrefixedStore::new(store, IdempotencyKey::random().as_str()));
    let gateway = Gateway::new(Duration::ZERO);
    let report = demo::play(app::layer(store)?, gateway, &mut io::stdout()).await?;
    let mut out = io::stdout();
    let restarted = !durable || restart::play(&url, &mut out).await?;
    if report.broken().next().is_none() && restarted {
        writeln!(out, "\nEvery line is what was promised.")?;
        return Ok(true);
    }
    writeln!(out, "\nNot what was promised:")?;
    for line in report.broken() {
        writeln!(
            out,
            "  line {}: {}; promised: {}",
            line.number,
            line.happened(),
            line.promised()
        )?;
    }
    Ok(false)
}

/// One line on standard error for the panic that the demo provokes. Any other one is a fault of the
/// example and is shown in full.
fn calm_the_panics_of_the_demo() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        match panic.payload().downcast_ref::<&str>() {
            Some(&gateway::CRASH) => {
                eprintln!("(the service panics, as planned: {})", gateway::CRASH);
            }
            _ => usual(panic),
        }
    }));
}

async fn serve(addr: SocketAddr, url: Option<String>) -> Result<(), BoxError> {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    let store = store::open(url.as_deref().unwrap_or("memory:")).await?;
    let properties = store.properties();
    let layer = app::layer(store)?;
    let idempotency = layer.idempotency().clone();
    // Slow enough to send a second request while the first one runs.
    let gateway = Gateway::new(Duration::from_secs(2));
    let app = app::router(layer, gateway);
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    io::stdout().write_all(greeting(addr, properties.name, properties.durable).as_bytes())?;

    let (stopping, stop) = oneshot::channel();
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        asked_to_stop().await;
        let _ = stopping.send(());
    });
    tokio::select! {
        served = server => served?,
        // A client that never ends its request must not keep the process alive.
        () = async { let _ = stop.await; tokio::time::sleep(DRAIN).await } => {}
    }
    // The connections are gone; attempts whose client left before are not.
    let drained = idempotency.drain().await;
    let mut out = io::stdout();
    match drained {
        true => writeln!(out, "stopped; every attempt has ended")?,
        false => writeln!(
            out,
            "stopped; {} attempts had not ended",
            idempotency.running()
        )?,
    }
    Ok(())
}

const DRAIN: Duration = Duration::from_secs(30);

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

fn greeting(addr: SocketAddr, store: &str, durable: bool) -> String {
    let memory = match durable {
        true => "",
        false => " (it forgets its keys when the process ends)",
    };
    let post = format!(
        "curl -i http://{addr}/payments -H 'Authorization: Bearer alice-token' \
         -H 'Content-Type: application/json'"
    );
    let pay = r#"-d '{"amount":1000,"currency":"EUR","card":"visa"}'"#;
    let more = r#"-d '{"amount":9900,"currency":"EUR","card":"visa"}'"#;
    let key = r#"-H 'Idempotency-Key: "order-1"'"#;
    let twin = r#"-H 'Idempotency-Key: "order-2"'"#;
    format!(
        "listening on {addr}
store: {store}{memory}

A payment of 10.00 EUR; amounts are integers of the smallest unit. Send it twice:
  {post} {key} {pay}

The same key for another amount:
  {post} {key} {more}

Two at once:
  {post} {twin} {pay} & {post} {twin} {pay}; wait

Hang up half-way with Ctrl-C, then send it again: there is one charge:
  {post} -H 'Idempotency-Key: \"order-3\"' {pay}

Without a key:
  {post} {pay}

What was charged, and what the service enforces:
  curl http://{addr}/payments -H 'Authorization: Bearer alice-token'
  curl http://{addr}/policy

Other tokens: bob-token. Other cards: declined, timeout, crash. Ctrl-C stops the service.
"
    )
}
