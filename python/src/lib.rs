//! The collectives for Python: groups, operations on the memory of tensors, and works that end in the background.
//!
//! Input: addresses and lengths from the Python side, which knows what a tensor is. Output: works. Python's lock is never held while
//! a thread waits for other ranks. This crate knows nothing of torch.

#![deny(missing_docs)]

mod figures;
mod group;
mod interpreter;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::group::PyGroup;
    #[pymodule_export]
    use crate::interpreter::leave;
    #[pymodule_export]
    use crate::work::PyWork;
}
