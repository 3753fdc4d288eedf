//! The serial fraction, fitted to all rows.
//!
//! Strong scaling follows Amdahl (1967): `T(N) / T(1) = f + (1 - f) / N`. Weak scaling, where the
//! problem grows with the ranks, follows Gustafson (1988): `S(N) = N - f (N - 1)`. Both are linear in
//! `f`, so least squares have a closed form.

use serde::Serialize;

use super::speedup::{Mode, Row};

/// A fit, or why it is missing.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// The law holds with this serial fraction.
    Found {
        /// The serial fraction, from 0 to 1.
        serial: f64,
        /// Root mean square of the differences in speed-up; `None` for a single row, which any law fits.
        residual: Option<f64>,
        /// How many rows were fitted, not counting that of one rank.
        num_points: usize,
    },
    /// The reason why there is no fit.
    Refused(String),
}

impl Fit {
    /// Fits the rows that have enough cores.
    pub fn of(mode: Mode, rows: &[Row]) -> Self {
        let points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.ranks > 1 && !row.is_oversubscribed)
            .map(|row| (row.ranks as f64, row.speedup))
            .collect();
        if points.is_empty() {
            let left_out = rows.iter().filter(|row| row.is_oversubscribed).count();
            let why = match left_out {
                0 => "there is only one rank".to_owned(),
                count => format!("{count} left out: more ranks x threads than cores"),
            };
            return Fit::Refused(format!("no fit: it needs a number of ranks beside 1 ({why})"));
        }
        let serial = least_squares(points.iter().map(|&(n, speedup)| match mode {
            Mode::Strong => (1.0 - 1.0 / n, 1.0 / speedup - 1.0 / n),
            Mode::Weak => (n - 1.0, n - speedup),
        }));
        if !(0.0..=1.0).contains(&serial) {
            let how = if serial < 0.0 {
                "the ranks together are faster than the law allows"
            } else {
                "more ranks are slower than one"
            };
            return Fit::Refused(format!(
                "no fit: the serial fraction would be {:.1} %, for {how}",
                100.0 * serial
            ));
        }
        let squares = points.iter().map(|&(n, speedup)| (speedup - law(mode, serial, n)).powi(2));
        let residual = (squares.sum::<f64>() / points.len() as f64).sqrt();
        let residual = (points.len() > 1).then_some(residual);
        Fit::Found { serial, residual, num_points: points.len() }
    }
}

/// The `f` that fits `y = f x` to all (x, y) by least squares.
fn least_squares(points: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (xy, xx) = points.fold((0.0, 0.0), |(xy, xx), (x, y)| (xy + x * y, xx + x * x));
    xy / xx
}

/// The speed-up of `n` ranks by the law of `mode`.
pub fn law(mode: Mode, serial: f64, n: f64) -> f64 {
    match mode {
        Mode::Strong => 1.0 / (serial + (1.0 - serial) / n),
        Mode::Weak => n - serial * (n - 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::speedup::against_one_rank;
    use super::super::speedup::tests::measured;
    use super::*;

    fn strong(times: &[(usize, f64)], cores: usize) -> Fit {
        let all: Vec<_> = times.iter().map(|&(ranks, ms)| measured(ranks, 64, ms)).collect();
        Fit::of(Mode::Strong, &against_one_rank(Mode::Strong, &all, 1, cores))
    }

    #[test]
    fn the_serial_fraction_of_amdahl_is_found() {
        let times = [1, 2, 4, 8].map(|n| (n, 100.0 * (0.1 + 0.9 / n as f64)));
        let Fit::Found { serial, residual, num_points } = strong(&times, 8) else { panic!() };
        assert!((serial - 0.1).abs() < 1e-12 && residual.unwrap() < 1e-12, "{serial}");
        assert_eq!(num_points, 3);
        // Rows without enough cores are left out, however bad they are.
        let mut worse = times;
        worse[3].1 = 500.0;
        let Fit::Found { serial, num_points, .. } = strong(&worse, 4) else { panic!() };
        assert!((serial - 0.1).abs() < 1e-12);
        assert_eq!(num_points, 2);
    }

    #[test]
    fn points_off_the_law_leave_a_residual() {
        let Fit::Found { serial, residual, .. } = strong(&[(1, 100.0), (2, 60.0), (4, 50.0)], 4)
        else {
            panic!()
        };
        // By hand: (0.5 * 0.1 + 0.75 * 0.25) / (0.25 + 0.5625).
        assert!((serial - 0.2375 / 0.8125).abs() < 1e-12, "{serial}");
        assert!((0.05..0.5).contains(&residual.unwrap()), "{residual:?}");
        // One number of ranks is fitted by any law.
        let Fit::Found { serial, residual, .. } = strong(&[(1, 100.0), (2, 60.0)], 4) else {
            panic!()
        };
        assert!((serial - 0.2).abs() < 1e-12 && residual.is_none(), "{serial}");
    }

    #[test]
    fn the_serial_fraction_of_gustafson_is_found() {
        let time = |n: usize| 100.0 * n as f64 / law(Mode::Weak, 0.25, n as f64);
        let all = [1, 2, 4].map(|n| measured(n, 64 * n, time(n)));
        let Fit::Found { serial, .. } =
            Fit::of(Mode::Weak, &against_one_rank(Mode::Weak, &all, 1, 4))
        else {
            panic!()
        };
        assert!((serial - 0.25).abs() < 1e-12, "{serial}");
    }

    #[test]
    fn too_few_points_and_impossible_ones_are_refused_in_words() {
        let said = |fit: Fit| match fit {
            Fit::Refused(why) => why,
            found => panic!("{found:?}"),
        };
        let few = said(strong(&[(1, 100.0), (2, 60.0), (4, 90.0)], 1));
        assert_eq!(
            few,
            "no fit: it needs a number of ranks beside 1 (2 left out: more ranks x threads than cores)"
        );
        let fast = said(strong(&[(1, 100.0), (2, 40.0), (4, 20.0)], 4));
        assert!(fast.contains("faster than the law allows"), "{fast}");
        let slow = said(strong(&[(1, 100.0), (2, 150.0), (4, 190.0)], 4));
        assert!(slow.contains("slower than one"), "{slow}");
    }
}
