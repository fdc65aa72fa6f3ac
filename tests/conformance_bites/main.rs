//! The conformance list finds what it is for: every rule fails for a store that breaks it, and each
//! mistake is found by the rule that names it.

mod naive;

use std::collections::BTreeSet;

use tower_idempotency::testing::conformance::rules;

use self::naive::{Fault, Naive};

/// What each mistake must be found by. Other rules may find it too.
const BITES: &[(Fault, &[&str])] = &[
    (
        Fault::CheckThenInsert,
        &[
            "of_many_concurrent_claims_one_is_acquired",
            "of_concurrent_claims_of_a_released_key_one_is_acquired",
            "of_concurrent_claims_of_an_expired_record_one_is_acquired",
            "of_concurrent_takeovers_one_is_acquired",
        ],
    ),
    (
        Fault::AttemptsBeginAtZero,
        &["a_fresh_key_is_acquired_as_attempt_one"],
    ),
    (Fault::ClaimWithoutRecord, &["a_granted_claim_is_on_record"]),
    (
        Fault::LosersRenewTheLease,
        &[
            "a_live_claim_of_another_owner_is_shown_and_left_alone",
            "an_abandoned_record_is_held",
        ],
    ),
    (
        Fault::LiveClaimsAreTakenOver,
        &["a_live_claim_is_not_taken_over"],
    ),
    (
        Fault::OtherFingerprintReplaces,
        &["another_fingerprint_replaces_nothing"],
    ),
    (
        Fault::NotReentrant,
        &["the_same_owner_is_acquired_again_with_the_same_attempt"],
    ),
    (
        Fault::ReentrantOnlyWhileLive,
        &["the_same_owner_is_acquired_again_after_its_lease_is_over"],
    ),
    (
        Fault::ReentrantKeepsTheLease,
        &["claiming_again_starts_the_lease_anew"],
    ),
    (
        Fault::ReentrantDropsTheNotes,
        &["claiming_again_hands_back_the_notes"],
    ),
    (
        Fault::ReentrantIgnoresTheFingerprint,
        &["the_same_owner_with_another_fingerprint_is_not_acquired"],
    ),
    (
        Fault::ReentrantAfterCompletion,
        &["the_same_owner_is_shown_the_outcome_once_it_completed"],
    ),
    (Fault::HoldIsIgnored, &["an_abandoned_record_is_held"]),
    (
        Fault::RerunIsIgnored,
        &["an_abandoned_record_is_taken_over_under_rerun"],
    ),
    (
        Fault::TakeoverIgnoresTheFingerprint,
        &["takeover_needs_the_same_fingerprint"],
    ),
    (Fault::TakeoverDropsTheNotes, &["takeover_keeps_the_notes"]),
    (
        Fault::TakeoverKeepsTheAttempt,
        &["an_abandoned_record_is_taken_over_under_rerun"],
    ),
    (
        Fault::ReleaseForgetsTheAttempt,
        &["a_released_key_is_claimed_afresh_with_the_next_attempt"],
    ),
    (
        Fault::ExpiredStandsUntilPurged,
        &[
            "an_expired_outcome_is_claimed_afresh",
            "an_expired_unknown_is_claimed_afresh",
        ],
    ),
    (
        Fault::RetentionRunsFromTheFirstClaim,
        &["every_acquired_claim_counts_its_retention_from_itself"],
    ),
    (Fault::RetentionIsTheLease, &["an_abandoned_record_is_held"]),
    (Fault::RenewByAnyone, &["renew_needs_the_owner"]),
    (Fault::CompleteByAnyone, &["complete_needs_the_owner"]),
    (Fault::ReleaseByAnyone, &["release_needs_the_owner"]),
    (Fault::AbandonByAnyone, &["abandon_needs_the_owner"]),
    (Fault::AnnotateByAnyone, &["annotate_needs_the_owner"]),
    (Fault::CheckpointByAnyone, &["checkpoint_needs_the_owner"]),
    (
        Fault::FencingNeedsALiveLease,
        &[
            "an_owner_may_act_after_its_lease_is_over",
            "renewing_revives_a_lease_that_is_over",
        ],
    ),
    (
        Fault::FencingIgnoresTheState,
        &[
            "no_move_changes_a_completed_record",
            "no_move_but_a_claim_changes_a_released_record",
        ],
    ),
    (
        Fault::RenewalAddsToTheLease,
        &["renewing_starts_the_lease_anew"],
    ),
    (Fault::RenewalOnlyOnce, &["renewing_again_is_applied"]),
    (
        Fault::CompletionMakesARecord,
        &["no_move_but_a_claim_makes_a_record"],
    ),
    (
        Fault::AnnotatingKeepsTheFirst,
        &["annotating_keeps_the_last_correlation"],
    ),
    (
        Fault::CheckpointsAreSorted,
        &["checkpoints_keep_their_order"],
    ),
    (
        Fault::CheckpointsAreAppended,
        &["a_repeated_checkpoint_replaces_its_data"],
    ),
    (
        Fault::CompletionLosesTheFingerprint,
        &["completing_keeps_the_fingerprint"],
    ),
    (
        Fault::CompletionLosesTheNotes,
        &["completing_keeps_owner_attempt_and_notes"],
    ),
    (
        Fault::OutcomesLoseTheirTrailers,
        &["every_form_of_outcome_round_trips"],
    ),
    (
        Fault::LargeOutcomesAreRefused,
        &["an_outcome_of_one_mebibyte_round_trips"],
    ),
    (
        Fault::RepeatedCompletionIsLost,
        &["completing_again_returns_the_outcome_that_stands"],
    ),
    (
        Fault::CompletionOverwrites,
        &["an_outcome_is_never_overwritten"],
    ),
    (
        Fault::LookThenComplete,
        &["of_concurrent_completions_one_is_recorded"],
    ),
    (
        Fault::RepeatedReleaseIsLost,
        &["releasing_again_is_applied"],
    ),
    (
        Fault::ReleaseOfNothingIsLost,
        &["releasing_an_unknown_key_is_applied"],
    ),
    (Fault::AbandoningDoesNothing, &["abandoning_ends_the_lease"]),
    (
        Fault::AbandoningMovesTheLease,
        &["abandoning_again_changes_nothing"],
    ),
    (
        Fault::RenewalMovesTheExpiry,
        &["renewing_does_not_move_the_expiry"],
    ),
    (
        Fault::CompletionMovesTheExpiry,
        &["completing_does_not_move_an_expiry_that_is_ahead"],
    ),
    (
        Fault::CompletionNeverMovesTheExpiry,
        &["completing_after_the_expiry_counts_the_retention_once_more"],
    ),
    (
        Fault::RetentionOfTheCompletionIsIgnored,
        &["completing_with_a_retention_replaces_the_expiry"],
    ),
    (
        Fault::ZeroIsNoRetention,
        &["a_retention_of_zero_is_over_at_once"],
    ),
    (
        Fault::ExpiryIgnoresTheLease,
        &["a_slow_handler_keeps_its_record"],
    ),
    (
        Fault::LookupShowsTheExpired,
        &["an_expired_record_is_not_shown"],
    ),
    (Fault::PurgeDoesNothing, &["purge_removes_what_is_expired"]),
    (
        Fault::PurgeIgnoresItsLimit,
        &["purge_removes_no_more_than_its_limit"],
    ),
    (
        Fault::PurgeCountsNoUnresolved,
        &["purge_counts_the_unresolved"],
    ),
    (
        Fault::PurgeTakesTheAbandoned,
        &["purge_leaves_unexpired_records"],
    ),
    (
        Fault::PurgeTakesLiveClaims,
        &["purge_leaves_a_live_claim_whose_retention_is_over"],
    ),
    (
        Fault::PagesOverlap,
        &["abandoned_lists_each_abandoned_record_once"],
    ),
    (
        Fault::PagesByOffset,
        &["abandoned_misses_nothing_while_records_are_closed"],
    ),
    (
        Fault::ExpiredIsNotListed,
        &["abandoned_lists_each_abandoned_record_once"],
    ),
    (
        Fault::ListedWithoutNotes,
        &["abandoned_shows_whole_records"],
    ),
    (
        Fault::ResolutionCountsAsAttempt,
        &["resolving_as_completed_keeps_the_outcome"],
    ),
    (
        Fault::ResolvedReleaseRemoves,
        &["resolving_as_released_frees_the_key"],
    ),
    (
        Fault::ResolutionNeverMovesTheExpiry,
        &["resolving_after_the_expiry_counts_the_retention_once_more"],
    ),
    (
        Fault::ResolveIgnoresALiveLease,
        &["resolve_needs_a_lease_that_is_over"],
    ),
    (
        Fault::ResolveIgnoresTheLease,
        &["resolve_needs_the_lease_that_was_seen"],
    ),
    (
        Fault::ResolveIgnoresTheOwner,
        &["resolve_needs_the_owner_that_was_seen"],
    ),
    (
        Fault::ResolveIgnoresTheState,
        &["resolve_leaves_a_closed_record_alone"],
    ),
    (
        Fault::LookThenResolve,
        &["two_sweepers_cannot_both_resolve"],
    ),
    (
        Fault::CorrelationIsAscii,
        &["a_record_round_trips_every_field"],
    ),
    (Fault::LookupMakesARecord, &["an_unknown_key_has_no_record"]),
    (Fault::KeysIgnoreCase, &["keys_are_literal"]),
    (Fault::PartsAreConcatenated, &["scopes_do_not_collide"]),
    (
        Fault::RemoveKeepsLiveClaims,
        &["remove_erases_a_record_in_every_state"],
    ),
    (Fault::RemoveTakesAPattern, &["remove_erases_one_key_only"]),
    (
        Fault::EraseKeepsLiveClaims,
        &["erase_forgets_a_scope_in_every_state"],
    ),
    (Fault::EraseTakesAPattern, &["erase_takes_one_scope_only"]),
    (
        Fault::EraseIgnoresTheNamespace,
        &["erase_keeps_to_the_namespaces_it_is_given"],
    ),
    (
        Fault::EraseIgnoresItsLimit,
        &["erase_removes_no_more_than_its_limit"],
    ),
    (
        Fault::EraseGivesUpEarly,
        &["erase_removes_no_more_than_its_limit"],
    ),
    (
        Fault::ChangedWaitsForAnyChange,
        &["changed_returns_at_once_unless_that_owner_holds_a_live_claim"],
    ),
    (
        Fault::ChangedSeesCompletionsOnly,
        &[
            "changed_returns_when_the_claim_is_released",
            "changed_returns_when_the_record_is_removed",
        ],
    ),
    (
        Fault::ChangedMissesCompletions,
        &["changed_returns_when_the_claim_is_completed"],
    ),
    (
        Fault::AbandoningDoesNothing,
        &["changed_returns_when_the_claim_is_abandoned"],
    ),
    (
        Fault::ChangedIgnoresTheLease,
        &["changed_returns_when_the_lease_ends"],
    ),
    (
        Fault::ChangedIgnoresItsLimit,
        &["changed_gives_up_after_its_time"],
    ),
    (Fault::ChangedWakesOne, &["changed_wakes_every_waiter"]),
    (
        Fault::LeavingTakesOthersAlong,
        &["a_waiter_that_leaves_disturbs_nobody"],
    ),
];

