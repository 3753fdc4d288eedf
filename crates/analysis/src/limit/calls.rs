//! The operators of a trace with their arithmetic, bytes and time.
//!
//! Input: a timeline. Output: each call with its limit: by the speeds that the trace has, or by those of its card's data sheet.

use std::cmp::Reverse;

use super::{Operation, Speeds};
use crate::doctor::cards::{self, Card};
use crate::doctor::names::Class;
use crate::hta::launched;
use crate::timeline::{DeviceWork, Kernel, Product, Timeline, TrackId};

/// The calls of a rank, each with its time.
pub(super) fn of(timeline: &Timeline) -> Vec<Operation> {
    let card = timeline.devices.iter().find_map(|name| cards::of(name));
    let on_device = timeline.has_device_work() || timeline.names_a_card();
    let times = if on_device { device_times(timeline) } else { host_times(timeline) };
    let timed = timeline.products.iter().zip(times).filter(|(_, (time_ns, _))| *time_ns > 0);
    let call = |(product, (time_ns, longest)): (&Product, (i64, Option<&Kernel>))| {
        let text = |id| timeline.names.text(id);
        let class = longest.map(|kernel| Class::of(text(kernel.name)));
        let (dtype, speeds) = match (timeline.speeds, card) {
            (None, Some(card)) => on_card(text(product.dtype), class, card, product.flops),
            (speeds, _) => (text(product.dtype), speeds),
        };
        let shape = format!("{} {dtype}", text(product.shape)).trim().to_owned();
        Operation::new(
            text(product.name),
            shape,
            [product.flops, product.bytes, time_ns as u64],
            speeds,
        )
    };
    timed.map(call).collect()
}

/// The element type by our names, with tf32 for f32 on tensor cores, and the published speeds for it.
fn on_card(dtype: &str, class: Option<Class>, card: Card, flops: u64) -> (&str, Option<Speeds>) {
    let dtype = match (dtype, class) {
        ("float", Some(Class::SinglePrecision)) => "f32",
        // A card without tf32 has no other way.
        ("float", _) if card.tf32.is_none() => "f32",
        ("float", _) => "tf32",
        ("c10::Half", _) => "f16",
        ("c10::BFloat16", _) => "bf16",
        (other, _) => other,
    };
    // Without arithmetic the peak does not matter.
    let of = if flops == 0 { "f32" } else { dtype };
    (dtype, Speeds::on(card, of))
}

/// The products in the order in which they began on each row, the outer ones first.
fn in_order(products: &[Product]) -> Vec<usize> {
    let begin = |at: usize| (products[at].lane, products[at].time.start_ns);
    let mut begun: Vec<usize> = (0..products.len()).collect();
    begun.sort_by_key(|at| (begin(*at), Reverse(products[*at].time.end_ns())));
    begun
}

/// For each product on the host: its time. Of those within each other, only the innermost with arithmetic counts, or without
/// arithmetic the innermost: the others call it.
fn host_times(timeline: &Timeline) -> Vec<(i64, Option<&Kernel>)> {
    let products = &timeline.products;
    let mut found: Vec<_> = products.iter().map(|of| (of.time.dur_ns, None)).collect();
    let mut open: Vec<usize> = Vec::new();
    for at in in_order(products) {
        let Product { lane, time, flops, .. } = products[at];
        let is_over = |outer: &mut usize| {
            products[*outer].lane != lane || products[*outer].time.end_ns() <= time.start_ns
        };
        while open.pop_if(is_over).is_some() {}
        if flops == 0 && open.last().is_some_and(|outer| products[*outer].flops > 0) {
            found[at].0 = 0;
            continue;
        }
        if let Some(outer) = open.last() {
            found[*outer].0 = 0;
        }
        open.push(at);
    }
    found
}

