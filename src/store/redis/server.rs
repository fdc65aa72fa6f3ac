//! What is asked of every server before the store is used.

use redis::Value;

use super::error::unexpected;
use super::link::Link;
use crate::error::{StoreError, StoreErrorKind};

/// What the servers say of themselves.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Microseconds since the Unix epoch, by the clock of one of the servers.
    pub(super) time: Option<u64>,
    /// Policies under which a full server forgets records, each once.
    pub(super) evicting: Vec<String>,
}

pub(super) async fn survey(link: &Link) -> Result<Survey, StoreError> {
    let mut survey = Survey::default();
    for (_, reply) in link.ask_masters(info("server")).await? {
        let text = text(reply)?;
        check_version(&text)?;
        if field(&text, "redis_mode") == Some("cluster") && !link.is_cluster() {
            return Err(StoreError::new(
                StoreErrorKind::Other,
                "the server is a node of a cluster: connect with a `redis+cluster` URL",
            ));
        }
        survey.time = field(&text, "server_time_usec").and_then(|time| time.parse().ok());
    }
    for (_, reply) in link.ask_masters(info("memory")).await? {
        let text = text(reply)?;
        let policy = field(&text, "maxmemory_policy").unwrap_or("unknown");
        if policy != "noeviction" && !survey.evicting.iter().any(|known| known == policy) {
            survey.evicting.push(policy.to_owned());
        }
    }
    Ok(survey)
}

pub(super) fn info(section: &str) -> redis::Cmd {
    let mut command = redis::cmd("INFO");
    command.arg(section);
    command
}

pub(super) fn text(reply: Value) -> Result<String, StoreError> {
    match reply {
        Value::BulkString(bytes) => String::from_utf8(bytes).map_err(|_| unexpected()),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => Ok(text),
        _ => Err(unexpected()),
    }
}

/// The value of a line `name:value`.
pub(super) fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

fn check_version(text: &str) -> Result<(), StoreError> {
    // Valkey says which Redis it is compatible with.
    let version = field(text, "redis_version").unwrap_or("unknown");
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(major) if major >= OLDEST => Ok(()),
        _ => Err(StoreError::new(
            StoreErrorKind::Other,
            format!(
                "the server is of version {version}; the store needs {OLDEST}.0 or later, for `SET` with \
                 `NX` and `GET` together: update the server"
            ),
        )),
    }
}

const OLDEST: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_too_old_is_named() {
        let info = |version: &str| format!("# Server\r\nredis_version:{version}\r\nos:Linux\r\n");
        for good in ["7.0.0", "7.2.4", "8.4.1", "10.0.0"] {
            assert!(check_version(&info(good)).is_ok(), "{good}");
        }
        for bad in ["6.2.14", "2.8.0", "x", ""] {
            let error = check_version(&info(bad)).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Other, "{bad}");
            assert!(error.to_string().contains("7.0 or later"), "{error}");
        }
        assert!(check_version("").is_err());
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "a_b:1\r\nb:2\r\n";
        assert_eq!(field(text, "b"), Some("2"));
        assert_eq!(field(text, "a"), None);
    }
}
