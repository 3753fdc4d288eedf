//! Compares a report with the measurements of other programs, for each number of ranks and size.

use paceline_host::text::plain_table;

use paceline_table::stats::{Summary, median};

use super::number::fitted;
use super::result::{BenchReport, Row, place, program_name};
use super::series::Measured;

/// The table. It has one line for each transport, number of ranks and size of the report, and each time with the same
/// operation, number of ranks and size. The times of another program that was measured in turns are one line. A ratio above 1
/// means that paceline took less time; over several rounds it is the median, with the range. If nothing can be compared, the
/// text says so.
pub fn table(report: &BenchReport, compared: &[Measured], width: Option<usize>) -> String {
    let mut lines = Vec::new();
    let key = |row: &Row| (row.transport.clone(), row.algorithm.clone(), row.nproc, row.bytes);
    for row in &report.rows {
        let rounds: Vec<&Row> = report.rows.iter().filter(|other| key(other) == key(row)).collect();
        if !std::ptr::eq(rounds[0], row) {
            continue;
        }
        let is_same =
            |of: &&Measured| of.is_of(&row.op) && (of.nproc, of.bytes) == (row.nproc, row.bytes);
        let in_turns: Vec<&Measured> = report.theirs.iter().filter(is_same).collect();
        let of_files = compared.iter().filter(is_same).map(|of| vec![of]);
        lines.extend(of_files.chain([in_turns]).filter_map(|theirs| {
            let ours = rounds.iter().map(|row| row.timing().median_us);
            let pairs = ours.clone().zip(theirs.iter().cycle());
            let ratio = Summary::of(pairs.map(|(ours, theirs)| theirs.time_us / ours).collect())?;
            let [low, middle, high] = [ratio.min, ratio.p50, ratio.max].map(|of| fitted(of, 4));
            Some([
                program_name(row, &report.rows),
                theirs[0].name.clone(),
                row.nproc.to_string(),
                row.bytes.to_string(),
                format!("{:.4}", median(ours)? / 1e3),
                format!("{:.4}", median(theirs.iter().map(|of| of.time_us))? / 1e3),
                if rounds.len() > 1 { format!("{middle} ({low} to {high})") } else { middle },
            ])
        }));
    }
    if lines.is_empty() {
        return "Nothing to compare: no operation, number of ranks and size in common".to_owned();
    }
    let names = ["Ours", "Theirs", "Ranks", "Size (B)", "Ours (ms)", "Theirs (ms)", "Theirs/ours"];
    format!("{}\nOur times are {}.", plain_table(names, 2, &lines, width), place(&report.rows))
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
        Ours  Theirs      Ranks   Size (B)  Ours (ms)  Theirs (ms)  Theirs/ours
        ----  ----------  -----  ---------  ---------  -----------  -----------
        shm   torch-gloo      2    1000000     0.2500       3.6000         14.4
        shm   torch-gloo      2  100000000    25.0000      95.0000         3.80
        Our times are in place.
        ");
    }

    #[test]
    fn rounds_are_compared_in_pairs() {
        let rows = [200.0, 100.0, 400.0].map(|us| samples::row(2, 8, us));
        let theirs = [800.0, 200.0, 1000.0].map(|us| gloo(8, us));
        let report = BenchReport { theirs: theirs.into(), ..samples::report(rows.into()) };
        let text = table(&report, &[], None);
        insta::assert_snapshot!(text, @r"
        Ours  Theirs      Ranks  Size (B)  Ours (ms)  Theirs (ms)          Theirs/ours
        ----  ----------  -----  --------  ---------  -----------  -------------------
        shm   torch-gloo      2         8     0.2000       0.8000  2.50 (2.00 to 4.00)
        Our times are in place.
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
