//! A model given as bytes of gradients and milliseconds of computing.
//!
//! Its gradients become final at an even pace during the backward pass, which ends the computation, in `PARTS` equal parts,
//! from the last layer to the first. Layout and calibration are as from a run.

use paceline_failure::Result;
use paceline_model::{Init, Layout, LayoutBuilder};
use paceline_observe::insight::anatomy::ReadyLine;

use super::flags::PredictArgs;
use super::model::Calibration;
use crate::usage;

const PARTS: u64 = 128;
/// Parameters start at multiples of this many elements in flat storage.
const ALIGNED_ELEMS: u64 = 16;
/// Bytes of a gradient.
const ELEM_BYTES: u64 = 4;
/// The most bytes of gradients: 1e13 parameters.
pub(super) const MAX_BYTES: f64 = 4e13;
/// The backward part of the computation: a layer's gradients of inputs and of weights each take as long as its outputs.
const BACKWARD_PART: f64 = 2.0 / 3.0;

/// A model in numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StatedModel {
    /// Bytes of all gradients.
    pub gradient_bytes: u64,
    /// The time that a step computes, in milliseconds.
    pub compute_ms: f64,
    /// The part of this time that is the backward pass.
    pub backward_ms: f64,
}

impl StatedModel {
    /// The model that the flags give, if any.
    pub fn of(args: &PredictArgs) -> Result<Option<Self>> {
        let (Some(bytes), Some(compute_ms)) = (args.gradient_bytes, args.compute_ms) else {
            return Ok(None);
        };
        let gradient_bytes = check_bytes(bytes)?;
        let backward_ms = args.backward_ms.unwrap_or(BACKWARD_PART * compute_ms);
        if !(0.0..=compute_ms).contains(&backward_ms) {
            return usage(format!(
                "--backward-ms {backward_ms}: pass milliseconds from 0 to --compute-ms {compute_ms}"
            ));
        }
        Ok(Some(Self { gradient_bytes, compute_ms, backward_ms }))
    }

    /// Number of parameters of four bytes.
    pub fn num_params(&self) -> u64 {
        self.gradient_bytes.div_ceil(ELEM_BYTES)
    }

    /// The layout and the times of this model.
    pub fn model(&self) -> (Layout, Calibration) {
        let params = self.num_params();
        let part = params.div_ceil(PARTS).next_multiple_of(ALIGNED_ELEMS);
        let num_parts = params.div_ceil(part);
        let mut builder = LayoutBuilder::new();
        let mut unit = builder.unit("given");
        for at in 0..num_parts {
            // The last part has the rest.
            let elems = part.min(params - at * part);
            unit.param(&at.to_string(), [elems as usize], Init::Constant(0.0));
        }
        let layout = builder.finish(1);
        let begin = self.compute_ms - self.backward_ms;
        // In the order of time: the last parameter first.
        let ready = layout.params().iter().rev().map(|param| {
            let done = params as f64 - param.start as f64;
            let ready_ms = begin + self.backward_ms * done / params as f64;
            ReadyLine { param: param.name.clone(), ready_ms }
        });
        let calibration = Calibration {
            ranks: 1,
            step_ms: self.compute_ms,
            compute_ms: self.compute_ms,
            backward_begin_ms: begin,
            backward_end_ms: self.compute_ms,
            ready: ready.collect(),
            ..Calibration::default()
        };
        (layout, calibration)
    }

    /// The model in words.
    pub fn words(&self) -> String {
        format!(
            "{:.2} MB of gradients, {} ms per step",
            self.gradient_bytes as f64 / 1e6,
            self.compute_ms
        )
    }
}

/// Checks the value of `--gradient-bytes`.
pub(super) fn check_bytes(bytes: f64) -> Result<u64> {
    if !(ELEM_BYTES as f64..=MAX_BYTES).contains(&bytes) || bytes.fract() != 0.0 {
        return usage(format!(
            "--gradient-bytes {bytes}: pass a whole number of bytes, 4 or more, as 102.4e6 or 500MB"
        ));
    }
    Ok(bytes as u64)
}

/// Reads bytes, perhaps with a unit. Units with `i` are powers of 1024, others of 1000.
pub fn bytes(text: &str) -> std::result::Result<f64, String> {
    const UNITS: [(&str, f64); 6] = [
        ("KiB", 1024.0),
        ("MiB", 1048576.0),
        ("GiB", 1073741824.0),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
    ];
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let with_unit = UNITS.into_iter().find_map(|(unit, scale)| {
        let (head, tail) = text.split_at_checked(text.len().checked_sub(unit.len())?)?;
        // Rounded, because 102.4 x 1e6 may be slightly less than 102400000.
        tail.eq_ignore_ascii_case(unit).then(|| number(head).map(|n| (n * scale).round()))?
    });
    let bytes = with_unit.or_else(|| number(text));
    bytes.ok_or_else(|| "pass a number of bytes such as 102.4e6 or 500MB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_may_have_a_unit() {
        let cases = [
            ("102.4e6", 102_400_000.0),
            ("102.4MB", 102_400_000.0),
            ("500 mb", 5e8),
            ("1.5GiB", 1_610_612_736.0),
            ("4kB", 4e3),
            ("-1", -1.0),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for bad in ["", "MB", "500M", "5 00MB", "x", "\u{fc}B", "\u{20ac}"] {
            assert!(bytes(bad).unwrap_err().contains("such as 102.4e6 or 500MB"), "{bad}");
        }
    }

    #[test]
    fn gradients_become_final_at_an_even_pace() {
        // 128 parts of 16 KiB, 30 ms in all; the last 20 ms are the backward pass.
        let given =
            StatedModel { gradient_bytes: 128 * 16_384, compute_ms: 30.0, backward_ms: 20.0 };
        let (layout, calibration) = given.model();
        assert_eq!((layout.params().len(), layout.len() * 4), (128, 128 * 16_384));
        let times: Vec<f64> = calibration.ready.iter().map(|line| line.ready_ms).collect();
        assert_eq!(calibration.ready[0].param, "given.127");
        assert!((times[0] - (10.0 + 20.0 / 128.0)).abs() < 1e-9, "{times:?}");
        assert!((times[63] - 20.0).abs() < 1e-9 && times[127] == 30.0, "{times:?}");
        assert!(calibration.backward(&layout).is_ok());
    }

    #[test]
    fn few_bytes_make_few_parts() {
        for bytes in [4, 64, 1_000, 102_400_000] {
            let given = StatedModel { gradient_bytes: bytes, compute_ms: 3.0, backward_ms: 0.0 };
            let (layout, calibration) = given.model();
            assert_eq!(layout.num_params() as u64 * 4, bytes);
            assert!(calibration.ready.iter().all(|line| line.ready_ms == 3.0));
            // Only the end is padded.
            assert!((layout.len() as u64) < bytes / 4 + ALIGNED_ELEMS, "{bytes}");
        }
    }
}
