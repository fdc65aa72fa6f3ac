//! HTTP/2 frames by hand, for what no client library sends.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::message::Request;
use super::patience::patient;

pub struct RawH2 {
    stream: TcpStream,
}

/// How the server ends a stream that it does not like.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    Answered,
    Reset,
    Closed,
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

impl RawH2 {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = patient("connecting", TcpStream::connect(addr)).await;
        let mut raw = Self {
            stream: stream.expect("the puppet listens"),
        };
        raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        raw.frame(SETTINGS, 0, 0, &[]).await;
        raw
    }

    /// Sends a whole request on the first stream.
    pub async fn send(&mut self, request: &Request) {
        self.frame(HEADERS, END_HEADERS, 1, &fields(request)).await;
        self.frame(DATA, END_STREAM, 1, &request.body).await;
    }

    /// Sends the first half of a head and nothing more.
    pub async fn send_half_a_head(&mut self, request: &Request) {
        let fields = fields(request);
        let half = &fields[..fields.len() / 2];
        self.frame(HEADERS, 0, 1, half).await;
    }

    /// Reads until the first stream is answered, reset or cut off.
    pub async fn end(&mut self) -> End {
        loop {
            let mut head = [0; 9];
            let read = patient("a frame", self.stream.read_exact(&mut head)).await;
            if read.is_err() {
                return End::Closed;
            }
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut payload = vec![0; length];
            let read = patient("a frame", self.stream.read_exact(&mut payload)).await;
            if read.is_err() {
                return End::Closed;
            }
            match head[3] {
                HEADERS => return End::Answered,
                RST_STREAM => return End::Reset,
                GOAWAY => return End::Closed,
                _ => {}
            }
        }
    }

    async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u16::try_from(payload.len()).expect("a short frame");
        let [high, low] = length.to_be_bytes();
        let mut frame = vec![0, high, low, kind, flags];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.write(&frame).await;
    }

    async fn write(&mut self, bytes: &[u8]) {
        let written = patient("writing", self.stream.write_all(bytes)).await;
        written.expect("the connection is open");
    }
}

/// All fields literally, without indexing and without Huffman codes (RFC 7541 section 6.2.2).
fn fields(request: &Request) -> Vec<u8> {
    let mut block = Vec::new();
    let mut field = |name: &[u8], value: &[u8]| {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).expect("a short text"));
            assert!(text.len() < 127, "longer texts need another encoding");
            block.extend_from_slice(text);
        }
    };
    field(b":method", request.method.as_bytes());
    field(b":scheme", b"http");
    field(b":authority", b"puppet");
    field(b":path", request.path.as_bytes());
    for (name, value) in &request.headers {
        field(name.to_ascii_lowercase().as_bytes(), value);
    }
    block
}
