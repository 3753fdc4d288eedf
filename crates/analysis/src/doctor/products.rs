//! Products and collectives judged by the limits of the hardware.
//!
//! Input: timelines. Output: for products and convolutions whose shapes are recorded, FLOP per second against the published peak
//! of the card ([`cards`]); for collectives whose sizes are recorded, bytes and bus bandwidth, against a stated link if there is
//! one. The worst come first: those that lose most time to that bound.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::cards;
use super::names::Class;
use super::together::Together;
use crate::hta::{CollectiveKind, collective_kind, launched};
use crate::timeline::{DeviceWork, Kernel, Timeline, TrackId};

/// How many of each are kept.
pub const WORST: usize = 10;

/// All calls of a product with the same shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// The operator.
    pub name: String,
    /// The shapes of its inputs.
    pub shape: String,
    /// Their element type, and whether the kernels used tensor cores.
    pub dtype: String,
    /// How often, over all ranks.
    pub calls: u64,
    /// The time of their kernels, in nanoseconds.
    pub time_ns: i64,
    /// FLOP per second.
    pub flops_per_s: f64,
    /// The published peak of the card for the precision of the kernels; `None` if the card is not known.
    pub peak: Option<f64>,
}

impl Product {
    /// The part of the peak.
    pub fn part(&self) -> Option<f64> {
        self.peak.map(|peak| self.flops_per_s / peak)
    }

    fn lost_ns(&self) -> f64 {
        self.time_ns as f64 * (1.0 - self.part().unwrap_or(0.0)).max(0.0)
    }
}

/// All collectives of a kind and size.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The kind, by PyTorch's name.
    pub name: String,
    /// The ranks of its group.
    pub ranks: u64,
    /// The bytes of a rank's larger buffer.
    pub bytes: u64,
    /// How often, over all ranks.
    pub calls: u64,
    /// How long data moved, in nanoseconds: without the wait for the last rank where the traces of several ranks tell it.
    pub time_ns: i64,
    /// The bus bandwidth, as nccl-tests defines it, in bytes per second.
    pub busbw: f64,
    /// The part of the stated link; `None` without one.
    pub part: Option<f64>,
}

/// Calls, nanoseconds, operations, and the peak.
type Sums = (u64, i64, u64, Option<f64>);

/// The worst products of a run.
pub(super) fn products(timelines: &[Timeline]) -> Vec<Product> {
    let mut all: BTreeMap<[String; 3], Sums> = BTreeMap::new();
    for timeline in timelines {
        let card = timeline.devices.iter().find_map(|name| cards::of(name));
        for (product, (time_ns, longest)) in timeline.products.iter().zip(kernels_of(timeline)) {
            let Some(longest) = longest else { continue };
            let class = Class::of(timeline.names.text(longest.name));
            let (dtype, peak) = match (timeline.names.text(product.dtype), class) {
                ("float", Class::SinglePrecision) => ("f32", card.map(|card| card.single)),
                // A card without tf32 has no other way.
                ("float", _) if card.is_some_and(|card| card.tf32.is_none()) => {
                    ("f32", card.map(|card| card.single))
                }
                ("float", _) => ("tf32", card.and_then(|card| card.tf32)),
                ("c10::Half", _) => ("f16", card.and_then(|card| card.half)),
                ("c10::BFloat16", _) => ("bf16", card.and_then(|card| card.half)),
                (other, _) => (other, None),
            };
            let text = |id| timeline.names.text(id).to_owned();
            let key = [text(product.name), text(product.shape), dtype.to_owned()];
            let of = all.entry(key).or_insert((0, 0, 0, peak));
            *of =
                (of.0 + 1, of.1.saturating_add(time_ns), of.2.saturating_add(product.flops), of.3);
        }
    }
    let mut products: Vec<Product> = all
        .into_iter()
        .filter(|(_, (_, time_ns, ..))| *time_ns > 0)
        .map(|([name, shape, dtype], (calls, time_ns, flops, peak))| {
            let flops_per_s = flops as f64 / time_ns as f64 * 1e9;
            Product { name, shape, dtype, calls, time_ns, flops_per_s, peak }
        })
        .collect();
    worst(&mut products, Product::lost_ns);
    products
}

/// Keeps those that lose most.
fn worst<T>(all: &mut Vec<T>, lost: impl Fn(&T) -> f64) {
    all.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
    all.truncate(WORST);
}

