//! Inside axum: extractors, nested routers, and the layer among axum's own.
#[path = "support/app.rs"]
mod app;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http::StatusCode;
use serde_json::{Value, json};
use tower::ServiceBuilder;
use tower_idempotency::{
    Attempt, IdempotencyKey, IdempotencyLayer, MemoryStore, MissingKey, ProblemKind, RequestBody,
    RetentionOverride, Scope,
};

use app::{Answer, Ask, ask, pay, send};

type Runs = Arc<AtomicUsize>;

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::new(MemoryStore::new())
}

/// Counts its runs and tells the number.
async fn run(State(runs): State<Runs>) -> String {
    format!("run {}", runs.fetch_add(1, Ordering::SeqCst) + 1)
}

fn to(path: &str) -> Ask {
    app::post(path).key("k")
}

async fn send_to(router: &Router, request: impl Into<http::Request<Body>>) -> Answer {
    send(router, request).await
}

mod extractors {
    use super::*;

    #[tokio::test]
    async fn a_handler_can_extract_its_attempt_and_its_key() {
        async fn handler(attempt: Attempt, key: IdempotencyKey) -> String {
            assert_eq!(attempt.idempotency_key(), key);
            format!("{} {}", key.as_str(), attempt.number())
        }
        let router = Router::new().route("/pay", post(handler)).layer(layer());
        assert_eq!(send_to(&router, pay("\"a b\"")).await.text(), "a b 1");
    }

    #[tokio::test]
    async fn where_a_key_is_optional_so_are_its_extractors() {
        async fn handler(attempt: Option<Attempt>, key: Option<IdempotencyKey>) -> String {
            format!("{} {}", attempt.is_some(), key.is_some())
        }
        let router = Router::new().route("/pay", post(handler)).layer(layer());
        assert_eq!(send_to(&router, pay("k")).await.text(), "true true");
        assert_eq!(
            send_to(&router, app::post("/pay")).await.text(),
            "false false"
        );
    }

    #[tokio::test]
    async fn a_handler_that_needs_a_key_does_not_run_without_the_layer() {
        async fn attempt(_: Attempt) -> &'static str {
            "ran"
        }
        async fn key(_: IdempotencyKey) -> &'static str {
            "ran"
        }
        let router = Router::new()
            .route("/attempt", post(attempt))
            .route("/key", post(key));
        for router in [router.clone(), router.layer(layer())] {
            for path in ["/attempt", "/key"] {
                let answer = send_to(&router, app::post(path)).await;
                assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
                assert_ne!(answer.text(), "ran");
            }
        }
    }

    #[tokio::test]
    async fn extractors_of_the_body_the_path_and_the_query_work_behind_the_layer() {
        async fn handler(
            Path(id): Path<u32>,
            Query(query): Query<Vec<(String, String)>>,
            Json(body): Json<Value>,
        ) -> Json<Value> {
            Json(json!({ "id": id, "query": query, "body": body }))
        }
        let router = Router::new().route("/t/{id}", post(handler)).layer(layer());
        let request = || to("/t/7?a=1").json("{\"amount\":100}");
        let first = send_to(&router, request()).await;
        let expected = json!({ "id": 7, "query": [["a", "1"]], "body": { "amount": 100 } });
        assert_eq!(first.json(), expected);
        send_to(&router, request()).await.assert_replays(&first);
    }

    #[tokio::test]
    async fn a_handlers_word_on_its_response_is_an_extension() {
        async fn handler(State(runs): State<Runs>, body: String) -> Response {
            runs.fetch_add(1, Ordering::SeqCst);
            match body.as_str() {
                "" => {
                    let word = Extension(RetentionOverride::NotExecuted);
                    (StatusCode::BAD_REQUEST, word, "no amount").into_response()
                }
                _ => StatusCode::CREATED.into_response(),
            }
        }
        let runs = Runs::default();
        let router = Router::new()
            .route("/pay", post(handler))
            .layer(layer())
            .with_state(Arc::clone(&runs));
        assert_eq!(send_to(&router, to("/pay")).await.status, 400);
        assert_eq!(send_to(&router, to("/pay").body("100")).await.status, 201);
        assert!(send_to(&router, to("/pay").body("100")).await.is_replay());
        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }
}

mod identity {
    use super::*;

    /// A resource of a tenant, under a layer *inside* the nested router, where axum has cut the
    /// tenant off the path.
    fn tenants(runs: &Runs) -> Router {
        let inner = Router::new()
            .route("/pay", post(run))
            .layer(layer())
            .with_state(Arc::clone(runs));
        Router::new().nest("/t/{tenant}", inner)
    }

