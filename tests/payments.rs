//! The example `payments`: as a program, and its demo against layers that are set wrongly.

#[path = "../examples/payments/app.rs"]
mod app;
#[path = "../examples/payments/auth.rs"]
mod auth;
#[path = "../examples/payments/demo.rs"]
mod demo;
#[path = "../examples/payments/gateway.rs"]
mod gateway;
#[path = "support/example.rs"]
mod support;
#[path = "../examples/payments/wire.rs"]
mod wire;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tower_idempotency::{
    Disposition, Idempotency, IdempotencyLayer, IdempotencyLayerBuilder, MemoryStore, MissingKey,
    OnAbandoned, RetentionPolicy, Scope, Store,
};

static PAYMENTS: LazyLock<PathBuf> = LazyLock::new(|| support::example("payments"));

fn run(args: &[&str]) -> Output {
    let output = Command::new(&*PAYMENTS).args(args).output();
    output.expect("the example runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the example prints text")
}

#[cfg(feature = "sqlite")]
#[test]
fn with_a_file_the_demo_survives_the_death_of_its_process() {
    let output = run(&["--demo", "--store", "sqlite"]);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let restarted = "201 Created, then 201 Created, replayed, same bytes";
    assert!(printed.contains(restarted), "{printed}");
}

#[test]
fn the_demo_prints_what_is_promised_and_exits_with_0() {
    let output = run(&["--demo"]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}");
    // Without the widths of the columns.
    let lines: Vec<String> = table
        .lines()
        .filter(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        r#"1 alice pays 1000, key "order-1" 201 Created 1"#,
        r#"2 the same again 201 Created, replayed, same bytes 1"#,
        r#"3 the same key, amount 9900 422 key_reused 1"#,
        r#"4 bob pays 1000, key "order-1" 201 Created 2"#,
        r#"5 two at once, key "order-2": the second 409 in_progress, retry after 1 s 2"#,
        r#"6 ... and the first 201 Created 3"#,
        r#"7 key "order-3", the client hangs up half-way nobody there, it goes on 3"#,
        r#"8 the same again, at once 409 in_progress, retry after 1 s 3"#,
        r#"9 the same again, later 201 Created, replayed 4"#,
        r#"10 without a key 400 missing_key 4"#,
        r#"11 key "order-4 without its last quote 400 invalid_key 4"#,
        r#"12 amount 0, key "order-5" 400 invalid_payment 4"#,
        r#"13 amount 1000, the same key 201 Created 5"#,
        r#"14 a card that is declined, key "order-6" 402 card_declined 5"#,
        r#"15 the same again 402 card_declined, replayed, same bytes 5"#,
        r#"16 key "order-7", the service panics half-way connection closed, no answer 6"#,
        r#"17 the same again 409 outcome_unknown, retry after 30 s 6"#,
    ];
    assert_eq!(lines, expected);
    assert!(table.ends_with("\nEvery line is what was promised.\n"));
    let stderr = text(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("as planned"), "{stderr}");
}

