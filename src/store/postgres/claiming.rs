//! The claim: one statement that inserts a record or shows the one that stands, and where that one
//! may be claimed, another statement that does so if it still stands.

use tokio::time::Instant;
use tokio_postgres::Row;

use crate::claim::{Claim, ClaimRequest, Claimed};
use crate::error::StoreError;
use crate::record::Notes;

use super::Inner;
use super::client::Parameter;
use super::row::{Move, Standing, claim_sum};
use super::text::escape;
use super::time::Interval;

impl Inner {
    pub(super) async fn claim(&self, request: &ClaimRequest) -> Result<Claimed, StoreError> {
        let deadline = self.begin().await?;
        let asked = Asked {
            request,
            digest: request.key.digest(),
            deadline,
        };
        for _ in 0..MOST_ROUNDS {
            let Some(row) = self.show_or_insert(&asked).await? else {
                // Somebody else's insertion came in between, which the statement could not see, or
                // it came and was taken back.
                continue;
            };
            let Some(standing) = Standing::read(&row)? else {
                return Ok(asked.acquired(1, Notes::default()));
            };
            let granted = match standing.judge(request, &asked.digest)? {
                Move::Leave => {
                    let record = standing.record(&request.key, &asked.digest)?;
                    return Ok(Claimed::Existing(record));
                }
                Move::Again => self.claim_again(&asked).await?,
                Move::Afresh => self.claim_afresh(&asked, &standing).await?,
                Move::TakeOver => self.take_over(&asked, &standing).await?,
            };
            // None: somebody was quicker. The next look shows who.
            if let Some(row) = granted
                && let Some(granted) = Standing::read(&row)?
            {
                self.watchers.wake(&asked.digest);
                let attempt = granted.attempt(&asked.digest)?;
                return Ok(asked.acquired(attempt, granted.notes()?));
            }
        }
        Err(StoreError::unavailable(
            "the record changed each time between two statements",
        ))
    }

    /// The record that stands, or a row that says that ours was inserted, or nothing: ask again.
    async fn show_or_insert(&self, asked: &Asked<'_>) -> Result<Option<Row>, StoreError> {
        if self.seen.has(&asked.digest) {
            let row = self.find(&asked.digest, asked.deadline).await?;
            if row.is_some() {
                return Ok(row);
            }
            self.seen.forget(&asked.digest);
        }
        let row = self.insert_or_show(asked).await?;
        if row.is_some() {
            self.seen.note(&asked.digest);
        }
        Ok(row)
    }

    async fn insert_or_show(&self, asked: &Asked<'_>) -> Result<Option<Row>, StoreError> {
        let key = &asked.request.key;
        let others: [Parameter<'_>; 8] = [
            &escape(key.namespace()),
            &escape(key.scope()),
            &escape(key.key()),
            &asked.fingerprint(),
            &asked.owner(),
            &asked.sum(1),
            &asked.lease(),
            &asked.retention(),
        ];
        self.row(
            &self.statements.claim,
            &asked.digest,
            &others,
            asked.deadline,
        )
        .await
    }

    async fn claim_again(&self, asked: &Asked<'_>) -> Result<Option<Row>, StoreError> {
        let others: [Parameter<'_>; 4] = [
            &asked.owner(),
            &asked.fingerprint(),
            &asked.lease(),
            &asked.retention(),
        ];
        self.row(
            &self.statements.claim_again,
            &asked.digest,
            &others,
            asked.deadline,
        )
        .await
    }

    async fn claim_afresh(
        &self,
        asked: &Asked<'_>,
        seen: &Standing<'_>,
    ) -> Result<Option<Row>, StoreError> {
        let (owner, attempt) = seen.holder()?;
        // A number that is none any more belongs to a record that is as good as none.
        let next = u32::try_from(attempt).map_or(1, |attempt| attempt.saturating_add(1));
        let others: [Parameter<'_>; 8] = [
            &owner,
            &attempt,
            &asked.fingerprint(),
            &asked.owner(),
            &i64::from(next),
            &asked.sum(next),
            &asked.lease(),
            &asked.retention(),
        ];
        self.row(
            &self.statements.claim_afresh,
            &asked.digest,
            &others,
            asked.deadline,
        )
        .await
    }

    async fn take_over(
        &self,
        asked: &Asked<'_>,
        seen: &Standing<'_>,
    ) -> Result<Option<Row>, StoreError> {
        let (owner, attempt) = seen.holder()?;
        let next = seen.attempt(&asked.digest)?.saturating_add(1);
        let others: [Parameter<'_>; 8] = [
            &owner,
            &attempt,
            &asked.fingerprint(),
            &asked.owner(),
            &i64::from(next),
            &asked.sum(next),
            &asked.lease(),
            &asked.retention(),
        ];
        self.row(
            &self.statements.take_over,
            &asked.digest,
            &others,
            asked.deadline,
        )
        .await
    }
}

/// One claim, and what its statements have in common.
struct Asked<'a> {
    request: &'a ClaimRequest,
    digest: [u8; 32],
    deadline: Instant,
}

impl Asked<'_> {
    fn acquired(&self, attempt: u32, notes: Notes) -> Claimed {
        let claim = Claim::new(self.request.key.clone(), self.request.owner, attempt);
        Claimed::Acquired { claim, notes }
    }

    fn fingerprint(&self) -> &[u8] {
        self.request.fingerprint.as_bytes()
    }

    fn owner(&self) -> &[u8] {
        self.request.owner.as_bytes()
    }

    fn sum(&self, attempt: u32) -> i32 {
        let request = self.request;
        claim_sum(&self.digest, &request.fingerprint, &request.owner, attempt)
    }

    fn lease(&self) -> Interval {
        Interval::of(self.request.lease)
    }

    fn retention(&self) -> Interval {
        Interval::of(self.request.retention)
    }
}

/// How often a claim looks again before it gives up. Each round is lost to a change by somebody else,
/// and the time limit holds for all of them together.
const MOST_ROUNDS: u32 = 16;
