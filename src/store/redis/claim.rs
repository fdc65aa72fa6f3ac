//! Rules 1 to 5: a plain `SET` for the many, a script for the few.

use redis::{Cmd, Pipeline, Value};

use super::error::{answered, damaged, is_code, unexpected};
use super::frame::{self, Frame, Stage, Terms};
use super::keys::Keys;
use super::link::Repeat;
use super::scripts::{self, By};
use super::{Inner, Kept};
use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned};
use crate::error::StoreError;
use crate::record::Notes;

/// What a claim came upon.
struct Found {
    frame: Frame,
    age: u64,
    // Value and time to live were read in one step; else another move may have come between.
    at_once: bool,
}

enum Step {
    Done(Claimed),
    Found(Found),
    Gone,
}

impl Inner {
    pub(super) async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let name = self.keys.record(&request.key);
        let terms = Terms::new(request.lease, request.retention, self.grace);
        let mut step = Step::Gone;
        for _ in 0..ROUNDS {
            step = match step {
                Step::Done(claimed) => return Ok(claimed),
                Step::Found(found) if stands(request, &found) => {
                    return Ok(Claimed::Existing(found.frame.into_record(found.age)));
                }
                // In a box, as all that is rare: a future is as large as the largest of what it may
                // wait for, and every claim pays for making room for it.
                Step::Found(Found { frame, .. }) => {
                    Box::pin(self.compare_and_set(request, &name, terms, &frame)).await?
                }
                Step::Gone => self.set(request, &name, terms).await?,
            };
        }
        match step {
            Step::Done(claimed) => Ok(claimed),
            // Whoever races with so many others for one key asks again, as the same owner.
            Step::Found(_) | Step::Gone => Err(StoreError::unavailable(
                "the record of the key changed faster than it could be claimed: ask again",
            )),
        }
    }

    /// Claims a key that has no record, or reads the one that it has: one round trip, no script.
    async fn set(
        &self,
        request: &ClaimRequest,
        name: &str,
        terms: Terms,
    ) -> Result<Step, StoreError> {
        let value = frame::fresh(request, terms, self.clock.now());
        let pipe = |_| {
            let mut set = Cmd::with_capacity(7, name.len() + value.len() + 32);
            set.arg("SET").arg(name).arg(&value[..]);
            set.arg("NX").arg("PX").arg(terms.total()).arg("GET");
            let mut left = Cmd::with_capacity(2, name.len() + 4);
            left.arg("PTTL").arg(name);
            let mut pipe = Pipeline::with_capacity(3);
            pipe.add_command(set).add_command(left);
            pipe
        };
        let replies = self.make(name, Repeat::Once, pipe).await?;
        let [set, left] = replies.try_into().map_err(|_| unexpected())?;
        // At `maxmemory` the server refuses every `SET`, also one that would only read.
        if is_code(&set, "OOM")
            && let Some((value, left)) = Box::pin(self.load(name)).await?
        {
            return self.found(request, value, Value::Int(left), true);
        }
        match answered(set)? {
            Value::Nil => Ok(Step::Done(granted(request, 1, Notes::default()))),
            Value::BulkString(value) => self.found(request, value, answered(left)?, false),
            _ => Err(unexpected()),
        }
    }

    /// Begins anew what is released or expired, claims again what is the caller's own, takes over.
    async fn compare_and_set(
        &self,
        request: &ClaimRequest,
        name: &str,
        terms: Terms,
        seen: &Frame,
    ) -> Result<Step, StoreError> {
        let next = seen.attempt.saturating_add(1);
        let identity = frame::identity(request, next, seen.created_if_kept(self.clock.now()));
        let counter = Keys::counter(name);
        let rerun: &[u8] = match request.on_abandoned {
            OnAbandoned::Rerun => b"1",
            OnAbandoned::Hold => b"",
        };
        let [lease, retention, grace] =
            [terms.lease, terms.retention, terms.grace].map(|millis| millis.to_string());
        let attempt = seen.attempt.to_string();
        let fresh = frame::identity(request, next, self.clock.now());
        let arguments: [&[u8]; 10] = [
            request.owner.as_bytes(),
            request.fingerprint.as_bytes(),
            lease.as_bytes(),
            retention.as_bytes(),
            grace.as_bytes(),
            rerun,
            attempt.as_bytes(),
            &fresh,
            request.key.as_bytes(),
            &identity,
        ];
        let pipe = |by: By| {
            let mut pipe = Pipeline::with_capacity(2);
            pipe.add_command(scripts::CLAIM.on(by, &[name, &counter], &arguments));
            pipe
        };
        let mut replies = self.make(name, Repeat::Once, pipe).await?;
        let Value::Array(reply) = answered(replies.pop().ok_or_else(unexpected)?)? else {
            return Err(unexpected());
        };
        let mut reply = reply.into_iter();
        let Some(Value::Int(code)) = reply.next() else {
            return Err(unexpected());
        };
        let (value, left) = (reply.next(), reply.next());
        match (code, value, left) {
            (1, None, None) => Ok(Step::Done(granted(request, next, Notes::default()))),
            (again @ (2 | 3), Some(Value::BulkString(value)), None) => {
                let before = Frame::read(value).map_err(|damage| damaged(&request.key, damage))?;
                if before.owner != request.owner {
                    self.watchers.wake(&request.key);
                }
                let attempt = if again == 2 { before.attempt } else { next };
                Ok(Step::Done(granted(request, attempt, before.notes)))
            }
            (0 | 4, Some(Value::BulkString(value)), Some(left)) => {
                self.found(request, value, left, true)
            }
            (5, None, None) => Ok(Step::Gone),
            (-1, None, None) => Err(self.unreadable(&request.key).await),
            _ => Err(unexpected()),
        }
    }

    fn found(
        &self,
        request: &ClaimRequest,
        value: Vec<u8>,
        left: Value,
        at_once: bool,
    ) -> Result<Step, StoreError> {
        match self.read(&request.key, value, &left)? {
            Some(Kept { frame, age }) => Ok(Step::Found(Found {
                frame,
                age,
                at_once,
            })),
            None => Ok(Step::Gone),
        }
    }
}

/// Whether the record stands in the way, by what was read of it. Where nothing stands in the way, or
/// where a lease seems to be over, a script decides in one step.
fn stands(request: &ClaimRequest, found: &Found) -> bool {
    let Found {
        frame,
        age,
        at_once,
    } = found;
    if frame.is_expired(*age) {
        return false;
    }
    match frame.stage {
        Stage::Completed => true,
        Stage::Released => false,
        Stage::Started if frame.fingerprint != request.fingerprint => true,
        Stage::Started if frame.owner == request.owner => false,
        Stage::Started if !frame.is_lease_over(*age) => true,
        Stage::Started => *at_once && request.on_abandoned == OnAbandoned::Hold,
    }
}

fn granted(request: &ClaimRequest, attempt: u32, notes: Notes) -> Claimed {
    Claimed::Acquired {
        claim: Claim::new(request.key.clone(), request.owner, attempt),
        notes,
    }
}

/// More than any race takes that is not meant to go on for ever.
const ROUNDS: usize = 16;
