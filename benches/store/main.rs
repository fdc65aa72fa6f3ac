//! What each store costs, beside the same work done bare on the same driver in the same run:
//!
//! ```sh
//! cargo bench --bench store --features sqlite,postgres,redis,testing
//! cargo bench --bench store --features redis -- --store redis --work first,replay --callers 64
//! cargo bench --bench store --features sqlite,postgres,redis,testing -- --write
//! ```
//!
//! `benches/README.md` says what is bare and how to read the figures. Rounds of the two sides take
//! turns, and what is compared is one turn with its neighbour: on a busy machine the ratios keep still
//! while the figures do not. PostgreSQL and Redis are servers of its own. The report goes to
//! `target/store-bench/`, and with `--write` into the documents too. `--quick` makes one short round, as
//! `cargo test` does.

mod arguments;
mod drive;
mod memory;
mod plot;
#[cfg(all(feature = "postgres", feature = "testing"))]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod report;
mod run;
mod side;
#[cfg(feature = "sqlite-system")]
mod sqlite;

use std::process::ExitCode;

use crate::arguments::Arguments;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("store: {problem}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mut measured = Vec::new();
    for store in arguments.stores() {
        runtime.block_on(async {
            match store {
                "memory" => measured.extend(memory::measure(&arguments).await),
                #[cfg(feature = "sqlite-system")]
                "sqlite" => measured.extend(sqlite::measure(&arguments).await),
                #[cfg(all(feature = "postgres", feature = "testing"))]
                "postgres" => measured.extend(postgres::measure(&arguments).await),
                #[cfg(feature = "redis")]
                "redis" => measured.extend(redis::measure(&arguments).await),
                other => eprintln!("store: `{other}` is not part of this build: see --features"),
            }
        });
    }
    let pause = arguments
        .runs("memory", "pause")
        .then(|| memory::pause(arguments.quick));
    match report::publish(&arguments, &measured, pause) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("store: {problem}");
            ExitCode::FAILURE
        }
    }
}
