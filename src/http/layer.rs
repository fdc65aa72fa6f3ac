//! [`IdempotencyLayer`] and its settings.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Response, StatusCode};
use tower_layer::Layer;

use super::config::{AskedBy, Config, InFlight, MissingKey, OnNoStore, OnOutage};
use super::grpc;
use super::header;
use super::key_source::KeySource;
use super::policy::Policy;
use super::problem::Problem;
use super::scope::Scope;
use super::service::IdempotencyService;
use crate::error::ConfigError;
use crate::fingerprint::FingerprintRecipe;
use crate::idempotency::Idempotency;
use crate::key::{KeyFormat, KeySyntax};
use crate::outcome::Outcome;
use crate::retention::{Disposition, RetentionPolicy};
use crate::settings::check_duration;
use crate::store::Store;

/// Runs the handler of each key once, and answers every repetition with what it answered.
///
/// See the [module docs](crate::http) for what happens to a request, and [`IdempotencyLayerBuilder`]
/// for the settings and their defaults.
///
/// ```
/// use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, MissingKey, Scope};
///
/// # fn main() -> Result<(), tower_idempotency::ConfigError> {
/// #[derive(Clone)]
/// struct UserId(String);
///
/// let layer = IdempotencyLayer::builder(MemoryStore::new())
///     .scope(Scope::from_fn(|request| {
///         request.extensions.get::<UserId>().map(|user| user.0.clone())
///     }))
///     .missing_key(MissingKey::Reject)
///     .build()?;
/// # Ok(()) }
/// ```
pub struct IdempotencyLayer<S> {
    idempotency: Idempotency<S>,
    config: Arc<Config>,
}

impl<S: Store> IdempotencyLayer<S> {
    /// A layer with the defaults, over a store or over an engine with settings of its own.
    pub fn new(idempotency: impl Into<Idempotency<S>>) -> Self {
        Self::builder(idempotency).finish()
    }

    /// A layer with settings of your own, over a store or over an engine.
    pub fn builder(idempotency: impl Into<Idempotency<S>>) -> IdempotencyLayerBuilder<S> {
        IdempotencyLayerBuilder {
            idempotency: idempotency.into(),
            config: defaults(),
            wrong: None,
        }
    }

    /// A layer for the events of one sender, which delivers each at least once: the handler runs
    /// once per event.
    ///
    /// `sender` says whose events these are (`stripe`, `line`): it is the scope, so that two senders
    /// may give the same id to two events. Where a sender delivers the same event to two endpoints of
    /// yours, give each its own name (`stripe-billing`, `stripe-stock`), or one of the two handlers
    /// never sees it. `event_id` says where the id is. **Verify the signature
    /// outside of this layer**, or a stranger can use up the id of an event that is still to come.
    ///
    /// These settings differ from those of [`builder`](Self::builder), and can be set again:
    ///
    /// | setting | here | because |
    /// |---|---|---|
    /// | namespace | `webhook` | no client can name the key of an event |
    /// | missing key | 400 `event_id_missing` | a delivery without an id cannot be told from a repetition |
    /// | fingerprint | [`key_only`](FingerprintRecipe::key_only) | a delivery differs from the first one in time stamps and counters; the id decides |
    /// | kept | 2xx and unknown outcomes, for 30 days or the engine's retention if that is longer; all else frees the key | only a 2xx stops the sender, and whoever delivers again wants the handler to try again. Thirty days is how long Stripe lists events to deliver by hand |
    /// | 409 `in_progress`, `outcome_unknown` | 503 with Retry-After | the sender is to deliver again; some take a 4xx for the last word |
    /// | 409 `response_not_kept` | the status that the response had | the event was handled |
    ///
    /// An event whose handler died half-way stays `outcome_unknown` until it is reconciled. Where
    /// all that the handler does is one database transaction, let the next delivery run it again:
    /// [`OnAbandoned::Rerun`](crate::OnAbandoned::Rerun) for the engine's
    /// [`on_abandoned`](crate::IdempotencyBuilder::on_abandoned).
    ///
    /// A delivery that holds several events, as LINE's do, is not for a layer:
    /// [`Idempotency::run`] once for each event tells them apart.
    ///
    /// ```
    /// use tower_idempotency::{IdempotencyLayer, KeySource, MemoryStore};
    ///
    /// # fn main() -> Result<(), tower_idempotency::ConfigError> {
    /// let event_id = KeySource::json(["/id"])?;
    /// let events = IdempotencyLayer::webhooks(MemoryStore::new(), "stripe", event_id).build()?;
    /// # Ok(()) }
    /// ```
    pub fn webhooks(
        idempotency: impl Into<Idempotency<S>>,
        sender: &str,
        event_id: KeySource,
    ) -> IdempotencyLayerBuilder<S> {
        let mut builder = Self::builder(idempotency);
        let retention = builder.idempotency.engine.settings.retention;
        let retention = retention.max(EVENTS_ARE_REDELIVERED_FOR);
        let keep_success = move |parts: &http::response::Parts| match parts.status.is_success() {
            true => Disposition::KeepFor(retention),
            false => Disposition::Release,
        };
        builder.config.asked_by = AskedBy::EventSender;
        // Also where nobody knows how the handler ended: an event that is forgotten is handled anew.
        builder.config.kept_at_least = EVENTS_ARE_REDELIVERED_FOR;
        if sender.is_empty() {
            let problem = "must not be empty: it separates the events of two senders";
            builder.wrong = Some(ConfigError::new("sender", problem));
        }
        let sender = sender.to_owned();
        builder
            .namespace("webhook")
            .scope(Scope::from_fn(move |_| Some(sender.clone())))
            .key_source(event_id)
            .missing_key(MissingKey::Reject)
            .fingerprint(FingerprintRecipe::key_only())
            .retention(RetentionPolicy::from_fn("webhook", keep_success))
    }

