//! What is found when a store connects, and what is said of it.

use std::error::Error;
use std::sync::{Arc, Mutex};

use redis::aio::ConnectionManager;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::support::{Server, options, shared_cluster, shared_url};
use super::*;

/// Everything that a log could show of an error.
fn told(error: &StoreError) -> String {
    let mut told = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(error) = source {
        told += &format!(" {error} {error:?}");
        source = error.source();
    }
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_would_evict_is_refused_unless_a_warning_is_enough() {
    let server = Server::start_with(&["--maxmemory-policy", "allkeys-lru"]);
    let error = options().connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(told(&error).contains("allkeys-lru"), "{error}");
    assert!(told(&error).contains("noeviction"), "{error}");

    let warnings = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&warnings);
    let options = options().on_eviction(move |text| heard.lock().unwrap().push(text.to_owned()));
    let store = options.connect(&server.url()).await.unwrap();
    let _ = acquire(&store, &request("key")).await;
    let warnings = warnings.lock().unwrap();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("allkeys-lru"), "{warnings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_too_old_is_refused_with_what_to_do() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = client.read(&mut bytes).await {
                    for command in String::from_utf8_lossy(&bytes[..read]).split('*').skip(1) {
                        let reply = match command.contains("\r\nINFO\r\n") {
                            true => "$22\r\nredis_version:6.2.14\r\n\r\n",
                            false => "+OK\r\n",
                        };
                        client.write_all(reply.as_bytes()).await.unwrap();
                    }
                }
            });
        }
    });
    let error = options().connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    let told = told(&error);
    assert!(
        told.contains("6.2.14") && told.contains("7.0 or later"),
        "{told}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_evict_is_not_warned_of() {
    let options = options().on_eviction(|text| panic!("{text}"));
    options.connect(&shared_url()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_told_without_the_password() {
    let server = Server::start_with(&["--requirepass", "the-right-one"]);
    let port = server.port();
    for url in [
        format!("redis://:not-this-secret@127.0.0.1:{port}"),
        format!("redis://127.0.0.1:{port}"),
    ] {
        let error = options().connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Other, "{error}");
        assert!(error.to_string().contains("password"), "{error}");
        assert!(
            !told(&error).contains("not-this-secret"),
            "{}",
            told(&error)
        );
    }
    let url = format!("redis://:the-right-one@127.0.0.1:{port}");
    let store = options().connect(&url).await.unwrap();
    assert!(!format!("{store:?}").contains("the-right-one"), "{store:?}");
    let _ = acquire(&store, &request("key")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_unavailable() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    for url in [
        format!("redis://127.0.0.1:{port}"),
        format!("redis+sentinel://127.0.0.1:{port}/main"),
        format!("redis+cluster://127.0.0.1:{port}"),
    ] {
        unavailable(options().connect(&url).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_a_cluster_is_not_taken_for_a_server_of_its_own() {
    let node = &shared_cluster().nodes()[0];
    let error = options().connect(&node.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(error.to_string().contains("redis+cluster"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not_do_it_is_told_what_to_allow() {
    let server = Server::start();
    server.command(&["ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-set"]);
    let url = format!("redis://weak:pw@127.0.0.1:{}", server.port());
    let store = options().connect(&url).await.unwrap();
    let error = store.claim(&request("key")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other);
    assert!(error.to_string().contains("allow"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_option_that_cannot_work_is_refused() {
    let braces = options().key_prefix("{all}");
    let error = braces.connect(&shared_url()).await.unwrap_err();
    assert!(error.to_string().contains("key_prefix"), "{error}");
    let client = redis::Client::open(shared_url()).unwrap();
    let manager = ConnectionManager::new(client).await.unwrap();
    let error = options()
        .replicas(1)
        .from_connection(manager)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("replicas"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_the_application_are_used_as_they_are() {
    let client = redis::Client::open(shared_url()).unwrap();
    let manager = ConnectionManager::new(client.clone()).await.unwrap();
    let plain = client.get_multiplexed_async_connection().await.unwrap();
    let nodes: Vec<String> = shared_cluster().nodes().iter().map(Server::url).collect();
    let cluster = redis::cluster::ClusterClient::new(nodes).unwrap();
    let cluster = cluster.get_async_connection().await.unwrap();
    for store in [
        options().from_connection(manager).await.unwrap(),
        options().from_connection(plain).await.unwrap(),
        options().from_connection(cluster).await.unwrap(),
    ] {
        let claim = acquire(&store, &request("key")).await;
        let completion = store
            .complete(&claim, &outcome(b"paid"), None)
            .await
            .unwrap();
        assert_eq!(completion, tower_idempotency::Completion::Recorded);
        existing(&store, &request("key")).await;
    }
}
