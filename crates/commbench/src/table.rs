//! The table of nccl-tests 2.19, for programs that read it; and a wider form with paceline's own columns at the end.
//!
//! Widths, precisions and trailing spaces are those of the original.

use clap::ValueEnum;
use paceline_memory::DType;
use paceline_table::stats::median;

use super::number::{fitted, general};
use super::result::{Row, Skipped, Timing, average_bus_bandwidth, num_failed};

/// Which columns the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColumnSet {
    /// Those of nccl-tests
    Standard,
    /// Also p99, maximum, effective bandwidth, prediction, and share of the memory bandwidth
    Extended,
}

/// The width of the lines of nccl-tests.
const STANDARD_WIDTH: usize = 118;

/// The gap that nccl-tests leaves where the timing in place is missing.
const NO_TIMING: &str = "                                ";

/// The explanation of paceline's own columns, which is printed once for all tables.
pub fn legend(columns: ColumnSet) -> Option<&'static str> {
    let own = "# p99, max  of the in-place times; of the out-of-place times if there are no others\n\
        # eff.bw    = 2 x size / the same time, in GiB/s (2^30 B), for any number of ranks\n\
        # predicted = steps x latency + bytes of the busiest rank / bandwidth, on the emulated link\n\
        # %mem      = 100 x bytes read and written / out-of-place time / memory bandwidth; > 100 in caches";
    (columns == ColumnSet::Extended).then_some(own)
}

/// The lines above the rows.
pub fn header(columns: ColumnSet) -> String {
    let above = format!("#{:>74}{:>31}{:10}", "out-of-place", "in-place", "");
    let timing = ["     time   algbw   busbw  #wrong", "     (us)  (GB/s)  (GB/s)        "];
    let [names, units] = timing.map(|of| of.repeat(2));
    let names = format!("#       size         count      type   redop    root{names} ");
    let units = format!("#        (B)    (elements)                          {units} ");
    [
        "#",
        &above,
        &line(columns, &names, "      p99      max   eff.bw  predicted    %mem"),
        &line(columns, &units, "     (us)     (us)  (GiB/s)       (us)     (%)"),
    ]
    .join("\n")
}

/// Element type, reduction, and root padded to its column, as nccl-tests writes them.
pub(super) fn their_words(row: &Row) -> [String; 3] {
    let dtype = row.dtype.parse().ok().map_or(&*row.dtype, |dtype: DType| dtype.nccl_name());
    let redop = row.redop.as_deref().unwrap_or("none");
    [dtype.into(), redop.into(), format!("{:>6}", row.root.map_or(-1, |root| root as i64))]
}

/// The line of a row.
pub fn print_row(columns: ColumnSet, row: &Row) -> String {
    let [dtype, redop, root] = their_words(row);
    let standard = format!("{:>12}  {:>12}  {dtype:>8}  {redop:>6}  {root}", row.bytes, row.count);
    let in_place = row.in_place.as_ref().map_or(NO_TIMING.to_owned(), timing);
    let standard = standard + &timing(&row.out_of_place) + &in_place;
    let of = row.timing();
    let own = format!(
        "  {:>7}  {:>7}  {:>7}  {:>9}  {:>6}",
        number(Some(of.p99_us), 7, "-"),
        number(Some(of.max_us), 7, "-"),
        number(Some(of.effective_bw_gib_s), 6, "-"),
        number(row.predicted_us, 7, "-"),
        number(row.memory_fraction.map(|part| 100.0 * part), 6, "-")
    );
    line(columns, &standard, &own)
}

fn timing(of: &Timing) -> String {
    let number = |value, width| number(Some(value), width, "N/A");
    // Before `N/A` the original has one space less than before a number.
    let wrong = of.wrong.map_or("  N/A".into(), |wrong| format!("{:>6}", general(wrong as f64)));
    let (time, alg_bw, bus_bw) =
        (number(of.median_us, 7), number(of.alg_bw, 6), number(of.bus_bw, 6));
    format!("  {time:>7}  {alg_bw:>6}  {bus_bw:>6}  {wrong}")
}

/// A number of at most `width` characters, or `missing` without a value.
fn number(value: Option<f64>, width: usize, missing: &str) -> String {
    let value = value.filter(|value| value.is_finite());
    value.map_or(missing.to_owned(), |value| fitted(value, width))
}

/// The lines below the rows of the test called `name`.
pub fn footer(rows: &[Row], name: &str) -> String {
    let failed = num_failed(rows);
    let verdict = if failed == 0 { "OK" } else { "FAILED" };
    // After the trailing space the original may write a verdict on a lowest bandwidth.
    format!(
        "# {:<20} : {failed} {verdict}\n# {:<20} : {} \n#\n# Collective test concluded: {name}\n#",
        "Out of bounds values",
        "Avg bus bandwidth",
        general(average_bus_bandwidth(rows))
    )
}

