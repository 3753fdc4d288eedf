//! One fault of each kind planted in steps of a GPU that are sound otherwise. The doctor must find it and nothing else, and the
//! gain that it promises must hold what the sound steps gain.
//!
//! The steps are made by a small model of a host that launches work into streams. It shares nothing with the replay.

mod look_alikes;

use std::collections::{HashMap, VecDeque};

use super::{CAUSES, Diagnosis, examine};
use crate::hta::Options;
use crate::timeline::{
    Annotation, Collective, DeviceWork, Kernel, LaneInfo, Launch, Operator, TimeRange, Timeline,
    TrackId,
};

const COMPUTE: i64 = 7;
const NCCL: i64 = 20;
const STEPS: u64 = 7;
const GEMM: &str = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(X)";
const ELEMENTWISE: &str =
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>(int)";
const ALL_REDUCE: &str =
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
const FUSED: &str = "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>";

/// A host and its device. Times are in microseconds.
struct Machine {
    now: f64,
    /// How long the host prepares each launch.
    pace: f64,
    free: HashMap<i64, f64>,
    correlation: u64,
    timeline: Timeline,
    open: Vec<(String, f64, bool)>,
    /// When the collectives end on the slower rank.
    others: VecDeque<f64>,
}

impl Machine {
    fn new(rank: usize) -> Self {
        let timeline = Timeline {
            source: format!("rank_{rank}.json"),
            rank: Some(rank),
            devices: vec!["NVIDIA A100-SXM4-80GB".into()],
            lanes: vec![LaneInfo { pid: "1".into(), tid: "1".into(), name: None }],
            ..Timeline::default()
        };
        Self {
            now: 0.0,
            pace: 5.0,
            free: HashMap::new(),
            correlation: 0,
            timeline,
            open: Vec::new(),
            others: VecDeque::new(),
        }
    }

    fn range(from: f64, to: f64) -> TimeRange {
        let ns = |us: f64| (us * 1e3).round() as i64;
        TimeRange { start_ns: ns(from), dur_ns: ns(to) - ns(from) }
    }

    fn call(&mut self, name: &str, from: f64, correlation: Option<u64>) {
        let name = self.timeline.names.intern(name);
        let time = Self::range(from, self.now);
        self.timeline.launches.push(Launch { name, time, lane: TrackId(0), correlation });
    }

    /// Launches work, and returns when it ends. It begins when its stream and `after` are done.
    fn launch(&mut self, name: &str, stream: i64, us: f64, after: f64) -> f64 {
        self.now += self.pace;
        let from = self.now;
        self.now += 3.0;
        self.correlation += 1;
        let free = self.free.entry(stream).or_insert(0.0);
        let start = (*free + 1.0).max(from + 6.0).max(after + 1.0);
        let end = start + us;
        *free = end;
        let correlation = Some(self.correlation);
        let work = match name {
            name if name.starts_with("Memcpy") => DeviceWork::Copy,
            name if name.starts_with("Memset") => DeviceWork::Set,
            _ => DeviceWork::Kernel,
        };
        let id = self.timeline.names.intern(name);
        self.timeline.kernels.push(Kernel {
            name: id,
            work,
            time: Self::range(start, end),
            lane: TrackId(0),
            stream,
            correlation,
            bytes: None,
            bandwidth_gb_s: None,
            collective: None,
        });
        let call = if work == DeviceWork::Kernel { "cudaLaunchKernel" } else { "cudaMemcpyAsync" };
        self.call(call, from, correlation);
        end
    }

    fn compute(&mut self, name: &str, us: f64) -> f64 {
        self.launch(name, COMPUTE, us, 0.0)
    }

    /// A collective over everything computed so far.
    fn collective(&mut self, name: &str, kernel: &str, us: f64) -> f64 {
        let after = self.free.get(&COMPUTE).copied().unwrap_or(0.0);
        let end = self.launch(kernel, NCCL, us, after);
        let collectives = &mut self.timeline.collectives;
        let at = collectives.len() as u32;
        let (name, group, seq) = (name.into(), Some("0".into()), Some(u64::from(at)));
        collectives.push(Collective { name, group, seq, ..Collective::default() });
        let kernel = self.timeline.kernels.last_mut().unwrap();
        kernel.collective = Some(at);
        let end = self.others.pop_front().unwrap_or(end).max(end);
        kernel.time = Self::range(kernel.time.start_ns as f64 / 1e3, end);
        self.free.insert(NCCL, end);
        end
    }

    /// The next work of the stream of computation waits for all communication.
    fn join(&mut self) {
        let done = self.free.get(&NCCL).copied().unwrap_or(0.0);
        let free = self.free.entry(COMPUTE).or_insert(0.0);
        *free = free.max(done);
    }

