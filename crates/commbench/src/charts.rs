//! Draws charts of time and bus bandwidth by size. There is a solid line per transport
//! and number of ranks, a dashed line for each program that is compared, and a dotted line for each
//! prediction.

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::write_charts;
use paceline_host::disk::Disk;
use paceline_host::text::plural;
use paceline_table::chart::{Axis, Picture, Series, Stroke};

use super::result::{BenchReport, Row, alg_bandwidth_gb_s, bus_factor, place, program_name};
use super::series::Measured;

/// Writes `time.svg` and `busbw.svg` into `folder`, and returns their paths.
pub fn write(
    disk: &Disk,
    report: &BenchReport,
    compared: &[Measured],
    folder: &Path,
) -> Result<Vec<PathBuf>> {
    let charts = [("time", time(report, compared)), ("busbw", busbw(report, compared))];
    write_charts(disk, folder, &charts.map(|(name, chart)| (name.to_owned(), chart)))
}

/// The chart of times.
pub fn time(report: &BenchReport, compared: &[Measured]) -> Picture {
    let y = Axis::logarithmic("Time (median, to the 99th percentile)", "us");
    chart(report, compared, "time", y, |_, _, us| us)
}

/// The chart of bus bandwidths. A single rank has no bus bandwidth, so it has no line.
pub fn busbw(report: &BenchReport, compared: &[Measured]) -> Picture {
    let op = report.rows.first().map_or("", |row| &row.op);
    let y = Axis::logarithmic("Bus bandwidth (median, to the 99th percentile)", "GB/s");
    chart(report, compared, "bus bandwidth", y, |nproc, bytes, us| {
        alg_bandwidth_gb_s(bytes, us) * bus_factor(op, nproc).unwrap_or(1.0)
    })
}

/// The chart whose values are `shown(ranks, size in bytes, time in microseconds)`.
fn chart(
    report: &BenchReport,
    compared: &[Measured],
    what: &str,
    y: Axis,
    shown: impl Fn(usize, u64, f64) -> f64,
) -> Picture {
    let point = |nproc: usize, bytes: u64, us: f64| (bytes as f64, shown(nproc, bytes, us));
    let mut series: Vec<Series> = Vec::new();
    let groups = groups(&report.rows);
    for (look, (name, rows)) in groups.iter().enumerate() {
        let of_row = |row: &Row, us: f64| point(row.nproc, row.bytes, us);
        let points = rows.iter().map(|row| of_row(row, row.timing().median_us));
        let intervals = rows.iter().map(|row| {
            let one = of_row(row, row.timing().median_us);
            let other = of_row(row, row.timing().p99_us);
            (one.0, one.1.min(other.1), one.1.max(other.1))
        });
        series.push(Series::line(name, points).intervals(intervals).look(look));
        let predicted = rows.iter().filter_map(|row| Some((row, row.predicted_us?)));
        let points: Vec<_> = predicted.map(|(row, us)| point(row.nproc, row.bytes, us)).collect();
        if !points.is_empty() {
            let name = format!("{name}, predicted");
            series.push(Series::line(name, points).stroke(Stroke::Dotted).look(look));
        }
    }
    let op = report.rows.first().map_or("", |row| &row.op);
    // Sizes ascend within a file.
    let goes_on = |one: &Measured, next: &Measured| one.is_beside(next) && one.bytes < next.bytes;
    let compared = compared.chunk_by(goes_on).filter(|theirs| theirs[0].is_of(op));
    for (at, theirs) in compared.enumerate() {
        let points = theirs.iter().map(|of| point(of.nproc, of.bytes, of.time_us));
        let line = Series::line(ranks(&theirs[0].name, theirs[0].nproc), points);
        series.push(line.stroke(Stroke::Dashed).look(groups.len() + at));
    }
    // The line of a single rank may have no points above zero. Then the legend does not name it.
    series.retain(|line| line.points.iter().any(|&(_, y)| y > 0.0));
    let title = format!("{op}, {}: {what} by size", place(&report.rows));
    let subtitle = format!("{}, {}", report.machine, report.date);
    Picture::lines(title, subtitle, [Axis::logarithmic("Size", "B"), y], series)
}

