//! The ledger of effects: the other system, which knows the truth. A database of its own, so that no
//! fault of the store touches it; every append is durable before it is answered.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

/// How the ledger takes what handlers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// It takes everything but what a reconciler has ruled out.
    ByReconciler,
    /// Attempts announce themselves; it refuses those that are older than the newest it saw.
    ByAttempt,
    /// It takes everything.
    None,
}

/// One effect: money moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub key: String,
    pub attempt: u32,
    /// What the handler answers about it.
    pub body: String,
}

/// What a reconciler found out about an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruling {
    pub key: String,
    pub attempt: u32,
    pub happened: bool,
}

/// A newer attempt is known, or this one was ruled out: it must not act.
#[derive(Debug, PartialEq, Eq)]
pub struct Stale;

#[derive(Clone)]
pub struct Ledger(Arc<Mutex<Connection>>);

impl Ledger {
    pub fn open(path: &Path) -> Self {
        let connection = Connection::open(path).expect("the ledger");
        // A process that is stopped within a transaction keeps the others waiting.
        let patience = Duration::from_secs(60);
        connection.busy_timeout(patience).expect("a setting");
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL;
                 PRAGMA synchronous = FULL;
                 CREATE TABLE IF NOT EXISTS effects (
                     key TEXT NOT NULL, attempt INTEGER NOT NULL, body TEXT NOT NULL
                 );
                 CREATE INDEX IF NOT EXISTS effects_of_key ON effects (key);
                 CREATE TABLE IF NOT EXISTS fences (key TEXT PRIMARY KEY, newest INTEGER NOT NULL);
                 CREATE TABLE IF NOT EXISTS rulings (
                     key TEXT NOT NULL, attempt INTEGER NOT NULL, happened INTEGER NOT NULL
                 );",
            )
            .expect("its tables");
        Self(Arc::new(Mutex::new(connection)))
    }

    /// An attempt announces itself; what was done already, if anything. From here on older attempts
    /// are stale.
    pub async fn begin(&self, key: &str, attempt: u32) -> Result<Option<String>, Stale> {
        let key = key.to_owned();
        self.transaction(move |tables| {
            if newest(tables, &key) > attempt {
                return Err(Stale);
            }
            fence(tables, &key, attempt);
            Ok(effect_until(tables, &key, attempt))
        })
        .await
    }

    /// The effect. Nothing here looks whether there is one already.
    pub async fn append(&self, effect: Effect, fencing: Fencing) -> Result<(), Stale> {
        self.transaction(move |tables| {
            let fenced = fencing != Fencing::None;
            if fenced && newest(tables, &effect.key) > effect.attempt {
                return Err(Stale);
            }
            let insert = "INSERT INTO effects (key, attempt, body) VALUES (?1, ?2, ?3)";
            let Effect { key, attempt, body } = effect;
            let inserted = tables.execute(insert, params![key, attempt, body]);
            inserted.expect("an effect is appended");
            Ok(())
        })
        .await
    }

    /// Whether the effect happened by this attempt or by one before it. If it did not, it no longer
    /// can. (A later attempt may have come since; that one is not asked about.)
    pub async fn reconcile(&self, key: &str, attempt: u32) -> Option<String> {
        let key = key.to_owned();
        self.transaction(move |tables| {
            let effect = effect_until(tables, &key, attempt);
            if effect.is_none() {
                fence(tables, &key, attempt + 1);
            }
            let insert = "INSERT INTO rulings (key, attempt, happened) VALUES (?1, ?2, ?3)";
            let ruling = params![key, attempt, effect.is_some()];
            tables.execute(insert, ruling).expect("a ruling");
            effect
        })
        .await
    }

    pub fn effects(&self) -> Vec<Effect> {
        let connection = self.0.lock().unwrap();
        let mut all = connection
            .prepare("SELECT key, attempt, body FROM effects ORDER BY rowid")
            .expect("a statement");
        let rows = all.query_map([], |row| {
            Ok(Effect {
                key: row.get(0)?,
                attempt: row.get(1)?,
                body: row.get(2)?,
            })
        });
        rows.expect("rows").map(|row| row.expect("a row")).collect()
    }

    pub fn rulings(&self) -> Vec<Ruling> {
        let connection = self.0.lock().unwrap();
        let mut all = connection
            .prepare("SELECT key, attempt, happened FROM rulings ORDER BY rowid")
            .expect("a statement");
        let rows = all.query_map([], |row| {
            Ok(Ruling {
                key: row.get(0)?,
                attempt: row.get(1)?,
                happened: row.get(2)?,
            })
        });
        rows.expect("rows").map(|row| row.expect("a row")).collect()
    }

    async fn transaction<T: Send + 'static>(
        &self,
        body: impl FnOnce(&Transaction<'_>) -> T + Send + 'static,
    ) -> T {
        let ledger = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || {
            let mut connection = ledger.lock().unwrap();
            let immediate = TransactionBehavior::Immediate;
            let transaction = connection.transaction_with_behavior(immediate);
            let transaction = transaction.expect("the ledger's lock");
            let result = body(&transaction);
            transaction.commit().expect("the ledger commits");
            result
        });
        done.await.expect("the ledger works")
    }
}

fn newest(tables: &Transaction<'_>, key: &str) -> u32 {
    let select = "SELECT newest FROM fences WHERE key = ?1";
    let found = tables.query_row(select, [key], |row| row.get(0)).optional();
    found.expect("a fence").unwrap_or(0)
}

fn fence(tables: &Transaction<'_>, key: &str, newest: u32) {
    let set = "INSERT INTO fences (key, newest) VALUES (?1, ?2)
               ON CONFLICT (key) DO UPDATE SET newest = max(newest, excluded.newest)";
    tables.execute(set, params![key, newest]).expect("a fence");
}

fn effect_until(tables: &Transaction<'_>, key: &str, attempt: u32) -> Option<String> {
    let select = "SELECT body FROM effects WHERE key = ?1 AND attempt <= ?2 ORDER BY rowid LIMIT 1";
    let found = tables
        .query_row(select, params![key, attempt], |row| row.get(0))
        .optional();
    found.expect("an effect")
}
