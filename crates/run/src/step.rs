//! One optimizer step of one rank: from its batches to the updated parameters.
//!
//! A stepper knows nothing of epochs, checkpoints or reports.

use paceline_failure::{Failure, Result};
use paceline_memory::{DeviceStream, Event};
use paceline_model::{Optimizer, Owned};
use paceline_observe::record::memory;
use paceline_observe::record::meter::DeviceWork;
use paceline_strategies::{
    Join, MicroBatch, Replica, StepContext, StepLoss, StepState, Strategy, StrategyError,
    clip_factor, span, train_step,
};
use paceline_trace::{Span, SpanTrack, now_ns};

use crate::to_device::{Brought, Loaded, ToDevice};

/// The result of one step.
pub struct StepOutcome {
    /// The loss.
    pub loss: StepLoss,
    /// Samples of all ranks together, whether or not they share the loss.
    pub samples: usize,
    /// The norm of the gradients before clipping, if they are clipped or the loss is scaled.
    pub grad_norm: Option<f64>,
    /// From the arrival of the batches to the end of the optimizer.
    pub whole: Span,
    /// The work that the host gave to a device.
    pub device: DeviceWork,
}

/// Makes the steps of one rank.
pub struct Stepper {
    /// The model, its storage and the group.
    pub replica: Replica,
    /// The state that the steps change.
    pub state: StepState,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Keeps the replicas equal.
    pub strategy: Box<dyn Strategy>,
    /// Records the spans of the step.
    pub track: SpanTrack,
    /// Brings batches to the device.
    pub to_device: ToDevice,
    /// Coordinates the ranks if each has batches of its own.
    pub join: Option<Join>,
    /// The largest norm of the gradients, if they are clipped.
    pub max_norm: Option<f64>,
    /// Whether the loss is scaled, so that a step whose gradients overflow is skipped, without an error.
    pub scales_loss: bool,
}

impl Stepper {
    /// Makes one training step; returns `None` if no rank has a batch. The parameters stay unchanged if
    /// the loss or the norm is not finite.
    pub fn step(&mut self, loaded: Loaded, lr: f64) -> Result<Option<StepOutcome>> {
        self.optimizer.set_lr(lr);
        let start_ns = now_ns();
        let stream = self.replica.compute.allocator.home().cloned();
        stream.iter().for_each(DeviceStream::begin_times);
        let Brought { batches, copies } = match &stream {
            Some(_) => self.track.record(span::TO_DEVICE, || self.to_device.bring(loaded))?,
            None => self.to_device.bring(loaded)?,
        };
        let shares = batches.into_iter().filter_map(|batch| self.share(batch).transpose());
        let shares = shares.collect::<Result<Vec<_>>>()?;
        if shares.is_empty() {
            return Ok(None);
        }
        // Evaluations and saves belong to no phase of a step.
        let allocator = self.replica.compute.allocator.clone();
        allocator.begin_phase();
        let samples = shares.iter().map(|share| share.global_count).sum();
        let Self { strategy, replica, state, track, optimizer, .. } = self;
        let cx = &mut StepContext { replica, state, track };
        let loss = train_step(strategy.as_mut(), cx, &shares).map_err(with_flag)?;
        let (mut grad_norm, mut factor) = (None, 1.0);
        if (self.max_norm.is_some() || self.scales_loss) && loss.loss.is_finite() {
            // All ranks know the norm of all gradients, so they skip the same steps.
            let max_norm = self.max_norm.unwrap_or(f64::INFINITY);
            let (norm, clipped) = clip_factor(strategy.as_mut(), cx, max_norm)?;
            (grad_norm, factor) = (Some(norm), clipped);
        }
        if loss.loss.is_finite() && grad_norm.is_none_or(f64::is_finite) {
            // The scale is a power of two, so the bits are the same as if it were removed before clipping.
            optimizer.set_grad_factor(factor / cx.state.loss_scale);
            strategy.optimizer_step(cx, optimizer)?;
        }
        replica.compute.synchronize()?;
        let whole = Span { start_ns, end_ns: now_ns() };
        let mut device = DeviceWork::default();
        if let Some(times) = stream.map(|stream| stream.end_times()) {
            // Operations are identified by when the host submitted them.
            track.move_to(|host_ns| times.at(host_ns), |mark| mark != span::NEXT_STEP);
            let copies = copies.iter().filter_map(Event::ran).collect();
            device = DeviceWork { copies, launching_ns: times.launching_ns };
        }
        allocator.end_phase(memory::STEP);
        Ok(Some(StepOutcome { loss, samples, grad_norm, whole, device }))
    }

    /// Whether a step left out its update because its gradients overflowed.
    pub fn skips(&self, outcome: &StepOutcome) -> bool {
        self.scales_loss && !outcome.grad_norm.is_some_and(f64::is_finite)
    }

    /// Makes the replicas equal if the strategy does not do so in every step.
    pub fn sync_replicas(&mut self) -> Result<()> {
        let (strategy, mut cx) = self.parts();
        strategy.sync_replicas(&mut cx)?;
        cx.track.clear();
        Ok(())
    }

    /// The strategy, and the context of its methods.
    pub fn parts(&mut self) -> (&mut dyn Strategy, StepContext<'_>) {
        let Self { strategy, replica, state, track, .. } = self;
        (strategy.as_mut(), StepContext { replica, state, track })
    }

    /// This rank's share of a batch. Ranks with batches of their own have to add up their numbers of samples.
    fn share(&mut self, own: Option<MicroBatch>) -> Result<Option<MicroBatch>> {
        match &self.join {
            None => Ok(own),
            Some(join) => {
                let own = own.map(|share| share.batch);
                Ok(join.next(&self.replica, own, &mut self.track)?)
            }
        }
    }

    /// Fails if a parameter, a running statistic or the optimizer's state is not finite: the update can overflow although loss
    /// and gradients were finite. Collective: all ranks fail together, and rank 0 says why.
    pub fn check_finite(&self, steps: u64) -> Result<()> {
        let Self { replica, optimizer, .. } = self;
        let own = match replica.storage.first_not_finite()? {
            Some(name) => Some(name.to_owned()),
            None => optimizer.first_not_finite()?.map(|name| format!("the optimizer's {name}")),
        };
        let is_shard = replica.owned.state != Owned::everything(&replica.model).state;
        let is_divided = is_shard || replica.is_stage();
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
    pub fn stop_if_not_finite(&self, step: u64, lr: f64, outcome: &StepOutcome) -> Result<()> {
        let StepOutcome { loss, grad_norm, .. } = outcome;
        let not_finite = |problem: String| Failure::NotFinite {
            step,
            message: format!(
                "{problem}, with a learning rate of {lr:?}; training stopped before the optimizer step: lower \
                 --lr, or look at the data"
            ),
        };
        let group = &self.replica.world;
        if loss.loss.is_finite() {
            let bad_norm = grad_norm.filter(|norm| !norm.is_finite());
            let Some(norm) = bad_norm.filter(|_| !self.scales_loss) else { return Ok(()) };
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
        let culprits = if culprits.is_empty() {
            "the sum over all ranks".to_owned()
        } else {
            culprits.join(", ")
        };
        let problem = format!("the loss of step {step} is not finite on {culprits}");
        Err(not_finite(problem))
    }
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