    /// The engine: to drain it at shutdown, or to use it for jobs too.
    pub fn idempotency(&self) -> &Idempotency<S> {
        &self.idempotency
    }

    /// What the layer enforces, for publication (draft section 2.5.2).
    pub fn policy(&self) -> Policy {
        Policy::of(&self.config, &self.idempotency.engine)
    }
}

impl<S> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self {
            idempotency: self.idempotency.clone(),
            config: Arc::clone(&self.config),
        }
    }
}

impl<S> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("idempotency", &self.idempotency)
            .field("config", &self.config)
            .finish()
    }
}

impl<S, T> Layer<T> for IdempotencyLayer<S> {
    type Service = IdempotencyService<S, T>;

    fn layer(&self, inner: T) -> Self::Service {
        IdempotencyService::new(inner, self.idempotency.clone(), Arc::clone(&self.config))
    }
}

/// Settings of [`IdempotencyLayer`]. Every one has a default that can stay; payments want a
/// [`scope`](Self::scope) and [`MissingKey::Reject`].
#[must_use = "nothing is built until `build` is called"]
pub struct IdempotencyLayerBuilder<S> {
    idempotency: Idempotency<S>,
    config: Config,
    wrong: Option<ConfigError>,
}

impl<S: Store> IdempotencyLayerBuilder<S> {
    /// Whose key it is; from authenticated state. Without it, the `Authorization` and `Cookie`
    /// headers are part of the fingerprint: another caller with the same key gets 422, and a caller
    /// whose token was renewed gets 422 `caller_changed`. Set a scope.
    pub fn scope(mut self, scope: Scope) -> Self {
        self.config.scope = Some(scope);
        self
    }

