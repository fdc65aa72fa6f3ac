//! Examples as programs.

use std::path::PathBuf;
use std::process::Command;

/// Builds an example with the features of this test, and says where it is.
pub fn example(name: &str) -> PathBuf {
    // target/debug/deps/test-0123, and beside it target/debug/examples/name.
    let test = std::env::current_exe().expect("the test knows where it is");
    let profile_dir = test.ancestors().nth(2).expect("a folder of the profile");
    let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(name) => name,
        None => panic!("{} is no folder of a profile", profile_dir.display()),
    };
    let features: Vec<&str> = FEATURES
        .iter()
        .filter(|(_, is_on)| *is_on)
        .map(|(name, _)| *name)
        .collect();
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--example", name, "--profile", profile])
        .args(["--no-default-features", "--features", &features.join(",")])
        .arg("--target-dir")
        .arg(profile_dir.parent().expect("a target folder"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(built.success(), "the example {name} does not build");
    profile_dir.join("examples").join(name)
}

const FEATURES: &[(&str, bool)] = &[
    ("memory", cfg!(feature = "memory")),
    ("sqlite", cfg!(feature = "sqlite")),
    ("sqlite-system", cfg!(feature = "sqlite-system")),
    ("postgres", cfg!(feature = "postgres")),
    ("redis", cfg!(feature = "redis")),
    ("client", cfg!(feature = "client")),
    ("encrypt", cfg!(feature = "encrypt")),
    ("axum", cfg!(feature = "axum")),
    ("testing", cfg!(feature = "testing")),
    ("tracing", cfg!(feature = "tracing")),
    ("metrics", cfg!(feature = "metrics")),
];
