//! Images lie in memory as NCHW, and convolutions that want NHWC convert them each time.
//!
//! Seen: kernels such as `nchwToNhwcKernel`. Taken away: at most all of them; at least half, because some layers may keep NCHW.

use super::super::names::Class;
use super::super::recorded::Recorded;
use super::super::replay::Plan;
use super::{Found, Tally, scaled};

pub(super) fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::Layout {
            tally.add_work(of, work);
            most.is_gone[at] = true;
            least.work_ns[at] = scaled(base.work_ns[at], 0.5);
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!("{count:.0} kernels per step convert layouts, {ms:.2} ms");
    let change = "model = model.to(memory_format=torch.channels_last)\n\
                  images = images.to(memory_format=torch.channels_last)";
    Some(tally.found(text, change, [least, most]))
}
