//! What of a request is hashed, as the user sets it.

use std::sync::Arc;
use std::{fmt, mem};

use bytes::Bytes;
use http::HeaderName;
use http::request::Parts;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::Fingerprint;
use super::caller::CallerPart;
use super::digest::Algorithm;
use super::encoder::Encoder;
use super::hasher::FingerprintHasher;
use super::json::Selection;
use super::pointer::{Pointer, PointerSet};
use crate::error::ConfigError;

/// What of a request goes into its [`Fingerprint`]: which parts make it *the same request*.
///
/// The method, the path and the raw query do, unless the [key alone](Self::key_only) decides. The body does as its bytes are
/// ([`raw`](Self::raw), the default), unless the recipe reads it: [`json`](Self::json) and
/// [`multipart`](Self::multipart) for bodies of those content types,
/// [`closure`](Self::closure) for anything else. Request trailers are not hashed. How a body is
/// divided into frames makes no difference.
///
/// Cloning is cheap. Servers that share a store should share a recipe: each has an id that is
/// kept with the fingerprint, and a retry that meets a record of another recipe (during a
/// deployment that changes it, or behind two layers that share a namespace) is compared by its
/// method, path, query and caller alone.
///
/// # Example
///
/// Clients of this API send a new trace id with every attempt:
///
/// ```
/// use bytes::Bytes;
/// use tower_idempotency::fingerprint::{FingerprintMatch, FingerprintRecipe};
///
/// let recipe = FingerprintRecipe::raw().except(["/trace"])?;
///
/// let fingerprint = |body: &'static str| {
///     let request = http::Request::post("/orders")
///         .header("content-type", "application/json")
///         .body(Bytes::from(body))
///         .expect("a valid request");
///     recipe.fingerprint(&request)
/// };
/// let first = fingerprint(r#"{"item": "tea", "trace": "7f3a"}"#);
/// let retry = fingerprint(r#"{"trace":"c09b","item":"tea"}"#);
/// let other = fingerprint(r#"{"trace":"c09b","item":"coffee"}"#);
/// assert_eq!(first.compare(&retry), FingerprintMatch::Same);
/// assert_eq!(first.compare(&other), FingerprintMatch::Different);
/// # Ok::<(), tower_idempotency::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct FingerprintRecipe {
    settings: Arc<Settings>,
}

/// A [`FingerprintRecipe`] in words, for the policy that a service publishes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FingerprintDescription {
    /// A few sentences for people.
    pub text: String,
    /// What is hashed, one entry each: `method`, `path`, `query`, `header:<name>`, and of the
    /// content `content-type` and `body` (as bytes), `json`, `json-only:<pointer>`,
    /// `json-except:<pointer>`, `multipart`, `closure:<id>`. At the end `hash:blake3`, if it is the hash.
    pub hashed: Vec<String>,
}

impl FingerprintRecipe {
    /// Content type and body as they are, byte for byte. The default.
    pub fn raw() -> Self {
        Self::new(Content::Read(Reading::default()))
    }

    /// Nothing of the content: neither the body nor its type.
    ///
    /// With this a key that is used again with another body gets the first body's answer. It is
    /// meant for requests whose [`headers`](Self::headers) say what the body is
    /// (`Content-Digest`, RFC 9530, or a signature, if an outer layer verifies it), and for those
    /// who want no check: section 2.4 of the draft leaves fingerprints to the server.
    pub fn without_content() -> Self {
        Self::new(Content::LeftOut)
    }

    /// Nothing of the request: the key alone says what is the same.
    ///
    /// For keys that no two operations can share, and requests that differ from one attempt to the
    /// next in all but the key: an event that its sender delivers again with another time stamp, to
    /// another path.
    pub fn key_only() -> Self {
        Self::new(Content::KeyOnly)
    }

    /// What `f` makes of a request's head and whole body, in place of its content.
    ///
    /// For formats that this crate does not know: a decoded protobuf message, a canonical XML.
    /// `f` sees the head as the layer got it and runs before anything is claimed. What it returns
    /// is hashed to its end, so `f` itself must keep variable parts from running into each other.
    /// The content type is hashed only if `f` puts it in.
    ///
    /// `id` stands for `f` in the recipe's own id and in the published policy: give another one
    /// whenever `f` changes what it returns for the same request.
    ///
    /// ```
    /// use tower_idempotency::fingerprint::FingerprintRecipe;
    ///
    /// // A text protocol whose clients end lines as their platform does.
    /// let recipe = FingerprintRecipe::closure("lines-1", |_head, body| {
    ///     body.iter().copied().filter(|byte| *byte != b'\r').collect()
    /// });
    /// # let _ = recipe;
    /// ```
    pub fn closure<F>(id: impl Into<String>, f: F) -> Self
    where
        F: Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static,
    {
        Self::new(Content::Closure {
            id: id.into(),
            f: Arc::new(f),
        })
    }

