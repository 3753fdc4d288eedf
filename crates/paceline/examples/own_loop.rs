//! A training loop of one's own, without the command line. Two ranks are threads: `cargo run --release --example own_loop`

use std::thread;

use paceline::prelude::*;

/// Points of a square, with the class 1 within a circle. Each rank and step has its own.
fn batch(step: usize, rank: usize) -> Result<Batch> {
    let memory = Allocator::new();
    let inputs = memory.tensor(DType::F32, [64, 2], Category::Data)?;
    let classes = memory.tensor(DType::I64, [64], Category::Data)?;
    let (mut points, mut targets) = (inputs.write::<f32>()?, classes.write::<i64>()?);
    for (at, point) in points.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let number = (64 * (2 * step + rank) + at) as f64;
        let [x, y] = [0.754_877_67, 0.569_840_29].map(|by| 2.0 * (number * by).fract() - 1.0);
        *point = [x as f32, y as f32];
        targets[at] = i64::from(x * x + y * y < 0.64);
    }
    Ok(Batch::new(inputs, classes))
}

fn model(world_size: usize) -> Model {
    let mut layout = LayoutBuilder::new();
    let hidden = layout.block("hidden", |unit| Linear::new(unit, 2, 32, Activation::Relu));
    let head = layout.block("head", |unit| Linear::new(unit, 32, 2, Activation::None));
    Model::new("circle", [hidden, head], CrossEntropy, layout.finish(world_size))
}

/// Trains as one of the ranks, and returns the accuracy and the digest of the weights.
fn train(group: Group) -> Result<(f64, String)> {
    let (rank, model) = (group.rank(), model(group.world_size()));
    let optimizer = AdamW { lr: 0.01, ..AdamW::default() };
    let mut trainer = Trainer::new(model, Ddp::default(), group, optimizer)?;
    for step in 0..200 {
        let stepped = trainer.step(&[batch(step, rank)?])?;
        if rank == 0 && step % 50 == 0 {
            println!("step {step}: loss {:.3}", stepped.loss.loss);
        }
    }
    let evaluated = trainer.evaluate(&[batch(1000, rank)?])?;
    Ok((evaluated.accuracy.unwrap_or_default(), trainer.digest()?))
}

fn main() -> Result<()> {
    let ends: Vec<_> = thread::scope(|scope| {
        let start = |group| scope.spawn(move || train(group));
        let ranks: Vec<_> = Group::threads(2).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panics")).collect::<Result<_>>()
    })?;
    for (rank, (accuracy, digest)) in ends.iter().enumerate() {
        println!("rank {rank}: accuracy {accuracy:.3}, weights {}", &digest[..16]);
    }
    Ok(())
}
