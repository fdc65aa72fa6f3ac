//! HTTP/1.1 by hand: every byte that is sent is chosen, every byte that comes back is seen.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::message::{Answer, Lines, Request, lines};
use super::patience::patient;

pub struct H1 {
    stream: TcpStream,
    unread: Vec<u8>,
}

/// The status line and headers of an answer.
pub struct Head {
    pub interim: Vec<u16>,
    pub status: u16,
    pub headers: Lines,
}

impl H1 {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = patient("connecting", TcpStream::connect(addr)).await;
        let stream = stream.expect("the puppet listens");
        stream.set_nodelay(true).expect("a socket option");
        Self {
            stream,
            unread: Vec::new(),
        }
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        let written = patient("writing", self.stream.write_all(bytes)).await;
        written.expect("the connection is open");
    }

    /// Says that nothing more will be sent; answers can still be read.
    pub async fn finish(&mut self) {
        let finished = patient("finishing", self.stream.shutdown()).await;
        finished.expect("the connection is open");
    }

    /// Sends a request with Content-Length, and reads its answer.
    pub async fn send(&mut self, request: &Request) -> Answer {
        self.write(&with_length(request)).await;
        self.answer(request).await
    }

    /// Reads the answer to `request`.
    pub async fn answer(&mut self, request: &Request) -> Answer {
        let answer = self.answer_or_end(request).await;
        answer.unwrap_or_else(|| panic!("closed without an answer to {request:?}"))
    }

    /// Reads the answer to `request`; `None` if the connection ends without a byte of it.
    pub async fn answer_or_end(&mut self, request: &Request) -> Option<Answer> {
        let head = self.head().await?;
        let length = lines(&head.headers, "content-length");
        let chunked = lines(&head.headers, "transfer-encoding");
        let mut trailers = Lines::new();
        let mut body = Vec::new();
        if request.method == "HEAD" || matches!(head.status, 204 | 304) {
            // Whatever the headers say, there is no body.
        } else if chunked == [b"chunked"] {
            assert!(length.is_empty(), "chunked, and with a length");
            while let Some(chunk) = self.chunk().await {
                body.extend_from_slice(&chunk);
            }
            trailers = self.fields().await;
        } else if let [length] = length.as_slice() {
            let length = std::str::from_utf8(length).expect("text");
            let length = length.parse().expect("a length");
            body = self.take(length).await;
        } else {
            panic!("a body without framing: {:?}", head.headers);
        }
        Some(Answer {
            interim: head.interim,
            status: head.status,
            headers: head.headers,
            body,
            trailers,
        })
    }

    /// Reads 100 Continue.
    pub async fn continues(&mut self) {
        assert_eq!(self.line().await, b"HTTP/1.1 100 Continue");
        assert_eq!(self.fields().await, []);
    }

    /// Reads up to the end of the headers; `None` if the connection ends before them.
    pub async fn head(&mut self) -> Option<Head> {
        let mut interim = Vec::new();
        loop {
            if self.unread.is_empty() && !self.fill().await {
                return None;
            }
            let line = self.line().await;
            let line = String::from_utf8(line).expect("a status line");
            let status = line.strip_prefix("HTTP/1.1 ").expect("a status line");
            let status = status.get(..3).and_then(|status| status.parse().ok());
            let status = status.expect("a status");
            let headers = self.fields().await;
            if (100..200).contains(&status) {
                interim.push(status);
                continue;
            }
            return Some(Head {
                interim,
                status,
                headers,
            });
        }
    }

    /// Reads one chunk of a chunked body; `None` for the last one, before its trailers.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = String::from_utf8(self.line().await).expect("the size of a chunk");
        let size = usize::from_str_radix(&size, 16).expect("the size of a chunk");
        if size == 0 {
            return None;
        }
        let chunk = self.take(size).await;
        assert_eq!(self.line().await, b"", "after a chunk");
        Some(chunk)
    }

    /// Waits until the server ends the connection.
    pub async fn ends(&mut self) {
        let more = !self.unread.is_empty() || self.fill().await;
        let unread = String::from_utf8_lossy(&self.unread);
        assert!(!more, "not the end: {unread}");
    }

    async fn fields(&mut self) -> Lines {
        let mut fields = Lines::new();
        loop {
            let line = self.line().await;
            if line.is_empty() {
                return fields;
            }
            let colon = line.iter().position(|byte| *byte == b':');
            let colon = colon.expect("a colon in a field");
            let name = String::from_utf8(line[..colon].to_ascii_lowercase());
            let value = line[colon + 1..].trim_ascii().to_vec();
            fields.push((name.expect("a field's name"), value));
        }
    }

    async fn line(&mut self) -> Vec<u8> {
        loop {
            let end = self.unread.windows(2).position(|two| two == b"\r\n");
            if let Some(end) = end {
                let line = self.unread.drain(..end + 2);
                return line.take(end).collect();
            }
            self.must_fill().await;
        }
    }

    async fn take(&mut self, bytes: usize) -> Vec<u8> {
        while self.unread.len() < bytes {
            self.must_fill().await;
        }
        self.unread.drain(..bytes).collect()
    }

    async fn must_fill(&mut self) {
        if !self.fill().await {
            let unread = String::from_utf8_lossy(&self.unread);
            panic!("the connection ended within an answer: {unread}");
        }
    }

    /// `false` if the connection has ended, in whichever way.
    async fn fill(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.unread);
        let read = patient("reading", read).await.unwrap_or(0);
        read > 0
    }
}

/// A request up to the empty line, without the headers that frame its body.
pub fn head(request: &Request, framing: &str) -> Vec<u8> {
    let Request {
        method,
        path,
        headers,
        ..
    } = request;
    let mut bytes = format!("{method} {path} HTTP/1.1\r\nHost: puppet\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(framing.as_bytes());
    bytes.extend_from_slice(b"\r\n");
    bytes
}

pub fn with_length(request: &Request) -> Vec<u8> {
    let length = format!("Content-Length: {}\r\n", request.body.len());
    let mut bytes = head(request, &length);
    bytes.extend_from_slice(&request.body);
    bytes
}

/// The request with its body in these chunks, each followed by `extension` in its size line.
pub fn chunked(request: &Request, chunks: &[&[u8]], extension: &str, trailers: &str) -> Vec<u8> {
    let mut bytes = head(request, "Transfer-Encoding: chunked\r\n");
    for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
        bytes.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
        bytes.extend_from_slice(chunk);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    bytes
}
