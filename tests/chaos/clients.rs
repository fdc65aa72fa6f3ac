//! Clients that send a request again until they have its final answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep, timeout};

use super::check::Answer;
use super::child::{TEMPER, WORK};
use super::fleet::Addresses;
use super::plan::{Operation, PROCESSES, rng};

/// What all clients saw, by the name of the operation.
#[derive(Clone)]
pub struct Clients {
    http: Client<HttpConnector, Full<Bytes>>,
    addresses: Addresses,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
pub struct Seen {
    /// Successes that were not marked.
    pub successes: BTreeMap<String, Vec<Answer>>,
    /// All that came back, by what it was.
    pub answers: BTreeMap<String, usize>,
    /// From the first failure of an operation that met a fault to its success.
    pub recoveries: Vec<Duration>,
}

/// One answer to one request.
struct Reply {
    what: String,
    success: Option<Answer>,
    replayed: bool,
    /// Not what a service without faults would say.
    fault: bool,
}

impl Clients {
    pub fn new(addresses: Addresses) -> Self {
        let mut http = Client::builder(TokioExecutor::new());
        // Every request that is sent again is sent again here, where it is counted.
        http.retry_canceled_requests(false);
        Self {
            http: http.build_http(),
            addresses,
            seen: Arc::default(),
        }
    }

    /// Sends one operation from all its clients, each until it has its answer.
    pub async fn perform(&self, operation: &Operation) {
        let copies = (0..operation.copies).map(|copy| self.insist(operation, copy));
        futures_util::future::join_all(copies).await;
    }

    async fn insist(&self, operation: &Operation, copy: u32) {
        let mut rng = rng(operation.seed, &format!("client {copy}"));
        let mut failed: Option<Instant> = None;
        for tries in 0_u32.. {
            let process = rng.random_range(0..PROCESSES);
            let reply = self.send(operation, process, operation.patience).await;
            if self.note(operation, reply.what, reply.success, failed) {
                return;
            }
            if reply.fault {
                failed.get_or_insert_with(Instant::now);
            }
            sleep(full_jitter(&mut rng, tries)).await;
        }
    }

    /// Whether this client is done.
    fn note(
        &self,
        operation: &Operation,
        what: String,
        success: Option<Answer>,
        failed: Option<Instant>,
    ) -> bool {
        let mut seen = self.seen.lock().unwrap();
        *seen.answers.entry(what).or_default() += 1;
        let Some(answer) = success else {
            return false;
        };
        let name = operation.name.clone();
        seen.successes.entry(name).or_default().push(answer);
        seen.recoveries.extend(failed.map(|at| at.elapsed()));
        true
    }

    /// What the key answers in the end: the replay, or what stands in its way.
    pub async fn ask_at_last(&self, operation: &Operation) -> Result<Answer, String> {
        let mut rng = rng(operation.seed, "at last");
        let mut last = String::new();
        for tries in 0..8 {
            let process = rng.random_range(0..PROCESSES);
            let reply = self.send(operation, process, Duration::from_secs(10)).await;
            match reply.success {
                Some(answer) if reply.replayed => return Ok(answer),
                _ => last = reply.what,
            }
            sleep(full_jitter(&mut rng, tries)).await;
        }
        Err(last)
    }

    pub fn seen(&self) -> Seen {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    async fn send(&self, operation: &Operation, process: usize, patience: Duration) -> Reply {
        let failed = |what: &str| Reply {
            what: what.to_owned(),
            success: None,
            replayed: false,
            fault: true,
        };
        let Some(addr) = self.addresses.of(process) else {
            return failed("no connection");
        };
        let request = Request::post(format!("http://{addr}/charges"))
            .header("idempotency-key", &operation.name)
            .header(WORK, operation.work.as_millis().to_string())
            .header(TEMPER, operation.temper.name())
            .body(Full::from(format!("amount=1&for={}", operation.name)))
            .expect("a request");
        let exchange = async {
            let response = self.http.request(request).await.ok()?;
            let (head, body) = response.into_parts();
            let body = body.collect().await.ok()?.to_bytes();
            Some((head, body))
        };
        let (head, body) = match timeout(patience, exchange).await {
            Err(_) => {
                // Leaving early is this client's way, and no fault.
                let fault = patience > Duration::from_secs(1);
                return Reply {
                    fault,
                    ..failed("client left")
                };
            }
            Ok(None) => return failed("connection broke"),
            Ok(Some(exchanged)) => exchanged,
        };
        let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let code = text("idempotency-error").or(text("idempotency-result"));
        let replayed = text("idempotency-replayed").is_some();
        let what = match code {
            Some(code) => format!("{} {code}", head.status.as_u16()),
            None if replayed => format!("{} replayed", head.status.as_u16()),
            None => head.status.as_u16().to_string(),
        };
        let is_success = head.status == StatusCode::CREATED && code.is_none();
        let in_flight = code == Some("in_progress") || code.is_none();
        Reply {
            success: is_success.then(|| Answer {
                status: head.status.as_u16(),
                content_type: text(header::CONTENT_TYPE.as_str()).map(str::to_owned),
                body: String::from_utf8_lossy(&body).into_owned(),
            }),
            what,
            replayed,
            fault: !is_success && !in_flight,
        }
    }
}

/// Between nothing and a limit that doubles with every try: clients that failed together do not come
/// back together.
fn full_jitter(rng: &mut StdRng, tries: u32) -> Duration {
    let limit = Duration::from_millis(20 << tries.min(5));
    limit.mul_f64(rng.random())
}