    /// What happens without a key. Default [`MissingKey::PassThrough`].
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.config.missing_key = missing_key;
        self
    }

    /// Which forms of the key are accepted. Default [`KeySyntax::Lenient`].
    pub fn key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.config.syntax = syntax;
        self
    }

    /// Which keys are accepted. Default 1 to 255 bytes.
    pub fn key_format(mut self, format: KeyFormat) -> Self {
        self.config.format = format;
        self
    }

    /// The request header that carries the key. Default `Idempotency-Key`.
    pub fn header(mut self, name: &str) -> Self {
        match HeaderName::try_from(name) {
            Ok(name) => self.config.source = KeySource::header(name),
            Err(_) => self.wrong = Some(no_header("header")),
        }
        self
    }

    /// Where the key is, if no header carries it. Default: the header `Idempotency-Key`.
    pub fn key_source(mut self, source: KeySource) -> Self {
        self.config.source = source;
        self
    }

    /// The response header that marks a replay. Default `Idempotency-Replayed`; Stripe's is
    /// `Idempotent-Replayed`.
    pub fn replay_marker(mut self, name: &str) -> Self {
        match HeaderName::try_from(name) {
            Ok(name) => self.config.marker = name,
            Err(_) => self.wrong = Some(no_header("replay_marker")),
        }
        self
    }

    /// The methods that are guarded. Default POST and PATCH: the others are idempotent by definition
    /// (RFC 9110 section 9.2.2).
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Which requests of a guarded method are guarded. Default: all. One that is not guarded passes
    /// with its key ignored.
    pub fn guard_if(mut self, filter: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.config.filter = Some(Arc::new(filter));
        self
    }

    /// The namespace of this layer's keys. Default `http`. Two layers on one store with the same
    /// namespace share their keys.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.config.namespace = namespace.into();
        self
    }

    /// What makes two requests the same request. Default: method, path, query, content type and the
    /// bytes of the body.
    pub fn fingerprint(mut self, recipe: FingerprintRecipe) -> Self {
        self.config.fingerprint = recipe;
        self
    }

    /// Which responses are kept. Default [`RetentionPolicy::standard`].
    pub fn retention(mut self, policy: RetentionPolicy) -> Self {
        self.config.retention = policy;
        self
    }

    /// The largest request body in bytes, inclusive; a larger one gets 413. Default 2 MiB.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.config.request_limit = bytes;
        self
    }

    /// The largest response body in bytes that is kept, inclusive; of a larger one a tombstone is
    /// kept, and it passes to the first client. Default 1 MiB.
    ///
    /// A body that exceeds it although its own size hint promised less is a fault of the handler: the
    /// first client gets `response_not_kept`, as retries do, and no more of the body is read.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.config.response_limit = bytes;
        self
    }

    /// Content types of responses that are produced while the client reads: they pass at once and a
    /// tombstone is kept. Default `text/event-stream`.
    pub fn live_types<I>(mut self, types: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<Box<str>>,
    {
        self.config.live_types = types.into_iter().map(Into::into).collect();
        self
    }

    /// The gRPC methods whose response is a stream, as paths: `/shop.Orders/Watch`. Such a response
    /// passes as it is produced, and a tombstone is kept: a retry gets ALREADY_EXISTS
    /// `response_not_kept`. All other methods are unary. Default: none. See [`grpc`](super::grpc).
    pub fn grpc_streaming<I>(mut self, paths: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<Box<str>>,
    {
        self.config.grpc_streaming = paths.into_iter().map(Into::into).collect();
        self
    }

    /// What happens to a request whose key is being worked on. Default [`InFlight::Reject`].
    pub fn in_flight(mut self, in_flight: InFlight) -> Self {
        self.config.in_flight = in_flight;
        self
    }

    /// The Retry-After of a 409 `in_progress`, never more than what is left of the lease. Default
    /// 1 s.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.config.retry_after = after;
        self
    }

    /// What happens while the store does not answer. Default [`OnOutage::Reject`].
    pub fn on_outage(mut self, on_outage: OnOutage) -> Self {
        self.config.on_outage = on_outage;
        self
    }

    /// What happens to responses with `Cache-Control: no-store`. Default [`OnNoStore::Keep`].
    pub fn on_no_store(mut self, on_no_store: OnNoStore) -> Self {
        self.config.on_no_store = on_no_store;
        self
    }

    /// Adds a response header to those that are never kept, whatever [`also_store`](Self::also_store)
    /// says of it.
    pub fn never_store(mut self, name: HeaderName) -> Self {
        self.config.never_stored.also.push(name);
        self
    }

    /// Keeps a response header that is left out by default, such as `Set-Cookie`. Hop-by-hop fields
    /// and those that frame a message stay out.
    pub fn also_store(mut self, name: HeaderName) -> Self {
        self.config.never_stored.except.push(name);
        self
    }

    /// The page that explains idempotency to your clients: the target of `Link`, and the base of the
    /// problem `type`s. Default: this crate's own page. `None` sends neither.
    pub fn documentation(mut self, url: Option<&str>) -> Self {
        self.config.documentation = url.map(str::to_owned);
        self
    }

    /// Changes texts, statuses and members of every refusal before it is sent. The code in
    /// `Idempotency-Error` stays.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, ProblemKind};
    /// # use http::StatusCode;
    /// let builder = IdempotencyLayer::builder(MemoryStore::new()).problems(|problem| {
    ///     if problem.kind == ProblemKind::KeyReused {
    ///         problem.status = StatusCode::BAD_REQUEST; // as Stripe's API does
    ///     }
    /// });
    /// ```
    pub fn problems(mut self, reword: impl Fn(&mut Problem) + Send + Sync + 'static) -> Self {
        self.config.reword = Some(Arc::new(reword));
        self
    }

    /// Asks before a kept response is replayed whether this caller may still have it. `Err` is
    /// answered instead; the record stays.
    pub fn authorize_replay<F, Fut>(mut self, authorize: F) -> Self
    where
        F: Fn(&Parts, &Outcome) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Response<Bytes>>> + Send + 'static,
    {
        self.config.authorize_replay = Some(Arc::new(move |parts, outcome| {
            Box::pin(authorize(parts, outcome))
        }));
        self
    }

    /// Changes what is kept of a response, headers and body, before it is stored. Trailers are kept
    /// as they are. The first client
    /// gets the response unchanged; every retry gets what was kept.
    pub fn redact(
        mut self,
        redact: impl Fn(StatusCode, &mut HeaderMap, Bytes) -> Bytes + Send + Sync + 'static,
    ) -> Self {
        self.config.redact = Some(Arc::new(redact));
        self
    }

    /// Says what an error of the inner service means for the key. By default nobody knows whether
    /// the handler did its work, so the outcome is unknown. `E` is the inner service's error type.
    ///
    /// ```
    /// # use tower_idempotency::{Disposition, IdempotencyLayer, MemoryStore};
    /// # type BoxError = Box<dyn std::error::Error + Send + Sync>;
    /// let builder = IdempotencyLayer::builder(MemoryStore::new()).classify_error(
    ///     |error: &BoxError| match error.is::<tower::load_shed::error::Overloaded>() {
    ///         true => Disposition::Release, // shed before the handler began
    ///         false => Disposition::LeaveUnknown,
    ///     },
    /// );
    /// ```
    pub fn classify_error<E: Any>(
        mut self,
        classify: impl Fn(&E) -> Disposition + Send + Sync + 'static,
    ) -> Self {
        self.config.classify_error = Some(Arc::new(move |error| {
            error.downcast_ref::<E>().map(&classify)
        }));
        self
    }

    /// Checks the settings and builds the layer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with the name of the setting: a header name that is none, a sender without a
    /// name, no guarded method
    /// at all, a waiting time of zero or more than a hundred years, a live type that is empty or has
    /// parameters, a gRPC path that is not of the form `/package.Service/Method`.
    pub fn build(self) -> Result<IdempotencyLayer<S>, ConfigError> {
        let config = &self.config;
        if let Some(wrong) = self.wrong {
            return Err(wrong);
        }
        if config.methods.is_empty() {
            let problem = "must not be empty: the layer would guard nothing";
            return Err(ConfigError::new("methods", problem));
        }
        if config.methods.contains(&Method::CONNECT) || config.methods.contains(&Method::OPTIONS) {
            let problem = "must not contain CONNECT or OPTIONS: they have no response to keep";
            return Err(ConfigError::new("methods", problem));
        }
        config.format.verify()?;
        if let InFlight::Wait(max) = config.in_flight {
            check_duration("in_flight", max)?;
        }
        check_duration("retry_after", config.retry_after)?;
        let is_no_type = |kind: &str| kind.trim().is_empty() || kind.contains(';');
        if config.live_types.iter().any(|kind| is_no_type(kind)) {
            let problem = "must hold content types without parameters, and no empty one";
            return Err(ConfigError::new("live_types", problem));
        }
        if !config.grpc_streaming.iter().all(|path| grpc::is_path(path)) {
            let problem = "must hold paths of the form /package.Service/Method";
            return Err(ConfigError::new("grpc_streaming", problem));
        }
        if config.documentation.as_deref().is_some_and(|url| {
            url.is_empty()
                || url
                    .bytes()
                    .any(|byte| !byte.is_ascii_graphic() || byte == b'>')
        }) {
            return Err(ConfigError::new("documentation", "is not a URL"));
        }
        Ok(self.finish())
    }

    fn finish(self) -> IdempotencyLayer<S> {
        IdempotencyLayer {
            idempotency: self.idempotency,
            config: Arc::new(self.config),
        }
    }
}

