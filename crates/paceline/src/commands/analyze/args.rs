//! Flags of `paceline analyze`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use paceline_analysis::hta::{Kind, Options, Rules, StepChoice};
use paceline_analysis::read::{self, TraceFile};
use paceline_analysis::timeline::Timeline;
use paceline_collectives::Link;
use paceline_failure::{Failure, Result};
use paceline_files::printable;

const EXAMPLES: &str = "\
Examples:
  paceline train --profile && paceline analyze profile/ddp
  paceline analyze profile/ddp --select all           a report for every time that the run was profiled
  paceline analyze --trace-files rank0.pt.trace.json rank1.pt.trace.json.gz --output out
  paceline analyze profile/simple_ddp --against profile/ddp    what another strategy does differently
  paceline analyze traces/before --against traces/after    did the change help, and as much as was promised?
  paceline analyze snapshot.pickle                    who allocated the memory of a card
";

/// The most spans that a message names.
const SPANS: usize = 4;

/// Flags of `paceline analyze`.
#[derive(Debug, Default, Args)]
#[command(before_help = EXAMPLES)]
pub struct AnalyzeArgs {
    /// The folder with the traces of a run, such as profile/ddp, or a file of torch.cuda.memory._dump_snapshot
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// The same as DIR
    #[arg(long, value_name = "DIR", conflicts_with = "dir")]
    pub trace_dir: Option<PathBuf>,
    /// Traces of one run, one of each rank, separated by commas or spaces
    #[arg(long, value_name = "FILE", num_args = 1.., value_delimiter = ',')]
    #[arg(conflicts_with_all = ["dir", "trace_dir"])]
    pub trace_files: Vec<PathBuf>,
    /// If the run was profiled several times: report the latest time, or each in a folder run_IDX_TIME/
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = SelectName::Latest)]
    pub select: SelectName,
    /// Look at the last step too, which may have been cut off
    #[arg(long)]
    pub include_last_step: bool,
    /// The name of the spans that are steps, in a program that does not call prof.step()
    #[arg(long, value_name = "NAME", conflicts_with = "hta")]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub step: Option<String>,
    /// Choose the work that counts by the rules of Holistic Trace Analysis (HTA), to compare figures with it
    #[arg(long)]
    pub hta: bool,
    /// Say how many traces are read at a time; all cores are used with or without it
    #[arg(long)]
    pub enable_multiprocessing: bool,
    /// The traces of the same job after a change, or with another strategy: what got faster, which operators are new
    /// or gone, and whether the promised gain came
    #[arg(long, value_name = "AFTER", conflicts_with_all = ["select", "kind", "link"])]
    pub against: Option<PathBuf>,
    /// --against: the steps in which operators are compared, by time per step: all, first, or a step's number
    #[arg(long, value_name = "WHICH", requires = "against", default_value = "all", value_parser = steps)]
    pub steps: StepChoice,
    /// The link between ranks, such as 25gbe or 100gbit,5us: collectives are judged by it
    #[arg(long, value_name = "LINK")]
    pub link: Option<Link>,
    /// Which columns and panels; auto chooses by the collectives in the traces
    #[arg(long, value_enum, value_name = "KIND", default_value_t = KindName::Auto)]
    pub kind: KindName,
    /// Where reports are written [default: DIR relative to the current folder, its first component
    /// replaced by reports or reports_sharding]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

impl AnalyzeArgs {
    /// Reads the traces, and finds their steps.
    pub(super) fn open_all(&self, files: &[TraceFile]) -> Result<Vec<Timeline>> {
        let mut timelines = read::open_all(files, read::open_beginning)?;
        let Some(name) = &self.step else { return Ok(timelines) };
        for timeline in &mut timelines {
            if !timeline.find_steps(Some(name)) {
                return Err(Failure::Usage(format!(
                    "--step {name}: {} has no spans of that name on the host; name a span of record_function{}",
                    printable(&timeline.source),
                    printable(&spans(timeline))
                )));
            }
        }
        Ok(timelines)
    }

    /// The options of the analysis.
    pub(super) fn options(&self) -> Options {
        let kind = match self.kind {
            KindName::Auto => None,
            KindName::Ddp => Some(Kind::Ddp),
            KindName::Sharding => Some(Kind::Sharding),
        };
        let rules = if self.hta { Rules::Hta } else { Rules::Steps };
        Options { kind, include_last_step: self.include_last_step, rules }
    }
}

/// Which recordings of a run that was profiled several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SelectName {
    /// The last
    #[default]
    Latest,
    /// Each by itself
    All,
}

/// Which columns and panels a report has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KindName {
    /// Decided by the traces
    #[default]
    Auto,
    /// All-reduces: every rank holds the whole model
    Ddp,
    /// All collectives, and memory
    Sharding,
}

/// Some names of spans of the program, for a message; empty if it has no spans.
fn spans(timeline: &Timeline) -> String {
    let spans = timeline.annotations.iter().filter(|span| !span.is_device);
    let stem = |name: &'_ str| name.trim_end_matches(|c: char| !c.is_alphabetic()).to_owned();
    let names: BTreeSet<String> = spans.map(|of| stem(timeline.names.text(of.name))).collect();
    let names: Vec<String> = names.into_iter().filter(|of| !of.is_empty()).take(SPANS).collect();
    if names.is_empty() { String::new() } else { format!(", such as {}", names.join(", ")) }
}

fn steps(word: &str) -> std::result::Result<StepChoice, String> {
    match word {
        "first" => Ok(StepChoice::First),
        "all" => Ok(StepChoice::All),
        number => number
            .parse()
            .map(StepChoice::One)
            .map_err(|_| "pass first, all, or a step's number".to_owned()),
    }
}
