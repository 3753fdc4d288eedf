//! The answer of a study, as lines: the best case, and the conclusions beside a base.
//!
//! The rows of an outcome go in. The rule of [`noise`](crate::noise) decides which cases differ. Single runs decide nothing.

use paceline_files::printable;
use paceline_observe::figures::figure::Better;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::figures::table::find;
use paceline_table::table::Cell;

use crate::noise::{Effect, MIN_ROUNDS};
use crate::outcome::{Outcome, Row};
use crate::report::head;

/// The comparison of strategies, of which the exact ones can be best.
pub(crate) const STRATEGIES: &str = "strategies";
/// The advice where single runs decide nothing.
const REPEAT: &str = "`paceline sweep` repeats runs in rounds, which tell a difference from noise";

impl Outcome {
    /// The conclusions, a line for each scene: the best case of a ranking and of single runs, or the cases that pay beside the
    /// base.
    pub fn verdicts(&self) -> Vec<String> {
        let is_plain = |base: &Row| base.scene.is_empty() && self.origin.rounds < MIN_ROUNDS;
        match self.rows.first() {
            Some(first) if first.place.is_some() || is_plain(first) => {
                let runs = self.rows.iter().zip(&self.runs);
                let is_exact = |row: &Row| row.has_bits_of_base || self.experiment != STRATEGIES;
                let runs = runs.filter(|(row, _)| row.failure.is_none() && is_exact(row));
                let named: Vec<(&str, &[RunSummary])> =
                    runs.map(|(row, runs)| (&*row.variant, &**runs)).collect();
                best(&self.compared_by, &named).into_iter().collect()
            }
            _ => self.scenes().filter_map(|rows| self.beside_base(rows)).collect(),
        }
    }

    fn beside_base(&self, rows: &[Row]) -> Option<String> {
        let [base, others @ ..] = rows else { return None };
        let [mut pays, mut costs, mut none, mut unclear] = [const { Vec::new() }; 4];
        let (mut needed, is_higher) = (0, better(&self.compared_by) == Better::Higher);
        let mut effects: Vec<_> =
            others.iter().filter_map(|row| Some((row, row.effect?))).collect();
        effects.sort_by(|(_, a), (_, b)| b.ratio.total_cmp(&a.ratio));
        for (row, effect) in effects {
            let words = format!("{} {}", row.variant, effect.words());
            if effect.is_unclear() {
                needed = needed.max(effect.needed_rounds());
                let Effect { low, high, .. } = effect;
                unclear.push(format!("{} between {low:.2}x and {high:.2}x", row.variant));
            } else if effect.is_none() {
                none.push(words);
            } else if (effect.ratio > 1.0) == is_higher {
                pays.push(words);
            } else {
                costs.push(words);
            }
        }
        let advice = format!("; about {needed} rounds, or longer --steps, would say");
        let noisy = ("too noisy to say", unclear);
        let named = [("pays", pays), ("costs", costs), ("no difference", none), noisy].into_iter();
        let parts: Vec<String> = named
            .filter(|(_, all)| !all.is_empty())
            .map(|(name, all)| format!("{name}: {}", all.join(", ")))
            .collect();
        let scene = if base.scene.is_empty() { String::new() } else { format!("{}: ", base.scene) };
        let advice = if needed > 0 { &*advice } else { "" };
        let words = || format!("{scene}beside {}, {}{advice}", base.variant, parts.join("; "));
        (!parts.is_empty()).then(words)
    }
}

fn better(figure: &str) -> Better {
    find(figure).and_then(|figure| figure.swept).unwrap_or(Better::Higher)
}

/// The best of some cases, each with its runs, by a figure: by how much, and whether by more than noise.
pub fn best(figure: &str, cases: &[(&str, &[RunSummary])]) -> Option<String> {
    let values = |runs: &[RunSummary]| -> Vec<f64> {
        runs.iter().filter_map(|run| run.number(figure)).collect()
    };
    let median = |runs| paceline_table::stats::median(values(runs));
    let known = cases.iter().filter_map(|(name, runs)| Some((name, *runs, median(runs)?)));
    let mut known: Vec<_> = known.collect();
    known.sort_by(|a, b| a.2.total_cmp(&b.2));
    if better(figure) == Better::Higher {
        known.reverse();
    }
    let [(name, runs, value), (next, of_next, next_value), ..] = known[..] else { return None };
    let head = head(figure);
    let shown = Cell::Number(value).shown(&head);
    let (name, next) = (printable(name), printable(next));
    let with = format!("{name} with {shown} {}", head.words());
    let begin = format!("Best: {with}");
    let beside = if known.len() > 2 { format!("{next}, the next") } else { next.into_owned() };
    let ratio = value / next_value;
    Some(match Effect::of(&values(of_next), &values(runs)) {
        Some(effect) if effect.is_none() => {
            let Effect { low, high, .. } = effect;
            format!("No clear best: {with}, between {low:.2}x and {high:.2}x beside {beside}")
        }
        Some(effect) => format!("{begin}, {} beside {beside}", effect.words()),
        // How the steps of a run vary does not say how far the next run like it is off: of equal runs, half seemed to differ.
        None => format!("First of single runs: {with}, {ratio:.2}x beside {beside}. {REPEAT}"),
    })
}
