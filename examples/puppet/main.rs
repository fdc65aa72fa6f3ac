//! A server whose handler does what the request's headers tell it: for black-box tests.
//!
//! ```text
//! cargo run --example puppet -- --addr 127.0.0.1:8080
//! curl -i -X POST -H 'Idempotency-Key: "k"' -H 'x-puppet-status: 201' 127.0.0.1:8080/do/charge
//! curl 127.0.0.1:8080/count/charge
//! ```
//!
//! The first line on standard output is `listening on 127.0.0.1:PORT`. HTTP/1.1 and HTTP/2 (with
//! prior knowledge) share the port.
//!
//! | | |
//! |---|---|
//! | `ANY /do/{name}` | the handler, behind the idempotency layer |
//! | `GET /count/{name}` | `{"started":n,"finished":n}`: how often that handler began, and reached its end |
//! | `GET /policy` | what the layer enforces, as JSON |
//!
//! What the handler obeys is listed in [`orders`], the flags are printed by `--help`. SIGTERM and
//! SIGINT end the server when everything that it began has ended.

mod counts;
mod flags;
mod handler;
mod orders;
mod rewrite;

use std::convert::Infallible;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tower::{ServiceBuilder, ServiceExt};
use tower_idempotency::{IdempotencyLayer, ResponseBody, Store};

use crate::counts::Counts;
use crate::flags::Command;

#[tokio::main]
async fn main() -> ExitCode {
    // Panics are ordered here, so one line each is enough.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{}", panic.to_string().replace('\n', " "));
    }));
    let flags = match flags::parse(std::env::args_os().skip(1)) {
        Ok(Command::Serve(flags)) => flags,
        Ok(Command::Help) => {
            print!("{}", flags::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(problem) => return refuse(&problem),
    };
    let addr = flags.addr;
    let layer = match flags.into_layer().await {
        Ok(layer) => layer,
        Err(problem) => return refuse(&problem),
    };
    match serve(addr, layer).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("puppet: {addr}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Flags that cannot be followed: one line, exit code 2.
fn refuse(problem: &str) -> ExitCode {
    eprintln!("puppet: {problem} (--help lists the flags)");
    ExitCode::from(2)
}

/// Serves until a signal ends it.
async fn serve<S: Store>(addr: SocketAddr, layer: IdempotencyLayer<S>) -> io::Result<()> {
    // Before the port is announced: whoever reads it may send the signal.
    let told_to_stop = told_to_stop()?;
    tokio::pin!(told_to_stop);
    let listener = TcpListener::bind(addr).await?;
    let mut stdout = io::stdout();
    writeln!(stdout, "listening on {}", listener.local_addr()?)?;
    stdout.flush()?;

    let puppet = Puppet::new(layer);
    let server = auto::Builder::new(TokioExecutor::new());
    let connections = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut told_to_stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, for instance: the next try may work.
                eprintln!("puppet: accept: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        connect(&puppet, &server, &connections, stream);
    }
    drop(listener);
    puppet.stop(connections).await;
    Ok(())
}

/// Ends with the first signal; those that come before it is waited for count.
#[cfg(unix)]
fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    Ok(async { drop(tokio::signal::ctrl_c().await) })
}

/// Serves one connection in a task of its own.
fn connect<S: Store>(
    puppet: &Arc<Puppet<S>>,
    server: &auto::Builder<TokioExecutor>,
    connections: &GracefulShutdown,
    stream: TcpStream,
) {
    // What is written leaves at once, so that streams are seen as they are produced.
    let _ = stream.set_nodelay(true);
    let puppet = Arc::clone(puppet);
    let service = service_fn(move |request| {
        let puppet = Arc::clone(&puppet);
        async move { Ok::<_, Infallible>(puppet.answer(request).await) }
    });
    let connection = server.serve_connection(TokioIo::new(stream), service);
    let connection = connections.watch(connection.into_owned());
    // A connection that breaks is the client's affair, and the tests' daily bread.
    tokio::spawn(async move { drop(connection.await) });
}

struct Puppet<S> {
    layer: IdempotencyLayer<S>,
    counts: Arc<Counts>,
}

type Answer = Response<Either<ResponseBody<handler::Body>, Full<Bytes>>>;

impl<S: Store> Puppet<S> {
    fn new(layer: IdempotencyLayer<S>) -> Arc<Self> {
        let counts = Arc::default();
        Arc::new(Self { layer, counts })
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let wants_body = request.method() != Method::HEAD;
        let answer = self.route(request).await;
        if wants_body {
            return answer;
        }
        // Over HTTP/2 hyper leaves it to the service to send no body (RFC 9110 section 9.3.2).
        let (mut parts, body) = answer.into_parts();
        if let Some(length) = body.size_hint().exact() {
            let headers = &mut parts.headers;
            headers.entry(CONTENT_LENGTH).or_insert(length.into());
        }
        Response::from_parts(parts, Either::Right(Full::default()))
    }

    async fn route(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        if path.starts_with("/do/") {
            return self.guarded(request).await.map(Either::Left);
        }
        let document = if path == "/policy" {
            self.layer.policy().to_json()
        } else if let Some(name) = path.strip_prefix("/count/") {
            self.counts.of(name).to_json()
        } else {
            return text(
                StatusCode::NOT_FOUND,
                "try /do/{name}, /count/{name}, /policy",
            );
        };
        if request.method() != Method::GET {
            return text(StatusCode::METHOD_NOT_ALLOWED, "GET only");
        }
        let mut answer = text(StatusCode::OK, document);
        let json = HeaderValue::from_static("application/json");
        answer.headers_mut().insert(CONTENT_TYPE, json);
        answer
    }

    /// The layer outermost, then the layer that rewrites, then the handler.
    async fn guarded(&self, request: Request<Incoming>) -> Response<ResponseBody<handler::Body>> {
        let counts = Arc::clone(&self.counts);
        let service = ServiceBuilder::new()
            .layer(self.layer.clone())
            .map_request(rewrite::rewrite)
            .service_fn(move |request| {
                let counts = Arc::clone(&counts);
                async move { Ok::<_, Infallible>(handler::handle(&counts, request).await) }
            });
        let Ok(response) = service.oneshot(request).await;
        response
    }

    /// Ends when everything that was begun has ended: requests on their connections, and attempts
    /// whose clients have left.
    async fn stop(&self, connections: GracefulShutdown) {
        let engine = self.layer.idempotency();
        // A connection that is stuck in half a request never closes. It is given the time in which
        // attempts end, and a little more for the last bytes of answers.
        let enough = async {
            engine.drain().await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        };
        tokio::select! {
            () = connections.shutdown() => {}
            () = enough => {}
        }
        let how = if engine.drain().await {
            "drained"
        } else {
            "stopped with attempts that had not ended"
        };
        let total = self.counts.total();
        eprintln!(
            "{how}: {} started, {} finished",
            total.started, total.finished
        );
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Either::Right(Full::new(text.into())));
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain");
    answer.headers_mut().insert(CONTENT_TYPE, plain);
    answer
}
