//! Walks over all records, and the one through those that are abandoned.
//!
//! `SCAN` visits everything that is there from its beginning to its end, on each server that holds
//! records. No index is kept beside the records, so that none can be wrong.

use std::collections::HashSet;

use redis::{Pipeline, Value};
use sha2::{Digest, Sha256};

use super::error::{answered, unexpected};
use super::frame::{Stage, Times};
use super::keys::{DIGEST, Met};
use super::link::{Node, Repeat, To};
use super::scripts;
use super::server::{field, info, text};
use super::{Inner, Kept, looked};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::Record;
use crate::store::{AbandonedPage, Cursor};

pub(super) type Digested = [u8; DIGEST];

/// Where a walk goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    // Which servers there are, and which runs of them: a cursor of `SCAN` means nothing to another one.
    layout: u64,
    node: u32,
    pub(super) scan: u64,
}

/// Where a walk through abandoned records goes on.
#[derive(Debug, Default, PartialEq, Eq)]
struct Walk {
    position: Position,
    // Met already, and not on a page yet.
    waiting: Vec<Digested>,
    // On a page already: `SCAN` may meet a key twice, and a walk that has to begin anew meets all.
    shown: HashSet<Digested>,
}

pub(super) struct Layout {
    nodes: Vec<Node>,
    hash: u64,
}

/// What one step of `SCAN` met.
pub(super) struct Batch {
    pub(super) records: Vec<Digested>,
    pub(super) counters: Vec<String>,
    next: u64,
}

impl Inner {
    pub(super) async fn abandoned(
        &self,
        after: Option<&Cursor>,
        limit: usize,
    ) -> Result<AbandonedPage, StoreError> {
        if limit == 0 {
            return Ok(AbandonedPage::new(Vec::new(), None));
        }
        let mut walk = match after {
            Some(cursor) => Walk::from_bytes(cursor.as_bytes()).ok_or_else(|| {
                StoreError::new(
                    StoreErrorKind::Other,
                    "the cursor is not one of this store: begin the walk anew",
                )
            })?,
            None => Walk::default(),
        };
        let layout = self.layout().await?;
        walk.position.settle(&layout);
        let mut records = Vec::new();
        for _ in 0..STEPS_PER_PAGE {
            while records.len() < limit && !walk.waiting.is_empty() {
                let most = AT_ONCE.min(limit - records.len());
                let from = walk.waiting.len().saturating_sub(most);
                let next = walk.waiting.split_off(from);
                let read = self
                    .whole_ones(walk.position.met_on(&layout), &next)
                    .await?;
                for (digest, kept) in next.into_iter().zip(read) {
                    if let Some(record) = kept.map(Kept::into_record).filter(Record::is_abandoned)
                        && walk.shown.insert(digest)
                    {
                        records.push(record);
                    }
                }
            }
            if !walk.waiting.is_empty() || records.len() == limit {
                break;
            }
            let Some(node) = walk.position.node(&layout) else {
                return Ok(AbandonedPage::new(records, None));
            };
            let batch = self.scan(node, walk.position.scan).await?;
            walk.position.pass(&batch);
            let started = self.started(node, &batch.records).await?;
            let started = started
                .into_iter()
                .filter(|(_, times, left)| times.lease_left(times.age(*left)).is_none())
                .map(|(digest, _, _)| digest);
            walk.waiting
                .extend(started.filter(|digest| !walk.shown.contains(digest)));
        }
        let done = walk.waiting.is_empty() && walk.position.node(&layout).is_none();
        let next = (!done).then(|| Cursor::new(walk.to_bytes()));
        Ok(AbandonedPage::new(records, next))
    }

    pub(super) async fn scan(&self, node: &Node, cursor: u64) -> Result<Batch, StoreError> {
        let mut pipe = Pipeline::with_capacity(1);
        let scan = pipe.cmd("SCAN").arg(cursor);
        scan.arg("MATCH").arg(self.keys.pattern());
        scan.arg("COUNT").arg(KEYS_PER_STEP);
        let mut replies = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let reply = answered(replies.pop().ok_or_else(unexpected)?)?;
        let Value::Array(parts) = reply else {
            return Err(unexpected());
        };
        let [next, met] = parts.try_into().map_err(|_| unexpected())?;
        let (Value::BulkString(next), Value::Array(met)) = (next, met) else {
            return Err(unexpected());
        };
        let next = std::str::from_utf8(&next)
            .ok()
            .and_then(|next| next.parse().ok());
        let mut batch = Batch {
            records: Vec::new(),
            counters: Vec::new(),
            next: next.ok_or_else(unexpected)?,
        };
        for key in met {
            let Value::BulkString(key) = key else {
                return Err(unexpected());
            };
            match self.keys.met(&key) {
                Met::Record(digest) => batch.records.push(digest),
                Met::Counter => {
                    let key = String::from_utf8(key).map_err(|_| unexpected())?;
                    batch.counters.push(key);
                }
                Met::Other => {}
            }
        }
        Ok(batch)
    }

