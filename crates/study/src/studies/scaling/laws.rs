//! The laws of scaling, and the serial fraction fitted to all points.
//!
//! Strong scaling follows Amdahl (1967): `T(N) / T(1) = f + (1 - f) / N`. Weak scaling, where the problem grows with the
//! ranks, follows Gustafson (1988): `S(N) = N - f (N - 1)`. Both are linear in `f`, so least squares have a closed form.

use clap::ValueEnum;
use paceline_failure::{Failure, Result};

use crate::outcome::Row;

/// The quantity that stays the same when ranks are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// The samples of each rank
    Weak,
    /// The samples of all ranks together
    Strong,
}

impl Mode {
    /// Its name, and the name of its law.
    pub fn names(self) -> [&'static str; 2] {
        match self {
            Mode::Weak => ["Weak", "Gustafson"],
            Mode::Strong => ["Strong", "Amdahl"],
        }
    }

    /// The global batch of `ranks` ranks, if one rank has `base` samples.
    pub fn global_batch(self, base: usize, ranks: usize) -> Result<usize> {
        match self {
            Mode::Strong => Ok(base),
            Mode::Weak => base.checked_mul(ranks).ok_or_else(|| {
                Failure::Usage("the batch size is too large for so many ranks".into())
            }),
        }
    }

    /// The time that `ranks` ranks would take without any loss, if one rank takes `single_ms`.
    pub fn ideal_ms(self, single_ms: f64, ranks: usize) -> f64 {
        match self {
            Mode::Weak => single_ms,
            Mode::Strong => single_ms / ranks as f64,
        }
    }
}

/// The results with one number of ranks. Times are medians per step, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Number of ranks.
    pub ranks: usize,
    /// Whether there are more ranks x threads than cores, so that the point does not show scaling.
    pub is_crowded: bool,
    /// Samples of all ranks per second, without the wait for data.
    pub samples_per_s: f64,
    /// The step of the slowest rank. This and the parts of a step are 0 where a program's were not measured.
    pub step_ms: f64,
    /// The time that the main thread computed.
    pub compute_ms: f64,
    /// Exposed communication.
    pub exposed_ms: f64,
    /// Hidden communication.
    pub hidden_ms: f64,
    /// The part of the exposed communication that waited for the slowest rank.
    pub waiting_ms: f64,
    /// Backward passes of a program, with the communication in them.
    pub in_backward_ms: f64,
}

impl Point {
    /// The point of a row; `None` if its run has not all figures.
    pub fn of(row: &Row, threads: usize, cores: usize) -> Option<Self> {
        let ranks = row.median("world_size")? as usize;
        let of_program = row.median("throughput");
        let of = |name| row.median(name).or(of_program.map(|_| 0.0));
        Some(Self {
            ranks,
            is_crowded: ranks * threads > cores,
            samples_per_s: of_program.or_else(|| of("samples_per_s_without_data"))?,
            step_ms: of("step_ms_median")?,
            compute_ms: of("compute_ms")?,
            exposed_ms: of("comm_exposed_ms")?,
            hidden_ms: of("comm_hidden_ms")?,
            waiting_ms: of("comm_exposed_wait_ms")?,
            in_backward_ms: row.median("in_backward_ms").unwrap_or(0.0),
        })
    }

    /// Samples per second, over the samples per second of one rank.
    pub fn speedup(&self, single: &Self) -> f64 {
        self.samples_per_s / single.samples_per_s
    }

    /// Speed-up over the number of ranks, in percent.
    pub fn efficiency_pct(&self, single: &Self) -> f64 {
        100.0 * self.speedup(single) / self.ranks as f64
    }
}

/// The serial fraction of a law.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The serial fraction, from 0 to 1.
    pub serial: f64,
    /// Root mean square of the errors in speed-up; `None` for a single point, which any law fits.
    pub residual: Option<f64>,
    /// How many points were fitted, one rank not counted.
    pub num_points: usize,
}

impl Fit {
    /// Fits the points with enough cores; the error is the reason for no fit. The first point has one rank.
    pub fn of(mode: Mode, all: &[Point]) -> std::result::Result<Self, String> {
        let points: Vec<(f64, f64)> = all
            .iter()
            .filter(|of| of.ranks > 1 && !of.is_crowded)
            .map(|of| (of.ranks as f64, of.speedup(&all[0])))
            .collect();
        if points.is_empty() {
            let why = match all.iter().filter(|of| of.is_crowded).count() {
                0 => "there is only one rank".to_owned(),
                count => format!("{count} left out: more ranks x threads than cores"),
            };
            return Err(format!("no fit: it needs a number of ranks beside 1 ({why})"));
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
            return Err(format!(
                "no fit: the serial fraction would be {:.1} %, for {how}",
                100.0 * serial
            ));
        }
        let squares = points.iter().map(|&(n, speedup)| (speedup - law(mode, serial, n)).powi(2));
        let residual = (squares.sum::<f64>() / points.len() as f64).sqrt();
        let residual = (points.len() > 1).then_some(residual);
        Ok(Self { serial, residual, num_points: points.len() })
    }

