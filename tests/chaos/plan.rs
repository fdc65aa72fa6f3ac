//! What happens in a run, from its seed alone: operations, and two lanes of faults.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::points::{Action, Point};

/// Which store is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "redis")]
    Redis,
}

impl Kind {
    pub const ALL: &[Self] = &[
        Self::Sqlite,
        #[cfg(feature = "postgres")]
        Self::Postgres,
        #[cfg(feature = "redis")]
        Self::Redis,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            #[cfg(feature = "postgres")]
            Self::Postgres => "postgres",
            #[cfg(feature = "redis")]
            Self::Redis => "redis",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// How large a run is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Operations at least; they go on until all faults are through.
    pub operations: usize,
    /// Operations under way at once.
    pub in_flight: usize,
    /// Faults in each of the two lanes.
    pub faults: usize,
    /// The mean pause between two faults of a lane.
    pub pause: Duration,
}

/// One operation: one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    pub name: String,
    pub seed: u64,
    /// How long the handler works before its effect.
    pub work: Duration,
    pub temper: Temper,
    /// How many clients ask for it at the same time.
    pub copies: u32,
    /// How long a client waits for one answer before it leaves and asks again.
    pub patience: Duration,
}

/// What the handler does on its first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temper {
    Calm,
    /// 503 without an effect: the key is released.
    Refuses,
    PanicsBefore,
    PanicsAfter,
}

impl Temper {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Refuses => "refuses",
            Self::PanicsBefore => "panics-before",
            Self::PanicsAfter => "panics-after",
        }
    }
}

impl Operation {
    pub fn nth(seed: u64, index: usize) -> Self {
        let mut rng = rng(seed, &format!("operation {index}"));
        let work = match rng.random_range(0..1000) {
            0..700 => rng.random_range(0..10),
            700..950 => rng.random_range(10..100),
            950..985 => rng.random_range(100..900),
            // Longer than a lease: it lives by renewals.
            985..997 => rng.random_range(1_200..2_000),
            // Longer than an attempt may live.
            _ => 3_500,
        };
        let temper = match rng.random_range(0..100) {
            0..94 => Temper::Calm,
            94..97 => Temper::Refuses,
            97 => Temper::PanicsBefore,
            98 => Temper::PanicsAfter,
            _ => Temper::Calm,
        };
        let patience = match rng.random_range(0..10) {
            0..8 => 3_000,
            // Leaves while the attempt is under way.
            _ => rng.random_range(5..150),
        };
        Self {
            name: format!("op-{index}"),
            seed: rng.random(),
            work: Duration::from_millis(work),
            temper,
            copies: rng.random_range(1..=3),
            patience: Duration::from_millis(patience),
        }
    }
}

/// One fault: after a pause, it happens to something for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<F> {
    pub after: Duration,
    pub process: usize,
    pub fault: F,
    pub lasting: Duration,
}

/// What happens to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessFault {
    Kill,
    /// Stopped for longer than a lease.
    Stop,
    /// SIGTERM under load.
    Drain,
    At(Point, Action),
}

/// What happens to the store, or to one process's way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFault {
    /// Another program holds the file's write lock.
    Lock,
    KillServer,
    FreezeServer,
    CutRequests,
    CutReplies,
    CutOneReply,
    Slow,
    Silence,
    HoldReplies,
}

impl StoreFault {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lock => "store: locked",
            Self::KillServer => "store: killed, restarted",
            Self::FreezeServer => "store: frozen",
            Self::CutRequests => "network: cut before the store",
            Self::CutReplies => "network: replies lost",
            Self::CutOneReply => "network: one reply lost",
            Self::Slow => "network: slow",
            Self::Silence => "network: silent",
            Self::HoldReplies => "network: replies late",
        }
    }
}

impl ProcessFault {
    pub fn name(self) -> String {
        match self {
            Self::Kill => "process: killed".to_owned(),
            Self::Stop => "process: stopped".to_owned(),
            Self::Drain => "process: drained".to_owned(),
            Self::At(point, action) => format!("{}: {}", point.name(), action.name()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub process_lane: Vec<Step<ProcessFault>>,
    pub store_lane: Vec<Step<StoreFault>>,
}

impl Plan {
    pub fn new(seed: u64, kind: Kind, size: Size) -> Self {
        let mut processes = rng(seed, "processes");
        let mut stores = rng(seed, "store");
        Self {
            seed,
            process_lane: (0..size.faults)
                .map(|_| process_step(&mut processes, size.pause))
                .collect(),
            store_lane: (0..size.faults)
                .map(|_| store_step(&mut stores, kind, size.pause))
                .collect(),
        }
    }
}

fn process_step(rng: &mut StdRng, pause: Duration) -> Step<ProcessFault> {
    let fault = match rng.random_range(0..100) {
        0..14 => ProcessFault::Kill,
        14..26 => ProcessFault::Stop,
        26..38 => ProcessFault::Drain,
        _ => {
            let point = Point::ALL[rng.random_range(0..Point::ALL.len())];
            let may_lose = matches!(point, Point::AfterClaim | Point::AfterCompletion);
            let action = match rng.random_range(0..10) {
                0..5 => Action::Kill,
                5..8 if may_lose => Action::LoseReply,
                _ => Action::Stop,
            };
            ProcessFault::At(point, action)
        }
    };
    let lasting = LEASE + Duration::from_millis(rng.random_range(50..600));
    step(rng, pause, fault, lasting)
}

fn store_step(rng: &mut StdRng, kind: Kind, pause: Duration) -> Step<StoreFault> {
    let draw = rng.random_range(0..100);
    let fault = match kind {
        Kind::Sqlite => StoreFault::Lock,
        #[cfg(any(feature = "postgres", feature = "redis"))]
        _ => match draw {
            0..12 => StoreFault::KillServer,
            12..24 => StoreFault::FreezeServer,
            24..36 => StoreFault::CutRequests,
            36..48 => StoreFault::CutReplies,
            48..64 => StoreFault::CutOneReply,
            64..76 => StoreFault::Slow,
            76..88 => StoreFault::Silence,
            _ => StoreFault::HoldReplies,
        },
    };
    // Mostly shorter than a lease; sometimes longer, so that claims are lost too; and sometimes longer
    // than anybody waits for the store.
    let lasting = match draw % 8 {
        0..6 => rng.random_range(50..700),
        6 => rng.random_range(1_100..2_000),
        _ => rng.random_range(2_000..3_500),
    };
    step(rng, pause, fault, Duration::from_millis(lasting))
}

fn step<F>(rng: &mut StdRng, pause: Duration, fault: F, lasting: Duration) -> Step<F> {
    Step {
        after: pause.mul_f64(2.0 * rng.random::<f64>()),
        process: rng.random_range(0..PROCESSES),
        fault,
        lasting,
    }
}

/// A generator of its own for everything that has a name, so that one does not move the others.
pub fn rng(seed: u64, name: &str) -> StdRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    for (n, byte) in name.bytes().enumerate() {
        let at = 8 + n % 24;
        bytes[at] = bytes[at].wrapping_mul(31).wrapping_add(byte);
    }
    StdRng::from_seed(bytes)
}

/// Processes that share a store.
pub const PROCESSES: usize = 3;
/// Short, so that what breaks off is abandoned soon.
pub const LEASE: Duration = Duration::from_secs(1);
