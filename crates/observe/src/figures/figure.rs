//! The type of a figure; the figures are in [`table`](crate::figures::table).

use paceline_checkpoint::progress::{Evaluation, LossScaling};
use paceline_table::table::Head;
use serde_json::Value;

use crate::figures::event::{Event, Regrouped, Save, StepDone};
use crate::figures::facts::Facts;
use crate::record::ranks::Ranks;
use crate::record::steps::AllSteps;
use crate::record::times::StepTimes;

/// A number or a word that a run reports under one name in every file and view.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Its name: the key in `metrics.jsonl` and `summary.json`.
    pub name: &'static str,
    /// Its name for people; the unit is shown beside it.
    pub label: &'static str,
    /// Its unit; empty for words and plain numbers.
    pub unit: &'static str,
    /// How many decimals are shown; files have twelve digits.
    pub decimals: usize,
    /// Its meaning and computation.
    pub definition: &'static str,
    /// How the values of the ranks are combined into one.
    pub ranks: Ranks,
    /// The source of its values.
    pub source: Source,
    /// Whether `metrics.jsonl` has it.
    pub in_metrics: bool,
    /// Whether `summary.json` has it.
    pub in_summary: bool,
    /// Its tag in TensorBoard: a section, a slash and a name.
    pub curve: Option<&'static str>,
    /// Whether the console prints it.
    pub on_console: bool,
    /// Whether it is one of the disjoint times that add up to a step of the main thread.
    pub is_part_of_step: bool,
    /// Whether a comparison has it as a column.
    pub compared: Compared,
    /// Which of its values are better, if the table of a sweep has it: cases can then be ranked by it.
    pub swept: Option<Better>,
    /// Another position in a summary: a JSON pointer, and a factor for the value there.
    pub elsewhere: Option<(&'static str, f64)>,
}

/// The source of a figure's values.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// The position of the run, from steps and epochs that count from 1. Lines of `metrics.jsonl` begin with it.
    Position(fn(u64, u64) -> u64),
    /// A quantity of each step, times a factor. The value of a rank is the mean over its measured steps.
    Times(fn(&StepTimes) -> u64, f64),
    /// A step, if it has this figure.
    Step(fn(&StepDone) -> Option<Value>),
    /// An evaluation, if it has this figure. A run has the value of the evaluation at its end.
    Evaluation(fn(&Evaluation) -> Option<f64>),
    /// The loss scale after a step, or at the end of a run, if the loss is scaled.
    Scaling(fn(&LossScaling) -> Value),
    /// The time that saving a checkpoint took.
    Save(fn(&Save) -> f64),
    /// A change of the ranks.
    Regrouped(fn(&Regrouped) -> Value),
    /// A run, and the rule by which the values of its ranks are combined.
    Run(fn(&Facts, Ranks) -> Value),
    /// The summary of a run, together with the inputs and results of the comparison.
    Comparison,
}

/// The place of a figure in a comparison of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// It is not compared.
    No,
    /// The console shows it.
    First,
    /// It is in the files, and on the console with `--verbose`.
    Second,
}

/// Which values of a figure are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Low values: times, losses, memory.
    Lower,
    /// High values: throughput, accuracy.
    Higher,
}

impl Figure {
    /// A figure that no view shows yet.
    pub const fn new(
        name: &'static str,
        (label, unit, decimals): (&'static str, &'static str, usize),
        ranks: Ranks,
        source: Source,
        definition: &'static str,
    ) -> Self {
        Self {
            name,
            label,
            unit,
            decimals,
            definition,
            ranks,
            source,
            in_metrics: false,
            in_summary: false,
            curve: None,
            on_console: false,
            is_part_of_step: false,
            compared: Compared::No,
            swept: None,
            elsewhere: None,
        }
    }

    /// The head of its column in tables.
    pub const fn head(&self) -> Head {
        Head::new(self.name, self.label, (self.unit, self.decimals), self.definition)
    }

