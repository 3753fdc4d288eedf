//! Interprets the measurements of the ranks, and suggests changes.
//!
//! | file | question |
//! |---|---|
//! | [`anatomy`] | where does the time of a step go, and which rank is the slowest? |
//! | [`buckets`] | which gradients travel together, with other sizes of buckets? |
//! | [`gathers`] | which gathers of parameters are waited for? |
//! | [`observed`] | how did all ranks see a step, on one clock, as advice takes it? |
//! | [`conversion`] | how long does rounding to half precision take here? |
//! | [`advice`] | which changes fit the strategy, and how much would they gain? |
//! | [`pipeline`] | why are the ranks of a pipeline idle? |
//! | [`pipeline_advice`] | which schedule, cut or number of micro-batches would shorten its step? |
//! | [`flops`] | how many floating-point operations does the model make for a sample? |
//! | [`memory`] | how much memory does a rank need, before the run? |

pub mod advice;
pub mod anatomy;
pub mod buckets;
pub mod conversion;
pub mod flops;
pub mod gathers;
pub mod memory;
pub mod observed;
pub mod pipeline;
pub mod pipeline_advice;