#[test]
fn bad_flags_are_one_line_and_exit_code_2() {
    for (args, says) in [
        (&["--demmo"][..], "--demmo"),
        (&["demo"], "demo"),
        (&["--demo=yes"], "--demo=yes"),
        (&["--addr"], "--addr needs a value"),
        (&["--addr", "--demo"], "--addr needs a value"),
        (&["--addr", "localhost"], "localhost"),
        (&["--addr=127.0.0.1:99999"], "127.0.0.1:99999"),
        (&["--demo", "--addr", "127.0.0.1:0"], "leave out --addr"),
        (&["--store"], "--store needs a value"),
        (&["--store", "postgres"], "--store postgres needs --url"),
        (
            &["--store=redis", "--url=sqlite:x"],
            "--url is not one of redis",
        ),
        (&["--url", "keys.db"], "leave out --url"),
        (&["--store=paper"], "paper"),
    ] {
        let output = run(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
    }
}

#[test]
fn help_names_every_flag() {
    let output = run(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    for flag in ["--demo", "--addr", "--store"] {
        assert!(text(&output.stdout).contains(flag), "{flag}");
    }
}

/// A payment that is being made is answered although the service was told to stop.
#[cfg(unix)]
#[tokio::test]
async fn sigterm_lets_the_payment_end_and_exits_with_0() {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

    let mut service = tokio::process::Command::new(&*PAYMENTS)
        .args(["--addr", "127.0.0.1:0", "--store", "memory"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("the example runs");
    let mut stdout = BufReader::new(service.stdout.take().expect("a pipe"));
    let mut line = String::new();
    stdout.read_line(&mut line).await.expect("a first line");
    let addr = line
        .trim()
        .strip_prefix("listening on ")
        .expect("an address");
    let addr = addr.parse().expect("an address");

    let request = wire::Request {
        token: "alice-token",
        key: Some("\"k\"".into()),
        body: r#"{"amount":1,"currency":"EUR","card":"visa"}"#.to_owned(),
    };
    // The refusal of one says that the other one is being made.
    let mut one = Box::pin(wire::exchange(addr, &request));
    let mut two = Box::pin(wire::exchange(addr, &request));
    let (refused, paying) = tokio::select! {
        answer = &mut one => (answer, two),
        answer = &mut two => (answer, one),
    };
    let refused = refused.expect("an answer").expect("an answer");
    assert_eq!(refused.header("idempotency-error"), Some("in_progress"));
    let pid = service.id().expect("it runs").to_string();
    let told = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(told.expect("kill runs").success());

    let answer = paying.await.expect("an answer").expect("an answer");
    assert_eq!(answer.status, 201);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).await.expect("text");
    assert!(
        rest.ends_with("stopped; every attempt has ended\n"),
        "{rest}"
    );
    assert!(service.wait().await.expect("it ends").success());
}

type Builder = IdempotencyLayerBuilder<Arc<dyn Store>>;

/// As in the example, over an engine that may be set otherwise.
fn builder(on_abandoned: OnAbandoned) -> Builder {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let idempotency = Idempotency::builder(store)
        .secret(*b"sixteen bytes, or more")
        .on_abandoned(on_abandoned)
        .build()
        .expect("settings that can work");
    IdempotencyLayer::builder(idempotency)
        .scope(Scope::extension::<auth::Account>())
        .missing_key(MissingKey::Reject)
}

/// The numbers of the lines that are not what was promised.
async fn broken_lines(builder: Builder) -> Vec<usize> {
    let layer = builder.build().expect("settings that can work");
    let gateway = gateway::Gateway::new(Duration::ZERO);
    let mut table = Vec::new();
    let report = demo::play(layer, gateway, &mut table).await;
    let report = report.expect("the demo plays to its end");
    println!("{}", text(&table));
    for line in report.broken() {
        println!("{} instead of {}", line.happened(), line.promised());
    }
    report.broken().map(|line| line.number).collect()
}

#[tokio::test]
async fn the_demo_finds_no_fault_with_the_layer_of_the_example() {
    let layer = app::layer(Arc::new(MemoryStore::new())).expect("settings that can work");
    let gateway = gateway::Gateway::new(Duration::ZERO);
    let report = demo::play(layer, gateway, &mut Vec::new()).await;
    assert_eq!(report.expect("it plays").broken().count(), 0);
    let broken = broken_lines(builder(OnAbandoned::Hold)).await;
    assert!(broken.is_empty(), "{broken:?}");
}

#[tokio::test]
async fn the_demo_finds_keys_that_customers_share() {
    let shared = builder(OnAbandoned::Hold).scope(Scope::everybody());
    // Bob gets Alice's payment, and from there on there is one charge too few.
    assert_eq!(broken_lines(shared).await.first(), Some(&4));
}

#[tokio::test]
async fn the_demo_finds_payments_without_a_key() {
    let optional = builder(OnAbandoned::Hold).missing_key(MissingKey::PassThrough);
    assert_eq!(broken_lines(optional).await, [10]);
}

#[tokio::test]
async fn the_demo_finds_results_that_are_not_kept() {
    let forgetful = RetentionPolicy::from_fn("nothing", |_| Disposition::Release);
    let forgetful = builder(OnAbandoned::Hold).retention(forgetful);
    // Charged twice, and from there on there is one charge too many.
    assert_eq!(broken_lines(forgetful).await.first(), Some(&2));
}

#[tokio::test]
async fn the_demo_finds_payments_that_are_run_again_after_a_panic() {
    assert_eq!(broken_lines(builder(OnAbandoned::Rerun)).await, [17]);
}
