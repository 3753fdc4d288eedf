//! The slowest link with which a step keeps an efficiency.
//!
//! The efficiency of a step is its time without communication divided by its time with it. A function from a bandwidth to
//! an efficiency goes in, and the least bandwidth comes out.

/// Bandwidths that are looked at, in bytes per second: far slower and far faster than any link.
const RANGE: (f64, f64) = (1.0, 1e15);
/// How near the answer is to the least bandwidth: one part in a million.
const PRECISION: f64 = 1e-6;

/// The efficiency in percent of a step of `alone_ms` that takes `step_ms` with communication.
pub fn efficiency_pct(alone_ms: f64, step_ms: f64) -> f64 {
    if step_ms > 0.0 { 100.0 * alone_ms / step_ms } else { 100.0 }
}

/// The least bandwidth in bytes per second for which `efficiency` is at least `target`. `None` if no bandwidth is enough,
/// because latency alone takes too long. A larger bandwidth never lowers the efficiency.
pub fn least_bandwidth(efficiency: impl Fn(f64) -> f64, target: f64) -> Option<f64> {
    let (mut low, mut high) = RANGE;
    if efficiency(high) < target {
        return None;
    }
    while high / low > 1.0 + PRECISION {
        let middle = (low * high).sqrt();
        if efficiency(middle) >= target { high = middle } else { low = middle }
    }
    Some(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_bandwidth_is_found() {
        // 90 ms of computing and 1 GB of communication that nothing hides: 10 ms at 100 GB/s.
        let efficiency = |latency_ms: f64| {
            move |bytes_per_s: f64| efficiency_pct(90.0, 90.0 + latency_ms + 1e12 / bytes_per_s)
        };
        let found = least_bandwidth(efficiency(0.0), 90.0).unwrap();
        assert!((found / 1e11 - 1.0).abs() < 1e-5, "{found}");
        let found = least_bandwidth(efficiency(5.0), 90.0).unwrap();
        assert!((found / 2e11 - 1.0).abs() < 1e-5, "{found}");
        assert!(efficiency(5.0)(found) >= 90.0);
        assert_eq!(least_bandwidth(efficiency(11.0), 90.0), None);
        assert_eq!(efficiency_pct(0.0, 0.0), 100.0);
    }
}
