//! The life of a payment, played over real sockets and compared with what is promised.
//!
//! No clock decides what comes first: the gateway says when a payment has reached it, the server says
//! when a client is gone, and the engine says when every attempt has ended. A time limit only keeps a
//! broken service from hanging the demo.

use std::future::Future;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request as AxumRequest, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tower_idempotency::{Idempotency, IdempotencyLayer, Store};

use crate::app;
use crate::gateway::Gateway;
use crate::wire::{self, Answer, Request};

/// What happened, line by line.
pub struct Report {
    lines: Vec<Line>,
}

/// One thing that a client did.
pub struct Line {
    pub number: usize,
    sent: String,
    came: String,
    charges: usize,
    promised: Promise,
}

/// What comes back, and how often was charged until then.
type Promise = (&'static str, usize);

impl Report {
    /// The lines that are not what was promised.
    pub fn broken(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.is_kept())
    }
}

impl Line {
    fn is_kept(&self) -> bool {
        (&*self.came, self.charges) == self.promised
    }

    pub fn happened(&self) -> String {
        format!("{} ({} charges)", self.came, self.charges)
    }

    pub fn promised(&self) -> String {
        let (came, charges) = self.promised;
        format!("{came} ({charges} charges)")
    }
}

/// Starts the service on a free port, plays, writes the table to `out`, and stops the service.
pub async fn play(
    layer: IdempotencyLayer<Arc<dyn Store>>,
    gateway: Gateway,
    out: &mut (dyn Write + Send),
) -> io::Result<Report> {
    let idempotency = layer.idempotency().clone();
    let client_left = Arc::new(Notify::new());
    // The outermost layer: what it sees end, the server has dropped.
    let app = app::router(layer, gateway.clone())
        .layer(from_fn_with_state(Arc::clone(&client_left), watch));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let addr = listener.local_addr()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async move {
        let _ = stopped.await;
    });
    let server = tokio::spawn(server.into_future());

    let mut stage = Stage {
        addr,
        gateway,
        idempotency,
        client_left,
        out,
        lines: Vec::new(),
    };
    stage.head()?;
    stage.play().await?;
    let Stage {
        idempotency, lines, ..
    } = stage;

    let _ = stop.send(());
    if let Ok(Ok(served)) = within(server).await {
        served?;
    }
    idempotency.drain().await;
    Ok(Report { lines })
}

struct Stage<'a> {
    addr: SocketAddr,
    gateway: Gateway,
    idempotency: Idempotency<Arc<dyn Store>>,
    client_left: Arc<Notify>,
    out: &'a mut (dyn Write + Send),
    lines: Vec<Line>,
}

