//! Communication during which nothing is computed, and which no other cause of communication explains.
//!
//! Seen: collectives beside which the device does not compute. There are three forms:
//!
//! - Values of f32 could travel as bf16. Taken away: half of the time at most, and a quarter at least, because latency stays, at most
//!   with the waits for slower ranks in them. On a processor, converting takes time of its own, which is added at least, and the calls
//!   beside transfers [lose](super::interrupted) less.
//! - Values of 16 bits, integers, and messages of a few bytes could travel less often. The same is taken away.
//! - A collective takes several times as long as its bytes need on a slow link, and other ranks have no trace or its values have 16
//!   bits already: it waits for a rank, or the link is broken. Taken away: at most all beyond the time on a slow link.

use std::collections::BTreeMap;

use paceline_trace::{IntervalSet, Span};

use super::small_collectives::FEW_BYTES;
use super::*;

/// Converting f32 to bf16, dividing, and converting back, on one core: three passes over memory.
const CONVERT_NS_PER_BYTE: f64 = 0.5;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "exposed",
    title: "Communication is exposed",
    gain: Known::ByWaits,
    find: Find::Meeting(find),
};

/// A slow link between hosts, in bytes per second, and the latency of a collective on it.
const SLOW_LINK: f64 = 12.5e9;
const LATENCY_NS: f64 = 100e3;
/// A collective is slow if it takes this many times as long as on a slow link.
const TIMES: f64 = 3.0;

/// The form of the cause in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    Wide,
    Narrow,
    Slow,
}

/// Whether the values of a collective have more than 16 bits, so that half of their bytes can go. Integers cannot lose bits.
fn is_wide(of: &Recorded, work: &Work) -> bool {
    match of.described(work).and_then(|said| said.dtype.as_deref()) {
        Some(dtype) => matches!(dtype, "Float" | "float" | "Double" | "double"),
        // Kernels of NCCL may have the type in their names.
        None => {
            let name = of.text(work.name);
            !["bf16", "bfloat16", "f16", "half"].iter().any(|dtype| name.contains(dtype))
        }
    }
}

/// How long a collective takes on a slow link; `None` if the trace does not give its size.
fn on_slow_link_ns(of: &Recorded, work: &Work) -> Option<f64> {
    let bytes = of.collective_bytes(work)? as f64;
    let ranks = of.described(work)?.group_size.or(of.timeline.world_size.map(|n| n as u64))?;
    Some(LATENCY_NS + bytes * bus_factor(of.collective(work), ranks as f64)? / SLOW_LINK * 1e9)
}

fn form(of: &Recorded, base: &Plan, at: usize) -> Form {
    let work = &of.works[at];
    let is_long = of.collective_bytes(work).is_none_or(|bytes| bytes > FEW_BYTES);
    let is_wide = is_long && is_wide(of, work);
    let is_slow = |ns: f64| base.work_ns[at] as f64 > TIMES * ns;
    let is_slow = of.on_device() && on_slow_link_ns(of, work).is_some_and(is_slow);
    match (is_wide, of.context.has_all_ranks) {
        (true, true) => Form::Wide,
        _ if is_slow => Form::Slow,
        (true, false) => Form::Wide,
        (false, _) => Form::Narrow,
    }
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut forms: BTreeMap<Form, (i64, Vec<usize>)> = BTreeMap::new();
    for (at, work) in of.works.iter().enumerate().filter(|(at, _)| base.has_work(*at)) {
        if work.class == Class::Communication && of.collective(work) != CollectiveKind::Barrier {
            let (ns, works) = forms.entry(form(of, base, at)).or_default();
            *ns += base.work_ns[at];
            works.push(at);
        }
    }
    let (form, (_, works)) = forms.into_iter().max_by_key(|(_, (ns, _))| *ns)?;
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    let mut kinds: BTreeMap<CollectiveKind, i64> = BTreeMap::new();
    for &at in &works {
        let work = &of.works[at];
        tally.add_work(of, work);
        *kinds.entry(of.collective(work)).or_default() += base.work_ns[at];
        if let (Form::Slow, Some(ns)) = (form, on_slow_link_ns(of, work)) {
            most.work_ns[at] = base.work_ns[at].min(ns as i64);
            continue;
        }
        let converted = of.collective_bytes(work).filter(|_| !of.on_device()).unwrap_or(0);
        let convert_ns = (converted as f64 * CONVERT_NS_PER_BYTE) as i64;
        least.work_ns[at] = scaled(base.work_ns[at], 0.75) + convert_ns;
        // Other buckets travel while one is converted.
        most.work_ns[at] = scaled(base.work_ns[at], 0.5);
    }
    if form != Form::Slow {
        let interrupted = Interrupted::of(of, base);
        interrupted.relieve_least(&mut least, |_| 0.25);
        interrupted.relieve_most(&mut most, |_| 0.5);
    }
    // Without the other ranks, nothing says that less bytes are sent sooner.
    if !of.on_device() && !of.context.has_all_ranks {
        least = base.clone();
    }
    let (kind, _) = kinds.into_iter().max_by_key(|(_, ns)| *ns)?;
    let (count, ms) = tally.per_step(of);
    let mut text = format!(
        "{:.2} of {ms:.2} ms of communication per step ({count:.0} calls, mostly {}) run while nothing is computed",
        of.per_step(exposed_ns(of, &works)? as f64 / 1e6),
        kind.name()
    );
    text.push_str(&bandwidth(of, base, &works).unwrap_or_default());
    let title = match form {
        Form::Slow if of.context.has_all_ranks => Some("The link is slow"),
        Form::Slow => Some("Collectives wait for another rank, or the link is slow"),
        Form::Wide | Form::Narrow => None,
    };
    let is_of_fsdp = works.iter().any(|at| is_of_fsdp(of, &of.works[*at]));
    let found = tally.found(text, change(of, form, kind, is_of_fsdp), [least, most]);
    Some(Found { title: title.map(str::to_owned), ..found })
}

