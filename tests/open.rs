//! A store from a line of configuration, and what is said of lines that name none.

#[cfg(all(feature = "postgres", feature = "testing"))]
#[path = "support/postgres.rs"]
mod postgres;
#[cfg(all(feature = "redis", feature = "testing"))]
#[path = "support/redis.rs"]
mod redis_server;
#[cfg(feature = "sqlite-system")]
#[path = "support/sqlite.rs"]
mod sqlite;

use std::error::Error;

use tower_idempotency::store::{OpenError, open};

#[cfg(feature = "memory")]
#[tokio::test]
async fn memory_is_a_new_store_each_time() {
    use tower_idempotency::{ClaimRequest, Claimed, Fingerprint, IdempotencyKey, Store};

    for url in ["memory:", "memory://", "MEMORY:", " memory:\n"] {
        let store = open(url).await.unwrap();
        assert_eq!(store.properties().name, "memory");
        let key = IdempotencyKey::new("k").unwrap().scoped("http");
        let request = ClaimRequest::new(key, Fingerprint::of(&[]));
        let claimed = store.claim(&request).await.unwrap();
        assert!(matches!(claimed, Claimed::Acquired { .. }), "{url:?}");
    }
}

#[tokio::test]
async fn a_store_that_is_not_in_this_build_names_its_feature() {
    for (url, here, missing) in [
        ("memory:", cfg!(feature = "memory"), "memory"),
        ("sqlite:keys.db", cfg!(feature = "sqlite-system"), "sqlite"),
        (
            "postgres://:secret@localhost/shop",
            cfg!(feature = "postgres"),
            "postgres",
        ),
        (
            "postgresql://:secret@localhost/shop",
            cfg!(feature = "postgres"),
            "postgres",
        ),
        (
            "redis://:secret@localhost",
            cfg!(feature = "redis"),
            "redis",
        ),
        (
            "rediss://:secret@localhost",
            cfg!(feature = "redis"),
            "redis",
        ),
        (
            "redis+cluster://:secret@localhost",
            cfg!(feature = "redis"),
            "redis",
        ),
    ] {
        if here {
            continue;
        }
        let error = refused(url).await;
        let (name, _) = url.split_once(':').unwrap();
        assert!(
            matches!(error, OpenError::MissingFeature { scheme, feature }
                if scheme == name && feature == missing),
            "{url}: {error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains(name) && text.contains(&format!("feature `{missing}`")),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_scheme_that_no_store_has_is_named() {
    for (url, unknown) in [
        ("mysql://:secret@localhost/shop", "mysql"),
        ("postgre://:secret@localhost/shop", "postgre"),
        ("redis2://:secret@localhost", "redis2"),
        ("file:keys.db", "file"),
        ("C:\\keys.db", "C"),
    ] {
        let error = refused(url).await;
        assert!(
            matches!(&error, OpenError::UnknownScheme { scheme } if scheme == unknown),
            "{url}: {error:?}"
        );
        assert!(
            error.to_string().contains(&format!("`{unknown}:`")),
            "{error}"
        );
    }
}

/// A path is one of them: it would make an empty file where a scheme was forgotten.
#[tokio::test]
async fn what_has_no_scheme_is_refused_and_not_shown() {
    for url in [
        "",
        " ",
        "secret",
        "secret.db",
        "/var/lib/secret.db",
        "./secret.db",
        "//:secret@localhost",
        ":secret@localhost",
        "my secret: x",
        "1secret:x",
    ] {
        let error = refused(url).await;
        assert!(matches!(error, OpenError::NoScheme), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn an_address_that_cannot_be_right_is_refused() {
    for (url, name, what) in [
        ("sqlite:", "sqlite", "path"),
        ("sqlite://", "sqlite", "path"),
        ("sqlite::memory:", "sqlite", "memory"),
        ("sqlite://:memory:", "sqlite", "memory"),
        ("sqlite:secret.db?mode=rwc", "sqlite", "options"),
        ("memory:secret", "memory", "nothing"),
        ("memory:///secret", "memory", "nothing"),
        ("postgres:", "postgres", "slashes"),
        ("postgresql:secret", "postgresql", "slashes"),
        ("postgres://", "postgres", "slashes"),
        ("redis:secret", "redis", "slashes"),
        ("rediss:/secret", "rediss", "slashes"),
    ] {
        let error = refused(url).await;
        let OpenError::Address { scheme, problem } = error else {
            panic!("{url}: {error:?}");
        };
        assert_eq!(scheme, name);
        assert!(problem.contains(what), "{url}: {problem}");
    }
}

#[cfg(feature = "sqlite-system")]
#[tokio::test]
async fn a_file_is_made_and_found_again() {
    let folder = sqlite::Folder::new();
    let path = folder.file();
    let path = path.display();
    assert_durable(
        "sqlite",
        &format!("sqlite:{path}"),
        &format!("sqlite://{path}"),
    )
    .await;
}

#[cfg(feature = "sqlite-system")]
#[tokio::test]
async fn a_file_that_cannot_be_opened_is_the_stores_own_error() {
    let folder = sqlite::Folder::new();
    let missing = folder.path().join("missing").join("keys.db");
    let error = refused(&format!("sqlite:{}", missing.display())).await;
    assert!(matches!(error, OpenError::Store(_)), "{error:?}");
}

/// The tables are made when it is opened.
#[cfg(all(feature = "postgres", feature = "testing"))]
#[tokio::test]
async fn a_database_is_migrated_and_found_again() {
    let url = postgres::database_with_isolation("read committed").await;
    let other = url.replacen("postgres://", "postgresql://", 1);
    assert_durable("postgres", &url, &other).await;
}

#[cfg(all(feature = "redis", feature = "testing"))]
#[tokio::test]
async fn a_redis_server_is_found_again() {
    let url = redis_server::shared_url();
    assert_durable("redis", &url, &url).await;
}

#[cfg(all(feature = "postgres", feature = "redis"))]
#[tokio::test]
async fn a_server_that_is_not_there_is_an_error_without_its_password() {
    for url in [
        "postgres://u:secret@127.0.0.1:1/db",
        "redis://u:secret@127.0.0.1:1",
    ] {
        let error = refused(url).await;
        assert!(matches!(error, OpenError::Store(_)), "{error:?}");
    }
}

/// Both URLs lead to one set of records.
#[cfg(any(
    feature = "sqlite-system",
    all(feature = "testing", any(feature = "postgres", feature = "redis"))
))]
async fn assert_durable(name: &str, url: &str, again: &str) {
    use tower_idempotency::{ClaimRequest, Claimed, Fingerprint, IdempotencyKey, Store, probe};

    let store = open(url).await.unwrap();
    assert_eq!(store.properties().name, name);
    assert!(store.properties().durable);
    probe(&store).await.unwrap();
    let key = IdempotencyKey::random().scoped("http");
    let request = ClaimRequest::new(key, Fingerprint::of(&[]));
    let claimed = store.claim(&request).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired { .. }));
    drop(store);

    let store = open(again).await.unwrap();
    let found = store
        .lookup(&request.key)
        .await
        .unwrap()
        .expect("the record");
    assert_eq!(found.owner, request.owner);
    assert!(store.remove(&request.key).await.unwrap());
}

/// No error repeats what may be a password.
async fn refused(url: &str) -> OpenError {
    let error = match open(url).await {
        Ok(store) => panic!("{url} was opened: {store:?}"),
        Err(error) => error,
    };
    let mut text = format!("{error:?}");
    let mut level: Option<&dyn Error> = Some(&error);
    while let Some(error) = level {
        text += &error.to_string();
        level = error.source();
    }
    assert!(!text.contains("secret"), "{url}: {text}");
    error
}
