//! PostgreSQL servers for tests: found on the machine, started in temporary folders on free ports,
//! killed, stopped and started again, and gone when the test program is.
//!
//! A server belongs to a *guardian*: a shell that waits at the end of a pipe whose other end only
//! this program holds. However the program ends, the pipe breaks, and the guardian kills what is
//! left of the server and removes its folder. It runs in a session of its own, so that an interrupt
//! of the terminal does not reach it first.
//!
//! `TEST_POSTGRES_URL` names a server that runs already, reached by TCP as a superuser, for the tests
//! that only need one; two databases named `idempotency_test_…` stay there. Those that kill their
//! server, or count what it does, always start one of their own.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio_postgres::NoTls;
use tokio_postgres::types::Type;
use tower_idempotency::testing::Harness;
use tower_idempotency::{
    ClaimRequest, Claimed, Fingerprint, PostgresOptions, PostgresStore, ScopedKey, Store,
    async_trait,
};

/// One running server, shared by the tests of one program.
pub fn shared() -> &'static Server {
    static SHARED: LazyLock<Server> = LazyLock::new(|| match std::env::var("TEST_POSTGRES_URL") {
        Ok(url) => Server::running(url),
        Err(_) => Server::start(),
    });
    &SHARED
}

/// A PgBouncer before the shared server, with fewer connections to it than a store has.
pub fn bouncer() -> &'static Bouncer {
    static BOUNCER: LazyLock<Bouncer> = LazyLock::new(|| Bouncer::before(shared(), 4));
    &BOUNCER
}

/// A URL of a database of the shared server where transactions have this level unless they name
/// another one.
pub async fn database_with_isolation(level: &str) -> String {
    static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let name = format!("idempotency_test_{}", level.replace(' ', "_"));
    let guard = ONE_AT_A_TIME.lock().await;
    let raw = raw(shared().url()).await;
    // The first test that asks makes it.
    if raw
        .batch_execute(&format!("CREATE DATABASE {name}"))
        .await
        .is_ok()
    {
        let set = format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'");
        raw.batch_execute(&set).await.expect("the level can be set");
    }
    drop(guard);
    let url = shared().url_of(&name);
    let shown = self::raw(&url).await;
    let shown = shown
        .query_one("SHOW default_transaction_isolation", &[])
        .await;
    let shown = shown.expect("the server answers");
    assert_eq!(shown.get::<_, &str>(0), level);
    url
}

/// A server and the folder in which it lives.
pub struct Server {
    url: String,
    own: Option<Own>,
}

struct Own {
    folder: PathBuf,
    port: u16,
    settings: Vec<String>,
    postmaster: Mutex<Option<Child>>,
    // Held so that the guardian goes on waiting.
    _guardian: ChildStdin,
}

impl Server {
    /// A new server without durability: for everything but measurements.
    pub fn start() -> Self {
        Self::start_with(&["fsync=off", "full_page_writes=off"])
    }

    /// A new server with these settings, all others as PostgreSQL ships them.
    pub fn start_with(settings: &[&str]) -> Self {
        Self::start_with_files(settings, &[])
    }