/// For each product: the time of the kernels that it launched, and the longest of them. A kernel belongs to the innermost
/// product around its launch, so that nothing counts twice.
fn kernels_of(timeline: &Timeline) -> Vec<(i64, Option<&Kernel>)> {
    let calls = launched(timeline);
    let launch =
        |kernel: &'_ Kernel| Some(&timeline.launches[*calls.get(&kernel.correlation?)? as usize]);
    let kernels = timeline.kernels.iter().filter(|kernel| kernel.work == DeviceWork::Kernel);
    let launches = kernels.filter_map(|kernel| {
        let call = launch(kernel)?;
        Some((call.lane, call.time.start_ns, kernel))
    });
    let mut launches: Vec<(TrackId, i64, &Kernel)> = launches.collect();
    launches.sort_by_key(|(lane, at_ns, _)| (*lane, *at_ns));
    let products = &timeline.products;
    let begin = |at: usize| (products[at].lane, products[at].time.start_ns);
    let mut begun: Vec<usize> = (0..products.len()).collect();
    begun.sort_by_key(|at| (begin(*at), Reverse(products[*at].time.end_ns())));
    let mut begun = begun.into_iter().peekable();
    let mut open: Vec<usize> = Vec::new();
    let mut found = vec![(0i64, None::<&Kernel>); products.len()];
    for (lane, at_ns, kernel) in launches {
        while let Some(product) = begun.next_if(|at| begin(*at) <= (lane, at_ns)) {
            open.push(product);
        }
        let is_over =
            |at: &mut usize| products[*at].lane != lane || products[*at].time.end_ns() <= at_ns;
        while open.pop_if(is_over).is_some() {}
        if let Some(product) = open.last() {
            let (time_ns, longest) = &mut found[*product];
            *time_ns = time_ns.saturating_add(kernel.time.dur_ns);
            if longest.is_none_or(|of| of.time.dur_ns < kernel.time.dur_ns) {
                *longest = Some(kernel);
            }
        }
    }
    found
}

/// The bytes of an element, by the names of PyTorch and c10d.
pub(super) fn elem_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "Float" | "float" | "Int" | "int" => 4,
        "Half" | "c10::Half" | "BFloat16" | "c10::BFloat16" | "Short" => 2,
        "Double" | "double" | "Long" | "long int" => 8,
        "Byte" | "Char" | "Bool" | "unsigned char" | "signed char" | "bool" => 1,
        _ => return None,
    })
}

/// The bytes on the busiest wire as a part of a rank's larger buffer, as nccl-tests counts them.
pub(super) fn bus_factor(kind: CollectiveKind, ranks: f64) -> Option<f64> {
    Some(match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => {
            (ranks - 1.0) / ranks
        }
        CollectiveKind::Broadcast | CollectiveKind::Reduce => 1.0,
        _ => return None,
    })
}

