//! What a durable store is for: the process is killed between two tries of one payment, and the
//! second one gets the first one's answer.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tower_idempotency::IdempotencyKey;

use crate::BoxError;
use crate::wire::{self, Request};

/// Pays, kills the service without warning, starts it again, pays with the same key. Whether that
/// went as promised.
pub async fn play(url: &str, out: &mut impl Write) -> Result<bool, BoxError> {
    let key = format!("\"{}\"", IdempotencyKey::random().as_str());
    let request = Request {
        token: "alice-token",
        key: Some(key.into()),
        body: r#"{"amount":1000,"currency":"EUR","card":"visa"}"#.to_owned(),
    };
    let mut service = Service::start(url).await?;
    let first = wire::exchange(service.addr, &request).await?;
    service.process.kill().await?;
    let service = Service::start(url).await?;
    let second = wire::exchange(service.addr, &request).await?;
    let (Some(first), Some(second)) = (first, second) else {
        writeln!(
            out,
            "\nThe service did not answer before or after it was killed."
        )?;
        return Ok(false);
    };
    let replayed = second.header("idempotency-replayed") == Some("true");
    let kept = first.status == 201
        && (second.status, &second.body) == (first.status, &first.body)
        && replayed;
    writeln!(
        out,
        "\nA payment, the service is killed and started again, the same payment:\n    {} {}, then {} \
         {}{}",
        first.status,
        first.reason,
        second.status,
        second.reason,
        if kept {
            ", replayed, same bytes"
        } else {
            ": not what was promised"
        },
    )?;
    Ok(kept)
}

/// This program, as a process of its own.
struct Service {
    // Killed when it is dropped.
    process: Child,
    addr: SocketAddr,
}

impl Service {
    async fn start(url: &str) -> Result<Self, BoxError> {
        let (store, _) = url.split_once(':').unwrap_or((url, ""));
        let store = match store {
            "postgresql" => "postgres",
            // `rediss`, `redis+cluster` and their like.
            store if store.starts_with("redis") => "redis",
            store => store,
        };
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--addr", "127.0.0.1:0", "--store", store, "--url", url])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = process.stdout.take().ok_or("the service has no output")?;
        let mut lines = BufReader::new(stdout).lines();
        while let Some(line) = lines.next_line().await? {
            if let Some(addr) = line.strip_prefix("listening on ") {
                let addr = addr.parse()?;
                return Ok(Self { process, addr });
            }
        }
        Err("the service did not start".into())
    }
}

/// A folder for the file of this run, removed at its end.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> io::Result<Self> {
        let name = format!("payments-{}", IdempotencyKey::random().as_str());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub fn sqlite_url(&self) -> String {
        format!("sqlite:{}", self.0.join("keys.db").display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind at worst.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
