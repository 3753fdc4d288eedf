//! The console's lines about memory when a run has ended: by rank and phase, and beside the prediction.
//!
//! Input: the reports of the ranks, and the prediction before the run. Output: lines. Ranks with the same numbers
//! share a row.

use paceline_memory::Category;
use paceline_table::fitted::fitted;

use crate::figures::facts::Facts;
use crate::record::memory::{Bytes, RESERVED, RankMemory, TOTAL};

/// The columns of the table of phases that stand for a category each. The other categories are added up in a further column.
const SHOWN: [Category; 5] = [
    Category::Parameters,
    Category::Gradients,
    Category::Optimizer,
    Category::Unsharded,
    Category::Activations,
];

/// All lines about memory. Tables fit `width`.
pub(crate) fn memory_lines(facts: &Facts, width: Option<usize>) -> Vec<String> {
    let (ranks, predicted) = (facts.memory(), facts.memory_predicted());
    let is_at_least = facts.outcome.predicted.ranks.iter().any(|need| need.is_at_least);
    let mut lines = vec![
        "Memory after each phase, and the most at once within it (Peak), MB:".to_owned(),
        phase_table(&ranks, width),
    ];
    // The memory of pipeline stages is not predicted yet.
    if !predicted.is_empty() {
        let which = if is_at_least {
            " (activations are predicted as a lower bound, because a layer of this model cannot be rehearsed)"
        } else {
            ""
        };
        lines.push(format!("Memory of a step, the most at once by category, MB{which}:"));
        lines.push(prediction_table(&ranks, &predicted, width));
    }
    lines.extend(ranks.iter().enumerate().filter_map(|(rank, memory)| rank_line(rank, memory)));
    lines
}

fn mb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e6)
}

fn of(bytes: &Bytes, name: &str) -> u64 {
    bytes.get(name).copied().unwrap_or(0)
}

/// One line of a rank, in the words of PyTorch's allocator: the allocated and reserved bytes after a step, and their peaks.
fn rank_line(rank: usize, memory: &RankMemory) -> Option<String> {
    let now = memory.after_step()?;
    let [model, gradient, optimizer, allocated, reserved] =
        ["parameters", "gradients", "optimizer", TOTAL, RESERVED].map(|name| mb(of(now, name)));
    let [peak, peak_reserved] = [TOTAL, RESERVED].map(|name| mb(of(&memory.peak_bytes, name)));
    Some(format!(
        "Rank {rank} memory, MB: model {model}, gradient {gradient}, optimizer {optimizer}, allocated {allocated}, \
         reserved {reserved}, peak allocated {peak}, peak reserved {peak_reserved}"
    ))
}

/// The rows of all ranks, in which ranks with the same rows share them. The first cell of a rank's first row names the
/// ranks.
fn merged(of_rank: impl Iterator<Item = Vec<Vec<String>>>) -> Vec<Vec<String>> {
    let (all, mut merged, mut first) = (of_rank.collect::<Vec<_>>(), Vec::new(), 0);
    for same in all.chunk_by(|one, next| one == next) {
        let last = first + same.len() - 1;
        let name = if first == last { first.to_string() } else { format!("{first}-{last}") };
        for (at, row) in same[0].iter().enumerate() {
            let head = if at == 0 { name.clone() } else { String::new() };
            merged.push([&[head], &row[..]].concat());
        }
        first = last + 1;
    }
    merged
}

/// The categories in which some rank has had a byte.
fn used<'a>(bytes: impl Iterator<Item = &'a Bytes> + Clone) -> impl Fn(&Category) -> bool {
    move |category| bytes.clone().any(|bytes| of(bytes, category.name()) > 0)
}

fn title(name: &str) -> String {
    let (first, rest) = name.split_at(1.min(name.len()));
    first.to_uppercase() + rest
}

