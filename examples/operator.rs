//! An operator's view of a store: looks a key up, lists what is abandoned, and closes it by hand.
//!
//! ```text
//! cargo run --example operator --features sqlite -- --url sqlite:keys.db list-abandoned
//! ```
//!
//! Everything is done through the crate's public API, so it works on every store. A service that
//! wraps its store ([`EncryptedStore`](tower_idempotency::EncryptedStore)) needs a copy of this with
//! the same wrapper: see `open`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tower_idempotency::{
    Fenced, IdempotencyKey, Outcome, PrefixedStore, Record, Resolution, ScopedKey, State, Store,
    Timestamp, store,
};

const USAGE: &str = "\
usage: operator --url URL [--store NAME] [--prefix PREFIX] COMMAND

  --url URL        the store: sqlite:FILE, postgres://…, redis://…; with --store sqlite, the FILE alone
  --store NAME     memory, sqlite, postgres or redis; it is in the URL already
  --prefix PREFIX  as the service has given it to its PrefixedStore

commands:
  lookup KEY                                      shows the record
  list-abandoned                                  one line for each record of which nobody knows how it ended
  resolve KEY happened --status N [--header 'NAME: VALUE']… [--body TEXT]
                                                  every retry gets this answer
  resolve KEY not-happened                        the key is free: make sure first that the work can no
                                                  longer happen
  remove KEY                                      erases the record, whatever its state; a retry runs
  erase-scope --scope SCOPE                       erases all records of a scope, whatever their state and
                                                  their namespace: the customer must send nothing meanwhile
  purge                                           removes what is expired

