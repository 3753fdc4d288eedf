//! The flags of `paceline lab`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use paceline_failure::Result;
use paceline_failure::numbers::{above_zero, within};
use paceline_failure::outputs::check_folder;
use paceline_settings::part::Part;

use crate::flags::Swept;
use crate::predict::flags::link;
use crate::spec::Spec;
use crate::usage;

const EXAMPLES: &str = "\
Examples:
  paceline lab                                        the experiments, a line each
  paceline lab async-copy                             about two minutes
  paceline lab grad-accum --links default,1gbe        on links of one's own choice
  paceline lab memory-layout --data cifar10 --data-dir ~/cifar
  paceline lab buckets --sizes 1,4,16 --links 10gbe   sizes of one's own choice
  paceline lab --report lab                           one page of all that is in a folder
";

/// Flags of `paceline lab`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct LabArgs {
    /// The experiment; without it, all are listed
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(super::names()))]
    pub experiment: Option<String>,
    /// Make one page of all experiments in this folder and those inside it
    #[arg(long, value_name = "DIR", conflicts_with = "experiment", help_heading = "Lab")]
    pub report: Option<PathBuf>,
    /// parallelism, grad-accum, buckets: links to emulate, separated by commas, by name or as 10gbit:50us; default is none
    #[arg(long, value_name = "LINK", value_delimiter = ',', help_heading = "Lab")]
    pub links: Vec<String>,
    /// buckets: sizes in MiB, separated by commas [default: from a 64th of the gradients to all of them]
    #[arg(long, value_name = "MiB", value_delimiter = ',', help_heading = "Lab", value_parser = above_zero)]
    pub sizes: Vec<f64>,
    /// The most times that each variant is run. The runs alternate in rounds
    #[arg(long, value_name = "R", default_value_t = 30, help_heading = "Lab", value_parser = crate::rounds)]
    pub rounds: usize,
    /// No more rounds than three are made once the runs have taken this many seconds. Variants whose effect
    /// is unclear go on for twice as long
    #[arg(long, value_name = "SECONDS", default_value_t = 80.0, help_heading = "Lab", value_parser = within(0.0, MOST_SECONDS))]
    pub seconds: f64,
    /// No more rounds than three are made once each effect is known to this many percent, up and down
    #[arg(long, value_name = "PCT", default_value_t = 1.0, help_heading = "Lab", value_parser = within(0.001, 100.0))]
    pub within: f64,
    /// Seconds that a run may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Lab", value_parser = crate::seconds)]
    pub run_limit: f64,
    /// Folder for all files. The same command again continues an experiment that was interrupted [default:
    /// lab/TIME-NAME]
    #[arg(long, value_name = "DIR", help_heading = "Lab")]
    pub output: Option<PathBuf>,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: Part<Swept>,
}

/// The links by default.
const LINKS: [&str; 2] = ["default", "1gbit:50us"];
/// The longest time for rounds, in seconds: a day.
const MOST_SECONDS: f64 = 86_400.0;

impl LabArgs {
    /// Checks the common flags of all experiments.
    pub(super) fn check(&self) -> Result<()> {
        let only = [
            ("--sizes", !self.sizes.is_empty(), &["buckets"][..]),
            ("--links", !self.links.is_empty(), &["parallelism", "grad-accum", "buckets"]),
        ];
        let name = self.experiment.as_deref().unwrap_or_default();
        let misplaced = only.iter().find(|(_, is_given, of)| *is_given && !of.contains(&name));
        if let Some((flag, _, of)) = misplaced {
            return usage(format!("{flag} is for {}; leave it out", of.join(", ")));
        }
        self.output.as_deref().map_or(Ok(()), |folder| {
            check_folder("--output", folder, "pass a folder that you can write to")
        })
    }

    /// A name and the specification on each link to emulate. `default` is the transport without a link.
    pub(super) fn on_links(&self, base: &Spec) -> Result<Vec<(String, Spec)>> {
        let given = self.links.iter().map(String::as_str);
        let names: Vec<&str> = if self.links.is_empty() { LINKS.to_vec() } else { given.collect() };
        let on_link = |name: &str| {
            if ["default", "none"].contains(&name) {
                return Ok(("without a link".to_owned(), base.clone()));
            }
            let text = name.replace(':', ",");
            link("--links", &text)?;
            Ok((format!("link {text}"), base.with("link", &text)))
        };
        names.into_iter().map(on_link).collect()
    }
}