    /// The started ones among these records, with their times and what is left of their lives. Values
    /// that are no records are left out, and where they are.
    pub(super) async fn started(
        &self,
        node: &Node,
        records: &[Digested],
    ) -> Result<Vec<(Digested, Times, u64)>, StoreError> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        // Of most records no more than the state is of interest.
        let mut pipe = Pipeline::with_capacity(records.len());
        for digest in records {
            let range = pipe.cmd("GETRANGE").arg(self.keys.of_digest(digest));
            range.arg(0).arg(1);
        }
        let states = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let states = records.iter().zip(states);
        let started = states.filter_map(|(digest, state)| match state {
            Value::BulkString(state) => (state.get(1) == Some(&STARTED)).then_some(*digest),
            _ => None,
        });
        let started: Vec<Digested> = started.collect();
        if started.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::with_capacity(2 * started.len());
        for digest in &started {
            let name = self.keys.of_digest(digest);
            pipe.cmd("GETRANGE").arg(&name).arg(0).arg(79);
            pipe.cmd("PTTL").arg(&name);
        }
        let heads = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let mut met = Vec::with_capacity(started.len());
        let mut heads = heads.into_iter();
        for digest in started {
            if let (Some(Value::BulkString(head)), Some(Value::Int(left))) =
                (heads.next(), heads.next())
                && let (Ok(times), Ok(left)) = (Times::read(&head), u64::try_from(left))
                && times.stage == Stage::Started
            {
                met.push((digest, times, left));
            }
        }
        Ok(met)
    }

    /// The records of these digests, which were met on this server; none for one that is gone or
    /// damaged.
    async fn whole_ones(
        &self,
        node: Option<&Node>,
        digests: &[Digested],
    ) -> Result<Vec<Option<Kept>>, StoreError> {
        let names: Vec<String> = digests.iter().map(|it| self.keys.of_digest(it)).collect();
        let look = |by, nth: usize| scripts::LOOK.on(by, &[&names[nth]], &[]);
        let replies = match node {
            Some(node) => {
                let replies = self.link.run_each(To::Node(node), names.len(), look);
                replies.await?
            }
            None => vec![Value::Nil; names.len()],
        };
        let mut read = Vec::with_capacity(digests.len());
        for (nth, reply) in replies.into_iter().enumerate() {
            let found = match (node, looked(reply)) {
                (Some(_), Ok(found)) => self.sound(&names[nth], found),
                // It is on another server.
                _ => self.whole(&digests[nth]).await?,
            };
            read.push(found);
        }
        Ok(read)
    }

    /// The record of this digest, if there is one and it is not damaged. Whoever asks for the key of one
    /// that is will hear of it.
    async fn whole(&self, digest: &Digested) -> Result<Option<Kept>, StoreError> {
        let name = self.keys.of_digest(digest);
        let found = self.load(&name).await?;
        Ok(self.sound(&name, found))
    }

    fn sound(&self, name: &str, found: Option<(Vec<u8>, i64)>) -> Option<Kept> {
        let (value, left) = found?;
        let kept = Kept::read(value, left).ok();
        kept.filter(|kept| self.keys.record(&kept.frame.key) == name)
    }

    /// Which servers there are. What is compared are their runs, and the epoch in which slots last
    /// changed hands.
    pub(super) async fn layout(&self) -> Result<Layout, StoreError> {
        let mut hasher = Sha256::new();
        let mut nodes = Vec::new();
        for (node, reply) in self.link.ask_masters(info("server")).await? {
            let text = text(reply)?;
            hasher.update(node.address.as_bytes());
            hasher.update(field(&text, "run_id").unwrap_or_default());
            nodes.push(node);
        }
        if self.link.is_cluster() {
            let mut command = redis::cmd("CLUSTER");
            command.arg("INFO");
            let mut epoch = 0_u64;
            for (_, reply) in self.link.ask_masters(command).await? {
                let text = text(reply)?;
                let told = field(&text, "cluster_current_epoch");
                epoch = epoch.max(told.and_then(|told| told.parse().ok()).unwrap_or(0));
            }
            hasher.update(epoch.to_le_bytes());
        }
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = hasher.finalize().into();
        Ok(Layout {
            nodes,
            hash: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        })
    }
}

