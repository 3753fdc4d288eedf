//! The schedules, a file for each family. Phases have the names of their papers.

mod breadth_first;
mod dual_pipe_v;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zbv;
mod zero_bubble;

pub use breadth_first::LoopedBreadthFirst;
pub use dual_pipe_v::DualPipeV;
pub use gpipe::Gpipe;
pub use interleaved::{Interleaved1F1B, InterleavedZeroBubble};
pub use one_f_one_b::OneFOneB;
pub use zbv::Zbv;
pub use zero_bubble::{ZbH1, ZbH2};

use crate::Schedule;

/// All of them. Those with several stages on a rank have two.
pub static SCHEDULES: [&dyn Schedule; 9] = [
    &Gpipe,
    &OneFOneB,
    &LoopedBreadthFirst { chunks: 2 },
    &Interleaved1F1B { chunks: 2 },
    &ZbH1,
    &ZbH2,
    &InterleavedZeroBubble { chunks: 2 },
    &Zbv,
    &DualPipeV,
];

/// The schedule of this name.
pub fn named(name: &str) -> Option<&'static dyn Schedule> {
    SCHEDULES.into_iter().find(|schedule| schedule.name() == name)
}
