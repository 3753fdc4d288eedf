//! Memory is taken from the driver or given back to it in the loop. PyTorch's allocator keeps memory for later, so that this
//! happens in the first steps only. `cudaFree` also waits for the device.
//!
//! Seen: calls such as `cudaMalloc` and `cudaFree` in two steps and in half of them at least. Taken away: the calls and their waits.

use std::collections::BTreeSet;

use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "allocation",
    title: "Memory is allocated in the loop",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

/// The change for memory of the host, which the device reads.
const HOST: &str = "DataLoader(dataset, pin_memory=True)\n\
                    or: make pinned tensors once, before the loop, and copy each batch into them";

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut most = base.clone();
    let mut steps = BTreeSet::new();
    for (at, call) in of.calls_of(CallKind::Allocate) {
        tally.add_operator(of, call);
        (most.call_ns[at], most.blocks[at]) = (0, false);
        steps.insert(of.step_at(call.time.start_ns));
    }
    if steps.len() < 2 || 2 * steps.len() < of.steps.len() {
        return None;
    }
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{count:.1} calls per step take memory from the driver or give it back, {ms:.2} ms"
    );
    // PyTorch reports what its allocator hands out.
    let is_off = of.timeline.memory.iter().map(|sample| sample.device_type).max() == Some(0);
    let most_of = tally.what.iter().max_by_key(|(name, ns)| (**ns, *name))?.0;
    let change = match most_of {
        name if name.contains("Host") => HOST,
        _ if is_off => {
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING  (environment; on ROCm PYTORCH_NO_HIP_MEMORY_CACHING)"
        }
        _ => {
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  (environment)\n\
             no torch.cuda.empty_cache() in the loop; pad batches to a few sizes"
        }
    };
    Some(tally.found(text, change, [most.clone(), most]))
}
