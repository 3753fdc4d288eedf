//! The causes of lost time, one file each, and [`interrupted`] and [`buckets`], which several of them need. This file has the
//! words that all of them use.

mod allocation;
mod attention;
mod buckets;
mod buffers;
mod copies;
mod elementwise;
pub(super) mod exposed;
mod first_bucket;
mod gathers;
mod host_bound;
mod host_work;
mod interrupted;
mod layout;
pub(super) mod loader;
mod no_sync;
mod optimizer;
mod pipeline;
mod recomputation;
mod small_collectives;
pub(super) mod straggler;
mod synchronizations;
mod tensor_cores;
mod zeroing;

use super::collectives::bus_factor;
use super::finding::{Cause, Find, Finding, Known, Ranks, evidence};
use super::names::{self, Class, LOADER, OPTIMIZER, ZERO_GRAD, brief};
use super::recorded::{Call, CallKind, Recorded, Work};
use super::remedies;
use super::replay::Plan;
use super::tally::{Found, Tally, scaled, unprepared};
use crate::advice::gain::Gain;
use crate::hta::CollectiveKind;
use crate::timeline::TimeRange;
use interrupted::Interrupted;

/// Whether PyTorch's FSDP launched this work. Other programs gather activations, too.
fn is_of_fsdp(of: &Recorded, work: &Work) -> bool {
    ["FSDP::", "FullyShardedDataParallel"].iter().any(|name| of.is_launched_within(work, name))
}

/// All causes. Special ones come before general ones, which count only the rest.
pub(super) const CAUSES: &[&Cause] = &[
    &loader::CAUSE,
    &buffers::CAUSE,
    &host_work::CAUSE,
    &allocation::CAUSE,
    &synchronizations::CAUSE,
    &copies::CAUSE,
    &zeroing::CAUSE,
    &optimizer::CAUSE,
    &recomputation::CAUSE,
    &attention::CAUSE,
    &layout::CAUSE,
    &tensor_cores::CAUSE,
    &elementwise::CAUSE,
    &straggler::CAUSE,
    &pipeline::CAUSE,
    &no_sync::CAUSE,
    &gathers::CAUSE,
    &small_collectives::CAUSE,
    &first_bucket::CAUSE,
    &exposed::CAUSE,
    &host_bound::CAUSE,
];
