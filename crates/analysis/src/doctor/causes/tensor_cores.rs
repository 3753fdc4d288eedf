//! Products and convolutions of f32 run on a card that has tensor cores, and do not use them.
//!
//! Seen: kernels such as `ampere_sgemm` and `volta_scudnn` on a card of [`cards`]. Taken away: a third of their time at least.
//! At most three quarters: the published peaks differ more, but products of ordinary sizes become limited by memory.

use super::super::cards;
use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "tensor_cores",
    title: "Products of f32 run without tensor cores",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let card = of.timeline.devices.iter().find_map(|name| cards::of(name))?;
    card.half?;
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, work) in of.works.iter().enumerate() {
        if work.class == Class::SinglePrecision {
            tally.add_work(of, work);
            least.work_ns[at] = scaled(base.work_ns[at], 2.0 / 3.0);
            most.work_ns[at] = scaled(base.work_ns[at], 0.25);
        }
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{count:.0} kernels per step multiply f32 without tensor cores, {ms:.2} ms on {}",
        card.name
    );
    let change = match card.tf32 {
        Some(_) => {
            "torch.set_float32_matmul_precision(\"high\"); torch.backends.cudnn.allow_tf32 = True\n\
                    or: with torch.autocast(\"cuda\", dtype=torch.bfloat16): ..."
        }
        None => {
            "with torch.autocast(\"cuda\", dtype=torch.float16): ...  (with torch.amp.GradScaler)"
        }
    };
    Some(tally.found(text, change, [least, most]))
}