    /// The host waits for the stream of computation.
    fn synchronize(&mut self, call: &str) {
        let from = self.now + 1.0;
        let done = self.free.get(&COMPUTE).copied().unwrap_or(0.0);
        self.now = (from + 2.0).max(done + 3.0);
        self.call(call, from, None);
    }

    fn host(&mut self, us: f64) {
        self.now += us;
    }

    fn begin(&mut self, name: &str, is_operator: bool) {
        self.now += 0.5;
        self.open.push((name.to_owned(), self.now, is_operator));
    }

    fn end(&mut self) {
        self.now += 0.5;
        let (name, from, is_operator) = self.open.pop().unwrap();
        let name = self.timeline.names.intern(&name);
        let (time, lane) = (Self::range(from, self.now), TrackId(0));
        if is_operator {
            self.timeline.operators.push(Operator { name, time, lane, collective: None })
        } else {
            self.timeline.annotations.push(Annotation { name, time, lane, is_device: false })
        }
    }

    fn span(&mut self, name: &str, inside: impl FnOnce(&mut Self)) {
        self.begin(name, false);
        inside(self);
        self.end();
    }

    fn operator(&mut self, name: &str, inside: impl FnOnce(&mut Self)) {
        self.begin(name, true);
        inside(self);
        self.end();
    }

    fn gemms(&mut self, count: usize, us: f64) {
        for _ in 0..count {
            self.operator("aten::mm", |m| {
                m.compute(GEMM, us);
            });
        }
    }
}

