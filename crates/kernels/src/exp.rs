//! The exponential function of f32, as plain code that a compiler can turn into vector instructions.
//!
//! In: a number. Out: e to its power. A loop over `f32::exp` calls a function each time; this one is inlined, and uses
//! the instructions of its loop.

/// The smallest argument whose result is a normal number.
const LOW: f32 = -87.336_54;

/// The largest argument whose result is finite.
const HIGH: f32 = 88.722_83;

/// `e^x` with a relative error of at most 1e-7 where the result is a normal number. Smaller results are zero,
/// results that are too large are infinite, and NaN stays NaN. The bits are the same with all vector instructions.
///
/// `x = n ln 2 + r` with a whole number `n` and `|r| <= ln(2) / 2`. A polynomial gives `e^r` (that of the Cephes library,
/// S. Moshier), and `n` is added to the exponent of the result.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: a number next to it has no binary digits behind the point, so the sum is rounded to a whole number,
    // whose lowest digits are the lowest digits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts. The first has so few digits that its product with `n` is exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    let y = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    let y = if x < LOW { 0.0 } else { y };
    // Infinite or NaN, like `x`.
    if x <= HIGH { y } else { x * f32::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: f64 = 1e-7;

    fn check(x: f32) {
        let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
        assert!((got - want).abs() <= TOLERANCE * want, "exp({x:?}) is {got:e}, not {want:e}");
    }

    #[test]
    fn the_bound_holds_over_the_whole_range() {
        // Every 997th number of each sign. 997 is prime, so all low digits occur.
        for sign in [0, 1 << 31] {
            let limit = if sign == 0 { HIGH } else { -LOW };
            (0..=limit.to_bits()).step_by(997).for_each(|bits| check(f32::from_bits(bits | sign)));
        }
        for edge in [LOW, HIGH] {
            let around = edge.to_bits() - 5000..=edge.to_bits();
            around.for_each(|bits| check(f32::from_bits(bits)));
        }
        // Around the places where the whole number changes.
        for n in -126..=128 {
            let x = ((f64::from(n) - 0.5) * std::f64::consts::LN_2) as f32;
            let bits = x.to_bits();
            let around = (bits - 20..bits + 20).map(f32::from_bits);
            around.filter(|x| (LOW..=HIGH).contains(x)).for_each(check);
        }
    }

    #[test]
    fn results_that_are_no_normal_numbers() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        let below = f32::from_bits(LOW.to_bits() + 1);
        for x in [below, -88.0, -100.0, -1e10, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp(x).to_bits(), 0, "{x}");
        }
        let above = f32::from_bits(HIGH.to_bits() + 1);
        for x in [above, 89.0, 1e10, f32::MAX, f32::INFINITY] {
            assert_eq!(exp(x), f32::INFINITY, "{x}");
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::from_bits(0xFFFF_FFFF)).is_nan());
        // The limits are the last arguments before the results leave the normal numbers.
        assert!(f64::from(above).exp() > f64::from(f32::MAX));
        assert!(f64::from(below).exp() < f64::from(f32::MIN_POSITIVE));
        assert!(exp(LOW) >= f32::MIN_POSITIVE && exp(HIGH).is_finite());
    }
}
