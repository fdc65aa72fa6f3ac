//! Taking a fingerprint while the body arrives.

use bytes::Bytes;
use http::HeaderMap;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use sha2::{Digest as _, Sha256};

use super::Fingerprint;
use super::caller::CallerPart;
use super::content_type::{boundary, essence, is_form_data, is_json};
use super::digest::{Digest, Sink};
use super::encoder::Encoder;
use super::json::{Document, Selection};
use super::multipart;
use super::recipe::{Closure, Content, Reading, Settings};

/// A fingerprint in the making: begun with the head, fed with each frame of the body.
///
/// A body whose bytes count is hashed frame by frame, without a copy and without an allocation,
/// so that a large one does not hold up the worker at its end. One that is read first is handed over
/// whole to [`finish`](Self::finish).
pub(crate) struct FingerprintHasher<'a> {
    recipe: [u8; 4],
    caller: CallerPart,
    target: [u8; 4],
    head: &'a Parts,
    hash: Digest,
    body: Body<'a>,
}

/// How this request's body is hashed.
#[derive(Clone, Copy)]
enum Body<'a> {
    Raw,
    LeftOut,
    Json {
        selection: &'a Selection,
        media_type: &'a [u8],
    },
    Multipart {
        boundary: &'a [u8],
    },
    Closure(&'a Closure),
}

impl<'a> FingerprintHasher<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        head: &'a Parts,
        path: &str,
        query: Option<&str>,
        caller: CallerPart,
    ) -> Self {
        let write_target = |encoder: &mut Encoder<'_>| {
            if !matches!(settings.content, Content::KeyOnly) {
                encoder.text(head.method.as_str().as_bytes());
                encoder.text(path.as_bytes());
                encoder.lines(query.map(str::as_bytes));
            }
        };
        let mut hash = Sha256::new();
        write_target(&mut Encoder::new(&mut hash));
        let [a, b, c, d, ..] = <[u8; 32]>::from(hash.clone().finalize());
        let mut hash = settings.algorithm.go_on(hash, write_target);
        let mut encoder = Encoder::new(&mut hash);
        for name in &settings.headers {
            let lines = head.headers.get_all(name);
            encoder.lines(lines.iter().map(HeaderValue::as_bytes));
        }
        let body = Body::of(&settings.content, &head.headers);
        match body {
            Body::Raw => write_raw_head(&head.headers, &mut encoder),
            Body::LeftOut => encoder.tag(b'N'),
            // Only the body tells whether it can be read.
            Body::Json { .. } | Body::Multipart { .. } | Body::Closure(_) => {}
        }
        drop(encoder);
        Self {
            recipe: settings.id(caller),
            caller,
            target: [a, b, c, d],
            head,
            hash,
            body,
        }
    }

    /// The next data frame of the body.
    pub(crate) fn frame(&mut self, frame: &Bytes) {
        if matches!(self.body, Body::Raw) {
            self.hash.put(frame);
        }
    }

    /// The fingerprint, when the body has ended. `whole` gives all its frames in one piece.
    pub(crate) fn finish(mut self, whole: impl FnOnce() -> Bytes) -> Fingerprint {
        if !matches!(self.body, Body::Raw | Body::LeftOut) {
            self.read(&whole());
        }
        Fingerprint::from_parts(
            self.recipe,
            self.hash.finish(),
            self.caller.bytes(),
            self.target,
        )
    }

    fn read(&mut self, body: &[u8]) {
        // What is wrong with a body may show at its end, when the rest of it is hashed already.
        let mut hash = self.hash.clone();
        let mut encoder = Encoder::new(&mut hash);
        let read = match self.body {
            Body::Json {
                selection,
                media_type,
            } => Document::parse(body).map(|document| {
                encoder.tag(b'J');
                encoder.text(&media_type.to_ascii_lowercase());
                document.write(selection, &mut encoder);
            }),
            Body::Multipart { boundary } => {
                encoder.tag(b'M');
                multipart::write(body, boundary, &mut encoder)
            }
            Body::Closure(f) => {
                encoder.tag(b'C');
                encoder.bytes(&f(self.head, body));
                Some(())
            }
            Body::Raw | Body::LeftOut => None,
        };
        drop(encoder);
        if read.is_some() {
            self.hash = hash;
        } else {
            let mut encoder = Encoder::new(&mut self.hash);
            write_raw_head(&self.head.headers, &mut encoder);
            encoder.bytes(body);
        }
    }
}

impl<'a> Body<'a> {
    fn of(content: &'a Content, headers: &'a HeaderMap) -> Self {
        match content {
            Content::Read(reading) => Self::read(reading, headers).unwrap_or(Self::Raw),
            Content::Closure { f, .. } => Self::Closure(&**f),
            Content::LeftOut | Content::KeyOnly => Self::LeftOut,
        }
    }

    fn read(reading: &'a Reading, headers: &'a HeaderMap) -> Option<Self> {
        if reading.json.is_none() && !reading.multipart {
            return None;
        }
        let mut lines = headers.get_all(CONTENT_TYPE).iter();
        let content_type = lines.next()?.as_bytes();
        if lines.next().is_some() {
            return None;
        }
        let media_type = essence(content_type);
        if is_json(media_type) {
            let selection = reading.json.as_ref()?;
            Some(Self::Json {
                selection,
                media_type,
            })
        } else if is_form_data(media_type) && reading.multipart {
            let boundary = boundary(content_type)?;
            Some(Self::Multipart { boundary })
        } else {
            None
        }
    }
}

/// What stands before a body that is hashed as it is. The whole content type, because it may say
/// how the bytes are read: a boundary, a charset.
fn write_raw_head(headers: &HeaderMap, encoder: &mut Encoder<'_>) {
    encoder.tag(b'R');
    let lines = headers.get_all(CONTENT_TYPE);
    encoder.lines(lines.iter().map(HeaderValue::as_bytes));
}
