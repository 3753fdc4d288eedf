//! Training steps on a card, one rank, with a batch that lies there: `cargo run --release -p paceline-strategies --example card_steps`.
//!
//!     card_steps [CASE...]     small_cnn, cnn, mlp, llama (all of them, if none is named)
//!
//! Prints a line of JSON for each model, precision and form: milliseconds of a step, and the most memory in use. Steps follow each
//! other as in training: the host reads the loss of each. `graph` launches them as graphs. A figure is the mean of 50 steps after
//! 20. Errors if there is no card.

use std::error::Error;
use std::time::Instant;

use paceline_collectives::Group;
use paceline_cuda::Card;
use paceline_kernels::Compute;
use paceline_kernels::optimizer::Sgd;
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, CnnConfig, LlamaConfig, LlamaTask, MlpConfig, Model, OptimizerConfig, Precision,
    SpecialTokens,
};
use paceline_strategies::{MicroBatch, Replica, ReplicaOptions, Single, Strategy, train_step};
use paceline_trace::SpanTrack;

/// Any error: this program only prints it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const WARMUP_STEPS: u32 = 20;
const TIMED_STEPS: u32 = 50;
/// Spans of a step that are kept.
const SPANS: usize = 100;

/// A model, the shapes of its inputs and targets, and the number of classes or tokens.
struct Case {
    name: &'static str,
    build: Box<dyn Fn() -> paceline_model::Result<Model>>,
    inputs: (DType, Vec<usize>),
    targets: (DType, Vec<usize>),
    classes: u64,
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let cases = cases().into_iter();
    for case in cases.filter(|case| wanted.is_empty() || wanted.iter().any(|of| of == case.name)) {
        for (precision, elements, rounds) in [
            ("f32", Precision::F32, false),
            ("tf32", Precision::F32, true),
            ("bf16", Precision::BF16, false),
            ("fp16", Precision::FP16, false),
        ] {
            for as_graph in [false, true] {
                let options =
                    ReplicaOptions { precision: elements, as_graph, ..ReplicaOptions::DEFAULT };
                let (step_ms, peak_bytes) = time(&case, options, rounds)?;
                let (case, form) = (case.name, if as_graph { "graph" } else { "eager" });
                println!(
                    r#"{{"case": "{case}", "precision": "{precision}", "form": "{form}", "step_ms": {step_ms:.4}, "peak_bytes": {peak_bytes}}}"#
                );
            }
        }
    }
    Ok(())
}

/// Milliseconds of a step, and the most memory of the card that was in use.
fn time(case: &Case, options: ReplicaOptions, rounds_to_tf32: bool) -> Result<(f64, u64)> {
    let accelerator = Accelerator::cuda(Card::open(0)?);
    let memory = Allocator::on(&accelerator.stream("compute")?);
    let compute = Compute::new(1, memory.clone())?;
    let compute = if rounds_to_tf32 { compute.with_tf32() } else { compute };
    let group = Group::threads(1).remove(0);
    let (mut strategy, model) = (Single, (case.build)()?);
    let mut replica = Replica::new(&mut strategy, model, compute, group, 42, options)?;
    let sgd = Sgd { lr: 0.01, momentum: 0.0, weight_decay: 0.0 };
    let mut optimizer = replica.optimizer(OptimizerConfig::Sgd(sgd))?;
    let batch = Batch::new(
        tensor(&memory, &case.inputs, case.classes)?,
        tensor(&memory, &case.targets, case.classes)?,
    );
    let share = [MicroBatch { global_count: batch.num_samples(), batch }];
    let mut track = SpanTrack::with_capacity(SPANS);
    let mut begin = Instant::now();
    for at in 0..WARMUP_STEPS + TIMED_STEPS {
        if at == WARMUP_STEPS {
            begin = Instant::now();
        }
        track.clear();
        train_step(&mut strategy, &mut replica, &share, &mut track)?;
        strategy.optimizer_step(&replica, &mut optimizer, &mut track)?;
    }
    replica.compute.synchronize()?;
    let step_ms = begin.elapsed().as_secs_f64() * 1e3 / f64::from(TIMED_STEPS);
    Ok((step_ms, memory.total().peak_bytes))
}

/// Numbers from -1 to 1, or classes, that look random.
fn tensor(
    memory: &Allocator,
    (dtype, shape): &(DType, Vec<usize>),
    classes: u64,
) -> Result<Tensor> {
    let tensor = memory.tensor(*dtype, shape.as_slice(), Category::Data)?;
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

fn cases() -> Vec<Case> {
    let cnn = |image, channels: [usize; 3]| {
        let config = CnnConfig {
            image,
            channels: channels.to_vec(),
            hidden: 512,
            num_classes: 10,
            batch_norm: false,
            unused_head: false,
            layout: Default::default(),
        };
        Box::new(move || config.build(1))
    };
    let mlp = MlpConfig {
        input_dim: 4096,
        hidden_dim: 4096,
        output_dim: 4096,
        num_layers: 2,
        tie_layers: false,
    };
    let llama = LlamaConfig {
        vocab_size: 8192,
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: 64,
        max_position_embeddings: 128,
        rope_theta: 1e4,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
        task: LlamaTask::LanguageModel,
        special_tokens: SpecialTokens::default(),
    };
    vec![
        Case {
            name: "small_cnn",
            build: cnn([28, 28, 1], [32, 64, 128]),
            inputs: (DType::F32, vec![64, 28, 28, 1]),
            targets: (DType::I64, vec![64]),
            classes: 10,
        },
        Case {
            name: "cnn",
            build: cnn([32, 32, 3], [64, 128, 256]),
            inputs: (DType::F32, vec![512, 32, 32, 3]),
            targets: (DType::I64, vec![512]),
            classes: 10,
        },
        Case {
            name: "mlp",
            build: Box::new(move || mlp.build(1)),
            inputs: (DType::F32, vec![4096, 4096]),
            targets: (DType::F32, vec![4096, 4096]),
            classes: 1,
        },
        Case {
            name: "llama",
            build: Box::new(move || llama.build(1)),
            inputs: (DType::I64, vec![4, 128]),
            targets: (DType::I64, vec![4, 128]),
            classes: 8192,
        },
    ]
}
