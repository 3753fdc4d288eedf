//! `memory-layout`: images as NHWC or as NCHW, in whole steps and operation by operation.
//!
//! Runs differ only in the layout. Each operation on images, and the conversion between layouts, is also timed alone, in turn.

use std::path::Path;
use std::time::Instant;

use paceline_analysis::limit::{DEFINITION, Speeds};
use paceline_failure::Result;
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::{Compute, ImageLayout, conv_relu_pool, layout, peak};
use paceline_memory::{Allocator, Category, DType, Shape, Tensor};
use paceline_table::stats::median;
use paceline_table::table::{Columns, Table};
use paceline_trace::{Event, Recorder, Track};

use super::args::LabArgs;
use super::{Experiment, Flags, Made, models, runs};
use crate::noise::Effect;
use crate::report::Found;
use crate::scene::Scene;
use crate::spec::{self, Spec};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "memory-layout",
    about: "images as NHWC and as NCHW, in whole steps and operation by operation",
    question: "Which layout of images is faster, in which operation, and what does it cost to convert?",
    set_here: &[("layout", "the experiment varies it")],
    figures: &["forward_ms", "backward_ms", "mfu_pct"],
    scenes,
    found,
};

/// The networks: name, and flags.
const NETWORKS: [(&str, Flags); 3] = [
    ("28x28x1, channels 32 64 128", &[("channels", "32 64 128")]),
    ("32x32x3, channels 16 32", &[("image", "32 32 3"), ("channels", "16 32"), ("hidden", "64")]),
    (
        "32x32x3, channels 64 128 256",
        &[("image", "32 32 3"), ("channels", "64 128 256"), ("batch-size", "32")],
    ),
];
/// With any of these flags the network is the user's own.
const OWN: [&str; 4] = ["channels", "image", "data", "recipe"];
/// The convolutions: height and width, channels in and out.
const IMAGES: [([usize; 2], [usize; 2]); 7] = [
    ([28, 28], [1, 32]),
    ([32, 32], [3, 32]),
    ([16, 16], [16, 16]),
    ([16, 16], [64, 64]),
    ([16, 16], [256, 256]),
    ([7, 7], [128, 128]),
    ([56, 56], [64, 64]),
];

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let common = runs(args, &[("nproc", "1"), ("steps", "20"), ("warmup-steps", "3")]);
    let networks = models(&common, has_own_network(args), &NETWORKS);
    let scene = |(name, base): (String, Spec)| {
        let add = |scene: Scene, layout: ImageLayout| {
            scene.with(layout.name(), base.with("layout", layout.name()))
        };
        ImageLayout::ALL.into_iter().fold(Scene::new(name), add)
    };
    Ok(networks.into_iter().map(scene).collect())
}

fn has_own_network(args: &LabArgs) -> bool {
    OWN.iter().any(|key| args.train.0.has(key))
}

/// The convolutions to time: the ones of the user's network, or [`IMAGES`].
fn convolutions(made: &Made) -> Result<Vec<Conv2d>> {
    if !has_own_network(made.args) {
        let conv = |([h, w], [c_in, c_out]): &([usize; 2], [usize; 2])| {
            Conv2d::same3x3(*h, *w, *c_in, *c_out)
        };
        return Ok(IMAGES.iter().map(conv).collect());
    }
    let config = spec::resolve(&made.scenes[0].variants[0].spec)?;
    let dataset = config.data.open_train(config.seed)?;
    let model = config.model.build(dataset.as_ref(), config.world_size)?;
    let image = dataset.input_shape();
    let kernels = model.layout.params().iter().filter_map(|param| match *param.shape.dims() {
        [_, _, c_in, c_out] => Some((c_in, c_out)),
        _ => None,
    });
    // A pool that halves the image follows each convolution.
    let conv = |(at, (c_in, c_out))| Conv2d::same3x3(image[0] >> at, image[1] >> at, c_in, c_out);
    Ok(kernels.enumerate().map(conv).collect())
}

/// The cost of an operation on a batch of images, in both layouts.
struct Cost {
    images: String,
    batch: usize,
    operation: &'static str,
    /// Whether it is a product by itself.
    is_product: bool,
    /// Its limit in milliseconds, in either layout.
    limit_ms: f64,
    /// Milliseconds as NHWC and as NCHW; for the conversion, to NHWC and to NCHW.
    ms: [f64; 2],
    /// The speed as NCHW to that as NHWC.
    effect: Option<Effect>,
}

