//! Operators and modules: how often they were called, and their time on host and device; and the place that launched each kernel.
//!
//! Timelines go in. Sums by name come out, over all ranks, as TensorBoard's plugin for PyTorch defines them. *Total* is the time from begin to end, and
//! the work of the device that was launched in between. *Self* leaves out the operators, modules and spans within and, on the host, calls of the
//! runtime library; the device's time of a module itself is that of all operators that no inner module calls. Two operators of one name, one of
//! which is all that the other calls, count once. Source: `node.py`, `op_tree.py` and `module_op.py` of torch_tb_profiler.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use crate::doctor::code::Code;
use crate::hta::{backend_of, launched};
use crate::steps;
use crate::timeline::{DeviceWork, NameId, TimeRange, Timeline, TrackId};

/// The beginning of the names of modules in traces.
pub(crate) const MODULE: &str = "nn.Module: ";

/// All calls of an operator or a module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CallSum {
    pub(crate) name: String,
    pub(crate) calls: u64,
    /// In nanoseconds: self and total time on the device, self and total time on the host.
    pub(crate) times: [i64; 4],
}

/// The innermost operator and the line of Python that launched most of the time of a kernel.
pub(crate) type Launcher = (Option<String>, Option<String>);

/// The calls of some ranks.
#[derive(Default)]
pub(crate) struct Calls {
    /// Steps, over all ranks.
    pub(crate) steps: u64,
    pub(crate) operators: Vec<CallSum>,
    pub(crate) modules: Vec<CallSum>,
    /// By the name of the kernel.
    pub(crate) launchers: BTreeMap<String, Launcher>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    Operator,
    Module,
    /// It is no row of a table, and its time is not that of the operators around it.
    #[default]
    Span,
    /// A call of the runtime library.
    Launch,
}

#[derive(Default)]
struct Called {
    kind: Kind,
    name: NameId,
    lane: TrackId,
    time: TimeRange,
    /// Its index among the launches.
    launch: usize,
    around: Option<usize>,
    /// How many others it calls, without those of the runtime library.
    num_within: u32,
    within_ns: i64,
    /// Self and total time on the device.
    device_ns: [i64; 2],
}

/// The calls of a rank, each after the one around it.
fn nested(timeline: &Timeline) -> Vec<Called> {
    let is_span = |name: &str| {
        let is_of_loop = ["enumerate(DataLoader)#", "Optimizer.", "ProfilerStep"];
        is_of_loop.iter().any(|begin| name.starts_with(begin)) || backend_of(name).is_some()
    };
    let are_spans: Vec<bool> = timeline.names.iter().map(is_span).collect();
    let mut all = Vec::new();
    for of in &timeline.operators {
        let kind = if are_spans[of.name.0 as usize] { Kind::Span } else { Kind::Operator };
        all.push(Called { kind, name: of.name, lane: of.lane, time: of.time, ..Called::default() });
    }
    let spans = timeline.annotations.iter().filter(|of| !of.is_device).map(|of| (Kind::Span, of));
    for (kind, of) in timeline.modules.iter().map(|of| (Kind::Module, of)).chain(spans) {
        all.push(Called { kind, name: of.name, lane: of.lane, time: of.time, ..Called::default() });
    }
    for (launch, of) in timeline.launches.iter().enumerate() {
        let (kind, lane, time) = (Kind::Launch, of.lane, of.time);
        all.push(Called { kind, launch, lane, time, ..Called::default() });
    }
    all.sort_by_key(|of| (of.lane, of.time.start_ns, Reverse(of.time.end_ns())));
    let mut open: Vec<usize> = Vec::new();
    for at in 0..all.len() {
        let Called { kind, lane, time, .. } = all[at];
        let is_over =
            |of: &mut usize| all[*of].lane != lane || all[*of].time.end_ns() <= time.start_ns;
        while open.pop_if(is_over).is_some() {}
        all[at].around = open.last().copied();
        open.push(at);
        if let Some(outer) = all[at].around.map(|around| &mut all[around]) {
            add(&mut outer.within_ns, time.dur_ns);
            outer.num_within += u32::from(kind != Kind::Launch);
        }
    }
    all
}

fn add(sum: &mut i64, ns: i64) {
    *sum = sum.saturating_add(ns);
}

