//! The chart of speed-up against ranks, with the ideal line and the fit.

use paceline_table::chart::{Axis, Picture, Series, Stroke};

use super::Scaling;
use super::fit::{Fit, law};
use super::speedup::Mode;
use crate::study::Setting;

/// Number of points with which the curve of a fit is drawn.
const CURVE: u32 = 64;

/// The chart of weak or of strong scaling.
pub fn chart(scaling: &Scaling, strategy: &str, setting: &Setting) -> Picture {
    let rows = &scaling.rows;
    let most = rows.iter().map(|row| row.ranks).max().unwrap_or(1) as f64;
    let point = |row: &super::Row| (row.ranks as f64, row.speedup);
    let (with_cores, without): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| !row.is_oversubscribed);
    let ideal = [(1.0, 1.0), (most, most)];
    let mut series = vec![Series::line("ideal", ideal).stroke(Stroke::Dotted).look(4)];
    if !without.is_empty() {
        // The line is joined to the last row with enough cores.
        let joined = with_cores.last().into_iter().chain(&without);
        let name = format!("*more than {} cores", setting.cores);
        let crowded = Series::line(name, joined.map(|row| point(row)));
        series.push(crowded.stroke(Stroke::Dashed).look(1));
    }
    series.push(Series::line("measured", with_cores.into_iter().map(point)));
    // Any law fits a single row, so a curve would show nothing.
    if let Fit::Found { serial, residual: Some(_), .. } = scaling.fit {
        let name = if scaling.mode == Mode::Weak { "Gustafson" } else { "Amdahl" };
        let name = format!("{name}, f = {:.1} %", 100.0 * serial);
        let place = |at: u32| 1.0 + (most - 1.0) * f64::from(at) / f64::from(CURVE);
        let curve = (0..=CURVE).map(place).map(|n| (n, law(scaling.mode, serial, n)));
        series.push(Series::line(name, curve).stroke(Stroke::Dotted).look(2));
    }
    let title = match scaling.mode {
        Mode::Weak => "Weak",
        Mode::Strong => "Strong",
    };
    setting.chart(
        format!("{title} scaling: {}, {strategy} over {}", setting.model, setting.transport),
        Axis::linear("Ranks", ""),
        Axis::linear("Speed-up", ""),
        series,
    )
}

#[cfg(test)]
mod tests {
    use super::super::speedup::tests::measured;
    use super::super::verdict::tests::setting;
    use super::*;

    #[test]
    fn there_is_no_curve_through_one_point() {
        let all = [(1, 100.0), (2, 55.0)].map(|(n, ms)| measured(n, 64, ms));
        let scaling = Scaling::of(Mode::Strong, &all, &setting(4));
        let fit = &scaling.fit;
        assert!(matches!(fit, Fit::Found { num_points: 1, .. }), "{fit:?}");
        let chart = chart(&scaling, "ddp", &setting(4));
        let lines: Vec<&str> = chart.series().iter().map(|line| line.name.as_str()).collect();
        assert_eq!(lines, ["ideal", "measured"]);
    }

    #[test]
    fn the_ideal_line_the_fit_and_the_marked_points_are_drawn() {
        let all = [(1, 100.0), (2, 55.0), (4, 32.5), (8, 60.0)].map(|(n, ms)| measured(n, 64, ms));
        let scaling = Scaling::of(Mode::Strong, &all, &setting(4));
        let chart = chart(&scaling, "ddp", &setting(4));
        let lines: Vec<(&str, usize)> =
            chart.series().iter().map(|line| (line.name.as_str(), line.points.len())).collect();
        let expected =
            [("ideal", 2), ("*more than 4 cores", 2), ("measured", 3), ("Amdahl, f = 10.0 %", 65)];
        assert_eq!(lines, expected);
        assert_eq!(chart.series()[0].points, [(1.0, 1.0), (8.0, 8.0)]);
        assert_eq!(chart.title, "Strong scaling: cnn, ddp over shm");
    }
}
