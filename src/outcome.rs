//! How a handler ended, in the bytes that every store keeps.

use std::fmt;

use bytes::{BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// The result of an attempt: status, headers, body and trailers, or a tombstone.
///
/// Headers keep their order, repeated lines and values that are not UTF-8. It is one frame of bytes
/// from the moment it is built: stores keep [`as_bytes`](Outcome::as_bytes) and read it back with
/// [`decode`](Outcome::decode), and a replay slices the body out of it without a copy.
///
/// # Encoding (version 1)
///
/// ```text
/// u8 version = 1 · u8 form (0 kept, 1 tombstone, 2 value) · u16 status, little endian
/// varint number of headers   · (varint length, name, varint length, value)*
/// varint number of trailers  · (varint length, name, varint length, value)*
/// varint length, body
/// ```
///
/// A later version gets another first byte; an unknown one is refused, never guessed at.
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    frame: Bytes,
    // Where the headers, trailers and body begin in `frame`.
    headers_at: u32,
    trailers_at: u32,
    body_at: u32,
}

/// A frame that is not an outcome: bytes that were damaged, or written by a newer version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The first byte names a version that this release does not know.
    #[error("the outcome was written in version {0}; this release reads version 1")]
    UnknownVersion(u8),
    /// The bytes do not follow the encoding.
    #[error("the outcome is damaged: {0}")]
    Damaged(&'static str),
}

const VERSION: u8 = 1;
const FORM_KEPT: u8 = 0;
const FORM_TOMBSTONE: u8 = 1;
const FORM_VALUE: u8 = 2;
const FIXED: usize = 4;

impl Outcome {
    /// A response that is kept whole, with its headers as they are given: leave out what belongs to
    /// one exchange only. The body may come in pieces.
    pub fn response(
        status: StatusCode,
        headers: &HeaderMap,
        body: &[&[u8]],
        trailers: Option<&HeaderMap>,
    ) -> Self {
        Self::filtered(status, headers, |_| true, body, trailers)
    }

    /// [`response`](Self::response) without the headers that `keep` refuses.
    pub(crate) fn filtered(
        status: StatusCode,
        headers: &HeaderMap,
        keep: impl Fn(&HeaderName) -> bool,
        body: &[&[u8]],
        trailers: Option<&HeaderMap>,
    ) -> Self {
        let kept = || headers.iter().filter(|(name, _)| keep(name));
        let trailers = || trailers.into_iter().flat_map(HeaderMap::iter);
        Self::encode(FORM_KEPT, status.as_u16(), kept, trailers, body)
    }

    /// "Finished with this status, body not kept": the work is done and its answer cannot be given
    /// again.
    pub fn tombstone(status: StatusCode) -> Self {
        let none = std::iter::empty;
        Self::encode(FORM_TOMBSTONE, status.as_u16(), none, none, &[])
    }

    /// The value that a job returned, as bytes; it has no status and no headers.
    pub fn value(bytes: &[u8]) -> Self {
        let none = std::iter::empty;
        Self::encode(FORM_VALUE, 0, none, none, &[bytes])
    }

