//! The store under trial: its server, the networks to it, and what is done to them.
//!
//! Redis runs with `appendonly yes` and `appendfsync always`: with less, a restart may forget what was
//! acknowledged, and no store could keep the promises. PostgreSQL commits as it is shipped
//! (`synchronous_commit = on`) and leaves out the flush to the disk (`fsync = off`): processes are
//! killed here and not machines, so that the system keeps what they wrote.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::plan::{Kind, PROCESSES, Step, StoreFault};
#[cfg(any(feature = "postgres", feature = "redis"))]
use super::proxy::{Mode, Proxy};
use super::sqlite::Folder;

pub struct World {
    pub folder: Folder,
    server: Server,
    #[cfg(any(feature = "postgres", feature = "redis"))]
    proxies: Vec<Proxy>,
}

#[derive(Clone)]
enum Server {
    File,
    #[cfg(feature = "postgres")]
    Postgres(Arc<super::postgres_server::Server>),
    #[cfg(feature = "redis")]
    Redis(Arc<super::redis_server::Server>),
}

impl World {
    pub async fn start(kind: Kind) -> Self {
        let folder = Folder::new();
        let server = tokio::task::block_in_place(|| match kind {
            Kind::Sqlite => Server::File,
            #[cfg(feature = "postgres")]
            Kind::Postgres => Server::Postgres(Arc::new(super::postgres_server::Server::start())),
            #[cfg(feature = "redis")]
            Kind::Redis => Server::Redis(Arc::new(super::redis_server::Server::durable())),
        });
        #[cfg(any(feature = "postgres", feature = "redis"))]
        let mut proxies = Vec::new();
        #[cfg(any(feature = "postgres", feature = "redis"))]
        if let Some(port) = server.port() {
            for _ in 0..PROCESSES {
                proxies.push(Proxy::before(port).await);
            }
        }
        let world = Self {
            folder,
            server,
            #[cfg(any(feature = "postgres", feature = "redis"))]
            proxies,
        };
        #[cfg(feature = "postgres")]
        if kind == Kind::Postgres {
            let store = tower_idempotency::PostgresStore::connect(&world.url(None)).await;
            let migrated = store.expect("the server answers").migrate().await;
            migrated.expect("the tables can be made");
        }
        world
    }

    /// Where a process finds the store; `None` for a way that no fault of the network is on.
    fn url(&self, process: Option<usize>) -> String {
        match &self.server {
            Server::File => {
                let file = self.folder.file();
                let _ = process;
                file.to_str().expect("a plain path").to_owned()
            }
            #[cfg(feature = "postgres")]
            Server::Postgres(server) => {
                let url = match process {
                    Some(process) => server.url_through(self.proxies[process].port()),
                    None => server.url().to_owned(),
                };
                // Reading the system's certificates takes a moment, which a process that was killed
                // would spend again and again.
                format!("{url}?sslmode=disable")
            }
            #[cfg(feature = "redis")]
            Server::Redis(server) => match process {
                Some(process) => format!("redis://127.0.0.1:{}", self.proxies[process].port()),
                None => server.url(),
            },
        }
    }

    pub fn urls(&self) -> [String; PROCESSES] {
        std::array::from_fn(|process| self.url(Some(process)))
    }

    /// Lets a fault happen, and waits until it is over.
    pub async fn suffer(&self, step: &Step<StoreFault>) {
        match step.fault {
            StoreFault::Lock => self.lock_file(step.lasting).await,
            StoreFault::KillServer => {
                self.server.clone().kill().await;
                sleep(step.lasting).await;
                self.server.clone().restart().await;
            }
            StoreFault::FreezeServer => {
                self.server.clone().freeze(true).await;
                sleep(step.lasting).await;
                self.server.clone().freeze(false).await;
            }
            #[cfg(any(feature = "postgres", feature = "redis"))]
            network => {
                let mode = match network {
                    StoreFault::CutRequests => Mode::CutRequests,
                    StoreFault::CutReplies => Mode::CutReplies,
                    StoreFault::CutOneReply => Mode::CutOneReply,
                    StoreFault::Slow => Mode::Delay(Duration::from_millis(150)),
                    StoreFault::HoldReplies => Mode::HoldReplies,
                    _ => Mode::Freeze,
                };
                let proxy = &self.proxies[step.process];
                proxy.set(mode);
                sleep(step.lasting).await;
                proxy.set(Mode::Pass);
            }
            #[cfg(not(any(feature = "postgres", feature = "redis")))]
            other => unreachable!("{other:?} has no network"),
        }
    }

    async fn lock_file(&self, lasting: Duration) {
        let file = rusqlite::Connection::open(self.folder.file()).expect("the file");
        let limit = Duration::from_secs(30);
        file.busy_timeout(limit).expect("a setting");
        let locked = tokio::task::spawn_blocking(move || {
            file.execute_batch("BEGIN IMMEDIATE").expect("the lock");
            file
        });
        let file = locked.await.expect("a lock");
        sleep(lasting).await;
        file.execute_batch("ROLLBACK")
            .expect("the lock is given back");
    }
}

impl Server {
    #[cfg(any(feature = "postgres", feature = "redis"))]
    fn port(&self) -> Option<u16> {
        match self {
            Self::File => None,
            #[cfg(feature = "postgres")]
            Self::Postgres(server) => Some(server.address().1),
            #[cfg(feature = "redis")]
            Self::Redis(server) => Some(server.port()),
        }
    }

    async fn kill(self) {
        blocking(move || match &self {
            Self::File => {}
            #[cfg(feature = "postgres")]
            Self::Postgres(server) => server.kill(),
            #[cfg(feature = "redis")]
            Self::Redis(server) => server.kill(),
        })
        .await;
    }

    async fn restart(self) {
        blocking(move || match &self {
            Self::File => {}
            #[cfg(feature = "postgres")]
            Self::Postgres(server) => server.restart(),
            #[cfg(feature = "redis")]
            Self::Redis(server) => server.restart(),
        })
        .await;
    }

    async fn freeze(self, frozen: bool) {
        blocking(move || match (&self, frozen) {
            (Self::File, _) => {}
            #[cfg(feature = "postgres")]
            (Self::Postgres(server), true) => server.freeze(),
            #[cfg(feature = "postgres")]
            (Self::Postgres(server), false) => server.thaw(),
            #[cfg(feature = "redis")]
            (Self::Redis(server), true) => server.pause(),
            #[cfg(feature = "redis")]
            (Self::Redis(server), false) => server.resume(),
        })
        .await;
    }
}

async fn blocking(order: impl FnOnce() + Send + 'static) {
    let done = tokio::task::spawn_blocking(order).await;
    done.expect("the server obeys");
}