/// For each product: the time of the kernels that it launched, and the longest of them. A kernel belongs to the innermost
/// product with arithmetic around its launch, or without arithmetic to the innermost, so that nothing counts twice.
fn device_times(timeline: &Timeline) -> Vec<(i64, Option<&Kernel>)> {
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
    let mut begun = in_order(products).into_iter().peekable();
    let mut open: Vec<usize> = Vec::new();
    let mut found = vec![(0i64, None::<&Kernel>); products.len()];
    for (lane, at_ns, kernel) in launches {
        let close = |open: &mut Vec<usize>, (lane, at_ns): (TrackId, i64)| {
            let is_over =
                |at: &mut usize| products[*at].lane != lane || products[*at].time.end_ns() <= at_ns;
            while open.pop_if(is_over).is_some() {}
        };
        while let Some(product) = begun.next_if(|at| begin(*at) <= (lane, at_ns)) {
            close(&mut open, begin(product));
            let has_work = |at: usize| products[at].flops > 0;
            if has_work(product) || !open.last().is_some_and(|outer| has_work(*outer)) {
                open.push(product);
            }
        }
        close(&mut open, (lane, at_ns));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Operations;
    use crate::read::parse;

    fn judged(timeline: Timeline) -> Vec<Operation> {
        Operations::of(&[timeline]).all
    }

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
        let judged = |events: &str| {
            judged(trace(events))
                .into_iter()
                .map(|of| {
                    (of.shape.clone(), of.flop, of.share().map(|share| (share * 1e4).round() / 1e4))
                })
                .collect::<Vec<_>>()
        };
        let one = |dtype: &str, peak: f64| {
            vec![(
                format!("1000x1000 1000x1000 {dtype}"),
                2_000_000_000,
                Some((1e17 / peak).round() / 1e4),
            )]
        };
        assert_eq!(judged(&kernel("ampere_sgemm_128x64_nn")), one("f32", 19.5e12));
        let tf32 = kernel("cutlass_80_tensorop_s1688gemm_128x64");
        assert_eq!(judged(&tf32), one("tf32", 156e12));
        assert_eq!(judged(call.trim_end_matches(',')), []);
        let mut volta = trace(&kernel("some_new_kernel_of_cublas"));
        volta.devices = vec!["Tesla V100-SXM2-32GB".to_owned()];
        let limit_ns = Operations::of(&[volta]).all[0].limit_ns.unwrap();
        assert!((limit_ns - 2e18 / 15.7e12).abs() < 1e-6, "{limit_ns}");
    }

    /// A trace of a processor with 1 GFLOP/s and 1 GB/s: name, begin and length in us, arguments.
    fn on_host(operators: &[(&str, [u64; 2], &str)]) -> Vec<Operation> {
        let event = |(name, [ts, dur], args): &(&str, [u64; 2], &str)| {
            format!(
                "{{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"aten::{name}\",\"pid\":1,\"tid\":1,\"ts\":{ts},\"dur\":{dur},\
                 \"args\":{{{args}}}}}"
            )
        };
        let events: Vec<String> = operators.iter().map(event).collect();
        let text = format!(
            "{{\"speeds\": \"1000000000 1000000000\", \"traceEvents\": [{}]}}",
            events.join(",")
        );
        judged(parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn on_a_processor_time_counts_once_and_arithmetic_where_it_is_made() {
        let product = "\"Input Dims\":[[10,20],[20,30]],\"Input type\":[\"float\",\"float\"]";
        let linear = "\"Input Dims\":[[10,20],[30,20]],\"Input type\":[\"float\",\"float\"]";
        let addition = "\"Input Dims\":[[10,30],[10,30]],\"Input type\":[\"double\",\"float\"]";
        let found = on_host(&[
            ("linear", [0, 100], linear),
            ("t", [1, 2], linear),
            ("mm", [10, 60], product),
            ("copy_", [20, 30], addition),
            ("clone", [200, 50], addition),
            ("copy_", [210, 30], addition),
            ("add_", [260, 20], addition),
            ("sum", [300, 8], "\"Input Dims\":[[]],\"Input type\":[\"float\"]"),
            ("relu", [310, 8], "\"Input Dims\":[[10,30]]"),
            // Its last tensor is the output, as `out=`.
            (
                "mul",
                [330, 8],
                "\"Input Dims\":[[10,30],[10,30],[10,30]],\"Input type\":[\"float\",\"float\",\"float\"]",
            ),
        ]);
        let found: Vec<_> = found
            .iter()
            .map(|of| {
                (of.name.trim_start_matches("aten::"), of.flop, of.bytes, of.time_ns, of.limit_ns)
            })
            .collect();
        let product_bytes = 4 * (200 + 600 + 300);
        let expected = [
            ("mm", 12_000, product_bytes, 60_000, Some(12_000.0)),
            // Both inputs, without or with the first once more.
            ("copy_", 0, 300 * 12, 30_000, Some(3600.0)),
            ("add_", 300, 300 * 20, 20_000, Some(6000.0)),
            ("mul", 300, 300 * 12, 8_000, Some(3600.0)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn attention_counts_the_pairs_that_a_mask_leaves() {
        let args = |dims: &str, values: &str| {
            format!("\"Input Dims\":[{dims}],\"Concrete Inputs\":[{values}]")
        };
        let qkv = "[2,4,8,16],[2,4,8,16],[2,4,8,16]";
        let cases = [
            ("flash_attention_for_cpu", args(qkv, "\"\",\"\",\"\",\"0.\",\"True\""), 36),
            ("flash_attention", args(qkv, "\"\",\"\",\"\",\"0.\",\"False\",\"True\""), 64),
            ("efficient_attention", args(qkv, "\"\",\"\",\"\",\"\",\"True\",\"0.\",\"True\""), 36),
            ("efficient_attention", args(qkv, "\"\",\"\",\"\",\"\",\"True\",\"0.\",\"False\""), 64),
        ];
        for (name, args, pairs) in cases {
            let name = format!("_scaled_dot_product_{name}");
            let found = on_host(&[(&name, [0, 10], &args)]);
            assert_eq!(found[0].flop, 2 * 2 * 4 * pairs * 32, "{name} {args}");
        }
        let four = format!("[2,4,8,16],{qkv}");
        let name = "_scaled_dot_product_flash_attention_for_cpu_backward";
        let found =
            on_host(&[(name, [0, 10], &args(&four, "\"\",\"\",\"\",\"\",\"0.\",\"False\""))]);
        assert_eq!(found[0].flop, 2 * 2 * 2 * 4 * 64 * 32);
    }

    #[test]
    fn absurd_numbers_are_no_speeds_and_do_not_overflow() {
        for words in ["", "1e9", "1e9 nan", "inf 1e9", "-1e9 1e9", "1e9 0", "1e9 1e9 1e9"] {
            assert_eq!(Speeds::parse(words), None, "{words}");
        }
        let most = i64::MAX as u64 / 2000;
        let huge = format!("\"FLOP\":{},\"bytes\":{}", u64::MAX, u64::MAX);
        let found = on_host(&[
            ("a", [0, most], &huge),
            ("b", [1, most], &huge),
            ("b", [2, most], &huge),
            ("c", [most, most], "\"FLOP\":-1,\"bytes\":\"x\""),
        ]);
        let all = Operations { all: found, ..Operations::default() };
        let whole = all.whole().unwrap();
        assert!(whole.flop == u64::MAX && whole.share().unwrap().is_finite(), "{whole:?}");
        assert!(!all.sentence().is_empty() && !all.table(1).rows.is_empty());
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
        let times: Vec<i64> = device_times(&timeline).into_iter().map(|of| of.0 / 1000).collect();
        assert_eq!(times, [5 + 35, 15, 45]);
    }
}