    /// The same, with files in its data folder that settings may name.
    pub fn start_with_files(settings: &[&str], files: &[(&str, &str)]) -> Self {
        let folder = temporary_folder();
        let guardian = guardian(&folder);
        let data = folder.join("data");
        let initdb = as_server(&program("initdb"))
            .arg("--pgdata")
            .arg(&data)
            .args(["--username=postgres", "--auth=trust", "--no-sync"])
            .args(["--encoding=UTF8", "--locale=C"])
            .output()
            .expect("initdb can be started");
        let said = String::from_utf8_lossy(&initdb.stderr);
        assert!(initdb.status.success(), "initdb failed: {said}");
        // One user has to name a password.
        let rules = data.join("pg_hba.conf");
        let rest = fs::read_to_string(&rules).expect("pg_hba.conf");
        let first = "host all with_password 127.0.0.1/32 scram-sha-256\n";
        fs::write(&rules, format!("{first}{rest}")).expect("pg_hba.conf can be written");

        for (name, content) in files {
            let path = data.join(name);
            fs::write(&path, content).expect("the folder can be written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("permissions");
            give_to_server(&path);
        }
        let common = [
            "listen_addresses=127.0.0.1",
            "max_connections=150",
            // What they do by themselves would be counted as what the store does.
            "autovacuum=off",
            "max_wal_senders=0",
            "wal_level=minimal",
        ];
        let settings = common.iter().chain(settings).map(|&s| s.to_owned());
        let own = Own {
            port: 0,
            settings: settings.collect(),
            postmaster: Mutex::new(None),
            _guardian: guardian,
            folder,
        };
        own.begin()
    }

    fn running(url: String) -> Self {
        Self { url, own: None }
    }

    /// A URL of the superuser and the database `postgres`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same with another database.
    pub fn url_of(&self, database: &str) -> String {
        let (user, host, port) = self.parts();
        format!("postgres://{user}@{host}:{port}/{database}")
    }

    /// The same through another port of this machine.
    pub fn url_through(&self, port: u16) -> String {
        let (user, ..) = self.parts();
        format!("postgres://{user}@127.0.0.1:{port}/postgres")
    }

    /// The same by another user.
    pub fn url_by(&self, user: &str, password: &str) -> String {
        let (_, host, port) = self.parts();
        format!("postgres://{user}:{password}@{host}:{port}/postgres")
    }

    /// Where it listens, for a proxy.
    pub fn address(&self) -> (String, u16) {
        let (_, host, port) = self.parts();
        (host, port)
    }

    /// `user` or `user:password`, host and port.
    fn parts(&self) -> (String, String, u16) {
        let config: tokio_postgres::Config = self.url.parse().expect("the URL of the server");
        let host = match config.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            other => panic!("a server that is reached by TCP is needed, not {other:?}"),
        };
        let user = config.get_user().unwrap_or("postgres");
        let user = match config.get_password() {
            Some(password) => format!("{user}:{}", String::from_utf8_lossy(password)),
            None => user.to_owned(),
        };
        (
            user,
            host,
            config.get_ports().first().copied().unwrap_or(5432),
        )
    }

    pub fn folder(&self) -> &Path {
        &self.own().folder
    }

    /// Kills it as a loss of power would, and waits until nothing of it runs.
    pub fn kill(&self) {
        let own = self.own();
        let mut postmaster = own.postmaster.lock().unwrap();
        let mut child = postmaster.take().expect("the server runs");
        let family = family(child.id());
        signal("-KILL", &family);
        child.wait().expect("the server can be waited for");
        wait_until("the server is gone", || signal("-0", &family[1..]) == 0);
    }

    /// Starts it again, after a kill.
    pub fn restart(&self) {
        self.own().run();
    }

    /// Lets it stand still, connections and all, as a machine does that is out of memory or moved.
    pub fn freeze(&self) {
        signal("-STOP", &self.processes());
    }

    pub fn thaw(&self) {
        signal("-CONT", &self.processes());
    }

    /// The server process and its children, for a look at what they use.
    pub fn processes(&self) -> Vec<u32> {
        let postmaster = self.own().postmaster.lock().unwrap();
        family(postmaster.as_ref().expect("the server runs").id())
    }

    fn own(&self) -> &Own {
        let own = self.own.as_ref();
        own.expect("this test needs a server of its own, not that of TEST_POSTGRES_URL")
    }
}

impl Own {
    fn begin(mut self) -> Server {
        // Between asking for a free port and using it somebody else may take it.
        for _ in 0..10 {
            self.port = free_port();
            if self.try_run() {
                let url = format!("postgres://postgres@127.0.0.1:{}/postgres", self.port);
                return Server {
                    url,
                    own: Some(self),
                };
            }
        }
        panic!("the server did not start: {}", self.log());
    }

    fn run(&self) {
        assert!(self.try_run(), "the server did not start: {}", self.log());
    }

    fn try_run(&self) -> bool {
        let log = fs::File::create(self.folder.join("log")).expect("the log");
        let mut command = as_server(&program("postgres"));
        command
            .arg("-D")
            .arg(self.folder.join("data"))
            .arg("-p")
            .arg(self.port.to_string())
            .arg("-k")
            .arg(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        for setting in &self.settings {
            command.arg("-c").arg(setting);
        }
        // Of its own, so that an interrupt of the terminal is left to the guardian.
        command.process_group(0);
        let mut child = command.spawn().expect("postgres can be started");
        fs::write(self.folder.join("pid"), child.id().to_string()).expect("the pid");
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if child.try_wait().expect("the server").is_some() {
                return false;
            }
            if answers(self.port) {
                *self.postmaster.lock().unwrap() = Some(child);
                return true;
            }
            sleep(TICK);
        }
        let _ = child.kill();
        let _ = child.wait();
        false
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The guardian would do it; a program with many servers need not keep them all.
        if let Some(own) = &self.own
            && let Some(mut child) = own.postmaster.lock().unwrap().take()
        {
            signal("-KILL", &family(child.id()));
            let _ = child.wait();
        }
    }
}