/// The difference from a sound step.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Up to three faults.
    Planted([&'static str; 3]),
    /// The step after the advised change.
    Cured(&'static str),
}

impl Fault {
    fn planted(cause: &'static str) -> Self {
        Self::Planted([cause, "", ""])
    }

    fn has(self, cause: &str) -> bool {
        matches!(self, Self::Planted(causes) if causes.contains(&cause))
    }
}

const BACKWARD: &str = "autograd::engine::evaluate_function: MmBackward0";

/// A backward pass of 16 products whose gradients travel in four buckets.
fn backward(m: &mut Machine, fault: Fault) {
    let is = |cause| fault.has(cause);
    for layer in 0..16 {
        m.operator(BACKWARD, |m| {
            if is("recomputation") {
                m.operator("aten::linear", |m| m.gemms(1, 100.0));
            }
            m.gemms(2, 100.0);
            if layer % 4 == 3 && !is("first_bucket") && !is("gathers") {
                let us = match fault {
                    Fault::Cured("exposed") => 800.0,
                    _ if is("exposed") => 1500.0,
                    _ if is("no_sync") => 300.0,
                    _ => 150.0,
                };
                if !is("small_collectives") || layer == 15 {
                    m.collective("allreduce", ALL_REDUCE, us);
                }
            }
            if is("small_collectives") {
                for _ in 0..6 {
                    m.collective("allreduce", ALL_REDUCE, 60.0);
                }
            }
            if is("first_bucket") && layer == 15 {
                m.collective("allreduce", ALL_REDUCE, 1600.0);
            }
        });
    }
}

/// Sound steps of rank 0, whose collectives end with those of a slower rank.
fn steps_beside(ends: VecDeque<f64>) -> Timeline {
    let mut machine = Machine::new(0);
    machine.others = ends;
    run(machine, Fault::None, |_| 1.0)
}

fn steps(rank: usize, fault: Fault, slow: f64) -> Timeline {
    run(Machine::new(rank), fault, |_| slow)
}

/// The steps of a machine that computes longer by `slow` in each of them.
fn run(mut m: Machine, fault: Fault, slow: impl Fn(u64) -> f64) -> Timeline {
    let is = |cause| fault.has(cause);
    let cured = |cause| fault == Fault::Cured(cause);
    for number in 0..STEPS {
        let slow = slow(number);
        m.begin(&format!("ProfilerStep#{number}"), false);
        m.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", |m| {
            m.host(if is("loader") { 15_000.0 } else { 20.0 });
        });
        let copy = if is("copies") {
            ("Memcpy HtoD (Pageable -> Device)", 1500.0)
        } else if cured("copies") {
            ("Memcpy HtoD (Pinned -> Device)", 800.0)
        } else {
            ("Memcpy HtoD (Pinned -> Device)", 50.0)
        };
        m.operator("aten::to", |m| {
            m.operator("aten::copy_", |m| {
                m.compute(copy.0, copy.1);
                if is("copies") {
                    m.synchronize("cudaStreamSynchronize");
                    m.host(300.0);
                }
            });
        });
        if is("host_bound") {
            m.pace = 150.0;
        }
        if is("host_work") {
            m.operator("aten::randn", |m| m.host(12_000.0));
        }
        if is("buffers") {
            m.operator("DistributedDataParallel.forward", |m| {
                m.collective("broadcast", "ncclDevKernel_Broadcast_RING_LL", 1_500.0);
            });
            m.join();
        }
        for layer in 0..16 {
            if is("gathers") {
                m.begin("FSDP::all_gather", false);
                let done =
                    m.collective("_allgather_base", "ncclDevKernel_AllGather_RING_LL", 150.0);
                m.end();
                let free = m.free.entry(COMPUTE).or_insert(0.0);
                *free = free.max(done);
            }
            if is("layout") {
                m.compute(
                    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>",
                    60.0,
                );
            }
            if is("tensor_cores") {
                m.operator("aten::mm", |m| {
                    m.compute("ampere_sgemm_128x64_nn", 200.0 * slow);
                })
            } else {
                m.gemms(1, 200.0 * slow)
            }
            if is("elementwise") || cured("elementwise") {
                for _ in 0..if is("elementwise") { 5 } else { 1 } {
                    m.compute(ELEMENTWISE, 60.0);
                }
            }
            if is("attention") {
                m.operator("aten::bmm", |m| {
                    m.compute(GEMM, 50.0);
                });
                m.compute(ELEMENTWISE, 40.0);
                m.operator("aten::_softmax", |m| {
                    m.compute("void at::native::cunn_SoftMaxForward<8, float>", 80.0);
                });
                m.operator("aten::bmm", |m| {
                    m.compute(GEMM, 50.0);
                });
            } else if cured("attention") {
                m.compute("void flash_fwd_kernel<>", 70.0);
            }
            if is("synchronizations") && layer % 4 == 0 {
                m.operator("aten::item", |m| {
                    m.operator("aten::_local_scalar_dense", |m| {
                        m.compute("Memcpy DtoH (Device -> Pageable)", 2.0);
                        m.synchronize("cudaStreamSynchronize");
                    });
                });
                m.host(400.0);
            }
            if is("allocation") && layer % 4 == 0 {
                let from = m.now;
                m.host(300.0);
                m.call("cudaMalloc", from, None);
                m.synchronize("cudaFree");
                m.host(100.0);
            }
        }
        backward(&mut m, fault);
        for _ in 0..if is("no_sync") { 3 } else { 0 } {
            // DDP joins its streams at the end of each pass.
            m.join();
            m.gemms(2, 100.0);
            backward(&mut m, fault);
        }
        if is("gathers") {
            m.collective(
                "_reduce_scatter_base",
                "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
                50.0,
            );
        }
        m.span("Optimizer.step#AdamW.step", |m| {
            m.join();
            if is("optimizer") {
                (0..200).for_each(|_| {
                    m.compute(ELEMENTWISE, 12.0);
                })
            } else {
                m.compute(FUSED, if cured("optimizer") { 900.0 } else { 100.0 });
            }
        });
        m.span("Optimizer.zero_grad#AdamW.zero_grad", |m| {
            if is("zeroing") {
                (0..60).for_each(|_| {
                    m.compute("Memset (Device)", 12.0);
                });
            }
        });
        m.end();
    }
    m.timeline
}

/// With the default options, and without a link.
fn diagnose(timelines: &[Timeline]) -> Diagnosis {
    examine(timelines, &Options::default(), None).unwrap().diagnosis
}

fn found(diagnosis: &Diagnosis) -> Vec<&'static str> {
    diagnosis.advice.iter().map(|of| of.cause.key).collect()
}

#[test]
fn sound_steps_get_no_advice() {
    let diagnosis = diagnose(&[steps(0, Fault::None, 1.0)]);
    let said: Vec<String> = diagnosis.advice.iter().map(|of| of.words()).collect();
    assert_eq!(said, [""; 0]);
    assert_eq!(diagnosis.steps, STEPS as usize - 1);
}

