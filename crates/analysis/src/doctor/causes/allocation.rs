//! Memory is taken from the driver or given back to it in the loop. PyTorch's allocator keeps memory for later, so that this
//! happens in the first steps only. `cudaFree` also waits for the device.
//!
//! Seen: calls such as `cudaMalloc` and `cudaFree` in two steps and in half of them at least. Taken away: the calls and their waits.

use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "allocation",
    title: "Memory is allocated in the loop",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut most = base.clone();
    let mut in_step = vec![false; of.steps.len()];
    for (at, call) in of.calls_of(CallKind::Allocate) {
        tally.add_operator(of, call);
        (most.call_ns[at], most.blocks[at]) = (0, false);
        if let Some(step) =
            of.step_at(call.time.start_ns).and_then(|step| in_step.get_mut(step as usize))
        {
            *step = true;
        }
    }
    let steps = in_step.iter().filter(|has| **has).count();
    if steps < 2 || 2 * steps < in_step.len() {
        return None;
    }
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{count:.1} calls per step take memory from the driver or give it back, {ms:.2} ms"
    );
    let change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  (environment)\n\
                  no torch.cuda.empty_cache() in the loop; pad batches to a few sizes";
    Some(tally.found(text, change, [most.clone(), most]))
}
