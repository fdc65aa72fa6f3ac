//! The protocol of one key: workers that may die, messages that may be late, replies that may be lost,
//! leases that end, a clock that jumps, records that expire, and sweepers.
//!
//! A worker is one request with its attempt: it draws an owner, claims, runs the handler, settles and
//! answers. What it sends to the store may arrive at any later time, also after its sender is dead or
//! has given up, or never; a reply arrives at once or not at all. The ledger is the other system, where
//! the effect happens. Ghosts remember what the promises speak of; no decision depends on them.

use super::search::Model;

/// How large the world is, which decides how long the search takes.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Requests with the same key, up to three.
    pub workers: usize,
    /// Whether the last of them is another request.
    pub stranger: bool,
    /// Sweepers at work, up to two, each of which closes a record once.
    pub sweepers: usize,
    /// How often a worker sends each move, at most.
    pub sendings: u8,
    /// Renewals of each worker.
    pub renewals: u8,
    /// How often the clock jumps back so far that a lease which was over is not.
    pub jumps: u8,
    /// How often the record expires.
    pub expiries: u8,
}

/// What a retry may do, and where the effect happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `OnAbandoned::Hold`, with an effect in another system.
    Hold,
    /// `OnAbandoned::Rerun`, with another system that refuses stale attempts.
    Rerun,
    /// `OnAbandoned::Hold`; effect and outcome are written in one transaction, fenced by the owner.
    Transaction,
}

/// Something that keeps a promise; each is broken by one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    // Of a store.
    ALiveLeaseIsNotTakenOver,
    WhatIsHeldIsNotGranted,
    WhatIsCompletedIsNotGranted,
    ATakeoverComparesTheFingerprint,
    ARejectedClaimChangesNothing,
    AttemptsGrow,
    CompletionComparesTheOwner,
    AnOutcomeIsNotOverwritten,
    ReleaseComparesTheOwner,
    WhatIsCompletedIsNotReleased,
    OnlyWhatIsStartedIsRenewed,
    ResolutionComparesTheLease,
    ResolutionNeedsALeaseThatIsOver,
    ALiveClaimDoesNotExpire,
    TransactionComparesTheOwner,
    // Of the engine.
    NothingRunsWithoutAnAcknowledgedClaim,
    NoAnswerBeforeTheRecord,
    ALostClaimIsSaid,
    APanicDoesNotRelease,
    WhatCannotBeSavedIsNotReleased,
    // Of the reconciler and the other system.
    WhatDidNotHappenIsFenced,
    WhatHappenedIsNotDenied,
    StaleAttemptsAreRefused,
}

impl Guard {
    pub const ALL: [Self; 23] = [
        Self::ALiveLeaseIsNotTakenOver,
        Self::WhatIsHeldIsNotGranted,
        Self::WhatIsCompletedIsNotGranted,
        Self::ATakeoverComparesTheFingerprint,
        Self::ARejectedClaimChangesNothing,
        Self::AttemptsGrow,
        Self::CompletionComparesTheOwner,
        Self::AnOutcomeIsNotOverwritten,
        Self::ReleaseComparesTheOwner,
        Self::WhatIsCompletedIsNotReleased,
        Self::OnlyWhatIsStartedIsRenewed,
        Self::ResolutionComparesTheLease,
        Self::ResolutionNeedsALeaseThatIsOver,
        Self::ALiveClaimDoesNotExpire,
        Self::TransactionComparesTheOwner,
        Self::NothingRunsWithoutAnAcknowledgedClaim,
        Self::NoAnswerBeforeTheRecord,
        Self::ALostClaimIsSaid,
        Self::APanicDoesNotRelease,
        Self::WhatCannotBeSavedIsNotReleased,
        Self::WhatDidNotHappenIsFenced,
        Self::WhatHappenedIsNotDenied,
        Self::StaleAttemptsAreRefused,
    ];

