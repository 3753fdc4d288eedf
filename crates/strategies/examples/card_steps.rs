//! Training steps on a card, one rank, with a batch that lies there: `cargo run --release -p paceline-strategies --example card_steps`.
//!
//!     card_steps [small] [CASE|CASE/PRECISION...]     small_cnn, cnn, mlp, llama, smollm2; f32, tf32, bf16, fp16 (default: all)
//!
//! Prints a line of JSON for each model, precision and form: milliseconds of a step, its floating-point operations and tokens, and
//! the most memory in use. The host reads the loss of each step, as in training. `graph` launches steps as graphs.
//! A figure is the mean of 50 steps after 20. `small` takes models and numbers of steps that an emulated card can compute. Errors if
//! there is no card.

use std::error::Error;
use std::time::Instant;

use paceline_collectives::Group;
use paceline_cuda::Card;
use paceline_kernels::Compute;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, CnnConfig, LlamaConfig, LlamaTask, MlpConfig, Model, OptimizerConfig, Precision,
    Rehearsal, SpecialTokens,
};
use paceline_strategies::{
    MicroBatch, Replica, ReplicaOptions, Single, StepContext, StepState, Strategy, train_step,
};
use paceline_trace::SpanTrack;

/// Any error: this program only prints it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Steps before those that are timed, and these.
const STEPS: [u32; 2] = [20, 50];
const SMALL_STEPS: [u32; 2] = [4, 2];
const SGD: OptimizerConfig =
    OptimizerConfig::Sgd(Sgd { lr: 0.01, momentum: 0.0, weight_decay: 0.0 });
/// Spans of a step that are kept.
const SPANS: usize = 100;

/// A model, the shapes of its inputs and targets, and the number of classes or tokens.
struct Case {
    name: &'static str,
    build: Box<dyn Fn() -> paceline_model::Result<Model>>,
    inputs: (DType, Vec<usize>),
    targets: (DType, Vec<usize>),
    classes: u64,
    optimizer: OptimizerConfig,
}

fn main() -> Result<()> {
    let mut wanted: Vec<String> = std::env::args().skip(1).collect();
    let is_small = wanted.first().is_some_and(|word| word == "small");
    if is_small {
        wanted.remove(0);
    }
    let steps = if is_small { SMALL_STEPS } else { STEPS };
    for case in cases(is_small) {
        for (precision, elements, rounds) in [
            ("f32", Precision::F32, false),
            ("tf32", Precision::F32, true),
            ("bf16", Precision::BF16, false),
            ("fp16", Precision::FP16, false),
        ] {
            let names = [case.name.to_owned(), format!("{}/{precision}", case.name)];
            if !wanted.is_empty() && !wanted.iter().any(|of| names.contains(of)) {
                continue;
            }
            let (flops, tokens) = (flops(&case, elements)?, case.tokens());
            for as_graph in [false, true] {
                let options =
                    ReplicaOptions { precision: elements, as_graph, ..ReplicaOptions::DEFAULT };
                let (step_ms, peak_bytes) = time(&case, options, rounds, steps)?;
                let (case, form) = (case.name, if as_graph { "graph" } else { "eager" });
                println!(
                    r#"{{"case": "{case}", "precision": "{precision}", "form": "{form}", "step_ms": {step_ms:.4}, "flops": {flops}, "tokens": {tokens}, "peak_bytes": {peak_bytes}}}"#
                );
            }
        }
    }
    Ok(())
}

impl Case {
    /// A batch of the memory's device.
    fn batch(&self, memory: &Allocator, fill: bool) -> Result<Batch> {
        let [inputs, targets] =
            [&self.inputs, &self.targets].map(|of| tensor(memory, of, self.classes, fill));
        Ok(Batch::new(inputs?, targets?))
    }

    /// The tokens of a batch; zero if its inputs are something else.
    fn tokens(&self) -> usize {
        let (dtype, shape) = &self.inputs;
        if *dtype == DType::I64 { shape.iter().product() } else { 0 }
    }
}

/// The floating-point operations of a step's products, counted without arithmetic.
fn flops(case: &Case, precision: Precision) -> Result<u64> {
    let compute = Compute::new(1, Allocator::meta())?;
    let batch = case.batch(&Allocator::meta(), false)?;
    let of = Rehearsal::of(&(case.build)()?, precision, &compute, &[batch], None, false)?;
    Ok(of.forward_flops + of.backward_flops)
}

