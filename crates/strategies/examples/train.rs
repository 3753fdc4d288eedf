//! Training with this crate alone, without the command line: two ranks, each of them a thread, learn the product of
//! two numbers.
//!
//!     cargo run --release -p paceline-strategies --example train
//!
//! For a process per rank, take the group from `Group::from_env`, and start the program with `paceline launch --nproc 2` or
//! torchrun. Any other strategy of this crate can take the place of `Ddp`.

use std::error::Error;
use std::f64::consts::SQRT_2;
use std::thread;

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_kernels::optimizer::AdamW;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{Batch, MlpConfig, OptimizerConfig};
use paceline_strategies::{
    Ddp, MicroBatch, Replica, ReplicaOptions, StepContext, StepState, Strategy, train_step,
};
use paceline_trace::SpanTrack;

/// Any error: this program only prints it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const SQRT_3: f64 = 1.732_050_807_568_877;

const STEPS: usize = 300;
/// Samples of a step, on all ranks together.
const BATCH: usize = 128;
const BUCKET_BYTES: usize = 1 << 20;
/// Spans of a step that are kept.
const SPANS: usize = 100;

fn main() -> Result<()> {
    let digests = thread::scope(|scope| {
        let ranks = Group::threads(2).into_iter();
        let ranks: Vec<_> = ranks.map(|group| scope.spawn(|| train(group))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank panicked"))
            .collect::<Result<Vec<_>>>()
    })?;
    for (rank, digest) in digests.iter().enumerate() {
        println!("weights of rank {rank}: {}", &digest[..16]);
    }
    Ok(())
}

/// The work of every rank. Returns the digest of its weights.
fn train(group: Group) -> Result<String> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let config =
        MlpConfig { input_dim: 2, hidden_dim: 64, output_dim: 1, num_layers: 2, tie_layers: false };
    let model = config.build(world_size)?;
    let compute = Compute::new(1, Allocator::new())?;
    let mut strategy = Ddp::new(BUCKET_BYTES);
    let options = ReplicaOptions::default();
    let replica = Replica::new(&mut strategy, model, compute, group, 42, options)?;
    let adamw = AdamW { lr: 0.003, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let mut optimizer = replica.optimizer(OptimizerConfig::AdamW(adamw))?;
    let mut state = StepState::new(&replica)?;
    let mut track = SpanTrack::with_capacity(SPANS);
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    for step in 0..STEPS {
        let share = share(&replica.compute.allocator, step, rank, world_size)?;
        cx.track.clear();
        let loss = train_step(&mut strategy, cx, &[share])?;
        strategy.optimizer_step(cx, &mut optimizer)?;
        if rank == 0 && (step + 1) % 100 == 0 {
            println!("step {}: loss {:.5}", step + 1, loss.loss);
        }
    }
    Ok(strategy.digest(cx)?)
}

/// This rank's samples of a step: two numbers from -1 to 1, and their product.
fn share(allocator: &Allocator, step: usize, rank: usize, world_size: usize) -> Result<MicroBatch> {
    let samples = (step * BATCH..(step + 1) * BATCH).skip(rank).step_by(world_size);
    // Multiples of two irrational numbers fill the square evenly.
    let inputs: Vec<[f32; 2]> =
        samples.map(|at| [SQRT_2, SQRT_3].map(|step| fraction(at, step))).collect();
    let tensor = |elems: Vec<f32>, width: usize| -> Result<_> {
        let tensor = allocator.tensor(DType::F32, [elems.len() / width, width], Category::Data)?;
        tensor.write::<f32>()?.copy_from_slice(&elems);
        Ok(tensor)
    };
    let targets = inputs.iter().map(|[a, b]| a * b).collect();
    let batch = Batch::new(tensor(inputs.concat(), 2)?, tensor(targets, 1)?);
    Ok(MicroBatch { batch, global_count: BATCH })
}

/// `at` steps from -1 to 1, and around again.
fn fraction(at: usize, step: f64) -> f32 {
    (at as f64 * step % 2.0 - 1.0) as f32
}
