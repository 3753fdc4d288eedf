//! The table of nccl-tests 2.19, printed line by line as it grows, so that any program that reads the
//! original table reads this one; and a wider form with paceline's own columns at the end.
//!
//! Takes one row at a time and returns lines without line ends. Widths, precisions and trailing spaces
//! are those of the original. The columns are defined in [`figures`].

use std::slice::from_ref;

use paceline_table::table::Cell;

use super::figures::ColumnSet::{self, Extended, Standard};
use super::figures::{self, FIGURES, Figure, Place};
use super::number::{fitted, general};
use super::result::{Row, Skipped, average_bus_bandwidth, num_failed};

/// The width of the lines of nccl-tests.
const STANDARD_WIDTH: usize = 118;

/// The gap that nccl-tests leaves where one of the two timings is missing.
const NO_TIMING: &str = "                                ";

/// The explanation of paceline's own columns, which is printed once for all tables.
pub fn legend(columns: ColumnSet) -> Option<String> {
    (columns == Extended).then(figures::legend)
}

/// The lines above the rows.
pub fn header(columns: ColumnSet) -> String {
    fn heading<T>(figures: &[Figure<T>], set: ColumnSet, at: usize) -> String {
        cells(figures, set, |figure, _| match (at, &*figure.column.head.unit) {
            (0, _) => figure.column.head.label.to_string(),
            (_, "") => String::new(),
            (_, unit) => format!("({unit})"),
        })
    }
    let headings = |at| {
        let timing = heading(&FIGURES.timing, Standard, at);
        let standard = heading(&FIGURES.setting, Standard, at) + &timing + &timing;
        let own = heading(&FIGURES.timing, Extended, at)
            + &heading(from_ref(&FIGURES.effective), Extended, at)
            + &heading(&FIGURES.reference, Extended, at);
        line(columns, &format!("#{} ", &standard[3..]), &own)
    };
    let above = format!("#{:>74}{:>31}{:10}", "out-of-place", "in-place", "");
    ["#".to_owned(), above, headings(0), headings(1)].join("\n")
}

/// The line of a row.
pub fn print_row(columns: ColumnSet, row: &Row) -> String {
    let timing = |timing| match timing {
        // Before `N/A` the original has one space less than before a number.
        Some(timing) => {
            values(&FIGURES.timing, Standard, Some(timing)).replace("     N/A", "    N/A")
        }
        None => NO_TIMING.to_owned(),
    };
    let standard = values(&FIGURES.setting, Standard, Some(row))
        + &timing(row.out_of_place.as_ref())
        + &timing(row.in_place.as_ref());
    let own = values(&FIGURES.timing, Extended, row.timing())
        + &values(from_ref(&FIGURES.effective), Extended, row.timing())
        + &values(&FIGURES.reference, Extended, Some(row));
    line(columns, &standard[2..], &own)
}

/// The lines below the rows of the test called `name`.
pub fn footer(rows: &[Row], name: &str) -> String {
    let failed = num_failed(rows);
    let verdict = if failed == 0 { "OK" } else { "FAILED" };
    // After the trailing space the original writes a verdict, if the user has set a lowest bandwidth.
    format!(
        "# {:<20} : {failed} {verdict}\n# {:<20} : {} \n#\n# Collective test concluded: {name}\n#",
        "Out of bounds values",
        "Avg bus bandwidth",
        general(average_bus_bandwidth(rows))
    )
}

/// The line that replaces the row of something that was not measured.
pub fn print_skipped(skipped: &Skipped) -> String {
    let size = skipped.bytes.map_or("all sizes".to_owned(), |bytes| format!("{bytes} B"));
    let Skipped { transport, nproc, reason, .. } = skipped;
    format!("# skipped {size} over {transport} between {nproc} ranks: {reason}")
}

fn line(columns: ColumnSet, standard: &str, own: &str) -> String {
    match columns {
        Standard => standard.to_owned(),
        Extended => format!("{standard:<STANDARD_WIDTH$}{own}"),
    }
}

/// A cell for each figure with a place in this set, each with two spaces before it.
fn cells<T>(
    figures: &[Figure<T>],
    set: ColumnSet,
    cell: impl Fn(&Figure<T>, Place) -> String,
) -> String {
    let placed = figures.iter().filter_map(|figure| Some((figure, figure.place?)));
    let placed = placed.filter(|(_, place)| place.set == set);
    placed.map(|(figure, place)| format!("  {:>1$}", cell(figure, place), place.width)).collect()
}

/// The cells with the figures of `of`; `N/A` or `-` where a figure is missing.
fn values<T: 'static>(figures: &[Figure<T>], set: ColumnSet, of: Option<&T>) -> String {
    cells(figures, set, |figure, place| match of.map(|of| figure.their_value(of)) {
        Some(Cell::Text(text)) => text,
        Some(Cell::Number(value)) if value.is_finite() => {
            // Files have a part of 1 where the table has percent.
            let value = if figure.column.head.unit == "%" { 100.0 * value } else { value };
            if place.digits == 0 { general(value) } else { fitted(value, place.digits) }
        }
        Some(Cell::Whole(number)) => number.to_string(),
        _ if set == Standard => "N/A".to_owned(),
        _ => "-".to_owned(),
    })
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
        rows[2].out_of_place.as_mut().unwrap().wrong = None;
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
        unchecked.out_of_place.as_mut().unwrap().wrong = None;
        let mut lines = vec![legend(ColumnSet::Extended).unwrap(), header(ColumnSet::Extended)];
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