impl Calls {
    /// The calls of all ranks. Those of paceline are no operators.
    pub(crate) fn of(timelines: &[Timeline]) -> Self {
        let mut all = Self::default();
        let mut sums: [BTreeMap<&str, CallSum>; 2] = Default::default();
        for timeline in timelines.iter().filter(|of| of.run_facts.is_empty()) {
            all.steps += steps::of(timeline).len() as u64;
            let mut calls = nested(timeline);
            all.add_kernels(timeline, &mut calls);
            close(&mut calls);
            for Called { kind, name, time, within_ns, device_ns: [own, device], .. } in calls {
                let name = timeline.names.text(name);
                let (table, name) = match kind {
                    Kind::Operator => (0, name),
                    Kind::Module => (1, name.strip_prefix(MODULE).unwrap_or(name)),
                    Kind::Span | Kind::Launch => continue,
                };
                let sum = sums[table].entry(name).or_default();
                sum.calls += 1;
                let times = [own, device, time.dur_ns.saturating_sub(within_ns), time.dur_ns];
                sum.times.iter_mut().zip(times).for_each(|(sum, ns)| add(sum, ns));
            }
        }
        let [operators, modules] = sums.map(|sums| {
            let named = |(name, sum): (&str, CallSum)| CallSum { name: name.to_owned(), ..sum };
            let mut sums: Vec<CallSum> = sums.into_iter().map(named).collect();
            sums.sort_by_key(|of| Reverse((of.times[0], of.times[2])));
            sums
        });
        Self { operators, modules, ..all }
    }

    /// Adds the time of each piece of the device's work to the call that launched it, and finds the launchers of kernels.
    fn add_kernels(&mut self, timeline: &Timeline, all: &mut [Called]) {
        let (calls, code) = (launched(timeline), Code::of(timeline));
        let launches = all.iter().enumerate().filter(|(_, of)| of.kind == Kind::Launch);
        let places: HashMap<usize, usize> = launches.map(|(at, of)| (of.launch, at)).collect();
        let mut times: BTreeMap<(NameId, Option<NameId>, Option<NameId>), i64> = BTreeMap::new();
        for kernel in timeline.kernels.iter().filter(|of| of.work != DeviceWork::Sync) {
            let launch = kernel.correlation.and_then(|of| calls.get(&of));
            let Some(&place) = launch.and_then(|at| places.get(&(*at as usize))) else { continue };
            let around = |at: &usize| all[*at].around;
            let outer = || std::iter::successors(around(&place), around);
            let operator =
                outer().find(|at| all[*at].kind == Kind::Operator).map(|at| all[at].name);
            let line = code.line(all[place].lane, all[place].time.start_ns);
            let caller = outer().find(|at| all[*at].kind != Kind::Span);
            if let Some(at) = caller {
                add(&mut all[at].device_ns[0], kernel.time.dur_ns);
            }
            add(times.entry((kernel.name, operator, line)).or_default(), kernel.time.dur_ns);
        }
        let mut times: Vec<_> = times.into_iter().collect();
        times.sort_by_key(|of| Reverse(of.1));
        let text = |of: NameId| timeline.names.text(of).to_owned();
        for ((kernel, operator, line), _) in times {
            let launcher = || (operator.map(text), line.map(text));
            self.launchers.entry(text(kernel)).or_insert_with(launcher);
        }
    }
}

/// Adds up the device's time of all that each call calls. An operator that is all that one of the same name calls becomes a span.
fn close(all: &mut [Called]) {
    for at in (0..all.len()).rev() {
        let Called { kind, name, around, num_within, within_ns, device_ns: [own, inner], .. } =
            all[at];
        let total = own.saturating_add(inner);
        all[at].device_ns[1] = total;
        let Some(outer) = around.map(|around| &mut all[around]) else { continue };
        if (kind, name, 1) == (outer.kind, outer.name, outer.num_within) && kind == Kind::Operator {
            (outer.within_ns, outer.num_within, outer.device_ns) =
                (within_ns, num_within, [own, inner]);
            all[at].kind = Kind::Span;
            continue;
        }
        // All but other modules belongs to a module itself.
        let of_module = match (outer.kind, kind) {
            (Kind::Module | Kind::Span, Kind::Operator) => total,
            (Kind::Module | Kind::Span, Kind::Span) => own,
            _ => 0,
        };
        add(&mut outer.device_ns[0], of_module);
        add(&mut outer.device_ns[1], total.saturating_sub(of_module));
    }
}

