//! Schedules: the order in which a step runs its passes.
//!
//! A schedule is a short program over a [`Step`]: it decides which blocks run on which micro-batch, and when. It knows
//! nothing of how gradients are synchronized.

use crate::{Result, Step};

/// The order of the passes of a training step.
pub trait Schedule {
    /// Runs the forward pass, the loss and the backward pass of each micro-batch. A rank that computes only some of the
    /// blocks runs only their part.
    fn run(&self, step: &mut Step) -> Result<()>;
}

/// Each micro-batch passes forward and backward through all blocks before the next one begins. So the activations of one
/// micro-batch at a time are in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneByOne;

impl Schedule for OneByOne {
    fn run(&self, step: &mut Step) -> Result<()> {
        let blocks = 0..step.replica().model.blocks.len();
        for (at, micro_batch) in step.micro_batches().iter().enumerate() {
            let inputs = micro_batch.batch.inputs().clone();
            let (output, saved) = step.forward(at, blocks.clone(), inputs)?;
            let d_output = step.loss(at, output)?;
            step.backward(at, blocks.clone(), saved, d_output)?;
        }
        Ok(())
    }
}
