//! What each crate does when something goes wrong: counted runs and answers, without comment.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use tower::ServiceExt;

use crate::peer::{self, Caller, Peer, Settings, request, session};
use crate::service::{self, Runs, SLOW};

/// Of those that have one; a second instead of a minute, so that one can wait for its end.
const LEASE: Duration = Duration::from_secs(1);

pub fn report() -> String {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .expect("a runtime can be built");
    // The panics of the handlers are expected.
    std::panic::set_hook(Box::new(|_| {}));
    let text = runtime.block_on(table());
    let _ = std::panic::take_hook();
    runtime.shutdown_background();
    text
}

async fn table() -> String {
    let mut text = "### Behaviour\n\nA number of runs is how often the handler began. Leases, where there are \
                    any, last a second here; \"later\" is after that.\n\n|  |"
        .to_owned();
    for peer in Peer::LAYERS {
        let _ = write!(text, " {} |", peer.name());
    }
    text += "\n|---|---|---|---|---|\n";
    let mut facts: Vec<(&str, Vec<String>)> = [
        "200 requests at once, one key",
        "client goes away: does the handler end?",
        "client goes away: a retry at once",
        "client goes away: a retry when the handler should be done",
        "handler panics: the answer",
        "handler panics: a retry at once",
        "handler panics: a retry later",
        "live stream: the first event arrives before the last is made",
        "live stream: a retry at once",
        "live stream: a retry later",
        "same key, `Authorization` and session of another caller",
        "the same, `Authorization` as scope",
        "same key, other body",
    ]
    .map(|what| (what, Vec::new()))
    .into();
    for peer in Peer::LAYERS {
        let mut cells = vec![at_once(peer).await];
        cells.extend(goes_away(peer).await);
        cells.extend(panics(peer).await);
        cells.extend(streams(peer).await);
        cells.push(other_caller(peer, Caller::Default).await);
        cells.push(match peer {
            Peer::Ours | Peer::Idempotent => other_caller(peer, Caller::Scoped).await,
            _ => "has none".to_owned(),
        });
        cells.push(other_body(peer).await);
        for ((_, row), cell) in facts.iter_mut().zip(cells) {
            row.push(cell);
        }
    }
    for (what, cells) in facts {
        let _ = writeln!(text, "| {what} | {} |", cells.join(" | "));
    }
    text
}

/// A service with counted handlers behind a crate.
struct Watched {
    router: Router,
    runs: Arc<Runs>,
}

impl Watched {
    fn new(peer: Peer, scope: Caller) -> Self {
        let runs = Arc::new(Runs::default());
        let settings = Settings {
            lease: Some(LEASE),
            scope,
        };
        let router = peer.before(service::watched(&runs), settings);
        Self { router, runs }
    }

    /// As a server does it: in a task of its own, so that a panic ends nothing else.
    async fn send(&self, request: Request<Body>) -> Option<Response<Body>> {
        let response = tokio::spawn(self.router.clone().oneshot(request));
        let response = response.await.ok()?;
        Some(response.unwrap_or_else(|never| match never {}))
    }

    /// Sends it and tells the answer, and how often the handler ran for it.
    async fn retry(&self, request: Request<Body>) -> String {
        let before = self.runs.begun();
        let answer = describe(self.send(request).await).await;
        match self.runs.begun() - before {
            0 => format!("{answer}, no run"),
            _ => format!("{answer}, runs again"),
        }
    }
}

async fn describe(response: Option<Response<Body>>) -> String {
    let Some(response) = response else {
        return "panics".to_owned();
    };
    let status = response.status().as_u16();
    let replayed = if peer::is_replay(&response) {
        " replayed"
    } else {
        ""
    };
    let whole = response.into_body().collect().await.is_ok();
    let broken = if whole { "" } else { ", broken body" };
    format!("{status}{replayed}{broken}")
}

async fn at_once(peer: Peer) -> String {
    let service = Watched::new(peer, Caller::Default);
    let requests: Vec<_> = (0..200)
        .map(|_| {
            let request = request("/slow", "at-once", &session(1), "{}");
            tokio::spawn(service.router.clone().oneshot(request))
        })
        .collect();
    let mut answers = BTreeMap::new();
    for request in requests {
        let Ok(Ok(response)) = request.await else {
            continue;
        };
        *answers.entry(response.status().as_u16()).or_insert(0) += 1;
    }
    let answers: Vec<_> = answers
        .iter()
        .map(|(status, count)| format!("{count} × {status}"))
        .collect();
    let runs = match service.runs.begun() {
        1 => "1 run".to_owned(),
        runs => format!("{runs} runs"),
    };
    format!("{runs}; {}", answers.join(", "))
}

async fn goes_away(peer: Peer) -> Vec<String> {
    let service = Watched::new(peer, Caller::Default);
    let ask = || request("/slow", "goes-away", &session(1), "{}");
    let client = tokio::spawn(service.router.clone().oneshot(ask()));
    while service.runs.begun() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    client.abort();
    let _ = client.await;
    let at_once = service.retry(ask()).await;
    // The one that went away; a run of the retry came to its end before its answer.
    let own = usize::from(at_once.contains("again"));
    tokio::time::sleep(SLOW * 3).await;
    let ended = if service.runs.ended() > own {
        "yes"
    } else {
        "no"
    };
    vec![ended.to_owned(), at_once, service.retry(ask()).await]
}

async fn panics(peer: Peer) -> Vec<String> {
    let service = Watched::new(peer, Caller::Default);
    let ask = || request("/panic", "panics", &session(1), "{}");
    let first = describe(service.send(ask()).await).await;
    let at_once = service.retry(ask()).await;
    tokio::time::sleep(LEASE * 2).await;
    vec![first, at_once, service.retry(ask()).await]
}

async fn streams(peer: Peer) -> Vec<String> {
    let service = Watched::new(peer, Caller::Default);
    let ask = || request("/stream", "streams", &session(1), "{}");
    let start = tokio::time::Instant::now();
    let live = match service.send(ask()).await {
        Some(mut response) => {
            let first = response.body_mut().frame().await;
            let live = first.is_some() && start.elapsed() < SLOW;
            let _ = response.into_body().collect().await;
            if live { "yes" } else { "no" }
        }
        None => "panics",
    };
    let at_once = service.retry(ask()).await;
    tokio::time::sleep(LEASE * 2).await;
    vec![live.to_owned(), at_once, service.retry(ask()).await]
}

async fn other_caller(peer: Peer, scope: Caller) -> String {
    let service = Watched::new(peer, scope);
    let ask = |caller: &'static str, number| {
        let mut request = request("/caller", "other-caller", &session(number), "{}");
        let value = HeaderValue::from_static(caller);
        request.headers_mut().insert(AUTHORIZATION, value);
        request
    };
    let _ = describe(service.send(ask("Bearer alice", 1)).await).await;
    let Some(response) = service.send(ask("Bearer bob", 2)).await else {
        return "panics".to_owned();
    };
    let status = response.status().as_u16();
    let body = response.into_body().collect().await;
    let body = body.map_or_else(|_| Vec::new(), |body| body.to_bytes().to_vec());
    if body == b"Bearer alice" {
        format!("{status}, the first caller's answer")
    } else if body == b"Bearer bob" {
        format!("{status}, an answer of its own")
    } else {
        format!("{status}, refused")
    }
}

async fn other_body(peer: Peer) -> String {
    let service = Watched::new(peer, Caller::Default);
    let ask = |body: &'static str| request("/slow", "other-body", &session(1), body);
    let _ = describe(service.send(ask("{\"amount\": 1}")).await).await;
    service.retry(ask("{\"amount\": 2}")).await
}
