//! Bodies that were read ahead, and bodies that pass.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

/// Boxed, because few messages have them and every body is moved about with the place for them.
pub(crate) type Trailers = Option<Box<HeaderMap>>;

/// The data frames of a body. One frame, the usual case, is kept without a list.
///
/// Large frames are kept as they arrived. Small ones are gathered after the first, because each
/// takes more than its bytes: its place in the list, and the whole receive buffer that it is a slice
/// of. So what is held is a small multiple of the bytes, however they were cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frames {
    first: Option<Bytes>,
    rest: Option<Box<Rest>>,
    bytes: usize,
}

/// Boxed as a whole, because few bodies have more than one frame and all are moved about.
#[derive(Clone, Debug, Default)]
struct Rest {
    frames: VecDeque<Bytes>,
    /// Small frames that arrived after all others.
    gathered: BytesMut,
}

/// The size from which a frame is worth a place of its own.
const LARGE: usize = 4096;

impl Frames {
    pub(crate) fn one(bytes: Bytes) -> Self {
        let mut frames = Self::default();
        frames.push(bytes);
        frames
    }

    pub(crate) fn push(&mut self, frame: Bytes) {
        if frame.is_empty() {
            return;
        }
        let is_first = self.bytes == 0;
        self.bytes += frame.len();
        if is_first {
            self.first = Some(frame);
            return;
        }
        let rest = self.rest.get_or_insert_default();
        if frame.len() < LARGE {
            rest.gathered.extend_from_slice(&frame);
        } else {
            if !rest.gathered.is_empty() {
                rest.frames.push_back(rest.gathered.split().freeze());
            }
            rest.frames.push_back(frame);
        }
    }

    fn pop(&mut self) -> Option<Bytes> {
        let rest = self.rest.as_mut();
        let frame = self.first.take().or_else(|| rest?.pop())?;
        self.bytes -= frame.len();
        Some(frame)
    }

    /// How many bytes are left.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let rest = self.rest.iter().flat_map(|rest| rest.iter());
        self.first.iter().map(|frame| &frame[..]).chain(rest)
    }

    /// All bytes in one piece; a copy only if there are several frames.
    pub(crate) fn join(&self) -> Bytes {
        if self.rest.is_none() {
            return self.first.clone().unwrap_or_default();
        }
        let mut joined = Vec::with_capacity(self.bytes);
        for frame in self.iter() {
            joined.extend_from_slice(frame);
        }
        Bytes::from(joined)
    }
}

impl Rest {
    fn pop(&mut self) -> Option<Bytes> {
        self.frames.pop_front().or_else(|| {
            let gathered = std::mem::take(&mut self.gathered).freeze();
            (!gathered.is_empty()).then_some(gathered)
        })
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let gathered = Some(&self.gathered[..]).filter(|gathered| !gathered.is_empty());
        self.frames.iter().map(|frame| &frame[..]).chain(gathered)
    }
}

pin_project! {
    /// What the inner service reads: the request's own body, or its frames and trailers, read ahead
    /// for the fingerprint and handed on unchanged.
    pub struct RequestBody<B> {
        #[pin]
        kind: Request<B>,
    }
}

