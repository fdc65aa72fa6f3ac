//! What the headers of a request order the handler to do.
//!
//! | header | the handler |
//! |---|---|
//! | `x-puppet-status: 201` | answers with this status (200 to 599) instead of 200 |
//! | `x-puppet-delay-ms: 200` | waits this long between its start and its end |
//! | `x-puppet-body: TEXT` | answers with this text |
//! | `x-puppet-body-base64: …` | answers with these bytes |
//! | `x-puppet-body-size: N` | answers with N bytes |
//! | `x-puppet-stream: COUNT,DELAY_MS` | answers with `chunk 0\n` to `chunk COUNT-1\n`, waiting before each but the first |
//! | `x-puppet-header: name: value` | adds a header, byte for byte; may be repeated |
//! | `x-puppet-trailer: name: value` | adds a trailer and announces it in `Trailer`; may be repeated |
//! | `x-puppet-panic: before` | panics after its start, before the delay |
//! | `x-puppet-panic: after` | panics after its end, before the answer |
//! | `x-puppet-override: not-executed` | says that nothing was done: the key is free again |
//! | `x-puppet-override: keep` | says that the response is final, whatever its status |
//! | `x-puppet-override: unknown` | says that nobody knows how the operation ended |
//! | `x-puppet-rewrite: 1` | sees another URI, other headers and another body than were sent |
//!
//! Of the four bodies one request may order one. Without any of them the body is
//! `{"run":N,"name":"…"}`, or empty if the status allows none. An order that cannot be followed is
//! answered with 400 and a text that names it.

use std::str::FromStr;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tower_idempotency::RetentionOverride;

#[derive(Default)]
pub struct Orders {
    pub status: StatusCode,
    pub delay: Duration,
    pub content: Option<Content>,
    pub headers: HeaderMap,
    pub trailers: HeaderMap,
    pub panic: Option<Panic>,
    pub word: Option<RetentionOverride>,
    pub rewrite: bool,
}

pub enum Content {
    Text(Bytes),
    Binary(Bytes),
    Stream { chunks: usize, pause: Duration },
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Panic {
    Before,
    After,
}

impl Orders {
    /// Reads all `x-puppet-` headers.
    ///
    /// # Errors
    ///
    /// A text that names the header that cannot be followed.
    pub fn read(headers: &HeaderMap) -> Result<Self, String> {
        let mut orders = Self::default();
        for name in headers.keys() {
            let Some(order) = name.as_str().strip_prefix("x-puppet-") else {
                continue;
            };
            let may_repeat = matches!(order, "header" | "trailer");
            let mut lines = headers.get_all(name).iter();
            if !may_repeat && lines.nth(1).is_some() {
                return Err(format!("{name} may be sent once only"));
            }
            for value in headers.get_all(name) {
                orders
                    .obey(order, value)
                    .map_err(|problem| format!("{name}: {problem}"))?;
            }
        }
        Ok(orders)
    }

    fn obey(&mut self, order: &str, value: &HeaderValue) -> Result<(), &'static str> {
        match order {
            "status" => {
                let status = number(value).ok_or("not a status")?;
                let status = StatusCode::from_u16(status).ok();
                self.status = status
                    .filter(|status| (200..600).contains(&status.as_u16()))
                    .ok_or("not a status from 200 to 599")?;
            }
            "delay-ms" => self.delay = milliseconds(value)?,
            "body" => {
                let text = Bytes::copy_from_slice(value.as_bytes());
                self.answer_with(Content::Text(text))?;
            }
            "body-base64" => {
                let bytes = BASE64_STANDARD.decode(value.as_bytes());
                let bytes = bytes.map_err(|_| "not base64 with padding")?;
                self.answer_with(Content::Binary(bytes.into()))?;
            }
            "body-size" => {
                let size = number(value).filter(|size| *size <= LARGEST_BODY);
                let size = size.ok_or("not a number of bytes up to 256 MiB")?;
                let bytes = (b'a'..=b'z').cycle().take(size);
                self.answer_with(Content::Binary(bytes.collect()))?;
            }
            "stream" => {
                let value = value.to_str().unwrap_or_default();
                let read = value.split_once(',').and_then(|(chunks, pause)| {
                    let pause = pause.trim().parse().ok()?;
                    Some((chunks.trim().parse().ok()?, Duration::from_millis(pause)))
                });
                let (chunks, pause) = read.ok_or("not COUNT,DELAY_MS")?;
                self.answer_with(Content::Stream { chunks, pause })?;
            }
            "header" => append(&mut self.headers, value)?,
            "trailer" => append(&mut self.trailers, value)?,
            "panic" => {
                self.panic = Some(match value.as_bytes() {
                    b"before" => Panic::Before,
                    b"after" => Panic::After,
                    _ => return Err("not before or after"),
                });
            }
            "override" => {
                self.word = Some(match value.as_bytes() {
                    b"not-executed" => RetentionOverride::NotExecuted,
                    b"keep" => RetentionOverride::Keep,
                    b"unknown" => RetentionOverride::LeaveUnknown,
                    _ => return Err("not not-executed, keep or unknown"),
                });
            }
            "rewrite" => {
                if value.as_bytes() != b"1" {
                    return Err("not 1");
                }
                self.rewrite = true;
            }
            _ => return Err("no such order"),
        }
        Ok(())
    }

    fn answer_with(&mut self, content: Content) -> Result<(), &'static str> {
        match self.content.replace(content) {
            None => Ok(()),
            Some(_) => Err("another header orders another body"),
        }
    }
}

const LARGEST_BODY: usize = 256 * 1024 * 1024;

fn number<T: FromStr>(value: &HeaderValue) -> Option<T> {
    value.to_str().ok()?.parse().ok()
}

fn milliseconds(value: &HeaderValue) -> Result<Duration, &'static str> {
    number(value)
        .map(Duration::from_millis)
        .ok_or("not a whole number of milliseconds")
}

/// Appends `name: value`; the value is bytes, not text.
fn append(headers: &mut HeaderMap, line: &HeaderValue) -> Result<(), &'static str> {
    let line = line.as_bytes();
    let colon = line.iter().position(|byte| *byte == b':');
    let colon = colon.ok_or("not name: value")?;
    let name = HeaderName::from_bytes(line[..colon].trim_ascii());
    let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
    match (name, value) {
        (Ok(name), Ok(value)) => {
            headers.append(name, value);
            Ok(())
        }
        _ => Err("not name: value"),
    }
}
