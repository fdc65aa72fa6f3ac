//! What Redis's errors mean for a caller.

use std::error::Error;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind, Value};

use crate::error::{StoreError, StoreErrorKind};
use crate::outcome::DecodeError;
use crate::scope::ScopedKey;

use super::frame::Damage;

/// The error of a command. The message says what to do; the driver's own is the source.
pub(super) fn failed(error: RedisError) -> StoreError {
    use StoreErrorKind::{Corrupt, Other, Unavailable};
    let (kind, message) = match (error.kind(), error.code()) {
        (ErrorKind::Io, _) if is_of_tls(&error) => (
            Other,
            "TLS cannot be agreed on: the server has to offer it, with a certificate of the URL's host \
             that this machine trusts (`SSL_CERT_FILE` names another list of roots)",
        ),
        (ErrorKind::Io, _) if error.is_timeout() => (
            Unavailable,
            "the server did not answer in time: look at its load, its slow log and the network, or \
             raise `timeout`",
        ),
        (ErrorKind::Io, _) => (
            Unavailable,
            "the server cannot be reached: check that it runs, and the address",
        ),
        (
            ErrorKind::MasterNameNotFoundBySentinel | ErrorKind::NoValidReplicasFoundBySentinel,
            _,
        ) => (
            Unavailable,
            "no Sentinel names a master that answers: check the Sentinels, and the name of the master",
        ),
        (ErrorKind::ClusterConnectionNotFound, _) => (
            Unavailable,
            "no node of the cluster can be reached: check that they run, and the addresses",
        ),
        (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => (
            Other,
            "the server refused the user name or the password: check those of the URL",
        ),
        (ErrorKind::InvalidClientConfig, _) => (
            Other,
            "the connection cannot be made as it is configured: check the URL",
        ),
        (ErrorKind::Server(kind), _) => of_the_server(kind),
        (_, Some("OOM")) => (
            Unavailable,
            "the server has reached `maxmemory`: give it more, or keep outcomes for a shorter time",
        ),
        (_, Some("WRONGTYPE")) => (
            Corrupt,
            "a key with the store's prefix holds something else than a record: it is left where it \
             is; choose another `key_prefix`, or take that key away",
        ),
        (_, Some("NOREPLICAS" | "MISCONF" | "BUSY" | "UNBLOCKED")) => (
            Unavailable,
            "the server takes no writes at the moment (replicas that are missing, a save that failed, \
             or a script that runs too long): look at the source, and at its log",
        ),
        (_, Some("NOPROTO")) => (Other, "the server does not speak the protocol of the URL"),
        _ => (Other, "the server refused a command: look at the source"),
    };
    let told = StoreError::new(kind, message);
    // Some servers quote the arguments of what they refuse, and those are keys and outcomes.
    if error
        .detail()
        .is_some_and(|detail| detail.contains("args beginning"))
    {
        return told;
    }
    told.with_source(error)
}

/// Whether the two sides refuse each other. What breaks off, or is damaged on its way, is not meant.
fn is_of_tls(error: &RedisError) -> bool {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage, PeerIncompatible};
    // The driver hands out the pointer by which it shares its cause, not the cause.
    let shared = error
        .source()
        .and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let io = shared.and_then(|cause| cause.downcast_ref::<std::io::Error>());
    let tls = io.and_then(std::io::Error::get_ref);
    matches!(
        tls.and_then(|tls| tls.downcast_ref::<rustls::Error>()),
        Some(AlertReceived(_) | InvalidCertificate(_) | InvalidMessage(_) | PeerIncompatible(_))
    )
}

fn of_the_server(kind: ServerErrorKind) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Other, Unavailable};
    match kind {
        ServerErrorKind::BusyLoading => (
            Unavailable,
            "the server is still loading its data: wait until it has",
        ),
        ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown => (
            Unavailable,
            "the cluster or the master is down: look at `CLUSTER INFO` and the nodes",
        ),
        ServerErrorKind::TryAgain | ServerErrorKind::Ask => (
            Unavailable,
            "the slot of the key is being moved to another node: wait until it is",
        ),
        ServerErrorKind::ReadOnly => (
            Unavailable,
            "the server is a replica, or was made one: connect to the master, through Sentinel where \
             it can change",
        ),
        ServerErrorKind::Moved => (
            Other,
            "the server is a node of a cluster: connect with a `redis+cluster` URL",
        ),
        ServerErrorKind::CrossSlot => (
            Other,
            "the server keeps keys of one hash tag in two slots: a proxy before it is not supported",
        ),
        ServerErrorKind::NoPerm => (
            Other,
            "the user may not do what the store needs: allow SET, GET, GETRANGE, PTTL, UNLINK, SCAN, \
             INFO, EVAL, EVALSHA and what the scripts call, for keys with the prefix",
        ),
        _ => (Other, "the server refused a command: look at the source"),
    }
}

/// The reply to one command of a pipeline.
pub(super) fn answered(reply: Value) -> Result<Value, StoreError> {
    match reply {
        Value::ServerError(error) => Err(failed(error.into())),
        reply => Ok(reply),
    }
}

pub(super) fn is_code(reply: &Value, code: &str) -> bool {
    matches!(reply, Value::ServerError(error) if ServerError::code(error) == code)
}

/// A reply of a shape that the server never gives.
pub(super) fn unexpected() -> StoreError {
    StoreError::new(
        StoreErrorKind::Other,
        "the server answered something else than Redis does: check what is behind the address",
    )
}

/// A record that is there and cannot be relied on.
pub(super) fn damaged(key: &ScopedKey, damage: Damage) -> StoreError {
    let record = key.log_id();
    match damage {
        Damage::Version(version) => StoreError::corrupt(format!(
            "record {record} was written in version {version}; this release reads version 1: update \
             this process"
        )),
        Damage::Outcome(error @ DecodeError::UnknownVersion(_)) => StoreError::corrupt(format!(
            "record {record} has an outcome of a newer release: update this process"
        ))
        .with_source(error),
        Damage::Outcome(error) => {
            left_where_it_is(&record, "has an outcome that cannot be decoded").with_source(error)
        }
        Damage::Part(what) => left_where_it_is(&record, what),
    }
}

fn left_where_it_is(record: &str, what: &str) -> StoreError {
    StoreError::corrupt(format!(
        "record {record} {what}. It is left where it is: remove the key once you know how its attempt \
         ended"
    ))
}