/// Approximate floating-point operations of a batch: enough for milliseconds.
const BATCH_FLOP: f64 = 0.25e9;
/// The most images of a batch.
const MOST_IMAGES: usize = 64;
/// The most calls whose work is looked at.
const MOST_CALLS: usize = 1024;
/// The operation whose layouts are what it converts to.
const CONVERSION: &str = "conversion";
/// How often each operation is timed in each layout.
const REPETITIONS: usize = 21;

fn found(made: &Made) -> Result<Vec<Found>> {
    let mut recorder = Recorder::new();
    let track = recorder.track("lab", MOST_CALLS);
    let compute = Compute::new(1, Allocator::new())?.recorded(track.clone(), Vec::new());
    let speeds = Speeds {
        flop_per_s: peak::of_threads(&compute, DType::F32),
        bytes_per_s: peak::memory_bytes_per_s(&compute),
    };
    let recorded = (&recorder, &*track, speeds);
    let (mut costs, mut lines) = (Vec::new(), Vec::new());
    for conv in convolutions(made)? {
        let of_conv = costs_of(&compute, recorded, conv)?;
        let share = |at: usize| {
            let products = of_conv.iter().filter(|cost| cost.is_product);
            let (limit, ms) = products
                .fold((0.0, 0.0), |(limit, ms), cost| (limit + cost.limit_ms, ms + cost.ms[at]));
            100.0 * limit / ms
        };
        let (nhwc, nchw) = (share(0), share(1));
        lines.push(format!(
            "{}: the products reach {nhwc:.0} % of their limit as NHWC and {nchw:.0} % as NCHW, {:.0} % of that",
            of_conv[0].images,
            100.0 * nchw / nhwc
        ));
        costs.extend(of_conv);
    }
    if costs.is_empty() {
        return Ok(Vec::new());
    }
    lines.push(format!(
        "One thread makes {:.1} GFLOP/s in f32 and moves {:.1} GB/s of memory, measured now.",
        speeds.flop_per_s / 1e9,
        speeds.bytes_per_s / 1e9
    ));
    let definition = format!(
        "One thread, f32, both layouts in turn; medians of {REPETITIONS} repetitions. The conversion is that of \
         the output, to NHWC and to NCHW. The speed has its 95 % interval. {DEFINITION}"
    );
    let table = table(&costs);
    Ok(vec![Found {
        lines,
        ..Found::new("operations", "Operation by operation", definition, table)
    }])
}

/// A row for each operation.
fn table(costs: &[Cost]) -> Table {
    let (ms, share) = (("ms", 3), ("%", 0));
    let pct = |of: &Cost, at: usize| 100.0 * of.limit_ms / of.ms[at];
    Columns::new()
        .add("name", "channels and operation", ("", 0), "", |of: &Cost| {
            format!("{}: {}", of.images.trim_end_matches(" channels"), of.operation)
        })
        .add("images", "", ("", 0), "", |of| of.images.clone())
        .add("operation", "", ("", 0), "", |of| of.operation)
        .add("batch", "images", ("", 0), "", |of| of.batch)
        .add("nhwc_ms", "NHWC", ms, "", |of| of.ms[0])
        .add("nchw_ms", "NCHW", ms, "", |of| of.ms[1])
        .add("effect", "NCHW's speed", ("", 0), "", |of| of.effect.map(|effect| effect.words()))
        .add("limit_ms", "", ms, "", |of| of.limit_ms)
        .add("nhwc_pct", "NHWC of limit", share, "", move |of| pct(of, 0))
        .add("nchw_pct", "NCHW of limit", share, "", move |of| pct(of, 1))
        .table(costs)
}

/// The tensors of a convolution and a 2x2 max-pool in one layout. Gradients overwrite values: only the time matters.
struct Images {
    conv: Conv2d,
    pool: MaxPool2d,
    input: Tensor,
    output: Tensor,
    pooled: Tensor,
    /// The places of the largest values of the pool.
    winners: Tensor,
    weight: Tensor,
    bias: Tensor,
}

/// Numbers between -1 and 1, none zero.
fn filled(compute: &Compute, shape: impl Into<Shape>) -> Result<Tensor> {
    let tensor = compute.allocator.tensor(DType::F32, shape, Category::Data)?;
    for (at, value) in tensor.write::<f32>()?.iter_mut().enumerate() {
        *value = (at * 2_654_435_761 % 1_000_003) as f32 / 500_001.5 - 1.0;
    }
    Ok(tensor)
}

