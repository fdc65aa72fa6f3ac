//! The crates, each set before a router as its README shows, with its in-process store and its defaults.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use http::Request;
use http::header::AUTHORIZATION;
use ruts::store::moka::MokaStore;
use ruts::{CookieOptions, SessionLayer};
use tower_cookies::CookieManagerLayer;
use tower_idempotency::fingerprint::FingerprintRecipe;
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, Scope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// No layer at all.
    Bare,
    Ours,
    /// With BLAKE3 in place of SHA-256.
    OursBlake3,
    Idempotent,
    /// The session and cookie layers that axum-idempotent stands on, without it.
    Sessions,
    /// axum-idempotent by the key that the client sends.
    AxumKey,
    /// axum-idempotent by a hash of the request, its default.
    AxumHash,
}

impl Peer {
    pub const ALL: [Self; 7] = [
        Self::Bare,
        Self::Ours,
        Self::OursBlake3,
        Self::Idempotent,
        Self::Sessions,
        Self::AxumKey,
        Self::AxumHash,
    ];

    /// Those that promise something of a repeated request.
    pub const LAYERS: [Self; 4] = [Self::Ours, Self::Idempotent, Self::AxumKey, Self::AxumHash];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare handler",
            Self::Ours => "tower-idempotency",
            Self::OursBlake3 => "tower-idempotency with BLAKE3",
            Self::Idempotent => "idempotent 2.0.0",
            Self::Sessions => "session layers alone",
            Self::AxumKey => "axum-idempotent 0.6.0, by key",
            Self::AxumHash => "axum-idempotent 0.6.0, by hash",
        }
    }

    /// Must be called inside a runtime: one of the stores starts a task.
    pub fn before(self, router: Router, settings: Settings) -> Router {
        let router = match self {
            Self::Bare => router,
            Self::Ours => router.layer(ours(settings, FingerprintRecipe::raw())),
            Self::OursBlake3 => router.layer(ours(settings, FingerprintRecipe::raw().blake3())),
            Self::Idempotent => router.layer(idempotent(settings)),
            Self::Sessions => with_sessions(router),
            Self::AxumKey => {
                let options = IdempotentOptions::default()
                    .use_idempotency_key_header(Some("idempotency-key"), false);
                with_sessions(router.layer(IdempotentLayer::<MokaStore>::new(options)))
            }
            Self::AxumHash => {
                let options = IdempotentOptions::default();
                with_sessions(router.layer(IdempotentLayer::<MokaStore>::new(options)))
            }
        };
        // As `axum::serve` does it; without, a router applies its layers anew for each request.
        router.with_state(())
    }
}

#[derive(Clone, Copy, Default)]
pub struct Settings {
    /// Instead of the default, where there is a lease.
    pub lease: Option<Duration>,
    pub scope: Caller,
}

/// Whose key it is.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Caller {
    /// Whatever the crate does by itself.
    #[default]
    Default,
    /// The value of `Authorization`, through the hook that the crate has for it.
    Scoped,
}

fn ours(settings: Settings, recipe: FingerprintRecipe) -> IdempotencyLayer<MemoryStore> {
    let mut engine = Idempotency::builder(MemoryStore::new());
    if let Some(lease) = settings.lease {
        engine = engine.lease(lease);
    }
    let mut layer = IdempotencyLayer::builder(engine.build().expect("the settings are right"))
        .fingerprint(recipe);
    if settings.scope == Caller::Scoped {
        layer = layer.scope(Scope::from_fn(authorization));
    }
    layer.build().expect("the settings are right")
}

fn idempotent(
    settings: Settings,
) -> idempotent::middleware::IdempotencyLayer<idempotent::memory::MemoryStore> {
    let store = idempotent::memory::MemoryStore::builder().try_build();
    let mut layer = idempotent::middleware::IdempotencyLayer::new(store.expect("a runtime"));
    if let Some(lease) = settings.lease {
        layer = layer.processing_ttl(lease);
    }
    if settings.scope == Caller::Scoped {
        layer = layer.scope(authorization);
    }
    layer
}

fn authorization(request: &http::request::Parts) -> Option<String> {
    let value = request.headers.get(AUTHORIZATION)?;
    value.to_str().ok().map(str::to_owned)
}

fn with_sessions(router: Router) -> Router {
    let store = Arc::new(MokaStore::builder().build());
    router
        .layer(SessionLayer::new(store).with_cookie_options(CookieOptions::build().name("session")))
        .layer(CookieManagerLayer::new())
}

/// The cookie of a session, in the form that `ruts` gives to its ids.
pub fn session(number: u64) -> String {
    format!("session={number:021}A")
}

/// Whether an answer says that it is a repetition.
pub fn is_replay(response: &http::Response<Body>) -> bool {
    let headers = response.headers();
    headers.contains_key("idempotency-replayed") || headers.contains_key("idempotent-replayed")
}

/// A POST with a key and the cookie of a session. Every crate gets the same headers.
pub fn request(path: &str, key: &str, session: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path)
        .header("content-type", "application/json")
        .header("cookie", session)
        .header("idempotency-key", key)
        .body(body.into())
        .expect("a request")
}
