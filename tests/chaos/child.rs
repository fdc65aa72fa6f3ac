//! One process of the service: axum, the layer, a handler that moves money, and fault points.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use tower_idempotency::{
    Attempt, Idempotency, IdempotencyLayer, MissingKey, OnAbandoned, Record, RetentionOverride,
    Scope, SqliteOptions, Store, Verdict,
};

use super::ledger::{Effect, Fencing, Ledger, Stale};
use super::plan::{Kind, LEASE, Temper};
use super::points::{Point, PointedStore, Points, tell};

pub const STORE: &str = "TOWER_IDEMPOTENCY_CHAOS_STORE";
pub const URL: &str = "TOWER_IDEMPOTENCY_CHAOS_URL";
pub const LEDGER: &str = "TOWER_IDEMPOTENCY_CHAOS_LEDGER";
pub const VARIANT: &str = "TOWER_IDEMPOTENCY_CHAOS_VARIANT";

/// What a retry may do, and what the ledger does about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// An unknown outcome waits for the reconciler.
    Hold,
    /// A retry takes over; the ledger refuses stale attempts.
    RerunFenced,
    /// A retry takes over; nobody refuses anything.
    RerunUnfenced,
    /// `Hold`, over a store that grants what is held.
    BrokenStore,
}

impl Variant {
    pub const ALL: [Self; 4] = [
        Self::Hold,
        Self::RerunFenced,
        Self::RerunUnfenced,
        Self::BrokenStore,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::RerunFenced => "rerun, fenced",
            Self::RerunUnfenced => "rerun, unfenced",
            Self::BrokenStore => "hold, over a broken store",
        }
    }

    pub const fn fencing(self) -> Fencing {
        match self {
            Self::Hold | Self::BrokenStore => Fencing::ByReconciler,
            Self::RerunFenced => Fencing::ByAttempt,
            Self::RerunUnfenced => Fencing::None,
        }
    }

    /// Whether unknown outcomes are reconciled; otherwise retries run again.
    const fn is_reconciled(self) -> bool {
        matches!(self, Self::Hold)
    }

    const fn on_abandoned(self) -> OnAbandoned {
        match self {
            Self::Hold | Self::BrokenStore => OnAbandoned::Hold,
            Self::RerunFenced | Self::RerunUnfenced => OnAbandoned::Rerun,
        }
    }
}

/// Serves as the environment says until it is told to end. Not called in a process that was not
/// started for it.
pub fn serve_if_asked() {
    let set = |name: &str| std::env::var(name).ok();
    let (Some(kind), Some(variant)) = (set(STORE), set(VARIANT)) else {
        return;
    };
    let kind = Kind::named(&kind).expect("a store");
    let known = Variant::ALL.into_iter().find(|of| of.name() == variant);
    let variant = known.expect("a variant");
    // Panics of the handler are part of the plan.
    std::panic::set_hook(Box::new(|_| {}));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let url = set(URL).expect("where the store is");
    let ledger = Ledger::open(&PathBuf::from(set(LEDGER).expect("a ledger")));
    runtime.block_on(serve(kind, &url, ledger, variant));
}

/// The store at `url`, with limits that fit a lease of a second.
async fn open(kind: Kind, url: &str) -> Result<Arc<dyn Store>, tower_idempotency::StoreError> {
    let limit = Duration::from_millis(1_500);
    Ok(match kind {
        Kind::Sqlite => Arc::new(SqliteOptions::new().busy_timeout(limit).open(url)?),
        #[cfg(feature = "postgres")]
        Kind::Postgres => {
            let options = tower_idempotency::PostgresStore::options();
            let options = options.time_limit(limit).pool_size(4);
            Arc::new(options.connect(url).await?)
        }
        #[cfg(feature = "redis")]
        Kind::Redis => {
            let options = tower_idempotency::RedisOptions::new().timeout(limit);
            Arc::new(options.connect(url).await?)
        }
    })
}

#[derive(Clone)]
struct App {
    ledger: Ledger,
    points: Points,
    fencing: Fencing,
}

