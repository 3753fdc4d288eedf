//! `DistributedDataParallel` sends the buffers of the model, such as the means of a batch norm, from rank 0 to all others in each step.
//!
//! Seen: broadcasts within `DistributedDataParallel.forward`. Taken away: all of them, at most with the waits for slower ranks in them.

use super::*;

const FORWARD: &str = "DistributedDataParallel.forward";

pub(in super::super) const CAUSE: Cause = Cause {
    key: "buffers",
    title: "Buffers are sent in each step",
    gain: Known::Exactly,
    find: Find::Meeting(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut most = base.clone();
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Communication
            && of.collective(work) == CollectiveKind::Broadcast
            && of.is_launched_within(work, FORWARD)
        {
            tally.add_work(of, work);
            most.is_gone[at] = true;
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!("{count:.0} broadcasts of buffers per step take {ms:.2} ms");
    let change = "DistributedDataParallel(model, broadcast_buffers=False)";
    Some(tally.found(text, change, [most.clone(), most]))
}
