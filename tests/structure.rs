//! The three bands of the crate: core, stores, front doors. Core imports from neither of the others,
//! stores and front doors import from core and not from each other.
//!
//! Read from the source text: paths that begin with `crate::`, tests and comments left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Modules that speak a protocol. `grpc` may use `http`; `client` reads what `http` writes.
const FRONT_DOORS: [&str; 4] = ["client", "grpc", "http", "webhook"];
const MAY_USE: [(&str, &str); 2] = [("grpc", "http"), ("client", "http")];

/// What several stores need and none owns. It knows nothing of the crate, so that a foreign store can
/// write the same.
const SHARED: [&str; 1] = ["watchers"];

/// Libraries that only the named front doors may know.
const SERVERS: [(&str, &[&str]); 4] = [
    ("axum", &["http"]),
    ("hyper", &[]),
    ("tonic", &[]),
    ("tower", &["client"]),
];

#[test]
fn core_imports_neither_stores_nor_front_doors() {
    let found = violations(|file, path| {
        file.band() == Band::Core && (is_front_door(path) || is_a_store(path))
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn stores_import_neither_front_doors_nor_other_stores() {
    let found = violations(|file, path| {
        let Band::Store(own) = file.band() else {
            return false;
        };
        is_front_door(path) || is_a_store(path) && path.get(1).is_none_or(|store| *store != own)
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn what_stores_share_knows_nothing_of_the_crate() {
    let found = violations(|file, _| {
        SHARED
            .iter()
            .any(|name| file.name == format!("store/{name}.rs"))
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_store_of_the_crate_uses_only_what_a_foreign_store_can_use() {
    let public = public_names(&read(&root().join("src/lib.rs")));
    let found = violations(|file, path| {
        let own = |store: &str| {
            path.first() == Some(&"store") && path.get(1) == Some(&store) || is_shared(path)
        };
        matches!(file.band(), Band::Store(store) if !own(&store))
            && path.last().is_some_and(|name| !public.contains(*name))
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn front_doors_import_neither_stores_nor_each_other() {
    let found = violations(|file, path| {
        let Band::FrontDoor(own) = file.band() else {
            return false;
        };
        let other =
            is_front_door(path) && path[0] != own && !MAY_USE.contains(&(own.as_str(), path[0]));
        other || is_a_store(path)
    });
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_server_library_is_known_to_its_front_doors_only() {
    let mut found = Vec::new();
    for file in sources() {
        for (library, doors) in SERVERS {
            let allowed = matches!(file.band(), Band::FrontDoor(door) if doors.contains(&&*door));
            if !allowed && names_crate(&file.code, library) {
                found.push(format!("{} knows {library}", file.name));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn only_the_facade_knows_whether_tracing_and_metrics_are_there() {
    let mut found = Vec::new();
    for file in sources().iter().filter(|file| file.name != "telemetry.rs") {
        for library in ["tracing", "metrics"] {
            let condition = format!("feature = \"{library}\"");
            if names_crate(&file.code, library) || file.code.contains(&condition) {
                found.push(format!("{} knows {library}", file.name));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_root_of_the_crate_holds_no_logic() {
    let code = code_of(&read(&root().join("src/lib.rs")));
    for keyword in ["fn ", "impl ", "trait ", "macro_rules!"] {
        assert!(!code.contains(keyword), "src/lib.rs has `{keyword}`");
    }
}

#[test]
fn what_is_forbidden_is_found() {
    let paths = crate_paths(
        "use crate::{claim::{Claim, Owner as Who}, http::*};\nlet x = crate::key::a();",
    );
    let paths: Vec<String> = paths.iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["claim::Claim", "claim::Owner", "http::*", "key::a"]);
    assert!(is_front_door(&["http", "*"]) && is_front_door(&["IdempotencyLayer"]));
    assert!(!is_front_door(&["claim", "Claim"]) && !is_front_door(&["Idempotency"]));
    assert!(is_a_store(&["store", "memory", "Entry"]) && is_a_store(&["MemoryStore"]));
    assert!(!is_a_store(&["store", "Store"]) && !is_a_store(&["StoreError"]));
    assert!(names_crate("use axum::Router;", "axum") && names_crate("let a = axum::b();", "axum"));
    assert!(!names_crate("crate::axum::b", "axum") && !names_crate("use my_axum::b;", "axum"));
    let code = code_of("a // b\n/// c\nd \"http://e\"\n#[cfg(test)]\nmod tests {\n    f\n}\n");
    assert_eq!(code, "a \nd \"http://e\"\n");
    let names = public_names("pub use a::{B, C as D};\npub use e::F;\nuse g::H;");
    assert_eq!(names, BTreeSet::from(["B", "D", "F"].map(String::from)));
}

#[derive(PartialEq)]
enum Band {
    Core,
    Store(String),
    FrontDoor(String),
    /// The root, the test kit, and what opens a store by its URL: they show and use everything.
    Free,
}

struct Source {
    /// Relative to `src`, with `/`.
    name: String,
    code: String,
}

impl Source {
    fn band(&self) -> Band {
        let path = self.name.trim_end_matches(".rs").trim_end_matches("/mod");
        let mut rooms = path.split('/');
        match (rooms.next().unwrap_or_default(), rooms.next()) {
            ("lib" | "testing", _) | ("store", Some("open")) => Band::Free,
            ("store", Some(store)) => Band::Store(store.to_owned()),
            (door, _) if FRONT_DOORS.contains(&door) => Band::FrontDoor(door.to_owned()),
            _ => Band::Core,
        }
    }
}

fn violations(forbidden: impl Fn(&Source, &[&str]) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for file in sources() {
        for path in crate_paths(&file.code) {
            if forbidden(&file, &path) {
                found.push(format!("src/{} uses crate::{}", file.name, path.join("::")));
            }
        }
    }
    found
}

fn is_front_door(path: &[&str]) -> bool {
    // By the module, or by a name that the root shows of it.
    static SHOWN: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
        let root = code_of(&read(&root().join("src/lib.rs")));
        let of_doors = |shown: &&str| {
            let module = shown.trim().strip_prefix("pub use ");
            let module = module.and_then(|path| path.split("::").next());
            module.is_some_and(|module| FRONT_DOORS.contains(&module))
        };
        root.split_inclusive(';')
            .filter(of_doors)
            .flat_map(public_names)
            .collect()
    });
    path.first()
        .is_some_and(|first| FRONT_DOORS.contains(first) || SHOWN.contains(*first))
}

/// A store's own module, or its type wherever it is shown; not the trait and what belongs to it.
fn is_a_store(path: &[&str]) -> bool {
    let module = |name: &str| name.starts_with(|first: char| first.is_ascii_lowercase());
    let store = |name: &str| name.len() > "Store".len() && name.ends_with("Store");
    path.first() == Some(&"store")
        && path.get(1).is_some_and(|name| module(name))
        && !is_shared(path)
        || path.last().is_some_and(|name| store(name))
}

fn is_shared(path: &[&str]) -> bool {
    path.first() == Some(&"store") && path.get(1).is_some_and(|name| SHARED.contains(name))
}

/// Every path after `crate::`, with its groups written out and its `as` names left away.
fn crate_paths(code: &str) -> Vec<Vec<&str>> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if !before.is_some_and(is_word) {
            tree(&code[at + "crate::".len()..], &mut Vec::new(), &mut paths);
        }
    }
    paths
}

/// Reads one tree of a `use` declaration; returns what follows it.
fn tree<'c>(mut code: &'c str, above: &mut Vec<&'c str>, paths: &mut Vec<Vec<&'c str>>) -> &'c str {
    let depth = above.len();
    loop {
        code = code.trim_start();
        if let Some(mut group) = code.strip_prefix('{') {
            loop {
                group = tree(group, above, paths).trim_start();
                group = group.strip_prefix(',').unwrap_or(group).trim_start();
                if let Some(rest) = group.strip_prefix('}') {
                    above.truncate(depth);
                    return rest;
                }
                assert!(!group.is_empty(), "a group has no end");
            }
        }
        let end = code
            .find(|c: char| !is_word(c) && c != '*')
            .unwrap_or(code.len());
        let (name, rest) = code.split_at(end);
        above.push(name);
        if let Some(more) = rest.strip_prefix("::") {
            code = more;
            continue;
        }
        paths.push(above.clone());
        above.truncate(depth);
        let Some(renamed) = rest.trim_start().strip_prefix("as ") else {
            return rest;
        };
        return renamed.trim_start_matches(is_word);
    }
}

/// What `pub use` shows in the root.
fn public_names(root: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for shown in code_of(root).split(';') {
        let Some(shown) = shown.split("pub use ").nth(1) else {
            continue;
        };
        for name in shown.split(['{', '}', ',']) {
            let name = name.rsplit(" as ").next().unwrap_or(name);
            let name = name.rsplit("::").next().unwrap_or(name).trim();
            if !name.is_empty() {
                names.insert(name.to_owned());
            }
        }
    }
    names
}

/// Whether a path begins with this crate's name.
fn names_crate(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::")).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        !before.is_some_and(|before| is_word(before) || before == ':')
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The text without comments and without the tests at its end.
fn code_of(text: &str) -> String {
    let tests = text
        .find("\nmod tests {")
        .map_or(text.len(), |before| before + 1);
    let text = match text[..tests].rfind("#[cfg(test)]\n") {
        // Nothing but further attributes may stand between.
        Some(at) if text[at..tests].lines().all(|line| line.starts_with("#[")) => &text[..at],
        _ => text,
    };
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        // A colon before it is a URL's.
        let comment = line
            .match_indices("//")
            .find(|(at, _)| !line[..*at].ends_with(':'));
        let kept = comment.map_or(line, |(at, _)| &line[..at]);
        if !kept.trim().is_empty() {
            code.push_str(kept);
            code.push('\n');
        }
    }
    code
}

/// All source files but those that hold only tests.
fn sources() -> Vec<Source> {
    let mut paths = Vec::new();
    collect(&root().join("src"), &mut paths);
    let tests = ["models.rs", "properties.rs", "tests.rs"];
    paths.retain(|path| !tests.iter().any(|name| path.ends_with(name)));
    paths.sort();
    assert!(paths.len() > 20, "the sources were not found: {paths:?}");
    let name = |path: &Path| {
        let inner = path.strip_prefix(root().join("src")).unwrap();
        inner.to_str().unwrap().replace('\\', "/")
    };
    paths
        .iter()
        .map(|path| Source {
            name: name(path),
            code: code_of(&read(path)),
        })
        .collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            paths.push(path);
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
