//! `--style lines`: two lines per configuration while it is measured, and a closing table.
//!
//! The format and the formula are those of a published write-up of all-reduce over PyTorch: twice the size, divided by the
//! time and by 2^30, whatever the number of ranks. The write-up calls the result GB/s. Here it is called by its
//! unit, GiB/s, as in the column `eff.bw` of the other style.

use paceline_host::text::plain_table;

use super::result::{Row, Skipped, place};

/// The line before a configuration is measured.
pub fn config_line(transport: &str, nproc: usize, bytes: u64) -> String {
    format!("Config: Backend={transport}, Processes={nproc}, Size={}MB", megabytes(bytes))
}

/// The line after a configuration is measured: the median time and the effective bandwidth.
pub fn result_line(row: &Row) -> String {
    let [ms, bandwidth] = numbers(row);
    format!("-> Avg Time: {ms} ms | Effective Bandwidth: {bandwidth} GiB/s")
}

/// The closing table. Below it, one line says whether times are in place or out of place, and further
/// lines list the skipped ones.
pub fn result_table(rows: &[Row], skipped: &[Skipped], width: Option<usize>) -> String {
    let line = |row: &Row| {
        let [ms, bandwidth] = numbers(row);
        [row.transport.clone(), row.nproc.to_string(), megabytes(row.bytes), ms, bandwidth]
    };
    let lines: Vec<[String; 5]> = rows.iter().map(line).collect();
    let names = ["Backend", "Processes", "Size (MB)", "Avg Time (ms)", "Bandwidth (GiB/s)"];
    let mut text = plain_table(names, 1, &lines, width);
    if !rows.is_empty() {
        text += &format!("\nTimes are medians, {}.", place(rows));
    }
    for Skipped { transport, nproc, bytes, reason } in skipped {
        let size = bytes.map_or("all sizes".to_owned(), |bytes| format!("{} MB", megabytes(bytes)));
        text += &format!("\nSkipped: {transport}, {nproc} processes, {size}: {reason}");
    }
    text
}

/// The median in milliseconds, and the effective bandwidth in GiB/s.
fn numbers(row: &Row) -> [String; 2] {
    let timing = row.timing();
    [format!("{:.4}", timing.median_us / 1e3), format!("{:.2}", timing.effective_bw_gib_s)]
}

/// The size in MB of 1e6 bytes, without trailing zeros.
fn megabytes(bytes: u64) -> String {
    (bytes as f64 / 1e6).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn the_lines_have_their_exact_form() {
        assert_eq!(config_line("shm", 2, 1_000_000), "Config: Backend=shm, Processes=2, Size=1MB");
        assert_eq!(
            config_line("shm", 2, 4096),
            "Config: Backend=shm, Processes=2, Size=0.004096MB"
        );
        let row = samples::row(2, 1_000_000, 432.1);
        assert_eq!(result_line(&row), "-> Avg Time: 0.4321 ms | Effective Bandwidth: 4.31 GiB/s");
    }

    #[test]
    fn the_table_closes_the_run() {
        let rows = [
            samples::row(2, 1_000_000, 432.1),
            samples::row(4, 100_000_000, 61_234.5),
            samples::row(4, 1_024_000_000, 654_321.0),
        ];
        let text = result_table(&rows, &samples::report(Vec::new()).skipped, None);
        insta::assert_snapshot!(text, @r"
        Backend  Processes  Size (MB)  Avg Time (ms)  Bandwidth (GiB/s)
        -------  ---------  ---------  -------------  -----------------
        shm              2          1         0.4321               4.31
        shm              4        100        61.2345               3.04
        shm              4       1024       654.3210               2.92
        Times are medians, in place.
        Skipped: shm, 6 processes, 1024 MB: 6 ranks need 12.3 GB, 8.0 GB may be used
        ");
    }
}
