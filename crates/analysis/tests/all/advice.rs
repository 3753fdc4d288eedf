//! Advice that is right: programs with one fault each, as a card's trace shows them, and the change that mends it.

use crate::common::{self, Build, timeline, value};
use paceline_analysis::doctor::{Advice, Diagnosis, examine};
use paceline_analysis::hta::{Options, analyze};
use paceline_analysis::timeline::{Collective, Timeline};

const STEPS: i64 = 5;
const GEMM: &str = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n";

/// Steps of `len` us. `part` adds the work of one that begins at this time. The last one is not replayed.
fn steps(len: i64, part: impl Fn(Timeline, i64) -> Timeline) -> Timeline {
    let mut all = timeline(0);
    all.devices = vec!["NVIDIA H100 80GB HBM3".to_owned()];
    for number in 0..=STEPS {
        let begin = number * len;
        all = part(all.step(number as u64, begin, begin + len - 100), begin);
    }
    all
}

fn diagnose(timelines: &[Timeline]) -> Diagnosis {
    examine(timelines, &Options::default(), None).unwrap().diagnosis
}

fn advice(timelines: &[Timeline]) -> Vec<Advice> {
    diagnose(timelines).advice
}

/// The causes and changes.
fn said(timelines: &[Timeline]) -> Vec<(&'static str, String)> {
    advice(timelines).into_iter().map(|of| (of.cause.key, of.change)).collect()
}

/// A call of the host that returns when its work has ended, and this work.
fn blocking(all: Timeline, name: &str, call: (f64, f64), work: (f64, f64)) -> Timeline {
    all.launched(name, 7, call.0, call.1, work.0, work.1)
}

/// An all-reduce of this type beside nothing, after computation.
fn reduced(dtype: &'static str, num_elems: u64, took: i64) -> Timeline {
    steps(10_000 + took, move |all, begin| {
        let at = begin as f64;
        let said = Collective {
            name: "allreduce".into(),
            dtype: Some(dtype.into()),
            in_elems: Some(num_elems),
            out_elems: Some(num_elems),
            group_size: Some(2),
            ..Collective::default()
        };
        let end = at + 9_300.0 + took as f64;
        all.launched(GEMM, 7, at + 100.0, at + 120.0, at + 200.0, at + 9_200.0)
            .launched(common::NCCL, 7, at + 150.0, at + 170.0, at + 9_300.0, end)
            .described(said)
            .call("cudaDeviceSynchronize", 9_000, at + 200.0, end + 10.0)
    })
}

#[test]
fn values_of_16_bits_are_not_compressed() {
    // 200 MB in 9 ms: 22 GB/s, which is no fault of the link.
    let wide = reduced("Float", 50_000_000, 9_000);
    assert!(said(&[wide])[0].1.contains("bf16_compress_hook"));
    let narrow = reduced("BFloat16", 100_000_000, 9_000);
    let all = said(&[narrow]);
    assert!(all[0].0 == "exposed" && all[0].1.contains("no_sync"), "{all:?}");
    assert!(all.iter().all(|of| !of.1.contains("compress")), "{all:?}");
}

#[test]
fn a_collective_that_is_slow_for_its_size_waits_or_has_a_bad_link() {
    // 17.6 MB in 9 ms: 2 GB/s.
    let slow = |rank: usize| {
        let timeline = reduced("BFloat16", 8_816_192, 9_000);
        Timeline { rank: Some(rank), ..timeline }
    };
    let first = |timelines: &[Timeline]| advice(timelines).swap_remove(0);
    let alone = first(&[slow(0)]);
    assert!(alone.title.starts_with("Collectives wait for another rank"), "{}", alone.title);
    assert!(alone.change.contains("record every rank"), "{}", alone.change);
    let text = &alone.evidence.text;
    assert!(text.contains("17.6 MB at 2.0 GB/s of bus bandwidth"), "{text}");
    assert!(alone.gain.low_ms == 0.0 && (7.0..7.6).contains(&alone.gain.high_ms));
    // No rank waits, so it is the link.
    let both = first(&[slow(0), slow(1)]);
    assert_eq!(both.title, "The link is slow");
}

