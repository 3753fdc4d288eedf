//! The learning rate of each step: a warm-up, then a constant, linear or cosine course, with the flags that state it.
//!
//! The rate depends only on the peak rate, the optimizer steps made and those of the whole run, so a resumed run
//! continues without further state.

use std::f64::consts::PI;

use clap::Args;
use paceline_failure::{Failure, Result};
use serde::Serialize;

use super::named::Course;

/// How the learning rate changes during a run.
///
/// With the rate `lr`, `W` steps of warm-up, `T` steps in all and steps counted from zero:
///
/// | steps | rate |
/// |---|---|
/// | `s < W` | `lr * (s + 1) / (W + 1)` |
/// | from `W` on, constant | `lr` |
/// | linear | `lr + (min_lr - lr) * t`, with `t = (s - W) / (T - W)` |
/// | cosine | `min_lr + (lr - min_lr) * (1 + cos(pi * t)) / 2` |
///
/// So step `W` is the first one at the peak rate, and `min_lr` would be the rate of the step after the
/// last one: with the usual `min_lr` of zero, no step has a rate of zero. Without a warm-up these are
/// PyTorch's `LinearLR` from 1 to `min_lr / lr` and `CosineAnnealingLR`, over `T` steps.
#[derive(Clone, Copy, Debug, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Training")]
pub struct Schedule {
    /// How the learning rate changes (until the end of the run)
    #[arg(long = "lr-schedule", value_name = "NAME", default_value = "constant")]
    #[serde(rename = "lr_schedule")]
    pub course: Course,
    /// Number of first optimizer steps over which the learning rate rises; unlike --warmup-steps, which
    /// is about measuring
    #[arg(long = "lr-warmup-steps", value_name = "N", default_value_t = 0)]
    #[serde(rename = "lr_warmup_steps")]
    pub warmup: u64,
    /// Learning rate at which linear and cosine end [default: 0]
    #[arg(long, value_name = "X")]
    pub min_lr: Option<f64>,
    /// Optimizer steps after which linear and cosine end [default: those of the run]
    #[arg(long, value_name = "N")]
    pub lr_steps: Option<u64>,
}

impl Schedule {
    /// Fails if the flags do not fit together, or the peak rate `lr`.
    pub fn check_flags(&self, lr: f64) -> Result<()> {
        let is_constant = self.course == Course::Constant;
        let ends = [
            ("--lr-steps", "when", self.lr_steps.map(|steps| steps.to_string())),
            ("--min-lr", "where", self.min_lr.map(|min_lr| min_lr.to_string())),
        ];
        for (flag, place, value) in ends {
            if let Some(value) = value.filter(|_| is_constant) {
                return Err(Failure::Usage(format!(
                    "{flag} {value} is {place} --lr-schedule linear and cosine end; leave it out, or pass one of them"
                )));
            }
        }
        match self.min_lr {
            // The range does not contain NaN either.
            Some(min_lr) if !(0.0..=lr).contains(&min_lr) => Err(Failure::Usage(format!(
                "--min-lr {min_lr}: pass a number from 0 to --lr, which is {lr}"
            ))),
            _ => Ok(()),
        }
    }

    /// Fails if the warm-up is as long as the schedule, which has `total_steps` steps.
    pub fn check(&self, total_steps: u64) -> Result<()> {
        let warmup_steps = self.warmup;
        if warmup_steps == 0 || warmup_steps < total_steps {
            return Ok(());
        }
        Err(Failure::Usage(format!(
            "--lr-warmup-steps {warmup_steps}: the {} {total_steps} optimizer steps, so it would never \
             reach --lr; lower it, or raise {}",
            if self.lr_steps.is_some() { "learning rate's course has" } else { "run has" },
            if self.lr_steps.is_some() { "--lr-steps" } else { "--epochs or --steps" },
        )))
    }

    /// The rate of the step after `steps_made` of `total_steps` steps, for the peak rate `lr`.
    pub fn lr(&self, lr: f64, steps_made: u64, total_steps: u64) -> f64 {
        let (warmup_steps, min_lr) = (self.warmup, self.min_lr.unwrap_or(0.0));
        if steps_made < warmup_steps {
            return lr * (steps_made + 1) as f64 / (warmup_steps + 1) as f64;
        }
        let course = total_steps.saturating_sub(warmup_steps).max(1);
        let part = ((steps_made - warmup_steps) as f64 / course as f64).min(1.0);
        match self.course {
            Course::Constant => lr,
            Course::Linear => lr + (min_lr - lr) * part,
            Course::Cosine => min_lr + (lr - min_lr) * (1.0 + (PI * part).cos()) / 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rates of all steps of a run.
    fn rates(name: Course, warmup_steps: u64, min_lr: f64, total: u64) -> Vec<f64> {
        let schedule =
            Schedule { course: name, warmup: warmup_steps, min_lr: Some(min_lr), lr_steps: None };
        (0..total).map(|step| schedule.lr(0.1, step, total)).collect()
    }

    #[track_caller]
    fn assert_rates(got: Vec<f64>, expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
            // A few rounding errors of f64 in numbers of about 0.1.
            assert!((got - expected).abs() < 1e-15, "step {step}: {got}, not {expected}");
        }
    }

    #[test]
    fn constant_is_constant() {
        assert_rates(rates(Course::Constant, 0, 0.0, 3), &[0.1; 3]);
    }

    #[test]
    fn the_rate_rises_in_even_steps_that_are_not_zero() {
        let expected = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1];
        assert_rates(rates(Course::Constant, 4, 0.0, 7), &expected);
        // The decay starts where the warm-up ends.
        assert_rates(rates(Course::Linear, 1, 0.0, 5), &[0.05, 0.1, 0.075, 0.05, 0.025]);
    }

    /// The rates of `torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=5)` for 0.1.
    #[test]
    fn linear_is_pytorchs() {
        let expected = [0.1, 0.084, 0.068, 0.052, 0.036];
        assert_rates(rates(Course::Linear, 0, 0.02, 5), &expected);
    }

    /// The rates of `torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6, eta_min=...)` for
    /// 0.1: the cosines of multiples of 30 degrees.
    #[test]
    fn cosine_is_pytorchs() {
        let root = 3f64.sqrt();
        let expected = [0.1, 0.05 + 0.025 * root, 0.075, 0.05, 0.025, 0.05 - 0.025 * root];
        assert_rates(rates(Course::Cosine, 0, 0.0, 6), &expected);
        let raised: Vec<f64> = expected.iter().map(|rate| 0.02 + 0.8 * rate).collect();
        assert_rates(rates(Course::Cosine, 0, 0.02, 6), &raised);
    }

    #[test]
    fn the_end_is_what_comes_after_the_last_step() {
        for name in [Course::Linear, Course::Cosine] {
            let schedule = Schedule { course: name, warmup: 3, min_lr: Some(0.01), lr_steps: None };
            assert_rates(vec![schedule.lr(0.1, 10, 10), schedule.lr(0.1, 50, 10)], &[0.01; 2]);
        }
    }
}