    /// In which mode it is needed. What is needed in `Hold` is needed in the others too, or is the
    /// other system's affair there.
    pub const fn mode(self) -> Mode {
        match self {
            Self::ATakeoverComparesTheFingerprint
            | Self::CompletionComparesTheOwner
            | Self::ALostClaimIsSaid
            | Self::StaleAttemptsAreRefused => Mode::Rerun,
            Self::WhatIsCompletedIsNotReleased | Self::TransactionComparesTheOwner => {
                Mode::Transaction
            }
            _ => Mode::Hold,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    pub bounds: Bounds,
    pub mode: Mode,
    pub broken: Option<Guard>,
}

const WORKERS: usize = 3;
const SWEEPERS: usize = 2;

/// A worker, by its number; it is its own owner, and its effect is its outcome.
type Who = u8;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    record: Option<Record>,
    workers: [Worker; WORKERS],
    sweepers: [Sweeper; SWEEPERS],
    ledger: Ledger,
    ghost: Ghost,
    jumps: u8,
    expiries: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Record {
    owner: Who,
    stranger: bool,
    attempt: u8,
    status: Status,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Status {
    /// Started, with a lease that lives.
    Live,
    /// Started, and the lease is over.
    Over,
    Completed(Who),
    Released,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Worker {
    phase: Phase,
    attempt: u8,
    /// What was sent and has not arrived: claims, completions, releases, endings of the lease, renewals.
    on_the_way: [u8; 5],
    /// What may still be sent.
    sendings: u8,
    renewals: u8,
    /// The outcome of the handler.
    outcome: Who,
    /// Ghosts: in which life of the record the handler began, and whether it is settled.
    ran_in: Option<u8>,
    harmless: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
enum Phase {
    #[default]
    Absent,
    Claiming,
    /// The handler runs, and has not announced itself to the other system.
    Running,
    /// It has, and has done nothing yet.
    Announced,
    /// The effect happened.
    Acted,
    Completing,
    Releasing,
    /// Answered with this outcome, unmarked.
    Succeeded(Who),
    /// Dead, refused, or answered with something that promises nothing.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Claim,
    Complete,
    Release,
    Abandon,
    Renew,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
enum Sweeper {
    #[default]
    Idle,
    /// Has seen an abandoned record.
    Saw {
        owner: Who,
        attempt: u8,
        /// The lease that it saw is not that of the record any more.
        stale: bool,
    },
    /// Knows what to do about it, and tells the store, which may hear of it late and twice.
    Tells {
        owner: Who,
        happened: Option<Who>,
        stale: bool,
    },
    Done,
}

/// The other system.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Ledger {
    /// Whose effect it took first, with the number of the attempt.
    effect: Option<(Who, u8)>,
    /// Attempts with a lower number are refused.
    newest: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Ghost {
    /// How often the record began to exist anew.
    life: u8,
    /// Effects in this life.
    effects: u8,
    /// The first outcome that was recorded in this life.
    kept: Option<Who>,
    /// Whose claim lives by the store's clock.
    live: Option<Who>,
    /// The highest attempt in this life that was granted.
    granted: u8,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "shown on the way to a broken promise")]
pub enum Step {
    /// The request arrives, and a claim is sent.
    Begins(Who),
    /// The same move is sent once more.
    Repeats(Who, MoveName),
    /// What was sent arrives, and so does the reply.
    Arrives(Who, MoveName),
    /// What was sent arrives, and its reply is lost.
    ArrivesAndTheReplyIsLost(Who, MoveName),
    GivesUpItsClaim(Who),
    Announces(Who),
    Acts(Who),
    ActsAndCompletes(Who),
    ReturnsWithoutAnEffect(Who),
    Returns(Who),
    GivesUpItsCompletion(Who),
    Panics(Who),
    Dies(Who),
    Renews(Who),
    TheLeaseEnds,
    TheClockJumpsBack,
    TheRecordExpires,
    Sees(Sweeping),
    Asks(Sweeping),
    /// A resolution arrives; it may arrive again.
    Resolves(Sweeping),
    SweeperEnds(Sweeping),
}

type MoveName = &'static str;
type Sweeping = usize;

impl Move {
    const ALL: [Self; 5] = [
        Self::Claim,
        Self::Complete,
        Self::Release,
        Self::Abandon,
        Self::Renew,
    ];

    const fn name(self) -> MoveName {
        match self {
            Self::Claim => "claim",
            Self::Complete => "complete",
            Self::Release => "release",
            Self::Abandon => "abandon",
            Self::Renew => "renew",
        }
    }
}

/// What the store answers.
#[derive(Clone, Copy)]
enum Reply {
    Acquired(u8),
    Existing,
    Recorded,
    Standing(Who),
    Applied,
    ClaimLost,
}

type Led = Result<State, &'static str>;

impl Protocol {
    fn keeps(&self, guard: Guard) -> bool {
        self.broken != Some(guard)
    }

    fn is_stranger(&self, who: Who) -> bool {
        self.bounds.stranger && usize::from(who) + 1 == self.bounds.workers
    }

    /// What the store does with a move, and what it answers.
    fn apply(&self, state: &mut State, who: Who, what: Move) -> Result<Reply, &'static str> {
        let Some(record) = state.record else {
            return match what {
                Move::Claim => self.grant(state, who, 1),
                Move::Release => Ok(Reply::Applied),
                _ => Ok(Reply::ClaimLost),
            };
        };
        let started = matches!(record.status, Status::Live | Status::Over);
        let owns = started && record.owner == who;
        match what {
            Move::Claim => return self.claim(state, record, who),
            Move::Complete => {
                if let Status::Completed(standing) = record.status
                    && self.keeps(Guard::AnOutcomeIsNotOverwritten)
                {
                    return Ok(Reply::Standing(standing));
                }
                let anybody = started && !self.keeps(Guard::CompletionComparesTheOwner);
                let again = matches!(record.status, Status::Completed(_));
                if !owns && !anybody && !again {
                    return Ok(Reply::ClaimLost);
                }
                if started && !owns {
                    return Err("promise 1: completed without the claim");
                }
                let outcome = state.workers[usize::from(who)].outcome;
                self.record(state, outcome)?;
                return Ok(Reply::Recorded);
            }
            Move::Release => {
                let anybody = started && !self.keeps(Guard::ReleaseComparesTheOwner);
                let completed = record.owner == who
                    && matches!(record.status, Status::Completed(_))
                    && !self.keeps(Guard::WhatIsCompletedIsNotReleased);
                if anybody && !owns {
                    return Err("promise 1: released without the claim");
                }
                if owns || completed {
                    state.set(Status::Released);
                    return Ok(Reply::Applied);
                }
                return Ok(
                    match record.status == Status::Released && record.owner == who {
                        true => Reply::Applied,
                        false => Reply::ClaimLost,
                    },
                );
            }
            Move::Abandon if owns => {
                if record.status == Status::Live {
                    state.set(Status::Over);
                    state.begin_lease();
                }
            }
            Move::Renew if owns => {
                state.set(Status::Live);
                state.begin_lease();
            }
            Move::Renew
                if record.owner == who && !self.keeps(Guard::OnlyWhatIsStartedIsRenewed) =>
            {
                state.set(Status::Live);
            }
            Move::Abandon | Move::Renew => return Ok(Reply::ClaimLost),
        }
        Ok(Reply::Applied)
    }

    fn claim(&self, state: &mut State, record: Record, who: Who) -> Result<Reply, &'static str> {
        let next = match self.keeps(Guard::AttemptsGrow) {
            true => record.attempt + 1,
            false => 1,
        };
        let fits = record.stranger == self.is_stranger(who);
        let takes_over = match record.status {
            Status::Released => return self.grant(state, who, next),
            Status::Completed(_) => !self.keeps(Guard::WhatIsCompletedIsNotGranted),
            Status::Live | Status::Over if record.owner == who && fits => {
                return self.grant(state, who, record.attempt);
            }
            Status::Live => !self.keeps(Guard::ALiveLeaseIsNotTakenOver),
            Status::Over => self.mode == Mode::Rerun || !self.keeps(Guard::WhatIsHeldIsNotGranted),
        };
        let fits = fits || !self.keeps(Guard::ATakeoverComparesTheFingerprint);
        if takes_over && fits {
            return self.grant(state, who, next);
        }
        if !self.keeps(Guard::ARejectedClaimChangesNothing) {
            // As if it were renewed.
            state.set(Status::Live);
        }
        if state.record != Some(record) {
            return Err("promise 6: a rejected claim changed the record");
        }
        Ok(Reply::Existing)
    }

    fn grant(&self, state: &mut State, who: Who, attempt: u8) -> Result<Reply, &'static str> {
        let mine = state.record.is_some_and(|record| record.owner == who);
        let ghost = &mut state.ghost;
        if ghost.live.is_some_and(|other| other != who) {
            return Err("promise 1: two live attempts");
        }
        if let Some(record) = state.record
            && matches!(record.status, Status::Live | Status::Over)
            && record.stranger != self.is_stranger(who)
        {
            return Err("promise 6: another request took the key over");
        }
        if attempt < ghost.granted || attempt == ghost.granted && !mine {
            return Err("the fencing token does not grow");
        }
        ghost.granted = attempt;
        ghost.live = Some(who);
        state.record = Some(Record {
            owner: who,
            stranger: self.is_stranger(who),
            attempt,
            status: Status::Live,
        });
        state.begin_lease();
        Ok(Reply::Acquired(attempt))
    }

    /// Writes an outcome into the record.
    fn record(&self, state: &mut State, outcome: Who) -> Result<(), &'static str> {
        state.set(Status::Completed(outcome));
        if *state.ghost.kept.get_or_insert(outcome) != outcome {
            return Err("promise 2: a kept result was overwritten");
        }
        Ok(())
    }

    /// What a worker does when it hears from the store.
    fn hear(
        &self,
        state: &mut State,
        who: Who,
        what: Move,
        reply: Reply,
    ) -> Result<(), &'static str> {
        let worker = &mut state.workers[usize::from(who)];
        match (worker.phase, what, reply) {
            (Phase::Claiming, Move::Claim, Reply::Acquired(attempt)) => {
                worker.attempt = attempt;
                return self.run(state, who);
            }
            (Phase::Claiming, Move::Claim, Reply::Existing) => {
                // A replay, a mismatch, in flight or unknown: only the first is a success.
                let record = state
                    .record
                    .filter(|of| of.stranger == self.is_stranger(who));
                worker.phase = match record.map(|record| record.status) {
                    Some(Status::Completed(outcome)) => Phase::Succeeded(outcome),
                    _ => Phase::Gone,
                };
            }
            (Phase::Completing, Move::Complete, Reply::Recorded) => {
                worker.phase = Phase::Succeeded(worker.outcome);
            }
            (Phase::Completing, Move::Complete, Reply::Standing(outcome)) => {
                worker.phase = Phase::Succeeded(outcome);
            }
            (Phase::Completing, Move::Complete, _) => {
                let said = self.keeps(Guard::ALostClaimIsSaid);
                worker.phase = match said {
                    true => Phase::Gone,
                    false => Phase::Succeeded(worker.outcome),
                };
            }
            (Phase::Releasing, Move::Release, reply) => {
                worker.phase = Phase::Gone;
                let held = state.record.is_some_and(|record| {
                    record.owner == who && matches!(record.status, Status::Live | Status::Over)
                });
                if held && matches!(reply, Reply::Applied) {
                    return Err("promise 4: released, and still held");
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The handler begins.
    fn run(&self, state: &mut State, who: Who) -> Result<(), &'static str> {
        let life = state.ghost.life;
        if state.ghost.kept.is_some() {
            return Err("promise 2: ran again although a result was kept");
        }
        let others = state.workers.iter().enumerate();
        let mut unknown = others.filter(|(n, other)| {
            *n != usize::from(who) && other.ran_in == Some(life) && !other.harmless
        });
        if self.mode != Mode::Rerun && unknown.next().is_some() {
            return Err("promise 3: ran again although nobody knows how it ended");
        }
        let worker = &mut state.workers[usize::from(who)];
        worker.phase = Phase::Running;
        worker.ran_in = Some(life);
        worker.sendings = self.bounds.sendings;
        worker.renewals = self.bounds.renewals;
        Ok(())
    }

    /// The effect, in the other system. `false` if it was refused.
    fn act(&self, state: &mut State, who: Who) -> Result<bool, &'static str> {
        let worker = state.workers[usize::from(who)];
        if worker.ran_in != Some(state.ghost.life) {
            // The promises, and what the other system remembers, last as long as the record.
            return Ok(true);
        }
        let refuses = self.keeps(Guard::StaleAttemptsAreRefused);
        if refuses && worker.attempt < state.ledger.newest {
            return Ok(false);
        }
        state.ledger.effect.get_or_insert((who, worker.attempt));
        state.ghost.effects += 1;
        if state.ghost.effects > 1 {
            return Err("the effect happened twice");
        }
        Ok(true)
    }

    fn worker_steps(&self, state: &State, who: Who, steps: &mut Vec<(Step, Led)>) {
        let worker = state.workers[usize::from(who)];
        let next = |change: &dyn Fn(&mut State, &mut Worker)| {
            let mut next = *state;
            let mut worker = worker;
            change(&mut next, &mut worker);
            next.workers[usize::from(who)] = worker;
            next
        };
        let send = |what: Move, phase: Phase| {
            next(&|_, worker| {
                worker.on_the_way[what as usize] += 1;
                worker.sendings = worker.sendings.saturating_sub(1);
                worker.phase = phase;
            })
        };
        for what in Move::ALL {
            if worker.on_the_way[what as usize] == 0 {
                continue;
            }
            let mut arrived = next(&|_, worker| worker.on_the_way[what as usize] -= 1);
            let name = what.name();
            match self.apply(&mut arrived, who, what) {
                Err(broken) => steps.push((Step::Arrives(who, name), Err(broken))),
                Ok(reply) => {
                    let lost = Step::ArrivesAndTheReplyIsLost(who, name);
                    steps.push((lost, Ok(arrived)));
                    let heard = self.hear(&mut arrived, who, what, reply).map(|()| arrived);
                    steps.push((Step::Arrives(who, name), heard));
                }
            }
        }
        match worker.phase {
            Phase::Absent => {
                let begun = next(&|_, worker| {
                    worker.phase = Phase::Claiming;
                    worker.sendings = self.bounds.sendings - 1;
                    worker.on_the_way[Move::Claim as usize] = 1;
                });
                steps.push((Step::Begins(who), Ok(begun)));
                return;
            }
            Phase::Claiming => {
                if worker.sendings > 0 {
                    let again = send(Move::Claim, Phase::Claiming);
                    steps.push((Step::Repeats(who, "claim"), Ok(again)));
                }
                // 503; the claim that may stand is released in the background, or, where it may be a
                // takeover, abandoned.
                let freeing = match self.mode {
                    Mode::Rerun => Move::Abandon,
                    Mode::Hold | Mode::Transaction => Move::Release,
                };
                let mut given_up = send(freeing, Phase::Gone);
                let led = if self.keeps(Guard::NothingRunsWithoutAnAcknowledgedClaim) {
                    Ok(given_up)
                } else {
                    given_up.workers[usize::from(who)].attempt = 1;
                    self.run(&mut given_up, who).map(|()| given_up)
                };
                steps.push((Step::GivesUpItsClaim(who), led));
            }
            Phase::Running if self.mode == Mode::Transaction => {
                let mut done = *state;
                steps.push((
                    Step::ActsAndCompletes(who),
                    self.transact(&mut done, who).map(|()| done),
                ));
            }
            Phase::Running if self.mode == Mode::Rerun => {
                let announced = next(&|next, worker| {
                    let known = &mut next.ledger;
                    let current = worker.ran_in == Some(next.ghost.life);
                    let refuses = current && self.keeps(Guard::StaleAttemptsAreRefused);
                    if refuses && worker.attempt < known.newest {
                        worker.phase = Phase::Gone;
                        return;
                    }
                    if current {
                        known.newest = known.newest.max(worker.attempt);
                    }
                    worker.phase = Phase::Announced;
                    if let Some((of, _)) = known.effect.filter(|_| refuses) {
                        worker.outcome = of;
                        worker.phase = Phase::Acted;
                    }
                });
                steps.push((Step::Announces(who), Ok(announced)));
            }
            Phase::Running | Phase::Announced => {
                let mut acted = *state;
                let led = self.act(&mut acted, who).map(|happened| {
                    let worker = &mut acted.workers[usize::from(who)];
                    worker.outcome = who;
                    worker.phase = match happened {
                        true => Phase::Acted,
                        // It says that nothing was done.
                        false => Phase::Releasing,
                    };
                    if !happened {
                        worker.harmless = true;
                        worker.on_the_way[Move::Release as usize] += 1;
                    }
                    acted
                });
                steps.push((Step::Acts(who), led));
            }
            Phase::Acted => {
                let returned = match self.keeps(Guard::NoAnswerBeforeTheRecord) {
                    true => send(Move::Complete, Phase::Completing),
                    false => send(Move::Complete, Phase::Succeeded(worker.outcome)),
                };
                steps.push((Step::Returns(who), Ok(returned)));
            }
            Phase::Completing => {
                if worker.sendings > 0 {
                    let again = send(Move::Complete, Phase::Completing);
                    steps.push((Step::Repeats(who, "complete"), Ok(again)));
                }
                if self.mode == Mode::Transaction {
                    // What it wrote is committed, and still it says that nothing was done.
                    let returned = send(Move::Release, Phase::Releasing);
                    steps.push((Step::ReturnsWithoutAnEffect(who), Ok(returned)));
                }
                // The answer leaves, marked as not saved.
                let given_up = match self.keeps(Guard::WhatCannotBeSavedIsNotReleased) {
                    true => next(&|_, worker| worker.phase = Phase::Gone),
                    false => send(Move::Release, Phase::Gone),
                };
                steps.push((Step::GivesUpItsCompletion(who), Ok(given_up)));
            }
            Phase::Releasing => {
                if worker.sendings > 0 {
                    let again = send(Move::Release, Phase::Releasing);
                    steps.push((Step::Repeats(who, "release"), Ok(again)));
                }
            }
            Phase::Succeeded(_) | Phase::Gone => return,
        }
        let runs = matches!(
            worker.phase,
            Phase::Running | Phase::Announced | Phase::Acted
        );
        if matches!(worker.phase, Phase::Running | Phase::Announced) {
            let mut returned = send(Move::Release, Phase::Releasing);
            returned.workers[usize::from(who)].harmless = true;
            steps.push((Step::ReturnsWithoutAnEffect(who), Ok(returned)));
        }
        if runs {
            let said = match self.keeps(Guard::APanicDoesNotRelease) {
                true => Move::Abandon,
                false => Move::Release,
            };
            steps.push((Step::Panics(who), Ok(send(said, Phase::Gone))));
        }
        if runs && worker.renewals > 0 {
            let renewing = next(&|_, worker| {
                worker.renewals -= 1;
                worker.on_the_way[Move::Renew as usize] += 1;
            });
            steps.push((Step::Renews(who), Ok(renewing)));
        }
        let dead = next(&|_, worker| worker.phase = Phase::Gone);
        steps.push((Step::Dies(who), Ok(dead)));
    }

    /// The handler's rows and the outcome are committed in one step, or nothing is.
    fn transact(&self, state: &mut State, who: Who) -> Result<(), &'static str> {
        let holds = state.record.is_some_and(|record| {
            record.owner == who && matches!(record.status, Status::Live | Status::Over)
        });
        state.workers[usize::from(who)].outcome = who;
        if !holds && self.keeps(Guard::TransactionComparesTheOwner) {
            // Rolled back: the claim was lost, and the answer says so.
            let worker = &mut state.workers[usize::from(who)];
            worker.harmless = true;
            worker.phase = Phase::Gone;
            return Ok(());
        }
        self.act(state, who)?;
        if holds {
            self.record(state, who)?;
        }
        // The layer completes all the same, and finds what stands.
        let worker = &mut state.workers[usize::from(who)];
        worker.phase = Phase::Completing;
        worker.on_the_way[Move::Complete as usize] += 1;
        Ok(())
    }

    fn sweeper_steps(&self, state: &State, n: Sweeping, steps: &mut Vec<(Step, Led)>) {
        let mut next = *state;
        match state.sweepers[n] {
            Sweeper::Idle => {
                if let Some(record) = state.record
                    && record.status == Status::Over
                {
                    let Record { owner, attempt, .. } = record;
                    next.sweepers[n] = Sweeper::Saw {
                        owner,
                        attempt,
                        stale: false,
                    };
                    steps.push((Step::Sees(n), Ok(next)));
                }
            }
            Sweeper::Saw {
                owner,
                attempt,
                stale,
            } => {
                let happened = self.ask(&mut next, owner, attempt);
                next.sweepers[n] = Sweeper::Tells {
                    owner,
                    happened,
                    stale,
                };
                steps.push((Step::Asks(n), Ok(next)));
            }
            Sweeper::Tells {
                owner,
                happened,
                stale,
            } => {
                let led = self.resolve(&mut next, owner, happened, stale);
                steps.push((Step::Resolves(n), led.map(|()| next)));
                next = *state;
                next.sweepers[n] = Sweeper::Done;
                steps.push((Step::SweeperEnds(n), Ok(next)));
            }
            Sweeper::Done => {}
        }
    }

    /// The reconciler: whose effect it was, or nobody's, for ever.
    fn ask(&self, state: &mut State, owner: Who, attempt: u8) -> Option<Who> {
        if self.mode == Mode::Transaction {
            // A record that is not completed tells that nothing was committed. That nothing will be is
            // what releasing it brings about.
            return None;
        }
        let ledger = &mut state.ledger;
        let effect = ledger.effect.filter(|(_, by)| *by <= attempt);
        if let Some((of, _)) = effect
            && self.keeps(Guard::WhatHappenedIsNotDenied)
        {
            return Some(of);
        }
        if self.keeps(Guard::WhatDidNotHappenIsFenced) {
            ledger.newest = ledger.newest.max(attempt + 1);
            state.workers[usize::from(owner)].harmless |= effect.is_none();
        } else {
            // It says so, and nobody saw to it.
            state.workers[usize::from(owner)].harmless = true;
        }
        None
    }

    fn resolve(
        &self,
        state: &mut State,
        owner: Who,
        happened: Option<Who>,
        stale: bool,
    ) -> Result<(), &'static str> {
        let Some(record) = state.record else {
            return Ok(());
        };
        let over = match record.status {
            Status::Over => true,
            Status::Live => !self.keeps(Guard::ResolutionNeedsALeaseThatIsOver),
            Status::Completed(_) | Status::Released => false,
        };
        let stale = stale && self.keeps(Guard::ResolutionComparesTheLease);
        if !over || stale {
            return Ok(());
        }
        if record.status == Status::Live {
            return Err("a live attempt was resolved");
        }
        if let Some(outcome) = happened {
            return self.record(state, outcome);
        }
        state.set(Status::Released);
        if self.mode == Mode::Transaction {
            state.workers[usize::from(owner)].harmless = true;
        }
        Ok(())
    }

