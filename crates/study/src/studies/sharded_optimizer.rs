//! `paceline bench sharded-optimizer`: the costs and savings of dividing the optimizer's state among the ranks.
//!
//! The same training runs with replicas and with a sharded optimizer. Reports show the times of a step, and the memory of a rank
//! after initialization, before the optimizer's step and after it.

use clap::Args;
use paceline_choices::strategies::STRATEGIES;
use paceline_collectives::MAX_RANKS;
use paceline_failure::{Result, numbers};
use paceline_host::text::thousands;
use paceline_table::chart::{Axis, Picture, Series};

use crate::flags::TrainFlags;
use crate::outcome::Outcome;
use crate::report::Report;
use crate::scene::Scene;
use crate::spec::Spec;
use crate::study::{
    Setting, Study, StudyArgs, check, measuring, publish, refuse_flags, run_scenes, with_strategy,
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
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Study", value_parser = numbers::within(2, MAX_RANKS))]
    pub nproc: usize,
    /// The flags of all studies.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs. The optimizer is AdamW by default.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// The flag that the study sets, with advice.
const SET_HERE: [(&str, &str); 1] =
    [("strategy", "the study compares several; pass --strategies instead")];
/// The optimizer by default. It has two values of state for each parameter.
const OPTIMIZER: &str = "adamw";

/// The figures that people see: times, and the memory of the rank that has most, at once and in use at the end of each part.
const COLUMNS: [&str; 13] = [
    "step_ms_median",
    "optimizer_ms",
    "comm_exposed_ms",
    "comm_hidden_ms",
    PEAKS[0],
    PEAKS[1],
    PEAKS[2],
    "init_mb",
    "before_step_mb",
    "after_step_mb",
    "parameters_mb",
    "gradients_mb",
    "optimizer_mb",
];
/// The most memory at once in each part of a run, in the order of time.
const PEAKS: [&str; 3] = ["init_peak_mb", "before_step_peak_mb", "step_peak_mb"];

/// `paceline bench sharded-optimizer`.
fn sharded_optimizer(args: &ShardedOptimizerArgs) -> Result<u8> {
    let ShardedOptimizerArgs { nproc: ranks, study, train, .. } = args;
    check(study)?;
    refuse_flags(&train.0, &SET_HERE)?;
    let names = resolve_names(&args.strategies)?;
    check_readers(&train.0, &names)?;
    let given = train.0.with("nproc", ranks).with_default("optimizer", OPTIMIZER);
    let (mut scene, mut configs) = (Scene::new(""), Vec::new());
    for name in &names {
        let (flags, config) = measuring(&with_strategy(&given, name)?)?;
        scene = scene.with(*name, flags);
        configs.push(config);
    }
    let outcome = run_scenes(study, STUDY.name, &[scene])?;
    let setting = Setting::new(&configs[0], outcome.runs[0][0].count("params"));
    let optimizer = given.get("optimizer").unwrap_or_default().join(" ");
    let report = Report {
        title: format!(
            "Sharded optimizer, {optimizer}, {ranks} ranks: {}",
            setting.words(&outcome.origin)
        ),
        question: STUDY.about.to_owned(),
        notes: vec![
            format!("{} parameters; memory of the rank that has most", thousands(setting.params)),
            "peak: the most at once during initialization, in the forward and the backward pass before the optimizer's \
             step, and from there to the end of that step; after: in use at the end of each; then the most of parameters, \
             gradients and optimizer state"
                .to_owned(),
        ],
        columns: COLUMNS.to_vec(),
        charts: vec![("sharded_optimizer_memory".to_owned(), chart(&outcome, &setting, *ranks))],
        setting: Some(setting),
        outcome,
        ..Report::default()
    };
    publish(study, report)
}

/// The chart of the peaks: a line for each strategy.
fn chart(outcome: &Outcome, setting: &Setting, ranks: usize) -> Picture {
    let series = outcome.rows.iter().enumerate().map(|(look, row)| {
        let point = |(at, name): (f64, &str)| Some((at, 1e6 * row.median(name)?));
        let points = [1.0, 2.0, 3.0].into_iter().zip(PEAKS).filter_map(point);
        Series::line(&row.variant, points).look(look)
    });
    let x = "1: initialization, 2: forward and backward pass, 3: optimizer step";
    Picture::lines(
        format!("{}, {ranks} ranks over {}: memory of a rank", setting.model, setting.transport),
        setting.place(&outcome.origin),
        [Axis::linear(x, ""), Axis::linear("The most at once", "B")],
        series.collect(),
    )
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
    use super::*;

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
