//! The exponential function, in plain operations that a compiler can vectorize.

/// The smallest argument. Anything below gives the result of this one, about 1.6e-38.
const LOWEST: f32 = -87.0;
/// The largest argument. Anything above gives the result of this one, about 1.7e38.
const HIGHEST: f32 = 88.0;
/// Adding this number leaves the nearest integer in the low bits of the sum: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

/// e to the power of `x`, with a relative error below 3e-7, for arguments from -87 to 88. Arguments outside this range count
/// as its ends. NaN stays NaN.
///
/// `x = n ln 2 + r`, with an integer `n` and `|r|` at most half of ln 2. ln 2 is subtracted in two parts, of which the first has so few
/// bits that its product with `n` is exact. The polynomial for `e^r` is that of `expf` in the Cephes library (Moshier).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let e = p * (r * r) + r + 1.0;
    // The bits of `rounded` are those of ROUND plus n. Where x is NaN they are arbitrary, and `e` is NaN.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    e * f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn the_relative_error_is_small_everywhere() {
        let mut worst = 0.0f64;
        let steps = 2_000_000;
        for step in 0..=steps {
            let x = -87.0 + 175.0 * step as f32 / steps as f32;
            let exact = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
        }
        assert!(worst < 3e-7, "{worst}");
    }

    #[test]
    fn special_arguments() {
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (exp(-87.0), exp(88.0)));
        assert!(exp(-87.0) > 0.0 && exp(88.0).is_finite());
    }
}
