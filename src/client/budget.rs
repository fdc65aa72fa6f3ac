//! How much retrying one host gets: clients that all retry keep a service down that could recover.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens per host, shared by all clones.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    capacity: u32,
    /// What is spent, by host; a host that is not in it has all its tokens.
    spent: Arc<Mutex<HashMap<String, u32>>>,
}

impl Budget {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            spent: Arc::default(),
        }
    }

    /// Takes the tokens for one retry, if they are there.
    pub(super) fn take(&self, host: &str) -> bool {
        let mut hosts = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        let host = counted_as(&hosts, host);
        let spent = hosts.get(host).copied().unwrap_or(0);
        match spent.checked_add(COST) {
            Some(spent) if spent <= self.capacity => {
                hosts.insert(host.to_owned(), spent);
                true
            }
            _ => false,
        }
    }

    /// An operation got its answer after so many retries: they were worth it, and are given back.
    pub(super) fn give_back(&self, host: &str, retries: u32) {
        let mut hosts = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        let host = counted_as(&hosts, host);
        let Some(spent) = hosts.get_mut(host) else {
            return;
        };
        let back = retries.saturating_mul(COST).max(AT_ONCE);
        *spent = spent.saturating_sub(back);
        if *spent == 0 {
            hosts.remove(host);
        }
    }
}

/// Whose tokens a host takes: its own, or those that all share which come when the table is full.
fn counted_as<'h>(hosts: &HashMap<String, u32>, host: &'h str) -> &'h str {
    match hosts.len() < HOSTS || hosts.contains_key(host) {
        true => host,
        false => "",
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(CAPACITY)
    }
}

/// A hundred retries in a row that were for nothing.
const CAPACITY: u32 = 500;
const COST: u32 = 5;
/// How many hosts have tokens of their own. One that never answers is never forgotten, and there may
/// be many where others name the hosts.
const HOSTS: usize = 4096;
/// For an answer to the first try: five of them pay for one retry.
const AT_ONCE: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_retries_use_it_up_for_one_host_and_not_for_another() {
        let budget = Budget::default();
        for _ in 0..100 {
            assert!(budget.take("a:443"));
        }
        assert!(!budget.take("a:443"));
        assert!(!budget.clone().take("a:443"));
        assert!(budget.take("b:443"));
    }

    #[test]
    fn retries_that_helped_are_given_back_and_answers_at_once_fill_it_slowly() {
        let budget = Budget::new(10);
        assert!(budget.take("a") && budget.take("a") && !budget.take("a"));
        budget.give_back("a", 1);
        assert!(budget.take("a") && !budget.take("a"));
        for _ in 0..4 {
            budget.give_back("a", 0);
            assert!(!budget.take("a"));
        }
        budget.give_back("a", 0);
        assert!(budget.take("a"));
    }

    #[test]
    fn it_never_holds_more_than_its_capacity_and_forgets_hosts_that_are_well() {
        let budget = Budget::new(5);
        budget.give_back("a", 7);
        assert!(budget.take("a") && !budget.take("a"));
        budget.give_back("a", 7);
        assert!(budget.spent.lock().unwrap().is_empty());
        assert!(budget.take("a") && !budget.take("a"));
    }

    #[test]
    fn hosts_that_never_answer_do_not_fill_the_memory_and_have_no_more_than_others() {
        let budget = Budget::new(10);
        for host in 0..10 * HOSTS {
            budget.take(&format!("{host}.example"));
        }
        assert!(budget.spent.lock().unwrap().len() <= HOSTS + 1);
        assert!(!budget.take("one.more.example"));
        // Those that were known keep their own.
        assert!(budget.take("0.example") && !budget.take("0.example"));
    }
}
