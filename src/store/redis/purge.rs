//! Removes the unknown ones whose time is over, and counts each of them once, whatever reply is lost.

use redis::{Pipeline, Value};

use super::error::{answered, unexpected};
use super::frame::Frame;
use super::keys::Keys;
use super::link::{Node, Repeat, To};
use super::scripts::{self, By, Move};
use super::walk::{AT_ONCE, Batch, Digested, Position};
use super::{Inner, locked};
use crate::error::StoreError;
use crate::store::Purged;

/// One script of a purge. It leaves a receipt with the number of its call beside what it removes, for
/// a minute: a call that is repeated after a lost reply is told again what the first one removed.
pub(super) struct Removal {
    script: &'static Move,
    key: String,
    /// How many unknowns it tells of at most.
    most: usize,
}

/// A call whose answer is not there yet. One that never gets it is asked for again by the next purge.
struct Asked<'i> {
    inner: &'i Inner,
    unanswered: Unanswered,
}

#[derive(Default)]
pub(super) struct Unanswered {
    number: String,
    removals: Vec<Removal>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.unanswered.removals.is_empty() {
            let unanswered = std::mem::take(&mut self.unanswered);
            locked(&self.inner.unanswered).push(unanswered);
        }
    }
}

impl Inner {
    pub(super) async fn purge(&self, limit: usize) -> Result<Purged, StoreError> {
        let mut removed = 0;
        match self.purge_into(limit, &mut removed).await {
            // What is gone has to be told of: nobody can count it again.
            Err(error) if removed == 0 => Err(error),
            _ => Ok(Purged::new(removed, removed)),
        }
    }

    /// Adds what it removes to `removed` at once, so that no error hides it.
    async fn purge_into(&self, limit: usize, removed: &mut usize) -> Result<(), StoreError> {
        if limit == 0 {
            return Ok(());
        }
        self.ask_again(limit, removed).await?;
        let layout = self.layout().await?;
        // Where the last call of this process stopped: there is no need to walk what it walked.
        let mut position = locked(&self.purged_to).take().unwrap_or_default();
        position.settle(&layout);
        let mut whole = position == Position::at_the_beginning(&layout);
        loop {
            let Some(node) = position.node(&layout) else {
                // Only a walk from the beginning to the end says that nothing was left.
                if *removed > 0 || whole {
                    return Ok(());
                }
                position = Position::at_the_beginning(&layout);
                whole = true;
                continue;
            };
            let step = async {
                let batch = self.scan(node, position.scan).await?;
                self.purge_batch(node, &batch, limit, removed).await?;
                Ok(batch)
            };
            match step.await {
                Ok(batch) if *removed < limit => position.pass(&batch),
                // This step may have met more: it is made again.
                stopped => {
                    *locked(&self.purged_to) = Some(position);
                    return stopped.map(drop);
                }
            }
        }
    }

    async fn purge_batch(
        &self,
        node: &Node,
        batch: &Batch,
        limit: usize,
        removed: &mut usize,
    ) -> Result<(), StoreError> {
        let counted = self.counted(node, &batch.counters, limit - *removed);
        self.remove_all(node, counted.await?, removed).await?;
        let started = self.started(node, &batch.records).await?;
        let mut expired = started
            .into_iter()
            .filter(|(_, times, left)| times.is_expired(times.age(*left)))
            .map(|(digest, _, _)| digest);
        loop {
            let most = AT_ONCE.min(limit - *removed);
            let next: Vec<_> = expired.by_ref().take(most).collect();
            if next.is_empty() {
                return Ok(());
            }
            let removals = self.sound_ones(node, &next).await?;
            self.remove_all(node, removals, removed).await?;
        }
    }

    /// Those of these records that are not damaged; the others stay. Their times are compared when they
    /// are removed.
    async fn sound_ones(
        &self,
        node: &Node,
        digests: &[Digested],
    ) -> Result<Vec<Removal>, StoreError> {
        let mut pipe = Pipeline::with_capacity(digests.len());
        for digest in digests {
            pipe.cmd("GET").arg(self.keys.of_digest(digest));
        }
        let values = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let mut removals = Vec::with_capacity(digests.len());
        for (digest, value) in digests.iter().zip(values) {
            let key = self.keys.of_digest(digest);
            let is_sound = match value {
                Value::BulkString(value) => {
                    Frame::read(value).is_ok_and(|frame| self.keys.record(&frame.key) == key)
                }
                // Gone, or its slot is on the move and the next walk finds it.
                _ => false,
            };
            if is_sound {
                removals.push(Removal {
                    script: &scripts::PURGE,
                    key,
                    most: 1,
                });
            }
        }
        Ok(removals)
    }

