//! Communication during which nothing is computed, and which no other cause of communication explains.
//!
//! Seen: collectives beside which the device does not compute. Taken away: half of their time at most, as bf16 does for gradients of
//! f32, and a quarter at least, because latency stays, at most with the waits for slower ranks in them. On a processor, converting
//! takes time of its own, which is added at least, and the calls beside transfers [lose](super::interrupted) less.

use std::collections::BTreeMap;

use paceline_trace::{IntervalSet, Span};

use super::*;

/// Converting f32 to bf16, dividing, and converting back, on one core: three passes over memory.
const CONVERT_NS_PER_BYTE: f64 = 0.5;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "exposed",
    title: "Communication is exposed",
    gain: Known::ByWaits,
    find: Find::Meeting(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let mut kinds: BTreeMap<CollectiveKind, i64> = BTreeMap::new();
    let origin_ns = of.works.iter().map(|work| work.time.start_ns).min()?;
    let span = |time: TimeRange| time.since(origin_ns);
    for (at, work) in of.works.iter().enumerate() {
        if work.class != Class::Communication {
            continue;
        }
        let kind = of.collective(work);
        if kind == CollectiveKind::Barrier {
            continue;
        }
        tally.add_work(of, work);
        *kinds.entry(kind).or_default() += base.work_ns[at];
        let converted = of.collective_bytes(work).filter(|_| !of.on_device()).unwrap_or(0);
        let convert_ns = (converted as f64 * CONVERT_NS_PER_BYTE) as i64;
        least.work_ns[at] = scaled(base.work_ns[at], 0.75) + convert_ns;
        // Other buckets travel while one is converted.
        most.work_ns[at] = scaled(base.work_ns[at], 0.5);
    }
    tally.longest?;
    let interrupted = Interrupted::of(of, base);
    interrupted.relieve_least(&mut least, |_| 0.25);
    interrupted.relieve_most(&mut most, |_| 0.5);
    let is_communication = |work: &&Work| work.class == Class::Communication;
    let all = of.works.iter().filter(is_communication).map(|work| span(work.time));
    let all = IntervalSet::union(all);
    let computation: Vec<Span> = if of.on_device() {
        of.works.iter().filter(|work| !is_communication(work)).map(|work| span(work.time)).collect()
    } else {
        of.calls.iter().map(|call| span(call.time)).collect()
    };
    let exposed_ns = all.difference(&IntervalSet::union(computation)).len_ns();
    let (kind, _) = kinds.into_iter().max_by_key(|(_, ns)| *ns)?;
    let (count, ms) = tally.per_step(of);
    let text = format!(
        "{:.2} of {ms:.2} ms of communication per step ({count:.0} calls, mostly {}) run while nothing is computed",
        of.per_step(exposed_ns as f64 / 1e6),
        kind.name()
    );
    Some(tally.found(text, change(kind), [least, most]))
}

/// The lines to write for fewer bytes, or for bytes that travel beside computation.
fn change(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllToAll => {
            "send half the bytes (bf16 or fp16), or exchange the next batch beside this step: \
             torchrec.distributed.train_pipeline.TrainPipelineSparseDist"
        }
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => {
            "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))"
        }
        CollectiveKind::PointToPoint => {
            "batch the messages: torch.distributed.batch_isend_irecv; more micro-batches per step"
        }
        _ => {
            "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\n\
             model.register_comm_hook(None, bf16_compress_hook)"
        }
    }
}