/// The part of a kernel's name that says what it computes: `CUDAFunctor_add` of an element-wise kernel, `MeanOps` of a reduction.
pub(crate) fn functor(kernel: &str) -> Option<&str> {
    let arguments = kernel.split_once('<')?.1;
    let mut words =
        arguments.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let is_functor = |word: &&str| {
        word.contains("Functor")
            || word.ends_with("_kernel_cuda")
            || (word.ends_with("_kernel_impl") && *word != "gpu_kernel_impl")
            || word.ends_with("Ops")
    };
    words.rfind(is_functor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::parse;

    /// Events of one thread: category, name, begin and length in us, correlation.
    fn calls(events: &[(&str, &str, [u64; 2], u64)]) -> Calls {
        let event = |(category, name, [ts, dur], correlation): &(&str, &str, [u64; 2], u64)| {
            let args = if *correlation > 0 {
                format!("\"correlation\":{correlation},\"stream\":7")
            } else {
                String::new()
            };
            let tid = if *category == "kernel" { 7 } else { 1 };
            format!(
                "{{\"ph\":\"X\",\"cat\":\"{category}\",\"name\":\"{name}\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},\"dur\":{dur},\"args\":{{{args}}}}}"
            )
        };
        let events: Vec<String> = events.iter().map(event).collect();
        Calls::of(&[
            parse(format!("{{\"traceEvents\": [{}]}}", events.join(",")).as_bytes()).unwrap()
        ])
    }

    fn sums(all: &[CallSum]) -> Vec<(&str, u64, [i64; 4])> {
        let sum = |of: &CallSum| (of.calls, of.times.map(|ns| ns / 1000));
        all.iter().map(|of| (of.name.as_str(), sum(of).0, sum(of).1)).collect()
    }

    #[test]
    fn self_times_are_without_what_is_called() {
        let add =
            "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>";
        let found = calls(&[
            ("python_function", "nn.Module: Linear_0", [0, 100], 0),
            ("cpu_op", "aten::linear", [10, 80], 0),
            ("cpu_op", "aten::addmm", [20, 50], 0),
            ("cuda_runtime", "cudaLaunchKernel", [30, 10], 5),
            ("cuda_runtime", "cudaLaunchKernel", [75, 5], 6),
            ("user_annotation", "mine", [81, 4], 0),
            // One that calls only another of its name.
            ("cpu_op", "aten::to", [200, 20], 0),
            ("cpu_op", "aten::to", [205, 10], 0),
            ("cpu_op", "aten::copy_", [206, 4], 0),
            ("cuda_runtime", "cudaLaunchKernel", [211, 2], 7),
            ("cpu_op", "Optimizer.step#SGD.step", [300, 20], 0),
            ("kernel", "gemm", [1000, 300], 5),
            ("kernel", add, [1300, 40], 6),
            ("kernel", "cast", [1400, 30], 7),
        ]);
        let expected = [
            ("aten::addmm", 1, [300, 300, 40, 50]),
            ("aten::linear", 1, [40, 340, 21, 80]),
            ("aten::to", 1, [30, 30, 14, 20]),
            ("aten::copy_", 1, [0, 0, 4, 4]),
        ];
        assert_eq!(sums(&found.operators), expected);
        assert_eq!(sums(&found.modules), [("Linear_0", 1, [340, 340, 20, 100])]);
        assert_eq!(found.launchers["gemm"].0.as_deref(), Some("aten::addmm"));
        assert_eq!(found.launchers[add].0.as_deref(), Some("aten::linear"));
    }

    #[test]
    fn a_functor_is_the_innermost_one() {
        for (kernel, expected) in [
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul> >(int)",
                Some("CUDAFunctor_add"),
            ),
            (
                "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> > >",
                Some("MulFunctor"),
            ),
            (
                "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}> >",
                Some("direct_copy_kernel_cuda"),
            ),
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, unsigned int, float, 4> >",
                Some("MeanOps"),
            ),
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::threshold_kernel_impl<float>(at::TensorIterator&, float, float)::{lambda(float, float)#1} >",
                Some("threshold_kernel_impl"),
            ),
            ("ampere_sgemm_128x64_tn", None),
        ] {
            assert_eq!(functor(kernel), expected, "{kernel}");
        }
    }
}
