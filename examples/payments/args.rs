//! The command line.

use std::net::SocketAddr;

pub const USAGE: &str = "\
usage: payments [--demo | --addr HOST:PORT] [--store memory]

  --demo            plays the life of a payment on a free port; exit code 0 if all went as promised
  --addr HOST:PORT  serves there (default 127.0.0.1:3000)
  --store NAME      where keys are remembered; this release has: memory (default)
";

#[derive(Debug)]
pub struct Args {
    pub mode: Mode,
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
                "--help" | "-h" if inline.is_none() => return Ok(Self { mode: Mode::Help }),
                "--demo" if inline.is_none() => demo = true,
                "--addr" => {
                    let value = value()?;
                    let parsed = value.parse().map_err(|_| {
                        format!("--addr {value:?} is not an address such as 127.0.0.1:3000")
                    })?;
                    addr = Some(parsed);
                }
                "--store" => check_store(&value()?)?,
                _ => return Err(format!("{arg:?} is not an option; see --help")),
            }
        }
        match (demo, addr) {
            (true, Some(_)) => {
                Err("--demo chooses a free port itself: leave out --addr".to_owned())
            }
            (true, None) => Ok(Self { mode: Mode::Demo }),
            (false, addr) => Ok(Self {
                mode: Mode::Serve(addr.unwrap_or(DEFAULT_ADDR)),
            }),
        }
    }
}

fn check_store(name: &str) -> Result<(), String> {
    match name {
        "memory" => Ok(()),
        "sqlite" | "postgres" | "redis" => Err(format!(
            "--store {name} is planned and not in this release: use --store memory"
        )),
        _ => Err(format!("--store {name:?} is unknown: use --store memory")),
    }
}

const DEFAULT_ADDR: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 3000);