/// The rows by transport, algorithm and number of ranks, with ascending sizes.
fn groups(rows: &[Row]) -> Vec<(String, Vec<&Row>)> {
    let of = |row: &Row| (row.transport.clone(), row.algorithm.clone(), row.nproc);
    let groups = rows.chunk_by(|a, b| of(a) == of(b)).map(|group| {
        let mut sorted: Vec<&Row> = group.iter().collect();
        sorted.sort_by_key(|row| row.bytes);
        (ranks(&program_name(sorted[0], rows), sorted[0].nproc), sorted)
    });
    groups.collect()
}

fn ranks(name: &str, nproc: usize) -> String {
    format!("{name}, {}", plural(nproc, "rank"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    /// Times of a link with a latency and a bandwidth, for three numbers of ranks and eight sizes.
    fn realistic() -> (BenchReport, Vec<Measured>) {
        let sizes: Vec<u64> = (0..8).map(|at| 4096 << (2 * at)).collect();
        let time = |nproc: usize, bytes: u64, latency: f64, gb_s: f64| {
            let factor = bus_factor("all_reduce", nproc).unwrap();
            latency * nproc as f64 + bytes as f64 * factor / gb_s / 1e3
        };
        let mut rows = Vec::new();
        for (transport, nproc, latency, gb_s) in
            [("thread", 2, 2.0, 9.0), ("shm", 2, 3.5, 8.0), ("shm", 4, 9.0, 6.0)]
        {
            for (at, &bytes) in sizes.iter().enumerate() {
                let slower = if bytes > 16 << 20 { 1.5 } else { 1.0 + 0.04 * (at % 3) as f64 };
                let mut row =
                    samples::row(nproc, bytes, slower * time(nproc, bytes, latency, gb_s));
                row.transport = transport.to_owned();
                row.predicted_us = (nproc == 4).then(|| time(nproc, bytes, 4.0, 6.4));
                rows.push(row);
            }
        }
        let gloo = |&bytes: &u64| samples::time("torch-gloo", 2, bytes, time(2, bytes, 90.0, 1.9));
        (samples::report(rows), sizes.iter().map(gloo).collect())
    }

    #[test]
    fn lines_are_per_transport_and_ranks() {
        let (report, compared) = realistic();
        let chart = time(&report, &compared);
        let names: Vec<(&str, Stroke, usize)> = chart
            .series()
            .iter()
            .map(|line| (line.name.as_str(), line.stroke, line.look))
            .collect();
        assert_eq!(
            names,
            [
                ("thread, 2 ranks", Stroke::Solid, 0),
                ("shm, 2 ranks", Stroke::Solid, 1),
                ("shm, 4 ranks", Stroke::Solid, 2),
                ("shm, 4 ranks, predicted", Stroke::Dotted, 2),
                ("torch-gloo, 2 ranks", Stroke::Dashed, 3),
            ]
        );
        assert!(chart.series().iter().all(|line| line.points.len() == 8));
        assert_eq!(chart.title, "all_reduce, in place: time by size");
    }

    #[test]
    fn bandwidths_of_others_use_the_same_formula() {
        let report = samples::report(vec![samples::row(4, 1_000_000, 1000.0)]);
        let other = samples::time("other", 4, 1_000_000, 1000.0);
        let chart = busbw(&report, &[other]);
        assert_eq!(chart.series()[0].points, [(1e6, 1.5)]);
        assert_eq!(chart.series()[1].points, [(1e6, 1.5)]);
    }

    #[test]
    fn a_single_rank_has_a_time_but_no_bus_bandwidth() {
        let report = samples::report(vec![samples::row(1, 8, 1.0), samples::row(2, 8, 1.0)]);
        assert_eq!(time(&report, &[]).series().len(), 2);
        assert_eq!(busbw(&report, &[]).series().len(), 1);
    }

    #[test]
    fn algorithms_are_named_where_they_differ() {
        let mut other = samples::row(2, 8, 1.0);
        other.algorithm = "ring".to_owned();
        let report = samples::report(vec![samples::row(2, 8, 1.0), other]);
        let names: Vec<String> =
            time(&report, &[]).series().iter().map(|line| line.name.clone()).collect();
        assert_eq!(names, ["shm units, 2 ranks", "shm ring, 2 ranks"]);
    }

    #[test]
    fn both_files_are_written() {
        let (report, compared) = realistic();
        let folder = tempfile::tempdir().unwrap();
        let into = folder.path().join("charts");
        for path in write(&Disk::default(), &report, &compared, &into).unwrap() {
            assert!(std::fs::metadata(&path).unwrap().len() > 1000, "{}", path.display());
        }
        assert_eq!(std::fs::read_dir(into).unwrap().count(), 2);
    }
}
