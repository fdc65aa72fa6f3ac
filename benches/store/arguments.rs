//! What is measured, and how long.

use std::time::Duration;

pub struct Arguments {
    /// One short round, to show that it works.
    pub quick: bool,
    /// Into the documents.
    pub write: bool,
    pub rounds: Option<usize>,
    pub slice: Option<Duration>,
    stores: Vec<String>,
    works: Vec<String>,
    callers: Vec<usize>,
}

pub const STORES: [&str; 4] = ["memory", "sqlite", "postgres", "redis"];
pub const CALLERS: [usize; 3] = [1, 16, 64];

impl Arguments {
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self {
            // `cargo bench` says so; `cargo test` does not.
            quick: true,
            write: false,
            rounds: None,
            slice: None,
            stores: Vec::new(),
            works: Vec::new(),
            callers: Vec::new(),
        };
        let mut quick = false;
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let value = arguments.next();
                value.ok_or_else(|| format!("`{argument}` needs a value"))
            };
            match &*argument {
                "--bench" => parsed.quick = false,
                "--quick" => quick = true,
                "--write" => parsed.write = true,
                "--rounds" => parsed.rounds = Some(number(&value()?)?),
                "--slice" => {
                    let millis = number(&value()?)?;
                    parsed.slice = Some(Duration::from_millis(millis as u64));
                }
                "--store" => parsed.stores = list(&value()?),
                "--work" => parsed.works = list(&value()?),
                "--callers" => {
                    let callers = list(&value()?);
                    let callers = callers.iter().map(|callers| number(callers));
                    parsed.callers = callers.collect::<Result<_, _>>()?;
                }
                // What the test harness is told (a filter, `--nocapture`) is nothing here.
                _ if parsed.quick && !argument.starts_with("--") => {}
                "--nocapture" | "--test-threads" | "--test" => {}
                other => return Err(format!("`{other}` is not known")),
            }
        }
        parsed.quick |= quick;
        Ok(parsed)
    }

    pub fn stores(&self) -> impl Iterator<Item = &'static str> {
        let chosen =
            |store: &&str| self.stores.is_empty() || self.stores.iter().any(|s| s == store);
        STORES.into_iter().filter(chosen)
    }

    pub fn runs(&self, store: &str, work: &str) -> bool {
        self.stores().any(|chosen| chosen == store)
            && (self.works.is_empty() || self.works.iter().any(|w| w == work))
    }

    pub fn callers(&self) -> Vec<usize> {
        match (&*self.callers, self.quick) {
            ([], true) => vec![4],
            ([], false) => CALLERS.to_vec(),
            (chosen, _) => chosen.to_vec(),
        }
    }
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

fn number(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("`{text}` is no number above zero"))
}