/// The line that says how far the times of these rows can be trusted.
pub fn spread(rows: &[Row]) -> String {
    let ratio = |row: &Row| row.timing().p99_us / row.timing().median_us;
    let worst = rows.iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let worst = worst.map_or((0.0, 0), |row| (ratio(row), row.bytes));
    let half = median(rows.iter().map(ratio)).unwrap_or_default();
    format!(
        "# {:<20} : {half:.2} at the median size, at most {:.2} ({} B)",
        "Spread (p99/median)", worst.0, worst.1
    )
}

/// The line in place of a row that was not measured.
pub fn print_skipped(skipped: &Skipped) -> String {
    let size = skipped.bytes.map_or("all sizes".to_owned(), |bytes| format!("{bytes} B"));
    let Skipped { transport, nproc, reason, .. } = skipped;
    format!("# skipped {size} over {transport} between {nproc} ranks: {reason}")
}

fn line(columns: ColumnSet, standard: &str, own: &str) -> String {
    match columns {
        ColumnSet::Standard => standard.to_owned(),
        ColumnSet::Extended => format!("{standard:<STANDARD_WIDTH$}{own}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    /// `|` marks the ends of lines, some of which are spaces.
    fn marked(lines: &[String]) -> String {
        lines.iter().flat_map(|text| text.lines()).map(|line| format!("{line}|\n")).collect()
    }

    #[test]
    fn the_standard_table_is_the_original_one() {
        let mut rows = vec![
            samples::row(2, 8, 6.2),
            samples::row(2, 536_870_912, 14_594.4),
            samples::row(4, 8_589_934_592, 323_195.0),
        ];
        rows[1].redop = None;
        rows[1].root = Some(0);
        rows[1].dtype = "bf16".to_owned();
        rows[2].out_of_place.wrong = None;
        let mut lines = vec![header(ColumnSet::Standard)];
        lines.extend(rows.iter().map(|row| print_row(ColumnSet::Standard, row)));
        lines.push(footer(&rows, "all_reduce"));
        insta::assert_snapshot!(marked(&lines), @r"
        #|
        #                                                              out-of-place                       in-place          |
        #       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong |
        #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         |
                   8             2     float     sum      -1     6.20    0.00    0.00       0     6.20    0.00    0.00       0|
           536870912     134217728  bfloat16    none       0  14594.4   36.79   36.79       0  14594.4   36.79   36.79       0|
          8589934592    2147483648     float     sum      -1   323195   26.58   39.87    N/A   323195   26.58   39.87       0|
        # Out of bounds values : 0 OK|
        # Avg bus bandwidth    : 25.5515 |
        #|
        # Collective test concluded: all_reduce|
        #|
        ");
    }

    #[test]
    fn the_extended_table_adds_columns_and_their_formulas() {
        let mut full = samples::row(2, 100_000_000, 25_000.0);
        full.predicted_us = Some(80_000.0);
        full.memory_fraction = Some(0.815);
        let mut lacking = samples::row(2, 1_000_000, 300.0);
        lacking.in_place = None;
        let mut unchecked = samples::row(2, 4, 5.0);
        unchecked.out_of_place.wrong = None;
        let mut lines =
            vec![legend(ColumnSet::Extended).unwrap().to_owned(), header(ColumnSet::Extended)];
        let rows = [full, lacking, unchecked];
        lines.extend(rows.iter().map(|row| print_row(ColumnSet::Extended, row)));
        insta::assert_snapshot!(marked(&lines), @r"
        # p99, max  of the in-place times; of the out-of-place times if there are no others|
        # eff.bw    = 2 x size / the same time, in GiB/s (2^30 B), for any number of ranks|
        # predicted = steps x latency + bytes of the busiest rank / bandwidth, on the emulated link|
        # %mem      = 100 x bytes read and written / out-of-place time / memory bandwidth; > 100 in caches|
        #|
        #                                                              out-of-place                       in-place          |
        #       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong       p99      max   eff.bw  predicted    %mem|
        #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)              (us)     (us)  (GiB/s)       (us)     (%)|
           100000000      25000000     float     sum      -1  25000.0    4.00    4.00       0  25000.0    4.00    4.00       0  37500.0  50000.0     7.45    80000.0   81.50|
             1000000        250000     float     sum      -1   300.00    3.33    3.33       0                                    450.00   600.00     6.21          -       -|
                   4             1     float     sum      -1     5.00    0.00    0.00    N/A     5.00    0.00    0.00       0      7.50    10.00     0.00          -       -|
        ");
    }

    #[test]
    fn wrong_results_fail_the_table() {
        let mut row = samples::row(2, 8, 6.2);
        row.in_place.as_mut().unwrap().wrong = Some(1_234_567);
        assert!(print_row(ColumnSet::Standard, &row).ends_with("  1.23457e+06"));
        let footer = footer(&[row], "all_reduce");
        assert!(footer.starts_with("# Out of bounds values : 1 FAILED\n"), "{footer}");
    }

    #[test]
    fn what_was_skipped_says_why() {
        let skipped = &samples::report(Vec::new()).skipped[0];
        assert_eq!(
            print_skipped(skipped),
            "# skipped 1024000000 B over shm between 6 ranks: \
             6 ranks need 12.3 GB, 8.0 GB may be used"
        );
    }
}
