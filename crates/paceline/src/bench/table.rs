//! The table of nccl-tests 2.19, line by line as it grows, so that whatever reads theirs reads ours;
//! and a wider form of it with our own columns at the end.
//!
//! In goes one row at a time, out come lines without their line ends. Widths, precisions and the
//! spaces at line ends are the original's. Times are medians, where the original's are means.

use super::number::{fitted, general};
use super::result::{
    Row, Skipped, Timing, average_bus_bandwidth, effective_bandwidth_gib_s, num_failed,
};

/// Which columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Columns {
    /// The original's.
    #[default]
    Standard,
    /// Behind them the 99th percentile, the maximum, the effective bandwidth, the prediction and the
    /// part of the memory bandwidth.
    Extended,
}

/// Width of the original's lines, which those of [`Columns::Extended`] are filled up to.
const STANDARD_WIDTH: usize = 118;

/// Where one of the two timings is missing, as wide as the original's gap.
const NO_TIMING: &str = "                                ";

/// What the columns mean that are not the original's, once for all tables.
pub fn legend(columns: Columns) -> Option<String> {
    let lines = [
        "# p99, max  of the in-place times; of the out-of-place ones where there are no others",
        "# eff.bw    = 2 x size / the same time, in GiB/s (2^30 B), with any number of ranks",
        "# predicted = steps x latency + bytes of the busiest rank / bandwidth, on the emulated link",
        "# %mem      = 100 x bytes read and written / out-of-place time / memory bandwidth; > 100 in caches",
    ];
    (columns == Columns::Extended).then(|| lines.join("\n"))
}

/// The lines above the rows.
pub fn header(columns: Columns) -> String {
    let mut lines = vec!["#".to_owned()];
    let none = "";
    let above = format!(
        "# {none:>10}  {none:>12}  {none:>8}  {none:>6}  {none:>6}           out-of-place          \
        \x20            in-place          "
    );
    let named = |names: [&str; 5], timing: [&str; 4]| {
        let [size, count, dtype, redop, root] = names;
        let [time, alg_bw, bus_bw, wrong] = timing;
        let timing = format!("  {time:>7}  {alg_bw:>6}  {bus_bw:>6}  {wrong:>6}");
        format!("# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}{timing}{timing} ")
    };
    let names =
        named(["size", "count", "type", "redop", "root"], ["time", "algbw", "busbw", "#wrong"]);
    let units = named(["(B)", "(elements)", "", "", ""], ["(us)", "(GB/s)", "(GB/s)", ""]);
    match columns {
        Columns::Standard => lines.extend([above, names, units]),
        Columns::Extended => lines.extend([
            above,
            wider(&names, ["p99", "max", "eff.bw", "predicted", "%mem"]),
            wider(&units, ["(us)", "(us)", "(GiB/s)", "(us)", "(%)"]),
        ]),
    }
    lines.join("\n")
}

/// The line of a row.
pub fn print_row(columns: Columns, row: &Row) -> String {
    let redop = row.redop.as_deref().unwrap_or("none");
    let root = row.root.map_or("-1".to_owned(), |root| root.to_string());
    let line = format!(
        "{:>12}  {:>12}  {:>8}  {redop:>6}  {root:>6}{}{}",
        row.bytes,
        row.count,
        type_name(&row.dtype),
        half(row.out_of_place.as_ref()),
        half(row.in_place.as_ref())
    );
    if columns == Columns::Standard {
        return line;
    }
    let with = |value: Option<f64>, width| value.map_or("-".to_owned(), |v| fitted(v, width));
    let timing = row.timing();
    let effective = timing.map(|timing| effective_bandwidth_gib_s(row.bytes, timing.median_us));
    let own = [
        with(timing.map(|timing| timing.p99_us), 7),
        with(timing.map(|timing| timing.max_us), 7),
        with(effective, 6),
        with(row.predicted_us, 7),
        with(row.memory_fraction.map(|part| 100.0 * part), 6),
    ];
    wider(&line, own.each_ref().map(String::as_str))
}

/// The lines below the rows of the test called `name`.
pub fn footer(rows: &[Row], name: &str) -> String {
    let failed = num_failed(rows);
    let verdict = if failed == 0 { "OK" } else { "FAILED" };
    // The space at the end is where the original puts a verdict if it was given a lowest bandwidth.
    format!(
        "# {:<20} : {failed} {verdict}\n# {:<20} : {} \n#\n# Collective test concluded: {name}\n#",
        "Out of bounds values",
        "Avg bus bandwidth",
        general(average_bus_bandwidth(rows))
    )
}

/// The line about what was not measured, in place of its row.
pub fn print_skipped(skipped: &Skipped) -> String {
    let size = skipped.bytes.map_or("all sizes".to_owned(), |bytes| format!("{bytes} B"));
    let Skipped { transport, nproc, reason, .. } = skipped;
    format!("# skipped {size} over {transport} between {nproc} ranks: {reason}")
}

/// The original's name of an element type.
pub fn type_name(dtype: &str) -> &str {
    match dtype {
        "f16" => "half",
        "bf16" => "bfloat16",
        "f32" => "float",
        "f64" => "double",
        "i8" => "int8",
        "u8" => "uint8",
        "i32" => "int32",
        "u32" => "uint32",
        "i64" => "int64",
        "u64" => "uint64",
        other => other,
    }
}

fn half(timing: Option<&Timing>) -> String {
    let Some(timing) = timing else { return NO_TIMING.to_owned() };
    let numbers = format!(
        "  {:>7}  {:>6}  {:>6}",
        fitted(timing.median_us, 7),
        fitted(timing.alg_bw, 6),
        fitted(timing.bus_bw, 6)
    );
    match timing.wrong {
        Some(wrong) => format!("{numbers}  {:>6}", general(wrong as f64)),
        // One space less than a number has: so the original.
        None => format!("{numbers}    N/A"),
    }
}

fn wider(standard: &str, own: [&str; 5]) -> String {
    let [p99, max, effective, predicted, memory] = own;
    format!(
        "{standard:<STANDARD_WIDTH$}  {p99:>7}  {max:>7}  {effective:>7}  {predicted:>9}  {memory:>6}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::samples;

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
        let mut lines = vec![header(Columns::Standard)];
        lines.extend(rows.iter().map(|row| print_row(Columns::Standard, row)));
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
        let mut lines = vec![legend(Columns::Extended).unwrap(), header(Columns::Extended)];
        let rows = [full, lacking, unchecked];
        lines.extend(rows.iter().map(|row| print_row(Columns::Extended, row)));
        insta::assert_snapshot!(marked(&lines), @r"
        # p99, max  of the in-place times; of the out-of-place ones where there are no others|
        # eff.bw    = 2 x size / the same time, in GiB/s (2^30 B), with any number of ranks|
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
        assert!(print_row(Columns::Standard, &row).ends_with("  1.23457e+06"));
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