async fn serve(kind: Kind, url: &str, ledger: Ledger, variant: Variant) {
    let points = Points::default();
    obey(points.clone());
    let store = loop {
        match open(kind, url).await {
            Ok(store) => break store,
            // It is being restarted, for instance.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let store = PointedStore::new(store, points.clone(), variant == Variant::BrokenStore);
    let mut engine = Idempotency::builder(store)
        .lease(LEASE)
        .attempt_limit(3 * LEASE)
        .store_timeout(Duration::from_secs(2))
        .complete_wait(Duration::from_secs(1))
        .drain_limit(Duration::from_secs(5))
        .reconcile_timeout(Duration::from_secs(2))
        .sweep_interval(Duration::from_millis(300))
        .on_abandoned(variant.on_abandoned());
    if variant.is_reconciled() {
        let ledger = ledger.clone();
        engine = engine.reconciler(move |record| ask(ledger.clone(), record));
    }
    let engine = engine.build().expect("settings that work");
    let layer = IdempotencyLayer::builder(engine.clone())
        .scope(Scope::everybody())
        .missing_key(MissingKey::Reject)
        .build()
        .expect("settings that work");
    let app = App {
        ledger,
        points,
        fencing: variant.fencing(),
    };
    let router = Router::new()
        .route("/charges", post(charge))
        .layer(layer)
        .layer(from_fn_with_state(app.clone(), reply))
        .with_state(app);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("a port");
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .expect("a signal can be waited for");
    tell(&format!("ready {}", listener.local_addr().expect("a port")));
    // One in every process; those of other processes sweep at the same time.
    let sweeping = variant.is_reconciled().then(|| engine.sweeper().spawn());
    let served = axum::serve(listener, router).with_graceful_shutdown(async move {
        terminate.recv().await;
    });
    served.await.expect("it serves");
    let drained = engine.drain().await;
    if let Some(sweeping) = sweeping {
        sweeping.shutdown().await;
    }
    tell(if drained { "drained" } else { "not drained" });
    // A thread waits for orders.
    std::process::exit(0);
}

/// Arms and disarms fault points as standard input says; ends with it.
fn obey(points: Points) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.split_once(' ') {
                Some(("arm", order)) => points.arm(order),
                _ => {
                    points.disarm();
                    tell("disarmed");
                }
            }
        }
        // Whoever started it is gone.
        std::process::exit(1);
    });
}

/// The reconciler: the ledger knows what happened, and refuses what it has ruled out.
async fn ask(ledger: Ledger, record: Record) -> Result<Verdict, Infallible> {
    let happened = ledger.reconcile(record.key.key(), record.attempt).await;
    Ok(match happened {
        // What the handler has answered, or would have.
        Some(body) => {
            let answer = axum::http::Response::builder()
                .status(StatusCode::CREATED)
                .header(header::CONTENT_TYPE, JSON)
                .body(Bytes::from(body));
            Verdict::Happened(answer.expect("a response").into())
        }
        None => Verdict::NotHappened,
    })
}

/// Outside of the layer: the record stands, and the client does not have the answer.
async fn reply(State(app): State<App>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    app.points.pass(Point::BeforeReply);
    response
}

async fn charge(
    State(app): State<App>,
    Extension(attempt): Extension<Attempt>,
    headers: HeaderMap,
) -> Response {
    let orders: BTreeMap<&str, &str> = headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
        .collect();
    let work = orders[WORK].parse().expect("milliseconds");
    let (key, number) = (attempt.key().key(), attempt.number());
    // The handler has its moods on its first attempt only.
    let is = |temper: Temper| number == 1 && orders[TEMPER] == temper.name();
    if is(Temper::Refuses) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    if app.fencing == Fencing::ByAttempt {
        match app.ledger.begin(key, number).await {
            Ok(Some(body)) => return charged(body),
            Ok(None) => {}
            Err(Stale) => return stale(),
        }
    }
    tokio::time::sleep(Duration::from_millis(work)).await;
    app.points.pass(Point::InHandler);
    assert!(!is(Temper::PanicsBefore), "as it was told");
    let body = format!(
        r#"{{"key":"{key}","charge":"{:016x}"}}"#,
        rand::random::<u64>()
    );
    let effect = Effect {
        key: key.to_owned(),
        attempt: number,
        body: body.clone(),
    };
    if let Err(Stale) = app.ledger.append(effect, app.fencing).await {
        return stale();
    }
    app.points.pass(Point::AfterEffect);
    assert!(!is(Temper::PanicsAfter), "as it was told");
    charged(body)
}

/// The answer about an effect, the same from whoever knows of it.
fn charged(body: String) -> Response {
    let json = [(header::CONTENT_TYPE, JSON)];
    (StatusCode::CREATED, json, body).into_response()
}

/// The ledger refused: this attempt did nothing.
fn stale() -> Response {
    let word = Extension(RetentionOverride::NotExecuted);
    (StatusCode::SERVICE_UNAVAILABLE, word).into_response()
}

const JSON: &str = "application/json";
pub const WORK: &str = "x-work-ms";
pub const TEMPER: &str = "x-temper";
