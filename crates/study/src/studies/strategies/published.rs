//! The figures of a published comparison of strategies, as a table of facts.
//!
//! Source: two articles, "Implement data parallelism"
//! (<https://dudeperf3ct.github.io/posts/implement_data_parallelism/>) and "Implement sharding"
//! (<https://dudeperf3ct.github.io/posts/implement_sharding/>). All figures are means over the ranks. [`MEASURED_ON`] names
//! model, data and hardware. Nothing is computed here.

/// What the figures were measured on.
pub(super) const MEASURED_ON: &str = "SmolLM2-360M-Instruct on Yelp reviews in f32, 2 ranks with a GPU each (Nvidia L4), 7 reviews per batch and rank \
     (dudeperf3ct.github.io, \"Implement data parallelism\" and \"Implement sharding\")";

/// The ranks of the published runs.
pub(super) const WORLD_SIZE: u64 = 2;

/// The parameters of the published model: SmolLM2-360M with a head for five classes.
pub(super) const NUM_PARAMS: u64 = 361_825_920;

/// What a trace of a data parallel run shows, in percent as Holistic Trace Analysis defines it, and the number of
/// all-reduces in the trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataParallel {
    pub(super) choice: &'static str,
    /// The part of the trace in which some kernel computes.
    pub(super) compute_pct: f64,
    /// The part in which kernels run of which none computes: communication, and waiting for another rank within it.
    pub(super) non_compute_pct: f64,
    /// The part in which no kernel runs.
    pub(super) idle_pct: f64,
    /// The part of the communication during which a kernel computes.
    pub(super) overlap_pct: f64,
    /// The sum of the times of communication kernels, in percent of that of all kernels.
    pub(super) overhead_pct: f64,
    pub(super) all_reduces: f64,
}

/// The figures in the order of the fields.
const fn of(choice: &'static str, figures: [f64; 6]) -> DataParallel {
    let [compute_pct, non_compute_pct, idle_pct, overlap_pct, overhead_pct, all_reduces] = figures;
    DataParallel {
        choice,
        compute_pct,
        non_compute_pct,
        idle_pct,
        overlap_pct,
        overhead_pct,
        all_reduces,
    }
}

/// The six data parallel choices.
pub(super) static DATA_PARALLEL: [DataParallel; 6] = [
    of("simple_ddp", [67.14, 30.54, 2.33, 0.0, 30.78, 582.0]),
    of("simple_ddp_ga", [81.58, 14.64, 3.79, 0.0, 14.73, 291.0]),
    of("simple_ddp_hook", [80.30, 15.93, 3.78, 0.0, 16.05, 291.0]),
    of("simple_ddp_async", [81.89, 14.32, 3.79, 0.07, 14.43, 291.0]),
    of("bucket_ddp_async", [80.59, 15.73, 3.68, 9.63, 16.60, 44.0]),
    of("ddp", [71.13, 26.95, 1.92, 57.16, 35.83, 90.5]),
];

/// The memory of a rank in MiB, and the time of a batch. `None` where the articles' summary has no figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharding {
    pub(super) choice: &'static str,
    pub(super) model_mb: Option<f64>,
    pub(super) gradient_mb: Option<f64>,
    pub(super) optimizer_mb: Option<f64>,
    pub(super) batch_s: Option<f64>,
}

const WHOLE: Option<f64> = Some(1380.26);
const HALF: Option<f64> = Some(690.12);

/// The memory of model, gradients and optimizer, and the time.
const fn shard(
    choice: &'static str,
    [model_mb, gradient_mb, optimizer_mb]: [Option<f64>; 3],
    batch_s: Option<f64>,
) -> Sharding {
    Sharding { choice, model_mb, gradient_mb, optimizer_mb, batch_s }
}

/// The seven sharding choices. `zero1`, `zero2` and `zero3` each divide what the one before divides, and one thing more.
pub(super) static SHARDING: [Sharding; 7] = [
    shard("baseline", [WHOLE, WHOLE, Some(2760.51)], Some(1.785)),
    shard("zero1", [WHOLE, WHOLE, WHOLE], Some(1.785)),
    shard("zero2", [WHOLE, HALF, WHOLE], Some(2.321)),
    shard("zero3", [HALF, HALF, WHOLE], Some(2.458)),
    shard("sharded1", [None, None, None], Some(1.701)),
    shard("sharded2", [None, None, None], None),
    shard("sharded3", [None, None, None], Some(2.553)),
];