    fn encode<'a, H, T>(
        form: u8,
        status: u16,
        headers: impl Fn() -> H,
        trailers: impl Fn() -> T,
        body: &[&[u8]],
    ) -> Self
    where
        H: Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
        T: Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
    {
        let (header_count, header_bytes) = measure(headers());
        let (trailer_count, trailer_bytes) = measure(trailers());
        let body_bytes: usize = body.iter().map(|part| part.len()).sum();
        let capacity = FIXED + header_bytes + trailer_bytes + varint_len(body_bytes) + body_bytes;
        let mut frame = Vec::with_capacity(capacity);
        frame.put_u8(VERSION);
        frame.put_u8(form);
        frame.put_u16_le(status);
        let headers_at = frame.len();
        put_fields(&mut frame, header_count, headers());
        let trailers_at = frame.len();
        put_fields(&mut frame, trailer_count, trailers());
        put_varint(&mut frame, body_bytes);
        let body_at = frame.len();
        for part in body {
            frame.put_slice(part);
        }
        debug_assert_eq!(frame.len(), capacity);
        Self {
            frame: Bytes::from(frame),
            headers_at: offset(headers_at),
            trailers_at: offset(trailers_at),
            body_at: offset(body_at),
        }
    }

    /// Reads a frame back, checking every length and every header.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the bytes are not an outcome of a version that this release knows.
    pub fn decode(frame: Bytes) -> Result<Self, DecodeError> {
        let version = *frame.first().ok_or(DecodeError::Damaged("it is empty"))?;
        if version != VERSION {
            return Err(DecodeError::UnknownVersion(version));
        }
        let fixed = frame
            .get(..FIXED)
            .ok_or(DecodeError::Damaged("it ends within its first four bytes"))?;
        let status = u16::from_le_bytes([fixed[2], fixed[3]]);
        match fixed[1] {
            FORM_KEPT | FORM_TOMBSTONE => {
                StatusCode::from_u16(status)
                    .map_err(|_| DecodeError::Damaged("its status is none"))?;
            }
            FORM_VALUE if status == 0 => {}
            FORM_VALUE => return Err(DecodeError::Damaged("a value has a status")),
            _ => return Err(DecodeError::Damaged("its form is unknown")),
        }
        let trailers_at = check_fields(&frame, FIXED)?;
        let trailers_end = check_fields(&frame, trailers_at)?;
        let mut body_at = trailers_end;
        let body_bytes = get_varint(&frame, &mut body_at)
            .ok_or(DecodeError::Damaged("the length of its body is cut off"))?;
        // Compared for equality, so that a frame that a store cut short never becomes a shorter
        // answer, and one with something after it never a longer one.
        if frame.len() - body_at != body_bytes {
            return Err(DecodeError::Damaged("its body has another length"));
        }
        if u32::try_from(frame.len()).is_err() {
            return Err(DecodeError::Damaged("it is longer than 4 GiB"));
        }
        if fixed[1] != FORM_KEPT && trailers_end != FIXED + 2 {
            return Err(DecodeError::Damaged("a form without headers has some"));
        }
        if fixed[1] == FORM_TOMBSTONE && body_bytes != 0 {
            return Err(DecodeError::Damaged("a tombstone has a body"));
        }
        Ok(Self {
            headers_at: offset(FIXED),
            trailers_at: offset(trailers_at),
            body_at: offset(body_at),
            frame,
        })
    }

    /// The frame, as stores keep it.
    pub fn as_bytes(&self) -> &Bytes {
        &self.frame
    }

    /// The status, or `None` for the value of a job.
    pub fn status(&self) -> Option<StatusCode> {
        StatusCode::from_u16(u16::from_le_bytes([self.frame[2], self.frame[3]])).ok()
    }

    /// Whether the body was not kept.
    pub fn is_tombstone(&self) -> bool {
        self.frame[1] == FORM_TOMBSTONE
    }

    /// The headers in their order, repeated lines included.
    pub fn headers(&self) -> Fields<'_> {
        Fields::at(&self.frame, self.headers_at as usize)
    }

    /// The trailers in their order; empty if there were none.
    pub fn trailers(&self) -> Fields<'_> {
        Fields::at(&self.frame, self.trailers_at as usize)
    }

    /// The body: a slice of the frame, not a copy.
    pub fn body(&self) -> Bytes {
        self.frame.slice(self.body_at as usize..)
    }
}

impl fmt::Debug for Outcome {
    /// Shows lengths and names, never a value: they can hold what a customer paid for.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("status", &self.status())
            .field("tombstone", &self.is_tombstone())
            .field(
                "headers",
                &self.headers().map(|(name, _)| name).collect::<Vec<_>>(),
            )
            .field("body_bytes", &(self.frame.len() - self.body_at as usize))
            .finish()
    }
}