    /// What is left once every worker is dead and nothing is on its way any more: one lease, one
    /// sweeper and one request more, and the key has a final answer.
    fn recovers(&self, state: &State) -> Result<(), &'static str> {
        let mut state = *state;
        if let Some(record) = &mut state.record
            && record.status == Status::Live
        {
            record.status = Status::Over;
        }
        state.ghost.live = None;
        if self.mode != Mode::Rerun
            && let Some(Record {
                owner,
                attempt,
                status: Status::Over,
                ..
            }) = state.record
        {
            let happened = self.ask(&mut state, owner, attempt);
            self.resolve(&mut state, owner, happened, false)?;
        }
        match state.record.map(|record| record.status) {
            Some(Status::Over) if self.mode != Mode::Rerun => Err("the key is held for ever"),
            _ => Ok(()),
        }
    }
}

impl Protocol {
    fn time_steps(&self, state: &State, steps: &mut Vec<(Step, Led)>) {
        let Some(record) = state.record else {
            return;
        };
        let mut next = *state;
        match record.status {
            Status::Live => {
                next.set(Status::Over);
                steps.push((Step::TheLeaseEnds, Ok(next)));
            }
            Status::Over if state.jumps > 0 => {
                next.jumps -= 1;
                next.set(Status::Live);
                steps.push((Step::TheClockJumpsBack, Ok(next)));
            }
            _ => {}
        }
        let may_expire =
            record.status != Status::Live || !self.keeps(Guard::ALiveClaimDoesNotExpire);
        if state.expiries > 0 && may_expire {
            let mut next = *state;
            next.expiries -= 1;
            next.record = None;
            next.ledger = Ledger::default();
            next.ghost = Ghost {
                life: state.ghost.life + 1,
                live: state.ghost.live,
                ..Ghost::default()
            };
            steps.push((Step::TheRecordExpires, Ok(next)));
        }
    }
}