impl Images {
    fn new(compute: &Compute, conv: Conv2d, layout: ImageLayout, batch: usize) -> Result<Self> {
        let conv = Conv2d { layout, ..conv };
        let Conv2d { height, width, c_out: channels, .. } = conv;
        let pool = MaxPool2d { height, width, channels, window: 2, stride: 2, layout };
        let winners =
            compute.allocator.tensor(DType::U8, pool.output_shape(batch), Category::Data)?;
        winners.fill_zero()?;
        Ok(Self {
            input: filled(compute, conv.input_shape(batch))?,
            output: filled(compute, conv.output_shape(batch))?,
            pooled: filled(compute, pool.output_shape(batch))?,
            winners,
            weight: filled(compute, conv.weight_shape())?,
            bias: filled(compute, [channels])?,
            conv,
            pool,
        })
    }
}

/// Runs an operation.
type Operation = fn(&Compute, &Images) -> paceline_kernels::Result<()>;

/// The operations, and whether each is a product by itself.
const OPERATIONS: [(&str, bool, Operation); 6] = [
    ("forward", true, |c, i| conv2d::forward(c, &i.conv, &i.input, &i.weight, &i.bias, &i.output)),
    ("with ReLU and pool", false, |c, i| {
        conv_relu_pool::forward(c, &i.conv, &i.input, &i.weight, &i.bias, &i.pooled, &i.winners)
    }),
    ("input gradient", true, |c, i| {
        conv2d::backward_input(c, &i.conv, &i.weight, &i.output, &i.input)
    }),
    ("weight gradient", true, |c, i| {
        conv2d::backward_weight(c, &i.conv, &i.input, &i.output, &i.weight, &i.bias, false)
    }),
    ("pool", false, |c, i| pool2d::forward(c, &i.pool, &i.output, &i.pooled, &i.winners)),
    ("pool gradient", false, |c, i| pool2d::backward(c, &i.pool, &i.winners, &i.pooled, &i.output)),
];

/// Times all operations on images of this convolution. A recorder that is off says what each of them has to do.
fn costs_of(
    compute: &Compute,
    (recorder, track, speeds): (&Recorder, &Track, Speeds),
    conv: Conv2d,
) -> Result<Vec<Cost>> {
    let Conv2d { height, width, c_in, c_out, .. } = conv;
    let flop = 2.0 * (height * width * 9 * c_in * c_out) as f64;
    let batch = ((BATCH_FLOP / flop).round() as usize).clamp(1, MOST_IMAGES);
    let [nhwc, nchw] = ImageLayout::ALL.map(|layout| Images::new(compute, conv, layout, batch));
    let layouts = [nhwc?, nchw?];
    let images = format!("{height}x{width}, {c_in} to {c_out} channels");
    let cost = |operation, is_product, run: &dyn Fn(usize) -> paceline_kernels::Result<()>| {
        let (ms, effect) = in_turn(run)?;
        recorder.set_on(true);
        run(0)?;
        recorder.set_on(false);
        let limit_ms = match track.events().last() {
            Some(Event::Kernel { shapes, .. }) => speeds.limit_ns(shapes.flop, shapes.bytes) / 1e6,
            _ => f64::NAN,
        };
        let effect = effect.filter(|_| operation != CONVERSION);
        Ok(Cost { images: images.clone(), batch, operation, is_product, limit_ms, ms, effect })
    };
    let one = |&(operation, is_product, run): &(&'static str, bool, Operation)| {
        cost(operation, is_product, &|at| run(compute, &layouts[at]))
    };
    let mut costs = OPERATIONS.iter().map(one).collect::<Result<Vec<Cost>>>()?;
    costs.push(cost(CONVERSION, false, &|to| {
        let (from, output) = (&layouts[1 - to].output, &layouts[to].output);
        layout::convert(compute, ImageLayout::ALL[to], from, output)
    })?);
    Ok(costs)
}

/// Milliseconds of two operations timed in turn, and the speed of the second to the first.
fn in_turn(
    run: &dyn Fn(usize) -> paceline_kernels::Result<()>,
) -> Result<([f64; 2], Option<Effect>)> {
    let mut ms = [Vec::new(), Vec::new()];
    for repetition in 0..=REPETITIONS {
        for at in [repetition % 2, 1 - repetition % 2] {
            let begin = Instant::now();
            run(at)?;
            // The first one finds cold caches.
            if repetition > 0 {
                ms[at].push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let effect = Effect::of(&ms[1], &ms[0]);
    Ok((ms.map(|of| median(of).unwrap_or(f64::NAN)), effect))
}
