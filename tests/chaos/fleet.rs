//! The processes of the service, and what is done to them.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{sleep, timeout};

use super::child::{LEDGER, STORE, URL, VARIANT, Variant};
use super::plan::{Kind, PROCESSES, ProcessFault, Step};
use super::points::{Action, MARK, signal};

/// Where the processes listen; `None` while one is not there.
#[derive(Clone, Default)]
pub struct Addresses(Arc<Mutex<[Option<SocketAddr>; PROCESSES]>>);

impl Addresses {
    pub fn of(&self, process: usize) -> Option<SocketAddr> {
        self.0.lock().unwrap()[process]
    }

    fn set(&self, process: usize, addr: Option<SocketAddr>) {
        self.0.lock().unwrap()[process] = addr;
    }
}

/// How every process of a fleet is started.
#[derive(Clone)]
pub struct Start {
    pub kind: Kind,
    pub variant: Variant,
    /// Where each process finds the store.
    pub urls: [String; PROCESSES],
    pub ledger: std::path::PathBuf,
}

pub struct Fleet {
    start: Start,
    pub addresses: Addresses,
    processes: Vec<Process>,
}

struct Process {
    child: Child,
    lines: UnboundedReceiver<String>,
}

impl Fleet {
    pub async fn start(start: Start) -> Self {
        let mut fleet = Self {
            processes: (0..PROCESSES).map(|n| Process::start(&start, n)).collect(),
            addresses: Addresses::default(),
            start,
        };
        for process in 0..PROCESSES {
            fleet.ready(process).await;
        }
        fleet
    }

    /// Lets a fault happen, and waits until it is over. Whether it happened: an armed point may not
    /// be passed, for instance while the store is away.
    pub async fn suffer(&mut self, step: &Step<ProcessFault>) -> bool {
        let process = step.process;
        match step.fault {
            ProcessFault::Kill => {
                let _ = self.processes[process].child.kill();
                self.restart(process).await;
            }
            ProcessFault::Stop => {
                self.signal("-STOP", process);
                sleep(step.lasting).await;
                self.signal("-CONT", process);
            }
            ProcessFault::Drain => self.drain(process).await,
            ProcessFault::At(point, action) => {
                self.order(process, &format!("arm {} {}", action.name(), point.name()));
                if self.line(process, PATIENCE).await.as_deref() != Some("fired") {
                    self.order(process, "disarm");
                    // It may have fired just now.
                    let answer = self.line(process, Duration::from_secs(60)).await;
                    if answer.as_deref() == Some("disarmed") {
                        return false;
                    }
                }
                match action {
                    Action::Kill => self.restart(process).await,
                    Action::Stop => {
                        sleep(step.lasting).await;
                        self.signal("-CONT", process);
                        // In case it was disarmed in the same moment.
                        while self
                            .line(process, Duration::from_millis(20))
                            .await
                            .is_some()
                        {}
                    }
                    Action::LoseReply => {}
                }
            }
        }
        true
    }

    /// SIGTERM; it must end by itself.
    async fn drain(&mut self, process: usize) {
        self.addresses.set(process, None);
        self.signal("-TERM", process);
        let said = self.line(process, Duration::from_secs(60)).await;
        let child = &mut self.processes[process].child;
        // Not `wait`, which would close the pipe that tells it that somebody is there.
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child") {
                break status;
            }
            sleep(Duration::from_millis(5)).await;
        };
        assert!(
            status.success(),
            "a drained process ended with {status}: {said:?}"
        );
        self.restart(process).await;
    }

    async fn restart(&mut self, process: usize) {
        self.addresses.set(process, None);
        tokio::task::block_in_place(|| self.processes[process].child.wait()).expect("a child");
        self.processes[process] = Process::start(&self.start, process);
        self.ready(process).await;
    }

    async fn ready(&mut self, process: usize) {
        let line = self.line(process, Duration::from_secs(180)).await;
        let line = line.expect("a process starts");
        let addr = line.strip_prefix("ready ").expect("an address");
        self.addresses.set(process, addr.parse().ok());
    }

    fn signal(&self, which: &str, process: usize) {
        signal(which, self.processes[process].child.id());
    }

    fn order(&mut self, process: usize, order: &str) {
        let stdin = self.processes[process].child.stdin.as_mut();
        // It may just have ended.
        let _ = writeln!(stdin.expect("a pipe"), "{order}");
    }

    async fn line(&mut self, process: usize, within: Duration) -> Option<String> {
        let line = self.processes[process].lines.recv();
        timeout(within, line).await.ok().flatten()
    }
}

impl Process {
    fn start(start: &Start, process: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args([
                "--exact",
                "child_process",
                "--ignored",
                "--nocapture",
                "--quiet",
            ])
            .env(STORE, start.kind.name())
            .env(URL, &start.urls[process])
            .env(LEDGER, Path::new(&start.ledger))
            .env(VARIANT, start.variant.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("this test can be started again");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, lines) = unbounded_channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, own)) = line.split_once(MARK) {
                    let _ = sender.send(own.to_owned());
                }
            }
        });
        Self { child, lines }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long an armed point is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
