//! Advice that is right: programs with one fault each, as a card's trace shows them, and the change that mends it.

use common::{Build, timeline};
use paceline_analysis::doctor::{Advice, Diagnosis, examine};
use paceline_analysis::hta::Options;
use paceline_analysis::timeline::{Collective, Timeline};

mod common;

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