/// The header or trailer lines of an [`Outcome`], in order.
#[derive(Clone)]
pub struct Fields<'a> {
    frame: &'a Bytes,
    position: usize,
    left: usize,
}

impl<'a> Fields<'a> {
    fn at(frame: &'a Bytes, mut position: usize) -> Self {
        let left = get_varint(frame, &mut position).unwrap_or(0);
        Self {
            frame,
            position,
            left,
        }
    }
}

impl Iterator for Fields<'_> {
    type Item = (HeaderName, HeaderValue);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        // The frame was checked when it was built or decoded, so these never end early.
        let name = get_slice(self.frame, &mut self.position)?;
        let value = get_slice(self.frame, &mut self.position)?;
        let name = HeaderName::from_bytes(&self.frame[name]).ok()?;
        // Maybe-shared: the value points into the frame, as the body does.
        let value = HeaderValue::from_maybe_shared(self.frame.slice(value)).ok()?;
        Some((name, value))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Fields<'_> {}

impl fmt::Debug for Fields<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.clone().map(|(name, _)| name))
            .finish()
    }
}

fn offset(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

fn varint_len(value: usize) -> usize {
    ((usize::BITS - value.leading_zeros()).max(1) as usize).div_ceil(7)
}

fn put_varint(frame: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        frame.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    frame.push(value as u8);
}

fn get_varint(frame: &[u8], position: &mut usize) -> Option<usize> {
    let mut value = 0_usize;
    for shift in (0..usize::BITS).step_by(7) {
        let byte = *frame.get(*position)?;
        *position += 1;
        let bits = usize::from(byte & 0x7f);
        let shifted = bits << shift;
        // Over-long and overflowing numbers would give two encodings of one outcome.
        if shifted >> shift != bits || (byte == 0 && shift > 0) {
            return None;
        }
        value |= shifted;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn get_slice(frame: &[u8], position: &mut usize) -> Option<std::ops::Range<usize>> {
    let len = get_varint(frame, position)?;
    let end = position.checked_add(len)?;
    let range = *position..end;
    frame.get(range.clone())?;
    *position = end;
    Some(range)
}

/// How many lines there are, and how many bytes they take with their number in front.
fn measure<'a>(fields: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> (usize, usize) {
    let mut count = 0;
    let mut bytes = 0;
    for (name, value) in fields {
        count += 1;
        let (name, value) = (name.as_str().len(), value.len());
        bytes += varint_len(name) + name + varint_len(value) + value;
    }
    (count, varint_len(count) + bytes)
}

fn put_fields<'a>(
    frame: &mut Vec<u8>,
    count: usize,
    fields: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
) {
    put_varint(frame, count);
    for (name, value) in fields {
        put_varint(frame, name.as_str().len());
        frame.put_slice(name.as_str().as_bytes());
        put_varint(frame, value.len());
        frame.put_slice(value.as_bytes());
    }
}

/// Checks one list of fields and returns where it ends.
fn check_fields(frame: &[u8], mut position: usize) -> Result<usize, DecodeError> {
    let count = get_varint(frame, &mut position)
        .ok_or(DecodeError::Damaged("a number of header lines is cut off"))?;
    // Each line takes two length bytes at least, so a huge count ends at once.
    for _ in 0..count {
        let name = get_slice(frame, &mut position)
            .ok_or(DecodeError::Damaged("a header name is cut off"))?;
        let lower = &frame[name];
        let parsed = HeaderName::from_bytes(lower)
            .map_err(|_| DecodeError::Damaged("a header name is none"))?;
        if parsed.as_str().as_bytes() != lower {
            return Err(DecodeError::Damaged("a header name is not in lower case"));
        }
        let value = get_slice(frame, &mut position)
            .ok_or(DecodeError::Damaged("a header value is cut off"))?;
        HeaderValue::from_bytes(&frame[value])
            .map_err(|_| DecodeError::Damaged("a header value is none"))?;
    }
    Ok(position)
}
