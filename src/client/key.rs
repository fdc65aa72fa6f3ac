//! One key per operation, above all retries.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use super::error::{ClientError, GaveUp, OutcomeUnknown};
use super::journal::{KeyJournal, OperationName, SavedKey};
use crate::http::IDEMPOTENCY_KEY;
use crate::key::{IdempotencyKey, KeyError, KeySyntax};

/// Gives each operation its key: once, before the first try, outside of the retry loop.
///
/// The key of a request is the first of these that is there:
///
/// 1. the header, which is never overwritten;
/// 2. what the [journal](Self::journal) has for the request's [`OperationName`];
/// 3. an [`IdempotencyKey`] in the request's extensions;
/// 4. for POST and PATCH, a new random UUID of version 4.
///
/// Other methods get none by themselves: servers do not guard them.
#[derive(Clone, Debug)]
pub struct SetIdempotencyKeyLayer {
    settings: Arc<Settings>,
}

#[derive(Clone, Debug)]
struct Settings {
    header: HeaderName,
    form: KeyForm,
    lifetime: Duration,
    journal: Option<Arc<dyn KeyJournal>>,
}

/// How a key is written into the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyForm {
    /// As a Structured Field String, between double quotes, as the draft demands (section 2.1).
    #[default]
    Quoted,
    /// As it is, for servers that would take the quotes for a part of the key, such as Stripe's.
    Bare,
}

impl SetIdempotencyKeyLayer {
    /// The header `Idempotency-Key` with a quoted key that is sent for at most 23 h; no journal.
    pub fn new() -> Self {
        Self {
            settings: Arc::new(Settings {
                header: IDEMPOTENCY_KEY,
                form: KeyForm::default(),
                lifetime: LIFETIME,
                journal: None,
            }),
        }
    }

    /// The header that carries the key, for servers that call it otherwise.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        Arc::make_mut(&mut self.settings).header = name;
        self
    }

    /// How the key is written, [`KeyForm::Quoted`] by default.
    #[must_use]
    pub fn form(mut self, form: KeyForm) -> Self {
        Arc::make_mut(&mut self.settings).form = form;
        self
    }

    /// For how long after its first use a key is sent, 23 h by default. Shorter than the server
    /// keeps its records (its published policy says how long), by more than a request may be on its
    /// way: a retry that arrives after that would be a new operation. Counted from when the [journal](Self::journal) saved it, or else from this call.
    #[must_use]
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        Arc::make_mut(&mut self.settings).lifetime = lifetime;
        self
    }

    /// Where the keys of requests with an [`OperationName`] are kept over restarts. None by default,
    /// and a request that has a name is refused then.
    #[must_use]
    pub fn journal(mut self, journal: impl KeyJournal) -> Self {
        Arc::make_mut(&mut self.settings).journal = Some(Arc::new(journal));
        self
    }
}

impl Default for SetIdempotencyKeyLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<S> Layer<S> for SetIdempotencyKeyLayer {
    type Service = SetIdempotencyKey<S>;

    fn layer(&self, inner: S) -> Self::Service {
        SetIdempotencyKey {
            inner,
            settings: Arc::clone(&self.settings),
        }
    }
}

/// What [`SetIdempotencyKeyLayer`] makes of a service.
#[derive(Clone, Debug)]
pub struct SetIdempotencyKey<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S, B> Service<Request<B>> for SetIdempotencyKey<S>
where
    S: Service<Request<B>, Future: Send> + Clone + Send + 'static,
    S::Error: From<ClientError>,
    B: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The ready one is taken; see `tower_service::Service`, "Be careful when cloning".
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            settings.prepare(&mut head).await?;
            inner.call(Request::from_parts(head, body)).await
        })
    }
}

impl Settings {
    async fn prepare(&self, head: &mut Parts) -> Result<(), ClientError> {
        let given = IdempotencyKey::from_headers(&head.headers, &self.header, KeySyntax::Lenient)
            .map_err(ClientError::InvalidKey)?;
        let operation = match given {
            Some(key) => Some(self.operation(key, None)),
            None => self.choose(head).await?,
        };
        let Some(operation) = operation else {
            return Ok(());
        };
        if operation.age_at_begin >= operation.lifetime {
            return Err(operation.expired().into());
        }
        if !head.headers.contains_key(&self.header) {
            let value = self
                .value(&operation.key)
                .map_err(ClientError::InvalidKey)?;
            head.headers.insert(self.header.clone(), value);
        }
        head.extensions.insert(operation);
        Ok(())
    }

    async fn choose(&self, head: &Parts) -> Result<Option<Operation>, ClientError> {
        let given = head.extensions.get::<IdempotencyKey>().cloned();
        let name = head.extensions.get::<OperationName>().cloned();
        let guarded = matches!(head.method, Method::POST | Method::PATCH);
        if given.is_none() && name.is_none() && !guarded {
            return Ok(None);
        }
        let key = given.unwrap_or_else(IdempotencyKey::random);
        let Some(name) = name else {
            return Ok(Some(self.operation(key, None)));
        };
        let saved = match &self.journal {
            Some(journal) => journal.begin(name.as_str(), &key).await,
            // Otherwise the application would believe that its key was saved.
            None => Err("the request has an `OperationName`, and the layer has no journal".into()),
        };
        Ok(Some(match saved.map_err(ClientError::Journal)? {
            SavedKey::Fresh => self.operation(key, None),
            SavedKey::Earlier { key, age } => self.operation(key, Some(age)),
        }))
    }

    fn operation(&self, key: IdempotencyKey, earlier: Option<Duration>) -> Operation {
        Operation {
            key,
            begun: Instant::now(),
            age_at_begin: earlier.unwrap_or_default(),
            resumed: earlier.is_some(),
            lifetime: self.lifetime,
        }
    }

    fn value(&self, key: &IdempotencyKey) -> Result<HeaderValue, KeyError> {
        match self.form {
            KeyForm::Quoted => Ok(key.to_sf_string()),
            KeyForm::Bare => {
                let value = HeaderValue::from_str(key.as_str());
                let mut value = value.map_err(|_| KeyError::NotPrintable)?;
                // What would be read as another key is not sent.
                if IdempotencyKey::parse(&value, KeySyntax::Lenient)? != *key {
                    return Err(KeyError::BareSyntax);
                }
                value.set_sensitive(true);
                Ok(value)
            }
        }
    }
}

/// What the layers of one call know of its operation, in the request's extensions.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) key: IdempotencyKey,
    pub(super) begun: Instant,
    /// How old the key was when this call began.
    pub(super) age_at_begin: Duration,
    resumed: bool,
    pub(super) lifetime: Duration,
}

impl Operation {
    /// Whether an earlier call may have sent the key.
    pub(super) fn is_resumed(&self) -> bool {
        self.resumed
    }

    fn expired(self) -> OutcomeUnknown {
        OutcomeUnknown {
            why: GaveUp::KeyExpired,
            key: Some(self.key),
            tries: 0,
            status: None,
            problem: None,
            retry_after: None,
            source: None,
        }
    }
}

/// A day is the retention that clients of payment APIs count on, and this crate's default. An hour less,
/// because a retry has to arrive before the server forgets.
pub(super) const LIFETIME: Duration = Duration::from_secs(23 * 60 * 60);
