//! The command line.

use std::net::SocketAddr;

pub const USAGE: &str = "\
usage: payments [--demo | --addr HOST:PORT] [--store NAME] [--url URL]

  --demo            plays the life of a payment on a free port; exit code 0 if all went as promised
  --addr HOST:PORT  serves there (default 127.0.0.1:3000)
  --store NAME      where keys are remembered: memory (default), sqlite, postgres, redis; all but
                    memory need the cargo feature of their name
  --url URL         where that store is: a path for sqlite (the demo makes a file of its own), else
                    a URL such as postgres://user@host/database or redis://host
";

#[derive(Debug)]
pub struct Args {
    pub mode: Mode,
    /// What `store::open` takes; `None` for the demo's own file.
    pub store: Option<String>,
}

#[derive(Debug)]
pub enum Mode {
    Help,
    Demo,
    Serve(SocketAddr),
}

impl Args {
    /// The error is one line for the user.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut demo = false;
        let mut addr = None;
        let (mut store, mut url) = ("memory".to_owned(), None);
        let mut args = args.peekable();
        while let Some(arg) = args.next() {
            let (flag, inline) = match arg.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (&*arg, None),
            };
            let mut value = || {
                inline
                    .clone()
                    .or_else(|| args.next_if(|next| !next.starts_with("--")))
                    .ok_or_else(|| format!("{flag} needs a value; see --help"))
            };
            match flag {
                "--help" | "-h" if inline.is_none() => {
                    return Ok(Self {
                        mode: Mode::Help,
                        store: None,
                    });
                }
                "--demo" if inline.is_none() => demo = true,
                "--addr" => {
                    let value = value()?;
                    let parsed = value.parse().map_err(|_| {
                        format!("--addr {value:?} is not an address such as 127.0.0.1:3000")
                    })?;
                    addr = Some(parsed);
                }
                "--store" => store = value()?,
                "--url" => url = Some(value()?),
                _ => return Err(format!("{arg:?} is not an option; see --help")),
            }
        }
        let mode = match (demo, addr) {
            (true, Some(_)) => {
                return Err("--demo chooses a free port itself: leave out --addr".to_owned());
            }
            (true, None) => Mode::Demo,
            (false, addr) => Mode::Serve(addr.unwrap_or(DEFAULT_ADDR)),
        };
        let store = store_url(&store, url, demo)?;
        Ok(Self { mode, store })
    }
}

/// The URL of the store; `None` where the demo makes a file of its own.
fn store_url(name: &str, url: Option<String>, demo: bool) -> Result<Option<String>, String> {
    match (name, url) {
        ("memory", None) => Ok(Some("memory:".to_owned())),
        ("memory", Some(_)) => Err("--store memory is at no place: leave out --url".to_owned()),
        ("sqlite", None) if demo => Ok(None),
        ("sqlite", Some(path)) if !path.starts_with("sqlite:") => {
            Ok(Some(format!("sqlite:{path}")))
        }
        ("sqlite" | "postgres" | "redis", Some(url)) if url.starts_with(name) => Ok(Some(url)),
        ("sqlite" | "postgres" | "redis", Some(_)) => Err(format!("--url is not one of {name}")),
        ("sqlite" | "postgres" | "redis", None) => Err(format!("--store {name} needs --url")),
        _ => Err(format!(
            "--store {name:?} is unknown: use memory, sqlite, postgres or redis"
        )),
    }
}

const DEFAULT_ADDR: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 3000);