#[test]
fn a_result_that_the_host_fetches_is_no_batch() {
    let fetched = steps(20_000, |all, begin| {
        let at = begin as f64;
        let all =
            all.copy("Memcpy HtoD (Pinned -> Device)", at + 70.0, at + 370.0, 6_000_000, 20.0);
        let all = all.launched(GEMM, 7, at + 100.0, at + 120.0, at + 400.0, at + 9_400.0);
        let all = all.operator("aten::to", begin + 200, begin + 9_500);
        let all = all.operator("aten::copy_", begin + 202, begin + 9_498);
        let name = "Memcpy DtoH (Device -> Pageable)";
        let all = blocking(all, name, (at + 210.0, at + 9_480.0), (at + 9_420.0, at + 9_460.0));
        all.launched(GEMM, 7, at + 15_000.0, at + 15_020.0, at + 15_030.0, at + 19_030.0)
    });
    let all = said(&[fetched]);
    let fetches = all.iter().find(|of| of.0 == "synchronizations").expect("the host waits");
    assert!(fetches.1.contains(".cpu()") && !fetches.1.contains("synchronize"), "{all:?}");
    assert!(all.iter().all(|of| of.0 != "copies"), "{all:?}");
}

#[test]
fn copies_get_the_change_that_their_memory_needs() {
    let copied = |name: &'static str, bytes: u64| {
        let timeline = steps(6_000, move |all, begin| {
            let at = begin as f64;
            let all = all.operator("aten::copy_", begin + 10, begin + 2_100);
            let mut all = blocking(all, name, (at + 20.0, at + 2_050.0), (at + 40.0, at + 2_040.0));
            all.kernels.last_mut().unwrap().bytes = Some(bytes);
            all.launched(GEMM, 7, at + 2_200.0, at + 2_210.0, at + 2_220.0, at + 5_800.0)
        });
        let all = said(&[timeline]);
        all.into_iter().find(|of| of.0 == "copies").expect("copies").1
    };
    let batch = "batch = batch.to(device, non_blocking=True)";
    let pageable = copied("Memcpy HtoD (Pageable -> Device)", 20_000_000);
    assert_eq!(pageable, format!("DataLoader(dataset, pin_memory=True)\n{batch}"));
    assert_eq!(copied("Memcpy HtoD (Pinned -> Device)", 20_000_000), batch);
    assert!(copied("Memcpy HtoD (Pageable -> Device)", 8).contains("torch.tensor(value, device"));
}

#[test]
fn an_optimizer_is_advised_a_form_that_its_device_has() {
    let optimized = |name: &'static str| {
        let timeline = steps(5_000, move |all, begin| {
            let end = begin + 4_800;
            let mut all = all.span(&format!("Optimizer.step#{name}.step"), begin + 1_000, end);
            for kernel in 0..60 {
                let at = (begin + 1_010 + 58 * kernel) as f64;
                let name = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int)";
                all = all.launched(name, 7, at, at + 8.0, at + 10.0, at + 13.0);
            }
            all
        });
        let all = said(&[timeline]);
        all.into_iter().find(|of| of.0 == "optimizer").map(|of| of.1)
    };
    let form = |form: &str| Some(format!("torch.optim.{form}=True)"));
    assert_eq!(optimized("Adagrad"), form("Adagrad(params, foreach"));
    assert_eq!(optimized("AdamW"), form("AdamW(params, fused"));
    assert_eq!(optimized("LBFGS"), None);
}

#[test]
fn attention_without_a_fused_kernel_is_found() {
    // Twelve times two products of 2 ms and a softmax of 4 ms.
    let layers = |around: Option<&'static str>| {
        steps(97_100, move |mut all, begin| {
            for layer in 0..12 {
                let start = begin + 60 * layer;
                if let Some(around) = around {
                    all = all.operator(around, start, start + 50);
                }
                let parts = [("aten::bmm", 0, 2), ("aten::_softmax", 2, 6), ("aten::bmm", 6, 8)];
                for (place, (name, from, to)) in (0..).zip(parts) {
                    let call = start + 2 + 16 * place;
                    let end = begin + 900 + 8_000 * layer;
                    let at = |ms: i64| (end + 1_000 * ms) as f64;
                    all = all.operator(name, call, call + 14);
                    let call = call as f64;
                    all = all.launched("gemm", 7, call + 4.0, call + 12.0, at(from), at(to));
                }
            }
            all.call("cudaDeviceSynchronize", 9_000, begin + 800, begin + 96_910)
        })
    };
    let timelines = [layers(None)];
    let found = advice(&timelines);
    let attention = &found[0];
    assert_eq!(attention.cause.key, "attention");
    let text = &attention.evidence.text;
    assert!(text.contains("12 softmaxes") && text.contains("96.00 ms, 48.00 of them"), "{text}");
    assert!((28.0..29.0).contains(&attention.gain.low_ms), "{:?}", attention.gain);
    assert!((71.0..73.0).contains(&attention.gain.high_ms), "{:?}", attention.gain);
    assert!(attention.change.contains("scaled_dot_product_attention"));
    // The same kernels, as the fallback of PyTorch's own function, and as its fused kernels.
    let math = layers(Some("aten::_scaled_dot_product_attention_math"));
    assert_eq!(said(&[math])[0].0, "attention");
    let fused = layers(Some("aten::_scaled_dot_product_flash_attention"));
    assert!(said(&[fused]).iter().all(|of| of.0 != "attention"));
}