/// The worst collectives of a run. A link carries `link` bytes per second in each direction.
pub(super) fn collectives(
    timelines: &[Timeline],
    together: &Together,
    link: Option<f64>,
) -> Vec<Collective> {
    let mut all: BTreeMap<(&'static str, u64, u64), (CollectiveKind, u64, i64)> = BTreeMap::new();
    for timeline in timelines {
        let world = timeline.world_size.map(|ranks| ranks as u64);
        for kernel in &timeline.kernels {
            let of = kernel.collective.map(|at| &timeline.collectives[at as usize]);
            let Some(of) = of else { continue };
            let Some(kind) = collective_kind(&of.name) else { continue };
            let elems = of.in_elems.max(of.out_elems);
            let elem = of.dtype.as_deref().and_then(elem_bytes);
            let bytes = elems.zip(elem).and_then(|(elems, bytes)| elems.checked_mul(bytes));
            let (Some(bytes), Some(ranks)) = (bytes, of.group_size.or(world)) else { continue };
            if ranks < 2 || bytes == 0 {
                continue;
            }
            let rank = timeline.rank.unwrap_or(0);
            let wait_ns = together.wait_ns(rank, kernel.time.start_ns);
            let time_ns = (kernel.time.dur_ns - wait_ns).max(0);
            let of = all.entry((kind.name(), ranks, bytes)).or_insert((kind, 0, 0));
            *of = (kind, of.1 + 1, of.2.saturating_add(time_ns));
        }
    }
    let judged = all.into_iter().filter_map(|((name, ranks, bytes), (kind, calls, time_ns))| {
        let factor = bus_factor(kind, ranks as f64)?;
        let busbw = bytes as f64 * factor * calls as f64 / (time_ns.max(1) as f64 / 1e9);
        let part = link.map(|link| busbw / link);
        Some(Collective { name: name.to_owned(), ranks, bytes, calls, time_ns, busbw, part })
    });
    let mut judged: Vec<Collective> = judged.collect();
    worst(&mut judged, |of| of.time_ns as f64 * (1.0 - of.part.unwrap_or(0.0)).max(0.0));
    judged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::parse;

    fn trace(events: &str) -> Timeline {
        let text = format!(
            "{{\"deviceProperties\": [{{\"name\": \"NVIDIA A100-SXM4-40GB\"}}], \
             \"distributedInfo\": {{\"rank\": 0, \"world_size\": 4}}, \"traceEvents\": [{events}]}}"
        );
        parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_product_is_judged_by_the_peak_of_what_its_kernel_used() {
        let call = "{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"aten::mm\",\"pid\":1,\"tid\":1,\"ts\":0,\"dur\":10,\
             \"args\":{\"Input Dims\":[[1000,1000],[1000,1000]],\"Input type\":[\"float\",\"float\"]}},\
             {\"ph\":\"X\",\"cat\":\"cuda_runtime\",\"name\":\"cudaLaunchKernel\",\"pid\":1,\"tid\":1,\"ts\":2,\"dur\":3,\
             \"args\":{\"correlation\":7}},";
        let kernel = |name: &str| {
            format!(
                "{call}{{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"{name}\",\"pid\":0,\"tid\":7,\"ts\":20,\"dur\":200,\
                 \"args\":{{\"stream\":7,\"correlation\":7}}}}"
            )
        };
        // 2e9 operations in 200 us are 1e13 per second.
        let judged = |name| products(&[trace(&kernel(name))]);
        let single = judged("ampere_sgemm_128x64_nn");
        assert_eq!((single[0].dtype.as_str(), single[0].flops_per_s), ("f32", 1e13));
        assert_eq!(single[0].part(), Some(1e13 / 19.5e12));
        let tf32 = judged("cutlass_80_tensorop_s1688gemm_128x64");
        assert_eq!((tf32[0].dtype.as_str(), tf32[0].part()), ("tf32", Some(1e13 / 156e12)));
        assert_eq!(tf32[0].shape, "1000x1000 1000x1000");
        let mut volta = trace(&kernel("some_new_kernel_of_cublas"));
        volta.devices = vec!["Tesla V100-SXM2-32GB".to_owned()];
        let volta = products(&[volta]);
        assert_eq!((volta[0].dtype.as_str(), volta[0].peak), ("f32", Some(15.7e12)));
        assert_eq!(products(&[trace(call.trim_end_matches(','))]), []);
    }

    #[test]
    fn a_kernel_is_of_the_innermost_product() {
        let event = |category: &str, name: &str, time: [usize; 2], args: &str| {
            let [ts, dur] = time;
            format!(
                "{{\"ph\":\"X\",\"cat\":\"{category}\",\"name\":\"{name}\",\"pid\":1,\"tid\":1,\"ts\":{ts},\"dur\":{dur},\
                 \"args\":{{{args}}}}}"
            )
        };
        let product = |name, time, size| {
            event("cpu_op", name, time, &format!("\"Input Dims\":[[{size},8],[8,8]]"))
        };
        let mut events = vec![
            product("aten::mm", [0, 100], 1),
            product("aten::mm", [10, 20], 2),
            product("aten::mm", [40, 20], 3),
        ];
        for (number, ts) in [(1, 5), (2, 15), (3, 35), (4, 45)] {
            let number = format!("\"correlation\":{number},\"stream\":7");
            events.push(event("cuda_runtime", "cudaLaunchKernel", [ts, 1], &number));
            events.push(event("kernel", "gemm", [1000 + ts, ts], &number));
        }
        let timeline = trace(&events.join(","));
        let times: Vec<i64> = kernels_of(&timeline).into_iter().map(|of| of.0 / 1000).collect();
        assert_eq!(times, [5 + 35, 15, 45]);
    }

    #[test]
    fn a_collective_is_judged_by_its_bus_bandwidth() {
        let event = "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"ncclDevKernel_AllReduce\",\"pid\":0,\"tid\":20,\"ts\":0,\
             \"dur\":1000,\"args\":{\"stream\":20,\"correlation\":1,\"Collective name\":\"allreduce\",\
             \"In msg nelems\":1000000,\"Out msg nelems\":1000000,\"dtype\":\"Float\",\"Group size\":4}}";
        let judged = collectives(&[trace(event)], &Together::default(), Some(12e9));
        // 4 MB, three quarters of it twice, in 1 ms: 6 GB/s.
        assert_eq!((judged[0].bytes, judged[0].busbw), (4_000_000, 6e9));
        assert_eq!(judged[0].part, Some(0.5));
        assert_eq!(collectives(&[trace(event)], &Together::default(), None)[0].part, None);
    }
}
