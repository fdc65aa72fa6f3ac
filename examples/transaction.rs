//! A handler's own row and its answer in one commit, on an SQLite file.
//!
//! ```text
//! cargo run --example transaction --features sqlite,axum
//! ```
//!
//! The handler writes its row, and beside it what it is going to answer, in the same transaction. A
//! crash leaves both or neither, so that a retry either gets the answer or charges for the first time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use rusqlite::{Connection, TransactionBehavior};
use tower::ServiceExt;
use tower_idempotency::{Attempt, Idempotency, IdempotencyLayer, Outcome, Scope, SqliteStore};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone)]
struct Shop {
    file: PathBuf,
    /// A clone of the layer's own: it knows how the store keeps outcomes.
    idempotency: Idempotency<SqliteStore>,
    is_unlucky: Arc<AtomicBool>,
}

impl Shop {
    fn charge(&self, attempt: &Attempt, amount: i64) -> Result<Outcome, BoxError> {
        let mut connection = Connection::open(&self.file)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute("INSERT INTO charges (amount) VALUES (?1)", [amount])?;
        let text = format!("charge {} of {amount}", transaction.last_insert_rowid());
        let none = HeaderMap::new();
        let answer = Outcome::response(StatusCode::CREATED, &none, &[text.as_bytes()], None);

        // The last statement. If the claim was lost it fails, and with it the transaction.
        let recording = self.idempotency.recording(attempt, &answer)?;
        recording.complete_in(&transaction)?;
        if self.is_unlucky.swap(false, Ordering::Relaxed) {
            return Err("the process could have died here".into());
        }
        transaction.commit()?;
        Ok(answer)
    }

    fn charges(&self) -> Result<i64, BoxError> {
        let connection = Connection::open(&self.file)?;
        Ok(connection.query_row("SELECT count(*) FROM charges", [], |row| row.get(0))?)
    }
}

/// Answers with what was recorded, so that the first answer and a replay are the same.
async fn charge(
    State(shop): State<Shop>,
    attempt: Attempt,
    amount: String,
) -> Result<Outcome, StatusCode> {
    let amount = amount.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
    // Statements block.
    let charging = tokio::task::spawn_blocking(move || shop.charge(&attempt, amount)).await;
    match charging {
        Ok(Ok(answer)) => Ok(answer),
        // Whatever it was, the transaction is rolled back. A 503 frees the key, unless an outcome
        // stands after all: then the layer sends that one.
        Ok(Err(_)) | Err(_) => Err(StatusCode::SERVICE_UNAVAILABLE),
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let folder = std::env::temp_dir().join(format!("transaction-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let played = play(folder.join("shop.db")).await;
    std::fs::remove_dir_all(&folder)?;
    played
}

async fn play(file: PathBuf) -> Result<(), BoxError> {
    let layer = IdempotencyLayer::builder(SqliteStore::open(&file)?)
        .scope(Scope::everybody())
        .build()?;
    let table = "CREATE TABLE charges (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL)";
    Connection::open(&file)?.execute_batch(table)?;
    let shop = Shop {
        file,
        idempotency: layer.idempotency().clone(),
        is_unlucky: Arc::default(),
    };
    let app = Router::new().route("/charges", post(charge)).layer(layer);
    let app = app.with_state(shop.clone());

    for (what, key, is_unlucky) in [
        ("charge 1000", "order-1", false),
        ("the same again", "order-1", false),
        ("it fails before its commit", "order-2", true),
        ("the same again", "order-2", false),
    ] {
        shop.is_unlucky.store(is_unlucky, Ordering::Relaxed);
        let request = Request::post("/charges").header("idempotency-key", key);
        let answer = app
            .clone()
            .oneshot(request.body(Body::from("1000"))?)
            .await?;
        let replayed = match answer.headers().contains_key("idempotency-replayed") {
            true => ", replayed",
            false => "",
        };
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&body);
        let charges = shop.charges()?;
        println!("{key}, {what}: {status} {text}{replayed}; {charges} in the table");
    }
    Ok(())
}
