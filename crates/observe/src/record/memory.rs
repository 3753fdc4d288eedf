//! The memory of a rank by phase of a step, and by category.

use std::collections::BTreeMap;

use paceline_memory::{Allocator, Category, PhaseUsage, Usage};
use serde::{Deserialize, Serialize};

/// The key of the sum of all categories, beside the categories.
pub const TOTAL: &str = "total";
/// The key of memory taken from the system: in use, or free in a pool.
pub const RESERVED: &str = "reserved";

/// The key of the proportional set size of a process.
pub const RESIDENT: &str = "resident";

/// The phase that ends when parameters, optimizer and checkpoint are in place.
pub const INITIALIZATION: &str = "initialization";
/// The phase from the end of the last backward pass to the end of the optimizer's step. The phases before it have the names
/// of their spans, `forward` and `backward`.
pub const STEP: &str = "step";

/// Bytes by category, and in [`TOTAL`] and [`RESERVED`].
pub type Bytes = BTreeMap<String, u64>;

/// The memory of a rank after one phase, and its peaks within the phase.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseMemory {
    /// The name of the phase.
    pub phase: String,
    /// Bytes in use when the phase ended for the last time.
    pub current_bytes: Bytes,
    /// The most bytes in use at once within the phase, in any step.
    pub peak_bytes: Bytes,
}

impl PhaseMemory {
    fn new(phase: &str, usage: &PhaseUsage) -> Self {
        let all = |of| bytes(|category| usage.of(category), [usage.total, usage.reserved], of);
        Self {
            phase: phase.to_owned(),
            current_bytes: all(|usage| usage.current_bytes),
            peak_bytes: all(|usage| usage.peak_bytes),
        }
    }
}

fn bytes(
    of_category: impl Fn(Category) -> Usage,
    [total, reserved]: [Usage; 2],
    number: fn(&Usage) -> u64,
) -> Bytes {
    let all = Category::ALL.map(|category| (category.name(), of_category(category)));
    let all = all.into_iter().chain([(TOTAL, total), (RESERVED, reserved)]);
    all.map(|(name, usage)| (name.to_owned(), number(&usage))).collect()
}

/// The memory of a rank in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// The phases: initialization, then those of the measured steps.
    pub phases: Vec<PhaseMemory>,
    /// The most bytes at once in the whole run.
    pub peak_bytes: Bytes,
}

impl RankMemory {
    /// From the counts of this rank's allocator.
    pub fn new(initialization: &PhaseUsage, allocator: &Allocator) -> Self {
        let steps = allocator.phases().into_iter().filter(|(name, _)| *name != INITIALIZATION);
        let all = [(INITIALIZATION, *initialization)].into_iter().chain(steps);
        let totals = [allocator.total(), allocator.reserved()];
        Self {
            phases: all.map(|(name, usage)| PhaseMemory::new(name, &usage)).collect(),
            peak_bytes: bytes(|category| allocator.usage(category), totals, |of| of.peak_bytes),
        }
    }

    /// The most bytes at once in the phases of a step, by category and in [`TOTAL`] and [`RESERVED`].
    pub fn peak_of_step(&self) -> Bytes {
        let mut peaks = Bytes::new();
        for phase in self.phases.iter().filter(|phase| phase.phase != INITIALIZATION) {
            for (name, &bytes) in &phase.peak_bytes {
                let peak = peaks.entry(name.clone()).or_insert(0);
                *peak = bytes.max(*peak);
            }
        }
        peaks
    }

    /// The memory after a step, or after initialization if there was none.
    pub fn after_step(&self) -> Option<&Bytes> {
        self.phases.last().map(|phase| &phase.current_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_step_leaves_initialization_out() {
        let allocator = Allocator::new();
        let large = allocator.allocate(4096, Category::Workspace).unwrap();
        let kept = allocator.allocate(640, Category::Parameters).unwrap();
        drop(large);
        let initialization = allocator.end_phase(INITIALIZATION);
        let small = allocator.allocate(64, Category::Workspace).unwrap();
        allocator.end_phase("forward");
        drop(small);
        allocator.end_phase(STEP);
        let memory = RankMemory::new(&initialization, &allocator);
        let names: Vec<&str> = memory.phases.iter().map(|phase| phase.phase.as_str()).collect();
        assert_eq!(names, [INITIALIZATION, "forward", STEP]);
        assert_eq!(memory.peak_of_step()["workspace"], 64);
        assert_eq!(memory.peak_of_step()[TOTAL], 704);
        assert_eq!(memory.peak_bytes["workspace"], 4096);
        assert_eq!(memory.after_step().unwrap()[TOTAL], 640);
        // The small one lies where the large one was.
        assert_eq!(memory.peak_bytes[RESERVED], 4736);
        drop(kept);
    }
}
