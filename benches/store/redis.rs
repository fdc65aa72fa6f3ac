//! The store in Redis, beside what nobody can do without who keeps the contract in one round trip: `SET`
//! with `NX` and `GET`, and `PTTL`, in one pipeline, and for a completion a script that compares the
//! holder and sets. Both sides share one connection, and names and values have the same lengths.

#[path = "../../tests/support/redis.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tower_idempotency::{ClaimRequest, Outcome, Owner, RedisOptions, ScopedKey};

use crate::arguments::Arguments;
use crate::run::{Measured, Plan};
use crate::side::{Ours, Side};

pub async fn measure(arguments: &Arguments) -> Vec<Measured> {
    let server = support::Server::start();
    let client = redis::Client::open(server.url()).expect("a URL");
    let connection = client.get_multiplexed_async_connection().await;
    let connection = connection.expect("a connection");
    let options = RedisOptions::new().key_prefix("ours:");
    let store = options
        .from_connection(connection.clone())
        .await
        .expect("a store");
    let version = server.info("server", "redis_version").unwrap_or_default();
    let process = server.info("server", "process_id");
    let process: Vec<u32> = process.and_then(|id| id.parse().ok()).into_iter().collect();
    let plan = Plan {
        store: "redis",
        about: format!(
            "Redis {version}: `SET NX PX GET` and `PTTL`, a fenced script; one connection"
        ),
        slice: Duration::from_millis(150),
        jobs: 20_000,
        kept: 2_000,
        stride: 1,
        elsewhere: false,
        expired: 2_000,
        short_life: Duration::from_millis(2),
        processes: Box::new(move || process.clone()),
    };
    let bare = Bare::new(connection).await;
    crate::run::measure(arguments, plan, Ours::new(store), bare).await
}

#[derive(Clone)]
struct Bare {
    connection: MultiplexedConnection,
    hash: Arc<str>,
}

/// What lies before the key in a record of the store, and between its outcome and its key.
const HEAD: usize = 172;
const SUM: usize = 8;
const PREFIX: &str = "bare:";

impl Bare {
    async fn new(mut connection: MultiplexedConnection) -> Self {
        let script = redis::Script::new(
            "if redis.call('GETRANGE', KEYS[1], 0, 15) == ARGV[1] then \
             redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3]) return 1 end return 0",
        );
        script.load_async(&mut connection).await.expect("a script");
        Self {
            connection,
            hash: script.get_hash().into(),
        }
    }
}

/// `bare:{32 digits}`.
fn name(key: &ScopedKey) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut name = String::with_capacity(PREFIX.len() + 34);
    name.push_str(PREFIX);
    name.push('{');
    for byte in &key.digest()[..16] {
        name.push(DIGITS[usize::from(byte >> 4)].into());
        name.push(DIGITS[usize::from(byte & 15)].into());
    }
    name.push('}');
    name
}

/// The holder, room for what else a record says, and the key.
fn record(owner: &Owner, key: &ScopedKey) -> Vec<u8> {
    let mut record = vec![0; HEAD];
    record[..16].copy_from_slice(owner.as_bytes());
    record.extend_from_slice(key.as_bytes());
    record
}

impl Side for Bare {
    type Held = (ScopedKey, Owner, u64);

    async fn claim(&self, request: &ClaimRequest) -> Self::Held {
        let held = set(&mut self.connection.clone(), request).await;
        assert!(held.is_none(), "the key is not new");
        let millis = request.retention.as_millis() as u64;
        (request.key.clone(), request.owner, millis)
    }

    async fn complete(&self, held: &Self::Held, outcome: &Outcome) {
        let (key, owner, millis) = held;
        let frame = outcome.as_bytes();
        let mut kept = Vec::with_capacity(HEAD + frame.len() + SUM + key.as_bytes().len());
        kept.resize(HEAD - 16, 0);
        kept.extend_from_slice(frame);
        kept.extend_from_slice(&[0; SUM]);
        kept.extend_from_slice(key.as_bytes());
        let mut command = redis::cmd("EVALSHA");
        command.arg(&*self.hash).arg(1).arg(name(key));
        command.arg(&owner.as_bytes()[..]).arg(kept).arg(*millis);
        let reply = self.connection.clone().req_packed_command(&command).await;
        assert_eq!(reply.expect("a reply"), Value::Int(1));
    }

    async fn replay(&self, request: &ClaimRequest) {
        let held = set(&mut self.connection.clone(), request).await;
        let held = held.expect("the key is new");
        let end = held.len() - SUM - request.key.as_bytes().len();
        Outcome::decode(bytes::Bytes::from(held).slice(HEAD..end)).expect("an outcome");
    }

    /// Looks at all names, at the head of each record, and unlinks those that are started: the only
    /// expired ones that the server keeps.
    async fn purge(&self, limit: usize) -> usize {
        let mut connection = self.connection.clone();
        let (mut cursor, mut removed) = (0_u64, 0);
        while removed < limit {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(format!("{PREFIX}*"));
            let scanned = scan.arg("COUNT").arg(512).query_async(&mut connection);
            let names: Vec<String>;
            (cursor, names) = scanned.await.expect("a step");
            let mut heads = redis::pipe();
            for name in &names {
                heads.cmd("GETRANGE").arg(name).arg(0).arg(79);
            }
            let heads: Vec<Vec<u8>> = match names.is_empty() {
                true => Vec::new(),
                false => heads.query_async(&mut connection).await.expect("heads"),
            };
            let started = names
                .iter()
                .zip(heads)
                .filter(|(_, head)| head[16] == EXPIRED);
            let started: Vec<&String> = started.map(|(name, _)| name).collect();
            if !started.is_empty() {
                let mut unlink = redis::cmd("UNLINK");
                let unlinked = unlink.arg(&started).query_async(&mut connection).await;
                let unlinked: usize = unlinked.expect("a reply");
                removed += unlinked;
            }
            if cursor == 0 {
                break;
            }
        }
        removed
    }
}

async fn set(connection: &mut MultiplexedConnection, request: &ClaimRequest) -> Option<Vec<u8>> {
    let name = name(&request.key);
    let mut value = record(&request.owner, &request.key);
    let mut millis = request.retention.as_millis() as u64;
    if millis < 1_000 {
        // A record of a purge. The server would remove it.
        value[16] = EXPIRED;
        millis = 86_400_000;
    }
    let mut pipe = redis::Pipeline::with_capacity(2);
    let set = pipe.cmd("SET").arg(&name).arg(value);
    set.arg("NX").arg("PX").arg(millis).arg("GET");
    pipe.cmd("PTTL").arg(&name);
    let replies = connection.req_packed_commands(&pipe, 0, 2).await;
    let [set, left] = <[Value; 2]>::try_from(replies.expect("replies")).expect("two replies");
    assert!(matches!(left, Value::Int(1..)));
    match set {
        Value::Nil => None,
        Value::BulkString(value) => Some(value),
        other => panic!("{other:?}"),
    }
}

const EXPIRED: u8 = 1;
