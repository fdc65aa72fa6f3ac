//! This test program again, as a process that is killed in the middle of its work.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use tower_idempotency::{
    Admission, Failure, Idempotency, PostgresStore, PostgresTransaction, Transactional,
};

use crate::claims::{fingerprint, key};
use crate::database::{Either, PostgresTill, Till, at_address, charged};

const ADDRESS: &str = "TOWER_IDEMPOTENCY_CHILD_ADDRESS";
const POINT: &str = "TOWER_IDEMPOTENCY_CHILD_POINT";
/// The point at which the rows are written, in one-commit mode.
pub const IN_ONE_COMMIT: &str = "in one commit";
/// Marks the line that is the child's own, among those of the test runner.
const MARK: &str = "child: ";

/// Charges the key `k` in another process, which is killed when it has come to this point.
pub fn charge_and_die(address: &str, point: &str) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", "child::a_child", "--ignored", "--nocapture"])
        .env(ADDRESS, address)
        .env(POINT, point)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = Killed(child.spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let told = lines.find_map(|line| Some(line.unwrap().split_once(MARK)?.1.to_owned()));
    assert_eq!(told.as_deref(), Some(point));
    child.0.kill().unwrap();
    child.0.wait().unwrap();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by the other tests"]
async fn a_child() {
    let (Ok(address), Ok(point)) = (std::env::var(ADDRESS), std::env::var(POINT)) else {
        return;
    };
    match at_address(&address).await {
        Either::Postgres(store, till) if point == IN_ONE_COMMIT => {
            charge_in_one_commit(store, till).await;
        }
        Either::Postgres(store, till) => charge(store, till, point).await,
        Either::Sqlite(store, till) => charge(store, till, point).await,
    }
    panic!("it was not killed");
}

async fn charge<S: Transactional>(
    store: S,
    till: impl Till<Recording = S::Recording>,
    point: String,
) {
    let idempotency = Idempotency::new(store);
    let admitted = idempotency.admit(&key("k"), fingerprint()).await.unwrap();
    let Admission::First(guard) = admitted else {
        panic!("not the first: {admitted:?}");
    };
    let stop = move |at: &str| {
        if at == point {
            wait_to_be_killed(at);
        }
    };
    let charging = till.charge(&idempotency, guard.attempt(), charged("once"), stop);
    charging.await.unwrap();
}

async fn charge_in_one_commit(store: PostgresStore, till: PostgresTill) {
    let one_commit = store.one_commit(till.pool.clone());
    let idempotency = Idempotency::builder(store).one_commit(one_commit);
    let idempotency = idempotency.build().unwrap();
    let key = key("k");
    let working = idempotency.run(&key, fingerprint(), move |attempt| async move {
        let transaction: PostgresTransaction = attempt.transaction().unwrap();
        transaction.batch_execute(&till.insert()).await.unwrap();
        wait_to_be_killed(IN_ONE_COMMIT);
        Ok::<(), Failure<()>>(())
    });
    working.await.unwrap();
}

fn wait_to_be_killed(at: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{at}").unwrap();
    out.flush().unwrap();
    // Or until whoever started it is gone.
    let _ = std::io::stdin().read_line(&mut String::new());
}