/// How long these pieces of communication ran while nothing was computed.
fn exposed_ns(of: &Recorded, these: &[usize]) -> Option<u64> {
    let origin_ns = of.works.iter().map(|work| work.time.start_ns).min()?;
    let span = |time: TimeRange| time.since(origin_ns);
    let is_communication = |work: &&Work| work.class == Class::Communication;
    let these = these.iter().map(|at| &of.works[*at]).filter(|work| of.counts(work.step));
    let all = IntervalSet::union(these.map(|work| span(work.time)));
    let computation: Vec<Span> = if of.on_device() {
        of.works.iter().filter(|work| !is_communication(work)).map(|work| span(work.time)).collect()
    } else {
        of.calls.iter().map(|call| span(call.time)).collect()
    };
    Some(all.difference(&IntervalSet::union(computation)).len_ns())
}

/// The size and the bus bandwidth of the one of these collectives that takes longest, in words; `None` if the trace does not give its size, or if
/// that is so small that only latency counts.
fn bandwidth(of: &Recorded, base: &Plan, these: &[usize]) -> Option<String> {
    let at = these.iter().copied().max_by_key(|at| base.work_ns[*at])?;
    let (work, ns) = (&of.works[at], base.work_ns[at].max(1));
    let wire = (on_slow_link_ns(of, work)? - LATENCY_NS) / 1e9 * SLOW_LINK;
    let megabytes = of.collective_bytes(work)? as f64 / 1e6;
    let speed = wire / ns as f64;
    let (speed, unit) = if speed < 1.0 { (1e3 * speed, "MB/s") } else { (speed, "GB/s") };
    (megabytes >= 1.0).then(|| {
        format!("; the longest moves {megabytes:.1} MB at {speed:.1} {unit} of bus bandwidth")
    })
}

/// The change for all-to-alls: of tables of embeddings, as TorchRec has them, or of a mixture of experts.
fn all_to_all(of: &Recorded) -> &'static str {
    let has = |parts: &[&str]| {
        of.timeline.names.iter().any(|name| parts.iter().any(|part| name.contains(part)))
    };
    if has(&["sparse_data_dist"]) {
        // Its pipeline already exchanges the next batch beside the step.
        "send fewer bytes: torchrec.distributed.fbgemm_qcomm_codec.QCommsConfig(forward_precision=CommType.FP16)"
    } else if has(&["torchrec", "fbgemm", "embedding_bag"]) {
        "exchange the next batch beside this step: torchrec.distributed.train_pipeline.TrainPipelineSparseDist"
    } else {
        "exchange one micro-batch while another one is computed (async_op=True; async_finish=True with DeepEP), or send fewer bytes (fp8)"
    }
}

/// The change for a link that may be slow.
const LINK: &str = "measure the link with all_reduce_perf of nccl-tests; NCCL_DEBUG=INFO says whether NCCL uses NVLink, InfiniBand or sockets";
const RECORD: &str = "record every rank: the trace of a late rank says why it is late\n\
                      if none is late: all_reduce_perf of nccl-tests; NCCL_DEBUG=INFO says which network is used";

/// The lines to write for fewer bytes, or for bytes that travel beside computation; for values that cannot become smaller, to exchange
/// them less often.
fn change(of: &Recorded, form: Form, kind: CollectiveKind, is_of_fsdp: bool) -> &'static str {
    use CollectiveKind::{AllGather, AllToAll, PointToPoint, ReduceScatter};
    match (kind, form) {
        (_, Form::Slow) if of.context.has_all_ranks => LINK,
        (_, Form::Slow) => RECORD,
        (AllToAll, _) => all_to_all(of),
        (PointToPoint, _) => "in a pipeline: more micro-batches per step, or another schedule",
        (ReduceScatter | AllGather, _) if !is_of_fsdp => {
            "overlap the exchange with computation: --tp-comm-overlap of Megatron, overlap_comm of DeepSpeed"
        }
        (ReduceScatter | AllGather, Form::Wide) => {
            "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))\n\
             or, with fully_shard: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        }
        (ReduceScatter | AllGather, Form::Narrow) => {
            "FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)  (more memory, half of the gathers)\n\
             or, with fully_shard: reshard_after_forward=False"
        }
        (_, Form::Wide) => {
            "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\n\
             model.register_comm_hook(None, bf16_compress_hook)"
        }
        (_, Form::Narrow) => {
            "twice as many samples per exchange: a larger batch, or twice as many micro-batches within model.no_sync()"
        }
    }
}