impl Stage<'_> {
    async fn play(&mut self) -> io::Result<()> {
        // A network that fails, and a client that retries.
        let order = payment(ALICE, Some("\"order-1\""), 1000, "visa");
        let first = self.send(&order).await;
        self.line(
            "alice pays 1000, key \"order-1\"",
            &first,
            ("201 Created", 1),
        )?;
        let again = self.again(&order, &first).await;
        let replayed = ("201 Created, replayed, same bytes", 1);
        self.line("the same again", &again, replayed)?;
        let other = payment(ALICE, Some("\"order-1\""), 9900, "visa");
        let other = self.send(&other).await;
        self.line("the same key, amount 9900", &other, ("422 key_reused", 1))?;
        let bobs = payment(BOB, Some("\"order-1\""), 1000, "visa");
        let bobs = self.send(&bobs).await;
        self.line("bob pays 1000, key \"order-1\"", &bobs, ("201 Created", 2))?;

        self.play_two_at_once().await?;
        self.play_a_client_that_hangs_up().await?;

        // Requests that are wrong.
        let keyless = payment(ALICE, None, 1000, "visa");
        let keyless = self.send(&keyless).await;
        self.line("without a key", &keyless, ("400 missing_key", 4))?;
        let malformed = payment(ALICE, Some("\"order-4"), 1000, "visa");
        let malformed = self.send(&malformed).await;
        let refused = ("400 invalid_key", 4);
        self.line("key \"order-4 without its last quote", &malformed, refused)?;
        let nothing = payment(ALICE, Some("\"order-5\""), 0, "visa");
        let nothing = self.send(&nothing).await;
        let refused = ("400 invalid_payment", 4);
        self.line("amount 0, key \"order-5\"", &nothing, refused)?;
        let mended = payment(ALICE, Some("\"order-5\""), 1000, "visa");
        let mended = self.send(&mended).await;
        self.line("amount 1000, the same key", &mended, ("201 Created", 5))?;

        // A payment that fails, and one that nobody knows the end of.
        let declined = payment(ALICE, Some("\"order-6\""), 1000, "declined");
        let first = self.send(&declined).await;
        let refused = ("402 card_declined", 5);
        self.line("a card that is declined, key \"order-6\"", &first, refused)?;
        let again = self.again(&declined, &first).await;
        let replayed = ("402 card_declined, replayed, same bytes", 5);
        self.line("the same again", &again, replayed)?;
        let crash = payment(ALICE, Some("\"order-7\""), 1000, "crash");
        let broken_off = self.send(&crash).await;
        let closed = ("connection closed, no answer", 6);
        let sent = "key \"order-7\", the service panics half-way";
        self.line(sent, &broken_off, closed)?;
        let again = self.send(&crash).await;
        let unknown = ("409 outcome_unknown, retry after 30 s", 6);
        self.line("the same again", &again, unknown)
    }

    async fn play_two_at_once(&mut self) -> io::Result<()> {
        let order = payment(ALICE, Some("\"order-2\""), 1000, "visa");
        // Whichever comes first stays at the gateway until the other one is answered.
        let held = self.gateway.hold_next();
        let mut one = Box::pin(self.exchange(&order));
        let mut two = Box::pin(self.exchange(&order));
        let (refused, served) = tokio::select! {
            answered = &mut one => (answered, two),
            answered = &mut two => (answered, one),
        };
        self.line(
            "two at once, key \"order-2\": the second",
            &refused,
            ("409 in_progress, retry after 1 s", 2),
        )?;
        held.go_on();
        let served = served.await;
        self.line("... and the first", &served, ("201 Created", 3))
    }

    async fn play_a_client_that_hangs_up(&mut self) -> io::Result<()> {
        let order = payment(ALICE, Some("\"order-3\""), 1000, "visa");
        let mut held = self.gateway.hold_next();
        let sent = wire::send(self.addr, &order).await?;
        let reached = within(held.reached()).await;
        drop(sent);
        let left = within(self.client_left.notified()).await;
        let came = match reached.and(left) {
            Err(late) => late,
            Ok(()) if self.idempotency.detached() == 1 => "nobody there, it goes on".to_owned(),
            Ok(()) => "nobody there, it broke off".to_owned(),
        };
        let hung_up = "key \"order-3\", the client hangs up half-way";
        self.line(hung_up, &came, ("nobody there, it goes on", 3))?;
        let early = self.send(&order).await;
        let in_progress = ("409 in_progress, retry after 1 s", 3);
        self.line("the same again, at once", &early, in_progress)?;
        held.go_on();
        self.idempotency.drain().await;
        let late = self.send(&order).await;
        let replayed = ("201 Created, replayed", 4);
        self.line("the same again, later", &late, replayed)
    }

    /// Sends a request and tells what came back.
    async fn send(&self, request: &Request) -> Came {
        self.exchange(request).await
    }

    /// The same, compared with what came back the first time.
    async fn again(&self, request: &Request, first: &Came) -> Came {
        let mut again = self.send(request).await;
        if let (Some(first), Some(answer)) = (&first.answer, &again.answer) {
            let kept = |answer: &Answer| {
                let header = |name| answer.header(name).map(str::to_owned);
                let headers = [header("content-type"), header("location")];
                (answer.status, headers, answer.body.clone())
            };
            again.text += match kept(first) == kept(answer) {
                true => ", same bytes",
                false => ", other bytes",
            };
        }
        again
    }

    fn exchange(&self, request: &Request) -> impl Future<Output = Came> + use<> {
        let (addr, request) = (self.addr, request.clone());
        async move {
            match within(wire::exchange(addr, &request)).await {
                Ok(Ok(answer)) => Came::from(answer),
                Ok(Err(error)) => error.to_string().into(),
                Err(late) => late.into(),
            }
        }
    }

    fn head(&mut self) -> io::Result<()> {
        writeln!(
            self.out,
            "Payments at http://{}. Alice and Bob are customers, amounts are cents, and every line \
             is a POST /payments.\n",
            self.addr
        )?;
        self.row("", "what was sent", "what came back", "charges so far")?;
        self.row("--", &"-".repeat(SENT), &"-".repeat(CAME), "--------------")
    }

    fn line(&mut self, sent: &str, came: impl AsRef<str>, promised: Promise) -> io::Result<()> {
        let line = Line {
            number: self.lines.len() + 1,
            sent: sent.to_owned(),
            came: came.as_ref().to_owned(),
            charges: self.gateway.charges().len(),
            promised,
        };
        let mark = if line.is_kept() {
            ""
        } else {
            "   <- NOT PROMISED"
        };
        let charges = format!("{}{mark}", line.charges);
        self.row(&line.number.to_string(), &line.sent, &line.came, &charges)?;
        self.lines.push(line);
        Ok(())
    }

    fn row(&mut self, number: &str, sent: &str, came: &str, charges: &str) -> io::Result<()> {
        writeln!(
            self.out,
            "{number:>2}  {sent:<SENT$}  {came:<CAME$}  {charges}"
        )
    }
}

