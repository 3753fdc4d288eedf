//! `paceline bench sharded-optimizer`: what it costs and saves to divide the state of the optimizer among the ranks.
//!
//! The same training runs with replicas and with a sharded optimizer. [`memory`] reads the memory of a rank after
//! initialization, before the optimizer's step and after it. [`table`] shows the results.

pub mod memory;
pub mod table;

use clap::Args;
use memory::Memory;
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::{Failure, Result};
use paceline_host::text::{line_width, say, warn};
use paceline_launch::launcher;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_settings::config::TrainConfig;
use serde::Serialize;

use crate::flags::TrainFlags;
use crate::plan::Case;
use crate::rank::Spread;
use crate::spec::Spec;
use crate::study::{
    Setting, Study, StudyArgs, check, csv_of, measuring, median_of, run_all, with_strategy,
    write_files,
};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study = Study::new::<ShardedOptimizerArgs>(
    "sharded-optimizer",
    "Step time and memory with a sharded optimizer and without",
    |matches| sharded_optimizer(&crate::study::flags_of(matches)),
);

const EXAMPLES: &str = "\
Examples:
  paceline bench sharded-optimizer                    ddp and sharded1, 2 ranks, a CNN, AdamW
  paceline bench sharded-optimizer --model mlp --hidden-dim 1024 --link 10gbit,50us
  paceline bench sharded-optimizer --strategies ddp,zero1,sharded1,sharded2,sharded3 --nproc 4
";

/// Flags of `paceline bench sharded-optimizer`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct ShardedOptimizerArgs {
    /// Strategies to compare, separated by commas. The others are compared with the first one
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_values = ["ddp", "sharded1"],
        value_parser = STRATEGIES.parser(),
        hide_possible_values = true,
        help_heading = "Study"
    )]
    pub strategies: Vec<String>,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Study")]
    pub nproc: usize,
    /// What all studies have.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs. The optimizer is AdamW by default.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// The optimizer by default. It has two values of state for each parameter.
const OPTIMIZER: &str = "adamw";

/// The results of a strategy. Times are per step, in milliseconds. Memory is that of the rank that has most, in MB of 1e6
/// bytes. All are medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The strategy.
    pub strategy: String,
    /// The time of a step of the slowest rank.
    pub step_ms: f64,
    /// The shortest of the rounds' step times.
    pub step_ms_min: f64,
    /// The longest of the rounds' step times.
    pub step_ms_max: f64,
    /// How many rounds there are.
    pub rounds: usize,
    /// Clipping and the update of the parameters: mean over ranks and steps.
    pub optimizer_ms: f64,
    /// Exposed communication in percent of the step.
    pub exposed_pct: f64,
    /// The most memory at once during initialization.
    pub init_peak_mb: f64,
    /// The most memory at once in the forward and the backward pass.
    pub before_step_peak_mb: f64,
    /// The most memory at once from the end of the backward pass to the end of the optimizer's step.
    pub step_peak_mb: f64,
    /// Memory in use after initialization.
    pub init_mb: f64,
    /// Memory in use before the optimizer's step.
    pub before_step_mb: f64,
    /// Memory in use after the optimizer's step.
    pub after_step_mb: f64,
    /// The part of it that parameters have.
    pub parameters_mb: f64,
    /// The part of it that gradients have.
    pub gradients_mb: f64,
    /// The part of it that the state of the optimizer has.
    pub optimizer_mb: f64,
}

impl Row {
    /// The row of a strategy, from the summaries of its rounds.
    fn of(strategy: &str, rounds: &[RunSummary]) -> Result<Self> {
        let step = Spread::of(rounds.iter().map(|run| run.number("step_ms_median")))
            .ok_or_else(|| Failure::Run("a summary lacks step_ms_median".into()))?;
        let memory = rounds.iter().map(Memory::of).collect::<Result<Vec<_>>>()?;
        let mb = |of: fn(&Memory) -> u64| -> Result<f64> {
            let bytes = Spread::of(memory.iter().map(|memory| Some(of(memory) as f64)));
            let bytes = bytes.ok_or_else(|| Failure::Run("the study has no rounds".into()))?;
            Ok(bytes.median / 1e6)
        };
        Ok(Self {
            strategy: strategy.to_owned(),
            step_ms: step.median,
            step_ms_min: step.min,
            step_ms_max: step.max,
            rounds: step.rounds,
            optimizer_ms: median_of(rounds, "optimizer_ms")?,
            exposed_pct: median_of(rounds, "comm_overhead_pct")?,
            init_peak_mb: mb(|memory| memory.init.peak)?,
            before_step_peak_mb: mb(|memory| memory.before_step.peak)?,
            step_peak_mb: mb(|memory| memory.step.peak)?,
            init_mb: mb(|memory| memory.init.in_use)?,
            before_step_mb: mb(|memory| memory.before_step.in_use)?,
            after_step_mb: mb(|memory| memory.step.in_use)?,
            parameters_mb: mb(|memory| memory.parameters)?,
            gradients_mb: mb(|memory| memory.gradients)?,
            optimizer_mb: mb(|memory| memory.optimizer)?,
        })
    }

    /// The step times of the rounds.
    fn step(&self) -> Spread {
        Spread {
            median: self.step_ms,
            min: self.step_ms_min,
            max: self.step_ms_max,
            rounds: self.rounds,
        }
    }