pin_project! {
    #[project = RequestProj]
    enum Request<B> {
        Passed { #[pin] body: B },
        Held { frames: Frames, trailers: Trailers },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn passed(body: B) -> Self {
        Self {
            kind: Request::Passed { body },
        }
    }

    pub(crate) fn held(frames: Frames, trailers: Trailers) -> Self {
        Self {
            kind: Request::Held { frames, trailers },
        }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            RequestProj::Passed { body } => body.poll_frame(cx),
            RequestProj::Held { frames, trailers } => {
                Poll::Ready(next_held(frames, trailers).map(Ok))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Request::Passed { body } => body.is_end_stream(),
            Request::Held { frames, trailers } => frames.is_empty() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Request::Passed { body } => body.size_hint(),
            Request::Held { frames, trailers } => {
                let held = frames.len() as u64;
                let mut hint = SizeHint::new();
                match trailers {
                    None => hint.set_exact(held),
                    // A handler that forwards the request would send the length as Content-Length,
                    // and then no trailers over HTTP/1.1.
                    Some(_) => hint.set_lower(held),
                }
                hint
            }
        }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

fn next_held(frames: &mut Frames, trailers: &mut Trailers) -> Option<Frame<Bytes>> {
    frames
        .pop()
        .map(Frame::data)
        .or_else(|| trailers.take().map(|trailers| Frame::trailers(*trailers)))
}

pin_project! {
    /// What the client reads: the handler's own body, a body that was held until its outcome was
    /// recorded, or a replay.
    pub struct ResponseBody<R>
    where
        R: Body,
    {
        #[pin]
        kind: Response<R>,
    }
}

pin_project! {
    #[project = ResponseProj]
    enum Response<R>
    where
        R: Body,
    {
        Passed { #[pin] body: R },
        Held {
            frames: Frames,
            trailers: Trailers,
            // What was not read when the limit was reached.
            rest: Option<Pin<Box<R>>>,
            // What ended the body while it was read.
            error: Option<R::Error>,
            // Whether there was time to send what came before the error.
            paused: bool,
        },
    }
}

impl<R: Body> ResponseBody<R> {
    pub(crate) fn passed(body: R) -> Self {
        Self {
            kind: Response::Passed { body },
        }
    }

    pub(crate) fn held(
        frames: Frames,
        trailers: Trailers,
        rest: Option<Pin<Box<R>>>,
        error: Option<R::Error>,
    ) -> Self {
        Self {
            kind: Response::Held {
                frames,
                trailers,
                rest,
                error,
                paused: false,
            },
        }
    }

    pub(crate) fn full(bytes: Bytes, trailers: Trailers) -> Self {
        Self::held(Frames::one(bytes), trailers, None, None)
    }
}

impl<R: Body<Data = Bytes>> Body for ResponseBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            ResponseProj::Passed { body } => body.poll_frame(cx),
            ResponseProj::Held {
                frames,
                trailers,
                rest,
                error,
                paused,
            } => {
                if let Some(frame) = next_held(frames, trailers) {
                    return Poll::Ready(Some(Ok(frame)));
                }
                if error.is_some() && !*paused {
                    // hyper sends what it has when a body is not ready, and drops it when a body
                    // fails: without a pause the client would not even see the head.
                    *paused = true;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if let Some(error) = error.take() {
                    return Poll::Ready(Some(Err(error)));
                }
                match rest {
                    Some(rest) => rest.as_mut().poll_frame(cx),
                    None => Poll::Ready(None),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Response::Passed { body } => body.is_end_stream(),
            Response::Held {
                frames,
                trailers,
                rest,
                error,
                ..
            } => {
                frames.is_empty()
                    && trailers.is_none()
                    && error.is_none()
                    && rest.as_ref().is_none_or(|rest| rest.is_end_stream())
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Response::Passed { body } => body.size_hint(),
            Response::Held {
                frames,
                trailers,
                rest,
                error,
                ..
            } => {
                let held = frames.len() as u64;
                let mut hint = SizeHint::new();
                hint.set_lower(held);
                match rest {
                    Some(rest) => {
                        let rest = rest.size_hint();
                        hint.set_lower(held.saturating_add(rest.lower()));
                        if let Some(upper) = rest.upper() {
                            hint.set_upper(held.saturating_add(upper));
                        }
                    }
                    // An exact length would become a Content-Length: over HTTP/1.1 it would cut the
                    // trailers off, and hide that the body broke.
                    None if trailers.is_none() && error.is_none() => hint.set_exact(held),
                    None => {}
                }
                hint
            }
        }
    }
}

impl<R: Body> fmt::Debug for ResponseBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
