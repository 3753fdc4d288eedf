//! What ties the members of a group together besides the engine.
//!
//! Knows nothing of operations.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use paceline_memory::Mapping;

use crate::CollectiveError;
use crate::shared::Control;
use crate::shared::links::{Links, Monitor};

/// What ties the members together besides the engine.
#[derive(Debug)]
pub(super) enum Ties {
    Threads(Arc<Hub>),
    /// Connections to the ranks of this host, and who watches them.
    Host {
        links: Links,
        monitor: Option<Monitor>,
    },
    /// The engine's own connections.
    None,
}

/// Where threads find the shared state of their sub-groups, by number of the split and colour, until
/// all members have taken it.
#[derive(Debug, Default)]
pub(super) struct Hub(Mutex<HashMap<(u32, i64), (Lot, usize)>>);

/// What the threads of a group share.
pub(super) type Lot = (Arc<Mapping>, Arc<Hub>);

impl Hub {
    /// What the sub-group of `key` shares, which the first of its `world` members makes.
    pub(super) fn meet(&self, key: (u32, i64), world: usize) -> Result<Lot, CollectiveError> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (lot, missing) = match waiting.remove(&key) {
            Some((lot, missing)) => (lot, missing - 1),
            None => ((Arc::new(Control::create(0)?), Arc::default()), world - 1),
        };
        if missing > 0 {
            waiting.insert(key, (lot.clone(), missing));
        }
        Ok(lot)
    }
}