    /// JSON bodies by value: for the content types `application/json` and `…+json`.
    ///
    /// The order of members, white space and the spelling of strings (`"\u0061"` is `"a"`) make no
    /// difference. Numbers are compared as they are written, so that `1`, `1.0` and `1e0` are
    /// three and no digit is lost; strings by their characters, without Unicode normalisation;
    /// `null` differs from an absent member. Of the content type only the media type counts.
    ///
    /// A body that two readers may understand differently is hashed as [`raw`](Self::raw) bytes:
    /// not JSON, not UTF-8, with a byte order mark, nested deeper than 128, with a name twice in
    /// one object, or with half a surrogate pair.
    ///
    /// After [`closure`](Self::closure), [`without_content`](Self::without_content) or
    /// [`key_only`](Self::key_only) this setter, like [`multipart`](Self::multipart), [`only`](Self::only) and
    /// [`except`](Self::except), brings back the content.
    #[must_use]
    pub fn json(self) -> Self {
        self.reading(|reading| {
            reading.json.get_or_insert_default();
        })
    }

    /// Of JSON bodies only the values at these pointers (RFC 6901); implies [`json`](Self::json).
    /// Called again, it adds pointers.
    ///
    /// What is not listed may change between attempts without being noticed, so list all that
    /// decides what happens; documents that have none of these values are all the same. An absent
    /// value differs from `null`. Bodies that are not JSON are hashed as raw bytes.
    ///
    /// # Errors
    ///
    /// If there is no pointer, if one is not valid, if one has a wildcard (the token `*`, which
    /// RFC 6901 would take for a member of that name), or if [`except`](Self::except) leaves out all
    /// that one points to.
    pub fn only<P>(self, pointers: impl IntoIterator<Item = P>) -> Result<Self, ConfigError>
    where
        P: AsRef<str>,
    {
        let pointers = parse_pointers(ONLY, pointers)?;
        if pointers.is_empty() {
            return Err(ConfigError::new(ONLY, "needs at least one JSON pointer"));
        }
        self.reading(|reading| {
            let json = reading.json.get_or_insert_default();
            json.only.extend(pointers);
        })
        .checked(ONLY)
    }

    /// Of JSON bodies all but the values at these pointers (RFC 6901); implies
    /// [`json`](Self::json). Called again, it adds pointers.
    ///
    /// For what differs between attempts: a time stamp, a trace id, a short-lived URL. A member
    /// that is left out may have any value or be absent. Elements of an array keep their indexes
    /// when others are left out. Bodies that are not JSON are hashed as raw bytes.
    ///
    /// # Errors
    ///
    /// If a pointer is not valid or has a wildcard, if it is the empty one, which leaves out
    /// the document ([`without_content`](Self::without_content) does that), or if it leaves
    /// out all that a pointer of [`only`](Self::only) points to.
    pub fn except<P>(self, pointers: impl IntoIterator<Item = P>) -> Result<Self, ConfigError>
    where
        P: AsRef<str>,
    {
        let pointers = parse_pointers(EXCEPT, pointers)?;
        if pointers.iter().any(Pointer::is_root) {
            let problem = "got the empty pointer, which leaves nothing: use `without_content`";
            return Err(ConfigError::new(EXCEPT, problem));
        }
        self.reading(|reading| {
            let json = reading.json.get_or_insert_default();
            json.except.extend(pointers);
        })
        .checked(EXCEPT)
    }

    /// Forms by their parts: for the content type `multipart/form-data`.
    ///
    /// Clients choose a new boundary for every attempt; it makes no difference. The parts do, in
    /// order: each part's name and file name (all parameters of its `Content-Disposition`), its
    /// `Content-Type` and `Content-Transfer-Encoding`, and its bytes.
    ///
    /// A body that is not well-formed (RFC 2046, section 5.1; RFC 7578) is hashed as
    /// [`raw`](Self::raw) bytes: for instance one without a last boundary, or with a bare line feed
    /// before a boundary.
    #[must_use]
    pub fn multipart(self) -> Self {
        self.reading(|reading| reading.multipart = true)
    }

