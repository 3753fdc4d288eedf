//! Interprets what the ranks have measured, and suggests what to change.
//!
//! | file | what it answers |
//! |---|---|
//! | [`anatomy`] | where does the time of a step go, and which rank is the slowest? |
//! | [`replay`] | when would buckets be done, with other sizes or on another link? |
//! | [`gathers`] | which gathers of parameters are waited for? |
//! | [`observed`] | how did all ranks see a step, on one clock? |
//! | [`conversion`] | what does rounding to half precision take here? |
//! | [`advice`] | is communication hidden, and if not, what would change that? |
//! | [`flops`] | how many floating-point operations does the model make for a sample? |
//! | [`memory`] | how much memory does a rank need, before the run? |

pub mod advice;
pub mod anatomy;
pub mod conversion;
pub mod flops;
pub mod gathers;
pub mod memory;
pub mod observed;
pub mod replay;
