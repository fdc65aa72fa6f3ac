//! The one way to the servers, whatever their topology.

use std::future::Future;
use std::io;
use std::time::Duration;

use redis::aio::{ConnectionLike, ConnectionManager, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};

use super::error::{answered, failed, is_code, unexpected};
use super::line::Line;
use super::scripts::By;
use crate::error::StoreError;

/// A connection that the application made, for
/// [`RedisOptions::from_connection`](super::RedisOptions::from_connection).
///
/// Made from redis-rs's `ConnectionManager`, `MultiplexedConnection` (which does not reconnect) or
/// cluster connection. Its own time limits hold, and so does its own way to reconnect.
#[derive(Clone)]
pub struct RedisConnection(Kind);

#[derive(Clone)]
enum Kind {
    Manager(ConnectionManager),
    Multiplexed(MultiplexedConnection),
    Cluster(ClusterConnection),
}

pub(super) struct Link {
    way: Way,
    timeout: Duration,
}

enum Way {
    Line(Box<Line>),
    Given(Kind),
}

/// Where commands go.
#[derive(Clone, Copy, Debug)]
pub(super) enum To<'a> {
    /// To the master of the slot of this key.
    Key(&'a str),
    Node(&'a Node),
}

/// A server that holds a part of the records.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Node {
    /// `host:port` of a node of a cluster; empty for the only server.
    pub(super) address: String,
}

/// Whether a command may be sent again when its connection is lost, without anybody hearing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    Once,
    /// The second answer would be another one.
    Never,
}

impl RedisConnection {
    pub(super) fn into_link(self, timeout: Duration) -> Link {
        Link {
            way: Way::Given(self.0),
            timeout,
        }
    }
}

impl From<ConnectionManager> for RedisConnection {
    fn from(connection: ConnectionManager) -> Self {
        Self(Kind::Manager(connection))
    }
}

impl From<MultiplexedConnection> for RedisConnection {
    fn from(connection: MultiplexedConnection) -> Self {
        Self(Kind::Multiplexed(connection))
    }
}

impl From<ClusterConnection> for RedisConnection {
    fn from(connection: ClusterConnection) -> Self {
        Self(Kind::Cluster(connection))
    }
}

impl std::fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // What is inside may know a password.
        let kind = match &self.0 {
            Kind::Manager(_) => "manager",
            Kind::Multiplexed(_) => "multiplexed",
            Kind::Cluster(_) => "cluster",
        };
        f.debug_tuple("RedisConnection").field(&kind).finish()
    }
}

impl Link {
    pub(super) fn line(line: Line, timeout: Duration) -> Self {
        Self {
            way: Way::Line(Box::new(line)),
            timeout,
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.way, Way::Given(Kind::Cluster(_)))
    }

    /// Sends commands in one go. An error that the server gives to one of them is among the replies.
    pub(super) async fn send(
        &self,
        to: To<'_>,
        pipe: &Pipeline,
        repeat: Repeat,
    ) -> Result<Vec<Value>, StoreError> {
        let replies = match &self.way {
            Way::Line(line) => self.send_on_line(line, pipe, repeat).await,
            Way::Given(kind) => {
                let mut connection = kind.clone();
                let mut result = self.in_time(connection.send(to, pipe)).await;
                let lost = |result: &Result<_, RedisError>| matches!(result, Err(error) if error.is_connection_dropped());
                // The driver connects anew by itself.
                if lost(&result) && repeat == Repeat::Once {
                    result = self.in_time(connection.send(to, pipe)).await;
                }
                result
            }
        };
        replies.map_err(failed)
    }

    /// Sends commands with a script among them, and sends them once more with the script in full if
    /// the server has not got it.
    pub(super) async fn run(
        &self,
        to: To<'_>,
        repeat: Repeat,
        pipe: impl Fn(By) -> Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        let replies = self.send(to, &pipe(By::Hash), repeat).await?;
        if replies.iter().any(|reply| is_code(reply, "NOSCRIPT")) {
            return self.send(to, &pipe(By::Text), repeat).await;
        }
        Ok(replies)
    }

    /// Sends so many scripts in one go, and those once more that the server has not got. They may be
    /// repeated.
    pub(super) async fn run_each(
        &self,
        to: To<'_>,
        count: usize,
        command: impl Fn(By, usize) -> Cmd,
    ) -> Result<Vec<Value>, StoreError> {
        let mut pipe = Pipeline::with_capacity(count);
        for nth in 0..count {
            pipe.add_command(command(By::Hash, nth));
        }
        let mut replies = self.send(to, &pipe, Repeat::Once).await?;
        let unknown: Vec<usize> = (0..replies.len())
            .filter(|nth| is_code(&replies[*nth], "NOSCRIPT"))
            .collect();
        if unknown.is_empty() {
            return Ok(replies);
        }
        let mut pipe = Pipeline::with_capacity(unknown.len());
        for nth in &unknown {
            pipe.add_command(command(By::Text, *nth));
        }
        let again = self.send(to, &pipe, Repeat::Once).await?;
        for (nth, reply) in unknown.into_iter().zip(again) {
            replies[nth] = reply;
        }
        Ok(replies)
    }

