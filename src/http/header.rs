//! The headers that the layer reads, writes and leaves out.

use std::time::SystemTime;

use http::header::{CONNECTION, CONTENT_LENGTH};
use http::{HeaderMap, HeaderName, HeaderValue};

pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// On replays only.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// On replayed errors: when the first answer was given.
pub(crate) const ORIGINAL_DATE: HeaderName = HeaderName::from_static("idempotency-original-date");
/// The problem's code, for clients that classify without reading the body.
pub(crate) const ERROR: HeaderName = HeaderName::from_static("idempotency-error");
/// On first answers that are not what the record says: `not-saved`, `claim-lost`.
pub(crate) const RESULT: HeaderName = HeaderName::from_static("idempotency-result");
/// On answers of handlers that ran without a claim.
pub(crate) const UNPROTECTED: HeaderName = HeaderName::from_static("idempotency-unprotected");

pub(crate) const TRUE: HeaderValue = HeaderValue::from_static("true");
pub(crate) const NOT_SAVED: HeaderValue = HeaderValue::from_static("not-saved");
pub(crate) const CLAIM_LOST: HeaderValue = HeaderValue::from_static("claim-lost");

/// Which response headers are not kept: they belong to one hop, one exchange or one client.
#[derive(Clone, Debug, Default)]
pub(crate) struct NeverStored {
    pub(crate) also: Vec<HeaderName>,
    pub(crate) except: Vec<HeaderName>,
}

impl NeverStored {
    /// Which of these `headers` of a response are kept, asked by name.
    pub(crate) fn kept<'a>(&'a self, headers: &'a HeaderMap) -> impl Fn(&HeaderName) -> bool + 'a {
        // Looked up once, because most responses have no such header.
        let connection = headers.contains_key(CONNECTION).then_some(headers);
        move |name| {
            let listed = |headers| is_listed_in_connection(name, headers);
            !connection.is_some_and(listed) && self.keeps(name)
        }
    }

    fn keeps(&self, name: &HeaderName) -> bool {
        if is_of_one_hop(name) {
            return false;
        }
        !self.also.contains(name)
            && (self.except.contains(name) || !is_of_one_exchange(name.as_str()))
    }

    /// The names that are left out, for the published policy; `*` ends a prefix.
    pub(crate) fn describe(&self) -> Vec<String> {
        let excepted = |name: &str| self.except.iter().any(|except| except == name);
        let exact = OF_ONE_HOP.iter().copied().chain(
            OF_ONE_EXCHANGE
                .iter()
                .copied()
                .chain(OURS.iter().map(HeaderName::as_str))
                .filter(|name| !excepted(name)),
        );
        let prefixes = OF_ONE_EXCHANGE_PREFIXES.iter();
        let prefixes = prefixes.map(|prefix| format!("{prefix}*"));
        let also = self.also.iter().map(ToString::to_string);
        exact
            .map(str::to_owned)
            .chain(prefixes)
            .chain(also)
            .collect()
    }
}

/// Connection fields (RFC 9110 section 7.6.1, RFC 9113 section 8.2.2) and the fields that frame a
/// message, which are made anew for every message.
const OF_ONE_HOP: &[&str] = &[
    "connection",
    "content-length",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

fn is_of_one_hop(name: &HeaderName) -> bool {
    OF_ONE_HOP.contains(&name.as_str())
}

fn is_listed_in_connection(name: &HeaderName, headers: &HeaderMap) -> bool {
    headers.get_all(CONNECTION).iter().any(|line| {
        line.as_bytes().split(|byte| *byte == b',').any(|listed| {
            listed
                .trim_ascii()
                .eq_ignore_ascii_case(name.as_str().as_bytes())
        })
    })
}

/// The default list: credentials and challenges, what outer layers make for each exchange, and what
/// a replay would make untrue.
pub(crate) const OF_ONE_EXCHANGE: &[&str] = &[
    "age",
    "authentication-info",
    "date",
    "retry-after",
    "server",
    "server-timing",
    "set-cookie",
    "traceparent",
    "tracestate",
    "www-authenticate",
    "x-request-id",
];
pub(crate) const OF_ONE_EXCHANGE_PREFIXES: &[&str] =
    &["access-control-", "proxy-", "ratelimit", "x-ratelimit-"];

/// What the layer itself says of an answer.
static OURS: [HeaderName; 5] = [REPLAYED, ORIGINAL_DATE, ERROR, RESULT, UNPROTECTED];

fn is_of_one_exchange(name: &str) -> bool {
    // Most headers are told apart by their first letter.
    match name.as_bytes().first() {
        Some(b'a' | b'd' | b'p' | b'r' | b's' | b't' | b'w' | b'x' | b'i') => {
            OF_ONE_EXCHANGE.contains(&name)
                || OF_ONE_EXCHANGE_PREFIXES
                    .iter()
                    .any(|prefix| name.starts_with(prefix))
                || OURS.iter().any(|ours| ours.as_str() == name)
        }
        _ => false,
    }
}

/// `idempotency-key` as `Idempotency-Key`.
pub(crate) fn display_name(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|letter| letter.to_ascii_uppercase());
        first.into_iter().chain(letters).collect::<String>()
    });
    words.collect::<Vec<_>>().join("-")
}