a KEY is:
  --key KEY [--scope SCOPE] [--namespace NAME]    as the client sent it, whose it is (default: everybody's),
                                                  and what it is for (default: http)

exit code: 0 done, 1 not done (no such store or record, or not in that state), 2 wrong arguments
";

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("operator: {problem}; see --help");
            return ExitCode::from(2);
        }
    };
    match run(args).await {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprint!("operator: {error}");
            let mut source = error.source();
            while let Some(error) = source {
                eprint!(": {error}");
                source = error.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn run(args: Args) -> Result<String, BoxError> {
    if args.command == Command::Help {
        return Ok(USAGE.to_owned());
    }
    let store = open(&args).await?;
    match args.command {
        Command::Help => Ok(USAGE.to_owned()),
        Command::Lookup(key) => Ok(shown(&found(&*store, &key).await?)),
        Command::ListAbandoned => list(&*store).await,
        Command::Resolve(key, resolution) => resolve(&*store, &key, resolution).await,
        Command::Remove(key) => match store.remove(&key).await? {
            true => Ok("removed\n".to_owned()),
            false => Err("there is no such record".into()),
        },
        Command::EraseScope(scope) => erase(&*store, &scope).await,
        Command::Purge => purge(&*store).await,
    }
}

/// The store as the service has it.
async fn open(args: &Args) -> Result<Arc<dyn Store>, BoxError> {
    // `store::open` would make the file, and everything would look as if nothing were abandoned.
    if let Some(file) = sqlite_file(&args.url).filter(|file| !Path::new(file).exists()) {
        return Err(format!("there is no SQLite file {file:?}: is the path right?").into());
    }
    let store = store::open(&args.url).await?;
    Ok(match &args.prefix {
        Some(prefix) => Arc::new(PrefixedStore::new(store, prefix)),
        None => store,
    })
}

async fn found(store: &dyn Store, key: &ScopedKey) -> Result<Record, BoxError> {
    let record = store.lookup(key).await?;
    record.ok_or_else(|| "there is no such record, or it has expired".into())
}

async fn list(store: &dyn Store) -> Result<String, BoxError> {
    let mut text = String::new();
    let mut after = None;
    loop {
        let page = store.abandoned(after.as_ref(), 100).await?;
        for record in &page.records {
            let (key, notes) = (&record.key, &record.notes);
            let State::Started { lease_until, .. } = record.state else {
                continue;
            };
            writeln!(
                text,
                "namespace={:?} scope={:?} key={:?} attempt={} since={} correlation={:?} finished={:?}",
                key.namespace(),
                key.scope(),
                key.key(),
                record.attempt,
                date(lease_until),
                notes.correlation.as_deref().unwrap_or("-"),
                notes
                    .checkpoints
                    .iter()
                    .map(|(name, _)| name)
                    .collect::<Vec<_>>(),
            )?;
        }
        after = page.next;
        if after.is_none() {
            return Ok(text);
        }
    }
}

/// The record is closed only if it is still the one that was looked at: a worker that came back, or
/// a sweeper, may have been here first.
async fn resolve(
    store: &dyn Store,
    key: &ScopedKey,
    resolution: Resolution,
) -> Result<String, BoxError> {
    let record = found(store, key).await?;
    if !record.is_abandoned() {
        return Err(format!("the record is not abandoned\n{}", shown(&record)).into());
    }
    match store.resolve(&record, &resolution).await? {
        Fenced::Applied => Ok(shown(&found(store, key).await?)),
        Fenced::ClaimLost => Err("somebody else was faster: look at the record again".into()),
    }
}

async fn erase(store: &dyn Store, scope: &str) -> Result<String, BoxError> {
    let mut erased = 0;
    loop {
        // Each call may be a walk through the whole store.
        match store.erase("", scope, 100_000).await? {
            0 => return Ok(format!("erased={erased}\n")),
            more => erased += more,
        }
    }
}

async fn purge(store: &dyn Store) -> Result<String, BoxError> {
    let (mut removed, mut unresolved) = (0, 0);
    loop {
        let purged = store.purge(500).await?;
        removed += purged.removed;
        unresolved += purged.unresolved;
        if purged.removed == 0 {
            return Ok(format!("removed={removed} unresolved={unresolved}\n"));
        }
    }
}

fn shown(record: &Record) -> String {
    let mut lines = vec![
        ("namespace", format!("{:?}", record.key.namespace())),
        ("scope", format!("{:?}", record.key.scope())),
        ("key", format!("{:?}", record.key.key())),
        ("log_id", record.key.log_id()),
        ("attempt", record.attempt.to_string()),
        ("created", date(record.created_at)),
        ("expires", date(record.expires_at)),
    ];
    match &record.state {
        State::Started { lease_until, .. } if record.is_abandoned() => {
            lines.push(("state", "abandoned: nobody knows how it ended".to_owned()));
            lines.push(("since", date(*lease_until)));
        }
        State::Started { lease_until, .. } => {
            lines.push(("state", "started: an attempt holds it".to_owned()));
            lines.push(("held until", date(*lease_until)));
        }
        State::Completed {
            outcome,
            completed_at,
        } => {
            lines.push(("state", "completed".to_owned()));
            lines.push(("completed", date(*completed_at)));
            let status = match outcome.status() {
                Some(status) if outcome.is_tombstone() => format!("{status}, body not kept"),
                Some(status) => status.to_string(),
                None => "none: the value of a job, or sealed".to_owned(),
            };
            lines.push(("status", status));
            lines.push(("body", format!("{} bytes", outcome.body().len())));
        }
        State::Released => lines.push(("state", "released: the key is free".to_owned())),
        other => lines.push(("state", format!("{other:?}"))),
    }
    if let Some(correlation) = &record.notes.correlation {
        lines.push(("correlation", format!("{correlation:?}")));
    }
    for (name, data) in &record.notes.checkpoints {
        lines.push((
            "finished",
            format!("{name:?}: {:?}", data.escape_ascii().to_string()),
        ));
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines
        .into_iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect()
}

fn date(at: Timestamp) -> String {
    httpdate::fmt_http_date(at.to_system_time())
}

struct Args {
    url: String,
    prefix: Option<String>,
    command: Command,
}

#[derive(PartialEq)]
enum Command {
    Help,
    Lookup(ScopedKey),
    ListAbandoned,
    Resolve(ScopedKey, Resolution),
    Remove(ScopedKey),
    EraseScope(String),
    Purge,
}

impl Args {
    /// The error is one line for the user.
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut words, mut given, mut headers) = (Vec::new(), Vec::new(), HeaderMap::new());
        let mut args = args;
        while let Some(arg) = args.next() {
            match &*arg {
                "--help" | "-h" => {
                    return Ok(Self {
                        url: String::new(),
                        prefix: None,
                        command: Command::Help,
                    });
                }
                flag if FLAGS.contains(&flag) => {
                    let value = args.next().ok_or(format!("{flag} needs a value"))?;
                    if flag == "--header" {
                        let (name, value) = header(&value)?;
                        headers.append(name, value);
                    } else {
                        given.push((arg, value));
                    }
                }
                flag if flag.starts_with('-') => return Err(format!("{flag} is not an option")),
                _ => words.push(arg),
            }
        }
        let value = |flag: &str| {
            let mut all = given.iter().filter(|(known, _)| known == flag);
            all.next().map(|(_, value)| value.clone())
        };
        let key = || -> Result<ScopedKey, String> {
            let key = value("--key").ok_or("--key is missing")?;
            let key = IdempotencyKey::new(&key).map_err(|error| error.to_string())?;
            let namespace = value("--namespace").unwrap_or_else(|| "http".to_owned());
            let scope = value("--scope").unwrap_or_default();
            Ok(ScopedKey::new(&namespace, &scope, &key))
        };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let command = match words[..] {
            ["lookup"] => Command::Lookup(key()?),
            ["list-abandoned"] => Command::ListAbandoned,
            ["resolve", "happened"] => {
                let status = value("--status").ok_or("--status is missing")?;
                let status: StatusCode = status
                    .parse()
                    .map_err(|_| format!("--status {status:?} is no status"))?;
                let body = value("--body").unwrap_or_default();
                let outcome = Outcome::response(status, &headers, &[body.as_bytes()], None);
                Command::Resolve(key()?, Resolution::Completed(outcome))
            }
            ["resolve", "not-happened"] => Command::Resolve(key()?, Resolution::Released),
            ["resolve", ..] => return Err("resolve as happened or as not-happened?".to_owned()),
            ["remove"] => Command::Remove(key()?),
            ["erase-scope"] => {
                if let Some((flag, _)) = given.iter().find(|(flag, _)| OF_A_KEY.contains(&&**flag))
                {
                    return Err(format!("erase-scope takes no {flag}"));
                }
                // The scope of everybody is one that has to be named: --scope ''.
                Command::EraseScope(value("--scope").ok_or("--scope is missing")?)
            }
            ["purge"] => Command::Purge,
            [] => return Err("a command is missing".to_owned()),
            _ => return Err(format!("{:?} is no command", words.join(" "))),
        };
        Ok(Self {
            url: store_url(value("--store").as_deref(), value("--url"))?,
            prefix: value("--prefix"),
            command,
        })
    }
}

const FLAGS: [&str; 9] = [
    "--url",
    "--store",
    "--prefix",
    "--key",
    "--scope",
    "--namespace",
    "--status",
    "--header",
    "--body",
];

/// What names one record, and must not be taken for what names many.
const OF_A_KEY: [&str; 2] = ["--key", "--namespace"];

fn header(line: &str) -> Result<(HeaderName, HeaderValue), String> {
    let wrong = || format!("--header {line:?} is not of the form 'name: value'");
    let (name, value) = line.split_once(':').ok_or_else(wrong)?;
    let name = name.parse().map_err(|_| wrong())?;
    let value = value.trim().parse().map_err(|_| wrong())?;
    Ok((name, value))
}

/// The path in a URL, as `store::open` reads it.
fn sqlite_file(url: &str) -> Option<&str> {
    let (scheme, path) = url.trim().split_once(':')?;
    let path = path.strip_prefix("//").unwrap_or(path);
    (scheme.eq_ignore_ascii_case("sqlite") && !path.is_empty()).then_some(path)
}

/// What `store::open` takes.
fn store_url(name: Option<&str>, url: Option<String>) -> Result<String, String> {
    match (name, url) {
        (Some("memory"), None) => Ok("memory:".to_owned()),
        (None, Some(url)) => Ok(url),
        (Some("sqlite"), Some(path)) if !path.starts_with("sqlite:") => {
            Ok(format!("sqlite:{path}"))
        }
        (Some(name), Some(url)) if url.starts_with(name) => Ok(url),
        (Some(name), Some(_)) => Err(format!("--url is not one of {name}")),
        (_, None) => Err("--url is missing".to_owned()),
    }
}