    /// The fit in words.
    pub fn words(&self) -> String {
        let Self { serial, residual, num_points } = self;
        let serial = format!("serial fraction {:.2} %, from", 100.0 * serial);
        match residual {
            Some(residual) => {
                format!(
                    "{serial} {num_points} numbers of ranks, residual {residual:.3} in speed-up"
                )
            }
            None => format!("{serial} one number of ranks, which any law fits"),
        }
    }
}

/// The serial fraction for which the law gives exactly this speed-up; Amdahl's is solved by Karp and Flatt (1990).
pub fn serial_fraction(mode: Mode, ranks: usize, speedup: f64) -> f64 {
    let n = ranks as f64;
    match mode {
        Mode::Strong => (1.0 / speedup - 1.0 / n) / (1.0 - 1.0 / n),
        Mode::Weak => (n - speedup) / (n - 1.0),
    }
}

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
pub(super) mod tests {
    use super::*;

    /// A number of ranks whose steps consist of computation only.
    pub fn point(ranks: usize, samples: usize, step_ms: f64, cores: usize) -> Point {
        Point {
            ranks,
            is_crowded: ranks > cores,
            samples_per_s: samples as f64 / step_ms * 1e3,
            step_ms,
            compute_ms: step_ms,
            ..Point::default()
        }
    }

    fn strong(times: &[(usize, f64)], cores: usize) -> std::result::Result<Fit, String> {
        let all: Vec<_> = times.iter().map(|&(ranks, ms)| point(ranks, 64, ms, cores)).collect();
        Fit::of(Mode::Strong, &all)
    }

    #[test]
    fn the_serial_fraction_of_amdahl_is_found() {
        let times = [1, 2, 4, 8].map(|n| (n, 100.0 * (0.1 + 0.9 / n as f64)));
        let Fit { serial, residual, num_points } = strong(&times, 8).unwrap();
        assert!((serial - 0.1).abs() < 1e-12 && residual.unwrap() < 1e-12, "{serial}");
        assert_eq!(num_points, 3);
        // Points without enough cores are left out.
        let mut worse = times;
        worse[3].1 = 500.0;
        let Fit { serial, num_points, .. } = strong(&worse, 4).unwrap();
        assert!((serial - 0.1).abs() < 1e-12);
        assert_eq!(num_points, 2);
    }

    #[test]
    fn points_off_the_law_leave_a_residual() {
        let fit = strong(&[(1, 100.0), (2, 60.0), (4, 50.0)], 4).unwrap();
        // By hand: (0.5 * 0.1 + 0.75 * 0.25) / (0.25 + 0.5625).
        assert!((fit.serial - 0.2375 / 0.8125).abs() < 1e-12, "{fit:?}");
        assert!((0.05..0.5).contains(&fit.residual.unwrap()), "{fit:?}");
        // One number of ranks is fitted by any law.
        let fit = strong(&[(1, 100.0), (2, 60.0)], 4).unwrap();
        assert!((fit.serial - 0.2).abs() < 1e-12 && fit.residual.is_none(), "{fit:?}");
        assert!(fit.words().ends_with("which any law fits"));
    }

    #[test]
    fn the_serial_fraction_of_gustafson_is_found() {
        let time = |n: usize| 100.0 * n as f64 / law(Mode::Weak, 0.25, n as f64);
        let all = [1, 2, 4].map(|n| point(n, 64 * n, time(n), 4));
        assert!((Fit::of(Mode::Weak, &all).unwrap().serial - 0.25).abs() < 1e-12);
        assert!((serial_fraction(Mode::Weak, 2, all[1].speedup(&all[0])) - 0.25).abs() < 1e-12);
    }

    #[test]
    fn too_few_points_and_impossible_ones_are_refused_in_words() {
        let few = strong(&[(1, 100.0), (2, 60.0), (4, 90.0)], 1).unwrap_err();
        assert_eq!(
            few,
            "no fit: it needs a number of ranks beside 1 (2 left out: more ranks x threads than cores)"
        );
        let fast = strong(&[(1, 100.0), (2, 40.0), (4, 20.0)], 4).unwrap_err();
        assert!(fast.contains("faster than the law allows"), "{fast}");
        let slow = strong(&[(1, 100.0), (2, 150.0), (4, 190.0)], 4).unwrap_err();
        assert!(slow.contains("slower than one"), "{slow}");
    }
}
