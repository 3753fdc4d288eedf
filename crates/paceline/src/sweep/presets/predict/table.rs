//! The output of `paceline predict`.

use paceline_analysis::table::{Cell, Table};

use super::super::table_of;
use super::Row;
use super::compression::Compression;
use super::model::Calibration;
use crate::text::plural;

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    table_of(
        rows,
        &[
            ("ranks", "ranks", 0, |row| Cell::Whole(row.ranks as u64)),
            ("link", "link", 0, |row| Cell::Text(row.link.clone())),
            ("comm_ms", "comm. ms", 2, |row| Cell::Number(row.prediction.comm_ms)),
            ("exposed_ms", "exposed ms", 2, |row| Cell::Number(row.prediction.exposed_ms)),
            ("overlap_pct", "overlap %", 1, |row| Cell::Number(row.prediction.overlap_pct)),
            ("step_ms", "ddp ms", 2, |row| Cell::Number(row.prediction.step_ms)),
            ("simple_step_ms", "simple_ddp ms", 2, |row| {
                Cell::Number(row.prediction.simple_step_ms)
            }),
            ("best_bucket_mb", "best buckets MB", 4, |row| {
                Cell::Number(row.prediction.best_bucket_mb)
            }),
            ("best_first_mb", "the first MB", 4, |row| Cell::Number(row.prediction.best_first_mb)),
            ("best_step_ms", "with them ms", 2, |row| Cell::Number(row.prediction.best_step_ms)),
            ("measured_ms", "measured ddp ms", 2, |row| Cell::from(row.measured_ms)),
            ("ratio", "predicted/measured", 3, |row| Cell::from(row.ratio)),
        ],
    )
}

/// Everything that is printed below the first lines.
pub fn text(calibrations: &[Calibration], rows: &[Row], compression: &[Compression]) -> String {
    let bases = calibrations.iter().map(|calibration| {
        let side_by_side = if calibration.ranks > 1 { " side by side" } else { "" };
        let ranks = format!("{}{side_by_side}", plural(calibration.ranks, "rank"));
        let first = calibration.ready.first().map_or(0.0, |line| line.ready_ms);
        format!(
            "Without communication, {ranks}: {:.2} ms per step; gradients are final from {first:.2} to {:.2} ms",
            calibration.step_ms, calibration.backward_end_ms
        )
    });
    let verdicts = compression.iter().map(|c| {
        format!(
            "{} ranks on {}: {} (fp16 {:.2} ms, top_k {:.2} ms)",
            c.ranks, c.link, c.verdict, c.half_step_ms, c.top_k_step_ms
        )
    });
    let mut all: Vec<String> = bases.collect();
    all.push(String::new());
    all.push(table(rows).text());
    all.push("\nCompression:".to_owned());
    all.extend(verdicts);
    all.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::model::Prediction;
    use super::*;
    use crate::metrics::anatomy::ReadyLine;

    #[test]
    fn what_is_printed() {
        let prediction = Prediction {
            comm_ms: 12.0,
            exposed_ms: 6.0,
            overlap_pct: 50.0,
            step_ms: 46.0,
            simple_step_ms: 52.0,
            best_bucket_mb: 0.25,
            best_first_mb: 0.0625,
            best_step_ms: 44.0,
        };
        let row = |link: &str, measured_ms: Option<f64>| Row {
            ranks: 2,
            link: link.to_owned(),
            prediction,
            measured_ms,
            ratio: measured_ms.map(|ms| 46.0 / ms),
        };
        let calibration = Calibration {
            ranks: 2,
            step_ms: 40.0,
            compute_ms: 39.0,
            backward_begin_ms: 10.0,
            backward_end_ms: 30.0,
            ready: vec![ReadyLine { param: "a.weight".to_owned(), ready_ms: 20.0 }],
        };
        let compression = Compression {
            ranks: 2,
            link: "10gbe".to_owned(),
            half_step_ms: 44.0,
            top_k_step_ms: 60.0,
            verdict: "fp16 would pay".to_owned(),
        };
        let rows = [row("10gbe", Some(47.5)), row("1gbit,50us", None)];
        insta::assert_snapshot!(text(&[calibration], &rows, &[compression]));
    }
}