#[test]
fn a_store_without_a_mistake_passes_every_rule() {
    let broken: Vec<_> = names()
        .into_iter()
        .filter_map(|rule| broken_by(None, rule))
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_mistake_is_found_by_the_rule_that_names_it() {
    let mut missed = Vec::new();
    for (fault, rules) in BITES {
        for rule in *rules {
            match broken_by(Some(*fault), rule) {
                Some(message) if message.contains(&format!("`{rule}`")) => {}
                Some(message) => missed.push(format!("{fault:?}: {rule} said {message:?}")),
                None => missed.push(format!("{fault:?}: {rule} passed")),
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn every_rule_can_fail() {
    let bitten: BTreeSet<_> = BITES
        .iter()
        .flat_map(|(_, rules)| *rules)
        .copied()
        .collect();
    assert_eq!(bitten, names().into_iter().collect());
}

#[test]
fn every_public_function_is_on_the_list_under_its_own_name() {
    let sources = [
        include_str!("../../src/testing/conformance/claiming.rs"),
        include_str!("../../src/testing/conformance/completing.rs"),
        include_str!("../../src/testing/conformance/erasing.rs"),
        include_str!("../../src/testing/conformance/fencing.rs"),
        include_str!("../../src/testing/conformance/keeping.rs"),
        include_str!("../../src/testing/conformance/keys.rs"),
        include_str!("../../src/testing/conformance/reconciling.rs"),
        include_str!("../../src/testing/conformance/releasing.rs"),
        include_str!("../../src/testing/conformance/waiting.rs"),
    ];
    let mut written = BTreeSet::new();
    for source in sources {
        for function in source.split("pub async fn ").skip(1) {
            let name = function.split('<').next().unwrap();
            let says = format!("\"{name}\"");
            assert!(function.contains(&says), "{name} names itself otherwise");
            written.insert(name);
        }
    }
    assert_eq!(written, names().into_iter().collect());
}

fn names() -> Vec<&'static str> {
    rules::<Naive>().into_iter().map(|rule| rule.name).collect()
}

/// What the rule says of a store with this mistake, or `None` if it passes.
fn broken_by(fault: Option<Fault>, rule: &str) -> Option<String> {
    let rules = rules::<Naive>();
    let rule = rules.into_iter().find(|known| known.name == rule).unwrap();
    // Paused: where a rule waits in vain, it runs out of patience at once.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let checked = tokio::spawn(async move {
            let harness = Naive::new(fault);
            (rule.check)(&harness).await;
        });
        let panic = checked.await.err()?.into_panic();
        let message = panic.downcast_ref::<String>().cloned();
        Some(message.unwrap_or_else(|| "another panic".to_owned()))
    })
}
