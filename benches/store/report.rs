//! Tables in Markdown, with their aims, and where they go.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::arguments::Arguments;
use crate::memory::Pause;
use crate::plot::{self, Row};
use crate::run::{Measured, PURGED_AT_ONCE, Total};

/// Store, work, callers, and how many times the bare side's rate is aimed at.
const AIMS: &[(&str, &str, usize, f64)] = &[
    // At most 1.5 times the time.
    ("memory", "first", 1, 0.67),
    ("memory", "first", 16, 0.67),
    ("memory", "first", 64, 0.67),
    ("sqlite", "first", 64, 8.0),
    ("postgres", "first", 16, 0.85),
    ("postgres", "first", 64, 0.85),
    ("postgres", "replay", 16, 0.75),
    ("postgres", "elsewhere", 16, 0.75),
    ("redis", "first", 64, 0.85),
    ("redis", "replay", 64, 0.85),
];
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Prints the report and writes it.
pub fn publish(
    arguments: &Arguments,
    measured: &[Measured],
    pause: Option<Pause>,
) -> Result<(), String> {
    let header = header();
    let mut long = format!("{header}\n\n{}", table(measured));
    if let Some(pause) = &pause {
        long += &describe(pause);
    }
    println!("{long}");
    if measured.is_empty() {
        return Ok(());
    }
    let short = format!("{header}\n\n{}", overview(measured));
    let svg = plot::svg(
        "Operations per second, as a multiple of the same work done bare",
        &rows(measured),
    );
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("store-bench");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    write(&folder.join("table.md"), &long)?;
    write(&folder.join("overview.md"), &short)?;
    write(&folder.join("ratios.svg"), &svg)?;
    eprintln!("written to {}", folder.display());
    if arguments.write {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        replace(&root.join("README.md"), &short)?;
        replace(&root.join("benches/README.md"), &long)?;
        write(&root.join("benches/store/ratios.svg"), &svg)?;
    }
    Ok(())
}

fn header() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let output = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output();
        let output = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        output.unwrap_or_default()
    };
    let processor = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or_else(|| "a processor".to_owned(), |(_, name)| name.to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?");
    let date = today();
    let rustc = output("rustc", "--version");
    format!(
        "{date}, {processor}, {cores} cores shared by client and server, load {load}, {rustc}; \
         `cargo bench --bench store --features sqlite,postgres,redis,testing`"
    )
}

/// Every row with all that was measured.
fn table(measured: &[Measured]) -> String {
    let mut table = String::new();
    let mut above = "";
    for measured in measured {
        if measured.store != above {
            above = measured.store;
            let Measured { store, about, .. } = measured;
            let _ = write!(
                table,
                "#### {store}\n\nBare: {about}.\n\n\
                 | work | callers | ops/s | bare | **ratio** (quartiles) | p50, p99 µs | bare | CPU µs | bare | CPU ratio | aim |\n\
                 |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|\n"
            );
        }
        let Measured {
            work,
            callers,
            ours,
            bare,
            rates,
            costs,
            ..
        } = measured;
        let _ = writeln!(
            table,
            "| {work} | {callers} | {} | {} | **{:.2}** ({:.2} – {:.2}) | {} | {} | {} | {} | {:.2} | {} |",
            count(median(&ours.per_second)),
            count(median(&bare.per_second)),
            median(rates),
            quantile(rates, 0.25),
            quantile(rates, 0.75),
            latency(ours),
            latency(bare),
            cpu(ours),
            cpu(bare),
            median(costs),
            aim(measured),
        );
        if *work == "purge" {
            let _ = writeln!(
                table,
                "\nA purge: records per second, {PURGED_AT_ONCE} in a call; p50 and p99 are those of a call.\n"
            );
        }
    }
    table
}