/// Milliseconds of a step, and the most memory of the card that was in use.
fn time(
    case: &Case,
    options: ReplicaOptions,
    rounds_to_tf32: bool,
    [warmup, timed]: [u32; 2],
) -> Result<(f64, u64)> {
    let accelerator = Accelerator::cuda(Card::open(0)?);
    let memory = Allocator::on(&accelerator.stream("compute")?);
    let compute = Compute::new(1, memory.clone())?;
    let compute = if rounds_to_tf32 { compute.with_tf32() } else { compute };
    let group = Group::threads(1).remove(0);
    let (mut strategy, model) = (Single, (case.build)()?);
    let replica = Replica::new(&mut strategy, model, compute, group, 42, options)?;
    let mut optimizer = replica.optimizer(case.optimizer)?;
    let batch = case.batch(&memory, true)?;
    let share = [MicroBatch { global_count: batch.num_samples(), batch }];
    let mut state = StepState::new(&replica)?;
    let mut track = SpanTrack::with_capacity(SPANS);
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    let mut begin = Instant::now();
    for at in 0..warmup + timed {
        if at == warmup {
            begin = Instant::now();
        }
        cx.track.clear();
        train_step(&mut strategy, cx, &share)?;
        strategy.optimizer_step(cx, &mut optimizer)?;
    }
    replica.compute.synchronize()?;
    let step_ms = begin.elapsed().as_secs_f64() * 1e3 / f64::from(timed);
    Ok((step_ms, memory.total().peak_bytes))
}

/// Numbers from -1 to 1, or classes, that look random; without contents on a device that keeps no contents.
fn tensor(
    memory: &Allocator,
    (dtype, shape): &(DType, Vec<usize>),
    classes: u64,
    fill: bool,
) -> Result<Tensor> {
    let tensor = memory.tensor(*dtype, shape.as_slice(), Category::Data)?;
    if !fill {
        return Ok(tensor);
    }
    let mixed = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    match dtype {
        DType::I64 => tensor.overwrite::<i64, _>(|to| {
            to.iter_mut().enumerate().for_each(|(at, to)| *to = (mixed(at) % classes) as i64);
        })?,
        _ => tensor.overwrite::<f32, _>(|to| {
            let scale = 2.0 / (1u64 << 24) as f32;
            to.iter_mut().enumerate().for_each(|(at, to)| *to = mixed(at) as f32 * scale - 1.0);
        })?,
    }
    Ok(tensor)
}

fn cases(is_small: bool) -> Vec<Case> {
    let sized = |full: usize, small: usize| if is_small { small } else { full };
    let cnn = |image, channels: [usize; 3]| CnnConfig {
        image,
        channels: channels.map(|count| sized(count, count / 16)).to_vec(),
        hidden: sized(512, 16),
        num_classes: 10,
        batch_norm: false,
        unused_head: false,
        layout: Default::default(),
        direct_convolutions: false,
    };
    let width = sized(4096, 16);
    let mlp = MlpConfig {
        input_dim: width,
        hidden_dim: width,
        output_dim: width,
        num_layers: 2,
        tie_layers: false,
    };
    let [llama, smollm2] = language_models(&sized);
    let adamw = AdamW { lr: 5e-5, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let side = |full| sized(full, 8);
    vec![
        images("small_cnn", sized(64, 4), cnn([side(28), side(28), 1], [32, 64, 128])),
        images("cnn", sized(512, 4), cnn([side(32), side(32), 3], [64, 128, 256])),
        Case {
            name: "mlp",
            build: Box::new(move || mlp.build(1)),
            inputs: (DType::F32, vec![width, width]),
            targets: (DType::F32, vec![width, width]),
            classes: 1,
            optimizer: SGD,
        },
        tokens("llama", sized(4, 1), llama, SGD),
        tokens("smollm2", sized(8, 1), smollm2, OptimizerConfig::AdamW(adamw)),
    ]
}

fn images(name: &'static str, batch: usize, config: CnnConfig) -> Case {
    Case {
        name,
        inputs: (DType::F32, [&[batch][..], &config.image].concat()),
        targets: (DType::I64, vec![batch]),
        build: Box::new(move || config.build(1)),
        classes: 10,
        optimizer: SGD,
    }
}

fn tokens(
    name: &'static str,
    batch: usize,
    config: LlamaConfig,
    optimizer: OptimizerConfig,
) -> Case {
    let shape = vec![batch, config.max_position_embeddings];
    Case {
        name,
        classes: config.vocab_size as u64,
        build: Box::new(move || config.build(1)),
        inputs: (DType::I64, shape.clone()),
        targets: (DType::I64, shape),
        optimizer,
    }
}

/// The Llama of 7.4 million parameters, and SmolLM2-360M; or small models of the same form.
fn language_models(sized: &impl Fn(usize, usize) -> usize) -> [LlamaConfig; 2] {
    let llama = LlamaConfig {
        vocab_size: sized(8192, 64),
        hidden_size: sized(256, 32),
        intermediate_size: sized(688, 48),
        num_hidden_layers: sized(4, 2),
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: sized(64, 8),
        max_position_embeddings: sized(128, 16),
        rope_theta: 1e4,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
        task: LlamaTask::LanguageModel,
        special_tokens: SpecialTokens::default(),
    };
    let smollm2 = LlamaConfig {
        vocab_size: sized(49_152, 96),
        hidden_size: sized(960, 48),
        intermediate_size: sized(2560, 64),
        num_hidden_layers: sized(32, 2),
        num_attention_heads: sized(15, 6),
        num_key_value_heads: sized(5, 2),
        max_position_embeddings: sized(512, 16),
        rope_theta: 1e5,
        tie_word_embeddings: true,
        ..llama.clone()
    };
    [llama, smollm2]
}
