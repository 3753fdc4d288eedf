//! The study of buckets as text: the table, the fit and the best sizes.

use paceline_table::table::Columns;

use super::fit::Fit;
use super::{BASELINES, Row, best};
use crate::step::{MEDIANS, communication_columns, step_columns};
use crate::studies::bucket_cost::size_words;

/// The columns of the study. Sizes and numbers of buckets have as many decimals as they need.
pub fn columns() -> Columns<Row> {
    let columns = Columns::new()
        .add("strategy", "strategy", ("", 0), "The strategy.", |row: &Row| row.strategy.clone())
        .add("", "bucket", ("MiB", 0), "", |row| number_or_dash(row.bucket_mb))
        .add("", "all-reduces", ("", 0), "", |row| number_or_dash(row.num_buckets))
        .add("bucket_mb", "", ("MiB", 0), "The bucket size.", |row| row.bucket_mb)
        .add("num_buckets", "", ("", 0), "All-reduces per step.", |row| row.num_buckets);
    let columns = step_columns(columns, ["", ""], |row| &row.times);
    communication_columns(columns, [("exposed", 2), ("exposed", 3), ("hidden", 3)], |row| {
        &row.times
    })
}

/// The table of `rows`, and the lines below it.
pub fn text(rows: &[Row], fit: &Fit, params: u64, width: Option<usize>) -> String {
    let named: Vec<String> = BASELINES.map(|(name, what)| format!("{name}: {what}")).to_vec();
    let mut text = format!(
        "{}\n{}\n{}\n{MEDIANS}\n",
        size_words(params, 4 * params),
        columns().table(rows).fitted(width),
        named.join("; ")
    );
    let least = |what: &str, of: fn(&Row) -> f64| {
        let row = best(rows, of)?;
        Some(format!("{what} at {} MiB ({:.2} ms)", row.bucket_mb?, of(row)))
    };
    let measured: Vec<String> = [
        least("shortest step", |row| row.times.step.median),
        least("least exposed", |row| row.times.exposed_ms),
    ]
    .into_iter()
    .flatten()
    .collect();
    text += &format!("measured: {}\n", measured.join(", "));
    text += "cost of communication = n o + s / (n w), n buckets, s bytes of gradients\n";
    text += &match fit {
        Fit::Found { op_ms, gb_per_s, r_squared, best_mb } => format!(
            "o = {op_ms:.4} ms per operation, w = {gb_per_s:.2} GB/s (R^2 = {r_squared:.2}); least \
             exposed at sqrt(s o w) = {best_mb:.2} MiB"
        ),
        Fit::Refused(why) => why.clone(),
    };
    text
}

/// The number with as many decimals as it has, or a dash.
fn number_or_dash(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;
    use crate::step::StepTimes;
    use crate::studies::bucket_cost::MIB;

    #[test]
    fn the_best_size_stands_beside_the_measured_one() {
        let params = (16.0 * MIB) as u64;
        let mut rows = rows(&[64.0, 16.0, 4.0, 1.0], 0.5, 32.0);
        let naive = Row {
            strategy: "simple_ddp".into(),
            bucket_mb: None,
            num_buckets: Some(10.0),
            times: StepTimes { hidden_ms: 0.0, ..rows[3].times },
        };
        rows.push(naive);
        let fit = Fit::of(&rows, 4 * params);
        insta::assert_snapshot!(text(&rows, &fit, params, None), @r"
        16,777,216 parameters, 64.00 MiB of gradients
        strategy    bucket MiB  all-reduces  step ms  exposed %  exposed ms  hidden ms
        ----------  ----------  -----------  -------  ---------  ----------  ---------
        ddp         1           64            132.50      24.53      32.500      2.000
        ddp         4           16            110.00       9.09      10.000      2.000
        ddp         16          4             110.00       9.09      10.000      2.000
        ddp         64          1             132.50      24.53      32.500      2.000
        simple_ddp  -           10            132.50      24.53      32.500      0.000
        simple_ddp: one all-reduce per parameter; flat_ddp: one all-reduce of everything
        step: median over the rounds of the runs' median step, of the slowest rank; other times: medians over the rounds of means over ranks and steps
        measured: shortest step at 4 MiB (110.00 ms), least exposed at 4 MiB (10.00 ms)
        cost of communication = n o + s / (n w), n buckets, s bytes of gradients
        o = 0.5000 ms per operation, w = 2.10 GB/s (R^2 = 1.00); least exposed at sqrt(s o w) = 8.00 MiB
        ");
    }
}
