//! Bytes by category: how many are in use now, and the most that were in use at once, ever or within a phase.
//!
//! Input: changes of the memory in use, and the ends of phases. Output: usage by category, and events on a track. This
//! module knows neither the origin of memory nor the work of a phase.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use paceline_trace::{Event, Track, lock, now_ns};

/// The purpose of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Model parameters.
    Parameters,
    /// Gradients of the parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Parts of sharded tensors outside of a rank's own shard: the parameters and gradients of units that are open.
    Unsharded,
    /// Outputs of layers, and tensors that layers save for their backward pass.
    Activations,
    /// Scratch memory inside one kernel.
    Workspace,
    /// Staging areas of collectives.
    Communication,
    /// Batches, before the model uses them.
    Data,
    /// Copies of the state that is being saved.
    Snapshots,
}

impl Category {
    /// Every category, in the order of reports.
    pub const ALL: [Category; 9] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Unsharded,
        Category::Activations,
        Category::Workspace,
        Category::Communication,
        Category::Data,
        Category::Snapshots,
    ];

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Unsharded => "unsharded",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
            Category::Data => "data",
            Category::Snapshots => "snapshots",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of one category, or of all categories together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use now.
    pub current_bytes: u64,
    /// The most bytes that were in use at once.
    pub peak_bytes: u64,
}

/// The memory of one allocator at the end of a phase, such as the forward pass. The peaks are those within the phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseUsage {
    by_category: [Usage; Category::ALL.len()],
    /// Bytes in use in all categories together.
    pub total: Usage,
    /// Memory obtained from the system: in use, or free in a pool.
    pub reserved: Usage,
}

impl PhaseUsage {
    /// Bytes in use in one category.
    pub fn of(&self, category: Category) -> Usage {
        self.by_category[category as usize]
    }

    /// The same phase after it has run once more: the later run's bytes in use, and the larger peaks.
    pub fn then(&self, later: &Self) -> Self {
        let then = |earlier: Usage, later: Usage| Usage {
            current_bytes: later.current_bytes,
            peak_bytes: earlier.peak_bytes.max(later.peak_bytes),
        };
        Self {
            by_category: std::array::from_fn(|at| {
                then(self.by_category[at], later.by_category[at])
            }),
            total: then(self.total, later.total),
            reserved: then(self.reserved, later.reserved),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counter {
    current: AtomicU64,
    /// The peak of the phase in progress.
    phase_peak: AtomicU64,
    /// The peak of all phases that have ended.
    earlier_peak: AtomicU64,
}

impl Counter {
    /// Returns the bytes in use now.
    pub(super) fn add(&self, bytes: usize) -> u64 {
        let now = self.current.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.phase_peak.fetch_max(now, Ordering::AcqRel);
        now
    }

    /// Returns the bytes in use now.
    pub(super) fn remove(&self, bytes: usize) -> u64 {
        self.current.fetch_sub(bytes as u64, Ordering::Relaxed) - bytes as u64
    }

    pub(super) fn usage(&self) -> Usage {
        let [current_bytes, phase_peak, earlier_peak] =
            [&self.current, &self.phase_peak, &self.earlier_peak]
                .map(|of| of.load(Ordering::Relaxed));
        Usage { current_bytes, peak_bytes: phase_peak.max(earlier_peak) }
    }

    /// Ends a phase. Other threads may add and remove meanwhile: bytes that they add count for this phase or for the
    /// next one, and bytes that stay count for both.
    fn end_phase(&self) -> Usage {
        let peak_bytes = self.phase_peak.swap(0, Ordering::AcqRel);
        self.earlier_peak.fetch_max(peak_bytes, Ordering::Relaxed);
        // Read after the exchange: a thread that has added before it is seen here, and one that adds after it raises the new
        // peak itself.
        let current_bytes = self.current.load(Ordering::Relaxed);
        self.phase_peak.fetch_max(current_bytes, Ordering::AcqRel);
        Usage { current_bytes, peak_bytes: peak_bytes.max(current_bytes) }
    }
}

/// Phases by name, in the order in which they ended for the first time.
type Phases = Vec<(&'static str, PhaseUsage)>;

#[derive(Debug, Default)]
pub(crate) struct UsageCounters {
    pub(super) by_category: [Counter; Category::ALL.len()],
    pub(super) total: Counter,
    /// Memory obtained from the system: in use, or free in a pool.
    pub(super) reserved: Counter,
    pub(super) phases: Mutex<Phases>,
    /// The track on which every change is recorded.
    pub(super) track: OnceLock<Arc<Track>>,
}

impl UsageCounters {
    pub(crate) fn add(&self, category: Category, bytes: usize, address: usize) {
        self.by_category[category as usize].add(bytes);
        let now = self.total.add(bytes);
        self.record(category, bytes as i64, now, address);
    }

    pub(crate) fn remove(&self, category: Category, bytes: usize, address: usize) {
        self.by_category[category as usize].remove(bytes);
        let now = self.total.remove(bytes);
        self.record(category, -(bytes as i64), now, address);
    }

    fn record(&self, category: Category, delta_bytes: i64, allocated_bytes: u64, address: usize) {
        if let Some(track) = self.track.get().filter(|track| track.is_on()) {
            track.record(Event::Memory {
                at_ns: now_ns(),
                category: category.name(),
                delta_bytes,
                allocated_bytes,
                reserved_bytes: self.reserved.usage().current_bytes,
                address: address as u64,
            });
        }
    }

    /// Ends the phase in progress and begins the next one.
    pub(super) fn begin_phase(&self) -> PhaseUsage {
        PhaseUsage {
            by_category: std::array::from_fn(|at| self.by_category[at].end_phase()),
            total: self.total.end_phase(),
            reserved: self.reserved.end_phase(),
        }
    }

    /// Ends the phase in progress, and adds it to earlier phases of the same name.
    pub(super) fn end_phase(&self, name: &'static str) -> PhaseUsage {
        let ended = self.begin_phase();
        let mut phases = lock(&self.phases);
        match phases.iter_mut().find(|(known, _)| *known == name) {
            Some((_, phase)) => *phase = phase.then(&ended),
            None => phases.push((name, ended)),
        }
        ended
    }
}