    /// Request headers that change what a request asks for, such as `If-Match` or a session.
    /// Called again, it adds headers. None by default.
    ///
    /// All lines of a header count, in order and byte for byte; absent differs from empty. A header
    /// that is new in every attempt (`Date`, `Traceparent`) turns every retry into a mismatch.
    /// `Host` is no such header over HTTP/2, where the authority is part of the URI.
    #[must_use]
    pub fn headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with(|settings| {
            settings.headers.extend(names);
            settings.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
            settings.headers.dedup();
        })
    }

    /// BLAKE3 in place of SHA-256, for services that take large bodies. Feature `blake3`.
    ///
    /// As resistant to collisions, and from some 4 KiB on quicker: the figures are in `benches/README.md`. It
    /// works on 16 KiB at once, so it is worth most where a body arrives in frames of that size or more,
    /// and on a CPU without SHA instructions. A small body takes a little longer.
    ///
    /// The recipe's id changes with it. While servers of both settings run, and for records that are there
    /// already, a retry is compared by its method, path, query and caller; none becomes a mismatch.
    #[cfg(feature = "blake3")]
    #[must_use]
    pub fn blake3(self) -> Self {
        self.with(|settings| settings.algorithm = Algorithm::Blake3)
    }

    /// The fingerprint of a request whose body is in memory, as a layer with a scope takes it.
    ///
    /// For tests that want to know whether two requests are the same, and for requests that reach
    /// the engine without the layer. A layer without a scope adds a hash of the caller's
    /// credentials, and inside a nested axum router it hashes the original URI.
    pub fn fingerprint(&self, request: &http::Request<Bytes>) -> Fingerprint {
        let (head, ()) = request.clone().map(|_| ()).into_parts();
        let uri = request.uri();
        let mut hasher = self.start(&head, uri.path(), uri.query(), CallerPart::Scoped);
        hasher.frame(request.body());
        hasher.finish(|| request.body().clone())
    }

    /// What is hashed, in words. Whether credentials are depends on the layer's scope and is not
    /// part of this.
    pub fn describe(&self) -> FingerprintDescription {
        FingerprintDescription {
            text: self.settings.text(),
            hashed: self.settings.hashed(),
        }
    }

    /// Begins with a request's head. `path` and `query` are those of the original URI, which a
    /// router may have cut in `head`.
    pub(crate) fn start<'a>(
        &'a self,
        head: &'a Parts,
        path: &str,
        query: Option<&str>,
        caller: CallerPart,
    ) -> FingerprintHasher<'a> {
        FingerprintHasher::new(&self.settings, head, path, query, caller)
    }

    fn new(content: Content) -> Self {
        Self::identified(Settings {
            content,
            headers: Vec::new(),
            algorithm: Algorithm::default(),
            ids: Default::default(),
        })
    }

    fn identified(mut settings: Settings) -> Self {
        settings.ids = [CALLER_LEFT_OUT, CALLER_HASHED].map(|caller| settings.id_with(caller));
        Self {
            settings: Arc::new(settings),
        }
    }

    fn with(self, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Arc::unwrap_or_clone(self.settings);
        change(&mut settings);
        Self::identified(settings)
    }

    fn reading(self, change: impl FnOnce(&mut Reading)) -> Self {
        self.with(|settings| {
            let mut reading = match &mut settings.content {
                Content::Read(reading) => mem::take(reading),
                Content::Closure { .. } | Content::LeftOut | Content::KeyOnly => Reading::default(),
            };
            change(&mut reading);
            settings.content = Content::Read(reading);
        })
    }

    fn checked(self, setting: &'static str) -> Result<Self, ConfigError> {
        let Content::Read(Reading {
            json: Some(json), ..
        }) = &self.settings.content
        else {
            return Ok(self);
        };
        let left_out = |only: &&Pointer| json.except.iter().any(|except| except.covers(only));
        if let Some(only) = json.only.iter().find(left_out) {
            let problem = format!("leaves nothing of \"{only}\", which `only` and `except` name");
            return Err(ConfigError::new(setting, problem));
        }
        Ok(self)
    }
}

impl Default for FingerprintRecipe {
    /// [`FingerprintRecipe::raw`].
    fn default() -> Self {
        Self::raw()
    }
}

impl fmt::Debug for FingerprintRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintRecipe")?;
        f.debug_list().entries(self.settings.hashed()).finish()
    }
}

/// What the hasher reads of a recipe.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) content: Content,
    /// By name, none twice.
    pub(super) headers: Vec<HeaderName>,
    pub(super) algorithm: Algorithm,
    // Without and with a caller part.
    ids: [[u8; 4]; 2],
}

#[derive(Clone)]
pub(super) enum Content {
    Read(Reading),
    Closure {
        id: String,
        f: Arc<Closure>,
    },
    LeftOut,
    /// Not even the method, the path and the query.
    KeyOnly,
}

