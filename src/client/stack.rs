//! All of it around a client.

use std::time::Duration;

use http::Request;
use tower::retry::Retry;
use tower_layer::Layer;
use tower_service::Service;

use super::key::{SetIdempotencyKey, SetIdempotencyKeyLayer};
use super::one_try::OneTry;
use super::policy::RetryPolicy;
use super::replay::ReplayableBody;

/// Makes a client that retries safely of one that does not: [`SetIdempotencyKeyLayer`] around
/// [`RetryPolicy`] around [`OneTry`].
///
/// The client inside is any service from `Request<B>` to `Response<R>`, such as hyper-util's. `B` is a
/// [`ReplayableBody`]; the answer is a `Response<Bytes>`.
#[derive(Clone, Debug, Default)]
pub struct ClientLayer {
    key: SetIdempotencyKeyLayer,
    retry: RetryPolicy,
    timeout: Option<Duration>,
    answer_limit: Option<usize>,
}

/// What [`ClientLayer`] makes of a client.
pub type RetryingClient<S> = SetIdempotencyKey<Retry<RetryPolicy, OneTry<S>>>;

impl ClientLayer {
    /// The defaults of the three parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// A client around this one. The same as [`Layer::layer`], and it refuses a body that cannot be
    /// sent twice here, by its name, and not where the client is called.
    pub fn around<S, B>(&self, client: S) -> RetryingClient<S>
    where
        S: Service<Request<B>>,
        B: ReplayableBody,
    {
        self.layer(client)
    }

    /// How operations get their keys.
    #[must_use]
    pub fn key(mut self, key: SetIdempotencyKeyLayer) -> Self {
        self.key = key;
        self
    }

    /// When a request is sent again. Its deadline ends the last try too.
    #[must_use]
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// How long one try may take, 10 s by default.
    #[must_use]
    pub fn try_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The longest body of an answer in bytes, 1 MiB by default.
    #[must_use]
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.answer_limit = Some(bytes);
        self
    }
}

impl<S> Layer<S> for ClientLayer {
    type Service = RetryingClient<S>;

    fn layer(&self, client: S) -> Self::Service {
        let mut one_try = OneTry::new(client).deadline(self.retry.time_limit());
        if let Some(timeout) = self.timeout {
            one_try = one_try.timeout(timeout);
        }
        if let Some(bytes) = self.answer_limit {
            one_try = one_try.answer_limit(bytes);
        }
        self.key.layer(Retry::new(self.retry.clone(), one_try))
    }
}
