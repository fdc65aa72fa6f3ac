//! Throw-away Redis servers: started, killed, stopped and restarted by the tests, and gone with them.
//!
//! A shell stands between a test and its server. It takes orders on its standard input, and when that
//! ends, however the test process ended, it kills the server and removes its folder.

#![allow(dead_code, reason = "not every test binary needs everything")]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use tower_idempotency::{RedisOptions, RedisStore};

/// One server. Dropping it ends it.
pub struct Server {
    port: u16,
    control: Mutex<Control>,
}

struct Control {
    folder: PathBuf,
    // Only so that it is not a zombie; what ends it is the end of `orders`.
    shell: Child,
    orders: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Server {
    /// A server that keeps everything in memory.
    pub fn start() -> Self {
        Self::start_with(&["--appendonly", "no"])
    }

    /// A server whose acknowledged writes survive its end.
    pub fn durable() -> Self {
        Self::start_with(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    pub fn start_with(options: &[&str]) -> Self {
        Self::start_with_files(options, &[])
    }

    /// A server that takes connections with TLS at [`tls_port`](Self::tls_port) too. With `clients`, it
    /// asks them for a certificate that is signed with its own.
    pub fn with_tls(certificate: &str, key: &str, clients: bool) -> Self {
        let options = [
            "--tls-cert-file",
            "$folder/server.crt",
            "--tls-key-file",
            "$folder/server.key",
            "--tls-ca-cert-file",
            "$folder/server.crt",
            "--tls-auth-clients",
            if clients { "yes" } else { "no" },
            "--tls-port",
            "$tls-port",
        ];
        let files = [("server.crt", certificate), ("server.key", key)];
        Self::start_with_files(&options, &files)
    }

    /// With files in its folder, which options call `$folder`.
    fn start_with_files(options: &[&str], files: &[(&str, &str)]) -> Self {
        let common = ["--save", "", "--protected-mode", "no"];
        let options: Vec<&str> = common.iter().chain(options).copied().collect();
        // Somebody else may take the port between the look and the start.
        for _ in 0..20 {
            let port = free_port();
            let number = port.to_string();
            let place = ["--bind", "127.0.0.1", "--port", &number];
            let tls_port = (port + 10_000).to_string();
            let with_port = |option: &&str| option.replace("$tls-port", &tls_port);
            let own: Vec<String> = options.iter().map(with_port).collect();
            let own = own.iter().map(String::as_str);
            let options: Vec<&str> = place.into_iter().chain(own).collect();
            if let Some(control) = Control::start(&options, files, READY) {
                return Self {
                    port,
                    control: Mutex::new(control),
                };
            }
        }
        panic!("redis-server did not start on any port");
    }

    /// A Sentinel of its own that watches this master and needs nobody's agreement.
    pub fn sentinel_of(master: &Self) -> Self {
        let port = free_port();
        let configuration = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 2000\n",
            master.port
        );
        let options = ["$folder/server.conf", "--sentinel"];
        let files = [("server.conf", &*configuration)];
        let control = Control::start(&options, &files, "+monitor master");
        Self {
            port,
            control: Mutex::new(control.expect("a Sentinel")),
        }
    }

    pub fn replica_of(master: &Self) -> Self {
        let port = master.port.to_string();
        Self::start_with(&["--replicaof", &format!("127.0.0.1 {port}")])
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn tls_port(&self) -> u16 {
        self.port + 10_000
    }

    pub fn folder(&self) -> PathBuf {
        self.control.lock().unwrap().folder.clone()
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// As a power cut would.
    pub fn kill(&self) {
        let mut control = self.control.lock().unwrap();
        control.order("kill");
        control.wait_for(&["gone"]);
    }

    /// Starts it again after a kill, on its port and in its folder.
    pub fn restart(&self) {
        let mut control = self.control.lock().unwrap();
        control.order("start");
        assert!(
            control.wait_for(&[READY]),
            "the server does not start again"
        );
    }

    /// It stays there and says nothing.
    pub fn pause(&self) {
        self.order_and_wait("stop");
    }

    pub fn resume(&self) {
        self.order_and_wait("cont");
    }

    /// An administrator's command.
    pub fn command(&self, words: &[&str]) -> redis::Value {
        self.try_command(words)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub fn try_command(&self, words: &[&str]) -> redis::RedisResult<redis::Value> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
    }

    /// A field of `INFO`.
    pub fn info(&self, section: &str, field: &str) -> Option<String> {
        let reply = self.try_command(&["INFO", section]).ok()?;
        let text: String = redis::from_redis_value(reply).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    }

    pub fn is_master(&self) -> bool {
        self.info("replication", "role").as_deref() == Some("master")
    }

    /// Waits until a field of `INFO` has a value.
    pub fn wait_until(&self, section: &str, field: &str, value: &str) {
        eventually(&format!("{field} to be {value}"), || {
            self.info(section, field).as_deref() == Some(value)
        });
    }

    fn order_and_wait(&self, order: &str) {
        let mut control = self.control.lock().unwrap();
        control.order(order);
        control.wait_for(&["done"]);
    }
}

impl Control {
    fn start(options: &[&str], files: &[(&str, &str)], ready: &str) -> Option<Self> {
        let folder = new_folder();
        let mut shell = Command::new("sh");
        shell.args(["-c", SHELL, "sh"]).arg(&folder);
        shell.arg(program("redis-server", "valkey-server"));
        for (name, content) in files {
            std::fs::write(folder.join(name), content).expect("a file in the new folder");
        }
        let place = folder.to_str().expect("a folder with a name of text");
        shell.args(
            options
                .iter()
                .map(|option| option.replace("$folder", place)),
        );
        shell.arg("--dir").arg(&folder);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.stderr(Stdio::null()).spawn().expect("a shell");
        let orders = shell.stdin.take();
        let output = BufReader::new(shell.stdout.take().expect("its output"));
        let (sender, lines) = channel();
        // Read to its end, or the server would stand still before a full pipe.
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let control = Self {
            folder,
            shell,
            orders,
            lines,
        };
        control.wait_for(&[ready]).then_some(control)
    }

    fn order(&mut self, order: &str) {
        let orders = self.orders.as_mut().expect("the server runs");
        writeln!(orders, "{order}").expect("the shell reads");
    }

    /// Whether one of these is said before the server gives up.
    fn wait_for(&self, said: &[&str]) -> bool {
        loop {
            let Ok(line) = self.lines.recv_timeout(PATIENCE) else {
                return false;
            };
            if said.iter().any(|said| line.contains(said)) {
                return true;
            }
            if line.contains("Failed listening") || line.contains("FATAL") {
                return false;
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.shell.wait();
    }
}

/// Three masters that share the slots, each with as many replicas as were asked for.
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    pub fn start() -> Self {
        Self::with_replicas(0)
    }

    pub fn with_replicas(replicas: usize) -> Self {
        let options = [
            "--cluster-enabled",
            "yes",
            // How soon a master counts as failed.
            "--cluster-node-timeout",
            if replicas > 0 { "1000" } else { "15000" },
        ];
        let count = 3 * (1 + replicas);
        let nodes: Vec<Server> = (0..count).map(|_| Server::start_with(&options)).collect();
        let mut create = Command::new(program("redis-cli", "valkey-cli"));
        create.args(["--cluster", "create", "--cluster-yes"]);
        create.args(nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)));
        create.args(["--cluster-replicas", &replicas.to_string()]);
        let created = create.output().expect("redis-cli can be started");
        let said = String::from_utf8_lossy(&created.stdout);
        assert!(created.status.success(), "no cluster: {said}");
        for node in &nodes {
            eventually("the cluster to be up", || {
                let reply = node.command(&["CLUSTER", "INFO"]);
                let text: String = redis::from_redis_value(reply).unwrap();
                text.contains("cluster_state:ok")
            });
            if node.info("replication", "role").as_deref() == Some("slave") {
                node.wait_until("replication", "master_link_status", "up");
            }
        }
        Self { nodes }
    }

    /// The master of this key's slot.
    pub fn master_of(&self, key: &str) -> &Server {
        let masters = self.nodes.iter().filter(|node| node.is_master());
        let mut holders = masters.filter(|node| node.try_command(&["EXISTS", key]).is_ok());
        holders.next().expect("a master of the slot")
    }

    /// The replicas of a master.
    pub fn replicas_of(&self, master: &Server) -> Vec<&Server> {
        let port = master.port.to_string();
        let follows =
            |node: &&Server| node.info("replication", "master_port").as_deref() == Some(&*port);
        self.nodes.iter().filter(follows).collect()
    }

    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    pub fn url(&self) -> String {
        let nodes: Vec<String> = self
            .nodes
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.port))
            .collect();
        format!("redis+cluster://{}", nodes.join(","))
    }
}

/// The server that the tests of a binary share, or the one that `TEST_REDIS_URL` names.
pub fn shared_url() -> String {
    static SHARED: LazyLock<Server> = LazyLock::new(Server::start);
    std::env::var("TEST_REDIS_URL").unwrap_or_else(|_| SHARED.url())
}

pub fn shared_cluster() -> &'static Cluster {
    static SHARED: LazyLock<Cluster> = LazyLock::new(Cluster::start);
    &SHARED
}

