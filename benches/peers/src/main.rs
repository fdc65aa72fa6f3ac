//! Puts this crate beside other crates that do the same job: what a request costs in each, how much
//! they keep, and what they do when something goes wrong. Prints Markdown.
//!
//! ```sh
//! cd benches/peers
//! cargo run --release --locked --ignore-rust-version                     # about two minutes after the build
//! cargo run --release --locked --ignore-rust-version -- --quick          # seconds, to see that it runs
//! cargo run --release --locked --ignore-rust-version -- --rounds 41 --only cost
//! ```
//!
//! One of the crates declares a newer Rust than it needs, hence `--ignore-rust-version`.
//! `benches/README.md` says how to read what this prints.

mod behaviour;
mod cost;
mod memory;
mod peer;
mod service;

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    match Arguments::parse(std::env::args().skip(1)) {
        Ok(Arguments::Records(name)) => memory::measure(&name),
        Ok(Arguments::Report(report)) => {
            println!("{}\n", machine());
            for part in Part::ALL {
                if report.only.is_none_or(|only| only == part) {
                    println!("{}", part.run(&report));
                }
            }
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("peers: {problem}");
            ExitCode::from(2)
        }
    }
}

enum Arguments {
    /// What a child process is asked for: how much the records of one crate take.
    Records(String),
    Report(Report),
}

struct Report {
    rounds: usize,
    quick: bool,
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Cost,
    Memory,
    Behaviour,
}

impl Part {
    const ALL: [Self; 3] = [Self::Cost, Self::Memory, Self::Behaviour];

    const fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::Memory => "memory",
            Self::Behaviour => "behaviour",
        }
    }

    fn run(self, report: &Report) -> String {
        match self {
            Self::Cost => cost::report(report.rounds, report.quick),
            Self::Memory => memory::report(report.quick),
            Self::Behaviour => behaviour::report(),
        }
    }
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut report = Report {
            rounds: 21,
            quick: false,
            only: None,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_default();
            match argument.as_str() {
                "--quick" => report.quick = true,
                "--rounds" => {
                    report.rounds = match value().parse() {
                        Ok(rounds) if rounds > 0 => rounds,
                        _ => return Err("--rounds needs a number".to_owned()),
                    }
                }
                "--only" => {
                    let name = value();
                    let part = Part::ALL.into_iter().find(|part| part.name() == name);
                    report.only = Some(part.ok_or("--only needs one of cost, memory, behaviour")?);
                }
                "--records" => return Ok(Self::Records(value())),
                other => return Err(format!("{other} is not known: see src/main.rs")),
            }
        }
        if report.quick {
            report.rounds = 1;
        }
        Ok(Self::Report(report))
    }
}

/// One line on where this ran; numbers of another machine, or of a busy one, are other numbers.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown CPU", |model| model.trim_matches(['\t', ' ', ':']));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    let rustc = Command::new("rustc").arg("--version").output();
    let rustc = rustc.map_or_else(
        |_| "rustc unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    );
    format!("{model}, {cores} cores, load {load} at the start, {rustc}")
}
