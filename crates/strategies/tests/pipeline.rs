//! A pipeline of two stages as a short program over the public step.
#![allow(clippy::result_large_err, reason = "what a strategy returns is its own error")]

mod common;

use std::ops::Range;
use std::sync::Arc;

use paceline_collectives::{Group, MeshShape};
use paceline_memory::{Category, DType, Tensor};
use paceline_model::{Model, Owned};
use paceline_strategies::{
    Exactness, Replica, Result, Schedule, Single, Step, Strategy, clip_grad_norm, grad_norm,
    train_step,
};
use paceline_trace::SpanTrack;

use common::{Net, Optim, Trainer, on_ranks};

/// Rank 0 has the first blocks, rank 1 the rest. All micro-batches pass forward, then all pass backward (GPipe).
#[derive(Clone)]
struct Pipeline {
    ranks: Arc<Group>,
    blocks: Range<usize>,
    /// The extents of a sample between the stages.
    boundary: &'static [usize],
}

impl Pipeline {
    fn receive(&self, step: &Step, at: usize) -> Result<Tensor> {
        let rows = step.micro_batches()[at].batch.num_samples();
        let shape = [&[rows], self.boundary].concat();
        let allocator = &step.replica().compute.allocator;
        let tensor = allocator.tensor(DType::F32, shape.as_slice(), Category::Activations)?;
        self.ranks.recv(&tensor, 1 - self.ranks.rank())?;
        Ok(tensor)
    }
}

impl Schedule for Pipeline {
    fn run(&self, step: &mut Step) -> Result<()> {
        let is_first = self.ranks.rank() == 0;
        let mut in_flight = Vec::new();
        for (at, micro_batch) in step.micro_batches().iter().enumerate() {
            let input = match is_first {
                true => micro_batch.batch.inputs().clone(),
                false => self.receive(step, at)?,
            };
            let (output, saved) = step.forward(at, self.blocks.clone(), input)?;
            let d_output = match is_first {
                true => self.ranks.send(&output, 1).map(|_| None)?,
                false => Some(step.loss(at, output)?),
            };
            in_flight.push((saved, d_output));
        }
        for (at, (saved, d_output)) in in_flight.into_iter().enumerate() {
            let d_output = d_output.map_or_else(|| self.receive(step, at), Ok)?;
            if let Some(d_input) = step.backward(at, self.blocks.clone(), saved, d_output)? {
                self.ranks.send(&d_input, 0)?;
            }
        }
        Ok(())
    }
}

impl Strategy for Pipeline {
    fn name(&self) -> &'static str {
        "pipeline"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact
    }

    fn owned(&self, model: &Model, _: &MeshShape, _: usize) -> Owned {
        let unit = |block: &paceline_model::Block| model.layout.unit(block.unit).range.clone();
        let ranges: Vec<_> = model.blocks[self.blocks.clone()].iter().map(unit).collect();
        let [values, grads, state] = [ranges.clone(), ranges.clone(), ranges];
        Owned { blocks: self.blocks.clone(), values, grads, state }
    }

    fn finish_gradients(&mut self, _: &Replica, _: &mut SpanTrack) -> Result<()> {
        Ok(())
    }

    fn grad_norm(&mut self, replica: &Replica) -> Result<f64> {
        grad_norm::over(&self.ranks, replica)
    }

    /// Both ranks take the parameters of the other's stage.
    fn sync_replicas(&mut self, replica: &Replica, _: &mut SpanTrack) -> Result<()> {
        for (at, block) in replica.model.blocks.iter().enumerate() {
            let stage = usize::from(self.blocks.contains(&at) != (self.ranks.rank() == 0));
            let range = replica.model.layout.unit(block.unit).range.clone();
            self.ranks.broadcast(&replica.storage.values().slice(range)?, stage)?;
        }
        Ok(())
    }

    fn schedule(&self) -> Box<dyn Schedule> {
        Box::new(self.clone())
    }
}

/// The digest after six steps of four micro-batches, with clipping. Micro-batches differ in size.
fn digest(net: Net, group: Group, strategy: Box<dyn Strategy>) -> String {
    // All ranks train on whole micro-batches, so gradients are combined over one rank only.
    let mut trainer = Trainer::with_optimizer(net, group, strategy, Optim::Momentum);
    for _ in 0..6 {
        let shares = trainer.shares(&[5, 4, 3, 5]);
        let Trainer { strategy, replica, track, optimizer, .. } = &mut trainer;
        track.clear();
        train_step(strategy.as_mut(), replica, &shares, track).unwrap();
        let norm = clip_grad_norm(strategy.as_mut(), replica, 0.05, track).unwrap();
        assert!(norm > 0.05, "the gradients are clipped: {norm}");
        strategy.optimizer_step(replica, optimizer, track).unwrap();
    }
    trainer.strategy.sync_replicas(&trainer.replica, &mut trainer.track).unwrap();
    trainer.strategy.digest(&trainer.replica).unwrap()
}

#[test]
fn two_stages_end_with_the_digest_of_one_process() {
    let cases: [(Net, &[usize]); 2] = [(Net::Cnn, &[3, 3, 16]), (Net::Mlp, &[24])];
    for (net, boundary) in cases {
        let alone = digest(net, Group::single().unwrap(), Box::new(Single));
        let stages = on_ranks(2, |group| {
            let num_blocks = net.build(1).blocks.len();
            let blocks = if group.rank() == 0 { 0..2 } else { 2..num_blocks };
            let pipeline = Pipeline { ranks: Arc::new(group), blocks, boundary };
            digest(net, Group::single().unwrap(), Box::new(pipeline))
        });
        assert_eq!(stages, [alone.clone(), alone], "{net:?}");
    }
}
