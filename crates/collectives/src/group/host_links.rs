//! Connections between the members of a group that the engine does not use for operations.
//!
//! This module knows nothing of operations.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use paceline_memory::Mapping;
use paceline_trace::lock;

use crate::Result;
use crate::shared::Control;
use crate::shared::links::{Links, PeerMonitor};

/// Connections of a rank to share memory, to notice that a process has died, and to form sub-groups.
#[derive(Debug)]
pub(super) enum HostLinks {
    /// The ranks are threads of one process. They find their sub-groups at this registry.
    Threads(Arc<SplitRegistry>),
    /// Connections to the ranks of this host, and the thread that watches them.
    Host { links: Links, monitor: Option<PeerMonitor> },
    /// No connections: those of the engine are enough.
    None,
}

/// Where threads find the shared state of their sub-groups, by the number of the split and the
/// color. An entry has the number of members that have not taken it, and stays until all have.
#[derive(Debug, Default)]
pub(super) struct SplitRegistry(Mutex<HashMap<(u32, i64), (SubGroupState, usize)>>);

/// The state of a sub-group of threads in memory, and the registry for its own sub-groups.
pub(super) type SubGroupState = (Arc<Mapping>, Arc<SplitRegistry>);

impl SplitRegistry {
    /// The shared state of the sub-group with this key. The first of its `world` members creates it.
    pub(super) fn join(&self, key: (u32, i64), world: usize) -> Result<SubGroupState> {
        let mut waiting = lock(&self.0);
        let (state, missing) = match waiting.remove(&key) {
            Some((state, missing)) => (state, missing - 1),
            None => ((Arc::new(Control::create(world)?), Arc::default()), world - 1),
        };
        if missing > 0 {
            waiting.insert(key, (state.clone(), missing));
        }
        Ok(state)
    }
}
