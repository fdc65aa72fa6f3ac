//! What a client sees of a guarded service.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

#[tokio::test]
async fn the_second_request_gets_the_first_answer() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let app = Router::new()
        .route(
            "/pay",
            post(move |body: String| async move {
                let run = counted.fetch_add(1, Ordering::SeqCst);
                (
                    StatusCode::CREATED,
                    [("location", "/1")],
                    format!("{run} {body}"),
                )
            }),
        )
        .layer(IdempotencyLayer::new(MemoryStore::new()));
    for replayed in [false, true] {
        let request = Request::post("/pay")
            .header("idempotency-key", "abc")
            .body(Body::from("hello"))
            .unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(
            response.headers().contains_key("idempotency-replayed"),
            replayed
        );
        assert_eq!(response.headers()["location"], "/1");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "0 hello");
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
