//! The store contract: one function for each rule, named as the rule.
//!
//! A function returns if the store keeps its rule and panics, with the rule's name and with what was
//! wrong, if it does not. The numbers in their descriptions are those of the contract at [`Store`].

mod claiming;
mod completing;
mod erasing;
mod fencing;
mod keeping;
mod keys;
mod reconciling;
mod releasing;
mod waiting;

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::StatusCode;
use tokio::sync::Barrier;

pub use self::claiming::*;
pub use self::completing::*;
pub use self::erasing::*;
pub use self::fencing::*;
pub use self::keeping::*;
pub use self::keys::*;
pub use self::reconciling::*;
pub use self::releasing::*;
pub use self::waiting::*;
use super::Harness;
use crate::claim::{Claim, ClaimRequest, Claimed, OnAbandoned, Owner};
use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::outcome::Outcome;
use crate::record::{Notes, Record, State};
use crate::scope::ScopedKey;
use crate::store::{Completion, Fenced, Purged, Resolution, Store};

/// One rule of the list, to be run by name.
pub struct Rule<H> {
    /// The name of the function.
    pub name: &'static str,
    /// The function.
    pub check: for<'h> fn(&'h H) -> BoxFuture<'h, ()>,
}

impl<H> fmt::Debug for Rule<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The whole list, for runners that do not use
/// [`store_conformance!`](crate::store_conformance).
pub fn rules<H: Harness>() -> Vec<Rule<H>> {
    macro_rules! listed {
        (() $($rule:ident)*) => {
            vec![$(Rule {
                name: stringify!($rule),
                check: |harness| Box::pin($rule(harness)),
            }),*]
        };
    }
    crate::__for_each_rule! { [listed] () }
}

/// The one place where the rules are listed: calls `callback! { args rule rule … }`.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_each_rule {
    ([$($callback:tt)+] $args:tt) => {
        $($callback)+! {
            $args
            // claiming
            a_fresh_key_is_acquired_as_attempt_one
            a_granted_claim_is_on_record
            of_many_concurrent_claims_one_is_acquired
            of_concurrent_claims_of_a_released_key_one_is_acquired
            of_concurrent_claims_of_an_expired_record_one_is_acquired
            of_concurrent_takeovers_one_is_acquired
            a_live_claim_of_another_owner_is_shown_and_left_alone
            a_live_claim_is_not_taken_over
            another_fingerprint_replaces_nothing
            the_same_owner_is_acquired_again_with_the_same_attempt
            the_same_owner_is_acquired_again_after_its_lease_is_over
            claiming_again_starts_the_lease_anew
            claiming_again_hands_back_the_notes
            the_same_owner_with_another_fingerprint_is_not_acquired
            the_same_owner_is_shown_the_outcome_once_it_completed
            an_abandoned_record_is_held
            an_abandoned_record_is_taken_over_under_rerun
            takeover_needs_the_same_fingerprint
            takeover_keeps_the_notes
            a_released_key_is_claimed_afresh_with_the_next_attempt
            an_expired_outcome_is_claimed_afresh
            an_expired_unknown_is_claimed_afresh
            every_acquired_claim_counts_its_retention_from_itself
            // fencing
            renew_needs_the_owner
            complete_needs_the_owner
            release_needs_the_owner
            abandon_needs_the_owner
            annotate_needs_the_owner
            checkpoint_needs_the_owner
            an_owner_may_act_after_its_lease_is_over
            renewing_starts_the_lease_anew
            renewing_again_is_applied
            renewing_revives_a_lease_that_is_over
            no_move_changes_a_completed_record
            no_move_but_a_claim_changes_a_released_record
            no_move_but_a_claim_makes_a_record
            annotating_keeps_the_last_correlation
            checkpoints_keep_their_order
            a_repeated_checkpoint_replaces_its_data
            // completing
            completing_keeps_the_fingerprint
            completing_keeps_owner_attempt_and_notes
            every_form_of_outcome_round_trips
            an_outcome_of_one_mebibyte_round_trips
            completing_again_returns_the_outcome_that_stands
            an_outcome_is_never_overwritten
            of_concurrent_completions_one_is_recorded
            // releasing
            releasing_again_is_applied
            releasing_an_unknown_key_is_applied
            abandoning_ends_the_lease
            abandoning_again_changes_nothing
            // keeping
            renewing_does_not_move_the_expiry
            completing_does_not_move_an_expiry_that_is_ahead
            completing_after_the_expiry_counts_the_retention_once_more
            completing_with_a_retention_replaces_the_expiry
            a_retention_of_zero_is_over_at_once
            a_slow_handler_keeps_its_record
            an_expired_record_is_not_shown
            purge_removes_what_is_expired
            purge_removes_no_more_than_its_limit
            purge_counts_the_unresolved
            purge_leaves_unexpired_records
            purge_leaves_a_live_claim_whose_retention_is_over
            // reconciling
            abandoned_lists_each_abandoned_record_once
            abandoned_misses_nothing_while_records_are_closed
            abandoned_shows_whole_records
            resolving_as_completed_keeps_the_outcome
            resolving_as_released_frees_the_key
            resolving_after_the_expiry_counts_the_retention_once_more
            resolve_needs_a_lease_that_is_over
            resolve_needs_the_lease_that_was_seen
            resolve_needs_the_owner_that_was_seen
            resolve_leaves_a_closed_record_alone
            two_sweepers_cannot_both_resolve
            // keys
            a_record_round_trips_every_field
            an_unknown_key_has_no_record
            keys_are_literal
            scopes_do_not_collide
            remove_erases_a_record_in_every_state
            remove_erases_one_key_only
            // erasing
            erase_forgets_a_scope_in_every_state
            erase_takes_one_scope_only
            erase_keeps_to_the_namespaces_it_is_given
            erase_removes_no_more_than_its_limit
            // waiting
            changed_returns_at_once_unless_that_owner_holds_a_live_claim
            changed_returns_when_the_claim_is_completed
            changed_returns_when_the_claim_is_released
            changed_returns_when_the_claim_is_abandoned
            changed_returns_when_the_record_is_removed
            changed_returns_when_the_lease_ends
            changed_gives_up_after_its_time
            changed_wakes_every_waiter
            a_waiter_that_leaves_disturbs_nobody
        }
    };
}