/// Which content types are read. All others are hashed as they are.
#[derive(Clone, Default)]
pub(super) struct Reading {
    pub(super) json: Option<Selection>,
    pub(super) multipart: bool,
}

pub(super) type Closure = dyn Fn(&Parts, &[u8]) -> Vec<u8> + Send + Sync;

impl Settings {
    /// Equal for equal settings, in every process and release.
    pub(super) fn id(&self, caller: CallerPart) -> [u8; 4] {
        self.ids[usize::from(caller.is_used())]
    }

    fn id_with(&self, caller: &str) -> [u8; 4] {
        let mut hash = Sha256::new();
        let mut encoder = Encoder::new(&mut hash);
        encoder.text(ENCODING.as_bytes());
        encoder.text(caller.as_bytes());
        encoder.lines(self.hashed().iter().map(String::as_bytes));
        drop(encoder);
        let [a, b, c, d, ..] = <[u8; 32]>::from(hash.finalize());
        [a, b, c, d]
    }

    fn hashed(&self) -> Vec<String> {
        let mut hashed = match self.content {
            Content::KeyOnly => Vec::new(),
            _ => ["method", "path", "query"].map(String::from).to_vec(),
        };
        hashed.extend(self.headers.iter().map(|name| format!("header:{name}")));
        match &self.content {
            Content::Read(reading) => {
                hashed.extend(["content-type", "body"].map(String::from));
                if let Some(json) = &reading.json {
                    hashed.push("json".into());
                    hashed.extend(json.only.iter().map(|only| format!("json-only:{only}")));
                    let except = json.except.iter();
                    hashed.extend(except.map(|except| format!("json-except:{except}")));
                }
                if reading.multipart {
                    hashed.push("multipart".into());
                }
            }
            Content::Closure { id, .. } => hashed.push(format!("closure:{id}")),
            Content::LeftOut | Content::KeyOnly => {}
        }
        hashed.extend(self.algorithm.entry().map(String::from));
        hashed
    }

    fn text(&self) -> String {
        let mut text = match self.content {
            Content::KeyOnly => String::from("The key alone decides"),
            _ => format!("{} of method, path, query", self.algorithm.name()),
        };
        for name in &self.headers {
            text += &format!(", header {name}");
        }
        match &self.content {
            Content::Read(reading) => {
                text += ", content type and body.";
                if let Some(json) = &reading.json {
                    text += " JSON is compared by value";
                    text += &list(", only at", &json.only);
                    text += &list(", except at", &json.except);
                    text += ".";
                }
                if reading.multipart {
                    text += " Forms are compared by their parts, whatever the boundary.";
                }
                text += " All else is compared byte for byte.";
            }
            Content::Closure { id, .. } => {
                text += &format!(", and of what `{id}` makes of the rest.");
            }
            Content::LeftOut => text += ". Nothing of the body is compared.",
            Content::KeyOnly => text += ".",
        }
        text
    }
}

fn list(label: &str, pointers: &PointerSet) -> String {
    let pointers: Vec<_> = pointers
        .iter()
        .map(|pointer| format!("\"{pointer}\""))
        .collect();
    if pointers.is_empty() {
        return String::new();
    }
    format!("{label} {}", pointers.join(", "))
}

fn parse_pointers<P: AsRef<str>>(
    setting: &'static str,
    pointers: impl IntoIterator<Item = P>,
) -> Result<Vec<Pointer>, ConfigError> {
    let pointers = pointers.into_iter();
    pointers
        .map(|text| Pointer::parse(text.as_ref()))
        .collect::<Result<_, _>>()
        .map_err(|problem| ConfigError::new(setting, problem))
}

const ONLY: &str = "FingerprintRecipe::only";
const EXCEPT: &str = "FingerprintRecipe::except";

// Part of every id: to be counted up when the encoding changes.
const ENCODING: &str = "tower-idempotency fingerprint 1";
const CALLER_LEFT_OUT: &str = "";
const CALLER_HASHED: &str = "authorization, cookie";

#[cfg(test)]
mod tests {
    use http::header::{CONTENT_TYPE, HOST, IF_MATCH};

    use super::*;

    fn raw() -> FingerprintRecipe {
        FingerprintRecipe::raw()
    }

    fn only(pointers: &[&str]) -> FingerprintRecipe {
        raw().only(pointers).unwrap()
    }

    fn except(pointers: &[&str]) -> FingerprintRecipe {
        raw().except(pointers).unwrap()
    }

