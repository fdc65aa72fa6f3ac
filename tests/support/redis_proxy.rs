//! A TCP proxy that does to a connection to Redis what networks do.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What happens to what arrives from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Nothing arrives any more.
    Silence,
    /// Requests arrive, and the connection breaks before their reply does.
    CutReplies,
    /// The same for one reply, after so many that pass.
    CutOneReply {
        after: usize,
    },
    /// The same for all replies, after so many that pass.
    CutRepliesFrom {
        after: usize,
    },
    /// Replies arrive so much later.
    Delay(Duration),
}

/// Ends with the runtime in which it was started.
pub struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
}

impl Proxy {
    pub async fn before(upstream: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it has an address").port();
        let (mode, _) = watch::channel(Mode::Pass);
        let of_connections = mode.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connect(client, upstream, of_connections.clone()));
            }
        });
        Self { port, mode }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    pub fn mode(&self) -> Mode {
        *self.mode.borrow()
    }
}

async fn connect(client: TcpStream, upstream: u16, mode: watch::Sender<Mode>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // The first one that ends takes the other one along: both sides are closed.
    tokio::select! {
        () = pump(from_client, to_server, mode.clone(), false) => {}
        () = pump(from_server, to_client, mode, true) => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mode: watch::Sender<Mode>,
    replies: bool,
) {
    let mut bytes = vec![0; 16 << 10];
    let mut modes = mode.subscribe();
    loop {
        let read = match from.read(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        let now = *modes.borrow_and_update();
        match now {
            Mode::Silence => continue,
            Mode::CutReplies if replies => return,
            Mode::CutOneReply { after: 0 } if replies => {
                mode.send_replace(Mode::Pass);
                return;
            }
            Mode::CutOneReply { after } if replies => {
                mode.send_replace(Mode::CutOneReply { after: after - 1 });
            }
            Mode::CutRepliesFrom { after: 0 } if replies => {
                mode.send_replace(Mode::CutReplies);
                return;
            }
            Mode::CutRepliesFrom { after } if replies => {
                mode.send_replace(Mode::CutRepliesFrom { after: after - 1 });
            }
            Mode::Delay(by) if replies => tokio::time::sleep(by).await,
            _ => {}
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
