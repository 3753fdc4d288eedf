//! What `paceline predict` prints.

use serde::Serialize;

use super::Row;
use super::compression::Compression;
use super::model::Calibration;
use crate::text::plain_table;

/// A row without nesting, for CSV.
#[derive(Clone, Debug, Serialize)]
pub struct FlatRow {
    ranks: usize,
    link: String,
    comm_ms: f64,
    exposed_ms: f64,
    overlap_pct: f64,
    step_ms: f64,
    simple_step_ms: f64,
    best_bucket_mb: f64,
    best_first_mb: f64,
    best_step_ms: f64,
    measured_ms: Option<f64>,
    ratio: Option<f64>,
}

/// The rows as CSV has them.
pub fn flat(rows: &[Row]) -> Vec<FlatRow> {
    let flat = |row: &Row| FlatRow {
        ranks: row.ranks,
        link: row.link.clone(),
        comm_ms: row.prediction.comm_ms,
        exposed_ms: row.prediction.exposed_ms,
        overlap_pct: row.prediction.overlap_pct,
        step_ms: row.prediction.step_ms,
        simple_step_ms: row.prediction.simple_step_ms,
        best_bucket_mb: row.prediction.best_bucket_mb,
        best_first_mb: row.prediction.best_first_mb,
        best_step_ms: row.prediction.best_step_ms,
        measured_ms: row.measured_ms,
        ratio: row.ratio,
    };
    rows.iter().map(flat).collect()
}

/// All that is printed below the head.
pub fn text(calibrations: &[Calibration], rows: &[Row], compression: &[Compression]) -> String {
    let bases = calibrations.iter().map(|calibration| {
        let ranks = match calibration.ranks {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks side by side"),
        };
        let first = calibration.ready.first().map_or(0.0, |line| line.ready_ms);
        format!(
            "Without communication, {ranks}: {:.2} ms per step; gradients are final from {first:.2} to {:.2} ms",
            calibration.step_ms, calibration.backward_end_ms
        )
    });
    let names = [
        "Ranks",
        "Link",
        "Comm. (ms)",
        "Exposed (ms)",
        "Overlap (%)",
        "ddp (ms)",
        "simple_ddp (ms)",
        "Best buckets (MB)",
        "with them (ms)",
        "Measured ddp (ms)",
        "Predicted/measured",
    ];
    let line = |row: &Row| {
        let p = &row.prediction;
        let ms = |ms: f64| format!("{ms:.2}");
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        [
            row.ranks.to_string(),
            row.link.clone(),
            ms(p.comm_ms),
            ms(p.exposed_ms),
            format!("{:.1}", p.overlap_pct),
            ms(p.step_ms),
            ms(p.simple_step_ms),
            format!("{}, first {}", short(p.best_bucket_mb), short(p.best_first_mb)),
            ms(p.best_step_ms),
            or_dash(row.measured_ms.map(ms)),
            or_dash(row.ratio.map(|ratio| format!("{ratio:.3}"))),
        ]
    };
    let lines: Vec<[String; 11]> = rows.iter().map(line).collect();
    let verdicts = compression.iter().map(|c| {
        format!(
            "{} ranks on {}: {} (fp16 {:.2} ms, top_k {:.2} ms)",
            c.ranks, c.link, c.verdict, c.half_step_ms, c.top_k_step_ms
        )
    });
    let mut all: Vec<String> = bases.collect();
    all.push(String::new());
    all.push(plain_table(names, 2, &lines));
    all.push("\nCompression:".to_owned());
    all.extend(verdicts);
    all.join("\n")
}

fn short(mb: f64) -> String {
    let text = format!("{mb:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
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
