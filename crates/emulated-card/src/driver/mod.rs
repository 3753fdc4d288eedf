//! The functions of the CUDA driver (`libcuda.so.1`).
//!
//! Work waits in its stream until a program waits for it, and then exactly what comes before runs, in an order that the
//! seed decides. A kernel's fault breaks its card as on real hardware: every later call answers with the code.
//! This module knows PTX only as something that runs, and neither matrices nor ranks.

mod api_device;
mod api_extra;
mod api_memory;
mod api_module;
mod api_stream;
mod capturing;
mod graph;
mod pinned;
mod settings;
mod state;
mod status;
mod streams;
mod work;

pub(crate) use state::{enter, lock};
pub(crate) use work::{Progress, Task, Work};
