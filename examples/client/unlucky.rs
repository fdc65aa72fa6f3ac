//! A network that fails by plan: a TCP proxy that does something else to each connection.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

/// What happens to one connection.
#[derive(Clone, Copy, Debug)]
pub enum Luck {
    /// 503 in the service's place; the request does not arrive.
    Unavailable,
    /// The connection is reset, and the request does not arrive.
    CutBeforeRequest,
    /// The request arrives, and the connection is reset instead of an answer.
    CutBeforeAnswer,
    /// The request arrives, and the connection is reset before the last bytes of the answer.
    CutInAnswer,
    /// The request arrives, and nothing comes back.
    #[allow(dead_code, reason = "for tests, which share this file")]
    Silence,
}

/// See [`Unlucky::before`].
pub struct Unlucky;

impl Unlucky {
    /// Listens before a service. The first connections meet this plan; all others pass.
    pub async fn before(service: SocketAddr, plan: &'static [Luck]) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            let mut plan = plan.iter();
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connection(client, service, plan.next().copied()));
            }
        });
        Ok(address)
    }
}

async fn connection(
    mut client: TcpStream,
    service: SocketAddr,
    luck: Option<Luck>,
) -> io::Result<()> {
    let Some(luck) = luck else {
        let mut service = TcpStream::connect(service).await?;
        copy_bidirectional(&mut client, &mut service).await?;
        return Ok(());
    };
    let request = request(&mut client).await?;
    match luck {
        Luck::Unavailable => {
            client.write_all(UNAVAILABLE).await?;
            return client.shutdown().await;
        }
        Luck::CutBeforeRequest => {}
        Luck::CutBeforeAnswer => {
            exchange(service, &request).await?;
        }
        Luck::CutInAnswer => {
            let answer = exchange(service, &request).await?;
            client.write_all(&answer[..answer.len() - 10]).await?;
        }
        Luck::Silence => {
            exchange(service, &request).await?;
            // Until the client has had enough.
            let _ = client.read_u8().await;
        }
    }
    client.set_zero_linger()
}

/// A request to its end.
async fn request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    while !is_whole(&request) {
        if client.read_buf(&mut request).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(request)
}

/// Sends a request, and reads its answer to the end.
async fn exchange(service: SocketAddr, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut service = TcpStream::connect(service).await?;
    service.write_all(request).await?;
    self::request(&mut service).await
}

/// Whether a message with a declared length has ended.
fn is_whole(message: &[u8]) -> bool {
    let Some(head) = message.windows(4).position(|four| four == b"\r\n\r\n") else {
        return false;
    };
    let lines = String::from_utf8_lossy(&message[..head]).to_ascii_lowercase();
    let length = lines.split("\r\ncontent-length:").nth(1);
    let length = length.and_then(|rest| rest.lines().next()?.trim().parse().ok());
    message.len() >= head + 4 + length.unwrap_or(0)
}

const UNAVAILABLE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
    Connection: close\r\n\r\n";
