//! Charts of the step time and of the exposed communication against the bucket size.

use paceline_table::plot::{Axis, LineChart, Series, Spacing, Stroke, Unit};

use super::Row;
use super::fit::Fit;
use crate::studies::bucket_cost::BucketCost;
use crate::study::Setting;

/// The chart of step times.
pub fn step(rows: &[Row], setting: &Setting, ranks: usize) -> LineChart {
    chart(rows, setting, ranks, ("Time of a step", "step by bucket size"), |row| row.step_ms)
}

/// The chart of exposed communication, with the fit.
pub fn exposed(rows: &[Row], fit: &Fit, setting: &Setting, ranks: usize) -> LineChart {
    let what = ("Exposed communication", "exposed communication by bucket size");
    let mut chart = chart(rows, setting, ranks, what, |row| row.exposed_ms);
    if let Fit::Found { op_ms, gb_per_s, .. } = fit {
        let bytes = 4.0 * setting.params as f64;
        let cost = BucketCost { op_ms: *op_ms, ms_per_byte: 1.0 / gb_per_s / 1e6 };
        let curve = rows.iter().filter_map(|row| {
            let overhead = cost.overhead_ms(bytes, row.num_buckets?);
            Some(place(row.bucket_mb?, overhead))
        });
        let points = curve.collect();
        let name = "n o + s / (n w)".to_owned();
        chart.series.insert(
            1,
            Series { name, points, ranges: Vec::new(), stroke: Stroke::Dotted, look: 4 },
        );
    }
    chart
}

/// A size in MiB and a time in milliseconds as a point of the chart.
fn place(mb: f64, ms: f64) -> (f64, f64) {
    (1e6 * mb, 1e3 * ms)
}

/// The chart of the value in milliseconds that `shown` takes from each row: a curve for the sizes, and a
/// level line for every other strategy.
fn chart(
    rows: &[Row],
    setting: &Setting,
    ranks: usize,
    (label, what): (&str, &str),
    shown: impl Fn(&Row) -> f64,
) -> LineChart {
    let sizes = || rows.iter().filter_map(|row| Some((row, row.bucket_mb?)));
    let points = sizes().map(|(row, mb)| place(mb, shown(row))).collect();
    let name = sizes().next().map_or(String::new(), |(row, _)| row.strategy.clone());
    let mut series =
        vec![Series { name, points, ranges: Vec::new(), stroke: Stroke::Solid, look: 0 }];
    let ends = [sizes().next(), sizes().next_back()];
    for (look, row) in rows.iter().filter(|row| row.bucket_mb.is_none()).enumerate() {
        let points = ends.iter().flatten().map(|(_, mb)| place(*mb, shown(row))).collect();
        let name = row.strategy.clone();
        series.push(Series {
            name,
            points,
            ranges: Vec::new(),
            stroke: Stroke::Dashed,
            look: look + 1,
        });
    }
    LineChart {
        title: format!("{}, {ranks} ranks over {}: {what}", setting.model, setting.transport),
        subtitle: setting.place(),
        x: Axis {
            label: "Bucket size (MiB)".into(),
            unit: Unit::Bytes,
            spacing: Spacing::Logarithmic,
        },
        y: Axis { label: label.into(), unit: Unit::Microseconds, spacing: Spacing::Linear },
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;
    use crate::studies::bucket_cost::MIB;
    use crate::studies::scaling::verdict::tests::setting;

    #[test]
    fn the_fit_runs_through_what_follows_it_and_strategies_are_level_lines() {
        let setting = Setting { params: (16.0 * MIB) as u64, ..setting(2) };
        let mut rows = rows(&[64.0, 16.0, 4.0, 1.0], 0.5, 32.0);
        let fit = Fit::of(&rows, 4 * setting.params);
        let flat = Row { strategy: "flat_ddp".into(), bucket_mb: None, ..rows[3].clone() };
        rows.push(flat);
        let chart = exposed(&rows, &fit, &setting, 2);
        let names: Vec<&str> = chart.series.iter().map(|line| line.name.as_str()).collect();
        assert_eq!(names, ["ddp", "n o + s / (n w)", "flat_ddp"]);
        for (measured, fitted) in chart.series[0].points.iter().zip(&chart.series[1].points) {
            assert!((measured.1 - fitted.1).abs() < 1e-3, "{measured:?} {fitted:?}");
        }
        let level = &chart.series[2].points;
        assert_eq!(level.len(), 2);
        assert_eq!((level[0].0, level[1].0), (1e6, 64e6));
        assert_eq!(level[0].1, level[1].1);
        assert_eq!(step(&rows, &setting, 2).series.len(), 2);
    }
}