/// A PgBouncer in front of a server, in transaction mode.
pub struct Bouncer {
    url: String,
    child: Child,
    _guardian: ChildStdin,
}

impl Bouncer {
    /// With `pool` connections to the server, so that more clients than that change places.
    pub fn before(server: &Server, pool: u32) -> Self {
        let folder = temporary_folder();
        let guardian = guardian(&folder);
        let (user, host, upstream) = server.parts();
        let user = match user.split_once(':') {
            Some((user, password)) => format!("{user} password={password}"),
            None => user,
        };
        let port = free_port();
        let settings = format!(
            "[databases]\n\
             * = host={host} port={upstream} user={user}\n\
             [pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = transaction\n\
             default_pool_size = {pool}\nmax_client_conn = 200\n"
        );
        let file = folder.join("pgbouncer.ini");
        fs::write(&file, settings).expect("the folder can be written");
        give_to_server(&file);
        let log = fs::File::create(folder.join("log")).expect("the log");
        let mut command = as_server(&program("pgbouncer"));
        command
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        let mut child = command.spawn().expect("pgbouncer can be started");
        fs::write(folder.join("pid"), child.id().to_string()).expect("the pid");
        wait_until("pgbouncer answers", || {
            let ended = child.try_wait().expect("pgbouncer");
            let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
            assert!(ended.is_none(), "pgbouncer ended: {log}");
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self {
            url: server.url_through(port),
            child,
            _guardian: guardian,
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A store with a schema of its own, and a way past it.
pub struct Fresh<S = PostgresStore> {
    pub store: S,
    pub schema: String,
    pub raw: tokio_postgres::Client,
    _leftovers: Leftovers,
}

/// Drops something from a server that outlives the tests.
pub struct Leftovers {
    url: String,
    drop: String,
}

impl Fresh {
    /// With the default settings on the shared server.
    pub async fn store() -> Self {
        Self::with(shared().url(), |options| options).await
    }

    /// With these settings, on whatever the URL leads to.
    pub async fn with(
        url: &str,
        settings: impl FnOnce(PostgresOptions) -> PostgresOptions,
    ) -> Self {
        let schema = unused_name();
        let options = settings(PostgresStore::options().schema(&schema));
        let store = options.connect(url).await.expect("the server answers");
        store.migrate().await.expect("the tables can be made");
        let raw = raw(url).await;
        let _leftovers = Leftovers::schema(url, &schema);
        Self {
            store,
            schema,
            raw,
            _leftovers,
        }
    }

    /// The same store behind something.
    pub fn behind<S>(self, wrap: impl FnOnce(PostgresStore) -> S) -> Fresh<S> {
        Fresh {
            store: wrap(self.store),
            schema: self.schema,
            raw: self.raw,
            _leftovers: self._leftovers,
        }
    }
}

impl Fresh {
    /// Inserts a record of this key in a transaction that stays open on [`raw`](Self::raw).
    pub async fn hold_uncommitted(&self, key: &ScopedKey) {
        let request = ClaimRequest::new(key.clone(), Fingerprint::of(&[b"held"]));
        let claimed = self.store.claim(&request).await.unwrap();
        assert!(matches!(claimed, Claimed::Acquired { .. }), "{claimed:?}");
        let table = self.table();
        let saved = format!("CREATE TEMP TABLE saved AS SELECT * FROM {table}");
        self.raw.batch_execute(&saved).await.unwrap();
        assert!(self.store.remove(key).await.unwrap());
        let insert = format!("BEGIN; INSERT INTO {table} SELECT * FROM saved");
        self.raw.batch_execute(&insert).await.unwrap();
    }
}

impl<S> Fresh<S> {
    /// The table of records, for a statement.
    pub fn table(&self) -> String {
        format!("{}.idempotency_keys", self.schema)
    }

    /// So many rows as they are once completed, which expire so much from now.
    pub async fn insert_completed(&self, rows: usize, expires: &str) {
        let insert = format!(
            "INSERT INTO {} (id, namespace, scope, key, state, status, attempt, created_at, \
             lease_until, completed_at, expires_at, retention, fingerprint, owner, claim_sum, \
             outcome, outcome_sum) SELECT sha256(('{expires}' || n)::bytea), 'old', '', n::text, \
             'completed', 200, 1, now(), now(), now(), now() + interval '{expires}', '1 day', \
             sha256('f'), 'owner', 0, decode(repeat('ab', 260), 'hex'), 0 \
             FROM generate_series(1, {rows}) n",
            self.table()
        );
        self.raw.batch_execute(&insert).await.unwrap();
    }
}

impl Leftovers {
    pub fn schema(url: &str, name: &str) -> Self {
        Self::by(url, format!("DROP SCHEMA IF EXISTS \"{name}\" CASCADE"))
    }

    pub fn database(name: &str) -> Self {
        let drop = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
        Self::by(shared().url(), drop)
    }

    pub fn role(name: &str) -> Self {
        Self::by(
            shared().url(),
            format!("DROP OWNED BY {name}; DROP ROLE {name}"),
        )
    }

    fn by(url: &str, drop: String) -> Self {
        let url = url.to_owned();
        Self { url, drop }
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        // What a failed test left may show why.
        if std::env::var_os("TEST_POSTGRES_URL").is_none() || std::thread::panicking() {
            return;
        }
        let (url, drop) = (self.url.clone(), self.drop.clone());
        // A thread of its own, because the one that drops this is inside of a runtime.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(async {
                let _ = raw(&url).await.batch_execute(&drop).await;
            });
        });
        let _ = dropping.join();
    }
}

#[async_trait]
impl<S: Store + Clone> Harness for Fresh<S> {
    type Store = S;

