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

pub(crate) use work::{CardTask, TaskProgress};

use std::sync::Arc;

use crate::boundary::{Outcome, Status};

/// Puts work of another library into a stream of the thread's card.
pub(crate) fn submit(stream: usize, task: Arc<dyn CardTask>) -> Outcome {
    let (mut driver, _, stream) = state::enter_stream(stream)?;
    driver.submit(stream, work::CardWork::Task(task))
}

/// Whether work that goes to a stream is captured.
pub(crate) fn captures(stream: usize) -> bool {
    state::enter_stream(stream).is_ok_and(|(driver, _, stream)| driver.capture_status(stream) > 0)
}

/// Whether a graph has work of the communicator at this address.
pub(crate) fn has_graph_of(communicator: usize) -> bool {
    let objects = &state::lock().objects;
    let is_of = |node: &graph::GraphNode| match &node.work {
        work::CardWork::Task(task) => task.is_of(communicator),
        _ => false,
    };
    let mut graphs = objects.graphs.values().chain(objects.executables.values());
    graphs.any(|graph| graph.iter().any(is_of))
}

/// Remembers why a call of another library is refused.
pub(crate) fn refuse(status: Status, why: impl Into<String>) -> Status {
    state::lock().refuse(status, why)
}

/// The numbers that a library that monitors cards shows.
pub(crate) struct Monitored {
    /// Used and all bytes of memory of each card.
    pub memory: Vec<(u64, u64)>,
    /// For how much of the time each card is busy, in percent.
    pub utilization: u32,
    /// A function of that library that fails, and its status.
    pub failing: Option<(String, u32)>,
}

/// The numbers of the cards, whether or not the driver has been started.
pub(crate) fn monitored() -> Monitored {
    let driver = state::lock();
    let memory = driver.cards.iter().map(|card| &card.memory);
    let memory = memory.map(|of| (of.used() as u64, of.capacity() as u64)).collect();
    let settings = &driver.settings;
    Monitored { memory, utilization: settings.utilization, failing: settings.nvml.clone() }
}

/// A function of CUPTI that fails, and its status.
pub(crate) fn failing_cupti() -> Option<(String, u32)> {
    state::lock().settings.cupti.clone()
}

/// The number of the card with an id on the PCI bus.
pub(crate) fn card_at(bus_id: &str) -> Option<usize> {
    (0..state::lock().cards.len()).find(|card| api_device::bus_id(*card) == bus_id)
}

/// The number of the card of the thread's context.
pub(crate) fn current_card() -> Result<usize, Status> {
    state::enter().map(|(_, card)| card)
}
