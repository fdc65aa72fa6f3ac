//! How a store is connected.

use std::sync::Arc;
use std::time::Duration;

use redis::sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType};
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, RedisError};

use super::RedisStore;
use super::address::Address;
use super::clock::Clock;
use super::error::failed;
use super::keys::Keys;
use super::line::{Line, Source};
use super::link::{Link, RedisConnection};
use super::replicas::Acknowledged;
use super::server;
use crate::error::{StoreError, StoreErrorKind};

/// How a [`RedisStore`] is connected.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency::RedisOptions;
///
/// # async fn connect() -> Result<(), tower_idempotency::StoreError> {
/// let store = RedisOptions::new()
///     .key_prefix("payments:")
///     .timeout(Duration::from_secs(2))
///     .connect("redis://localhost")
///     .await?;
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisOptions {
    key_prefix: String,
    timeout: Duration,
    unresolved_for: Duration,
    on_eviction: Option<Arc<Warn>>,
    replicas: usize,
    replica_connections: usize,
}

type Warn = dyn Fn(&str) + Send + Sync;

impl RedisOptions {
    /// The defaults, which [`RedisStore::connect`] uses.
    pub fn new() -> Self {
        Self {
            key_prefix: "idempotency:".to_owned(),
            timeout: Duration::from_secs(4),
            unresolved_for: Duration::from_secs(30 * 24 * 60 * 60),
            on_eviction: None,
            replicas: 0,
            replica_connections: 8,
        }
    }

    /// What every key of the store begins with. Default: `idempotency:`. Two stores with different
    /// prefixes see nothing of each other. It may hold no brace.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long a move may take before it is [`Unavailable`](crate::StoreErrorKind::Unavailable).
    /// Default: 4 s, a little less than what the engine allows for a store call, so that a caller
    /// hears the reason.
    ///
    /// A server gets half of it to answer, so that there is time to connect anew and to ask again.
    /// A connection that the application made keeps its own limit for an answer (redis-rs: 500 ms).
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    /// How long a record stays after its expiry while nobody knows how its attempt ended. Default: 30
    /// days.
    ///
    /// Redis removes expired keys by itself and tells nobody. So records that are started live longer in
    /// the server than in the contract, for a [`purge`](crate::Store::purge) to find, count and remove
    /// them. Purge more often than this, or unresolved records go without a word. Completed and released
    /// records end when they expire.
    #[must_use]
    pub fn unresolved_for(mut self, limit: Duration) -> Self {
        self.unresolved_for = limit;
        self
    }

    /// Connect although a full server would forget records, and call `warn` with what to say of it.
    /// Default: refuse.
    ///
    /// Under every `maxmemory-policy` but `noeviction` a server that is full throws records away, live
    /// claims and kept outcomes among them, and the next retry runs again.
    #[must_use]
    pub fn on_eviction(mut self, warn: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.on_eviction = Some(Arc::new(warn));
        self
    }

