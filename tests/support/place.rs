//! Where a puppet keeps its records, so that it can be killed and another one goes on there.

use super::puppet::Puppet;
#[cfg(feature = "redis")]
use super::redis_server;
#[cfg(feature = "sqlite-system")]
use super::sqlite::Folder;
#[cfg(all(feature = "postgres", feature = "testing"))]
use super::{postgres, puppet};

/// A durable store with records of its own.
pub struct Place {
    flags: Vec<String>,
    server: Server,
}

#[allow(dead_code, reason = "which ones are made depends on the features")]
enum Server {
    #[cfg(feature = "sqlite-system")]
    Sqlite { _folder: Folder },
    #[cfg(all(feature = "postgres", feature = "testing"))]
    Postgres(Option<postgres::Server>),
    #[cfg(feature = "redis")]
    Redis(redis_server::Server),
}

impl Place {
    #[cfg(feature = "sqlite-system")]
    pub fn sqlite() -> Self {
        let folder = Folder::new();
        let file = folder.file().display().to_string();
        Self::new("sqlite", file, Server::Sqlite { _folder: folder })
    }

    /// A schema of its own on a server that other tests use too.
    #[cfg(all(feature = "postgres", feature = "testing"))]
    pub fn postgres() -> Self {
        let name = postgres::unused_name();
        let url = postgres::shared().url().to_owned();
        puppet::wait(async {
            let create = format!("CREATE SCHEMA {name}");
            let raw = postgres::raw(&url).await;
            raw.batch_execute(&create).await.expect("a new schema");
        });
        let url = format!("{url}?options=-csearch_path%3D{name}");
        Self::new("postgres", url, Server::Postgres(None))
    }

    /// A server of its own, which can be killed.
    #[cfg(all(feature = "postgres", feature = "testing"))]
    pub fn postgres_of_its_own() -> Self {
        let server = postgres::Server::start();
        let url = server.url().to_owned();
        Self::new("postgres", url, Server::Postgres(Some(server)))
    }

    /// A server of its own, which can be killed.
    #[cfg(feature = "redis")]
    pub fn redis() -> Self {
        let server = redis_server::Server::durable();
        let url = server.url();
        Self::new("redis", url, Server::Redis(server))
    }

    fn new(store: &str, url: String, server: Server) -> Self {
        let flags = ["--store", store, "--url", &url].map(String::from);
        Self {
            flags: flags.to_vec(),
            server,
        }
    }

    /// What a puppet has to be told to keep its records here.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    pub fn puppet(&self, flags: &[&str]) -> Puppet {
        let own = self.flags.iter().map(String::as_str);
        let flags: Vec<&str> = own.chain(flags.iter().copied()).collect();
        Puppet::start(&flags)
    }

    /// Ends the server as a power cut would, if it has one of its own.
    pub fn kill(&self) {
        match &self.server {
            #[cfg(all(feature = "postgres", feature = "testing"))]
            Server::Postgres(Some(server)) => server.kill(),
            #[cfg(feature = "redis")]
            Server::Redis(server) => server.kill(),
            #[allow(unreachable_patterns, reason = "where no store has a server")]
            _ => {}
        }
    }

    pub fn restart(&self) {
        match &self.server {
            #[cfg(all(feature = "postgres", feature = "testing"))]
            Server::Postgres(Some(server)) => server.restart(),
            #[cfg(feature = "redis")]
            Server::Redis(server) => server.restart(),
            #[allow(unreachable_patterns, reason = "where no store has a server")]
            _ => {}
        }
    }
}
