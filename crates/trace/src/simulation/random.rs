//! Random numbers of a simulated cluster, which follow from its seed.

/// Random numbers, by splitmix64.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix(pub u64);

impl SplitMix {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A time of any order of magnitude from microseconds up to `max_ns`.
    pub fn time_ns(&mut self, max_ns: u64) -> u64 {
        let scale = 2 << (10 + self.below(u64::from(max_ns.ilog2() - 10)));
        self.below(scale).min(max_ns)
    }
}
