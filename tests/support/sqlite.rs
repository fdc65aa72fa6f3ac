//! Throw-away SQLite files.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory for one test's file, removed with it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "tower-idempotency-{}-{}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).expect("a new directory");
        Self(folder)
    }

    pub fn file(&self) -> PathBuf {
        self.0.join("idempotency.db")
    }

    #[allow(dead_code, reason = "not every test binary needs it")]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
