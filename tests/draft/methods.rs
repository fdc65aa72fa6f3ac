//! Section 1: the methods that need a key.

use std::path::Path;

use crate::app::{App, ask, paid};

/// Section 1: OPTIONS, HEAD, GET, PUT and DELETE are idempotent by definition, POST and PATCH are not.
#[tokio::test]
async fn methods_that_are_idempotent_by_definition_pass_and_the_others_are_guarded() {
    for (method, guarded) in [
        ("OPTIONS", false),
        ("HEAD", false),
        ("GET", false),
        ("PUT", false),
        ("DELETE", false),
        ("POST", true),
        ("PATCH", true),
    ] {
        let app = App::new(paid);
        for _ in 0..2 {
            app.send(ask(method, "/").key("k")).await;
        }
        assert_eq!(app.runs(), if guarded { 1 } else { 2 }, "{method}");
    }
}

/// Section 1.1 borrows its words from RFCs that have been replaced since. The documentation of this
/// crate cites those that are in force: 9110 for 7231, 9457 for 7807, 9651 for 8941, 9562 for 4122.
#[test]
fn the_documentation_cites_the_rfcs_that_are_in_force() {
    let mut read = 0;
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for replaced in ["7231", "7807", "8941", "4122"] {
                let cited = text.contains(&format!("RFC {replaced}"));
                assert!(!cited, "{} cites RFC {replaced}", path.display());
            }
            read += 1;
        }
    }
    assert!(read > 20);
}
