//! Connections with TLS, to a server with a certificate of its own.

use std::process::Command;

use redis::{ClientTlsConfig, TlsCertificates};
use tower_idempotency::Completion;

use super::support::{Server, options};
use super::*;

const URL: &str = "TEST_CHILD_URL";

/// Its certificate and key.
fn server(clients: bool) -> (Server, String, String) {
    let names = vec!["localhost".to_owned()];
    let certified = rcgen::generate_simple_self_signed(names).unwrap();
    let (certificate, key) = (certified.cert.pem(), certified.signing_key.serialize_pem());
    let server = Server::with_tls(&certificate, &key, clients);
    (server, certificate, key)
}

fn url(host: &str, server: &Server) -> String {
    format!("rediss://{host}:{}", server.tls_port())
}

async fn is_used(store: &RedisStore) {
    let claim = acquire(store, &request("key")).await;
    let completion = store.complete(&claim, &large_outcome(), None).await;
    assert_eq!(completion.unwrap(), Completion::Recorded);
    let shown = existing(store, &request("key")).await;
    assert_eq!(outcome_of(&shown), &large_outcome());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_nobody_vouches_for_is_refused_and_told_from_a_server_that_is_away() {
    let (server, ..) = server(false);
    for host in ["localhost", "127.0.0.1"] {
        let error = options().connect(&url(host, &server)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Other, "{error:?}");
        assert!(error.to_string().contains("SSL_CERT_FILE"), "{error}");
    }
    let whatever = format!("{}/#insecure", url("localhost", &server));
    let error = options().connect(&whatever).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other, "{error:?}");
    server.kill();
    unavailable(options().connect(&url("localhost", &server)).await);
}

/// In another process, because it reads an environment of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_a_trusted_root_is_taken_for_its_own_host_only() {
    let (server, ..) = server(false);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tls::child", "--ignored", "--nocapture"])
        .env("SSL_CERT_FILE", server.folder().join("server.crt"))
        .env(URL, server.tls_port().to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process that the test above starts"]
async fn child() {
    let port = std::env::var(URL).unwrap();
    let store = options()
        .connect(&format!("rediss://localhost:{port}"))
        .await;
    is_used(&store.unwrap()).await;
    let other_name = format!("rediss://127.0.0.1:{port}");
    let error = options().connect(&other_name).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Other, "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_comes_with_a_connection_of_the_application() {
    let (server, certificate, key) = server(true);
    let url = url("localhost", &server);
    let with = |client_tls| TlsCertificates {
        client_tls,
        root_cert: Some(certificate.clone().into_bytes()),
    };
    let own = ClientTlsConfig {
        client_cert: certificate.clone().into_bytes(),
        client_key: key.into_bytes(),
    };
    let client = redis::Client::build_with_tls(&*url, with(Some(own))).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    is_used(&options().from_connection(connection).await.unwrap()).await;
    let anonymous = redis::Client::build_with_tls(&*url, with(None)).unwrap();
    anonymous
        .get_multiplexed_async_connection()
        .await
        .unwrap_err();
}