#[test]
fn a_planted_fault_is_found_and_nothing_else() {
    // Medians: the host is not ahead yet in the first step, which is longer.
    let median_ms =
        |of: &Diagnosis| paceline_table::stats::median(of.lengths_ms.iter().copied()).unwrap();
    let mut wrong = Vec::new();
    // A straggler and unequal stages need several ranks.
    for cause in CAUSES.iter().map(|of| of.key).filter(|of| !["straggler", "pipeline"].contains(of))
    {
        let timeline = steps(0, Fault::planted(cause), 1.0);
        let diagnosis = diagnose(std::slice::from_ref(&timeline));
        let said: Vec<String> = diagnosis.advice.iter().map(|of| of.words()).collect();
        if found(&diagnosis) != [cause] {
            wrong.push(format!("{cause}: {said:#?}"));
            continue;
        }
        let advice = &diagnosis.advice[0];
        assert!(advice.gain.low_ms <= advice.gain.high_ms && !advice.change.is_empty());
        assert!(!advice.evidence.names.is_empty() && !advice.evidence.around.is_empty(), "{cause}");
        // The gain of the machine itself. A sound step with fewer passes, or gathers that are ahead, would be another job.
        let cured = diagnose(&[steps(0, Fault::Cured(cause), 1.0)]);
        let gained = median_ms(&diagnosis) - median_ms(&cured);
        let is_same_job = !matches!(cause, "no_sync" | "tensor_cores" | "gathers");
        if is_same_job {
            let (low, high) = (advice.gain.low_ms, advice.gain.high_ms);
            if !(0.9 * low <= gained && gained <= 1.1 * high) {
                wrong.push(format!(
                    "{cause} gains {gained:.2}, and was promised {low:.2} to {high:.2}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_replay_of_the_recording_is_the_recording() {
    for fault in [Fault::None, Fault::planted("synchronizations"), Fault::planted("exposed")] {
        let timeline = steps(0, fault, 1.0);
        let recorded = super::Recorded::of(&timeline, 0, &Options::default()).unwrap();
        let sum: f64 = recorded.lengths_ms(&recorded.as_recorded()).iter().sum();
        let last = recorded.steps[recorded.steps.len() - 1];
        let ends = recorded.works.iter().map(|work| work.time.end_ns()).chain([last.end_ns()]);
        let whole = (ends.max().unwrap() - recorded.marks.done_ns) as f64 / 1e6;
        assert!((sum - whole).abs() < 1e-6, "{sum} {whole}");
    }
}

/// Promises of several causes share the time that they would free: never more than the products leave, which no cause takes away.
#[test]
fn no_millisecond_is_promised_twice() {
    let causes: Vec<&str> = CAUSES.iter().map(|of| of.key).collect();
    let mut planted: Vec<[&'static str; 3]> = Vec::new();
    for (at, first) in causes.iter().enumerate() {
        for (next, second) in causes.iter().enumerate().skip(at + 1) {
            planted.push([first, second, ""]);
            planted.extend(causes[next + 1..].iter().map(|third| [*first, *second, *third]));
        }
    }
    let mut several = 0;
    for faults in planted {
        let fault = Fault::Planted(faults);
        let timeline = steps(0, fault, 1.0);
        let Diagnosis { advice, step_ms, .. } = diagnose(std::slice::from_ref(&timeline));
        let products = timeline.kernels.iter().filter(|of| timeline.names.text(of.name) == GEMM);
        // Products that attention or a second forward pass needs may go.
        let kept = if fault.has("attention") || fault.has("recomputation") { 0.5 } else { 1.0 };
        let products_ns: i64 = products.map(|of| of.time.dur_ns).sum();
        let busy_ms = kept * products_ns as f64 / 1e6 / STEPS as f64;
        let promised: f64 = advice.iter().map(|of| of.gain.high_ms).sum();
        let room_ms = step_ms.unwrap() - busy_ms;
        assert!(promised <= room_ms + 1e-6, "{faults:?}: {promised} of {room_ms}");
        several += usize::from(advice.len() > 1);
    }
    assert!(several > 300, "{several}");
}

/// Two ranks, the second one slower, with all-reduces that wait for it.
#[test]
fn a_straggler_is_told_from_communication() {
    for (slow, by) in [(1.4, "by computation"), (1.0, "by data")] {
        let fault = if slow > 1.0 { Fault::None } else { Fault::planted("loader") };
        let late = steps(1, fault, slow);
        let timelines = [steps_beside(ends(&late)), late];
        let diagnosis = diagnose(&timelines);
        let said: Vec<String> = diagnosis.advice.iter().map(|of| of.words()).collect();
        assert_eq!(found(&diagnosis), ["straggler"], "{said:#?}");
        let straggler = &diagnosis.advice[0];
        assert_eq!(straggler.evidence.rank, 1);
        assert!(straggler.title.ends_with(by), "{}", straggler.title);
        // Medians: the host is not ahead yet in the first step, which is longer.
        let step_ms = |fault, slow| {
            let lengths = diagnose(&[steps(0, fault, slow)]).lengths_ms;
            paceline_table::stats::median(lengths).unwrap()
        };
        let [first, second] =
            [1.0, slow].map(|slow| step_ms(if slow > 1.0 { Fault::None } else { fault }, slow));
        let sound = step_ms(Fault::None, 1.0);
        let gained = first.max(second) - sound;
        let (low, high) = (straggler.gain.low_ms, straggler.gain.high_ms);
        assert!(low <= gained && gained <= 1.1 * high, "{gained} of {low} to {high}");
    }
}

/// Two hosts with two ranks each. Those of the slower host take turns in coming last, so neither is last at most collectives.
#[test]
fn a_slow_host_is_named_and_not_only_a_rank() {
    // How much longer each rank computes in a step.
    type Slow = fn(u64) -> f64;
    let fast: Slow = |_| 1.0;
    let in_turns: [Slow; 2] = [
        |step| if step % 2 == 0 { 1.4 } else { 1.3 },
        |step| if step % 2 == 0 { 1.3 } else { 1.4 },
    ];
    let found = |slow: [Slow; 4]| {
        let timelines = together(&slow).into_iter().enumerate().map(|(rank, timeline)| {
            let host = if rank < 2 { "fast-host" } else { "slow-host" };
            Timeline { host: Some(host.to_owned()), ..timeline }
        });
        let diagnosis = diagnose(&timelines.collect::<Vec<_>>());
        diagnosis.advice.into_iter().map(|of| (of.cause.key, of.title)).collect::<Vec<_>>()
    };
    let title = "The host slow-host (ranks 2, 3) makes the others wait, by computation";
    let expected = [("straggler", title.to_owned())];
    assert_eq!(found([fast, fast, in_turns[0], in_turns[1]]), expected);
    // With a single slow rank, this rank is named, with its host.
    let title = "Rank 3 (host slow-host) makes the others wait, by computation";
    let expected = [("straggler", title.to_owned())];
    assert_eq!(found([fast, fast, fast, |_| 1.4]), expected);
    // Ranks that are late in turns, by chance, are not stragglers.
    let nothing: [(&str, String); 0] = [];
    assert_eq!(found([in_turns[0], in_turns[1], in_turns[0], in_turns[1]]), nothing);
}

/// Ranks whose collectives end when they end on the last one.
fn together(slow: &[fn(u64) -> f64]) -> Vec<Timeline> {
    let mut last = VecDeque::new();
    // A rank that waits is later at its next work. Each round settles one more collective.
    for _ in 0..40 {
        let ranks: Vec<Timeline> = slow
            .iter()
            .enumerate()
            .map(|(rank, slow)| {
                let mut machine = Machine::new(rank);
                machine.others = last.clone();
                run(machine, Fault::None, slow)
            })
            .collect();
        let of_ranks: Vec<VecDeque<f64>> = ranks.iter().map(ends).collect();
        let latest = |at: usize| of_ranks.iter().map(|of| of[at]).fold(0.0, f64::max);
        let ends: VecDeque<f64> = (0..of_ranks[0].len()).map(latest).collect();
        if ends == last {
            return ranks;
        }
        last = ends;
    }
    panic!("the ranks have no common times");
}

/// When the collectives of a rank end, in microseconds.
fn ends(of: &Timeline) -> VecDeque<f64> {
    let kernels = of.kernels.iter().filter(|of| of.collective.is_some());
    kernels.map(|of| of.time.end_ns() as f64 / 1e3).collect()
}

#[test]
fn unequal_stages_of_a_pipeline_are_found() {
    let stage = |rank: usize, slow: f64, others: VecDeque<f64>| {
        let mut m = Machine::new(rank);
        m.others = others;
        for number in 0..STEPS {
            m.begin(&format!("ProfilerStep#{number}"), false);
            for _ in 0..8 {
                m.gemms(4, 200.0 * slow);
                m.collective(
                    "send",
                    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                    20.0,
                );
            }
            m.end();
        }
        m.timeline
    };
    let slow = stage(1, 1.6, VecDeque::new());
    let timelines = [stage(0, 1.0, ends(&slow)), slow];
    let diagnosis = diagnose(&timelines);
    let said: Vec<String> = diagnosis.advice.iter().map(|of| of.words()).collect();
    assert_eq!(found(&diagnosis), ["pipeline"], "{said:#?}");
}

#[test]
fn a_trace_without_steps_gets_no_advice_but_a_word() {
    let mut timeline = steps(0, Fault::planted("host_bound"), 1.0);
    timeline.annotations.clear();
    let diagnosis = diagnose(&[timeline]);
    assert!(diagnosis.advice.is_empty());
    assert!(diagnosis.unseen[0].contains("prof.step()"), "{:?}", diagnosis.unseen);
}
