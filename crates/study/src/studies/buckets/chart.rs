//! Charts of the step time and of the exposed communication against the bucket size.

use paceline_table::chart::{Axis, Picture, Series, Stroke};

use super::Row;
use super::fit::Fit;
use crate::studies::bucket_cost::BucketCost;
use crate::study::Setting;

/// The look of the fit, which no measured series has.
const FIT_LOOK: usize = 4;

/// A time in milliseconds with its bucket size in MiB. Without a size it does not depend on buckets.
pub type Point = (Option<f64>, f64);

/// The chart of step times.
pub fn step(rows: &[Row], setting: &Setting, ranks: usize) -> Picture {
    let points =
        rows.iter().map(|row| (row.strategy.clone(), (row.bucket_mb, row.times.step.median)));
    steps_by_size(&points.collect::<Vec<_>>(), setting, ranks)
}

/// The chart of step times, from the name and the time of each case.
pub fn steps_by_size(cases: &[(String, Point)], setting: &Setting, ranks: usize) -> Picture {
    by_size(cases, setting, ranks, ("Time of a step", "step by bucket size"), None)
}

/// The chart of exposed communication, with the fit.
pub fn exposed(rows: &[Row], fit: &Fit, setting: &Setting, ranks: usize) -> Picture {
    let what = ("Exposed communication", "exposed communication by bucket size");
    let points =
        rows.iter().map(|row| (row.strategy.clone(), (row.bucket_mb, row.times.exposed_ms)));
    let mut fitted = None;
    if let Fit::Found { op_ms, gb_per_s, .. } = fit {
        let bytes = 4.0 * setting.params as f64;
        let cost = BucketCost { op_ms: *op_ms, ms_per_byte: 1.0 / gb_per_s / 1e6 };
        let curve = rows
            .iter()
            .filter_map(|row| Some(place(row.bucket_mb?, cost.cost_ms(bytes, row.num_buckets?))));
        let curve = Series::line("n o + s / (n w)", curve).stroke(Stroke::Dotted).look(FIT_LOOK);
        fitted = Some(curve);
    }
    by_size(&points.collect::<Vec<_>>(), setting, ranks, what, fitted)
}

/// A size in MiB and a time in milliseconds as a point of the chart.
fn place(mb: f64, ms: f64) -> (f64, f64) {
    (1e6 * mb, 1e3 * ms)
}

/// The chart of `cases`: a curve through those with a size, the fit, and a level line for every other case.
fn by_size(
    cases: &[(String, Point)],
    setting: &Setting,
    ranks: usize,
    (label, what): (&str, &str),
    fitted: Option<Series>,
) -> Picture {
    let sizes = || cases.iter().filter_map(|(name, (mb, ms))| Some((name, (*mb)?, *ms)));
    let name = sizes().next().map_or(String::new(), |(name, ..)| name.clone());
    let mut series = vec![Series::line(name, sizes().map(|(_, mb, ms)| place(mb, ms)))];
    series.extend(fitted);
    let ends = [sizes().next(), sizes().next_back()];
    let level = cases.iter().filter(|(_, (mb, _))| mb.is_none());
    series.extend(level.enumerate().map(|(at, (name, (_, ms)))| {
        let points = ends.iter().flatten().map(|(_, mb, _)| place(*mb, *ms));
        Series::line(name, points).stroke(Stroke::Dashed).look(at + 1)
    }));
    setting.chart(
        format!("{}, {ranks} ranks over {}: {what}", setting.model, setting.transport),
        Axis::logarithmic("Bucket size (MiB)", "B"),
        Axis::linear(label, "us"),
        series,
    )
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
        let names: Vec<&str> = chart.series().iter().map(|line| line.name.as_str()).collect();
        assert_eq!(names, ["ddp", "n o + s / (n w)", "flat_ddp"]);
        for (measured, fitted) in chart.series()[0].points.iter().zip(&chart.series()[1].points) {
            assert!((measured.1 - fitted.1).abs() < 1e-3, "{measured:?} {fitted:?}");
        }
        let level = &chart.series()[2].points;
        assert_eq!(level.len(), 2);
        assert_eq!((level[0].0, level[1].0), (1e6, 64e6));
        assert_eq!(level[0].1, level[1].1);
        assert_eq!(step(&rows, &setting, 2).series().len(), 2);
    }
}
