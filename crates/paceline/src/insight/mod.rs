//! Interprets the figures of a run, and suggests what to change.
//!
//! | file | what it answers |
//! |---|---|
//! | [`replay`] | when would buckets be done, with other sizes or on another link? |
//! | [`observed`] | how did all ranks see a step, on one clock? |
//! | [`advice`] | is communication hidden, and if not, what would change that? |
//! | [`flops`] | how many floating-point operations does the model make for a sample? |
//! | [`memory`] | how much memory does a rank need, before the run? |

pub mod advice;
pub mod flops;
pub mod gathers;
pub mod memory;
pub mod observed;
pub mod replay;
