//! The charts of `paceline predict`: the efficiency by bandwidth, and the step by number of ranks.
//!
//! Curves are predictions and are computed at many places, so a single link has a curve too. Points are measurements.

use paceline_table::chart::{Axis, Picture, Series, Stroke};

use super::Row;
use super::efficiency::efficiency_pct;
use super::model::Calibration;

/// Number of places at which a curve is computed.
const PLACES: i32 = 96;
/// How many times the bandwidths of the chart go beyond the slowest and the fastest link of the rows.
const BEYOND: f64 = 4.0;
/// The bandwidths in Gbit/s that a chart may have. Beyond them it would have more decades than grid lines can show.
const SHOWN: (f64, f64) = (1e-6, 1e9);

/// The look of the line that the others are compared with.
const REFERENCE_LOOK: usize = 4;

/// The texts of the charts about the model and the place of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// The model.
    pub model: &'a str,
    /// Where and when it was run.
    pub place: &'a str,
}

impl Labels<'_> {
    /// A chart of these series that have points.
    fn chart(&self, what: String, x: Axis, y: Axis, mut series: Vec<Series>) -> Picture {
        series.retain(|line| !line.points.is_empty());
        let (title, subtitle) = (format!("{}: {what}", self.model), self.place.to_owned());
        Picture::lines(title, subtitle, [x, y], series)
    }
}

/// The charts by their names. The step by number of ranks needs two of them.
pub fn charts(
    rows: &[Row],
    calibrations: &[Calibration],
    target: f64,
    labels: &Labels,
) -> Vec<(String, Picture)> {
    let mut charts = vec![("predict_efficiency".to_owned(), by_bandwidth(rows, target, labels))];
    if ranks_of(rows).len() > 1 {
        charts.push(("predict_step".to_owned(), by_ranks(rows, calibrations, labels)));
    }
    charts
}

/// These values, each once.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut known, value| {
        if !known.contains(&value) {
            known.push(value);
        }
        known
    })
}

/// The different numbers of ranks.
fn ranks_of(rows: &[Row]) -> Vec<usize> {
    distinct(rows.iter().map(|row| row.network.ranks))
}

/// The names of the algorithms of the rows.
fn algorithms(rows: &[Row]) -> String {
    distinct(rows.iter().map(|row| row.network.way.name())).join(" and ")
}

/// The efficiency against the bandwidth: a curve for each number of ranks, with the latency of its first link.
fn by_bandwidth(rows: &[Row], target: f64, labels: &Labels) -> Picture {
    let gbit_s = |row: &Row| row.network.link.bytes_per_s * 8e-9;
    let of_rows = rows.iter().map(gbit_s).chain(rows.iter().filter_map(|row| row.slowest_gbit_s));
    let (low, high) = of_rows
        .map(|gbit_s| gbit_s.clamp(SHOWN.0, SHOWN.1))
        .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = (low / BEYOND, high * BEYOND);
    let places =
        || (0..=PLACES).map(|at| low * (high / low).powf(f64::from(at) / f64::from(PLACES)));
    let level = Series::line(format!("{target} %"), [(low, target), (high, target)]);
    let mut series = vec![level.stroke(Stroke::Dotted).look(REFERENCE_LOOK)];
    for (look, ranks) in ranks_of(rows).into_iter().enumerate() {
        let all = || rows.iter().filter(move |row| row.network.ranks == ranks);
        let Some(Row { network, step, .. }) = all().next() else { continue };
        let on = |gbit_s: f64| network.with_bandwidth(gbit_s / 8e-9);
        let curve = places().map(|gbit_s| (gbit_s, step.efficiency_pct(&on(gbit_s))));
        let latency = format!("{:.1}", network.link.latency_s * 1e6);
        let latency = latency.trim_end_matches(".0");
        let curve = Series::line(format!("{ranks} ranks, {latency} us"), curve);
        series.push(curve.stroke(Stroke::Dotted).look(look));
        let measured = all().filter_map(|row| {
            Some((gbit_s(row), efficiency_pct(row.step.alone_ms, row.measured?.median)))
        });
        series.push(Series::line(format!("{ranks} ranks, measured"), measured).look(look));
    }
    labels.chart(
        format!("efficiency by bandwidth, {}", algorithms(rows)),
        Axis::logarithmic("Bandwidth of the link (Gbit/s)", ""),
        Axis::linear("Efficiency (%)", ""),
        series,
    )
}

/// The step against the number of ranks: a line for each link, and one without communication.
fn by_ranks(rows: &[Row], calibrations: &[Calibration], labels: &Labels) -> Picture {
    let ranks = ranks_of(rows);
    let alone = |ranks: usize| {
        let same = calibrations.iter().find(|calibration| calibration.ranks == ranks);
        same.or(calibrations.first()).map_or(0.0, |calibration| calibration.step_ms)
    };
    let point = |ranks: usize, ms: f64| (ranks as f64, 1e3 * ms);
    let level = ranks.iter().map(|&ranks| point(ranks, alone(ranks)));
    let level = Series::line("no communication", level);
    let mut series = vec![level.stroke(Stroke::Dotted).look(REFERENCE_LOOK)];
    let links = distinct(rows.iter().map(|row| &row.link));
    for (look, link) in links.into_iter().enumerate() {
        let of_link = || rows.iter().filter(move |row| row.link == *link);
        let predicted = of_link().map(|row| point(row.network.ranks, row.prediction.step_ms));
        series.push(Series::line(link, predicted).stroke(Stroke::Dashed).look(look));
        let measured =
            of_link().filter_map(|row| Some(point(row.network.ranks, row.measured?.median)));
        series.push(Series::line(format!("{link}, measured"), measured).look(look));
    }
    labels.chart(
        format!("time of a step by ranks, {}", algorithms(rows)),
        Axis::logarithmic("Ranks", ""),
        Axis::linear("Time of a step", "us"),
        series,
    )
}