/// Options of a store that sees nobody else's records.
pub fn options() -> RedisOptions {
    RedisOptions::new().key_prefix(format!("test:{:016x}:", rand::random::<u64>()))
}

/// A store of its own on a server that is shared.
pub async fn store_at(url: &str) -> RedisStore {
    options().connect(url).await.expect("a store")
}

/// Waits for what another process does and tells nobody of.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A program in the folder that `TEST_REDIS_BIN` names, or in `PATH`.
fn program(name: &str, other_name: &str) -> PathBuf {
    let chosen = std::env::var_os("TEST_REDIS_BIN").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = chosen
        .into_iter()
        .chain(std::env::split_paths(&path))
        .flat_map(|folder| [folder.join(name), folder.join(other_name)])
        .find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "{name} was not found: run scripts/test, or install it (Debian: apt-get install \
             redis-server; macOS: brew install redis), or let TEST_REDIS_BIN name its folder"
        )
    })
}

fn new_folder() -> PathBuf {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let name = format!(
        "tower-idempotency-redis-{}-{}",
        std::process::id(),
        MADE.fetch_add(1, Ordering::Relaxed)
    );
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).expect("a new folder");
    folder
}

/// A port that is free, and the one above it by which the nodes of a cluster talk.
fn free_port() -> u16 {
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    (0..1_000)
        .map(|_| rand::random_range(20_000..32_000))
        .find(|port| is_free(*port) && is_free(*port + 10_000))
        .expect("a free port")
}

const READY: &str = "Ready to accept connections";
const PATIENCE: Duration = Duration::from_secs(60);
const SHELL: &str = r#"
trap '' INT
folder=$1
shift
start() {
    "$@" &
    pid=$!
}
start "$@"
while read -r order; do
    case $order in
        start) start "$@" ;;
        kill) kill -9 "$pid"; wait "$pid"; echo gone ;;
        stop) kill -STOP "$pid"; echo done ;;
        cont) kill -CONT "$pid"; echo done ;;
    esac
done
kill -9 "$pid"
wait
rm -rf "$folder"
"#;
