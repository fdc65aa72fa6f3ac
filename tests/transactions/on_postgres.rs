//! What is PostgreSQL's own: isolation levels, pools, poolers, and replies that are lost.

use std::time::Duration;

use axum::response::IntoResponse;
use http::StatusCode;
use tower_idempotency::{
    Admission, AttemptGuard, Idempotency, IdempotencyLayer, PostgresStore, RecordingError, Store,
};

use crate::app::{App, Call, pay};
use crate::claims::{LEASE, fingerprint, key};
use crate::database::{Database, Postgres, PostgresTill, Till, charged};
use crate::postgres::{bouncer, database_with_isolation, shared};
use crate::proxy::{Mode, Proxy};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_a_strict_isolation_level_a_renewal_in_between_is_a_conflict() {
    for level in ["repeatable read", "serializable"] {
        let url = database_with_isolation(level).await;
        let database = Postgres::at(&url).await;
        let (idempotency, guard) = admitted(database.store()).await;
        let till = PostgresTill::new(&url, &database.0.schema, 1);
        let recording = idempotency
            .recording(guard.attempt(), &charged("1"))
            .unwrap();
        let mut client = till.pool.get().await.unwrap();
        let transaction = client.transaction().await.unwrap();
        transaction.batch_execute(&till.insert()).await.unwrap();
        let held = database.store().lookup(&key("k")).await.unwrap().unwrap();
        let claim = tower_idempotency::Claim::new(key("k"), held.owner, held.attempt);
        let _ = database.store().renew(&claim, LEASE).await.unwrap();
        let error = recording.complete_in(&transaction).await.unwrap_err();
        assert!(matches!(error, RecordingError::Conflict(_)), "{error:?}");
        drop(transaction);
        drop(client);
        // The whole transaction again, on the only connection of the pool.
        till.charge(&idempotency, guard.attempt(), charged("1"), |_| {})
            .await
            .unwrap();
        assert_eq!(database.charges().await, 1, "{level}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_works_behind_a_pooler_in_transaction_mode() {
    let database = Postgres::at(bouncer().url()).await;
    let (idempotency, guard) = admitted(database.store()).await;
    let till = PostgresTill::new(bouncer().url(), &database.0.schema, 2);
    let charging = till.charge(&idempotency, guard.attempt(), charged("1"), |_| {});
    charging.await.unwrap();
    assert_eq!(database.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_handler_leaves_the_connection_clean() {
    let database = Postgres::new().await;
    let till = PostgresTill::new(shared().url(), &database.0.schema, 1);
    let (idempotency, guard) = admitted(database.store()).await;
    {
        let outcome = charged("1");
        let recording = idempotency.recording(guard.attempt(), &outcome).unwrap();
        let mut client = till.pool.get().await.unwrap();
        let transaction = client.transaction().await.unwrap();
        transaction.batch_execute(&till.insert()).await.unwrap();
        recording.complete_in(&transaction).await.unwrap();
    }
    let client = till.pool.get().await.unwrap();
    let own = "SELECT pg_current_xact_id_if_assigned() IS NULL";
    let clean: bool = client.query_one(own, &[]).await.unwrap().get(0);
    assert!(clean, "the transaction is still open");
    drop(client);
    assert_eq!(database.charges().await, 0);
    // And the attempt still has its claim.
    let charging = till.charge(&idempotency, guard.attempt(), charged("1"), |_| {});
    charging.await.unwrap();
    assert_eq!(database.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_reply_is_lost_answers_what_stands() {
    let database = Postgres::new().await;
    let proxy = Proxy::before(shared().address().1).await;
    let url = shared().url_through(proxy.port());
    let till = PostgresTill::new(&url, &database.0.schema, 1);
    let layer = IdempotencyLayer::new(database.store().clone());
    let idempotency = layer.idempotency().clone();
    let proxy = std::sync::Arc::new(proxy);
    let app = App::behind(&layer, move |call: Call| {
        let (till, idempotency) = (till.clone(), idempotency.clone());
        let proxy = std::sync::Arc::clone(&proxy);
        async move {
            let mut client = till.pool.get().await.unwrap();
            let transaction = client.transaction().await.unwrap();
            transaction.batch_execute(&till.insert()).await.unwrap();
            let attempt = call.attempt().unwrap();
            let recording = idempotency.recording(attempt, &charged("paid")).unwrap();
            recording.complete_in(&transaction).await.unwrap();
            proxy.set(Mode::CutOneReply);
            // It knows nothing now, so it says that it failed.
            transaction.commit().await.unwrap_err();
            StatusCode::INTERNAL_SERVER_ERROR
        }
    });
    for _ in 0..2 {
        let answer = app.send(pay("k")).await;
        assert_eq!(
            (answer.status, answer.text()),
            (StatusCode::CREATED, "paid")
        );
    }
    assert_eq!((app.runs(), database.charges().await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retention_of_its_own_replaces_that_of_the_claim() {
    let database = Postgres::new().await;
    let (idempotency, guard) = admitted(database.store()).await;
    let till = PostgresTill::new(shared().url(), &database.0.schema, 1);
    let recording = idempotency.recording(guard.attempt(), &charged("1"));
    let recording = recording.unwrap().retention(Duration::ZERO);
    let mut client = till.pool.get().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    recording.complete_in(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    // Over at once.
    assert_eq!(database.store().lookup(&key("k")).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_rolls_back_and_says_so_frees_the_key() {
    let database = Postgres::new().await;
    let till = PostgresTill::new(shared().url(), &database.0.schema, 1);
    let layer = IdempotencyLayer::new(database.store().clone());
    let idempotency = layer.idempotency().clone();
    let app = App::behind(&layer, move |call: Call| {
        let (till, idempotency) = (till.clone(), idempotency.clone());
        async move {
            let mut client = till.pool.get().await.unwrap();
            let transaction = client.transaction().await.unwrap();
            transaction.batch_execute(&till.insert()).await.unwrap();
            let attempt = call.attempt().unwrap();
            let recording = idempotency.recording(attempt, &charged("paid")).unwrap();
            recording.complete_in(&transaction).await.unwrap();
            if call.run == 1 {
                transaction.rollback().await.unwrap();
                return StatusCode::SERVICE_UNAVAILABLE.into_response();
            }
            transaction.commit().await.unwrap();
            charged("paid").into_response()
        }
    });
    let undone = app.send(pay("k")).await;
    assert_eq!(undone.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(database.charges().await, 0);
    assert_eq!(app.send(pay("k")).await.text(), "paid");
    assert_eq!(database.charges().await, 1);
}

async fn admitted(store: &PostgresStore) -> (Idempotency<PostgresStore>, AttemptGuard) {
    let idempotency = Idempotency::new(store.clone());
    match idempotency.admit(&key("k"), fingerprint()).await.unwrap() {
        Admission::First(guard) => (idempotency, guard),
        other => panic!("not the first: {other:?}"),
    }
}
