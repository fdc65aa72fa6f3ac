//! A connection that is made anew when it is lost.

use std::sync::{PoisonError, RwLock};

use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, Client, RedisError};
use tokio::sync::Mutex;

/// One multiplexed connection to a server, or to whichever server the Sentinels call the master.
///
/// Beyond what the driver's own manager does, it gives a connection up that did not answer in time (a
/// host that vanished sends nothing, and TCP waits a quarter of an hour for it) or that became a replica.
pub(super) struct Line {
    source: Source,
    config: AsyncConnectionConfig,
    current: RwLock<Current>,
    connecting: Mutex<()>,
}

pub(super) enum Source {
    Server(Box<Client>),
    Sentinels(Box<Mutex<SentinelClient>>),
}

struct Current {
    // Grows with every attempt to connect.
    generation: u64,
    connection: Result<MultiplexedConnection, Option<RedisError>>,
}

impl Line {
    pub(super) fn new(source: Source, config: AsyncConnectionConfig) -> Self {
        Self {
            source,
            config,
            current: RwLock::new(Current {
                generation: 0,
                connection: Err(None),
            }),
            connecting: Mutex::new(()),
        }
    }

    /// The connection that stands, or a new one. Callers that come meanwhile share the attempt and its
    /// failure.
    pub(super) async fn connection(&self) -> Result<(u64, MultiplexedConnection), RedisError> {
        let seen = match self.standing() {
            (generation, Ok(connection)) => return Ok((generation, connection)),
            (generation, Err(_)) => generation,
        };
        let _alone = self.connecting.lock().await;
        match self.standing() {
            (generation, Ok(connection)) => return Ok((generation, connection)),
            (generation, Err(Some(failure))) if generation != seen => return Err(failure),
            (_, Err(_)) => {}
        }
        let made = match &self.source {
            Source::Server(client) => {
                let made = client.get_multiplexed_async_connection_with_config(&self.config);
                made.await
            }
            Source::Sentinels(client) => {
                let mut client = client.lock().await;
                client.get_async_connection_with_config(&self.config).await
            }
        };
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.generation += 1;
        current.connection = made.clone().map_err(Some);
        made.map(|connection| (current.generation, connection))
    }

    /// The connection of this generation is of no more use.
    pub(super) fn lost(&self, generation: u64) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.generation == generation {
            current.connection = Err(None);
        }
    }

    /// The connection, or why there is none.
    pub(super) fn standing(&self) -> (u64, Result<MultiplexedConnection, Option<RedisError>>) {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        (current.generation, current.connection.clone())
    }
}
