//! The work of each rank of a pipeline in a step: lists of actions, made before the step.
//!
//! A pipeline divides a model into stages, and a batch into micro-batches. A [`Schedule`] says in which order a rank takes
//! them. Its lists for all ranks make a [`Plan`], with the messages between the ranks. A plan is checked as a whole before a
//! rank starts: it is complete, its messages match, and its ranks do not deadlock. A [`Timeline`] rehearses it with
//! given durations, which shows where ranks are idle. A [`IdleLedger`] says why they were idle in a measured step.
//!
//! Input: ranks, micro-batches, durations. Output: lists, and when each action would run. This crate knows nothing of
//! tensors, layers or transports.
//!
//! ```
//! use paceline_schedule::{Costs, OneFOneB, Plan, Timeline};
//!
//! let plan = Plan::new(&OneFOneB, 2, 3, |stages| Costs::even(stages, 1.0, 1.0, 1.0))?;
//! assert_eq!(plan.csv(), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
//! let timeline = Timeline::of(&plan, &Costs::even(&plan.shape().placement, 1.0, 1.0, 1.0))?;
//! assert_eq!(timeline.makespan, 3.0 * 3.0 + 3.0); // three micro-batches, and one before and after
//! assert_eq!((plan.in_flight(0), plan.in_flight(1)), (2.0, 1.0));
//! # Ok::<(), paceline_schedule::PlanError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod action;
mod choose;
mod costs;
mod csv;
mod cut;
mod draw;
mod error;
mod ledger;
mod list;
mod part;
mod placement;
mod plan;
mod schedules;
mod timeline;

pub use action::{Action, Kind};
pub use choose::{BlockCosts, CutChoice, best_cut};
pub use costs::Costs;
pub use cut::cut;
pub use draw::drawing;
pub use error::{PlanError, Waiting};
pub use ledger::{
    Gap, IdleCause, IdleLedger, Measured, MeasuredStep, RankAccount, Travelled, Usual, as_run,
    fill_arrivals, messages, on_one_clock, usual,
};
pub use list::{Entry, List};
pub use part::IdlePart;
pub use placement::Placement;
pub use plan::{Plan, Shape};
pub use schedules::{
    DualPipeV, Gpipe, Interleaved1F1B, InterleavedZeroBubble, LoopedBreadthFirst, OneFOneB,
    SCHEDULES, ZbH1, ZbH2, Zbv, named,
};
pub use timeline::{Ran, Timeline};

/// An order in which the ranks of a pipeline take stages and micro-batches.
pub trait Schedule: Send + Sync {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// A description in one line, with its source.
    fn about(&self) -> &'static str;

    /// Which rank has which stages. By default one each.
    fn placement(&self, ranks: usize) -> Placement {
        Placement::line(ranks)
    }

    /// Refuses steps that it does not know, and says which it knows.
    fn check(&self, _shape: &Shape) -> Result<(), PlanError> {
        Ok(())
    }

    /// The arithmetic of a rank in a step, in order. Messages follow from it.
    fn list(&self, shape: &Shape, rank: usize, costs: &Costs) -> Vec<Entry>;
}

impl<S: Schedule + ?Sized> Schedule for &S {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn about(&self) -> &'static str {
        (**self).about()
    }

    fn placement(&self, ranks: usize) -> Placement {
        (**self).placement(ranks)
    }

    fn check(&self, shape: &Shape) -> Result<(), PlanError> {
        (**self).check(shape)
    }

    fn list(&self, shape: &Shape, rank: usize, costs: &Costs) -> Vec<Entry> {
        (**self).list(shape, rank, costs)
    }
}