/// One run of one rule: keys of its own, and moves that must answer.
struct Case<'h, H: Harness> {
    rule: &'static str,
    harness: &'h H,
    run: u64,
}

impl<'h, H: Harness> Case<'h, H> {
    fn new(harness: &'h H, rule: &'static str) -> Self {
        let run = rand::random();
        Self { rule, harness, run }
    }

    fn store(&self) -> &'h H::Store {
        self.harness.store()
    }

    /// A key that no other rule and no other run uses.
    fn key(&self, name: &str) -> ScopedKey {
        ScopedKey::join(
            "conformance",
            self.rule,
            &format!("{:016x}-{name}", self.run),
        )
    }

    /// A claim by a new owner: lease one hour, retention a day, [`OnAbandoned::Hold`].
    fn request(&self, name: &str) -> ClaimRequest {
        ClaimRequest {
            lease: HOUR,
            retention: DAY,
            ..ClaimRequest::new(self.key(name), fingerprint())
        }
    }

    /// The same claim of another key.
    fn request_for(&self, key: ScopedKey) -> ClaimRequest {
        ClaimRequest {
            key,
            ..self.request("")
        }
    }

    /// A scope that no other rule and no other run uses.
    fn scope(&self, name: &str) -> String {
        format!("{}-{:016x}-{name}", self.rule, self.run)
    }

    /// The same claim by a new owner that would take over.
    fn rerun(&self, name: &str) -> ClaimRequest {
        ClaimRequest {
            on_abandoned: OnAbandoned::Rerun,
            ..self.request(name)
        }
    }

    async fn claim(&self, request: &ClaimRequest) -> Claimed {
        self.answered("claim", self.store().claim(request).await)
    }

    async fn acquire(&self, request: &ClaimRequest) -> Claim {
        self.acquire_with_notes(request).await.0
    }

    async fn acquire_with_notes(&self, request: &ClaimRequest) -> (Claim, Notes) {
        match self.claim(request).await {
            Claimed::Acquired { claim, notes } => {
                self.equal(claim.key(), &request.key, "the key of the granted claim");
                let owner = claim.owner();
                self.equal(owner, &request.owner, "the owner of the granted claim");
                (claim, notes)
            }
            Claimed::Existing(record) => {
                self.broken(&format!("the claim was not acquired: {record:?}"))
            }
        }
    }

    async fn existing(&self, request: &ClaimRequest) -> Record {
        match self.claim(request).await {
            Claimed::Existing(record) => record,
            Claimed::Acquired { claim, .. } => {
                self.broken(&format!("the claim was acquired: {claim:?}"))
            }
        }
    }

    /// A live claim.
    async fn started(&self, name: &str) -> Claim {
        self.acquire(&self.request(name)).await
    }

    /// A claim whose lease is over and whose retention is not.
    async fn stalled(&self, name: &str) -> Claim {
        let claim = self.started(name).await;
        self.age(claim.key(), 2 * HOUR).await;
        claim
    }

    /// A stalled claim, and the one that took over.
    async fn taken_over(&self, name: &str) -> (Claim, Claim) {
        let stale = self.stalled(name).await;
        (stale, self.acquire(&self.rerun(name)).await)
    }

    /// A live claim whose retention is over.
    async fn outlived(&self, name: &str) -> Claim {
        let claim = self.started(name).await;
        self.age(claim.key(), DAY - HOUR / 4).await;
        self.applied(self.renew(&claim, HOUR).await, "renewing");
        self.age(claim.key(), HOUR / 2).await;
        claim
    }

    /// A completed record.
    async fn finished(&self, name: &str) -> (Claim, Outcome) {
        let claim = self.started(name).await;
        let outcome = response(201, b"first");
        let completion = self.complete(&claim, &outcome, None).await;
        self.equal(completion, Completion::Recorded, "the first completion");
        (claim, outcome)
    }

    /// A released record.
    async fn released(&self, name: &str) -> Claim {
        let claim = self.started(name).await;
        self.applied(self.release(&claim).await, "releasing");
        claim
    }

    async fn renew(&self, claim: &Claim, lease: Duration) -> Fenced {
        self.answered("renew", self.store().renew(claim, lease).await)
    }

    async fn complete(
        &self,
        claim: &Claim,
        outcome: &Outcome,
        retention: Option<Duration>,
    ) -> Completion {
        let completion = self.store().complete(claim, outcome, retention).await;
        self.answered("complete", completion)
    }

    async fn release(&self, claim: &Claim) -> Fenced {
        self.answered("release", self.store().release(claim).await)
    }

    async fn abandon(&self, claim: &Claim) -> Fenced {
        self.answered("abandon", self.store().abandon(claim).await)
    }

    async fn annotate(&self, claim: &Claim, correlation: &str) -> Fenced {
        self.answered("annotate", self.store().annotate(claim, correlation).await)
    }

    async fn checkpoint(&self, claim: &Claim, name: &str, data: &'static [u8]) -> Fenced {
        let data = Bytes::from_static(data);
        let checkpoint = self.store().checkpoint(claim, name, &data).await;
        self.answered("checkpoint", checkpoint)
    }

    async fn resolve(&self, record: &Record, resolution: Resolution) -> Fenced {
        self.answered("resolve", self.store().resolve(record, &resolution).await)
    }

    async fn lookup(&self, key: &ScopedKey) -> Option<Record> {
        self.answered("lookup", self.store().lookup(key).await)
    }

    async fn remove(&self, key: &ScopedKey) -> bool {
        self.answered("remove", self.store().remove(key).await)
    }

    async fn erase(&self, within: &str, scope: &str, limit: usize) -> usize {
        let erased = self.store().erase(within, scope, limit).await;
        let erased = self.answered("erase", erased);
        self.check(erased <= limit, "erase removed more than its limit");
        erased
    }

    /// Erases until nothing is left to erase, and adds up.
    async fn erase_all(&self, within: &str, scope: &str) -> usize {
        let mut total = 0;
        for _ in 0..ENOUGH {
            match self.erase(within, scope, 100).await {
                0 => return total,
                erased => total += erased,
            }
        }
        self.broken("erase never came to an end")
    }

    async fn purge(&self, limit: usize) -> Purged {
        let purged = self.answered("purge", self.store().purge(limit).await);
        self.check(purged.removed <= limit, "purge removed more than its limit");
        self.check(
            purged.unresolved <= purged.removed,
            "purge counted more unresolved records than removed ones",
        );
        purged
    }

    /// Purges until nothing is left to purge, and adds up.
    async fn purge_all(&self) -> Purged {
        let mut total = Purged::default();
        for _ in 0..ENOUGH {
            let purged = self.purge(100).await;
            if purged.removed == 0 {
                return total;
            }
            total.removed += purged.removed;
            total.unresolved += purged.unresolved;
        }
        self.broken("purge never came to an end")
    }

    /// Walks through all abandoned records, a few at a time.
    async fn walk(&self, limit: usize) -> Vec<Record> {
        let mut records = Vec::new();
        let mut after = None;
        for _ in 0..ENOUGH {
            let page = self.store().abandoned(after.as_ref(), limit).await;
            let page = self.answered("abandoned", page);
            self.check(
                page.records.len() <= limit,
                "a page was longer than its limit",
            );
            records.extend(page.records);
            after = page.next;
            if after.is_none() {
                return records;
            }
        }
        self.broken("the walk through abandoned records never came to an end")
    }

    /// The record that must be there.
    async fn record(&self, key: &ScopedKey) -> Record {
        match self.lookup(key).await {
            Some(record) => record,
            None => self.broken(&format!("there is no record of {key:?}")),
        }
    }

    async fn age(&self, key: &ScopedKey, by: Duration) {
        self.harness.age(key, by).await;
    }

    /// Claims of one key by as many owners, all at once.
    async fn race(&self, requests: Vec<ClaimRequest>) -> Vec<Claimed> {
        let start = Arc::new(Barrier::new(requests.len()));
        let racing: Vec<_> = requests
            .into_iter()
            .map(|request| {
                let (store, start) = (self.store().clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    store.claim(&request).await
                })
            })
            .collect();
        let mut answers = Vec::new();
        for answer in racing {
            let answer = answer.await.expect("a claim panicked");
            answers.push(self.answered("claim", answer));
        }
        answers
    }

    /// That one claim was acquired, that it is the one on record, and that all others saw it.
    async fn one_winner(&self, answers: Vec<Claimed>) -> Claim {
        let mut winners = Vec::new();
        let mut seen = Vec::new();
        for answer in answers {
            match answer {
                Claimed::Acquired { claim, .. } => winners.push(claim),
                Claimed::Existing(record) => seen.push(record),
            }
        }
        self.equal(winners.len(), 1, "the number of claims acquired at once");
        let winner = winners.remove(0);
        for record in seen {
            self.equal(&record.owner, winner.owner(), "the owner that a loser saw");
        }
        let record = self.record(winner.key()).await;
        self.equal(&record.owner, winner.owner(), "the owner on record");
        self.equal(record.attempt, winner.attempt(), "the attempt on record");
        winner
    }

    /// Waits for something that must happen, so that a store that lets it wait for ever fails.
    async fn in_time<T>(&self, what: &str, event: impl Future<Output = T>) -> T {
        match tokio::time::timeout(PATIENCE, event).await {
            Ok(happened) => happened,
            Err(_) => self.broken(&format!("{what} within {PATIENCE:?}")),
        }
    }

    fn answered<T>(&self, called: &str, reply: Result<T, StoreError>) -> T {
        match reply {
            Ok(reply) => reply,
            Err(error) => self.broken(&format!("{called} failed: {error} ({error:?})")),
        }
    }

    fn applied(&self, fenced: Fenced, what: &str) {
        self.equal(fenced, Fenced::Applied, what);
    }

    fn lost(&self, fenced: Fenced, what: &str) {
        self.equal(fenced, Fenced::ClaimLost, what);
    }

    /// That a record is what it was; only the lease runs.
    fn unchanged(&self, before: &Record, after: &Record, what: &str) {
        let still = |record: &Record| {
            let mut record = record.clone();
            if let State::Started { lease_left, .. } = &mut record.state {
                *lease_left = Duration::ZERO;
            }
            record
        };
        self.equal(still(after), still(before), what);
    }

    /// How much is left of the lease of a started record.
    fn lease_left(&self, record: &Record) -> Duration {
        match record.state {
            State::Started { lease_left, .. } => lease_left,
            _ => self.broken(&format!("not started: {record:?}")),
        }
    }

    fn outcome<'r>(&self, record: &'r Record) -> &'r Outcome {
        match &record.state {
            State::Completed { outcome, .. } => outcome,
            _ => self.broken(&format!("not completed: {record:?}")),
        }
    }

    fn equal<T: PartialEq + Debug>(&self, got: T, want: T, what: &str) {
        self.check(
            got == want,
            &format!("{what}: got {got:?}, expected {want:?}"),
        );
    }

    fn check(&self, kept: bool, what: &str) {
        if !kept {
            self.broken(what);
        }
    }

    fn broken(&self, what: &str) -> ! {
        panic!("rule `{}` is broken: {what}", self.rule)
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of(&[b"POST", b"/charges", b"{\"amount\":100}"])
}

fn other_fingerprint() -> Fingerprint {
    Fingerprint::of(&[b"POST", b"/charges", b"{\"amount\":101}"])
}

fn response(status: u16, body: &[u8]) -> Outcome {
    let status = StatusCode::from_u16(status).unwrap_or_default();
    Outcome::response(status, &http::HeaderMap::new(), &[body], None)
}

/// The owner that nobody is.
fn stranger() -> Owner {
    Owner::random()
}

const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// After this, something that must happen counts as something that does not.
const PATIENCE: Duration = Duration::from_secs(30);
/// More pages and batches than any rule makes.
const ENOUGH: usize = 1_000;
