//! Keys over restarts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tower::BoxError;
use tower_idempotency::client::{
    ClientError, ClientLayer, FileJournal, GaveUp, KeyJournal, MemoryJournal, OperationName,
    SavedKey, SetIdempotencyKeyLayer,
};
use tower_idempotency::{IdempotencyKey, async_trait};

use crate::script::{Script, Step, answered, exact, pay, status, unknown};

/// A folder of this test's own, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = format!("tower-idempotency-{}", IdempotencyKey::random().as_str());
        Self(std::env::temp_dir().join(name))
    }

    /// As a process does when it starts.
    fn open(&self) -> FileJournal {
        FileJournal::open(&self.0).unwrap()
    }

    fn files(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(&self.0).unwrap();
        files.map(|file| file.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn keyed(journal: impl KeyJournal) -> ClientLayer {
    let key = SetIdempotencyKeyLayer::new().journal(journal);
    ClientLayer::new().key(key).retry(exact().retries(1))
}

fn order(name: &str) -> Request<http_body_util::Full<bytes::Bytes>> {
    let mut request = pay();
    request.extensions_mut().insert(OperationName::new(name));
    request
}

fn key(key: &str) -> IdempotencyKey {
    IdempotencyKey::new(key).unwrap()
}

#[tokio::test]
async fn a_restart_goes_on_with_the_key_that_was_sent_before() {
    let folder = Folder::new();
    let script = Script::new([Step::Reset, status(503), status(201)]);
    let before = script
        .ask(
            &keyed(folder.open()).retry(exact().retries(0)),
            order("order-17"),
        )
        .await;
    unknown(before, GaveUp::Retries);
    // The process dies here. The next one reads the folder.
    let after = keyed(folder.open()).retry(exact().base(Duration::from_millis(1)));
    answered(script.ask(&after, order("order-17")).await, 201);
    answered(script.ask(&after, order("order-18")).await, 201);
    let seen = script.seen();
    let keys: Vec<_> = seen.iter().map(|seen| seen.key()).collect();
    assert_eq!(keys[0], keys[1]);
    assert_eq!(keys[0], keys[2]);
    assert_ne!(keys[0], keys[3]);
}

#[tokio::test]
async fn an_answer_does_not_forget_the_key_and_the_application_does() {
    let folder = Folder::new();
    let journal = folder.open();
    let layer = keyed(journal.clone());
    let script = Script::new([status(201)]);
    for _ in 0..2 {
        answered(script.ask(&layer, order("order-17")).await, 201);
    }
    journal.forget("order-17").await.unwrap();
    journal.forget("order-17").await.unwrap();
    assert!(folder.files().is_empty());
    answered(script.ask(&layer, order("order-17")).await, 201);
    let seen = script.seen();
    assert_eq!(seen[0].key(), seen[1].key());
    assert_ne!(seen[0].key(), seen[2].key());
}

#[tokio::test(start_paused = true)]
async fn a_resumed_key_past_its_life_is_not_sent() {
    let layer = keyed(MemoryJournal::new());
    let script = Script::new([Step::Reset]);
    unknown(script.ask(&layer, order("order-17")).await, GaveUp::Retries);
    // A server keeps its records for a day, and what is sent late arrives later.
    let life = Duration::from_secs(23 * 60 * 60);
    tokio::time::sleep(life - Duration::from_secs(1)).await;
    unknown(
        script.ask(&layer, order("order-17")).await,
        GaveUp::KeyExpired,
    );
    let tries = script.tries();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let told = unknown(
        script.ask(&layer, order("order-17")).await,
        GaveUp::KeyExpired,
    );
    assert_eq!((told.tries(), script.tries()), (0, tries));
    assert!(told.key().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_a_resumed_key_says_nothing_of_the_earlier_call() {
    let layer = keyed(MemoryJournal::new());
    let script = Script::new([Step::Reset]);
    unknown(script.ask(&layer, order("order-17")).await, GaveUp::Retries);
    script.now([status(401)]);
    unknown(script.ask(&layer, order("order-17")).await, GaveUp::Answer);
    // For a new operation it is an answer.
    answered(script.ask(&layer, order("order-18")).await, 401);
}

#[tokio::test]
async fn what_is_saved_first_stands() {
    let folder = Folder::new();
    let journals: [Arc<dyn KeyJournal>; 2] =
        [Arc::new(MemoryJournal::new()), Arc::new(folder.open())];
    for journal in journals {
        let first = journal
            .begin("a/../b \u{e9}", &key("one two"))
            .await
            .unwrap();
        assert_eq!(first, SavedKey::Fresh);
        let SavedKey::Earlier { key: saved, age } =
            journal.begin("a/../b \u{e9}", &key("2")).await.unwrap()
        else {
            panic!("it was saved")
        };
        assert_eq!(saved, key("one two"));
        assert!(age < Duration::from_secs(600));
        assert_eq!(
            journal.begin("a", &key("3")).await.unwrap(),
            SavedKey::Fresh
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_one_saves_and_the_others_get_its_key() {
    let folder = Folder::new();
    for round in 0..20 {
        let name = format!("order-{round}");
        let calls: Vec<_> = (0..8)
            .map(|n| {
                let (journal, name) = (folder.open(), name.clone());
                tokio::spawn(async move {
                    let fresh = key(&format!("key-{n}"));
                    (journal.begin(&name, &fresh).await.unwrap(), fresh)
                })
            })
            .collect();
        let mut fresh = Vec::new();
        let mut earlier = Vec::new();
        for call in calls {
            match call.await.unwrap() {
                (SavedKey::Fresh, key) => fresh.push(key),
                (SavedKey::Earlier { key, .. }, _) => earlier.push(key),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(fresh.len(), 1);
        assert!(earlier.iter().all(|key| *key == fresh[0]));
    }
    // Nothing but the keys is left.
    assert_eq!(folder.files().len(), 20);
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_an_error_and_no_new_key() {
    let folder = Folder::new();
    let layer = keyed(folder.open());
    let script = Script::new([status(201)]);
    answered(script.ask(&layer, order("order-17")).await, 201);
    let [file] = &folder.files()[..] else {
        panic!("one file")
    };
    for damage in ["", "1 17", "1 x k\n", "2 17 k\n", "1 17 k"] {
        std::fs::write(file, damage).unwrap();
        let told = script.ask(&layer, order("order-17")).await;
        assert!(
            matches!(told, Err(ClientError::Journal(_))),
            "{damage:?}: {told:?}"
        );
    }
    assert_eq!(script.tries(), 1);
}

#[cfg(unix)]
#[tokio::test]
async fn only_the_owner_can_read_a_key() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    folder.open().begin("order-17", &key("k")).await.unwrap();
    let mode = folder.files()[0].metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0);
}

#[tokio::test]
async fn nothing_is_sent_before_the_key_is_saved() {
    #[derive(Debug)]
    struct Full;
    #[async_trait]
    impl KeyJournal for Full {
        async fn begin(&self, _: &str, _: &IdempotencyKey) -> Result<SavedKey, BoxError> {
            Err("the disk is full".into())
        }
        async fn forget(&self, _: &str) -> Result<(), BoxError> {
            Ok(())
        }
    }
    let script = Script::new([status(201)]);
    let told = script.ask(&keyed(Full), order("order-17")).await;
    assert!(matches!(told, Err(ClientError::Journal(_))), "{told:?}");
    assert_eq!(script.tries(), 0);
    // What has no name needs no journal.
    answered(script.ask(&keyed(Full), pay()).await, 201);
}

#[tokio::test(start_paused = true)]
async fn a_key_of_the_applications_own_is_saved_under_the_name() {
    let layer = keyed(MemoryJournal::new());
    let script = Script::new([status(201)]);
    let mut given = order("order-17");
    given.extensions_mut().insert(key("of-the-order"));
    answered(script.ask(&layer, given).await, 201);
    answered(script.ask(&layer, order("order-17")).await, 201);
    assert!(
        script
            .seen()
            .iter()
            .all(|seen| seen.key() == "\"of-the-order\"")
    );
}

#[tokio::test]
async fn a_time_that_is_still_to_come_is_no_age() {
    let folder = Folder::new();
    let journal = folder.open();
    let fresh = key("first");
    assert_eq!(
        journal.begin("order-17", &fresh).await.unwrap(),
        SavedKey::Fresh
    );
    let file = folder.files().remove(0);
    let year_2100 = 4_102_444_800_u64;
    for time in [year_2100, u64::MAX] {
        std::fs::write(&file, format!("1 {time} first\n")).unwrap();
        journal.begin("order-17", &fresh).await.unwrap_err();
    }
    // Two clocks that differ a little are usual.
    let now = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_secs();
    std::fs::write(&file, format!("1 {} first\n", now + 20)).unwrap();
    let expected = SavedKey::Earlier {
        key: fresh.clone(),
        age: Duration::ZERO,
    };
    assert_eq!(journal.begin("order-17", &fresh).await.unwrap(), expected);
}
