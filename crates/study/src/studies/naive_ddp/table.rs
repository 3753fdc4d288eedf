//! The study as text and as a chart: the table, the best sizes, and the noise.

use paceline_table::chart::Picture;
use paceline_table::table::Columns;
use serde::{Serialize, Serializer};

use super::best::{SideBySide, measured};
use super::theory::Theory;
use super::{BUCKETED, Buckets, PLAIN, Row};
use crate::rank;
use crate::step::{MEDIANS, RANGES, communication_columns, step_columns};
use crate::studies::bucket_cost::size_words;
use crate::studies::buckets;
use crate::study::Setting;

/// The columns of the study.
pub fn columns() -> Columns<Row> {
    let columns = Columns::new()
        .add("case", "case", ("", 0), "What was run.", |row: &Row| row.case.clone())
        .add("strategy", "", ("", 0), "The strategy.", |row| row.strategy.clone())
        .add("bucket_mb", "", ("MiB", 0), "The bucket size.", Row::bucket_mb)
        .add("num_buckets", "", ("", 0), "How many.", |row| row.buckets.map(|of| of.count));
    let columns = step_columns(columns, ["least", "most"], |row| &row.times);
    let labels = [("communication", 1), ("exposed", 2), ("hidden", 2)];
    communication_columns(columns, labels, |row| &row.times).add(
        "ops_per_step",
        "ops/step",
        ("", 2),
        "With that of the loss.",
        |row| row.ops_per_step,
    )
}

/// As an object by the keys of the columns.
impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let columns = columns().0;
        serializer.collect_map(columns.iter().map(|column| (&column.head.key, column.cell(self))))
    }
}

/// The table of `rows`, and the lines below it.
pub fn text(
    rows: &[Row],
    theory: &Theory,
    best: Option<&SideBySide>,
    setting: &Setting,
    gradient_bytes: u64,
    width: Option<usize>,
) -> String {
    let mut lines = vec![
        size_words(setting.params, gradient_bytes),
        columns().table(rows).fitted(width),
        format!(
            "naive: one all-reduce per parameter ({}); flat: one all-reduce of everything ({}); overlapped: one \
             per parameter during the backward pass ({}); bucketed: {BUCKETED}",
            PLAIN[0].1, PLAIN[1].1, PLAIN[2].1
        ),
        format!("{MEDIANS}; {RANGES}; ops/step: operations, that of the loss included"),
    ];
    lines.extend(same_buckets(rows));
    lines.push(rank::rule(setting.rounds));
    lines.extend(against_naive(rows));
    lines.extend(best_measured(rows));
    lines.push(
        "cost of communication = s / (w n) + n o, with n buckets, s bytes of gradients".to_owned(),
    );
    lines.push(match theory {
        Theory::Found { op_ms, gb_per_s, source, best_buckets, best_mb } => format!(
            "o = {op_ms:.4} ms per operation, w = {gb_per_s:.2} GB/s, {source}: least at n = sqrt(s / (w o)) = \
             {best_buckets:.2}, buckets of sqrt(s o w) = {best_mb:.2} MiB"
        ),
        Theory::Refused(why) => why.clone(),
    });
    lines.extend(best.map(side_by_side));
    lines.join("\n")
}

/// Says which sizes make equally many buckets, as all sizes do that hold every gradient.
fn same_buckets(rows: &[Row]) -> Option<String> {
    let mut groups: Vec<(usize, Vec<String>)> = Vec::new();
    for Buckets { mb, count } in rows.iter().filter_map(|row| row.buckets) {
        match groups.last_mut() {
            Some((known, sizes)) if *known == count => sizes.push(mb.to_string()),
            _ => groups.push((count, vec![mb.to_string()])),
        }
    }
    let same = groups.into_iter().filter(|(_, sizes)| sizes.len() > 1);
    let words = same.map(|(num, sizes)| format!("{} MiB ({num})", sizes.join(", ")));
    let words: Vec<String> = words.collect();
    (!words.is_empty()).then(|| format!("sizes with equally many buckets: {}", words.join("; ")))
}

/// Compares every other case with the naive one.
fn against_naive(rows: &[Row]) -> Option<String> {
    let (naive, others) = rows.split_first()?;
    let word = |row: &Row| format!("{} {}", row.case, row.times.against(&naive.times));
    let words: Vec<String> = others.iter().map(word).collect();
    Some(format!("step against {}: {}", naive.case, words.join("; ")))
}

fn best_measured(rows: &[Row]) -> Option<String> {
    let best = measured(rows)?;
    let is_like = |row: &&Row| {
        row.bucket_mb().is_some_and(|mb| Some(mb) != best.bucket_mb())
            && !row.times.step.differs_from(&best.times.step)
    };
    let like = rows.iter().filter(is_like).filter_map(Row::bucket_mb);
    let like: Vec<String> = like.map(|mb| mb.to_string()).collect();
    let noise = if like.is_empty() {
        "no other size is within noise of it".to_owned()
    } else {
        format!("within noise of it: {} MiB", like.join(", "))
    };
    let step_ms = best.times.step.median;
    Some(format!("measured best: {} MiB, {step_ms:.2} ms; {noise}", best.bucket_mb()?))
}

