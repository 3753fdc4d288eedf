//! `paceline bench buckets`: the same training with larger and larger buckets, compared with one
//! all-reduce per parameter and with a single all-reduce of all gradients.

use clap::Args;
use paceline_choices::strategies::STRATEGIES;
use paceline_failure::Result;

use crate::report::Report;
use crate::scene::Scene;
use crate::studies::bucket_cost::{
    COARSE, Formula, MIB, best_found, chart, check_sizes, distinct, size_words,
};
use crate::study::{
    SameRanksArgs, Setting, Study, layout_of, measuring, publish, run_scenes, warn_of,
};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study =
    Study::new::<BucketsArgs>("buckets", "Which bucket size hides communication best", |matches| {
        buckets(&crate::study::flags_of(matches))
    });

const EXAMPLES: &str = "\
Examples:
  paceline bench buckets                              2 ranks, a CNN
  paceline bench buckets --link 10gbit,50us --channels 64 128 256 --hidden 2048
  paceline bench buckets --model mlp --sizes 1,2,4,8,16,32,64,128 --charts charts
";

/// Flags of `paceline bench buckets`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct BucketsArgs {
    /// Bucket sizes in MiB, separated by commas [default: 1, 10, 100, 1000, and powers of
    /// two from 1/32 of the gradients up to the first one that holds them all]
    #[arg(long, value_name = "MiB", value_delimiter = ',', help_heading = "Study")]
    pub sizes: Vec<f64>,
    /// The number of ranks, and the flags of all studies and of the runs.
    #[command(flatten)]
    pub same: SameRanksArgs,
}

/// The flag that the study sets, with advice.
const SET_HERE: [(&str, &str); 1] =
    [("bucket-cap-mb", "it is what the study varies; pass --sizes instead")];
/// The sizes in powers of two begin with at most this fraction (1/32) of the gradients.
const SMALLEST_PART: f64 = 32.0;
/// Strategies that buckets are compared with, and their descriptions.
const BASELINES: [(&str, &str); 2] =
    [("simple_ddp", "one all-reduce per parameter"), ("flat_ddp", "one all-reduce of everything")];
/// The figures that people see.
const COLUMNS: [&str; 5] =
    ["num_buckets", "step_ms_median", "comm_overhead_pct", "comm_exposed_ms", "comm_hidden_ms"];

/// `paceline bench buckets`.
fn buckets(args: &BucketsArgs) -> Result<u8> {
    let (study, ranks) = (&args.same.study, args.same.nproc);
    let given = args.same.check("nothing to communicate", &SET_HERE)?;
    let (measured, config) = measuring(&given.with_default("strategy", "ddp"))?;
    let params = layout_of(&config, ranks)?.num_trained_params() as u64;
    let (sizes, note) = distinct(resolve_sizes(&args.sizes, 4 * params)?, 4 * params);
    let strategy = config.strategy.name();
    if !STRATEGIES.readers("bucket-cap-mb").contains(&strategy) {
        return usage(format!(
            "--strategy {strategy} has no buckets; pass ddp or another one that has"
        ));
    }
    warn_of([&config]);
    let mut scene = Scene::new("");
    for mb in &sizes {
        let name = format!("{strategy}, buckets of {mb} MiB");
        scene = scene.with(name, measured.with("bucket-cap-mb", mb));
    }
    let without = measured.without(&["first-bucket-mb", "no-gradient-view", "top-k"]);
    for (name, what) in BASELINES {
        scene = scene.with(format!("{name}, {what}"), without.with("strategy", name));
    }
    let mut outcome = run_scenes(study, study.output.as_deref(), STUDY.name, &[scene])?;
    outcome.rows.iter_mut().zip(&sizes).for_each(|(row, mb)| row.add("bucket_mb", *mb));
    let setting = Setting::new(&config, params);
    let formula = Formula::of_exposed(&outcome, 4 * params);
    let step = chart(&outcome, "step_ms_median", &setting, None);
    let exposed = chart(&outcome, "comm_exposed_ms", &setting, formula.as_ref().ok());
    let report = Report {
        title: format!("Buckets of {strategy}, {ranks} ranks: {}", setting.words(&outcome.origin)),
        question: STUDY.about.to_owned(),
        notes: note.into_iter().chain([size_words(params, 4 * params)]).collect(),
        columns: COLUMNS.to_vec(),
        found: vec![best_found(&outcome), Formula::found(&formula)],
        charts: vec![("buckets_step".to_owned(), step), ("buckets_exposed".to_owned(), exposed)],
        setting: Some(setting),
        outcome,
    };
    publish(study, report)
}

/// The sizes, ascending and without duplicates. By default: the published sizes, and powers of two from a
/// small part of the gradients up to the first one that holds all of them, since larger ones change
/// nothing.
fn resolve_sizes(given: &[f64], gradient_bytes: u64) -> Result<Vec<f64>> {
    let mut sizes = check_sizes(given)?;
    if sizes.is_empty() {
        let all = gradient_bytes as f64 / MIB;
        let first = (all / SMALLEST_PART).log2().floor() as i32;
        let powers = (first..).map(|power| 2f64.powi(power));
        let fine = powers.take_while(|mb| *mb < 2.0 * all && *mb < COARSE[3]);
        sizes = check_sizes(&COARSE.into_iter().chain(fine).collect::<Vec<_>>())?;
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_sizes_end_where_one_bucket_holds_all() {
        assert_eq!(
            resolve_sizes(&[], 2_752_552).unwrap(),
            [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0, 1000.0]
        );
        let many = resolve_sizes(&[], 400_000_000).unwrap();
        let expected = [1., 8., 10., 16., 32., 64., 100., 128., 256., 512., 1000.];
        assert_eq!(many, expected);
        assert_eq!(resolve_sizes(&[], u64::MAX).unwrap().last(), Some(&1000.0));
        assert_eq!(resolve_sizes(&[4.0, 0.5, 4.0], 1).unwrap(), [0.5, 4.0]);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(resolve_sizes(&[1.0, bad], 1).is_err(), "{bad}");
        }
    }
}
