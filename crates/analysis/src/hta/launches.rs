//! Statistics of kernel launches.

use super::work::{Item, Work};
use super::{Source, Summary};
use crate::timeline::{LAUNCHES, NameId};

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
    /// Calls longer than 50 us, as in HTA.
    pub slow_calls: u64,
    /// Delays longer than 100 us, as in HTA.
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

/// A launch, with times in nanoseconds.
struct Launched {
    kernel: NameId,
    cpu_ns: i64,
    gpu_ns: i64,
    delay_ns: i64,
}

impl Launched {
    fn is_slow(&self) -> bool {
        self.cpu_ns > 50_000
    }

    fn is_short(&self) -> bool {
        !self.is_slow() && self.gpu_ns < self.cpu_ns
    }
}

impl LaunchStats {
    pub(super) fn of(work: &Work) -> Option<Self> {
        if work.source == Source::Operators {
            return None;
        }
        let names = &work.timeline.names;
        let is_launch = |name| LAUNCHES.contains(&name) && !NO_LAUNCHES.contains(&name);
        let counts: Vec<bool> = names.iter().map(is_launch).collect();
        let launched = |item: &Item| {
            let launch = &work.timeline.launches[item.launch? as usize];
            let call = work.rounded(launch.time);
            let delay_ns = (item.start_ns - call.start_ns - call.dur_ns).max(0);
            let (kernel, cpu_ns, gpu_ns) = (item.name, call.dur_ns, item.dur_ns);
            counts[launch.name.0 as usize].then_some(Launched { kernel, cpu_ns, gpu_ns, delay_ns })
        };
        let mut all: Vec<Launched> = work.items.iter().filter_map(launched).collect();
        let summary = |part: fn(&Launched) -> i64| {
            Summary::of(all.iter().map(|of| part(of) as f64).collect())
        };
        let count =
            |is_it: &dyn Fn(&Launched) -> bool| all.iter().filter(|of| is_it(of)).count() as u64;
        let stats = Self {
            cpu_ns: summary(|of| of.cpu_ns)?,
            gpu_ns: summary(|of| of.gpu_ns)?,
            delay_ns: summary(|of| of.delay_ns)?,
            short_kernels: count(&Launched::is_short),
            slow_calls: count(&Launched::is_slow),
            long_delays: count(&|of| of.delay_ns > 100_000),
            by_kernel: Vec::new(),
        };
        all.sort_by_key(|of| of.kernel);
        let mut kernels: Vec<&[Launched]> = all.chunk_by(|a, b| a.kernel == b.kernel).collect();
        let delays_ns = |of: &[Launched]| of.iter().map(|of| i128::from(of.delay_ns)).sum::<i128>();
        let name = |of: &[Launched]| names.text(of[0].kernel);
        kernels.sort_by(|a, b| delays_ns(b).cmp(&delays_ns(a)).then_with(|| name(a).cmp(name(b))));
        let by_kernel = kernels.into_iter().map(|of| {
            let mean = |part: fn(&Launched) -> i64| {
                of.iter().map(|of| part(of) as f64).sum::<f64>() / of.len() as f64
            };
            NameLaunches {
                name: name(of).to_owned(),
                launches: of.len() as u64,
                cpu_mean_ns: mean(|of| of.cpu_ns),
                gpu_mean_ns: mean(|of| of.gpu_ns),
                delay_mean_ns: mean(|of| of.delay_ns),
                delay_max_ns: of.iter().map(|of| of.delay_ns).max().unwrap_or_default(),
                short: of.iter().filter(|of| of.is_short()).count() as u64,
            }
        });
        Some(Self { by_kernel: by_kernel.collect(), ..stats })
    }
}
