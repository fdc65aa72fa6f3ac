//! A store from a line of configuration.

use std::sync::Arc;

use crate::error::StoreError;
use crate::store::Store;

/// Opens the store that a URL names, so that which one it is can be a line of the configuration.
///
/// | URL | store | feature |
/// |---|---|---|
/// | `memory:` | a new [`MemoryStore`](crate::MemoryStore), empty | `memory` |
/// | `sqlite:PATH` | the file at this path, which is made if it is not there | `sqlite` |
/// | `postgres://…`, `postgresql://…` | the tables of a PostgreSQL database, which are made or brought up to date | `postgres` |
/// | `redis://…`, `rediss://…`, `redis+unix://…`, `redis+sentinel://…`, `redis+cluster://…`, `rediss+cluster://…` | a Redis server, the master behind Sentinels, or a cluster | `redis` |
///
/// The scheme of a store whose feature is off is [`MissingFeature`](OpenError::MissingFeature).
///
/// A path is taken as it is, without decoding and without options, after `sqlite:` or `sqlite://`,
/// so that `sqlite:///var/lib/keys.db` is an absolute path and `sqlite://keys.db` a relative one. A
/// path without `sqlite:` before it is refused: a scheme that was left out, or forgotten in a
/// deployment, would make an empty file and with it every key a new one. White space around a URL
/// is ignored.
///
/// For settings beyond these, make the store itself and put it into an `Arc`.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use tower_idempotency::{IdempotencyLayer, store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let url: Option<String> = None;
/// let url = url.unwrap_or_else(|| "memory:".to_owned());
/// let layer = IdempotencyLayer::new(store::open(&url).await?);
/// # let _ = layer;
/// # Ok(()) }
/// # main().unwrap();
/// # }
/// ```
///
/// # Errors
///
/// [`OpenError`]. No error shows credentials; those that are found before a store is tried show no
/// more of the URL than its scheme.
///
/// # Panics
///
/// For a URL of a file or a server, outside of a tokio runtime with I/O and time.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, OpenError> {
    let url = url.trim();
    let (scheme, address) = split(url)?;
    let address = scheme.check(address)?;
    match scheme.feature {
        #[cfg(feature = "memory")]
        "memory" => Ok(Arc::new(crate::MemoryStore::new())),
        #[cfg(feature = "sqlite-system")]
        "sqlite" => {
            let path = std::path::PathBuf::from(address);
            // It reads and may write the file before it answers.
            let opened = tokio::task::spawn_blocking(move || crate::SqliteStore::open(path));
            let store = opened.await.map_err(|panic| {
                let message = "opening the SQLite file broke off: see the log";
                StoreError::new(crate::StoreErrorKind::Other, message).with_source(panic)
            })??;
            Ok(Arc::new(store))
        }
        #[cfg(feature = "postgres")]
        "postgres" => {
            let store = crate::PostgresStore::connect(url).await?;
            store.migrate().await?;
            Ok(Arc::new(store))
        }
        #[cfg(feature = "redis")]
        "redis" => Ok(Arc::new(crate::RedisStore::connect(url).await?)),
        feature => {
            // What only stores look at that are not in this build.
            let _ = (url, address);
            let scheme = scheme.name;
            Err(OpenError::MissingFeature { scheme, feature })
        }
    }
}

/// Why [`open`] has no store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL does not begin with a scheme. It is not repeated here: it could be a password.
    #[error(
        "the URL of the store has no scheme: begin it with `memory:`, `sqlite:`, `postgres:` or `redis:`"
    )]
    NoScheme,
    /// No store has this scheme.
    #[error(
        "no store has the scheme `{scheme}:`: use `memory:`, `sqlite:`, `postgres:` or `redis:`"
    )]
    UnknownScheme {
        /// As it was given.
        scheme: String,
    },
    /// The store is not part of this build.
    #[error(
        "`{scheme}:` needs the feature `{feature}` of tower-idempotency, which this build does not have"
    )]
    MissingFeature {
        /// The scheme of the URL.
        scheme: &'static str,
        /// The feature to switch on.
        feature: &'static str,
    },
    /// What follows the scheme cannot be right.
    #[error("the URL `{scheme}:…` of the store is wrong: {problem}")]
    Address {
        /// The scheme of the URL.
        scheme: &'static str,
        /// What to do about it.
        problem: &'static str,
    },
    /// The store was found and could not be opened.
    #[error("the store could not be opened")]
    Store(#[from] StoreError),
}

/// The scheme, and what comes after the colon.
fn split(url: &str) -> Result<(&'static Scheme, &str), OpenError> {
    let (scheme, address) = url.split_once(':').ok_or(OpenError::NoScheme)?;
    let known = SCHEMES
        .iter()
        .find(|known| known.name.eq_ignore_ascii_case(scheme));
    match known {
        Some(known) => Ok((known, address)),
        None if is_scheme(scheme) => Err(OpenError::UnknownScheme {
            scheme: scheme.to_owned(),
        }),
        None => Err(OpenError::NoScheme),
    }
}

/// RFC 3986, section 3.1. What precedes a colon and is none of it may be anything.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

struct Scheme {
    name: &'static str,
    /// What brings its store.
    feature: &'static str,
}

impl Scheme {
    /// What follows the colon, less the slashes of `sqlite://`.
    fn check<'u>(&self, address: &'u str) -> Result<&'u str, OpenError> {
        let (address, problem) = match self.feature {
            "memory" => {
                let problem = "nothing may follow, because it is at no place";
                let empty = matches!(address, "" | "//");
                (address, (!empty).then_some(problem))
            }
            "sqlite" => {
                let path = address.strip_prefix("//").unwrap_or(address);
                let problem = match path {
                    "" => Some("a path has to follow: `sqlite:keys.db`"),
                    // SQLite would give every connection a database of its own.
                    ":memory:" => {
                        Some("a database in memory loses all keys: use a file, or `memory:`")
                    }
                    _ if path.contains('?') => {
                        Some("options are not read: leave out what begins with `?`")
                    }
                    _ => None,
                };
                (path, problem)
            }
            _ => {
                let problem = "two slashes and a host have to follow";
                let host = address
                    .strip_prefix("//")
                    .is_some_and(|host| !host.is_empty());
                (address, (!host).then_some(problem))
            }
        };
        match problem {
            None => Ok(address),
            Some(problem) => Err(OpenError::Address {
                scheme: self.name,
                problem,
            }),
        }
    }
}

const fn scheme(name: &'static str, feature: &'static str) -> Scheme {
    Scheme { name, feature }
}

const SCHEMES: &[Scheme] = &[
    scheme("memory", "memory"),
    scheme("sqlite", "sqlite"),
    scheme("postgres", "postgres"),
    scheme("postgresql", "postgres"),
    scheme("redis", "redis"),
    scheme("rediss", "redis"),
    scheme("redis+unix", "redis"),
    scheme("redis+sentinel", "redis"),
    scheme("redis+cluster", "redis"),
    scheme("rediss+cluster", "redis"),
];