    /// Adds it to `metrics.jsonl`.
    pub const fn metrics(mut self) -> Self {
        self.in_metrics = true;
        self
    }

    /// Adds it to `summary.json`.
    pub const fn summary(mut self) -> Self {
        self.in_summary = true;
        self
    }

    /// Adds a curve in TensorBoard.
    pub const fn curve(mut self, tag: &'static str) -> Self {
        self.curve = Some(tag);
        self
    }

    /// Adds it to the console.
    pub const fn console(mut self) -> Self {
        self.on_console = true;
        self
    }

    /// Adds it to the console, as a part of the main thread's step.
    pub const fn part_of_step(mut self) -> Self {
        self.is_part_of_step = true;
        self.console()
    }

    /// Adds it to comparisons and their tables on the console.
    pub const fn first(mut self) -> Self {
        self.compared = Compared::First;
        self
    }

    /// Adds it to the files of a comparison.
    pub const fn second(mut self) -> Self {
        self.compared = Compared::Second;
        self
    }

    /// In the table of a sweep, which can rank its cases by it.
    pub const fn swept(mut self, better: Better) -> Self {
        self.swept = Some(better);
        self
    }

    /// Says that summaries have it, also or only, at this JSON pointer, times `factor`.
    pub const fn elsewhere(mut self, pointer: &'static str, factor: f64) -> Self {
        self.elsewhere = Some((pointer, factor));
        self
    }

    /// Its value at an event that has a [position](Event::position), if the event has it.
    pub fn at(&self, event: &Event) -> Option<Value> {
        let (steps, epoch) = event.position()?;
        match (self.source, event) {
            (Source::Position(of), _) => Some(of(steps, epoch + 1).into()),
            (Source::Times(of, 1.0), Event::Step(step)) => Some(of(&step.times).into()),
            (Source::Times(of, factor), Event::Step(step)) => {
                Some((of(&step.times) as f64 * factor).into())
            }
            (Source::Step(of), Event::Step(step)) => of(step),
            (Source::Scaling(of), Event::Step(step)) => step.scaling.as_ref().map(of),
            (Source::Evaluation(of), Event::Evaluated(of_test)) => of(of_test).map(Value::from),
            (Source::Save(of), Event::Saved(save)) => Some(of(save).into()),
            (Source::Regrouped(of), Event::Regrouped(regrouped)) => Some(of(regrouped)),
            _ => None,
        }
    }

    /// Its value in a run, which is null if nothing was measured; `None` if it is not a figure of runs.
    pub fn of_run(&self, facts: &Facts) -> Option<Value> {
        match self.source {
            Source::Run(of) => Some(of(facts, self.ranks)),
            Source::Evaluation(of) => Some(facts.outcome.evaluated.as_ref().and_then(of).into()),
            Source::Scaling(of) => Some(facts.outcome.scaling.as_ref().map(of).into()),
            Source::Times(..) => Some(self.of_steps(&facts.steps).into()),
            _ => None,
        }
    }

    /// The mean over the measured steps, combined over the ranks, of a quantity of each step.
    pub fn of_steps(&self, steps: &AllSteps) -> Option<f64> {
        let Source::Times(of, factor) = self.source else { return None };
        steps.combine(self.ranks, of).map(|value| value * factor)
    }

    /// Its value in a summary that was written by this version or an earlier one.
    pub fn read(&self, summary: &Value) -> Option<f64> {
        let own = summary.get(self.name).and_then(Value::as_f64);
        own.or_else(|| {
            let (pointer, factor) = self.elsewhere?;
            Some(summary.pointer(pointer)?.as_f64()? * factor)
        })
    }

    /// The value without the unit.
    pub fn shown(&self, value: f64) -> String {
        format!("{value:.*}", self.decimals)
    }

    /// The value with the unit.
    pub fn with_unit(&self, value: f64) -> String {
        format!("{} {}", self.shown(value), self.unit)
    }
}