#[test]
fn work_on_the_processor_is_named_while_the_device_waits_for_it() {
    let made = |name: &'static str| {
        steps(12_000, move |all, begin| {
            let at = begin as f64;
            let all = all.operator(name, begin + 10, begin + 4_010);
            let all = all.operator("aten::normal_", begin + 15, begin + 4_005);
            let (call, end) = (at + 4_100.0, at + 11_130.0);
            let all = all.launched(GEMM, 7, call, call + 20.0, call + 30.0, end);
            all.call("cudaDeviceSynchronize", 9_000, at + 4_130.0, at + 11_140.0)
        })
    };
    let found = advice(&[made("aten::randn")]);
    let first = &found[0];
    assert_eq!(first.cause.key, "host_work");
    // The rest is what the wait at the end of the step costs without it.
    let sum: f64 = found.iter().map(|of| of.gain.high_ms).sum();
    assert!(sum < 5.0, "{found:#?}");
    assert!(first.change.starts_with("torch.randn(..., device=device)"), "{}", first.change);
    assert_eq!(first.evidence.names, ["aten::randn"]);
    assert!((3.5..4.2).contains(&first.gain.high_ms), "{:?}", first.gain);
    let found = said(&[made("aten::index")]);
    assert!(found[0].1.contains("workers of the loader"), "{found:?}");
}

#[test]
fn memory_that_is_free_needs_no_second_forward_pass() {
    let checkpointed = |reserved: u64| {
        let mut timeline = steps(10_000, |mut all, begin| {
            let evaluated = "autograd::engine::evaluate_function: CheckpointFunctionBackward";
            all = all.operator(evaluated, begin + 90, begin + 200);
            let at = begin as f64;
            let all = all.launched(GEMM, 7, at + 100.0, at + 110.0, at + 150.0, at + 3_150.0);
            let all = all.launched(GEMM, 7, at + 300.0, at + 310.0, at + 3_160.0, at + 9_900.0);
            all.call("cudaDeviceSynchronize", 9_000, at + 400.0, at + 9_910.0)
        });
        timeline.device_bytes = Some(80_000_000_000);
        said(&[timeline.memory(5.0, 1, reserved / 2, reserved)])
    };
    assert_eq!(checkpointed(20_000_000_000)[0].0, "recomputation");
    assert!(checkpointed(70_000_000_000).iter().all(|of| of.0 != "recomputation"));
}

#[test]
fn twelve_small_all_reduces_are_many() {
    let reduced = |count: i64, num_elems: u64| {
        let timeline = steps(20_000, move |mut all, begin| {
            let at = begin as f64;
            all = all.launched(GEMM, 7, at + 100.0, at + 120.0, at + 200.0, at + 9_000.0);
            for bucket in 0..count {
                let from = at + 9_010.0 + (10_000 / count * bucket) as f64;
                let call = at + 130.0 + 10.0 * bucket as f64;
                let end = from + (9_500 / count) as f64;
                let said = Collective {
                    name: "allreduce".into(),
                    dtype: Some("Float".into()),
                    in_elems: Some(num_elems),
                    ..Collective::default()
                };
                all = all.launched(common::NCCL, 7, call, call + 5.0, from, end).described(said);
            }
            all.call("cudaDeviceSynchronize", 9_000, at + 300.0, at + 19_400.0)
        });
        said(&[timeline])
    };
    let small = reduced(12, 25_000);
    assert!(small[0].0 == "small_collectives" && small[0].1.contains("bucket_cap_mb"), "{small:?}");
    for other in [reduced(12, 25_000_000), reduced(4, 25_000)] {
        assert!(other.iter().all(|of| of.0 != "small_collectives"), "{other:?}");
    }
}

#[test]
fn kernels_of_other_libraries_than_nccl_communicate() {
    let timeline = steps(10_000, |mut all, begin| {
        let kernels = [
            "void deep_ep::internode::combine<false, 8, __nv_bfloat16, 8>(int4*)",
            "void deep_ep::internode::dispatch<false, 8>(int4*)",
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
        ];
        for (name, place) in kernels.into_iter().zip(0..) {
            let (call, at) = (begin + 10 * (place + 1), begin + 100 + 2_000 * place);
            let [call, at] = [call, at].map(|us| us as f64);
            all = all.launched(name, 7, call, call + 5.0, at, at + 1_500.0);
        }
        all
    });
    let analysis = analyze(&[timeline], &Options::default()).unwrap();
    assert_eq!(value(&analysis.ranks[0], "comm_time_us"), 5.0 * 6_000.0);
}

