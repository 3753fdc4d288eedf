//! One optimizer step of one rank: from its batches to the updated parameters.
//!
//! This file knows nothing of epochs, checkpoints or reports.

use paceline_failure::{Failure, Result};
use paceline_memory::{DeviceStream, Event};
use paceline_model::Owned;
use paceline_observe::record::memory;
use paceline_observe::record::meter::DeviceWork;
use paceline_strategies::{Join, MicroBatch, Stepped, StrategyError, Trainer, span};
use paceline_trace::{Span, now_ns};

use crate::to_device::{Brought, Loaded, ToDevice};

/// The result of one step.
pub struct StepOutcome {
    /// The loss, and whether the parameters were updated.
    pub stepped: Stepped,
    /// Samples of all ranks together, whether or not they share the loss.
    pub samples: usize,
    /// From the arrival of the batches to the end of the optimizer.
    pub whole: Span,
    /// The work that the host gave to a device.
    pub device: DeviceWork,
}

/// The way of a rank's batches to its steps.
pub struct Inputs {
    /// Brings batches to the device.
    pub to_device: ToDevice,
    /// Coordinates the ranks if each has batches of its own.
    pub join: Option<Join>,
}

impl Inputs {
    /// Makes one training step; returns `None` if no rank has a batch. The parameters stay unchanged if
    /// the loss or the norm is not finite.
    pub fn step(
        &mut self,
        trainer: &mut Trainer,
        loaded: Loaded,
        lr: f64,
    ) -> Result<Option<StepOutcome>> {
        trainer.optimizer.set_lr(lr);
        let start_ns = now_ns();
        let allocator = trainer.replica.compute.allocator.clone();
        let stream = allocator.home().cloned();
        stream.iter().for_each(DeviceStream::begin_times);
        let Brought { batches, copies } = match &stream {
            Some(_) => trainer.track.record(span::TO_DEVICE, || self.to_device.bring(loaded))?,
            None => self.to_device.bring(loaded)?,
        };
        let shares = batches.into_iter().filter_map(|own| self.share(trainer, own).transpose());
        let shares = shares.collect::<Result<Vec<_>>>()?;
        if shares.is_empty() {
            return Ok(None);
        }
        // Evaluations and saves belong to no phase of a step.
        allocator.begin_phase();
        let samples = shares.iter().map(|share| share.global_count).sum();
        let stepped = trainer.step_on(&shares).map_err(with_flag)?;
        let whole = Span { start_ns, end_ns: now_ns() };
        let mut device = DeviceWork::default();
        if let Some(times) = stream.map(|stream| stream.end_times()) {
            // Operations are identified by when the host submitted them.
            trainer.track.move_to(|host_ns| times.at(host_ns), |mark| mark != span::NEXT_STEP);
            let copies = copies.iter().filter_map(Event::ran).collect();
            device = DeviceWork { copies, launching_ns: times.launching_ns };
        }
        allocator.end_phase(memory::STEP);
        Ok(Some(StepOutcome { stepped, samples, whole, device }))
    }

    /// This rank's share of a batch. Ranks with batches of their own have to add up their numbers of samples.
    fn share(&self, trainer: &mut Trainer, own: Option<MicroBatch>) -> Result<Option<MicroBatch>> {
        match &self.join {
            None => Ok(own),
            Some(join) => {
                let own = own.map(|share| share.batch);
                Ok(join.next(&trainer.replica, own, &mut trainer.track)?)
            }
        }
    }
}

/// Fails if a parameter, a running statistic or the optimizer's state is not finite: the update can overflow although loss
/// and gradients were finite. Collective: all ranks fail together, and rank 0 says why.
pub fn check_finite(trainer: &Trainer, steps: u64) -> Result<()> {
    let Trainer { replica, optimizer, .. } = trainer;
    let own = match replica.storage.first_not_finite()? {
        Some(name) => Some(name.to_owned()),
        None => optimizer.first_not_finite()?.map(|name| format!("the optimizer's {name}")),
    };
    let is_shard = replica.owned.state != Owned::everything(&replica.model).state;
    let is_divided = is_shard || replica.is_stage() || replica.tensor.is_some();
    let found = if is_divided {
        replica.world.all_gather_object(&own)?.into_iter().flatten().next()
    } else {
        own
    };
    let Some(found) = found else { return Ok(()) };
    let problem = format!("after step {steps}, {found} is not finite");
    Err(match replica.world.rank() {
        0 => Failure::NotFinite {
            step: steps,
            message: format!(
                "{problem}; no checkpoint is written, and an earlier one stays as it is: lower --lr, or \
                 look at the data"
            ),
        },
        _ => Failure::Consequence(problem),
    })
}

/// Fails if the loss is not finite, or the norm unless the loss is scaled. Ranks that share loss and norm stop together,
/// before the optimizer has changed a parameter, and exchange whose loss it was. `step` counts from 1.
pub fn stop_if_not_finite(trainer: &Trainer, step: u64, lr: f64, stepped: &Stepped) -> Result<()> {
    let Stepped { loss, grad_norm, .. } = stepped;
    let not_finite = |problem: String| Failure::NotFinite {
        step,
        message: format!(
            "{problem}, with a learning rate of {lr:?}; training stopped before the optimizer step: lower \
             --lr, or look at the data"
        ),
    };
    let group = &trainer.replica.world;
    if loss.loss.is_finite() {
        let bad_norm = grad_norm.filter(|norm| !norm.is_finite());
        let Some(norm) = bad_norm.filter(|_| !trainer.scales_loss) else { return Ok(()) };
        // The gradients come from all ranks, so none is to blame, and rank 0 reports.
        let problem = format!("the gradient norm of step {step} is not finite ({norm})");
        return Err(match group.rank() {
            0 => not_finite(problem),
            _ => Failure::Consequence(problem),
        });
    }
    if !loss.is_shared {
        // The other ranks do not know this loss and continue, so this rank cannot ask them.
        let problem = format!("the loss of step {step} is not finite ({})", loss.local_sum);
        return Err(not_finite(problem));
    }
    let sums = group.gather_object(&loss.local_sum, 0)?;
    let Some(sums) = sums else {
        return Err(Failure::Consequence(format!("the loss of step {step} is not finite")));
    };
    let culprits: Vec<String> = sums
        .iter()
        .enumerate()
        .filter(|(_, sum)| !sum.is_finite())
        .map(|(rank, sum)| format!("rank {rank} ({sum})"))
        .collect();
    let culprits =
        if culprits.is_empty() { "the sum over all ranks".to_owned() } else { culprits.join(", ") };
    let problem = format!("the loss of step {step} is not finite on {culprits}");
    Err(not_finite(problem))
}

/// The failure of a step, with the flag that helps.
fn with_flag(error: StrategyError) -> Failure {
    match &error {
        StrategyError::Unused { is_new: false, .. } => {
            Failure::Run(format!("{error} (--find-unused-parameters)"))
        }
        StrategyError::Unused { .. } | StrategyError::UsedAfterAll { .. } => {
            Failure::Run(format!("{error} (--no-static-graph)"))
        }
        _ => error.into(),
    }
}
