//! Compares a report with the measurements of other programs, for each number of ranks and size.

use paceline_host::text::plain_table;

use super::result::{BenchReport, place, program_name};
use super::series::Measured;

/// The table. It has one line for each row of the report and each time with the same operation, number
/// of ranks and size. A ratio above 1 means that paceline took less time. If nothing can be compared, the
/// text says so.
pub fn table(report: &BenchReport, compared: &[Measured], width: Option<usize>) -> String {
    let mut lines = Vec::new();
    for row in &report.rows {
        let ours_us = row.timing().median_us;
        let is_same =
            |of: &&Measured| of.is_of(&row.op) && (of.nproc, of.bytes) == (row.nproc, row.bytes);
        lines.extend(compared.iter().filter(is_same).map(|theirs| {
            [
                program_name(row, &report.rows),
                theirs.name.clone(),
                row.nproc.to_string(),
                row.bytes.to_string(),
                format!("{:.4}", ours_us / 1e3),
                format!("{:.4}", theirs.time_us / 1e3),
                format!("{:.2}", theirs.time_us / ours_us),
            ]
        }));
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

    fn gloo(bytes: u64, us: f64) -> Measured {
        samples::time("torch-gloo", 2, bytes, us)
    }

    #[test]
    fn sizes_and_ranks_in_common_are_compared() {
        let report = samples::report(vec![
            samples::row(2, 1_000_000, 250.0),
            samples::row(2, 100_000_000, 25_000.0),
            samples::row(4, 1_000_000, 700.0),
        ]);
        let theirs = [gloo(1_000_000, 3600.0), gloo(100_000_000, 95_000.0)];
        let text = table(&report, &theirs, None);
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
        let other = Measured { op: Some("all_gather".to_owned()), ..gloo(8, 300.0) };
        for time in [other, gloo(16, 300.0)] {
            assert!(table(&report, &[time], None).starts_with("Nothing to compare"));
        }
    }
}
