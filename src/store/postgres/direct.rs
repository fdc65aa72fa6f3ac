//! Whether a connection leads to one server process for as long as it lives, or to a pooler that
//! hands every transaction to whatever process is free.
//!
//! A prepared statement is known to one server process, under a name that other clients of a pooler
//! use as well. Behind a pooler that does not keep them apart, a name may be unknown or, worse, be
//! somebody else's statement. So statements are prepared only where nothing stands between.
//!
//! At the beginning of every connection the server tells its process id, for requests to cancel a
//! statement. A pooler tells one that it made up, because behind it there is no one process to tell
//! of. The driver keeps the id to itself, but writes it into such a request: one is written into
//! memory here, and never sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Client;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// The process id that the other end told when the connection was made.
pub(super) async fn told_process_id(client: &Client) -> Option<i32> {
    let mut request = Vec::with_capacity(REQUEST);
    let written = client
        .cancel_token()
        .cancel_query_raw(Memory(&mut request), Plain)
        .await;
    written.ok()?;
    // Length, code, process id, secret. What may stand before is a request for TLS.
    let cancel = request.last_chunk::<REQUEST>()?;
    let (_, id) = cancel.split_first_chunk::<8>()?;
    Some(i32::from_be_bytes(*id.first_chunk()?))
}

/// A connection to nowhere that keeps what is written, and agrees to TLS when asked.
struct Memory<'a>(&'a mut Vec<u8>);

impl AsyncRead for Memory<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Memory<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Memory<'_> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

/// "TLS" that changes nothing: the request stays in this process.
struct Plain;

impl<'a> TlsConnect<Memory<'a>> for Plain {
    type Stream = Memory<'a>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Memory<'a>>>;

    fn connect(self, stream: Memory<'a>) -> Self::Future {
        std::future::ready(Ok(stream))
    }
}

const REQUEST: usize = 16;
