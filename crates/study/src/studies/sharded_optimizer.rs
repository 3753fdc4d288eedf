//! `paceline bench sharded-optimizer`: the costs and savings of dividing the optimizer's state among the ranks.
//!
//! The same training runs with replicas and with a sharded optimizer. [`memory`] reads the memory of a rank after
//! initialization, before the optimizer's step and after it. [`table`] shows the results.

pub mod memory;
pub mod table;

use clap::Args;
use memory::Memory;
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::Result;
use paceline_host::text::line_width;
use paceline_settings::config::TrainConfig;
use paceline_table::stats;
use paceline_table::table::Table;
use serde::Serialize;

use crate::plan::Case;
use crate::spec::Spec;
use crate::step::StepTimes;
use crate::study::{
    Findings, Measured, SameRanksArgs, Setting, Study, measuring, run_all, warn_of, with_strategy,
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
    /// The number of ranks, and the flags of all studies and of the runs. The optimizer is AdamW by default.
    #[command(flatten)]
    pub same: SameRanksArgs,
}

/// The flag that the study sets, with advice.
const SET_HERE: [(&str, &str); 1] =
    [("strategy", "the study compares several; pass --strategies instead")];
/// The optimizer by default. It has two values of state for each parameter.
const OPTIMIZER: &str = "adamw";

/// The results of a strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The strategy.
    pub strategy: String,
    /// The times of a step.
    pub times: StepTimes,
    /// Clipping and the update of the parameters, in milliseconds: mean over ranks and steps, median over the rounds.
    pub optimizer_ms: f64,
    /// The memory of the rank that has most, one per round.
    pub memory: Vec<Memory>,
}

impl Row {
    /// The row of a strategy.
    fn of(case: &Measured<TrainConfig>) -> Result<Self> {
        Ok(Self {
            strategy: case.name.clone(),
            times: StepTimes::of(&case.rounds)?,
            optimizer_ms: case.median("optimizer_ms")?,
            memory: case.rounds.iter().map(Memory::of).collect::<Result<_>>()?,
        })
    }

    /// The median over the rounds of a part of the memory, in MB of 1e6 bytes.
    fn mb(&self, of: impl Fn(&Memory) -> u64) -> Option<f64> {
        stats::median(self.memory.iter().map(|memory| of(memory) as f64 / 1e6))
    }

    /// The most memory at once in each part of a run, in the order of time: initialization, the passes, the step of the
    /// optimizer.
    fn peaks_mb(&self) -> [f64; 3] {
        let phases: [fn(&Memory) -> u64; 3] =
            [|of| of.init.peak, |of| of.before_step.peak, |of| of.step.peak];
        phases.map(|of| self.mb(of).unwrap_or(0.0))
    }
}

/// The contents of the JSON file, apart from the setting.
#[derive(Debug, Serialize)]
struct Report<'a> {
    ranks: usize,
    optimizer: &'a str,
    #[serde(flatten)]
    table: &'a Table,
}

/// `paceline bench sharded-optimizer`.
fn sharded_optimizer(args: &ShardedOptimizerArgs) -> Result<u8> {
    let (study, ranks) = (&args.same.study, args.same.nproc);
    let given = args.same.check("nobody to share state with", &SET_HERE)?;
    let names = resolve_names(&args.strategies)?;
    check_readers(&args.same.train.0, &names)?;
    let given = given.with_default("optimizer", OPTIMIZER);
    let planned = names.iter().map(|name| {
        let (flags, config) = measuring(&with_strategy(&given, name)?)?;
        Ok((config, Case::new(*name, flags)?))
    });
    let planned = planned.collect::<Result<Vec<(TrainConfig, Case)>>>()?;
    warn_of(planned.iter().map(|(config, _)| config));
    let cases = run_all(study, study.output.as_deref(), planned)?;
    let rows = cases.iter().map(Row::of).collect::<Result<Vec<Row>>>()?;
    let setting = Setting::new(study, &cases[0].of, cases[0].rounds[0].count("params"));
    let optimizer = given.get("optimizer").unwrap_or_default().join(" ");
    let (words, table) = (setting.words(), table::columns().table(&rows));
    let findings = Findings {
        heading: format!("Sharded optimizer, {optimizer}, {ranks} ranks: {words}"),
        notes: Vec::new(),
        text: table::text(&rows, &setting, line_width()),
        report: Report { ranks, optimizer: &optimizer, table: &table },
        table: &table,
        charts: vec![("sharded_optimizer_memory".to_owned(), table::chart(&rows, &setting, ranks))],
    };
    findings.publish(study, &setting)
}

/// The strategies' own names, in the order in which they were passed.
fn resolve_names(given: &[String]) -> Result<Vec<&'static str>> {
    let mut names: Vec<&'static str> = Vec::new();
    for name in given {
        let name = STRATEGIES.get(name)?.name;
        if names.contains(&name) {
            return usage(format!("--strategies: {name} is there twice; pass it once"));
        }
        names.push(name);
    }
    Ok(names)
}

/// Refuses flags that none of the strategies reads.
fn check_readers(given: &Spec, names: &[&str]) -> Result<()> {
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
    use super::memory::Phase;
    use super::*;
    use crate::step::tests::times;

    /// The row of a strategy with a step of these milliseconds and this part of the optimizer's state.
    pub fn row(strategy: &str, step_ms: f64, part: f64) -> Row {
        let shard = (4e6 * part) as u64;
        let of = |peak: u64, in_use: u64| Phase { peak: peak + shard, in_use: in_use + shard };
        let memory = Memory {
            init: of(2_000_000, 2_000_000),
            before_step: of(9_000_000, 4_000_000),
            step: of(4_000_000, 4_000_000),
            parameters: 2_000_000,
            gradients: 2_000_000,
            optimizer: shard,
        };
        Row {
            strategy: strategy.to_owned(),
            times: times(step_ms, 0.5, 0.1 * step_ms, 0.0),
            optimizer_ms: 4.0 * part,
            memory: vec![memory],
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
        check_readers(&prefetch, &["ddp", "sharded3"]).unwrap();
        let said = check_readers(&prefetch, &["ddp", "sharded1"]).unwrap_err().to_string();
        assert!(said.contains("--prefetch: none of the strategies ddp, sharded1"), "{said}");
        assert!(said.contains("add one of sharded3"), "{said}");
    }
}