    /// Every server that holds records, each with its answer.
    pub(super) async fn ask_masters(&self, command: Cmd) -> Result<Vec<(Node, Value)>, StoreError> {
        let Way::Given(Kind::Cluster(cluster)) = &self.way else {
            let mut pipe = Pipeline::with_capacity(1);
            pipe.add_command(command);
            let only = Node {
                address: String::new(),
            };
            let mut replies = self.send(To::Node(&only), &pipe, Repeat::Once).await?;
            let reply = answered(replies.pop().ok_or_else(unexpected)?)?;
            return Ok(vec![(only, reply)]);
        };
        let mut cluster = cluster.clone();
        let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let replies = self.in_time(cluster.route_command(command, masters)).await;
        let Value::Map(replies) = replies.map_err(failed)? else {
            return Err(unexpected());
        };
        let mut nodes = Vec::with_capacity(replies.len());
        for (address, reply) in replies {
            let Value::BulkString(address) = address else {
                return Err(unexpected());
            };
            let address = String::from_utf8(address).map_err(|_| unexpected())?;
            nodes.push((Node { address }, answered(reply)?));
        }
        nodes.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(nodes)
    }

    async fn send_on_line(
        &self,
        line: &Line,
        pipe: &Pipeline,
        repeat: Repeat,
    ) -> Result<Vec<Value>, RedisError> {
        let mut left = match repeat {
            Repeat::Once => 1,
            Repeat::Never => 0,
        };
        loop {
            // Bounded here; the answer is bounded by the connection's own limit. What makes a connection
            // is large, and in the way only where none stands.
            let (generation, mut connection) = match line.standing() {
                (generation, Ok(connection)) => (generation, connection),
                (_, Err(_)) => self.in_time(Box::pin(line.connection())).await?,
            };
            let result = send_all(&mut connection, pipe).await;
            let (lost, again) = match &result {
                Ok(replies) => {
                    let demoted = replies.iter().any(|reply| is_code(reply, "READONLY"));
                    (demoted, demoted)
                }
                Err(error) => {
                    let dropped = error.is_connection_dropped();
                    (dropped || error.is_timeout(), dropped)
                }
            };
            if lost {
                line.lost(generation);
            }
            if !again || left == 0 {
                return result;
            }
            left -= 1;
        }
    }

    async fn in_time<T>(
        &self,
        answer: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, RedisError> {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        }
    }
}

impl Kind {
    async fn send(&mut self, to: To<'_>, pipe: &Pipeline) -> Result<Vec<Value>, RedisError> {
        let cluster = match self {
            Self::Manager(connection) => return send_all(connection, pipe).await,
            Self::Multiplexed(connection) => return send_all(connection, pipe).await,
            Self::Cluster(cluster) => cluster,
        };
        let route = match to {
            // The master, even where the application lets its connection read from replicas.
            To::Key(key) => {
                SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
            }
            To::Node(node) => node.route(),
        };
        let replies = cluster.route_pipeline(pipe.clone(), 0, pipe.len(), route);
        let result = Box::pin(replies).await;
        match &result {
            // Of several commands the driver gets only the first one past the redirection.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Ask) => {
                let Some((address, _)) = error.redirect_node() else {
                    return result;
                };
                let moved = Node {
                    address: address.to_owned(),
                };
                Box::pin(ask(cluster, pipe, &moved)).await
            }
            _ => result,
        }
    }
}

impl Node {
    fn route(&self) -> SingleNodeRoutingInfo {
        let (host, port) = self.address.rsplit_once(':').unwrap_or_default();
        SingleNodeRoutingInfo::ByAddress {
            host: host.to_owned(),
            port: port.parse().unwrap_or_default(),
        }
    }
}

/// Sends commands about a key that was moved to this node before its slot was. The node must be asked
/// to make an exception, and makes it for a whole transaction.
async fn ask(
    cluster: &mut ClusterConnection,
    pipe: &Pipeline,
    node: &Node,
) -> Result<Vec<Value>, RedisError> {
    let mut asking = Pipeline::with_capacity(pipe.len() + 3);
    asking.cmd("ASKING").cmd("MULTI");
    for command in pipe.cmd_iter() {
        asking.add_command(command.clone());
    }
    asking.cmd("EXEC");
    let count = asking.len();
    let replies = cluster.route_pipeline(asking, 0, count, node.route());
    match replies.await?.pop() {
        Some(Value::Array(replies)) if replies.len() == pipe.len() => Ok(replies),
        Some(Value::ServerError(error)) => Err(error.into()),
        _ => Err((
            ErrorKind::UnexpectedReturnType,
            "not the replies of a transaction",
        )
            .into()),
    }
}

async fn send_all(
    connection: &mut impl ConnectionLike,
    pipe: &Pipeline,
) -> Result<Vec<Value>, RedisError> {
    connection.req_packed_commands(pipe, 0, pipe.len()).await
}
