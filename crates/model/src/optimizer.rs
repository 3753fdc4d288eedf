//! Optimizers and their state, over flat storage.

use paceline_kernels::Compute;
use paceline_kernels::optimizer::{AdamW, Sgd, adamw, sgd};
use paceline_memory::{Allocator, Category, Tensor};

use crate::storage::is_finite;
use crate::{Result, Storage};

/// An optimizer's kind and settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// AdamW.
    AdamW(AdamW),
}

impl OptimizerConfig {
    /// The names of the state tensors, each as long as the trained parameters.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            OptimizerConfig::Sgd(Sgd { momentum: 0.0, .. }) => &[],
            OptimizerConfig::Sgd(_) => &["velocity"],
            OptimizerConfig::AdamW(_) => &["first_moment", "second_moment"],
        }
    }
}

/// An optimizer and its state.
#[derive(Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    state: Vec<Tensor>,
    steps: u64,
}

impl Optimizer {
    /// An optimizer for `storage` before its first step, with its state set to zero.
    pub fn new(config: OptimizerConfig, storage: &Storage, allocator: &Allocator) -> Result<Self> {
        let grads = storage.grads();
        let zeros = |_: &&str| -> Result<Tensor> {
            let state = allocator.tensor(grads.dtype(), grads.shape(), Category::Optimizer)?;
            state.as_bytes().write::<u8>()?.fill(0);
            Ok(state)
        };
        let state = config.state_names().iter().map(zeros).collect::<Result<_>>()?;
        Ok(Self { config, state, steps: 0 })
    }

    /// Updates all trained parameters from their gradients.
    pub fn step(&mut self, compute: &Compute, storage: &Storage) -> Result<()> {
        self.steps += 1;
        let (params, grads) = (&storage.trained_values()?, storage.grads());
        match (&self.config, self.state.as_slice()) {
            (OptimizerConfig::Sgd(config), state) => {
                sgd(compute, config, params, grads, state.first())?;
            }
            (OptimizerConfig::AdamW(config), [first, second]) => {
                adamw(compute, config, self.steps, params, grads, first, second)?;
            }
            (OptimizerConfig::AdamW(_), state) => {
                unreachable!("AdamW is made with two moments, not {}", state.len())
            }
        }
        Ok(())
    }

    /// Sets the learning rate from the next step on.
    pub fn set_lr(&mut self, rate: f64) {
        match &mut self.config {
            OptimizerConfig::Sgd(Sgd { lr, .. }) | OptimizerConfig::AdamW(AdamW { lr, .. }) => {
                *lr = rate;
            }
        }
    }

    /// The number of steps so far, including those before a checkpoint.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues after `steps` steps, whose state the caller has put into [`Optimizer::state`].
    pub fn resume_after(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// The state tensors, with their names.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.config.state_names().iter().copied().zip(&self.state)
    }

    /// The name of the first tensor of the state that has a value which is not finite, if there is one.
    pub fn first_not_finite(&self) -> Result<Option<&'static str>> {
        for (name, tensor) in self.state() {
            if !is_finite(tensor)? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Its settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }
}
