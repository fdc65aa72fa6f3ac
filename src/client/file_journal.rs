//! Keys in a folder: one small file per operation.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use tower::BoxError;

use super::journal::{KeyJournal, SavedKey};
use crate::key::IdempotencyKey;

/// Keys in a folder of their own, for programs without a database.
///
/// A key is on the disk before it is sent, whole or not at all; several processes may share the
/// folder, on a file system that has hard links. The names of operations are hashed into file names, and a file holds the time and the key,
/// readable only by its owner where the system knows owners. Whoever can read a key can ask for the
/// operation's answer if they can also pass for its caller.
///
/// # Panics
///
/// The calls do outside of a tokio runtime.
#[derive(Clone, Debug)]
pub struct FileJournal {
    folder: PathBuf,
}

impl FileJournal {
    /// Opens the folder, and makes it if it is not there. Blocks for that moment.
    ///
    /// # Errors
    ///
    /// If it cannot be made.
    pub fn open(folder: impl Into<PathBuf>) -> io::Result<Self> {
        let folder = folder.into();
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    fn file(&self, operation: &str) -> PathBuf {
        let digest = Sha256::digest(operation.as_bytes());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(name)
    }
}

#[async_trait]
impl KeyJournal for FileJournal {
    async fn begin(&self, operation: &str, fresh: &IdempotencyKey) -> Result<SavedKey, BoxError> {
        let (file, fresh) = (self.file(operation), fresh.clone());
        let begun = tokio::task::spawn_blocking(move || save_or_read(&file, &fresh));
        Ok(begun.await??)
    }

    async fn forget(&self, operation: &str) -> Result<(), BoxError> {
        let file = self.file(operation);
        let removed = tokio::task::spawn_blocking(move || match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        });
        Ok(removed.await??)
    }
}

fn save_or_read(file: &Path, fresh: &IdempotencyKey) -> io::Result<SavedKey> {
    match fs::read(file) {
        Ok(saved) => {
            // Whoever saved it may have died before its name was durable.
            sync_folder(file)?;
            return read(&saved);
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    // Written whole under another name; a link is made once, whoever else tries.
    let other = file.with_extension(IdempotencyKey::random().as_str());
    let written = write(&other, fresh).and_then(|()| fs::hard_link(&other, file));
    let removed = fs::remove_file(&other);
    match written {
        Ok(()) => {
            removed?;
            sync_folder(file)?;
            Ok(SavedKey::Fresh)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            sync_folder(file)?;
            read(&fs::read(file)?)
        }
        Err(error) => Err(error),
    }
}

fn write(file: &Path, key: &IdempotencyKey) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(file)?;
    let text = format!("{VERSION} {} {}\n", seconds_now(), key.as_str());
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// A file's name is durable when its folder is; only Unix can open one.
fn sync_folder(file: &Path) -> io::Result<()> {
    match file.parent() {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

fn read(saved: &[u8]) -> io::Result<SavedKey> {
    parse(saved).ok_or_else(|| {
        // Not to be mended by a new key: the old one may have been sent.
        io::Error::new(
            io::ErrorKind::InvalidData,
            "a file of the key journal cannot be read; remove it only if its operation is settled",
        )
    })
}

fn parse(saved: &[u8]) -> Option<SavedKey> {
    let text = std::str::from_utf8(saved).ok()?.strip_suffix('\n')?;
    let mut parts = text.splitn(3, ' ');
    if parts.next()? != VERSION {
        return None;
    }
    let then: u64 = parts.next()?.parse().ok()?;
    let key = IdempotencyKey::new(parts.next()?).ok()?;
    let now = seconds_now();
    // A clock was wrong, so that nobody knows how old the key is: it may be past its life.
    if then > now.saturating_add(CLOCKS_DIFFER) {
        return None;
    }
    let age = Duration::from_secs(now.saturating_sub(then));
    Some(SavedKey::Earlier { key, age })
}

#[expect(
    clippy::disallowed_methods,
    reason = "no other clock goes on while the process is away"
)]
fn seconds_now() -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.map_or(0, |since_epoch| since_epoch.as_secs())
}

const VERSION: &str = "1";

/// By so many seconds, at the most, between machines that share a folder.
const CLOCKS_DIFFER: u64 = 60;
