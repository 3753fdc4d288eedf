//! Predicts whether compressing gradients would pay: the predicted time saved on the link against the time of
//! compressing, measured here on as many numbers.

use std::time::Instant;

use paceline_failure::Result;
use paceline_kernels::{Compute, cast, top_k};
use paceline_memory::{Allocator, Category, DType};
use paceline_model::Layout;
use paceline_settings::config::TrainConfig;
use paceline_strategies::TopK;

use super::Row;
use super::model::Prediction;

/// How often each kernel is timed. The fastest counts, since other load only adds time.
const REPEATS: usize = 5;

/// The times to compress all gradients once on this machine, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Rounding to half precision, before sending.
    pub narrow_ms: f64,
    /// Widening, after receiving.
    pub widen_ms: f64,
    /// Finding the largest tenth, before sending.
    pub select_ms: f64,
    /// Adding up one rank's selection, after receiving.
    pub scatter_ms: f64,
}

/// Measures how long it takes to compress the gradients of `layout`.
pub fn costs(layout: &Layout, config: &TrainConfig) -> Result<Costs> {
    let compute = Compute::new(config.threads, Allocator::new())?;
    let len = layout.trained_len();
    let count = (len as f64 * TopK::DEFAULT_K).ceil() as usize;
    let tensor = |dtype, len| compute.allocator.tensor(dtype, [len], Category::Workspace);
    let (x, rounded) = (tensor(DType::F32, len)?, tensor(DType::F16, len)?);
    let (residual, pairs) = (tensor(DType::F32, len)?, tensor(DType::I32, 2 * count)?);
    let mut costs = [f64::INFINITY; 4];
    for _ in 0..REPEATS {
        // Pseudo-random numbers stand for the gradients: many magnitudes, both signs.
        for (at, x) in x.write::<f32>()?.iter_mut().enumerate() {
            *x = ((at.wrapping_mul(2_654_435_761) >> 8) & 0xFFFF) as f32 / 65536.0 - 0.5;
        }
        residual.write::<f32>()?.fill(0.0);
        let ways: [&dyn Fn() -> paceline_kernels::Result<()>; 4] = [
            &|| cast::narrow(&compute, &x, &rounded),
            &|| cast::widen(&compute, &rounded, &x),
            &|| top_k::select(&compute, &x, &residual, &pairs),
            &|| top_k::scatter_mean(&compute, &pairs, 1, &x),
        ];
        for (cost, way) in costs.iter_mut().zip(ways) {
            let begin = Instant::now();
            way()?;
            *cost = cost.min(begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    let [narrow_ms, widen_ms, select_ms, scatter_ms] = costs;
    Ok(Costs { narrow_ms, widen_ms, select_ms, scatter_ms })
}

/// The prediction for compressed gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compression {
    /// The step with gradients that are sent in half precision.
    pub half_step_ms: f64,
    /// The step if only the largest tenth of the gradients is sent.
    pub top_k_step_ms: f64,
    /// The method that would pay, `fp16` or `top_k`, or why neither does.
    pub pays: &'static str,
}

impl Compression {
    /// Predicts the steps of `ddp` with compression. Compressing a bucket delays it and all computation after it.
    pub fn new(row: &Row, layout: &Layout, costs: &Costs) -> Self {
        let Row { network, step, .. } = row;
        // The sums of the loss are not compressed.
        let loss = |bytes: u64| network.all_reduce_ms(bytes);
        let halved = |bytes: u64| network.all_reduce_ms(bytes / 2);
        // Every rank sends pairs of index and value: 8 bytes for each selected 4-byte gradient.
        let sparse = |bytes: u64| {
            let pairs = (bytes as f64 * TopK::DEFAULT_K * 2.0) as u64;
            network.all_gather_ms(pairs * network.ranks as u64)
        };
        let all_bytes = (layout.trained_len() * size_of::<f32>()) as f64;
        let step_ms = |before_ms: f64, after_ms: f64, cost: &dyn Fn(u64) -> f64| {
            let before = |bytes: u64| before_ms * bytes as f64 / all_bytes;
            let played = step.backward.play_with(&step.plan, loss, cost, before);
            step.alone_ms + before_ms + step.exposed_ms(&played, &step.plan) + after_ms
        };
        let half_step_ms = step_ms(costs.narrow_ms, costs.widen_ms, &halved);
        let scatter_ms = costs.scatter_ms * network.ranks as f64;
        let top_k_step_ms = step_ms(costs.select_ms, scatter_ms, &sparse);
        let pays = pays(&row.prediction, half_step_ms, top_k_step_ms);
        Self { half_step_ms, top_k_step_ms, pays }
    }
}

/// The method that would pay, or why neither does. Predictions are accurate to a few percent.
fn pays(plain: &Prediction, half_step_ms: f64, top_k_step_ms: f64) -> &'static str {
    let (name, best) = if half_step_ms <= top_k_step_ms {
        ("fp16", half_step_ms)
    } else {
        ("top_k", top_k_step_ms)
    };
    if best < 0.97 * plain.step_ms {
        name
    } else if plain.exposed_ms < 0.03 * plain.step_ms {
        "neither: nothing to save"
    } else {
        "neither: they take longer"
    }
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};
    use paceline_strategies::BucketCaps;

    use super::super::Base;
    use super::super::model::{Calibration, Step};
    use super::super::network::{Network, Route};
    use super::*;
    use paceline_observe::insight::anatomy::ReadyLine;

    const COSTS: Costs = Costs { narrow_ms: 1.0, widen_ms: 1.0, select_ms: 8.0, scatter_ms: 1.0 };

    /// One parameter of 10 MB, final at 30 ms, where backward ends, in a step of 40.
    fn compressed(link: &str, costs: &Costs) -> (Prediction, Compression) {
        let mut builder = LayoutBuilder::new();
        builder.unit("a").param("weight", [2_500_000], Init::Constant(0.0));
        let layout = builder.finish(2);
        let calibration = Calibration {
            ranks: 2,
            step_ms: 40.0,
            compute_ms: 40.0,
            backward_begin_ms: 10.0,
            backward_end_ms: 30.0,
            ready: vec![ReadyLine { param: "a.weight".to_owned(), ready_ms: 30.0 }],
            ..Calibration::default()
        };
        let link = link.parse().unwrap();
        let network = Network { ranks: 2, link, hosts: None, way: Route::Direct };
        let caps = BucketCaps::new(25 << 20);
        let step = Step::new(&calibration, &layout, caps).unwrap();
        let layout = layout.into();
        let base = Base { layout, calibration, steps: Vec::new(), knows_gradients: true };
        let row = Row::new(90.0, "x", &base, step, network);
        let (plain, compression) = (row.prediction, Compression::new(&row, &base.layout, costs));
        (plain, compression)
    }

    #[test]
    fn half_the_bytes_pay_on_a_slow_link() {
        let (plain, compression) = compressed("1GB/s,0us", &COSTS);
        assert!((plain.step_ms - 50.0).abs() < 1e-3, "{plain:?}");
        // 5 ms on the link, 1 ms before and 1 after; the largest tenth: 2 ms, and 8 before, 2 after.
        assert!((compression.half_step_ms - 47.0).abs() < 1e-3, "{compression:?}");
        assert!((compression.top_k_step_ms - 52.0).abs() < 1e-3, "{compression:?}");
        assert_eq!(compression.pays, "fp16");
    }

    #[test]
    fn and_do_not_on_a_fast_one_or_with_slow_kernels() {
        let (_, compression) = compressed("nvlink4", &COSTS);
        assert_eq!(compression.pays, "neither: nothing to save");
        let slow = Costs { narrow_ms: 9.0, select_ms: 90.0, ..COSTS };
        let (_, compression) = compressed("1GB/s,0us", &slow);
        assert_eq!(compression.pays, "neither: they take longer");
    }
}