/// Ranks that begin to record at different moments meet in the first collective.
#[test]
fn the_rank_that_begins_to_record_last_is_no_straggler() {
    let rank = |rank: usize, skew: i64, late: i64| {
        let mut all = timeline(rank);
        let mut begin = skew;
        for number in 0..6 {
            let met = if number == 0 { 30_000 } else { begin + 5_000 };
            let ready = begin + 3_000 + late;
            let end = met.max(ready) + 500;
            let at = begin as f64;
            all = all.launched(GEMM, 7, at + 10.0, at + 20.0, at + 30.0, ready as f64 - 1.0);
            let said = Collective {
                name: "allreduce".into(),
                seq: Some(number),
                group: Some("0".into()),
                ..Collective::default()
            };
            all = all.launched(common::NCCL, 4, at + 40.0, at + 50.0, ready as f64, end as f64);
            all = all.described(said).call(
                "cudaDeviceSynchronize",
                9_000,
                at + 60.0,
                end as f64 + 2.0,
            );
            all = all.step(number, begin, end + 5);
            begin = end + 5;
        }
        all
    };
    let causes = |timelines: &[Timeline]| -> Vec<&str> {
        advice(timelines).iter().map(|of| of.cause.key).collect()
    };
    // The second rank begins 25 ms later.
    assert!(!causes(&[rank(0, 0, 0), rank(1, 25_000, 0)]).contains(&"straggler"));
    assert!(causes(&[rank(0, 0, 0), rank(1, 0, 1_900)]).contains(&"straggler"));
}

#[test]
fn a_loader_gets_as_many_workers_as_keep_up() {
    let loaded = |span: &'static str| {
        let timeline = steps(16_000, move |all, begin| {
            let at = begin as f64;
            let all = all.span(span, begin + 10, begin + 10_010);
            let all =
                all.launched(GEMM, 7, at + 10_100.0, at + 10_110.0, at + 10_120.0, at + 15_800.0);
            all.call("cudaDeviceSynchronize", 9_000, at + 10_200.0, at + 15_810.0)
        });
        advice(&[timeline]).swap_remove(0)
    };
    let single = loaded("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__");
    // 10 ms of each batch beside 6 ms of the rest, and one more.
    assert!(single.change.contains("num_workers=3,"), "{}", single.change);
    assert!(single.evidence.text.contains("3 workers keep up"), "{}", single.evidence.text);
    let several = loaded("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__");
    assert!(several.change.contains("twice as many"), "{}", several.change);
}

/// A call that copies from pageable memory returns a little before the copy ends, and waits for the work before it.
#[test]
fn the_wait_of_the_first_recorded_step_is_not_promised() {
    let copied = |first: i64| {
        let mut all = timeline(0);
        all.devices = vec!["NVIDIA A100-SXM4-80GB".to_owned()];
        let mut begin = 0;
        for number in 0..=STEPS {
            // Work that was launched before the recording.
            let late = if number == 0 { first } else { 0 };
            let (at, free) = (begin as f64, (begin + 3_000 + late) as f64);
            let name = "Memcpy HtoD (Pageable -> Device)";
            all = blocking(all, name, (at + 20.0, free + 1_900.0), (free, free + 2_000.0));
            all.kernels.last_mut().unwrap().bytes = Some(10_000_000);
            all = all.launched(
                GEMM,
                7,
                free + 1_910.0,
                free + 1_920.0,
                free + 2_010.0,
                free + 4_990.0,
            );
            let end = begin + 5_000 + late;
            all = all.step(number as u64, begin, end);
            begin = end;
        }
        let all = advice(&[all]);
        all.into_iter().find(|of| of.cause.key == "copies").map(|of| of.gain.high_ms)
    };
    assert_eq!(copied(0), copied(40_000));
}

#[test]
fn a_single_step_with_an_unknown_pause_is_left_alone() {
    let paused = |name: Option<&'static str>| {
        let all = timeline(0).step(0, 0, 30_000);
        let all = match name {
            Some(name) => all.operator(name, 10, 12_000),
            None => all,
        };
        let all = all.launched(GEMM, 7, 12_100.0, 12_110.0, 12_120.0, 15_000.0);
        // Until the end of the step, the host may wait in a way that is not recorded.
        said(&[all.launched(GEMM, 7, 12_200.0, 12_210.0, 15_010.0, 29_000.0)])
    };
    assert_eq!(paused(None), []);
    assert_eq!(paused(Some("aten::index"))[0].0, "host_work");
}
