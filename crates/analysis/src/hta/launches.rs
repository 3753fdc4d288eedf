//! Statistics of kernel launches.

use super::counters::ENQUEUE;
use super::work::Work;
use super::{Source, Summary};

/// All launches that led to a kernel: HTA's launch statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchStats {
    /// Duration of the calls on the host, in nanoseconds.
    pub cpu_ns: Summary,
    /// Duration of the kernels, in nanoseconds.
    pub gpu_ns: Summary,
    /// From the end of the call to the start of the kernel, at least 0, in nanoseconds.
    pub delay_ns: Summary,
    /// Kernels that were shorter than the call that launched them, without those of slow calls.
    pub short_kernels: u64,
    /// Calls longer than [`Options::slow_call_ns`](super::Options).
    pub slow_calls: u64,
    /// Delays longer than [`Options::long_delay_ns`](super::Options).
    pub long_delays: u64,
    /// Statistics by kernel, largest sum of delays first.
    pub by_kernel: Vec<NameLaunches>,
}

/// The launches of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct NameLaunches {
    /// The kernel's name.
    pub name: String,
    /// How often it was launched.
    pub launches: u64,
    /// Mean duration of the call, in nanoseconds.
    pub cpu_mean_ns: f64,
    /// Mean duration of the kernel, in nanoseconds.
    pub gpu_mean_ns: f64,
    /// Mean delay, in nanoseconds.
    pub delay_mean_ns: f64,
    /// Longest delay, in nanoseconds.
    pub delay_max_ns: i64,
    /// How many of its kernels were shorter than their call, without those of slow calls.
    pub short: u64,
}

/// The calls that put work into a queue and that HTA does not count as launches.
const NO_LAUNCHES: [&str; 2] = ["cuLaunchKernel", "hipMemcpyWithStream"];

impl LaunchStats {
    pub(super) fn of(work: &Work) -> Option<Self> {
        if work.source == Source::Operators {
            return None;
        }
        let names = &work.timeline.names;
        let is_launch = |name| ENQUEUE.contains(&name) && !NO_LAUNCHES.contains(&name);
        let counts: Vec<bool> = names.iter().map(is_launch).collect();
        let options = work.options;
        let (mut cpu, mut gpu, mut delays) = (Vec::new(), Vec::new(), Vec::new());
        let (mut short_kernels, mut slow_calls, mut long_delays) = (0, 0, 0);
        let mut places: Vec<Option<NameLaunches>> = vec![None; names.count()];
        for item in &work.items {
            let Some(launch) = item.launch.map(|launch| &work.timeline.launches[launch as usize])
            else {
                continue;
            };
            if !counts[launch.name.0 as usize] {
                continue;
            }
            let call = work.rounded(launch.time);
            let delay_ns = (item.start_ns - call.start_ns - call.dur_ns).max(0);
            let is_slow = call.dur_ns > options.slow_call_ns;
            let is_short = !is_slow && item.dur_ns < call.dur_ns;
            slow_calls += u64::from(is_slow);
            short_kernels += u64::from(is_short);
            long_delays += u64::from(delay_ns > options.long_delay_ns);
            cpu.push(call.dur_ns as f64);
            gpu.push(item.dur_ns as f64);
            delays.push(delay_ns as f64);
            let of_name = places[item.name.0 as usize].get_or_insert_with(|| NameLaunches {
                name: names.text(item.name).to_owned(),
                launches: 0,
                cpu_mean_ns: 0.0,
                gpu_mean_ns: 0.0,
                delay_mean_ns: 0.0,
                delay_max_ns: 0,
                short: 0,
            });
            // The fields for means hold sums until all items are added.
            of_name.launches += 1;
            of_name.cpu_mean_ns += call.dur_ns as f64;
            of_name.gpu_mean_ns += item.dur_ns as f64;
            of_name.delay_mean_ns += delay_ns as f64;
            of_name.delay_max_ns = of_name.delay_max_ns.max(delay_ns);
            of_name.short += u64::from(is_short);
        }
        let mut by_kernel: Vec<NameLaunches> = places.into_iter().flatten().collect();
        by_kernel.sort_by(|a, b| {
            b.delay_mean_ns.total_cmp(&a.delay_mean_ns).then_with(|| a.name.cmp(&b.name))
        });
        for of_name in &mut by_kernel {
            let launches = of_name.launches as f64;
            of_name.cpu_mean_ns /= launches;
            of_name.gpu_mean_ns /= launches;
            of_name.delay_mean_ns /= launches;
        }
        Some(Self {
            cpu_ns: Summary::of(cpu)?,
            gpu_ns: Summary::of(gpu)?,
            delay_ns: Summary::of(delays)?,
            short_kernels,
            slow_calls,
            long_delays,
            by_kernel,
        })
    }
}
