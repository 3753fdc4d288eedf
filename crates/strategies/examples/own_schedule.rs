//! A schedule of one's own: a pipeline of two ranks, each of them a thread, trains with it.
//!
//!     cargo run --release -p paceline-strategies --example own_schedule
//!
//! The schedule only says which pass comes next. Its lists are checked together before a rank starts, drawn, and carried out
//! as they are; so the weights are those of any other schedule.

use std::error::Error;
use std::thread;

use paceline_collectives::{Group, Mesh};
use paceline_kernels::Compute;
use paceline_kernels::optimizer::Sgd;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{Batch, MlpConfig, OptimizerConfig};
use paceline_strategies::schedule::{
    Costs, Entry, List, OneFOneB, Plan, Schedule, Shape, Timeline, drawing,
};
use paceline_strategies::{
    MicroBatch, Replica, ReplicaOptions, Single, Stages, StepContext, StepState, Strategy,
    train_step,
};
use paceline_trace::SpanTrack;

/// Any error: this program only prints it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// GPipe in waves: `size` micro-batches pass forward and backward before the next ones begin. So no more than these are in
/// flight, and the pipeline runs empty between two waves.
#[derive(Clone, Copy)]
struct Waves {
    size: usize,
}

impl Schedule for Waves {
    fn name(&self) -> &'static str {
        "waves"
    }

    fn about(&self) -> &'static str {
        "GPipe with a few micro-batches at a time"
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let mut list = List::new(shape, rank);
        for _ in 0..shape.micro_batches.div_ceil(self.size) {
            (0..self.size).for_each(|_| list.forward(0));
            (0..self.size).for_each(|_| list.backward(0));
        }
        list.finish()
    }
}

const MICRO_BATCHES: usize = 4;

fn main() -> Result<()> {
    let waves = Waves { size: 2 };
    let even = |stages: &_| Costs::even(stages, 1.0, 1.0, 1.0);
    let plan = Plan::new(&waves, 2, MICRO_BATCHES, even)?;
    let timeline = Timeline::of(&plan, &even(&plan.shape().placement))?;
    print!("{}", drawing(&plan, &timeline, 80));
    println!("in flight on rank 0: {}", plan.in_flight(0));
    let of_waves = Stages::even(waves, MICRO_BATCHES);
    let of_1f1b = Stages::even(OneFOneB, MICRO_BATCHES);
    for (name, stages) in [("waves", of_waves), ("1f1b", of_1f1b)] {
        let digests = thread::scope(|scope| {
            let ranks = Group::threads(2).into_iter();
            let ranks: Vec<_> = ranks.map(|group| scope.spawn(|| train(group, &stages))).collect();
            let ends = ranks.into_iter().map(|rank| rank.join().expect("a rank panicked"));
            ends.collect::<Result<Vec<_>>>()
        })?;
        println!("weights of {name}: {} and {}", &digests[0][..16], &digests[1][..16]);
    }
    Ok(())
}

/// The work of every rank. Returns the digest of the weights of all stages.
fn train(group: Group, stages: &Stages) -> Result<String> {
    let mesh = Mesh::new(group, &"pp=2".parse()?)?;
    let config =
        MlpConfig { input_dim: 2, hidden_dim: 64, output_dim: 1, num_layers: 5, tie_layers: false };
    let compute = Compute::new(1, Allocator::new())?;
    let (model, mut strategy) = (config.build(2)?, Single);
    let settings = (42, ReplicaOptions::default());
    let replica = Replica::in_stages(&mut strategy, model, compute, mesh, stages, settings)?;
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0 };
    let mut optimizer = replica.optimizer(OptimizerConfig::Sgd(sgd))?;
    let mut state = StepState::new(&replica)?;
    let mut track = SpanTrack::with_capacity(100);
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    for _ in 0..50 {
        let memory = &replica.compute.allocator;
        let batches = (0..MICRO_BATCHES).map(|at| micro_batch(memory, at));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        cx.track.clear();
        train_step(&mut strategy, cx, &batches)?;
        strategy.optimizer_step(cx, &mut optimizer)?;
    }
    Ok(strategy.digest(cx)?)
}

/// Eight pairs of numbers and their products, the same on all stages.
fn micro_batch(memory: &Allocator, at: usize) -> Result<MicroBatch> {
    let pairs: Vec<[f32; 2]> = (0..8).map(|n| [n as f32 / 8.0, at as f32 / 4.0]).collect();
    let inputs = memory.tensor(DType::F32, [8, 2], Category::Data)?;
    inputs.write::<f32>()?.copy_from_slice(&pairs.concat());
    let targets = memory.tensor(DType::F32, [8, 1], Category::Data)?;
    targets.write::<f32>()?.iter_mut().zip(&pairs).for_each(|(target, [a, b])| *target = a * b);
    Ok(MicroBatch { batch: Batch::new(inputs, targets), global_count: 8 })
}
