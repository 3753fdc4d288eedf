//! Images lie in memory as NCHW, and convolutions that want NHWC convert them each time.
//!
//! Seen: kernels such as `nchwToNhwcKernel`. Taken away: at most all of them; at least half, because some layers may keep NCHW. On
//! a processor oneDNN converts within a convolution, so the trace shows only that its images are NCHW, by their strides. Taken
//! away there: at most half of the time of these convolutions, and at least nothing, because oneDNN may choose another algorithm.

use super::*;

const CHANGE: &str = "model = model.to(memory_format=torch.channels_last)\n\
                      images = images.to(memory_format=torch.channels_last)";

/// MIOpen is given NHWC only if this asks for it.
const MIOPEN: &str = "\nPYTORCH_MIOPEN_SUGGEST_NHWC=1  (environment)";

pub(in super::super) const CAUSE: Cause = Cause {
    key: "layout",
    title: "Images are converted between NCHW and NHWC",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    if of.on_device() { conversions(of, base) } else { convolutions(of, base) }
}

/// The kernels of a device that convert.
fn conversions(of: &Recorded, base: &Plan) -> Option<Found> {
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
    let is_rocm = of.calls.iter().any(|call| of.text(call.name).starts_with("hip"));
    let change = format!("{CHANGE}{}", if is_rocm { MIOPEN } else { "" });
    Some(tally.found(text, change, [least, most]))
}

/// The convolutions of a processor.
fn convolutions(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let mut most = base.clone();
    for product in of.timeline.products.iter().filter(|product| product.is_nchw) {
        let begun = of.calls.partition_point(|call| call.time.start_ns <= product.time.start_ns);
        // Calls of all threads are sorted by start, so the one around it is among the last ones.
        let around = of.calls[..begun]
            .iter()
            .rposition(|call| call.kind == CallKind::Operator && call.lane == product.lane);
        let Some(at) = around.filter(|at| of.calls[*at].time.end_ns() >= product.time.end_ns())
        else {
            continue;
        };
        tally.add_time(of, of.text(product.name).to_owned(), product.time);
        most.call_ns[at] = (most.call_ns[at] - scaled(product.time.dur_ns, 0.5)).max(0);
    }
    tally.longest?;
    let (count, ms) = tally.per_step(of);
    let text = format!("{count:.0} convolutions per step of images that lie as NCHW, {ms:.2} ms");
    Some(tally.found(text, CHANGE, [base.clone(), most]))
}