    fn store(&self) -> &S {
        &self.store
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        let micros = i64::try_from(by.as_micros()).expect("it is some hours");
        let by = format!("interval '{micros} microseconds'");
        let statement = format!(
            "UPDATE {} SET created_at = created_at - {by}, lease_until = lease_until - {by}, \
             completed_at = completed_at - {by}, expires_at = expires_at - {by} WHERE id = $1 \
             RETURNING 1",
            self.table()
        );
        let digest = &key.digest()[..];
        let aged = self
            .raw
            .query_typed(&statement, &[(&digest, Type::BYTEA)])
            .await
            .expect("the record can be aged");
        assert_eq!(aged.len(), 1, "no record of {key:?}");
    }
}

/// A name that no other test of this run uses, for a schema.
pub fn unused_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("test_{}_{next}", std::process::id())
}

/// A connection of the superuser, past the store.
pub async fn raw(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls)
        .await
        .expect("the server answers");
    tokio::spawn(connection);
    client
}

/// Looks where programs of PostgreSQL lie.
///
/// # Panics
///
/// If it is nowhere, with what to install. A test that needs a server fails without one.
pub fn program(name: &str) -> PathBuf {
    let set = std::env::var_os("TEST_POSTGRES_BIN").map(PathBuf::from);
    let told = Command::new("pg_config").arg("--bindir").output().ok();
    let told = told.map(|told| PathBuf::from(String::from_utf8_lossy(&told.stdout).trim()));
    let mut packaged: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin"))
        .collect();
    // The newest version first.
    packaged.sort_by_key(|bin| {
        let version = bin.parent().and_then(Path::file_name);
        let version = version.and_then(|name| name.to_str()?.parse::<u32>().ok());
        std::cmp::Reverse(version)
    });
    let path = std::env::var_os("PATH").unwrap_or_default();
    let others = ["/opt/homebrew/bin", "/usr/local/pgsql/bin", "/usr/sbin"];
    set.into_iter()
        .chain(told)
        .chain(packaged)
        .chain(std::env::split_paths(&path))
        .chain(others.map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
        .unwrap_or_else(|| {
            let package = match name {
                "pgbouncer" => "pgbouncer",
                _ => "postgresql",
            };
            panic!(
                "`{name}` was not found. Install it (Debian: apt-get install {package}; macOS: brew \
                 install {package}), or name its folder in TEST_POSTGRES_BIN. scripts/test \
                 installs what is missing."
            )
        })
}

/// PostgreSQL refuses to run as root; then it runs as the user that its package made.
fn as_server(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let user = server_user();
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={user}"))
        .arg(format!("--regid={user}"))
        .arg("--clear-groups")
        .arg("--")
        .arg(program);
    command
}

fn server_user() -> &'static str {
    static USER: LazyLock<&str> = LazyLock::new(|| {
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let known = |name: &str| {
            users
                .lines()
                .any(|line| line.starts_with(&format!("{name}:")))
        };
        match known("postgres") {
            true => "postgres",
            false => "nobody",
        }
    });
    &USER
}