impl Position {
    pub(super) fn at_the_beginning(layout: &Layout) -> Self {
        Self {
            layout: layout.hash,
            node: 0,
            scan: 0,
        }
    }

    /// Whether it was begun on these servers, with the slots that they have now.
    pub(super) fn is_of(&self, layout: &Layout) -> bool {
        self.layout == layout.hash
    }

    /// Begins anew if the servers are not those of the step before.
    pub(super) fn settle(&mut self, layout: &Layout) {
        if self.layout != layout.hash {
            *self = Self::at_the_beginning(layout);
        }
    }

    /// The server to look at next, or none after the last one.
    pub(super) fn node<'l>(&self, layout: &'l Layout) -> Option<&'l Node> {
        layout.nodes.get(usize::try_from(self.node).ok()?)
    }

    /// The server on which the last step was made.
    fn met_on<'l>(&self, layout: &'l Layout) -> Option<&'l Node> {
        let node = usize::try_from(self.node).ok()?;
        let last = if self.scan == 0 {
            node.checked_sub(1)?
        } else {
            node
        };
        layout.nodes.get(last)
    }

    pub(super) fn pass(&mut self, batch: &Batch) {
        self.scan = batch.next;
        if batch.next == 0 {
            self.node = self.node.saturating_add(1);
        }
    }
}

impl Walk {
    fn to_bytes(&self) -> Vec<u8> {
        let Position { layout, node, scan } = self.position;
        let waiting = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        let listed = self.waiting.len() + self.shown.len();
        let mut bytes = Vec::with_capacity(25 + listed * DIGEST);
        bytes.push(CURSOR_VERSION);
        bytes.extend_from_slice(&layout.to_le_bytes());
        bytes.extend_from_slice(&node.to_le_bytes());
        bytes.extend_from_slice(&scan.to_le_bytes());
        bytes.extend_from_slice(&waiting.to_le_bytes());
        for digest in self.waiting.iter().chain(&self.shown) {
            bytes.extend_from_slice(digest);
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (version, bytes) = bytes.split_first()?;
        let (layout, bytes) = bytes.split_first_chunk()?;
        let (node, bytes) = bytes.split_first_chunk()?;
        let (scan, bytes) = bytes.split_first_chunk()?;
        let (waiting, bytes) = bytes.split_first_chunk()?;
        let waiting = usize::try_from(u32::from_le_bytes(*waiting)).ok()?;
        let waiting_bytes = waiting.checked_mul(DIGEST)?;
        let (waiting, shown) = bytes.split_at_checked(waiting_bytes)?;
        if *version != CURSOR_VERSION || shown.len() % DIGEST != 0 {
            return None;
        }
        let digests = |bytes: &[u8]| -> Vec<Digested> {
            let chunks = bytes.chunks_exact(DIGEST);
            chunks.filter_map(|digest| digest.try_into().ok()).collect()
        };
        Some(Self {
            position: Position {
                layout: u64::from_le_bytes(*layout),
                node: u32::from_le_bytes(*node),
                scan: u64::from_le_bytes(*scan),
            },
            waiting: digests(waiting),
            shown: digests(shown).into_iter().collect(),
        })
    }
}

const CURSOR_VERSION: u8 = 1;
const STARTED: u8 = 1;
/// One step holds the server up for a fraction of a millisecond.
const KEYS_PER_STEP: usize = 512;
/// How many whole records are asked for in one go.
pub(super) const AT_ONCE: usize = 256;
/// A page of a large store with few abandoned records is short, or empty, before a caller's patience
/// is.
const STEPS_PER_PAGE: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_and_no_other_bytes_do() {
        let walk = Walk {
            position: Position {
                layout: u64::MAX - 1,
                node: 2,
                scan: 7 << 40,
            },
            waiting: vec![[1; DIGEST], [2; DIGEST]],
            shown: HashSet::from([[3; DIGEST]]),
        };
        let bytes = walk.to_bytes();
        assert_eq!(Walk::from_bytes(&bytes), Some(walk));
        for end in (0..bytes.len()).filter(|end| *end != bytes.len() - DIGEST) {
            assert_eq!(Walk::from_bytes(&bytes[..end]), None, "cut at {end}");
        }
        assert_eq!(Walk::from_bytes(&[&[9], &bytes[1..]].concat()), None);
    }
}