/// A row for each store and kind of work: rate, and ratio.
fn overview(measured: &[Measured]) -> String {
    let mut callers: Vec<usize> = measured.iter().map(|measured| measured.callers).collect();
    callers.sort_unstable();
    callers.dedup();
    let mut table = "| store | work |".to_owned();
    for callers in &callers {
        let plural = if *callers == 1 { "" } else { "s" };
        let _ = write!(table, " {callers} caller{plural} |");
    }
    table += "\n|---|---|";
    table += &"--:|".repeat(callers.len());
    table += "\n";
    for row in rows(measured) {
        let _ = write!(table, "| {} | {} |", row.store, row.work);
        for callers in &callers {
            let cell = measured.iter().find(|measured| {
                (measured.store, measured.work, measured.callers) == (row.store, row.work, *callers)
            });
            match cell {
                Some(cell) => {
                    let rate = count(median(&cell.ours.per_second));
                    let _ = write!(table, " {rate} ({:.2}×) |", median(&cell.rates));
                }
                None => table += " |",
            }
        }
        table += "\n";
    }
    table
}

fn rows(measured: &[Measured]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for measured in measured {
        let mark = (measured.callers, median(&measured.rates));
        let row = rows
            .iter_mut()
            .find(|row| (row.store, row.work) == (measured.store, measured.work));
        match row {
            Some(row) => row.marks.push(mark),
            None => rows.push(Row {
                store: measured.store,
                work: measured.work,
                marks: vec![mark],
            }),
        }
    }
    rows
}

fn describe(pause: &Pause) -> String {
    let of = |[cpu, wall]: [Duration; 2]| {
        let verdict = if cpu <= LONGEST_PAUSE {
            "met"
        } else {
            "**not met**"
        };
        format!(
            "{} µs of CPU ({} µs by the clock), aim ≤ 1000 µs of CPU: {verdict}",
            cpu.as_micros(),
            wall.as_micros()
        )
    };
    format!(
        "\nThe longest claim of the in-process store while {} entries expire: {}; beside a purge of \
         all of them: {}.\n",
        pause.entries,
        of(pause.claim),
        of(pause.beside_purge)
    )
}

fn aim(measured: &Measured) -> String {
    let aim = AIMS.iter().find(|(store, work, callers, _)| {
        (*store, *work, *callers) == (measured.store, measured.work, measured.callers)
    });
    aim.map_or_else(String::new, |(.., aim)| {
        let met = median(&measured.rates) >= *aim;
        format!("≥ {aim}: {}", if met { "met" } else { "**not met**" })
    })
}

fn latency(total: &Total) -> String {
    let mut sorted = total.latencies.clone();
    sorted.sort_unstable();
    let at = |part: f64| {
        let nanos = sorted.get(((sorted.len() as f64 - 1.0) * part) as usize);
        micros(f64::from(nanos.copied().unwrap_or(0)) / 1_000.0)
    };
    format!("{}, {}", at(0.5), at(0.99))
}

/// Of this process, and of the server.
fn cpu(total: &Total) -> String {
    let client = micros(median(&total.client));
    match &*total.server {
        [] => client,
        server => format!("{client} + {}", micros(median(server))),
    }
}

fn micros(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// With a space between thousands.
fn count(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut spaced = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            spaced.push(' ');
        }
        spaced.push(digit);
    }
    spaced
}

fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 - 1.0) * part;
    sorted.get(at.round() as usize).copied().unwrap_or(f64::NAN)
}

fn today() -> String {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let formatted =
        httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + since_epoch.unwrap_or_default());
    // `Mon, 30 Nov 2026 20:00:00 GMT`
    let parts: Vec<&str> = formatted.split(' ').collect();
    parts.get(1..4).unwrap_or_default().join(" ")
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

const BEGIN: &str = "<!-- store-bench:begin -->";
const END: &str = "<!-- store-bench:end -->";

/// What stands between the marks.
fn replace(path: &Path, text: &str) -> Result<(), String> {
    let read = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let parts = read.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some((before, after))
    });
    let Some((before, after)) = parts else {
        return Err(format!("{} has no `{BEGIN}` … `{END}`", path.display()));
    };
    write(
        path,
        &format!("{before}{BEGIN}\n{}\n{END}{after}", text.trim_end()),
    )
}
