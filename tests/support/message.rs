//! Requests and answers, the same for both versions of HTTP, and what makes an answer a replay.

use serde_json::Value;

pub type Lines = Vec<(String, Vec<u8>)>;

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Lines,
    pub body: Vec<u8>,
}

impl Request {
    pub fn new(method: &str, path: &str) -> Self {
        Self {
            method: method.to_owned(),
            path: path.to_owned(),
            headers: Lines::new(),
            body: Vec::new(),
        }
    }

    /// A POST with a body to `/do/{name}`.
    pub fn post(name: &str) -> Self {
        Self::new("POST", &format!("/do/{name}")).body("amount=100")
    }

    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref().to_vec();
        self.headers.push((name.to_owned(), value));
        self
    }

    /// One line of the key, as it is sent.
    pub fn key(self, value: impl AsRef<[u8]>) -> Self {
        self.header("Idempotency-Key", value)
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The same request with another order for the puppet: orders are no part of its identity.
    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(other, _)| other != name);
        self
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    /// Interim statuses that came before.
    pub interim: Vec<u16>,
    pub status: u16,
    pub headers: Lines,
    pub body: Vec<u8>,
    pub trailers: Lines,
}

impl Answer {
    pub fn lines(&self, name: &str) -> Vec<&[u8]> {
        lines(&self.headers, name)
    }

    /// The value of a header that has one line.
    pub fn header(&self, name: &str) -> Option<&str> {
        match self.lines(name).as_slice() {
            [] => None,
            [value] => Some(std::str::from_utf8(value).expect("text")),
            _ => panic!("several lines of {name}: {self:?}"),
        }
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    pub fn is_replay(&self) -> bool {
        self.lines("idempotency-replayed") == [b"true"]
    }

    /// The problem document of a refusal by the layer, checked against status and headers.
    #[track_caller]
    pub fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        let problem = self.json();
        assert_eq!(problem["code"], code, "{self:?}");
        assert_eq!(problem["status"], status, "{self:?}");
        let error = self.header("idempotency-error");
        assert_eq!(error, Some(code), "{self:?}");
        let content_type = self.header("content-type");
        assert_eq!(content_type, Some("application/problem+json"), "{self:?}");
        assert_eq!(self.header("cache-control"), Some("no-store"), "{self:?}");
        assert!(!self.is_replay(), "{self:?}");
        problem
    }

    /// An answer that the handler gave now.
    #[track_caller]
    pub fn fresh(&self, status: u16) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.lines("idempotency-replayed").is_empty(), "{self:?}");
        assert!(self.lines("idempotency-error").is_empty(), "{self:?}");
        assert!(self.lines("idempotency-result").is_empty(), "{self:?}");
        self
    }

    /// Checks that this is `first` again: status, all headers in their order but for `left_out`,
    /// body and trailers, byte for byte; and that nothing was added but the marker.
    #[track_caller]
    pub fn is_replay_of(&self, first: &Self, left_out: &[&str]) {
        let context = || format!("\nfirst: {first:?}\nreplay: {self:?}");
        first.fresh(first.status);
        assert!(self.is_replay(), "not marked{}", context());
        assert_eq!(self.status, first.status, "status{}", context());
        // Made for every message: the date, and what frames the body.
        let own = |name: &str| name == "date" || is_framing(name);
        let kept: Vec<_> = (first.headers.iter())
            .filter(|(name, _)| !own(name) && !left_out.contains(&&**name))
            .collect();
        let dated = first.status >= 400;
        let again: Vec<_> = (self.headers.iter())
            .filter(|(name, _)| !own(name) && name != "idempotency-replayed")
            .filter(|(name, _)| !(dated && name == "idempotency-original-date"))
            .collect();
        assert_eq!(again, kept, "headers{}", context());
        let date = self.header("idempotency-original-date");
        assert_eq!(date.is_some(), dated, "original date{}", context());
        assert!(self.header("date").is_some(), "date{}", context());
        assert_eq!(self.framing(), first.framing(), "framing{}", context());
        assert_eq!(self.body, first.body, "body{}", context());
        assert_eq!(self.trailers, first.trailers, "trailers{}", context());
    }

    /// The framing headers, in one order; announced trailers one by one.
    pub fn framing(&self) -> Vec<(&str, &str)> {
        let mut framing: Vec<_> = (self.headers.iter())
            .filter(|(name, _)| is_framing(name))
            .flat_map(|(name, value)| {
                let value = std::str::from_utf8(value).expect("text");
                value.split(',').map(|value| (&**name, value.trim()))
            })
            .collect();
        framing.sort_unstable();
        framing
    }
}

pub fn lines<'a>(headers: &'a Lines, name: &str) -> Vec<&'a [u8]> {
    (headers.iter())
        .filter(|(other, _)| other == name)
        .map(|(_, value)| &**value)
        .collect()
}

fn is_framing(name: &str) -> bool {
    matches!(name, "content-length" | "transfer-encoding" | "trailer")
}
