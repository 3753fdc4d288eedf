//! Compares a report with the measurements of other programs, for each number of ranks and size.

use paceline_host::text::plain_table;

use super::result::{BenchReport, place, program_name};
use super::series::Series;

/// The table. It has one line for each row of the report and each series with the same operation, number
/// of ranks and size. A ratio above 1 means that paceline took less time. If nothing can be compared, the
/// text says so.
pub fn table(report: &BenchReport, compared: &[Series], width: Option<usize>) -> String {
    let mut lines = Vec::new();
    for row in &report.rows {
        let Some(ours) = row.timing() else { continue };
        for theirs in compared {
            let same_op = theirs.op.as_ref().is_none_or(|op| *op == row.op);
            let time = theirs.points.iter().find(|(bytes, _)| *bytes == row.bytes);
            if let (true, true, Some((_, time_us))) = (same_op, theirs.nproc == row.nproc, time) {
                lines.push([
                    program_name(row, &report.rows),
                    theirs.name.clone(),
                    row.nproc.to_string(),
                    row.bytes.to_string(),
                    format!("{:.4}", ours.median_us / 1e3),
                    format!("{:.4}", time_us / 1e3),
                    format!("{:.2}", time_us / ours.median_us),
                ]);
            }
        }
    }
    if lines.is_empty() {
        return "Nothing to compare: no operation, number of ranks and size in common".to_owned();
    }
    let ours = format!("Ours, {} (ms)", place(&report.rows));
    let names = ["Ours", "Theirs", "Ranks", "Size (B)", &ours, "Theirs (ms)", "Theirs/ours"];
    plain_table(names, 2, &lines, width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn gloo(points: &[(u64, f64)]) -> Series {
        Series { name: "torch-gloo".to_owned(), nproc: 2, op: None, points: points.to_vec() }
    }

    #[test]
    fn sizes_and_ranks_in_common_are_compared() {
        let report = samples::report(vec![
            samples::row(2, 1_000_000, 250.0),
            samples::row(2, 100_000_000, 25_000.0),
            samples::row(4, 1_000_000, 700.0),
        ]);
        let text = table(&report, &[gloo(&[(1_000_000, 3600.0), (100_000_000, 95_000.0)])], None);
        insta::assert_snapshot!(text, @r"
        Ours  Theirs      Ranks   Size (B)  Ours, in place (ms)  Theirs (ms)  Theirs/ours
        ----  ----------  -----  ---------  -------------------  -----------  -----------
        shm   torch-gloo      2    1000000               0.2500       3.6000        14.40
        shm   torch-gloo      2  100000000              25.0000      95.0000         3.80
        ");
    }

    #[test]
    fn other_operations_are_not_compared() {
        let report = samples::report(vec![samples::row(2, 8, 250.0)]);
        let other = Series { op: Some("all_gather".to_owned()), ..gloo(&[(8, 300.0)]) };
        for series in [other, gloo(&[(16, 300.0)])] {
            assert!(table(&report, &[series], None).starts_with("Nothing to compare"));
        }
    }
}
