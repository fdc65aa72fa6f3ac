//! Where a request carries its key.

use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;

use super::header;
use crate::error::ConfigError;
use crate::fingerprint::{Pointer, scalars};

/// Where a request carries its key: in a header, or in its body.
///
/// A key in a header is judged before the body is touched. For one in the body every request of a
/// guarded method is read first, within the
/// [request limit](super::IdempotencyLayerBuilder::request_limit). Nothing else differs: the key is
/// checked by the [`KeyFormat`](crate::KeyFormat), and the handler reads the body as it was sent.
///
/// ```
/// use tower_idempotency::{IdempotencyLayer, KeySource, MemoryStore, MissingKey};
///
/// # fn main() -> Result<(), tower_idempotency::ConfigError> {
/// // An API in which the number of the invoice names the payment.
/// let layer = IdempotencyLayer::builder(MemoryStore::new())
///     .key_source(KeySource::json(["/invoiceNo"])?)
///     .missing_key(MissingKey::Reject)
///     .build()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct KeySource(Kind);

type Find = dyn Fn(&Parts, &[u8]) -> Option<String> + Send + Sync;

#[derive(Clone)]
enum Kind {
    Header(HeaderName),
    Json(Arc<[Pointer]>),
    Function(Arc<Find>),
}

impl KeySource {
    /// A request header, such as `I-Twilio-Idempotency-Token`. Several lines of it are 400
    /// `invalid_key`.
    pub const fn header(name: HeaderName) -> Self {
        Self(Kind::Header(name))
    }

    /// Values of a JSON body, by their pointers (RFC 6901), whatever its content type.
    ///
    /// One pointer: the key is the string, or the number as it is written. Several: they make the
    /// key together, for senders that give their events no id (`/charge/id` and `/charge/status`),
    /// as the text of a JSON array. A body that lacks one of the values, or has `null`, an empty
    /// string or another type there, carries no key; nor does one that two readers may understand
    /// differently, as [`FingerprintRecipe::json`](crate::FingerprintRecipe::json) lists them, nor
    /// one that is compressed: decompress it outside of the layer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there is no pointer, if one is not valid, or if one has a wildcard: a
    /// request has one key. For a delivery of several events, call
    /// [`Idempotency::run`](crate::Idempotency::run) for each of them.
    pub fn json<P>(pointers: impl IntoIterator<Item = P>) -> Result<Self, ConfigError>
    where
        P: AsRef<str>,
    {
        let pointers = pointers.into_iter();
        let pointers: Arc<[Pointer]> = pointers
            .map(|text| Pointer::parse(text.as_ref()))
            .collect::<Result<_, _>>()
            .map_err(|problem| ConfigError::new(JSON, problem))?;
        if pointers.is_empty() {
            return Err(ConfigError::new(JSON, "needs at least one JSON pointer"));
        }
        Ok(Self(Kind::Json(pointers)))
    }

    /// Anything else that can be told from the head and the whole body: a field of a form, a
    /// member of a signed token. `None` and an empty text are no key. Printable ASCII only.
    pub fn from_fn(find: impl Fn(&Parts, &[u8]) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Kind::Function(Arc::new(find)))
    }

    /// The header that carries the key; `None` if the body does.
    pub(super) fn as_header(&self) -> Option<&HeaderName> {
        match &self.0 {
            Kind::Header(name) => Some(name),
            Kind::Json(_) | Kind::Function(_) => None,
        }
    }

    pub(super) fn is_default(&self) -> bool {
        self.as_header() == Some(&header::IDEMPOTENCY_KEY)
    }

    /// The key in this body, not checked.
    pub(super) fn find(&self, parts: &Parts, body: &[u8]) -> Option<String> {
        let key = match &self.0 {
            Kind::Header(_) => None,
            Kind::Json(pointers) => {
                let mut values = scalars(body, pointers)?;
                match &mut values[..] {
                    [one] => Some(std::mem::take(one)),
                    several if several.iter().any(String::is_empty) => None,
                    // Told apart whatever is in them, which a delimiter does not do.
                    several => serde_json::to_string(several).ok(),
                }
            }
            Kind::Function(find) => find(parts, body),
        };
        key.filter(|key| !key.is_empty())
    }

    /// What a refusal calls it, after an article: "X-Request-Key header", or "key in `/id`".
    pub(super) fn phrase(&self) -> String {
        match &self.0 {
            Kind::Header(name) => format!("{} header", header::display_name(name.as_str())),
            Kind::Json(_) => {
                let places = self.in_body().unwrap_or_default();
                format!("key in `{}`", places.join("`, `"))
            }
            Kind::Function(_) => "key".to_owned(),
        }
    }

    /// Where in the body it is, for the published policy.
    pub(super) fn in_body(&self) -> Option<Vec<String>> {
        match &self.0 {
            Kind::Header(_) => None,
            Kind::Json(pointers) => Some(pointers.iter().map(Pointer::to_string).collect()),
            Kind::Function(_) => Some(vec!["function".to_owned()]),
        }
    }
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Header(name) => write!(f, "KeySource::header({name})"),
            Kind::Json(_) => write!(
                f,
                "KeySource::json({:?})",
                self.in_body().unwrap_or_default()
            ),
            Kind::Function(_) => f.write_str("KeySource::from_fn"),
        }
    }
}

const JSON: &str = "KeySource::json";
