//! A TCP proxy that does to a connection what networks do: delays, silence, and breaks before or
//! after a request arrived.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

/// What happens to the bytes that arrive from now on, on connections old and new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Replies arrive so much later.
    Delay(Duration),
    /// Nothing arrives, in neither direction, until another mode is set.
    Freeze,
    /// Requests arrive; replies wait until another mode is set.
    HoldReplies,
    /// The connection breaks before the next request arrives.
    CutRequests,
    /// Requests arrive, and the connection breaks before the reply does.
    CutReplies,
    /// The same for the first reply; all others pass.
    CutOneReply,
    /// From the first request with a COMMIT in it on, that one included, as this mode says.
    OnceCommitted(CommitLoses),
}

/// What is lost of a COMMIT and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitLoses {
    /// It arrives, its reply does not, and everything passes then.
    Reply,
    /// It arrives, and no reply to anything does.
    EveryReply,
    /// It does not arrive, and everything passes then.
    Request,
}

/// Ends with the runtime in which it was started.
pub struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    held: Arc<Notify>,
    turns: Arc<Turns>,
}

impl Proxy {
    pub async fn before(upstream: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it has an address").port();
        let (mode, modes) = watch::channel(Mode::Pass);
        let held = Arc::new(Notify::new());
        let turns = Arc::new(Turns::default());
        let wire = Wire {
            modes,
            mode: mode.clone(),
            held: held.clone(),
            turns: turns.clone(),
        };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(wire.clone().connect(client, upstream));
            }
        });
        Self {
            port,
            mode,
            held,
            turns,
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// How often a client spoke after the server had; meant for one connection at a time.
    pub fn round_trips(&self) -> usize {
        self.turns.count.load(Ordering::SeqCst)
    }

    /// Waits until something is held that would have arrived.
    pub async fn holds_something(&self) {
        self.held.notified().await;
    }
}

#[derive(Clone)]
struct Wire {
    modes: watch::Receiver<Mode>,
    mode: watch::Sender<Mode>,
    held: Arc<Notify>,
    turns: Arc<Turns>,
}

#[derive(Default)]
struct Turns {
    count: AtomicUsize,
    clients: AtomicBool,
}

impl Turns {
    fn speaks(&self, which: Direction) {
        let client = which == Direction::Requests;
        if !self.clients.swap(client, Ordering::SeqCst) && client {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Requests,
    Replies,
}

impl Wire {
    async fn connect(self, client: TcpStream, upstream: u16) {
        let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)).await else {
            return;
        };
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        // The first one that ends takes the other one along: both sides are closed.
        tokio::select! {
            () = self.clone().pump(from_client, to_server, Direction::Requests) => {}
            () = self.clone().pump(from_server, to_client, Direction::Replies) => {}
        }
    }

    async fn pump(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, which: Direction) {
        let mut bytes = vec![0; 16 << 10];
        while let Ok(read) = from.read(&mut bytes).await {
            let commits = bytes[..read].windows(6).any(|bytes| bytes == b"COMMIT");
            if which == Direction::Requests && commits && !self.commit() {
                return;
            }
            if read == 0 || !self.may_pass(which).await {
                return;
            }
            self.turns.speaks(which);
            if to.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }

    /// A COMMIT is on its way; whether it may go on.
    fn commit(&self) -> bool {
        let Mode::OnceCommitted(what) = *self.mode.borrow() else {
            return true;
        };
        self.mode.send_replace(match what {
            CommitLoses::Reply => Mode::CutOneReply,
            CommitLoses::EveryReply => Mode::CutReplies,
            CommitLoses::Request => Mode::Pass,
        });
        what != CommitLoses::Request
    }

    /// Whether what was read may go on; otherwise the connection breaks.
    async fn may_pass(&mut self, which: Direction) -> bool {
        loop {
            let mode = *self.modes.borrow_and_update();
            match (mode, which) {
                (Mode::CutRequests, Direction::Requests)
                | (Mode::CutReplies, Direction::Replies) => {
                    return false;
                }
                (Mode::CutOneReply, Direction::Replies) => {
                    self.mode.send_replace(Mode::Pass);
                    return false;
                }
                (Mode::Freeze, _) | (Mode::HoldReplies, Direction::Replies) => {
                    self.held.notify_one();
                    if self.modes.changed().await.is_err() {
                        return false;
                    }
                }
                (Mode::Delay(by), Direction::Replies) => {
                    tokio::time::sleep(by).await;
                    return true;
                }
                _ => return true,
            }
        }
    }
}
