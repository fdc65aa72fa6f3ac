//! What a URL connects to.

use crate::error::{StoreError, StoreErrorKind};

/// A parsed URL. It may hold a password, so it is never shown.
#[derive(PartialEq, Eq)]
pub(super) enum Address {
    Server(String),
    Sentinels {
        sentinels: Vec<String>,
        name: String,
        /// A URL with the credentials and the database of the master, and no host that matters.
        master: String,
    },
    Cluster(Vec<String>),
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self, StoreError> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| wrong("it has no scheme"))?;
        let (plain, topology) = match scheme {
            "redis" | "rediss" | "valkey" | "valkeys" | "redis+unix" | "valkey+unix" | "unix" => {
                return Ok(Self::Server(url.to_owned()));
            }
            "redis+cluster" | "redis+sentinel" => ("redis", scheme),
            "rediss+cluster" => ("rediss", scheme),
            _ => return Err(wrong("its scheme is none of the store's")),
        };
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) => (authority, path),
            None => (rest, ""),
        };
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (format!("{credentials}@"), hosts),
            None => (String::new(), authority),
        };
        let hosts: Vec<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
        if hosts.is_empty() {
            return Err(wrong("it names no host"));
        }
        if topology != "redis+sentinel" {
            if !path.is_empty() {
                return Err(wrong("a cluster has no database and no path"));
            }
            let node = |host: &&str| format!("{plain}://{credentials}{host}");
            return Ok(Self::Cluster(hosts.iter().map(node).collect()));
        }
        let (name, db) = path.split_once('/').unwrap_or((path, "0"));
        if name.is_empty() {
            return Err(wrong("after the Sentinels, it has to name the master"));
        }
        let sentinel = |host: &&str| match host.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => format!("redis://{host}"),
            _ => format!("redis://{host}:{SENTINEL_PORT}"),
        };
        Ok(Self::Sentinels {
            sentinels: hosts.iter().map(sentinel).collect(),
            name: name.to_owned(),
            master: format!("redis://{credentials}master/{db}"),
        })
    }

    /// Whether connections are made with TLS.
    pub(super) fn needs_tls(&self) -> bool {
        let url = match self {
            Self::Server(url) => Some(url),
            Self::Cluster(nodes) => nodes.first(),
            Self::Sentinels { .. } => None,
        };
        // The driver reads a scheme as it is written, in small letters.
        url.is_some_and(|url| url.starts_with("rediss:") || url.starts_with("valkeys:"))
    }
}

fn wrong(what: &str) -> StoreError {
    StoreError::new(
        StoreErrorKind::Other,
        format!(
            "the URL of the store is wrong: {what}. It should look like `redis://host:6379`, \
             `redis+sentinel://host:26379,host:26379/name` or `redis+cluster://host:6379,host:6379`"
        ),
    )
}

const SENTINEL_PORT: u16 = 26_379;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_topology_has_its_url() {
        let parse = |url| Address::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        for url in [
            "redis://h",
            "rediss://u:p@h:1/2",
            "redis+unix:///run/r.sock",
        ] {
            assert!(parse(url) == Address::Server(url.to_owned()), "{url}");
        }
        let nodes = ["redis://u:p@a:1", "redis://u:p@b:2"].map(String::from);
        let cluster = parse("redis+cluster://u:p@a:1,b:2");
        assert!(cluster == Address::Cluster(nodes.to_vec()));
        let cluster = parse("rediss+cluster://a");
        assert!(cluster == Address::Cluster(vec!["rediss://a".to_owned()]));
        let sentinels = parse("redis+sentinel://:p%40@a:1,b/main/3");
        let expected = Address::Sentinels {
            sentinels: ["redis://a:1", "redis://b:26379"]
                .map(String::from)
                .to_vec(),
            name: "main".to_owned(),
            master: "redis://:p%40@master/3".to_owned(),
        };
        assert!(sentinels == expected);
    }

    #[test]
    fn what_needs_tls_says_so() {
        for (url, needs) in [
            ("rediss://h", true),
            ("valkeys://h", true),
            ("rediss+cluster://a,b", true),
            ("redis://rediss:x@h", false),
            ("redis+cluster://a", false),
            ("redis+sentinel://a/main", false),
            ("redis+unix:///rediss:", false),
        ] {
            let address = Address::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
            assert_eq!(address.needs_tls(), needs, "{url}");
        }
    }

    #[test]
    fn a_wrong_url_is_refused_without_its_password() {
        for url in [
            "",
            "localhost",
            "http://:secret@h",
            "redis+cluster://:secret@",
            "redis+cluster://:secret@h/1",
            "redis+sentinel://:secret@h",
            "redis+sentinel://:secret@h/",
        ] {
            let Err(error) = Address::parse(url) else {
                panic!("{url} was accepted");
            };
            assert_eq!(error.kind(), StoreErrorKind::Other);
            assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
        }
    }
}