impl State {
    /// The same state without what can no longer matter, so that histories which differ in nothing
    /// else meet.
    fn settled(mut self) -> Self {
        for (who, worker) in self.workers.iter_mut().enumerate() {
            let may_claim = worker.on_the_way[Move::Claim as usize] > 0;
            let holds = self.record.is_some_and(|record| {
                usize::from(record.owner) == who
                    && matches!(record.status, Status::Live | Status::Over)
            });
            let waits = matches!(worker.phase, Phase::Completing | Phase::Releasing);
            if !may_claim && !holds && !waits {
                // Nothing that is on its way finds anything to do.
                worker.on_the_way = [0; 5];
            }
            if matches!(worker.phase, Phase::Gone | Phase::Succeeded(_)) {
                worker.sendings = 0;
                worker.renewals = 0;
                worker.attempt = 0;
                if worker.on_the_way[Move::Complete as usize] == 0 {
                    worker.outcome = 0;
                }
            }
        }
        self
    }

    fn set(&mut self, status: Status) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.status = status;
        self.ghost.live = (status == Status::Live).then_some(record.owner);
    }

    /// The record has another lease than any sweeper has seen.
    fn begin_lease(&mut self) {
        for sweeper in &mut self.sweepers {
            if let Sweeper::Saw { stale, .. } | Sweeper::Tells { stale, .. } = sweeper {
                *stale = true;
            }
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Step = Step;

    fn start(&self) -> State {
        State {
            record: None,
            workers: Default::default(),
            sweepers: Default::default(),
            ledger: Ledger::default(),
            ghost: Ghost::default(),
            jumps: self.bounds.jumps,
            expiries: self.bounds.expiries,
        }
    }

    fn steps(&self, state: &State) -> Vec<(Step, Led)> {
        let mut steps = Vec::new();
        for who in 0..self.bounds.workers {
            // The first that is not there yet begins first: they are all alike, but for a stranger.
            let earlier = &state.workers[..who];
            let is_next =
                self.bounds.stranger || earlier.iter().all(|of| of.phase != Phase::Absent);
            if is_next {
                self.worker_steps(state, who as Who, &mut steps);
            }
        }
        for n in 0..self.bounds.sweepers {
            self.sweeper_steps(state, n, &mut steps);
        }
        self.time_steps(state, &mut steps);
        if self.broken.is_none() {
            for (_, led) in &mut steps {
                *led = led.map(State::settled);
            }
        }
        steps
    }

    fn check(&self, state: &State) -> Result<(), &'static str> {
        for worker in &state.workers[..self.bounds.workers] {
            let Phase::Succeeded(outcome) = worker.phase else {
                continue;
            };
            let current = state.ghost.life == 0;
            if current && state.ghost.kept != Some(outcome) {
                return Err("promises 2 and 5: answered what is not the kept result");
            }
        }
        if let (Some(kept), Some(record)) = (state.ghost.kept, state.record)
            && record.status != Status::Completed(kept)
        {
            return Err("promise 2: a kept result is gone");
        }
        self.recovers(state)
    }
}