fn phase_table(ranks: &[&RankMemory], width: Option<usize>) -> String {
    let phases = ranks.iter().flat_map(|memory| &memory.phases);
    let is_used = used(phases.map(|phase| &phase.peak_bytes));
    let shown: Vec<Category> = SHOWN.into_iter().filter(is_used).collect();
    let names = shown.iter().map(|category| title(category.name()));
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let ends = words(&["Other", "Total", "Peak", "Reserved"]);
    let head = [words(&["Rank", "Phase"]), names.collect(), ends].concat();
    let rows_of = |memory: &&RankMemory| {
        let row = |phase: &crate::record::memory::PhaseMemory| {
            let now = &phase.current_bytes;
            let parts = shown.iter().map(|category| of(now, category.name()));
            let other = of(now, TOTAL).saturating_sub(parts.clone().sum());
            let ends = [other, of(now, TOTAL), of(&phase.peak_bytes, TOTAL), of(now, RESERVED)];
            let numbers = parts.chain(ends).map(mb);
            [phase.phase.clone()].into_iter().chain(numbers).collect::<Vec<_>>()
        };
        memory.phases.iter().map(row).collect::<Vec<_>>()
    };
    fitted(&head, &merged(ranks.iter().map(rows_of)), |at| at < 2, width)
}

/// The predicted and the measured peaks of a step, and their difference in percent of the prediction.
fn prediction_table(ranks: &[&RankMemory], predicted: &[Bytes], width: Option<usize>) -> String {
    let measured: Vec<Bytes> = ranks.iter().map(|memory| memory.peak_of_step()).collect();
    let is_used = used(measured.iter().chain(predicted));
    let names: Vec<&str> =
        Category::ALL.into_iter().filter(is_used).map(Category::name).chain([TOTAL]).collect();
    let titles = names.iter().map(|name| title(name));
    let head: Vec<String> = ["Rank".to_owned(), String::new()].into_iter().chain(titles).collect();
    let rows_of = |(predicted, measured): (&Bytes, &Bytes)| {
        let row = |word: &str, number: &dyn Fn(&str) -> String| {
            let numbers = names.iter().map(|name| number(name));
            [word.to_owned()].into_iter().chain(numbers).collect::<Vec<String>>()
        };
        vec![
            row("predicted", &|name| mb(of(predicted, name))),
            row("measured", &|name| mb(of(measured, name))),
            row("difference, %", &|name| difference(of(predicted, name), of(measured, name))),
        ]
    };
    let rows = merged(predicted.iter().zip(&measured).map(rows_of));
    fitted(&head, &rows, |at| at < 2, width)
}

/// How far the measured bytes are from the predicted ones.
fn difference(predicted: u64, measured: u64) -> String {
    match (predicted, measured) {
        (same, also) if same == also => "0".to_owned(),
        (0, _) => "-".to_owned(),
        _ => format!("{:+.2}", 100.0 * (measured as f64 / predicted as f64 - 1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::memory::PhaseMemory;

    fn bytes(numbers: &[(&str, u64)]) -> Bytes {
        numbers.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
    }

    fn memory(activations: u64) -> RankMemory {
        let phase = |name: &str, now: u64, peak: u64| PhaseMemory {
            phase: name.to_owned(),
            current_bytes: bytes(&[
                ("parameters", 2_000_000),
                ("activations", now),
                ("communication", 24),
                (TOTAL, 2_000_024 + now),
                (RESERVED, 5_000_000),
            ]),
            peak_bytes: bytes(&[
                ("parameters", 2_000_000),
                ("activations", peak),
                ("communication", 24),
                (TOTAL, 2_000_024 + peak),
                (RESERVED, 5_000_000),
            ]),
        };
        RankMemory {
            phases: vec![
                phase("initialization", 0, 0),
                phase("forward", activations, activations),
                phase("backward", 0, activations + 500_000),
                phase("step", 0, 0),
            ],
            peak_bytes: bytes(&[(TOTAL, 2_500_024 + activations), (RESERVED, 5_000_000)]),
        }
    }

    #[test]
    fn the_lines_of_a_run() {
        let (two, other) = (memory(1_000_000), memory(900_000));
        let ranks = [&two, &two, &other];
        let predicted = bytes(&[
            ("parameters", 2_000_000),
            ("activations", 1_500_000),
            ("communication", 24),
            (TOTAL, 3_500_024),
        ]);
        let mut lines =
            vec![phase_table(&ranks, None), prediction_table(&ranks, &vec![predicted; 3], None)];
        lines.extend(rank_line(2, &other));
        insta::assert_snapshot!(lines.join("\n"));
    }
}
