//! Forgets a scope: a walk that reads of every record whose it is.

use redis::{Pipeline, Value};

use super::Inner;
use super::error::{answered, is_code, unexpected};
use super::frame::{self, Frame};
use super::keys::Keys;
use super::link::{Node, Repeat, To};
use super::walk::{Digested, Position};
use crate::error::StoreError;
use crate::scope::ScopedKey;

/// What one step met.
#[derive(Default)]
struct Read {
    keys: Vec<ScopedKey>,
    /// Records of which nobody can say whose they are.
    unreadable: usize,
}

impl Inner {
    pub(super) async fn erase(
        &self,
        within: &str,
        scope: &str,
        limit: usize,
    ) -> Result<usize, StoreError> {
        if limit == 0 {
            return Ok(0);
        }
        let layout = self.layout().await?;
        let mut position = Position::at_the_beginning(&layout);
        let (mut erased, mut unreadable) = (0, 0);
        while let Some(node) = position.node(&layout) {
            let batch = self.scan(node, position.scan).await?;
            let read = self.keys_of(node, &batch.records).await?;
            unreadable += read.unreadable;
            let of_it =
                |key: &ScopedKey| key.scope() == scope && key.namespace().starts_with(within);
            let keys: Vec<_> = read.keys.into_iter().filter(of_it).collect();
            let most = keys.len().min(limit - erased);
            erased += self.unlink_all(node, &keys[..most]).await?;
            if erased == limit {
                return Ok(erased);
            }
            position.pass(&batch);
        }
        if erased > 0 {
            return Ok(erased);
        }
        if unreadable > 0 {
            return Err(StoreError::corrupt(format!(
                "{unreadable} records cannot be read, and nobody can say whose they are: deploy the \
                 release that wrote them, or look at them and delete their keys"
            )));
        }
        if !position.is_of(&self.layout().await?) {
            return Err(StoreError::unavailable(
                "records moved between servers while they were looked through: erase again",
            ));
        }
        Ok(0)
    }

    /// Whose these records are: of most of them, no more than the head and the key are read.
    async fn keys_of(&self, node: &Node, records: &[Digested]) -> Result<Read, StoreError> {
        let mut read = Read::default();
        if records.is_empty() {
            return Ok(read);
        }
        let names: Vec<String> = records.iter().map(|it| self.keys.of_digest(it)).collect();
        let mut pipe = Pipeline::with_capacity(names.len());
        for name in &names {
            let head = pipe.cmd("GETRANGE").arg(name);
            head.arg(0).arg(frame::HEAD - 1);
        }
        let heads = self.link.send(To::Node(node), &pipe, Repeat::Once).await?;
        let (mut places, mut odd) = (Vec::new(), Vec::new());
        for (name, head) in names.into_iter().zip(heads) {
            match head {
                Value::BulkString(head) if head.is_empty() => {}
                Value::BulkString(head) => match frame::key_place(&head) {
                    Some(place) => places.push((name, place)),
                    None => odd.push(name),
                },
                // Nothing that a store writes.
                reply if is_code(&reply, "WRONGTYPE") => {}
                _ => odd.push(name),
            }
        }
        let mut pipe = Pipeline::with_capacity(places.len());
        for (name, (start, end)) in &places {
            pipe.cmd("GETRANGE").arg(name).arg(*start).arg(end - 1);
        }
        let keys = match places.is_empty() {
            true => Vec::new(),
            false => self.link.send(To::Node(node), &pipe, Repeat::Once).await?,
        };
        for ((name, _), key) in places.into_iter().zip(keys) {
            let key = match key {
                Value::BulkString(key) => ScopedKey::from_bytes(&key),
                _ => None,
            };
            // Its name tells whether it is the key: an outcome that came between moved it.
            match key.filter(|key| self.keys.record(key) == name) {
                Some(key) => read.keys.push(key),
                None => odd.push(name),
            }
        }
        for name in odd {
            let Some((value, _)) = self.load(&name).await? else {
                continue;
            };
            match Frame::read(value) {
                Ok(frame) if self.keys.record(&frame.key) == name => read.keys.push(frame.key),
                _ => read.unreadable += 1,
            }
        }
        Ok(read)
    }

    /// Removes these records of one server, and says how many there were.
    async fn unlink_all(&self, node: &Node, keys: &[ScopedKey]) -> Result<usize, StoreError> {
        if keys.is_empty() {
            return Ok(0);
        }
        let mut pipe = Pipeline::with_capacity(2 * keys.len());
        for key in keys {
            let name = self.keys.record(key);
            pipe.cmd("UNLINK").arg(&name);
            pipe.cmd("UNLINK").arg(Keys::counter(&name));
        }
        let replies = self.link.send(To::Node(node), &pipe, Repeat::Never).await?;
        let mut removed = 0;
        for (key, replies) in keys.iter().zip(replies.chunks(2)) {
            removed += match replies {
                [Value::Int(record), Value::Int(_)] => usize::from(*record > 0),
                // Its slot is on the move.
                _ => usize::from(self.unlink(key).await?),
            };
            self.watchers.wake(key);
        }
        Ok(removed)
    }

    /// Removes a record, and whether there was one.
    pub(super) async fn unlink(&self, key: &ScopedKey) -> Result<bool, StoreError> {
        let name = self.keys.record(key);
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("UNLINK").arg(&name);
        pipe.cmd("UNLINK").arg(Keys::counter(&name));
        let replies = self.link.send(To::Key(&name), &pipe, Repeat::Never);
        let [record, counter] = replies.await?.try_into().map_err(|_| unexpected())?;
        answered(counter)?;
        let removed = matches!(answered(record)?, Value::Int(count) if count > 0);
        self.watchers.wake(key);
        Ok(removed)
    }
}
