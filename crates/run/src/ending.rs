//! The end of a run: the last checks, the evaluation of the finished model, and the report of all ranks.

use std::time::Instant;

use paceline_checkpoint::progress::Evaluation;
use paceline_collectives::ReduceOp;
use paceline_failure::{Failure, Result};
use paceline_host::streams;
use paceline_launch::stop::left;
use paceline_observe::figures::event::Event;
use paceline_observe::figures::facts::{Facts, Outcome};
use paceline_observe::insight::flops;
use paceline_observe::record::memory::RankMemory;
use paceline_observe::record::rank_report::RankReport;
use paceline_observe::record::steps::AllSteps;
use paceline_settings::origin::Resume;
use paceline_strategies::Replica;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::setup::{FirstFacts, RankRun};
use crate::staging::unit_of;
use crate::trainer::is_due;
use crate::training::Training;

impl RankRun<'_> {
    /// Ends a run that was asked to stop: in order, with the figures of its steps so far.
    pub(crate) fn end_early(&mut self, begin: Instant, run: &Training) -> Result<()> {
        let steps = run.progress.steps;
        // The ranks agree on it before rank 0 writes, however long that takes.
        let stopped = self.stopped_after(steps);
        // Whatever happens here, the run has ended in order.
        if let Err(problem) = self.finish(begin, run, None, Some(steps)) {
            streams::stderr().line(&format!("warning: no figures of the steps so far: {problem}"));
        }
        Err(stopped)
    }

    /// Evaluates after the last step, if the run does, and informs the listeners.
    pub(crate) fn evaluate_at_end(&mut self, run: &Training) -> Result<Option<Evaluation>> {
        let result = if self.config.evaluation.evaluate { self.evaluate()? } else { None };
        let Some(result) = result else { return Ok(None) };
        let steps = run.progress.steps;
        let evaluation = Evaluation {
            steps,
            epoch: run.last.map_or(run.progress.last_epoch(), |(epoch, _)| epoch),
            result,
            is_final: true,
            is_repeated: run.num_steps > 0 && is_due(self.config.evaluation.eval_every, steps),
        };
        self.listeners.tell(Event::Evaluated(evaluation))?;
        Ok(Some(evaluation))
    }

    /// How the run ends after it was asked to stop: in order, with a word about the checkpoint, unless the launcher has the
    /// last word.
    fn stopped_after(&self, steps: u64) -> Failure {
        let world = &self.trainer.replica.world;
        // All ranks end with one code, although some may not have had the signal, or have it only now.
        let own = self.stop.signal();
        let yes = |is_so: bool| f64::from(u8::from(is_so));
        // For each rank whether it was asked, and at the end how many were interrupted.
        let mut asked = vec![0.0; world.world_size() + 1];
        asked[world.rank()] = yes(own.is_some());
        asked[world.world_size()] = yes(own == Some(SIGINT));
        let heard = world.all_reduce_slice(&mut asked, ReduceOp::Sum);
        let is_interrupted = asked.pop().is_some_and(|count| heard.is_ok() && count > 0.0);
        let signal = if is_interrupted { SIGINT } else { own.unwrap_or(SIGTERM) };
        let others = (0..asked.len()).filter(|&rank| own.is_none() && asked[rank] > 0.0).collect();
        world.dumper().withdraw();
        let reports = world.rank() == 0 && !self.is_launched;
        let message = reports.then(|| {
            let saved = self.config.checkpoints.save.as_deref().map(|folder| (folder, Some(steps)));
            left(saved, matches!(self.config.resume, Some(Resume::IfThere(_))))
        });
        Failure::Stopped { signal, message, others }
    }

    /// Gathers the measurements of all ranks, and reports them. `stopped_after` has the steps of a run that was asked to end.
    pub(crate) fn finish(
        &mut self,
        begin: Instant,
        run: &Training,
        evaluated: Option<Evaluation>,
        stopped_after: Option<u64>,
    ) -> Result<()> {
        let (strategy, mut cx) = self.trainer.parts();
        let digest = strategy.digest(&mut cx)?;
        let Replica { world, model, compute, .. } = &self.trainer.replica;
        let FirstFacts { whole, samples, peak_flops_per_s, initialization, predicted } =
            &self.first;
        // The model of all stages.
        let model = whole.as_ref().unwrap_or(model);
        let memory = RankMemory::new(initialization, &compute.allocator);
        let Training { progress, steps, meter, num_steps, last, cpu, .. } = run;
        let mut report = RankReport::new(steps.clone(), meter, memory, &self.trainer.track, digest);
        report.peak_flops_per_s = *peak_flops_per_s;
        report.cpu_wait_pct = cpu.pct;
        self.listeners.add_to(&mut report);
        let total = begin.elapsed();
        let Some(reports) = world.gather_object(&report, 0)? else { return Ok(()) };
        let of_all = AllSteps::new(reports.iter().map(|report| &report.steps));
        let length = of_all.tokens_per_sample().map_or(1, |tokens| tokens.round() as usize);
        let options = &self.config.strategy.options;
        let flops_per_sample = flops::per_sample(model, samples, length.max(1), options)?;
        let outcome = Outcome {
            transport: world.transport(),
            link: world.link(),
            params: model.layout.num_params(),
            num_steps: *num_steps,
            stopped_after,
            trained: last.map(|(_, sums)| sums),
            has_classes: model.objective.classifies(),
            predicted: predicted.clone(),
            scaling: progress.scaling,
            evaluated,
            regroups: run.regroups.made,
            total,
            flops_per_sample,
            block_flops: match &self.config.pipeline {
                Some(_) => flops::per_block(model, samples, options)?,
                None => None,
            },
            block_names: (0..model.blocks.len()).map(|at| unit_of(model, at).to_owned()).collect(),
        };
        let facts = Facts::new(self.config, &outcome, &reports, &model.layout);
        self.listeners.tell(Event::Ended(&facts))
    }
}
