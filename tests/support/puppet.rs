//! Starts the example `puppet` as a process of its own, and watches it.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

use super::example::example;
use super::h1::H1;
use super::h2::H2;
use super::message::{Answer, Request};
use super::patience::patient;

/// A running puppet. Dropped, it is killed; nothing of it survives the test.
pub struct Puppet {
    child: Child,
    addr: SocketAddr,
    stderr: Option<JoinHandle<String>>,
}

/// How often a handler began, and reached its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub started: u64,
    pub finished: u64,
}

/// Began and ended this often.
pub const fn ran(times: u64) -> Count {
    Count {
        started: times,
        finished: times,
    }
}

/// Which version of HTTP a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    H1,
    H2,
}

pub const WIRES: [Wire; 2] = [Wire::H1, Wire::H2];

impl Puppet {
    pub fn start(flags: &[&str]) -> Self {
        let mut child = command(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the puppet starts");
        let mut stderr = child.stderr.take().expect("a pipe");
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        stdout.read_line(&mut line).expect("a line of text");
        let addr = line
            .strip_prefix("listening on ")
            .and_then(|addr| addr.strip_suffix('\n'))
            .and_then(|addr| addr.parse().ok());
        let mut puppet = Self {
            child,
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            stderr: Some(stderr),
        };
        puppet.addr = addr.unwrap_or_else(|| panic!("{flags:?}: the first line is {line:?}"));
        puppet
    }

    pub async fn h1(&self) -> H1 {
        H1::connect(self.addr).await
    }

    pub async fn h2(&self) -> H2 {
        H2::connect(self.addr).await
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sends a request on a connection of its own, and reads its answer.
    pub async fn send(&self, wire: Wire, request: &Request) -> Answer {
        match wire {
            Wire::H1 => self.h1().await.send(request).await,
            Wire::H2 => self.h2().await.send(request).await,
        }
    }

    /// Sends a request on a connection of its own, which must end without an answer.
    pub async fn is_not_answered(&self, wire: Wire, request: &Request) {
        let answer = match wire {
            Wire::H1 => {
                let mut connection = self.h1().await;
                connection.write(&super::h1::with_length(request)).await;
                connection.answer_or_end(request).await
            }
            Wire::H2 => self.h2().await.send_or_reset(request).await.ok(),
        };
        assert!(answer.is_none(), "answered: {answer:?}");
    }

    pub async fn count(&self, name: &str) -> Count {
        let request = Request::new("GET", &format!("/count/{name}"));
        let count = self.send(Wire::H1, &request).await.json();
        let number = |member: &str| count[member].as_u64().expect("a count");
        Count {
            started: number("started"),
            finished: number("finished"),
        }
    }

    /// Waits until a handler has begun this often.
    pub async fn until_started(&self, name: &str, times: u64) {
        let started = |count: Count| count.started >= times;
        self.until(name, started).await;
    }

    /// Waits until a handler has reached its end this often.
    pub async fn until_finished(&self, name: &str, times: u64) {
        let finished = |count: Count| count.finished >= times;
        self.until(name, finished).await;
    }

    async fn until(&self, name: &str, condition: impl Fn(Count) -> bool) {
        let polling = async {
            while !condition(self.count(name).await) {
                // Only so as not to take the processor away from the puppet.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        patient("the handler", polling).await;
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        // A shell's own `kill` is there on every system that has signals.
        let kill = format!("kill -TERM {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status();
        assert!(sent.expect("a shell").success(), "{kill}");
    }

    /// Waits until the process has ended; how it did, and what it wrote to standard error.
    pub async fn ended(mut self) -> (ExitStatus, String) {
        let polling = async {
            loop {
                if let Some(status) = self.child.try_wait().expect("a child") {
                    break status;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let status = patient("the end of the puppet", polling).await;
        (status, self.stderr())
    }

    fn stderr(&mut self) -> String {
        let text = self.stderr.take().map(JoinHandle::join);
        text.and_then(Result::ok).unwrap_or_default()
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the puppet wrote:\n{}", self.stderr());
        }
    }
}

/// Runs a puppet that ends by itself.
pub fn run(flags: &[&str]) -> Output {
    command(flags).output().expect("the puppet starts")
}

fn command(flags: &[&str]) -> Command {
    let mut command = Command::new(binary());
    // The last one counts, so that a test's own flags go before.
    FLAGS.with_borrow(|more| command.args(more));
    command.args(flags).stdin(Stdio::null());
    command
}

thread_local! {
    static FLAGS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Runs a test whose puppets all get these flags too. It has to start them on this thread.
#[allow(dead_code, reason = "only where there are durable stores")]
pub fn with_flags(flags: &[String], test: impl FnOnce()) {
    FLAGS.set(flags.to_vec());
    test();
    FLAGS.take();
}

/// Waits for something, within a runtime or without.
#[allow(dead_code, reason = "only where there are durable stores")]
pub fn wait(what: impl Future<Output = ()> + Send) {
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(what);
        });
        waiting.join().expect("what is waited for ends");
    });
}

fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| example("puppet"))
}
