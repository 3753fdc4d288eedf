//! The memory of the rank that has most, at three moments of a run.
//!
//! Input: the summary of a run, which has the memory of each rank by phase. Output: bytes.

use paceline_failure::{Failure, Result};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::record::memory::{Bytes, INITIALIZATION, RankMemory, STEP, TOTAL};

/// Bytes of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// The most at once within the phase.
    pub peak: u64,
    /// In use at its end.
    pub in_use: u64,
}

/// Bytes of the rank that has most. Each number may be of another rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Initialization.
    pub init: Phase,
    /// The forward and the backward pass: all that comes before the optimizer's step.
    pub before_step: Phase,
    /// The rest of synchronization after the backward pass, and the optimizer's step.
    pub step: Phase,
    /// Parameters after the step.
    pub parameters: u64,
    /// Gradients after the step.
    pub gradients: u64,
    /// State of the optimizer after the step.
    pub optimizer: u64,
}

impl Memory {
    /// Reads the memory of a run.
    pub fn of(run: &RunSummary) -> Result<Self> {
        let ranks: Vec<RankMemory> = run.part("memory");
        let has_step = |rank: &RankMemory| rank.phases.iter().any(|phase| phase.phase == STEP);
        if ranks.is_empty() || !ranks.iter().all(has_step) {
            return Err(Failure::Run("a summary lacks the memory of a step by phase".into()));
        }
        let all = ranks.iter().map(Self::of_rank);
        Ok(all.reduce(Self::most).unwrap_or_default())
    }

    fn of_rank(rank: &RankMemory) -> Self {
        let of = |bytes: &Bytes, name: &str| bytes.get(name).copied().unwrap_or(0);
        let mut memory = Self::default();
        for phase in &rank.phases {
            let part = match phase.phase.as_str() {
                INITIALIZATION => &mut memory.init,
                STEP => &mut memory.step,
                _ => &mut memory.before_step,
            };
            part.peak = part.peak.max(of(&phase.peak_bytes, TOTAL));
            // Phases are in order, so the last one of a part ends it.
            part.in_use = of(&phase.current_bytes, TOTAL);
        }
        if let Some(after) = rank.after_step() {
            memory.parameters = of(after, "parameters");
            memory.gradients = of(after, "gradients");
            memory.optimizer = of(after, "optimizer");
        }
        memory
    }

    fn most(self, other: Self) -> Self {
        let phase =
            |a: Phase, b: Phase| Phase { peak: a.peak.max(b.peak), in_use: a.in_use.max(b.in_use) };
        Self {
            init: phase(self.init, other.init),
            before_step: phase(self.before_step, other.before_step),
            step: phase(self.step, other.step),
            parameters: self.parameters.max(other.parameters),
            gradients: self.gradients.max(other.gradients),
            optimizer: self.optimizer.max(other.optimizer),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn phase(name: &str, peak: u64, in_use: u64, optimizer: u64) -> Value {
        json!({
            "phase": name,
            "peak_bytes": {"total": peak, "optimizer": optimizer},
            "current_bytes": {"total": in_use, "optimizer": optimizer, "parameters": 7, "gradients": 8}
        })
    }

    #[test]
    fn phases_of_the_passes_come_before_the_step() {
        let rank = |optimizer: u64| {
            json!({"peak_bytes": {}, "phases": [
                phase("initialization", 10 + optimizer, 9, optimizer),
                phase("forward", 40, 30, optimizer),
                phase("backward", 35, 20, optimizer),
                phase("step", 25, 21, optimizer),
            ]})
        };
        let run: RunSummary = json!({"memory": [rank(2), rank(3)]}).into();
        let memory = Memory::of(&run).unwrap();
        assert_eq!(memory.init, Phase { peak: 13, in_use: 9 });
        assert_eq!(memory.before_step, Phase { peak: 40, in_use: 20 });
        assert_eq!(memory.step, Phase { peak: 25, in_use: 21 });
        assert_eq!((memory.parameters, memory.gradients, memory.optimizer), (7, 8, 3));
    }

    #[test]
    fn a_summary_without_phases_is_refused() {
        for whole in [json!({}), json!({"memory": [{"peak_bytes": {}, "phases": []}]})] {
            assert!(Memory::of(&whole.into()).unwrap_err().to_string().contains("by phase"));
        }
    }
}
