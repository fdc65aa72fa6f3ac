//! Writes that replicas acknowledge before their caller hears of them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redis::{Pipeline, Value};
use tokio::sync::Semaphore;

use super::error::{answered, unexpected};
use super::frame::millis;
use super::link::{Link, Repeat, To};
use super::scripts::By;
use crate::error::StoreError;

/// A few connections of their own: `WAIT` holds up everything that comes after it on its connection, so
/// each of these carries one move at a time, and the shared connection none of them.
pub(super) struct Acknowledged {
    idle: Mutex<Vec<Link>>,
    free: Semaphore,
    replicas: usize,
    limit: Duration,
}

/// A connection that is in use; it goes back when its move is answered or given up.
struct Lent<'a> {
    to: &'a Acknowledged,
    link: Option<Link>,
}

impl Acknowledged {
    pub(super) fn new(links: Vec<Link>, replicas: usize, limit: Duration) -> Self {
        Self {
            free: Semaphore::new(links.len()),
            idle: Mutex::new(links),
            replicas,
            limit,
        }
    }

    /// [`Link::run`], and then until enough replicas have everything that the server knew at that time:
    /// what a command only read included, because the server counts from its last command.
    pub(super) async fn run(
        &self,
        key: &str,
        repeat: Repeat,
        pipe: impl Fn(By) -> Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        // Never closed; its holder gives up with the caller.
        let _permit = self.free.acquire().await.map_err(|_| unexpected())?;
        let lent = self.lend()?;
        let link = lent.link.as_ref().ok_or_else(unexpected)?;
        let waiting = |by| {
            let mut pipe = pipe(by);
            let wait = pipe.cmd("WAIT").arg(self.replicas);
            wait.arg(millis(self.limit));
            pipe
        };
        let mut replies = link.run(To::Key(key), repeat, waiting).await?;
        let Value::Int(acknowledged) = answered(replies.pop().ok_or_else(unexpected)?)? else {
            return Err(unexpected());
        };
        let acknowledged = usize::try_from(acknowledged).unwrap_or(0);
        if acknowledged < self.replicas {
            // First what the server itself refused: that is the better reason.
            for reply in replies {
                answered(reply)?;
            }
            return Err(StoreError::unavailable(format!(
                "{acknowledged} of {} replicas acknowledged within {:?}: look at the replicas and the \
                 network between them",
                self.replicas, self.limit
            )));
        }
        Ok(replies)
    }

    fn lend(&self) -> Result<Lent<'_>, StoreError> {
        let link = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let link = Some(link.ok_or_else(unexpected)?);
        Ok(Lent { to: self, link })
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            let mut idle = self.to.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.push(link);
        }
    }
}
