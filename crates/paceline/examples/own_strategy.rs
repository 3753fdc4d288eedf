//! A strategy of your own: gradients travel in two pieces, the first one during the backward pass.
//! `cargo run --release --example own_strategy -- train --strategy two_pieces --late 30 --nproc 2`

use std::process::ExitCode;

use paceline::prelude::*;
use paceline::strategies::Result;

/// The flags of the strategy.
#[derive(Debug, Args)]
struct Settings {
    /// two_pieces: percentage of the gradients that waits for the end of the backward pass
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(..=100))]
    late: u8,
}

impl Own for Settings {
    const NAME: &str = "two_pieces";
    const ABOUT: &str = "Two all-reduces, one of them during backward";
}

impl OwnStrategy for Settings {}

impl StrategySettings for Settings {
    fn build(&self) -> paceline::Result<Box<dyn Strategy>> {
        Ok(Box::new(TwoPieces { late: self.late, split: 0, missing: 0, sent: None }))
    }
}

/// The backward pass begins at the last layer, so the gradients behind `split` are final first. `missing` are not yet.
struct TwoPieces {
    late: u8,
    split: usize,
    missing: usize,
    sent: Option<Work>,
}

impl Strategy for TwoPieces {
    fn name(&self) -> &'static str {
        Settings::NAME
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Exact // each element is the mean over the ranks, in the order of the group
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let layout = &replica.model.layout;
        let late = layout.trained_len() * usize::from(self.late) / 100;
        let starts = layout.trained().map(|(_, param)| param.start);
        let early: Vec<usize> = starts.filter(|start| *start >= late).collect();
        self.missing = early.len();
        self.split = early.first().copied().unwrap_or(layout.trained_len());
        Ok(())
    }

    fn begin_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        self.sent = None; // of a step that has failed
        self.prepare(cx.replica)
    }

    fn gradient_ready(&mut self, cx: &mut StepContext, id: ParamId) -> Result<()> {
        let Replica { model, storage, group, .. } = cx.replica;
        self.missing -= usize::from(model.layout.param(id).start >= self.split);
        if self.missing == 0 && self.sent.is_none() {
            let early = storage.grads().slice(self.split..model.layout.trained_len())?;
            self.sent = Some(group.all_reduce_async(&early, ReduceOp::Mean)?);
        }
        Ok(())
    }

    fn finish_gradients(&mut self, cx: &mut StepContext) -> Result<()> {
        let late = cx.replica.storage.grads().slice(0..self.split)?;
        cx.track.record(span::EXPOSED, || cx.replica.group.all_reduce(&late, ReduceOp::Mean))?;
        if let Some(early) = self.sent.take() {
            cx.wait(&early)?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    Program::new().strategy::<Settings>().main()
}
