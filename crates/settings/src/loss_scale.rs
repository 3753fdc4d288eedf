//! How the loss is scaled: `--loss-scale` and `--loss-scale-window`, resolved.
//!
//! The definitions are those of `torch.amp.GradScaler`: after an overflow the scale is halved, after a window of steps
//! without one it is doubled. A scale is a power of two here, so that multiplying by it and dividing again changes no digit.
//! The effect of a scale on a step is not known here.

use std::str::FromStr;

use paceline_failure::{Result, usage};
use serde::Serialize;

use super::flags::{LossScaleFlags, RunFlags};
use super::named::PrecisionName;
use super::strategy::StrategyConfig;

/// The largest power of two that f32 has.
const LARGEST: f64 = (1u128 << 127) as f64;

/// The scale of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossScale {
    /// The scale of the first step: a power of two, at least 1.
    #[serde(rename = "loss_scale")]
    pub initial: f64,
    /// The good steps after which the scale is doubled; `None` if the scale is constant.
    #[serde(rename = "loss_scale_window")]
    pub window: Option<u64>,
}

impl LossScale {
    /// The scale that `dynamic` names, as in `GradScaler`.
    const DYNAMIC: Self = Self { initial: 65536.0, window: Some(2000) };

    /// Resolves the flags: by default a dynamic scale with fp16, and no scale otherwise.
    pub fn resolve(
        flags: &RunFlags,
        strategy: &StrategyConfig,
        warnings: &mut Vec<String>,
    ) -> Result<Option<Self>> {
        let LossScaleFlags { loss_scale, loss_scale_window: window } = flags.loss_scale;
        let of_precision =
            (flags.precision.precision == PrecisionName::Fp16).then_some(Self::DYNAMIC);
        let scale = loss_scale.or(of_precision).map(|scale| Self {
            window: scale.window.map(|default| window.unwrap_or(default)),
            ..scale
        });
        if window.is_some() && scale.is_none_or(|scale| scale.window.is_none()) {
            warnings.push("--loss-scale-window has no effect without --loss-scale dynamic".into());
        }
        if scale.is_none() {
            return Ok(None);
        }
        let (what, fix) = match loss_scale {
            Some(_) => ("--loss-scale", "leave it out"),
            None => ("--precision fp16 scales the loss", "pass --precision bf16"),
        };
        let words = strategy.words();
        if !strategy.is_alone() && !strategy.keeps_replicas_equal() {
            return usage(format!(
                "{what}: with {words} each rank has gradients of its own, so the ranks would not skip the same steps; {fix}, or \
                 pass another strategy"
            ));
        }
        if strategy.settings().keeps_gradients() {
            return usage(format!(
                "{what}: {words} keeps gradients for later steps, in which the scale may be another one; {fix}, or pass another \
                 strategy"
            ));
        }
        Ok(scale)
    }

    /// The scale as one would type it.
    pub fn words(&self) -> String {
        match self.window {
            None => self.initial.to_string(),
            Some(_) => format!("dynamic:{}", self.initial),
        }
    }

    /// The scale after a step with this scale that followed `good_steps` good ones, and the good steps then.
    pub fn after(&self, scale: f64, good_steps: u64, has_overflowed: bool) -> (f64, u64) {
        let Some(window) = self.window else { return (scale, 0) };
        if has_overflowed {
            return ((scale / 2.0).max(1.0), 0);
        }
        if good_steps + 1 >= window {
            ((scale * 2.0).min(LARGEST), 0)
        } else {
            (scale, good_steps + 1)
        }
    }
}

impl FromStr for LossScale {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (number, window) = match text.split_once(':') {
            Some(("dynamic", number)) => (number, Self::DYNAMIC.window),
            _ if text == "dynamic" => return Ok(Self::DYNAMIC),
            _ => (text, None),
        };
        let scale = number.parse().ok().filter(|scale| (1.0..=LARGEST).contains(scale));
        let scale: f64 = scale.ok_or(
            "pass a power of two from 1 to 2^127, such as 65536; or dynamic, or dynamic:N, which begins with N",
        )?;
        let below = scale.log2().floor().exp2();
        if below == scale {
            return Ok(Self { initial: scale, window });
        }
        Err(format!(
            "this is no power of two, so dividing by it would round gradients; pass {}",
            text.replace(number, &below.to_string())
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_taken_and_other_numbers_are_refused() {
        let parse = |text: &str| text.parse::<LossScale>();
        assert_eq!(parse("dynamic"), Ok(LossScale { initial: 65536.0, window: Some(2000) }));
        assert_eq!(parse("dynamic:4").unwrap().words(), "dynamic:4");
        assert_eq!(parse("1024"), Ok(LossScale { initial: 1024.0, window: None }));
        assert_eq!(parse("1").unwrap().words(), "1");
        for wrong in ["0", "-1", "nan", "inf", "1e39", "0.5", "x", "", "dynamic:", "dynamic:0"] {
            let said = parse(wrong).unwrap_err();
            assert!(said.contains("pass a power of two from 1 to 2^127"), "{wrong}: {said}");
        }
        assert!(parse("3").unwrap_err().ends_with("; pass 2"));
        assert!(parse("dynamic:1e12").unwrap_err().ends_with("; pass dynamic:549755813888"));
    }

    #[test]
    fn the_scale_is_halved_at_once_and_doubled_after_the_window() {
        let scale = LossScale { initial: 4.0, window: Some(3) };
        assert_eq!(scale.after(4.0, 2, true), (2.0, 0));
        assert_eq!(scale.after(1.0, 2, true), (1.0, 0), "at least 1");
        assert_eq!(scale.after(2.0, 0, false), (2.0, 1));
        assert_eq!(scale.after(2.0, 1, false), (2.0, 2));
        assert_eq!(scale.after(2.0, 2, false), (4.0, 0));
        assert_eq!(scale.after(LARGEST, 2, false), (LARGEST, 0));
        let constant = LossScale { initial: 8.0, window: None };
        assert_eq!(constant.after(8.0, 0, true), (8.0, 0));
    }
}
