//! When threads of ours may enter Python: not once the interpreter ends, and never in the child of a fork.

use std::sync::{PoisonError, RwLock};

use pyo3::prelude::*;

/// Whether the interpreter ends. There is one interpreter per process. A thread that enters Python holds the lock, because a
/// thread that enters an interpreter which ends is stopped there with all that it holds.
static HAS_LEFT: RwLock<bool> = RwLock::new(false);

/// From now on, no thread of this module enters Python. Called when the interpreter begins to end.
#[pyfunction]
pub(crate) fn leave(py: Python<'_>) {
    py.detach(|| *HAS_LEFT.write().unwrap_or_else(PoisonError::into_inner) = true);
}

/// Enters Python from a thread of ours. `None` if the interpreter ends.
pub(crate) fn enter<T>(body: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let has_left = HAS_LEFT.read().unwrap_or_else(PoisonError::into_inner);
    if *has_left { None } else { Python::try_attach(body) }
}

/// Whether the interpreter ends.
pub(crate) fn has_left() -> bool {
    *HAS_LEFT.read().unwrap_or_else(PoisonError::into_inner)
}
