//! The command line, and the layer that it describes.

use std::ffi::OsString;
use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use tower_idempotency::{
    FingerprintRecipe, Idempotency, IdempotencyLayer, InFlight, KeySyntax, MissingKey, OnAbandoned,
    OnOutage, RetentionPolicy, Scope, Store,
    store::{self, OpenError},
};

pub const USAGE: &str = "\
Usage: puppet [FLAG VALUE | FLAG=VALUE]...

  --addr ADDR:PORT                     where to listen [127.0.0.1:0: a free port]
  --store memory|sqlite|postgres|redis where records are kept [memory]
  --url URL                            where that store is: a path for sqlite, else a URL
  --lease-ms N                         how long a claim lives without a renewal [30000]
  --retention-ms N                     how long a record is kept [86400000]
  --max-request-bytes N                larger requests get 413 [2097152]
  --max-response-bytes N               of larger responses only the status is kept [1048576]
  --missing-key pass-through|reject    requests without a key [pass-through]
  --syntax lenient|strict              keys without quotes are taken, or refused [lenient]
  --retention standard|draft|stripe    which responses are kept [standard]
  --on-abandoned hold|rerun            a retry of an attempt that broke off [hold]
  --on-outage reject|pass-through      while the store does not answer [reject]
  --in-flight reject|wait:MS           a retry of an attempt that runs [reject]
  --scope none|header:NAME             whose key it is [none: by the caller's credentials]
  --fingerprint raw|json|multipart     what makes two bodies the same [raw]
  --help                               this text
";

pub enum Command {
    Serve(Box<Flags>),
    Help,
}

/// What the flags say; `None` is the library's default.
pub struct Flags {
    pub addr: SocketAddr,
    store: String,
    url: Option<String>,
    lease: Option<Duration>,
    retention: Option<Duration>,
    request_limit: Option<usize>,
    response_limit: Option<usize>,
    missing_key: MissingKey,
    syntax: KeySyntax,
    kept: RetentionPolicy,
    on_abandoned: OnAbandoned,
    on_outage: OnOutage,
    in_flight: InFlight,
    scope: Option<Scope>,
    fingerprint: FingerprintRecipe,
}

impl Default for Flags {
    fn default() -> Self {
        Self {
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            store: "memory".to_owned(),
            url: None,
            lease: None,
            retention: None,
            request_limit: None,
            response_limit: None,
            missing_key: MissingKey::default(),
            syntax: KeySyntax::default(),
            kept: RetentionPolicy::default(),
            on_abandoned: OnAbandoned::default(),
            on_outage: OnOutage::default(),
            in_flight: InFlight::default(),
            scope: None,
            fingerprint: FingerprintRecipe::default(),
        }
    }
}

/// Reads the arguments. A flag that is given twice counts as it was given last.
pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Command, String> {
    let mut flags = Flags::default();
    let mut arguments = arguments.map(|argument| {
        argument
            .into_string()
            .map_err(|argument| format!("{argument:?} is not UTF-8"))
    });
    while let Some(argument) = arguments.next() {
        let argument = argument?;
        if argument == "--help" {
            return Ok(Command::Help);
        }
        let (flag, value) = match argument.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        let value = || match value {
            Some(value) => Ok(value),
            None => arguments
                .next()
                .unwrap_or_else(|| Err(format!("{flag} needs a value"))),
        };
        flags.set(flag, value)?;
    }
    Ok(Command::Serve(Box::new(flags)))
}

impl Flags {
    fn set(
        &mut self,
        flag: &str,
        value: impl FnOnce() -> Result<String, String>,
    ) -> Result<(), String> {
        match flag {
            "--addr" => self.addr = read(flag, "an address with a port", &value()?)?,
            "--store" => self.store = value()?,
            "--url" => self.url = Some(value()?),
            "--lease-ms" => self.lease = Some(milliseconds(flag, &value()?)?),
            "--retention-ms" => self.retention = Some(milliseconds(flag, &value()?)?),
            "--max-request-bytes" => self.request_limit = Some(bytes(flag, &value()?)?),
            "--max-response-bytes" => self.response_limit = Some(bytes(flag, &value()?)?),
            "--missing-key" => {
                let choices = [
                    ("pass-through", MissingKey::PassThrough),
                    ("reject", MissingKey::Reject),
                ];
                self.missing_key = choose(flag, &value()?, choices)?;
            }
            "--syntax" => {
                let choices = [
                    ("lenient", KeySyntax::Lenient),
                    ("strict", KeySyntax::Strict),
                ];
                self.syntax = choose(flag, &value()?, choices)?;
            }
            "--retention" => {
                let choices = [
                    ("standard", RetentionPolicy::standard()),
                    ("draft", RetentionPolicy::draft()),
                    ("stripe", RetentionPolicy::stripe()),
                ];
                self.kept = choose(flag, &value()?, choices)?;
            }
            "--on-abandoned" => {
                let choices = [("hold", OnAbandoned::Hold), ("rerun", OnAbandoned::Rerun)];
                self.on_abandoned = choose(flag, &value()?, choices)?;
            }
            "--on-outage" => {
                let choices = [
                    ("reject", OnOutage::Reject),
                    ("pass-through", OnOutage::PassThrough),
                ];
                self.on_outage = choose(flag, &value()?, choices)?;
            }
            "--in-flight" => {
                let value = value()?;
                self.in_flight = match value.strip_prefix("wait:") {
                    Some(wait) => InFlight::Wait(milliseconds(flag, wait)?),
                    None if value == "reject" => InFlight::Reject,
                    None => return Err(not(flag, "reject or wait:MS", &value)),
                };
            }
            "--scope" => {
                let value = value()?;
                self.scope = match value.strip_prefix("header:") {
                    Some(name) => {
                        let name: HeaderName = read(flag, "header: and a header's name", name)?;
                        Some(Scope::header(name))
                    }
                    None if value == "none" => None,
                    None => return Err(not(flag, "none or header:NAME", &value)),
                };
            }
            "--fingerprint" => {
                let choices = [
                    ("raw", FingerprintRecipe::raw()),
                    ("json", FingerprintRecipe::raw().json()),
                    ("multipart", FingerprintRecipe::raw().multipart()),
                ];
                self.fingerprint = choose(flag, &value()?, choices)?;
            }
            other => return Err(format!("{other:?} is no flag")),
        }
        Ok(())
    }

    /// The layer with these settings.
    pub async fn into_layer(self) -> Result<IdempotencyLayer<Arc<dyn Store>>, String> {
        let store = open(&self.store, self.url.as_deref()).await?;
        let mut engine = Idempotency::builder(store).on_abandoned(self.on_abandoned);
        if let Some(lease) = self.lease {
            // There is no flag for the attempt limit; a long lease shall not need one.
            engine = engine.lease(lease).attempt_limit(lease.max(ATTEMPT_LIMIT));
        }
        if let Some(retention) = self.retention {
            engine = engine.retention(retention);
        }
        let engine = engine.build().map_err(|error| error.to_string())?;
        let mut layer = IdempotencyLayer::builder(engine)
            .missing_key(self.missing_key)
            .key_syntax(self.syntax)
            .retention(self.kept)
            .on_outage(self.on_outage)
            .in_flight(self.in_flight)
            .fingerprint(self.fingerprint);
        if let Some(limit) = self.request_limit {
            layer = layer.request_limit(limit);
        }
        if let Some(limit) = self.response_limit {
            layer = layer.response_limit(limit);
        }
        if let Some(scope) = self.scope {
            layer = layer.scope(scope);
        }
        layer.build().map_err(|error| error.to_string())
    }
}

/// The library's default.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(15 * 60);

async fn open(name: &str, url: Option<&str>) -> Result<Arc<dyn Store>, String> {
    let url = match (name, url) {
        ("memory", _) => "memory:".to_owned(),
        ("sqlite", Some(path)) if !path.starts_with("sqlite:") => format!("sqlite:{path}"),
        ("sqlite" | "postgres" | "redis", Some(url)) => url.to_owned(),
        ("sqlite" | "postgres" | "redis", None) => {
            return Err(format!("--store {name} needs --url"));
        }
        (other, _) => return Err(not("--store", "memory, sqlite, postgres or redis", other)),
    };
    if !url.starts_with(name) {
        return Err(format!("--url is not one of {name}"));
    }
    store::open(&url).await.map_err(|error| match &error {
        // What failed, without the driver's own words: they may name the URL.
        OpenError::Store(reason) => format!("--store {name}: {reason}"),
        other => format!("--store {name}: {other}"),
    })
}

/// "`--syntax` takes lenient or strict, not "strickt"".
fn not(flag: &str, takes: &str, value: &str) -> String {
    format!("{flag} takes {takes}, not {value:?}")
}

fn read<T: FromStr<Err: Display>>(flag: &str, takes: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| not(flag, takes, value))
}

fn milliseconds(flag: &str, value: &str) -> Result<Duration, String> {
    read(flag, "a whole number of milliseconds", value).map(Duration::from_millis)
}

fn bytes(flag: &str, value: &str) -> Result<usize, String> {
    read(flag, "a whole number of bytes", value)
}

fn choose<T, const N: usize>(
    flag: &str,
    value: &str,
    choices: [(&str, T); N],
) -> Result<T, String> {
    let names = choices.each_ref().map(|(name, _)| *name).join(" or ");
    let chosen = choices.into_iter().find(|(name, _)| *name == value);
    chosen
        .map(|(_, choice)| choice)
        .ok_or_else(|| not(flag, &names, value))
}