fn is_root() -> bool {
    // The owner of our own temporary folder; there is no safe call that asks for it.
    static ROOT: LazyLock<bool> = LazyLock::new(|| {
        let probe = std::env::temp_dir().join(format!("idempotency-{}", std::process::id()));
        fs::write(&probe, []).expect("the temporary folder can be written");
        let uid = fs::metadata(&probe).map(|probe| probe.uid());
        let _ = fs::remove_file(&probe);
        uid.is_ok_and(|uid| uid == 0)
    });
    *ROOT
}

fn give_to_server(path: &Path) {
    if is_root() {
        let given = Command::new("chown").arg(server_user()).arg(path).status();
        assert!(given.expect("chown").success(), "chown failed");
    }
}

/// Short, because the path of a socket in it may have no more than about a hundred bytes.
fn temporary_folder() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("idem-pg-{}-{next}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).expect("the temporary folder can be written");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("permissions");
    give_to_server(&folder);
    folder
}

/// See the module. The pid file is written again whenever the server starts.
fn guardian(folder: &Path) -> ChildStdin {
    let script = "\
        cat >/dev/null
        pid=$(cat \"$0/pid\")
        # Not somebody else who was given the number since.
        if ps -o args= -p \"$pid\" | grep -qF \"$0\"; then
            children=$(ps -A -o pid= -o ppid= | awk -v parent=\"$pid\" '$2 == parent { print $1 }')
            kill -KILL $pid $children
        fi
        rm -rf \"$0\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    let mut guardian = command.spawn().expect("sh can be started");
    let pipe = guardian.stdin.take().expect("it was asked for");
    // Reaped by whoever inherits it: it outlives this program.
    drop(guardian);
    pipe
}

/// A server process and its children.
fn family(postmaster: u32) -> Vec<u32> {
    let listed = Command::new("ps")
        .args(["-A", "-o", "pid=", "-o", "ppid="])
        .output()
        .expect("ps can be started (Debian: apt-get install procps)");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let number = |text: &str| text.parse::<u32>().ok();
    let children = listed.lines().filter_map(|line| {
        let (child, parent) = line.trim().split_once(' ')?;
        (number(parent.trim())? == postmaster).then(|| number(child))?
    });
    std::iter::once(postmaster).chain(children).collect()
}

/// Sends it to those that are there, and says how many took it.
fn signal(which: &str, processes: &[u32]) -> usize {
    let sent = processes.iter().filter(|process| {
        let mut kill = Command::new("kill");
        kill.arg(which).arg(process.to_string());
        kill.stderr(Stdio::null());
        kill.status().is_ok_and(|status| status.success())
    });
    sent.count()
}

fn free_port() -> u16 {
    let probe = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    probe.local_addr().expect("it has an address").port()
}

/// Whether a server takes connections there: it answers even a request for TLS only then.
fn answers(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
        return false;
    };
    // While it recovers, it answers this and refuses sessions; so begin a session.
    let parameters = b"user\0postgres\0database\0postgres\0\0";
    let length = u32::try_from(8 + parameters.len()).expect("it is short");
    let mut start = length.to_be_bytes().to_vec();
    start.extend_from_slice(&196_608_u32.to_be_bytes());
    start.extend_from_slice(parameters);
    let mut first = [0];
    stream.write_all(&start).is_ok() && stream.read_exact(&mut first).is_ok() && first == *b"R"
}

/// Asks until the answer is yes; for what goes on in a server.
pub async fn wait_for(client: &tokio_postgres::Client, question: &str) {
    let asked = async {
        loop {
            let answer = client.query_one(question, &[]).await.unwrap();
            if answer.get::<_, bool>(0) {
                return;
            }
            tokio::time::sleep(TICK).await;
        }
    };
    let asked = tokio::time::timeout(PATIENCE, asked).await;
    asked.unwrap_or_else(|_| panic!("never true: {question}"));
}

/// Waits for something outside of this program that nobody tells of.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "this did not happen: {what}");
        sleep(TICK);
    }
}

const PATIENCE: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(20);
