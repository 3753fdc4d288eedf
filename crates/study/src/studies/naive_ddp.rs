//! `paceline bench naive-ddp`: four ways to synchronize gradients, from naive to bucketed.
//!
//! Naive is one all-reduce per parameter after the backward pass, flat is one all-reduce of everything, overlapped is one
//! asynchronous all-reduce per parameter during the backward pass, and bucketed is one per bucket. The best bucket size by
//! formula is known when these runs are done, so it is run then, in turns with the best measured one, unless it makes the same
//! buckets as a size that has been measured.

use clap::Args;
use paceline_failure::Result;
use paceline_model::Layout;
use paceline_strategies::{BucketCaps, plan_buckets};

use crate::noise;
use crate::outcome::Outcome;
use crate::report::{Found, Report};
use crate::scene::Scene;
use crate::spec::Spec;
use crate::studies::bucket_cost::{
    COARSE, Formula, MIB, best, best_found, chart, check_sizes, distinct, size_words,
};
use crate::study::{
    SameRanksArgs, Setting, Study, StudyArgs, layout_of, measuring, publish, run_scenes, warn_of,
    with_strategy,
};

/// The study, as `paceline bench` knows it.
pub const STUDY: Study = Study::new::<NaiveDdpArgs>(
    "naive-ddp",
    "Naive, flat, overlapped and bucketed synchronization, compared",
    |matches| naive_ddp(&crate::study::flags_of(matches)),
);

const EXAMPLES: &str = "\
Examples:
  paceline bench naive-ddp                            2 ranks, a CNN
  paceline bench naive-ddp --link 10gbit,50us --model mlp --num-layers 12 --hidden-dim 512
  paceline bench naive-ddp --model mlp --sizes 1,2,4,8 --json naive.json --charts charts
";

/// Flags of `paceline bench naive-ddp`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct NaiveDdpArgs {
    /// Bucket sizes in MiB, separated by commas [default: 1,10,100,1000]
    #[arg(long, value_name = "MiB", value_delimiter = ',', help_heading = "Study")]
    pub sizes: Vec<f64>,
    /// The number of ranks, and the flags of all studies and of the runs.
    #[command(flatten)]
    pub same: SameRanksArgs,
}

/// The cases without buckets: their descriptions and strategies.
const PLAIN: [(&str, &str); 3] =
    [("naive", "simple_ddp"), ("flat", "flat_ddp"), ("overlapped", "simple_ddp_async")];
/// The cases of [`PLAIN`] whose operations run while no rank computes.
const BLOCKING: usize = 2;
/// The strategy with buckets.
const BUCKETED: &str = "ddp";
/// Flags that the study sets, with advice.
const SET_HERE: [(&str, &str); 3] = [
    ("strategy", "the study runs naive, flat, overlapped and bucketed strategies; leave it out"),
    ("bucket-cap-mb", "it is what the study varies; pass --sizes instead"),
    ("first-bucket-mb", "the first bucket is as large as the others; pass --sizes instead"),
];

/// The figures that people see.
const COLUMNS: [&str; 6] = [
    "num_buckets",
    "step_ms_median",
    "comm_overhead_pct",
    "comm_exposed_ms",
    "comm_hidden_ms",
    "comm_ops_per_step",
];
/// The folder of the runs of the best sizes within the folder of the study.
const FOLDER: &str = "best-size";

/// Makes cases for one model.
#[derive(Debug)]
struct Planner<'a> {
    /// The flags of the runs, with the strategy [`BUCKETED`].
    flags: &'a Spec,
    layout: &'a Layout,
    elem_bytes: usize,
}

