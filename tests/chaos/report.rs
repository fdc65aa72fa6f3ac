//! A run as Markdown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Write};
use std::time::Duration;

use super::run::Report;

impl Report {
    /// One row of the table of [`header`].
    pub fn row(&self) -> String {
        let findings = &self.findings;
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            self.kind.name(),
            self.variant.name(),
            self.seed,
            self.operations,
            self.faults.values().sum::<usize>(),
            self.effects,
            self.reconciled,
            findings.duplicates.len(),
            findings.differing.len(),
            findings.lost.len(),
            findings.stuck.len(),
            findings.untrue.len(),
            Recovery(&self.recoveries),
        )
    }

    /// Everything about one run.
    pub fn document(&self) -> String {
        let mut text = format!(
            "\n## {}, {}, seed {}\n\n{}\n{}\n\nTook {:.0?}.\n",
            self.kind.name(),
            self.variant.name(),
            self.seed,
            header(),
            self.row(),
            self.took,
        );
        table(&mut text, "fault", &self.faults);
        table(&mut text, "answer to a request", &self.answers);
        text
    }

    /// The keys with which something is wrong, and all that is known of them.
    pub fn complaints(&self) -> String {
        let found = &self.findings;
        let kinds = [
            ("duplicate", &found.duplicates),
            ("differing", &found.differing),
            ("lost", &found.lost),
            ("stuck", &found.stuck),
            ("untrue", &found.untrue),
        ];
        let mut text = String::new();
        for (kind, keys) in kinds {
            for key in keys.iter().take(5) {
                let _ = writeln!(text, "{kind}: {key}");
                self.describe(&mut text, key);
            }
        }
        text
    }

    fn describe(&self, text: &mut String, key: &str) {
        let history = &self.history;
        for effect in history.effects.iter().filter(|of| of.key == key) {
            let _ = writeln!(text, "    {effect:?}");
        }
        for ruling in history.rulings.iter().filter(|of| of.key == key) {
            let _ = writeln!(text, "    {ruling:?}");
        }
        let seen: BTreeSet<_> = history.successes.get(key).into_iter().flatten().collect();
        for answer in seen {
            let _ = writeln!(text, "    seen: {answer:?}");
        }
        let _ = writeln!(text, "    at last: {:?}", history.at_last.get(key));
    }
}

pub fn header() -> &'static str {
    "| store | variant | seed | operations | faults | effects | reconciled | duplicates | differing | lost | stuck | untrue | time to recover, p50 / p99 |\n\
     |---|---|---|---|---|---|---|---|---|---|---|---|---|"
}

fn table(text: &mut String, what: &str, counts: &BTreeMap<String, usize>) {
    let _ = writeln!(text, "\n| {what} | times |\n|---|---|");
    for (name, count) in counts {
        let _ = writeln!(text, "| {name} | {count} |");
    }
}

/// Of operations that met a fault: from the first failure to the answer.
struct Recovery<'a>(&'a [Duration]);

impl Display for Recovery<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted = self.0.to_vec();
        sorted.sort();
        let Some(last) = sorted.len().checked_sub(1) else {
            return write!(f, "none");
        };
        let at = |percent: usize| sorted[last * percent / 100];
        write!(f, "{:.2?} / {:.2?} of {}", at(50), at(99), sorted.len())
    }
}
