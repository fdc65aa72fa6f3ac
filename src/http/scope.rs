//! Whose key a request carries.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

/// Tells callers apart, from what the service *knows* of them: an extension that an authentication
/// layer outside of this one has set, not something that the client says.
///
/// Two scopes never see each other's records; a key that exists in another scope is like one that
/// was never used. A request without a scope is refused with 500 `scope_unavailable` and nothing
/// runs: there is no bucket that strangers share by accident.
#[derive(Clone)]
pub struct Scope(Kind);

type Extract = dyn Fn(&Parts) -> Option<String> + Send + Sync;

#[derive(Clone)]
enum Kind {
    Everybody,
    Header(HeaderName),
    From(&'static str, Arc<Extract>),
}

impl Scope {
    /// All callers share one space of keys: whoever knows a key gets its response. Only for services
    /// with one caller.
    pub const fn everybody() -> Self {
        Self(Kind::Everybody)
    }

    /// The extension `T`, as authentication layers leave it.
    ///
    /// ```
    /// # use tower_idempotency::Scope;
    /// #[derive(Clone)]
    /// struct Account(u64);
    ///
    /// impl std::fmt::Display for Account {
    ///     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    ///         write!(f, "account-{}", self.0)
    ///     }
    /// }
    ///
    /// let scope = Scope::extension::<Account>();
    /// ```
    pub fn extension<T: fmt::Display + Send + Sync + 'static>() -> Self {
        let extract = |parts: &Parts| parts.extensions.get::<T>().map(T::to_string);
        Self(Kind::From("extension", Arc::new(extract)))
    }

    /// A request header that a *trusted* proxy sets, and strips from what clients send. Two lines of
    /// it are as good as none.
    pub const fn header(name: HeaderName) -> Self {
        Self(Kind::Header(name))
    }

    /// Anything else that can be told from the head of the request. `None`, like an empty text,
    /// refuses the request.
    pub fn from_fn(extract: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Kind::From("function", Arc::new(extract)))
    }

    /// The scope of this request; `None` if it has none.
    #[allow(
        clippy::disallowed_methods,
        reason = "a proxy writes ASCII; a line with other bytes names nobody"
    )]
    pub(crate) fn of<'r>(&self, parts: &'r Parts) -> Option<Cow<'r, str>> {
        let scope = match &self.0 {
            Kind::Everybody => return Some(Cow::Borrowed("")),
            Kind::Header(name) => {
                let mut lines = parts.headers.get_all(name).iter();
                match (lines.next(), lines.next()) {
                    (Some(line), None) => Cow::Borrowed(line.to_str().ok()?),
                    _ => return None,
                }
            }
            Kind::From(_, extract) => Cow::Owned(extract(parts)?),
        };
        // Empty is everybody's.
        (!scope.is_empty()).then_some(scope)
    }

    /// How the scope is found, for the published policy.
    pub(crate) fn describe(&self) -> &'static str {
        match &self.0 {
            Kind::Everybody => "shared by all callers",
            Kind::Header(_) | Kind::From(..) => "one per authenticated caller",
        }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Everybody => f.write_str("Scope::everybody"),
            Kind::Header(name) => write!(f, "Scope::header({name})"),
            Kind::From(what, _) => write!(f, "Scope::{what}"),
        }
    }
}
