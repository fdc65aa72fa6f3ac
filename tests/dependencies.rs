//! What the crate may depend on: licences and the minimum Rust version of everything that a user of
//! any feature compiles.
//!
//! These tests ask cargo for the manifests of the whole tree, for which it may have to download
//! crates of other platforms; `.ci/run` runs them:
//!
//! ```sh
//! cargo test --test dependencies -- --ignored
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[test]
#[ignore = "asks the registry: run by .ci/run"]
fn every_licence_is_one_that_deny_toml_allows() {
    let allowed = allowed_licences(&read("deny.toml"));
    let metadata = metadata();
    let mut refused = Vec::new();
    for name_version in normal_dependencies(&["--all-features"]) {
        let package = &metadata[&name_version];
        let licence = package["license"].as_str().unwrap_or_default();
        if !is_allowed(licence, &allowed) {
            refused.push(format!("{name_version}: {licence:?}"));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// A feature whose driver needs more says so in Cargo.toml, `[package.metadata.msrv]`, by its name:
/// `sqlx = "1.94"`.
#[test]
#[ignore = "asks the registry: run by .ci/run"]
fn no_dependency_of_a_feature_needs_a_newer_rust_than_the_feature_says() {
    let metadata = metadata();
    let own = metadata
        .values()
        .find(|package| package["name"] == env!("CARGO_PKG_NAME"))
        .expect("the package knows itself");
    let msrv = version(env!("CARGO_PKG_RUST_VERSION"));
    let mut too_new = Vec::new();
    let mut check = |label: &str, arguments: &[&str], limit: Version| {
        for name_version in normal_dependencies(arguments) {
            let needed = metadata[&name_version]["rust_version"].as_str();
            if needed.is_some_and(|needed| version(needed) > limit) {
                let needed = needed.unwrap_or_default();
                too_new.push(format!("{label}: {name_version} needs Rust {needed}"));
            }
        }
    };
    check("without features", &["--no-default-features"], msrv);
    for feature in own["features"].as_object().expect("features").keys() {
        let exception = own["metadata"]["msrv"][feature].as_str();
        let limit = exception.map_or(msrv, version);
        check(
            feature,
            &["--no-default-features", "--features", feature],
            limit,
        );
    }
    assert!(too_new.is_empty(), "{}", too_new.join("\n"));
}

#[test]
#[ignore = "reads files that are not in the package: run by .ci/run"]
fn every_file_names_one_minimum_rust_version() {
    let msrv = version(env!("CARGO_PKG_RUST_VERSION"));
    let clippy = read("clippy.toml");
    let clippy = clippy.lines().find_map(|line| line.strip_prefix("msrv = "));
    assert_eq!(
        clippy.map(|quoted| version(quoted.trim_matches('"'))),
        Some(msrv)
    );
}

#[test]
fn licence_expressions_are_read() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Apache-2.0".to_owned()]);
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/Apache-2.0",
        "MIT AND Apache-2.0",
        "(MIT OR GPL-3.0) AND Apache-2.0",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "GPL-3.0 OR MIT AND GPL-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "(GPL-3.0 OR MIT) AND (GPL-2.0)",
    ] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
    assert_eq!(
        allowed_licences("[a]\nallow = [\"x\"]\n[licenses]\nallow = [\n  \"y\",\n  \"z\",\n]\n"),
        BTreeSet::from(["y".to_owned(), "z".to_owned()])
    );
    assert!(version("1.88") == version("1.88.0") && version("1.9") < version("1.88"));
}

type Version = (u32, u32, u32);

fn version(text: &str) -> Version {
    let mut parts = text.split('.').map(|part| part.parse().expect("a version"));
    let mut next = || parts.next().unwrap_or(0);
    (next(), next(), next())
}

/// The manifests of the tree, by `name version`.
fn metadata() -> BTreeMap<String, Value> {
    let json = cargo(&["metadata", "--format-version", "1", "--all-features"]);
    let mut metadata: Value = serde_json::from_str(&json).expect("metadata is JSON");
    let Value::Array(packages) = metadata["packages"].take() else {
        panic!("metadata lists packages");
    };
    let text = |package: &Value, member: &str| package[member].as_str().unwrap_or("").to_owned();
    packages
        .into_iter()
        .map(|package| {
            let name = text(&package, "name") + " " + &text(&package, "version");
            (name, package)
        })
        .collect()
}

/// What a user compiles, on any platform, as `name version`; dev-dependencies, and the features
/// that only they turn on, are left out.
fn normal_dependencies(features: &[&str]) -> BTreeSet<String> {
    let tree = ["tree", "--edges", "normal,build", "--target", "all"];
    let format = ["--prefix", "none", "--format", "{p}"];
    let listed = cargo(&[&tree[..], &format, features].concat());
    let names: BTreeSet<String> = listed
        .lines()
        .filter_map(|line| line.split_once(" v"))
        .map(|(name, rest)| format!("{name} {}", rest.split(' ').next().unwrap_or(rest)))
        .collect();
    assert!(names.len() > 10, "the tree was not understood: {listed}");
    names
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("cargo writes UTF-8")
}

/// The list `allow` of the section `licenses`.
fn allowed_licences(deny: &str) -> BTreeSet<String> {
    let section = deny.split("[licenses]").nth(1).expect("[licenses]");
    let list = section.split("allow = [").nth(1).expect("allow");
    let list = list.split(']').next().expect("the end of allow");
    list.split('"')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// Reads an SPDX expression; `/` is the old form of OR. A licence with an exception has a name of
/// its own, because an exception is what a lawyer has to read.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words: Vec<&str> = spaced.split_whitespace().rev().collect();
    let met = any(&mut words, allowed);
    met && words.is_empty()
}

fn any(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut met = all(words, allowed);
    while words.pop_if(|word| *word == "OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while words.pop_if(|word| *word == "AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Vec<&str>, allowed: &BTreeSet<String>) -> bool {
    match words.pop() {
        Some("(") => {
            let met = any(words, allowed);
            words.pop() == Some(")") && met
        }
        Some(name) => {
            let mut name = name.to_owned();
            if words.pop_if(|word| *word == "WITH").is_some() {
                name = format!("{name} WITH {}", words.pop().unwrap_or_default());
            }
            allowed.contains(&name)
        }
        None => false,
    }
}

fn read(file: &str) -> String {
    let path: PathBuf = root().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