fn side_by_side(best: &SideBySide) -> String {
    let (theory_mb, measured_mb) = (best.theory_mb, best.measured.bucket_mb().unwrap_or_default());
    let verdict =
        if best.differs { "they differ by more than noise" } else { "within noise of each other" };
    let (theory, measured) = (best.theory.times.words(), best.measured.times.words());
    match best.same_as_mb {
        Some(same) if Some(same) == best.measured.bucket_mb() => format!(
            "{theory_mb} MiB makes the same buckets as {same} MiB, the measured best: {measured}"
        ),
        Some(same) => format!(
            "{theory_mb} MiB makes the same buckets as {same} MiB, {theory}; measured best {measured_mb} MiB, {measured}: \
             {verdict}"
        ),
        None => format!(
            "once more, in turns: by theory {theory_mb} MiB, {theory}; measured best {measured_mb} MiB, {measured}: \
             {verdict}"
        ),
    }
}

/// The chart of step times: a curve for the sizes, and a level line for every other case.
pub fn chart(rows: &[Row], setting: &Setting, ranks: usize) -> Picture {
    let case = |row: &Row| {
        let case = row.case.split(',').next().unwrap_or_default();
        (format!("{case} ({})", row.strategy), (row.bucket_mb(), row.times.step.median))
    };
    let cases: Vec<_> = rows.iter().map(case).collect();
    buckets::chart::steps_by_size(&cases, setting, ranks)
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;
    use crate::studies::bucket_cost::MIB;
    use crate::studies::scaling::verdict::tests::setting;

    fn theory() -> Theory {
        Theory::Found {
            op_ms: 0.5,
            gb_per_s: 2.0,
            source: "by the formula of the emulated link".into(),
            best_buckets: 8.19,
            best_mb: 7.8125,
        }
    }

    #[test]
    fn the_size_by_theory_stands_beside_the_measured_best() {
        let setting = Setting { params: (16.0 * MIB) as u64, ..setting(2) };
        let rows = rows(&[(1.0, 14, 15.0), (10.0, 3, 13.0), (100.0, 1, 24.0), (1000.0, 1, 24.2)]);
        let mut at_13_25 = rows[4].clone();
        at_13_25.times.step.median = 13.25;
        let best = SideBySide {
            theory_mb: 7.8125,
            same_as_mb: None,
            theory: at_13_25,
            measured: rows[4].clone(),
            differs: false,
        };
        insta::assert_snapshot!(text(&rows, &theory(), Some(&best), &setting, 1 << 26, None));
    }

    #[test]
    fn sizes_with_the_same_buckets_need_no_further_run() {
        let rows = rows(&[(1.0, 14, 15.0), (10.0, 3, 13.0)]);
        let of = |at: usize, differs| {
            let [theory, measured] = [at, 4].map(|at| rows[at].clone());
            let same_as_mb = theory.bucket_mb();
            side_by_side(&SideBySide { theory_mb: 7.5, same_as_mb, theory, measured, differs })
        };
        insta::assert_snapshot!(
            of(4, false),
            @"7.5 MiB makes the same buckets as 10 MiB, the measured best: 13.00 ms (12.50 to 13.50)"
        );
        insta::assert_snapshot!(
            of(3, true),
            @"7.5 MiB makes the same buckets as 1 MiB, 15.00 ms (14.50 to 15.50); measured best 10 MiB, 13.00 ms (12.50 to 13.50): they differ by more than noise"
        );
    }

    #[test]
    fn two_rounds_say_nothing() {
        let mut rows = rows(&[(1.0, 14, 15.0), (10.0, 3, 13.0)]);
        rows.iter_mut().for_each(|row| row.times.step.rounds = 2);
        let text = against_naive(&rows).unwrap();
        assert_eq!(text.matches("within noise").count(), 4, "{text}");
        assert!(best_measured(&rows).unwrap().ends_with("within noise of it: 1 MiB"));
    }

    #[test]
    fn the_chart_has_a_level_line_for_each_case_without_buckets() {
        let chart = chart(&rows(&[(1.0, 14, 15.0), (10.0, 3, 13.0)]), &setting(2), 2);
        let names: Vec<&str> = chart.series().iter().map(|line| line.name.as_str()).collect();
        let plain = ["naive (simple_ddp)", "flat (flat_ddp)", "overlapped (simple_ddp_async)"];
        assert_eq!(names, [&["bucketed (ddp)"][..], &plain].concat());
    }
}