    /// How many replicas must have a move before its caller hears of it. Default: 0, none.
    ///
    /// Every claim, completion, release, abandoning, note and resolution is followed by a `WAIT` in the
    /// same pipeline; one that fewer replicas acknowledge in half of [`timeout`](Self::timeout) is
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable), which means unknown, and is asked for again.
    /// Replays wait too, until what they show is replicated. Renewals, lookups, removals and walks do not.
    ///
    /// The price: these moves leave the shared connection for
    /// [connections of their own](Self::replica_connections) that carry one move at a time, so each
    /// takes a round trip to the slowest replica that counts, and no more of them run at once than there
    /// are connections. It makes the loss of an acknowledged move by a failover less likely, and does
    /// not rule it out: see [`RedisStore`].
    #[must_use]
    pub fn replicas(mut self, acknowledgements: usize) -> Self {
        self.replicas = acknowledgements;
        self
    }

    /// How many connections carry the moves that [`replicas`](Self::replicas) acknowledge. Default: 8.
    /// At least one is made.
    #[must_use]
    pub fn replica_connections(mut self, connections: usize) -> Self {
        self.replica_connections = connections;
        self
    }

    /// Connects to a server, to the master behind Sentinels, or to a cluster:
    ///
    /// | URL | connects to |
    /// |---|---|
    /// | `redis://user:password@host:port/db` | one server; `rediss` with TLS |
    /// | `redis+unix:///path/to/socket` | one server |
    /// | `redis+sentinel://user:password@host:port,host:port/name/db` | the master that the Sentinels call `name`; user, password and database are the master's |
    /// | `redis+cluster://user:password@host:port,host:port` | the cluster of these nodes; `rediss+cluster` with TLS |
    ///
    /// With TLS, by rustls, the server's certificate and the host's name in it are always verified, against
    /// the roots of the operating system or those of the file that `SSL_CERT_FILE` names. For a client
    /// certificate, hand a connection of your own to [`from_connection`](Self::from_connection). rustls
    /// takes the cryptography that the process has chosen as its default, or else ring, which becomes
    /// the default then.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Other`] if the URL or an option is wrong, the server refuses the
    /// credentials, is older than 7.0 or would evict records; [`StoreErrorKind::Unavailable`] if no server
    /// can be reached.
    pub async fn connect(&self, url: &str) -> Result<RedisStore, StoreError> {
        let address = Address::parse(url)?;
        if address.needs_tls() {
            choose_cryptography();
        }
        let link = self.link(&address, self.replicas > 0).await?;
        let mut links = Vec::new();
        if self.replicas > 0 {
            for _ in 0..self.replica_connections.max(1) {
                links.push(self.link(&address, true).await?);
            }
        }
        self.start(link, links).await
    }

    /// Uses a connection that the application made: redis-rs's `ConnectionManager`, cluster connection
    /// or (without reconnecting) `MultiplexedConnection`. Other users of it are not disturbed.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and [`StoreErrorKind::Other`] with
    /// [`replicas`](Self::replicas), which need connections of their own.
    pub async fn from_connection(
        &self,
        connection: impl Into<RedisConnection>,
    ) -> Result<RedisStore, StoreError> {
        if self.replicas > 0 {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "`replicas` needs connections of its own: use `connect`",
            ));
        }
        self.start(connection.into().into_link(self.timeout), Vec::new())
            .await
    }

    async fn start(&self, link: Link, links: Vec<Link>) -> Result<RedisStore, StoreError> {
        let keys = Keys::new(&self.key_prefix)?;
        let survey = server::survey(&link).await?;
        if !survey.evicting.is_empty() {
            let policies = survey.evicting.join(", ");
            let warning = format!(
                "the server's maxmemory-policy is {policies}: once it is full it forgets live claims and \
                 kept outcomes, and retries run again. Set it to `noeviction`, or give the store a server \
                 of its own"
            );
            match &self.on_eviction {
                Some(warn) => warn(&warning),
                None => return Err(StoreError::new(StoreErrorKind::Other, warning)),
            }
        }
        let acknowledged =
            (self.replicas > 0).then(|| Acknowledged::new(links, self.replicas, self.timeout / 2));
        Ok(RedisStore::new(
            link,
            acknowledged,
            keys,
            Clock::start(survey.time),
            self.unresolved_for,
        ))
    }

    async fn link(&self, address: &Address, waits: bool) -> Result<Link, StoreError> {
        // A move that waits for replicas may wait that long before its answer comes.
        let answer = if waits {
            self.timeout
        } else {
            self.timeout / 2
        };
        let connect = self.timeout / 2;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(connect))
            .set_response_timeout(Some(answer));
        let source = match address {
            Address::Server(url) => Source::Server(Box::new(Client::open(&**url).map_err(failed)?)),
            Address::Sentinels {
                sentinels,
                name,
                master,
            } => {
                let client = sentinels_of(sentinels, name, master).map_err(failed)?;
                Source::Sentinels(Box::new(tokio::sync::Mutex::new(client)))
            }
            Address::Cluster(nodes) => {
                let client =
                    redis::cluster::ClusterClient::builder(nodes.iter().map(|node| &**node))
                        .connection_timeout(connect)
                        .response_timeout(answer)
                        .overall_response_timeout(Some(self.timeout))
                        .retries(RETRIES)
                        .min_retry_wait(20)
                        .max_retry_wait(500)
                        .build()
                        .map_err(failed)?;
                let connection = client.get_async_connection().await.map_err(failed)?;
                return Ok(RedisConnection::from(connection).into_link(self.timeout));
            }
        };
        let line = Line::new(source, config);
        // What is wrong with the address shows now, and not with the first request.
        line.connection().await.map_err(failed)?;
        Ok(Link::line(line, self.timeout))
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisOptions")
            .field("key_prefix", &self.key_prefix)
            .field("timeout", &self.timeout)
            .field("unresolved_for", &self.unresolved_for)
            .field("replicas", &self.replicas)
            .field("replica_connections", &self.replica_connections)
            .finish_non_exhaustive()
    }
}

/// The driver's TLS uses the default of the process, and panics where there is none and several
/// libraries brought theirs.
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Refused only if somebody else was quicker, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// How often the driver of a cluster asks again. Even, so that the last answer about a key that is on its
/// way to another node names that one.
const RETRIES: u32 = 6;

fn sentinels_of(
    sentinels: &[String],
    name: &str,
    master: &str,
) -> Result<SentinelClient, RedisError> {
    let master = master.into_connection_info()?;
    let info = SentinelNodeConnectionInfo::default()
        .set_redis_connection_info(master.redis_settings().clone());
    let sentinels = sentinels.iter().map(|url| &**url).collect();
    SentinelClient::build(sentinels, name, Some(info), SentinelServerType::Master)
}
