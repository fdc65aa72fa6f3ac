//! What must hold after a run, whatever happened in it.

use std::collections::{BTreeMap, BTreeSet};

use super::ledger::{Effect, Ruling};

/// What a client can tell of an answer, and what has to be the same for all of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    pub status: u16,
    pub content_type: Option<String>,
    pub body: String,
}

/// All that is known of a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// What the ledger holds, in its order.
    pub effects: Vec<Effect>,
    /// What the reconciler said.
    pub rulings: Vec<Ruling>,
    /// Successes that clients saw, by key. Those that were marked as not saved are not among them.
    pub successes: BTreeMap<String, Vec<Answer>>,
    /// What each key answers after the faults: its replay, or what it says instead.
    pub at_last: BTreeMap<String, Result<Answer, String>>,
}

/// The keys with which something is wrong, by what it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// More than one effect.
    pub duplicates: BTreeSet<String>,
    /// Two clients saw different successes.
    pub differing: BTreeSet<String>,
    /// A success that a client saw is not what the key replays, or has no effect in the ledger.
    pub lost: BTreeSet<String>,
    /// No final answer.
    pub stuck: BTreeSet<String>,
    /// The reconciler said what is not so.
    pub untrue: BTreeSet<String>,
}

impl History {
    pub fn check(&self) -> Findings {
        let mut findings = Findings::default();
        let mut effects: BTreeMap<&str, Vec<&Effect>> = BTreeMap::new();
        for effect in &self.effects {
            effects.entry(&effect.key).or_default().push(effect);
        }
        for (key, effects) in &effects {
            if effects.len() > 1 {
                findings.duplicates.insert((*key).to_owned());
            }
        }
        let happened = |key: &str, answer: &Answer| {
            let of_key = effects.get(key).into_iter().flatten();
            of_key.into_iter().any(|effect| effect.body == answer.body)
        };
        for (key, successes) in &self.successes {
            if successes.iter().any(|answer| *answer != successes[0]) {
                findings.differing.insert(key.clone());
            }
            let at_last = self.at_last.get(key).and_then(|last| last.as_ref().ok());
            let stands = |answer: &Answer| at_last == Some(answer) && happened(key, answer);
            if !successes.iter().all(stands) {
                findings.lost.insert(key.clone());
            }
        }
        for (key, last) in &self.at_last {
            match last {
                Err(_) => {
                    findings.stuck.insert(key.clone());
                }
                Ok(answer) if !happened(key, answer) => {
                    findings.lost.insert(key.clone());
                }
                Ok(_) => {}
            }
        }
        for Ruling {
            key,
            attempt,
            happened,
        } in &self.rulings
        {
            let mut of_key = effects.get(key.as_str()).into_iter().flatten();
            let is_so = of_key.any(|effect| effect.attempt <= *attempt);
            if is_so != *happened {
                findings.untrue.insert(key.clone());
            }
        }
        findings
    }
}

impl Findings {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

mod tests {
    use super::*;

    const KEY: &str = "key";

    fn effect(attempt: u32, body: &str) -> Effect {
        Effect {
            key: KEY.to_owned(),
            attempt,
            body: body.to_owned(),
        }
    }

    fn ruling(attempt: u32, happened: bool) -> Ruling {
        Ruling {
            key: KEY.to_owned(),
            attempt,
            happened,
        }
    }

    fn answer(body: &str) -> Answer {
        Answer {
            status: 201,
            content_type: None,
            body: body.to_owned(),
        }
    }

    /// Attempt 1 was ruled out, attempt 2 moved the money, and everybody knows.
    fn sound() -> History {
        History {
            effects: vec![effect(2, "paid")],
            rulings: vec![ruling(1, false), ruling(2, true)],
            successes: BTreeMap::from([(KEY.to_owned(), vec![answer("paid"), answer("paid")])]),
            at_last: BTreeMap::from([(KEY.to_owned(), Ok(answer("paid")))]),
        }
    }

    fn only(of: impl Fn(&mut Findings) -> &mut BTreeSet<String>) -> Findings {
        let mut findings = Findings::default();
        of(&mut findings).insert(KEY.to_owned());
        findings
    }

    #[test]
    fn a_sound_history_has_no_findings() {
        assert!(sound().check().is_clean());
    }

    #[test]
    fn a_second_effect_is_a_duplicate() {
        let mut history = sound();
        history.effects.push(effect(3, "paid again"));
        assert_eq!(history.check(), only(|found| &mut found.duplicates));
    }

    #[test]
    fn two_answers_to_one_key_differ() {
        let mut history = sound();
        history.successes.get_mut(KEY).unwrap()[1].content_type = Some("text/plain".to_owned());
        let mut expected = only(|found| &mut found.differing);
        // One of them is not what the key replays.
        expected.lost.insert(KEY.to_owned());
        assert_eq!(history.check(), expected);
    }

    #[test]
    fn a_success_that_is_not_replayed_or_has_no_effect_is_lost() {
        let lost = only(|found| &mut found.lost);
        let mut history = sound();
        history
            .at_last
            .insert(KEY.to_owned(), Ok(answer("something else")));
        assert_eq!(history.check(), lost);
        let mut history = sound();
        history.effects.clear();
        history.rulings.clear();
        assert_eq!(history.check(), lost);
        // Nobody saw it, and still it is replayed without an effect.
        history.successes.clear();
        assert_eq!(history.check(), lost);
    }

    #[test]
    fn a_key_without_a_final_answer_is_stuck() {
        let mut history = sound();
        history.successes.clear();
        history
            .at_last
            .insert(KEY.to_owned(), Err("409 in_progress".to_owned()));
        assert_eq!(history.check(), only(|found| &mut found.stuck));
    }

    #[test]
    fn a_ruling_against_the_ledger_is_untrue() {
        let untrue = only(|found| &mut found.untrue);
        for wrong in [ruling(1, true), ruling(2, false), ruling(3, false)] {
            let mut history = sound();
            history.rulings.push(wrong);
            assert_eq!(history.check(), untrue);
        }
    }
}
