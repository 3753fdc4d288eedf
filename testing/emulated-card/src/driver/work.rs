//! Pieces of work that wait in a stream, and what each does when its turn comes.
//!
//! A piece of work holds everything that it needs. It knows neither streams nor handles.

use std::sync::Arc;

use crate::cupti::{CARD, PAGEABLE, PINNED, RanWork};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::ptx::PtxLaunch;

use super::pinned::{HostRange, PinnedMemory};

/// The state of a piece of work after a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskProgress {
    Done,
    /// It waits for another process and must be tried again.
    Pending,
}

/// Work of another library: a product, a collective.
pub trait CardTask: Send + Sync {
    /// The kernel that a card would run.
    fn name(&self) -> &'static str;
    /// Whether it is work of the communicator at this address.
    fn is_of(&self, _communicator: usize) -> bool {
        false
    }
    /// Does as much as it can without waiting.
    fn advance(&self, memory: &mut DeviceMemory) -> Result<TaskProgress, Fault>;
}

/// A piece of work.
#[derive(Clone)]
pub enum CardWork {
    Kernel(Arc<PtxLaunch>),
    /// A copy to the card from bytes that were read when the copy was asked for.
    UploadStaged {
        to: u64,
        bytes: Arc<[u8]>,
    },
    /// A copy to the card that reads host memory when it runs.
    Upload {
        to: u64,
        from: HostRange,
    },
    Download {
        to: HostRange,
        from: u64,
    },
    /// A copy within the card.
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
    /// A repeated pattern.
    Fill {
        at: u64,
        pattern: Arc<[u8]>,
        count: usize,
    },
    /// Notes the time in an event.
    Record {
        event: usize,
    },
    /// Waits until another stream has finished so many pieces of work.
    Wait {
        stream: usize,
        number: u64,
    },
    /// A graph that runs as one piece.
    Graph(super::graph::GraphRun),
    /// Work of another library.
    Task(Arc<dyn CardTask>),
}

impl CardWork {
    /// The function of the driver that puts it into a stream, by its number in `cupti_driver_cbid.h`, if profilers show it.
    pub fn function(&self) -> Option<u32> {
        match self {
            Self::Kernel(_) | Self::Task(_) => Some(307),
            Self::UploadStaged { .. } | Self::Upload { .. } => Some(277),
            Self::Download { .. } => Some(279),
            Self::Copy { .. } => Some(281),
            Self::Fill { .. } => Some(216),
            Self::Graph(_) => Some(514),
            Self::Record { .. } | Self::Wait { .. } => None,
        }
    }

    /// Its record for profilers once it has run.
    pub fn ran(&self) -> Option<RanWork<'_>> {
        Some(match self {
            Self::Kernel(of) => {
                RanWork::Kernel(&of.kernel.name, of.grid, of.block, of.dynamic_shared_bytes)
            }
            Self::Task(task) => RanWork::Kernel(task.name(), [1; 3], [1; 3], 0),
            Self::UploadStaged { bytes, .. } => RanWork::Copy(bytes.len(), [PAGEABLE, CARD]),
            Self::Upload { from, .. } => RanWork::Copy(from.len, [PINNED, CARD]),
            Self::Download { to, .. } => {
                RanWork::Copy(to.len, [CARD, if to.is_pinned() { PINNED } else { PAGEABLE }])
            }
            Self::Copy { len, .. } => RanWork::Copy(*len, [CARD, CARD]),
            Self::Fill { pattern, count, .. } => RanWork::Fill(pattern.len() * count),
            Self::Record { .. } | Self::Wait { .. } | Self::Graph(_) => return None,
        })
    }
}

/// Numbers of what has run.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkCounts {
    /// PTX instructions of all threads.
    pub instructions: u64,
    pub launches: u64,
    /// Products and collectives.
    pub tasks: u64,
    pub copies: u64,
    /// How often the program has put a kernel, a product or a graph into a stream.
    pub submissions: u64,
}

/// The memory and the limits that work runs with.
pub struct WorkContext<'a> {
    pub memory: &'a mut DeviceMemory,
    pub pinned: &'a PinnedMemory,
    pub counts: &'a mut WorkCounts,
    pub seed: u64,
    pub limit: u64,
}

impl WorkContext<'_> {
    /// Runs work that concerns the card's memory alone. Events, waits and graphs belong to the streams and do nothing
    /// here.
    pub fn run(&mut self, work: &CardWork) -> Result<TaskProgress, Fault> {
        self.counts.copies += u64::from(matches!(
            work,
            CardWork::UploadStaged { .. }
                | CardWork::Upload { .. }
                | CardWork::Download { .. }
                | CardWork::Copy { .. }
                | CardWork::Fill { .. }
        ));
        match work {
            CardWork::Kernel(launch) => {
                self.counts.launches += 1;
                self.counts.instructions += launch.run(self.memory, self.seed, self.limit)?;
            }
            CardWork::UploadStaged { to, bytes } => {
                self.memory.store(*to, bytes).map_err(|f| f.at("copy to the card"))?;
            }
            CardWork::Upload { to, from } => {
                let bytes = self.pinned.read(from).map_err(|f| f.at("copy to the card"))?;
                self.memory.store(*to, &bytes).map_err(|f| f.at("copy to the card"))?;
            }
            CardWork::Download { to, from } => {
                let mut bytes = vec![0; to.len];
                self.memory.read_out(*from, &mut bytes).map_err(|f| f.at("copy to the host"))?;
                self.pinned.write(to, &bytes).map_err(|f| f.at("copy to the host"))?;
            }
            CardWork::Copy { to, from, len } => {
                self.memory.copy(*to, *from, *len).map_err(|f| f.at("copy within the card"))?;
            }
            CardWork::Fill { at, pattern, count } => {
                self.memory.fill(*at, pattern, *count).map_err(|f| f.at("memset"))?;
            }
            CardWork::Task(task) => {
                let progress = task.advance(self.memory)?;
                self.counts.tasks += u64::from(progress == TaskProgress::Done);
                return Ok(progress);
            }
            CardWork::Record { .. } | CardWork::Wait { .. } | CardWork::Graph(_) => {}
        }
        Ok(TaskProgress::Done)
    }
}