    /// What to tell of these counters of unknowns that claims replaced, at most `limit` in all.
    async fn counted(
        &self,
        node: &Node,
        counters: &[String],
        limit: usize,
    ) -> Result<Vec<Removal>, StoreError> {
        if counters.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::with_capacity(counters.len());
        for counter in counters {
            pipe.cmd("GET").arg(counter);
        }
        let counts = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let mut left = limit;
        let mut removals = Vec::new();
        for (counter, count) in counters.iter().zip(counts) {
            let count = match count {
                Value::BulkString(count) => {
                    let count = std::str::from_utf8(&count).ok();
                    count.and_then(|count| count.parse().ok()).unwrap_or(0)
                }
                // Its slot is on the move: the next walk finds it.
                _ => 0,
            };
            let most = left.min(count);
            left -= most;
            if most > 0 {
                removals.push(Removal {
                    script: &scripts::SETTLE,
                    key: counter.clone(),
                    most,
                });
            }
        }
        Ok(removals)
    }

    async fn remove_all(
        &self,
        node: &Node,
        removals: Vec<Removal>,
        removed: &mut usize,
    ) -> Result<(), StoreError> {
        if removals.is_empty() {
            return Ok(());
        }
        let mut asked = Asked {
            inner: self,
            unanswered: Unanswered {
                number: format!("{:016x}", rand::random::<u64>()),
                removals,
            },
        };
        let Unanswered { number, removals } = &mut asked.unanswered;
        let command = |by, nth: usize| removals[nth].command(by, number);
        let replies = self
            .link
            .run_each(To::Node(node), removals.len(), command)
            .await?;
        let mut receipts = Pipeline::with_capacity(removals.len());
        let mut elsewhere = Vec::new();
        for (removal, reply) in std::mem::take(removals).into_iter().zip(replies) {
            match reply {
                Value::Int(count) => {
                    *removed += usize::try_from(count).unwrap_or(0);
                    receipts.cmd("UNLINK").arg(Keys::receipt(&removal.key));
                }
                // Its slot is on the move.
                _ => elsewhere.push(removal),
            }
        }
        *removals = elsewhere;
        // They would go by themselves.
        let _ = self
            .link
            .send(To::Node(node), &receipts, Repeat::Once)
            .await;
        asked.one_by_one(usize::MAX, removed).await
    }

    /// What earlier calls removed and were not told of.
    async fn ask_again(&self, limit: usize, removed: &mut usize) -> Result<(), StoreError> {
        loop {
            let Some(unanswered) = locked(&self.unanswered).pop() else {
                return Ok(());
            };
            let mut asked = Asked {
                inner: self,
                unanswered,
            };
            asked.one_by_one(limit, removed).await?;
            if !asked.unanswered.removals.is_empty() {
                return Ok(());
            }
        }
    }
}

impl Asked<'_> {
    /// Wherever the keys are now, as long as the limit is not passed.
    async fn one_by_one(&mut self, limit: usize, removed: &mut usize) -> Result<(), StoreError> {
        while let Some(removal) = self.unanswered.removals.last() {
            if removal.most > limit - *removed {
                return Ok(());
            }
            let number = &self.unanswered.number;
            let command = |by, _| removal.command(by, number);
            let to = To::Key(&removal.key);
            let replies = self.inner.link.run_each(to, 1, command).await?;
            match answered(replies.into_iter().next().ok_or_else(unexpected)?)? {
                Value::Int(count) => *removed += usize::try_from(count).unwrap_or(0),
                _ => return Err(unexpected()),
            }
            self.unanswered.removals.pop();
        }
        Ok(())
    }
}

impl Removal {
    fn command(&self, by: By, number: &str) -> redis::Cmd {
        let receipt = Keys::receipt(&self.key);
        let keys = [&*self.key, &*receipt];
        let most = self.most.to_string();
        let arguments: [&[u8]; 2] = [number.as_bytes(), most.as_bytes()];
        self.script.on(by, &keys, &arguments)
    }
}