impl<S> fmt::Debug for IdempotencyLayerBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayerBuilder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn defaults() -> Config {
    Config {
        namespace: "http".to_owned(),
        asked_by: AskedBy::Client,
        source: KeySource::header(header::IDEMPOTENCY_KEY),
        syntax: KeySyntax::default(),
        format: KeyFormat::default(),
        missing_key: MissingKey::default(),
        methods: vec![Method::POST, Method::PATCH],
        filter: None,
        scope: None,
        fingerprint: FingerprintRecipe::default(),
        request_limit: 2 * 1024 * 1024,
        response_limit: 1024 * 1024,
        retention: RetentionPolicy::default(),
        kept_at_least: Duration::ZERO,
        live_types: vec!["text/event-stream".into()],
        grpc_streaming: Vec::new(),
        in_flight: InFlight::default(),
        retry_after: Duration::from_secs(1),
        on_outage: OnOutage::default(),
        on_no_store: OnNoStore::default(),
        never_stored: header::NeverStored::default(),
        marker: header::REPLAYED,
        documentation: Some(DOCUMENTATION.to_owned()),
        reword: None,
        authorize_replay: None,
        redact: None,
        classify_error: None,
    }
}

fn no_header(setting: &'static str) -> ConfigError {
    ConfigError::new(setting, "is not the name of a header")
}

const EVENTS_ARE_REDELIVERED_FOR: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Where the codes are explained if an API has no page of its own.
const DOCUMENTATION: &str =
    "https://docs.rs/tower-idempotency/latest/tower_idempotency/http/enum.ProblemKind.html";