    #[tokio::test]
    async fn two_tenants_of_a_nested_router_never_get_each_others_answers() {
        let runs = Runs::default();
        let router = tenants(&runs);
        let first = send_to(&router, to("/t/1/pay")).await;
        assert_eq!(first.text(), "run 1");
        let other = send_to(&router, to("/t/2/pay")).await;
        other.assert_problem(ProblemKind::KeyReused);
        send_to(&router, to("/t/1/pay"))
            .await
            .assert_replays(&first);
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn two_mounts_of_one_router_are_two_resources() {
        let runs = Runs::default();
        let layer = layer();
        let inner = || Router::new().route("/pay", post(run)).layer(layer.clone());
        let router = Router::new()
            .nest("/v1", inner())
            .nest("/v2", Router::new().nest("/deep", inner()))
            .with_state(Arc::clone(&runs));
        assert_eq!(send_to(&router, to("/v1/pay")).await.text(), "run 1");
        let other = send_to(&router, to("/v2/deep/pay")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }

    #[tokio::test]
    async fn a_nested_service_is_told_apart_too() {
        let runs = Runs::default();
        let inner = Router::new()
            .route("/pay", post(run))
            .with_state(Arc::clone(&runs));
        let inner = ServiceBuilder::new().layer(layer()).service(inner);
        let router = Router::new()
            .nest_service("/a", inner.clone())
            .nest_service("/b", inner);
        assert_eq!(send_to(&router, to("/a/pay")).await.text(), "run 1");
        let other = send_to(&router, to("/b/pay")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }

    #[tokio::test]
    async fn a_layer_outside_sees_what_the_client_asked_for_as_well() {
        let runs = Runs::default();
        let inner = Router::new().route("/pay", post(run));
        let router = Router::new()
            .nest("/t/{tenant}", inner)
            .layer(layer())
            .with_state(Arc::clone(&runs));
        let first = send_to(&router, to("/t/1/pay")).await;
        send_to(&router, to("/t/1/pay"))
            .await
            .assert_replays(&first);
        let other = send_to(&router, to("/t/2/pay")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }

    #[tokio::test]
    async fn without_axums_router_the_uri_of_the_request_counts() {
        let service = ServiceBuilder::new()
            .layer(layer())
            .service(app::counted(&Runs::default(), app::paid));
        send(&service, to("/a")).await;
        let other = send(&service, to("/b")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }

    #[tokio::test]
    async fn paths_are_compared_as_they_were_sent() {
        let runs = Runs::default();
        let router = Router::new()
            .fallback(run)
            .layer(layer())
            .with_state(Arc::clone(&runs));
        let first = send_to(&router, to("/a/b")).await;
        for other in [
            "/a/b/",
            "/a%2Fb",
            "/a%2fb",
            "/A/b",
            "/a/./b",
            "/a/c/../b",
            "//a/b",
            "/a//b",
            "/%61/b",
            "/a/b?",
            "/a/b;x=1",
        ] {
            let answer = send_to(&router, to(other)).await;
            answer.assert_problem(ProblemKind::KeyReused);
        }
        send_to(&router, to("/a/b")).await.assert_replays(&first);
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn two_routes_with_one_key_are_a_mismatch() {
        let runs = Runs::default();
        let router = Router::new()
            .route("/t/{id}", post(run))
            .layer(layer())
            .with_state(runs);
        assert_eq!(send_to(&router, to("/t/1")).await.status, 200);
        let other = send_to(&router, to("/t/2")).await;
        other.assert_problem(ProblemKind::KeyReused);
    }
}

mod routing {
    use super::*;

    #[tokio::test]
    async fn a_layer_can_be_required_on_one_route_and_absent_on_another() {
        let required = IdempotencyLayer::builder(MemoryStore::new());
        let required = required.missing_key(MissingKey::Reject).build().unwrap();
        let router = Router::new()
            .route("/pay", post(run).layer(required))
            .route("/log", post(run))
            .with_state(Runs::default());
        let answer = send_to(&router, app::post("/pay")).await;
        answer.assert_problem(ProblemKind::MissingKey);
        assert_eq!(send_to(&router, app::post("/log")).await.text(), "run 1");
        assert!(!send_to(&router, to("/log")).await.is_replay());
    }

    #[tokio::test]
    async fn what_the_router_answers_itself_is_kept_as_the_layer_finds_it() {
        let router = Router::new().route("/pay", get(run)).layer(layer());
        let router = router.with_state(Runs::default());
        for (path, status) in [("/pay", 405), ("/nowhere", 404)] {
            let request = || app::post(path).key(path);
            assert_eq!(send_to(&router, request()).await.status, status);
            let retry = send_to(&router, request()).await;
            assert_eq!((retry.status.as_u16(), retry.is_replay()), (status, true));
        }
    }

    #[tokio::test]
    async fn a_route_layer_does_not_answer_for_routes_that_do_not_exist() {
        let router = Router::new()
            .route("/pay", post(run))
            .route_layer(layer())
            .with_state(Runs::default());
        for _ in 0..2 {
            let answer = send_to(&router, to("/nowhere")).await;
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (404, false));
        }
        let first = send_to(&router, to("/pay")).await;
        send_to(&router, to("/pay")).await.assert_replays(&first);
    }

    #[tokio::test]
    async fn other_methods_of_the_route_pass() {
        let router = Router::new()
            .route("/pay", post(run).get(run))
            .layer(layer())
            .with_state(Runs::default());
        assert_eq!(send_to(&router, to("/pay")).await.text(), "run 1");
        assert_eq!(
            send_to(&router, ask("GET", "/pay").key("k")).await.text(),
            "run 2"
        );
        assert!(send_to(&router, to("/pay")).await.is_replay());
    }
}

mod middleware {
    use super::*;

    #[derive(Clone)]
    struct UserId(String);

    impl fmt::Display for UserId {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&self.0)
        }
    }

    async fn authenticate(mut request: Request, next: Next) -> Response {
        let token = request.headers().get("authorization").cloned();
        match token.as_ref().and_then(|token| token.to_str().ok()) {
            Some(user) if user != "revoked" => {
                let user = UserId(user.to_owned());
                request.extensions_mut().insert(user);
                next.run(request).await
            }
            _ => StatusCode::UNAUTHORIZED.into_response(),
        }
    }

    #[tokio::test]
    async fn authentication_outside_gives_the_scope() {
        let layer = IdempotencyLayer::builder(MemoryStore::new())
            .scope(Scope::extension::<UserId>())
            .build()
            .unwrap();
        let runs = Runs::default();
        // Layers that are added later are further out.
        let router = Router::new()
            .route("/pay", post(run))
            .layer(layer)
            .layer(from_fn(authenticate))
            .with_state(Arc::clone(&runs));
        let by = |user: &str| to("/pay").header("authorization", user);
        let alice = send_to(&router, by("alice")).await;
        let bob = send_to(&router, by("bob")).await;
        assert_eq!((alice.text(), bob.text()), ("run 1", "run 2"));
        send_to(&router, by("alice")).await.assert_replays(&alice);
        assert_eq!(send_to(&router, by("revoked")).await.status, 401);
        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }

    /// axum's `from_fn` takes axum's own body only: one line gives it that.
    fn own_body(request: http::Request<RequestBody<Body>>) -> Request {
        request.map(Body::new)
    }

    #[tokio::test]
    async fn functions_as_middleware_can_stand_inside() {
        async fn stamp(request: Request, next: Next) -> Response {
            let mut response = next.run(request).await;
            response
                .headers_mut()
                .insert("x-stamp", "inner".parse().unwrap());
            response
        }
        let router = Router::new()
            .route("/pay", post(|body: Bytes| async { body }))
            .layer(
                ServiceBuilder::new()
                    .layer(layer())
                    .map_request(own_body)
                    .layer(from_fn(stamp)),
            );
        let request = || to("/pay").body("100 THB");
        let first = send_to(&router, request()).await;
        assert_eq!(
            (first.text(), first.header("x-stamp")),
            ("100 THB", "inner")
        );
        send_to(&router, request()).await.assert_replays(&first);
    }

    #[tokio::test]
    async fn axums_own_limit_on_bodies_is_the_answer_of_the_handler() {
        use axum::extract::DefaultBodyLimit;
        let router = Router::new()
            .route("/pay", post(|body: Bytes| async { body }))
            .layer(DefaultBodyLimit::max(4))
            .layer(layer());
        // Checked by the extractor, inside: the refusal is the handler's and is kept as such.
        let answer = send_to(&router, to("/pay").body("12345")).await;
        assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert!(!answer.headers.contains_key("idempotency-error"));
    }
}