    fn closure(id: &str) -> FingerprintRecipe {
        FingerprintRecipe::closure(id, |_, body| body.to_vec())
    }

    fn id(recipe: &FingerprintRecipe) -> [u8; 4] {
        recipe.settings.id(CallerPart::Scoped)
    }

    #[test]
    fn other_settings_have_another_id() {
        let recipes = [
            raw(),
            raw().json(),
            raw().multipart(),
            raw().json().multipart(),
            only(&["/a"]),
            only(&["/b"]),
            only(&["/a", "/b"]),
            only(&["/a/b"]),
            except(&["/a"]),
            only(&["/b"]).except(["/a"]).unwrap(),
            raw().headers([HOST]),
            raw().headers([IF_MATCH]),
            raw().headers([IF_MATCH, HOST]),
            raw().headers([CONTENT_TYPE]),
            closure("a"),
            closure("b"),
            FingerprintRecipe::without_content(),
            FingerprintRecipe::without_content().headers([HOST]),
            FingerprintRecipe::key_only(),
        ];
        let mut ids: Vec<_> = recipes
            .iter()
            .flat_map(|recipe| {
                let credentials = CallerPart::Credentials([0; 12]);
                [CallerPart::Scoped, credentials].map(|caller| recipe.settings.id(caller))
            })
            .collect();
        // The recipe of `Fingerprint::of`.
        ids.push([0; 4]);
        let all = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), all);
    }

    #[test]
    fn equal_settings_have_one_id_however_they_were_said() {
        for (one, other) in [
            (raw().json().multipart(), raw().multipart().json()),
            (raw().json().json(), raw().json()),
            (
                only(&["/a", "/b"]),
                only(&["/b"]).only(["/a", "/b"]).unwrap(),
            ),
            (only(&["/a"]), only(&["/a/x", "/a"]).json()),
            (except(&["/a", "/b"]), except(&["/b", "/a", "/a/0"])),
            (except(&[]), raw().json()),
            (
                raw().headers([HOST, IF_MATCH]),
                raw().headers([IF_MATCH]).headers([HOST, IF_MATCH]),
            ),
            (closure("a").json(), raw().json()),
        ] {
            assert_eq!(id(&one), id(&other), "{one:?} {other:?}");
        }
    }

    #[test]
    fn changing_a_clone_leaves_the_recipe_as_it_was() {
        let recipe = raw();
        let before = id(&recipe);
        let changed = recipe.clone().json();
        assert_eq!(id(&recipe), before);
        assert_ne!(id(&changed), before);
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let none: [&str; 0] = [];
        let only_error = |pointer| raw().only([pointer]).unwrap_err().to_string();
        let wildcard = "`FingerprintRecipe::only` got \"/a/*\": JSON pointers have no wildcards";
        assert_eq!(only_error("/a/*"), wildcard);
        for refused in [
            raw().only(none),
            raw().only(["/a", "b"]),
            raw().only(["/a~2"]),
            only(&["/a/b"]).except(["/a"]),
            only(&["/a", "/b"]).except(["/b"]),
            except(&["/a"]).only(["/a/b"]),
        ] {
            assert!(
                refused
                    .unwrap_err()
                    .setting()
                    .starts_with("FingerprintRecipe::")
            );
        }
        for refused in [raw().except([""]), raw().except(["/a", "b"])] {
            assert_eq!(refused.unwrap_err().setting(), "FingerprintRecipe::except");
        }
    }

    #[test]
    fn a_description_names_all_that_is_hashed() {
        let recipe = only(&["/a"]).except(["/a/t"]).unwrap().multipart();
        let description = recipe.headers([IF_MATCH]).describe();
        assert_eq!(
            description.hashed,
            [
                "method",
                "path",
                "query",
                "header:if-match",
                "content-type",
                "body",
                "json",
                "json-only:/a",
                "json-except:/a/t",
                "multipart",
            ]
        );
        assert_eq!(
            description.text,
            "SHA-256 of method, path, query, header if-match, content type and body. \
             JSON is compared by value, only at \"/a\", except at \"/a/t\". \
             Forms are compared by their parts, whatever the boundary. \
             All else is compared byte for byte."
        );
        assert_eq!(
            closure("v1").describe().hashed.last().unwrap(),
            "closure:v1"
        );
        let without = FingerprintRecipe::without_content().describe();
        assert_eq!(without.hashed, ["method", "path", "query"]);
        assert!(without.text.ends_with("Nothing of the body is compared."));
        let key_only = FingerprintRecipe::key_only().describe();
        assert!(key_only.hashed.is_empty());
        assert_eq!(key_only.text, "The key alone decides.");
    }
}
