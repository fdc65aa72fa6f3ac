//! HTTP/2 with prior knowledge, frame by frame.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::net::TcpStream;

use super::message::{Answer, Lines, Request};
use super::patience::patient;

pub struct H2 {
    requests: SendRequest<Bytes>,
    connection: tokio::task::JoinHandle<()>,
}

impl H2 {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = patient("connecting", TcpStream::connect(addr)).await;
        let stream = stream.expect("the puppet listens");
        stream.set_nodelay(true).expect("a socket option");
        let shaken = patient("the handshake", h2::client::handshake(stream)).await;
        let (requests, connection) = shaken.expect("the puppet speaks HTTP/2");
        let connection = tokio::spawn(async move { drop(connection.await) });
        Self {
            requests,
            connection,
        }
    }

    /// Sends a request, and reads its answer.
    pub async fn send(&mut self, request: &Request) -> Answer {
        let answer = self.send_or_reset(request).await;
        answer.unwrap_or_else(|error| panic!("{error}: {request:?}"))
    }

    /// Sends a request; the error if the stream is reset or the connection ends without an answer.
    pub async fn send_or_reset(&mut self, request: &Request) -> Result<Answer, h2::Error> {
        self.send_split(request, request.body.len()).await
    }

    /// Sends the body in two DATA frames, divided at `at`. Empty ones are left out.
    pub async fn send_split(&mut self, request: &Request, at: usize) -> Result<Answer, h2::Error> {
        let (answer, mut body) = self.open(request).await;
        let body_bytes = Bytes::copy_from_slice(&request.body);
        let frames = [body_bytes.slice(..at), body_bytes.slice(at..)];
        for frame in frames.into_iter().filter(|frame| !frame.is_empty()) {
            // A refusal may have ended the stream already.
            if body.send_data(frame, false).is_err() {
                break;
            }
        }
        let _ = body.send_data(Bytes::new(), true);
        read(answer).await
    }

    /// Sends the head of a request, whose body is to follow.
    pub async fn open(&mut self, request: &Request) -> (ResponseFuture, SendStream<Bytes>) {
        let uri = format!("http://puppet{}", request.path);
        let mut message = http::Request::builder()
            .method(&*request.method)
            .uri(uri)
            .body(())
            .expect("a request");
        for (name, value) in &request.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a header's name");
            let value = HeaderValue::from_bytes(value).expect("a header's value");
            message.headers_mut().append(name, value);
        }
        patient(
            "a free stream",
            std::future::poll_fn(|cx| self.requests.poll_ready(cx)),
        )
        .await
        .expect("the connection is open");
        self.requests
            .send_request(message, false)
            .expect("the connection is open")
    }

    /// Ends the connection at once, as a process that dies does.
    pub async fn cut(self) {
        self.connection.abort();
        let _ = self.connection.await;
    }
}

/// Reads an answer to its end.
pub async fn read(answer: ResponseFuture) -> Result<Answer, h2::Error> {
    let (parts, mut body) = patient("an answer", answer).await?.into_parts();
    let mut bytes = Vec::new();
    while let Some(data) = next_data(&mut body).await? {
        bytes.extend_from_slice(&data);
    }
    let trailers = patient("trailers", body.trailers()).await?;
    Ok(Answer {
        interim: Vec::new(),
        status: parts.status.as_u16(),
        headers: to_lines(&parts.headers),
        body: bytes,
        trailers: trailers.as_ref().map(to_lines).unwrap_or_default(),
    })
}

/// The next DATA frame; `None` after the last.
pub async fn next_data(body: &mut RecvStream) -> Result<Option<Bytes>, h2::Error> {
    let Some(data) = patient("a frame", body.data()).await else {
        return Ok(None);
    };
    let data = data?;
    body.flow_control().release_capacity(data.len())?;
    Ok(Some(data))
}

fn to_lines(headers: &HeaderMap) -> Lines {
    (headers.iter())
        .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()))
        .collect()
}