/// The widths of the table's columns.
const SENT: usize = 43;
const CAME: usize = 39;

/// What came back, in a few words.
struct Came {
    text: String,
    answer: Option<Answer>,
}

impl From<String> for Came {
    fn from(text: String) -> Self {
        Self { text, answer: None }
    }
}

impl From<Option<Answer>> for Came {
    fn from(answer: Option<Answer>) -> Self {
        let text = match &answer {
            Some(answer) => describe(answer),
            None => "connection closed, no answer".to_owned(),
        };
        Self { text, answer }
    }
}

impl AsRef<str> for Came {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

fn describe(answer: &Answer) -> String {
    let document: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let mut text = format!("{} ", answer.status);
    // Problems have a code in the document; the layer's own have it in a header too.
    match (
        document["code"].as_str(),
        answer.header("idempotency-error"),
    ) {
        (None, None) => text += &answer.reason,
        (Some(code), None) => text += code,
        (Some(code), Some(header)) if code == header => text += code,
        (document, header) => {
            text += &format!("{document:?} in the body, {header:?} in the header");
        }
    }
    if answer.header("idempotency-replayed") == Some("true") {
        text += ", replayed";
    }
    if let Some(after) = answer.header("retry-after") {
        text += &format!(", retry after {after} s");
    }
    text
}

fn payment(token: &'static str, key: Option<&'static str>, amount: u64, card: &str) -> Request {
    let body = serde_json::json!({ "amount": amount, "currency": "EUR", "card": card });
    Request {
        token,
        key: key.map(Into::into),
        body: body.to_string(),
    }
}

const ALICE: &str = "alice-token";
const BOB: &str = "bob-token";

/// What the future gives, or a line for the table.
async fn within<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let limit = Duration::from_secs(30);
    tokio::time::timeout(limit, future)
        .await
        .map_err(|_| format!("nothing within {} s", limit.as_secs()))
}

/// Tells when the server has dropped a request because its client is gone.
async fn watch(State(left): State<Arc<Notify>>, request: AxumRequest, next: Next) -> Response {
    // Dropped after what `next` returns, so that all inner layers know before this one tells.
    let unanswered = Unanswered(Some(left));
    let response = next.run(request).await;
    unanswered.answered();
    response
}

struct Unanswered(Option<Arc<Notify>>);

impl Unanswered {
    fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(left) = self.0.take().filter(|_| !std::thread::panicking()) {
            left.notify_one();
        }
    }
}
