//! As much of an HTTP/1.1 client as the demo needs, over a plain socket: with a library in between it
//! would not be certain that a client which hangs up really hangs up.

use std::borrow::Cow;
use std::io::{self, Error, ErrorKind};
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A request to `POST /payments`.
#[derive(Clone)]
pub struct Request {
    pub token: &'static str,
    /// The value of `Idempotency-Key` as it goes over the wire.
    pub key: Option<Cow<'static, str>>,
    pub body: String,
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub reason: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    /// The value of the first header line of this name, given in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let (_, value) = headers.find(|(known, _)| known == name)?;
        Some(value)
    }
}

/// Sends a request on a connection of its own and leaves the connection open.
pub async fn send(addr: SocketAddr, request: &Request) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(addr).await?;
    let Request { token, key, body } = request;
    let key = key.as_ref();
    let key = key.map_or(String::new(), |key| format!("Idempotency-Key: {key}\r\n"));
    let message = format!(
        "POST /payments HTTP/1.1\r\n\
         Host: {addr}\r\n\
         Authorization: Bearer {token}\r\n\
         Content-Type: application/json\r\n\
         Content-Length: {}\r\n\
         Connection: close\r\n\
         {key}\r\n\
         {body}",
        body.len()
    );
    stream.write_all(message.as_bytes()).await?;
    Ok(stream)
}

/// The answer; `None` if the server closed the connection without one.
pub async fn receive(mut stream: TcpStream) -> io::Result<Option<Answer>> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset && bytes.is_empty() => {}
        Err(error) => return Err(error),
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    parse(&bytes)
        .map(Some)
        .ok_or_else(|| Error::new(ErrorKind::InvalidData, "the answer cannot be read"))
}

/// Sends a request and reads its answer.
pub async fn exchange(addr: SocketAddr, request: &Request) -> io::Result<Option<Answer>> {
    receive(send(addr, request).await?).await
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let body = bytes[end + 4..].to_vec();
    let mut lines = std::str::from_utf8(&bytes[..end]).ok()?.split("\r\n");
    let (status, reason) = lines.next()?.strip_prefix("HTTP/1.1 ")?.split_once(' ')?;
    let headers = lines
        .map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        })
        .collect::<Option<Vec<_>>>()?;
    let answer = Answer {
        status: status.parse().ok()?,
        reason: reason.to_owned(),
        headers,
        body,
    };
    // An answer of another length was cut off.
    let length: usize = answer.header("content-length")?.parse().ok()?;
    (answer.body.len() == length).then_some(answer)
}
