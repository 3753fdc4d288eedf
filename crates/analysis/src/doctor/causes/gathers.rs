//! Sharded parameters are gathered only when they are needed, and the device waits for them.
//!
//! Seen: all-gathers of FSDP. Taken away: at most every wait of theirs for computation, as if they were gathered ahead as early as the
//! network allows; at least half of their time.

use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "gathers",
    title: "The device waits for gathered parameters",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Communication
            && of.collective(work) == CollectiveKind::AllGather
            && is_of_fsdp(of, work)
        {
            tally.add_work(of, work);
            least.work_ns[at] = scaled(base.work_ns[at], 0.5);
            most.is_ahead[at] = true;
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text =
        format!("{count:.0} all-gathers per step take {ms:.2} ms, and computation waits for them");
    let change = "FSDP(model, forward_prefetch=True)\n\
                  or, with fully_shard: module.set_modules_to_forward_prefetch([next_module])";
    Some(tally.found(text, change, [least, most]))
}