    /// The most memory at once in the run.
    fn peak_mb(&self) -> f64 {
        self.init_peak_mb.max(self.before_step_peak_mb).max(self.step_peak_mb)
    }
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    ranks: usize,
    optimizer: &'a str,
    rows: &'a [Row],
}

/// `paceline bench sharded-optimizer`.
fn sharded_optimizer(args: &ShardedOptimizerArgs) -> Result<u8> {
    check(&args.study)?;
    launcher::check_num_ranks("--nproc", args.nproc)?;
    if args.nproc == 1 {
        return usage("--nproc 1: one rank has nobody to share state with; pass 2 or more");
    }
    let given = &args.train.0;
    let names = resolve_names(&args.strategies)?;
    check_flags(given, &names)?;
    let given = given.with("nproc", args.nproc).with_default("optimizer", OPTIMIZER);
    let planned = names.iter().map(|name| measuring(&with_strategy(&given, name)?));
    let planned = planned.collect::<Result<Vec<(Spec, TrainConfig)>>>()?;
    let mut warnings: Vec<&String> = planned.iter().flat_map(|(_, of)| &of.warnings).collect();
    warnings.dedup();
    for warning in warnings {
        warn(warning);
    }
    let cases =
        names.iter().zip(&planned).map(|(name, (flags, _))| Case::new(*name, flags.clone()));
    let cases = cases.collect::<Result<Vec<Case>>>()?;
    let found = run_all(&args.study, &cases)?;
    let rows = names.iter().zip(&found).map(|(name, rounds)| Row::of(name, rounds));
    let rows = rows.collect::<Result<Vec<Row>>>()?;
    let (_, config) = &planned[0];
    let setting = Setting::new(&args.study, config, found[0][0].count("params"));
    let optimizer = given.get("optimizer").unwrap_or_default().join(" ");
    say(&format!("Sharded optimizer, {}, {} ranks: {}", optimizer, args.nproc, setting.words()));
    say(&format!("\n{}", table::text(&rows, &setting, line_width())));
    let report =
        Report { setting: &setting, ranks: args.nproc, optimizer: &optimizer, rows: &rows };
    let chart = ("sharded_optimizer_memory".to_owned(), table::chart(&rows, &setting, args.nproc));
    write_files(&args.study, &report, &csv_of(&rows)?, &[chart])?;
    Ok(0)
}

/// The strategies' own names, in the order in which they were passed.
fn resolve_names(given: &[String]) -> Result<Vec<&'static str>> {
    let mut names: Vec<&'static str> = Vec::new();
    for name in given {
        let name = STRATEGIES.get(name)?.name();
        if names.contains(&name) {
            return usage(format!("--strategies: {name} is there twice; pass it once"));
        }
        names.push(name);
    }
    Ok(names)
}

/// Refuses flags that the study sets, and flags that none of the strategies reads.
fn check_flags(given: &Spec, names: &[&str]) -> Result<()> {
    if given.has("strategy") {
        return usage("--strategy: the study compares several; pass --strategies instead");
    }
    for key in given.keys() {
        let readers = STRATEGIES.readers(key);
        if !readers.is_empty() && !readers.iter().any(|reader| names.contains(reader)) {
            return usage(format!(
                "--{key}: none of the strategies {} reads it; leave it out, or add one of {} to --strategies",
                names.join(", "),
                readers.join(", ")
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The row of a strategy with a step of these milliseconds and this part of the optimizer's state.
    pub fn row(strategy: &str, step_ms: f64, part: f64) -> Row {
        Row {
            strategy: strategy.to_owned(),
            step_ms,
            step_ms_min: step_ms - 0.5,
            step_ms_max: step_ms + 0.5,
            rounds: 3,
            optimizer_ms: 4.0 * part,
            exposed_pct: 10.0,
            init_peak_mb: 2.0 + 4.0 * part,
            before_step_peak_mb: 9.0 + 4.0 * part,
            step_peak_mb: 4.0 + 4.0 * part,
            init_mb: 2.0 + 4.0 * part,
            before_step_mb: 4.0 + 4.0 * part,
            after_step_mb: 4.0 + 4.0 * part,
            parameters_mb: 2.0,
            gradients_mb: 2.0,
            optimizer_mb: 4.0 * part,
        }
    }

    #[test]
    fn names_are_the_strategies_own() {
        let of = |names: &[&str]| {
            resolve_names(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["ddp", "pytorch_zero1"]).unwrap(), ["ddp", "sharded1"]);
        let twice = of(&["sharded1", "pytorch_zero1"]).unwrap_err().to_string();
        assert!(twice.contains("--strategies: sharded1 is there twice"), "{twice}");
    }

    #[test]
    fn a_flag_has_a_strategy_that_reads_it() {
        let prefetch = Spec::default().with("prefetch", 2);
        check_flags(&prefetch, &["ddp", "sharded3"]).unwrap();
        let said = check_flags(&prefetch, &["ddp", "sharded1"]).unwrap_err().to_string();
        assert!(said.contains("--prefetch: none of the strategies ddp, sharded1"), "{said}");
        assert!(said.contains("add one of sharded3"), "{said}");
    }
}