/// A time as a header carries it; `None` for one that has no four-digit year, or is before 1970.
pub(crate) fn http_date(time: SystemTime) -> Option<HeaderValue> {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    if seconds >= YEAR_10000 {
        return None;
    }
    HeaderValue::try_from(httpdate::fmt_http_date(time)).ok()
}

/// In seconds since the Unix epoch.
const YEAR_10000: u64 = 253_402_300_800;

/// The declared length of a body, if there is one that can be read.
pub(crate) fn declared_length(headers: &HeaderMap) -> Option<u64> {
    let value = headers.get(CONTENT_LENGTH)?.as_bytes().trim_ascii();
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// The media type without its parameters, in lower case letters where it has any.
pub(crate) fn is_media_type(value: Option<&HeaderValue>, list: &[Box<str>]) -> bool {
    let Some(value) = value else { return false };
    let essence = value.as_bytes().split(|byte| *byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    list.iter()
        .any(|listed| listed.as_bytes().eq_ignore_ascii_case(essence))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeps(list: &NeverStored, name: &'static str) -> bool {
        let headers = HeaderMap::from_iter([(
            CONNECTION,
            HeaderValue::from_static("close, X-Hop , set-cookie"),
        )]);
        list.kept(&headers)(&HeaderName::from_static(name))
    }

    #[test]
    fn what_belongs_to_one_hop_or_exchange_is_left_out_and_the_rest_is_kept() {
        let list = NeverStored::default();
        for name in [
            "connection",
            "x-hop",
            "keep-alive",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
            "content-length",
            "date",
            "set-cookie",
            "www-authenticate",
            "authentication-info",
            "proxy-authenticate",
            "proxy-connection",
            "access-control-allow-origin",
            "x-request-id",
            "traceparent",
            "tracestate",
            "server-timing",
            "ratelimit",
            "ratelimit-policy",
            "x-ratelimit-remaining",
            "retry-after",
            "age",
            "server",
            "idempotency-replayed",
            "idempotency-error",
        ] {
            assert!(!keeps(&list, name), "{name}");
        }
        for name in [
            "location",
            "etag",
            "content-type",
            "content-encoding",
            "link",
            "content-location",
            "last-modified",
            "cache-control",
            "vary",
            "x-anything",
            "allow",
            "accept-ranges",
            "content-language",
            "refresh",
            "grpc-status",
        ] {
            assert!(keeps(&list, name), "{name}");
        }
    }

    #[test]
    fn the_list_can_be_changed_but_hop_by_hop_fields_never_come_back() {
        let list = NeverStored {
            also: vec![HeaderName::from_static("x-secret")],
            except: vec![
                HeaderName::from_static("set-cookie2"),
                HeaderName::from_static("server"),
                HeaderName::from_static("transfer-encoding"),
                HeaderName::from_static("x-hop"),
                HeaderName::from_static("x-secret"),
            ],
        };
        // Named in both lists: out is the safe side.
        assert!(!keeps(&list, "x-secret"));
        assert!(keeps(&list, "server"));
        assert!(!keeps(&list, "transfer-encoding"));
        assert!(!keeps(&list, "x-hop"));
    }
}