impl Planner<'_> {
    /// The scene with these bucket sizes, in MiB.
    fn add(&self, scene: Scene, sizes: &[f64]) -> Scene {
        sizes.iter().fold(scene, |scene, mb| {
            let flags = self.flags.with("bucket-cap-mb", mb).with("first-bucket-mb", mb);
            scene.with(format!("bucketed, {mb} MiB"), flags)
        })
    }

    /// Where the buckets of this size begin. Sizes with the same beginnings make the same buckets.
    fn begins(&self, mb: f64) -> Vec<usize> {
        let bytes = (mb * MIB) as usize;
        let buckets =
            plan_buckets(self.layout, self.elem_bytes, BucketCaps { first_bytes: bytes, bytes });
        buckets.into_iter().map(|bucket| bucket.range.start).collect()
    }

    /// Compares the size by formula with the best measured one. `outcome` has a row for each of `sizes` after those of [`PLAIN`].
    fn best_size(
        &self,
        study: &StudyArgs,
        sizes: &[f64],
        outcome: &Outcome,
        formula: &Formula,
    ) -> Result<Option<Found>> {
        let Some((best, measured)) = best(outcome, "step_ms_median") else { return Ok(None) };
        let by_formula = runnable(formula.best_mb());
        let is_same = |mb: &f64| self.begins(*mb) == self.begins(by_formula);
        let same = sizes.iter().position(is_same);
        let line = if is_same(&measured) {
            format!("{by_formula} MiB makes the same buckets as {measured} MiB, the measured best")
        } else if let Some(same) = same {
            let effect = outcome.effect("step_ms_median", best, PLAIN.len() + same);
            format!(
                "{by_formula} MiB makes the same buckets as {} MiB; its step beside that of the measured best, {measured} MiB: {}",
                sizes[same],
                noise::words(effect)
            )
        } else {
            let folder = study.output.as_ref().map(|folder| folder.join(FOLDER));
            let scene = self.add(Scene::new(""), &[by_formula, measured]);
            let again = run_scenes(study, folder.as_deref(), STUDY.name, &[scene])?;
            let ms = |row: usize| again.rows[row].median("step_ms_median").unwrap_or(f64::NAN);
            format!(
                "once more, in turns: by formula {by_formula} MiB, {:.2} ms; measured best {measured} MiB, {:.2} ms; the first \
                 step beside the second: {}",
                ms(0),
                ms(1),
                noise::words(again.effect("step_ms_median", 1, 0))
            )
        };
        Ok(Some(Found { id: "best_size", lines: vec![line], ..Found::default() }))
    }
}

/// The size with four decimals, as a person would type it. The smallest one holds every parameter alone.
fn runnable(mb: f64) -> f64 {
    ((mb * 1e4).round() / 1e4).max(1e-4)
}

/// `paceline bench naive-ddp`.
fn naive_ddp(args: &NaiveDdpArgs) -> Result<u8> {
    let (study, ranks) = (&args.same.study, args.same.nproc);
    let flags = args.same.check("nothing to communicate", &SET_HERE)?;
    let sizes = check_sizes(if args.sizes.is_empty() { &COARSE } else { &args.sizes })?;
    let (flags, config) = measuring(&flags.with("strategy", BUCKETED))?;
    let layout = layout_of(&config, ranks)?;
    let params = layout.num_trained_params() as u64;
    let elem_bytes = config.strategy.options.precision.grads.size_bytes();
    let bytes = params * elem_bytes as u64;
    let (sizes, note) = distinct(sizes, bytes);
    let planner = Planner { flags: &flags, layout: &layout, elem_bytes };
    let mut scene = Scene::new("");
    for (name, strategy) in PLAIN {
        scene = scene.with(name, with_strategy(&flags, strategy)?);
    }
    warn_of([&config]);
    let scene = planner.add(scene, &sizes);
    let mut outcome = run_scenes(study, study.output.as_deref(), STUDY.name, &[scene])?;
    let bucketed = outcome.rows.iter_mut().skip(PLAIN.len());
    bucketed.zip(&sizes).for_each(|(row, mb)| row.add("bucket_mb", *mb));
    let formula = match config.comm.link {
        Some(link) => Formula::of_link(link, config.comm.algorithm, config.world_size, bytes),
        None => Formula::of_operations(&outcome.runs[..BLOCKING], bytes),
    };
    let mut found = vec![best_found(&outcome), Formula::found(&formula)];
    if let Ok(formula) = &formula {
        found.extend(planner.best_size(study, &sizes, &outcome, formula)?);
    }
    let setting = Setting::new(&config, params);
    let named = PLAIN.map(|(name, strategy)| format!("{name}: {strategy}")).join("; ");
    let named = format!("{named}; bucketed: {BUCKETED}");
    let step = chart(&outcome, "step_ms_median", &setting, None);
    let words = setting.words(&outcome.origin);
    let report = Report {
        title: format!("Synchronization of gradients, {ranks} ranks: {words}"),
        question: STUDY.about.to_owned(),
        notes: note.into_iter().chain([size_words(params, bytes), named]).collect(),
        columns: COLUMNS.to_vec(),
        found,
        charts: vec![("naive_ddp_step".to_owned(), step)],
        setting: Some(setting),
        outcome,
    };
    publish(study, report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_can_be_typed() {
        assert_eq!((runnable(1.234_567), runnable(1e-9)), (1.2346, 1e-4));
    }
}
