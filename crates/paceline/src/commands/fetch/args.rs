//! Flags of `paceline fetch`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

const EXAMPLES: &str = "\
Examples:
  paceline fetch model HuggingFaceTB/SmolLM2-360M-Instruct    then: --pretrained with this name
  paceline fetch data Yelp/yelp_review_full                   then: --data-dir with this name
  paceline fetch model smollm2-360m --revision main           a short name, and a revision
  paceline fetch data mnist --data-dir ~/mnist                then: --data mnist --data-dir ~/mnist
";

/// The kinds of things to fetch.
#[derive(Debug, Subcommand)]
#[command(before_help = EXAMPLES)]
pub enum FetchCommand {
    /// A model of the Hugging Face Hub, into the cache that transformers uses: settings, weights, tokenizer
    Model(NameArgs),
    /// A data set: texts of the Hugging Face Hub into its cache, or mnist or cifar10 into a folder
    Data(DataArgs),
}

/// A name on the Hub.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// OWNER/NAME on the Hub, or a short name: smollm2-360m, yelp
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// Print only where the files are
    #[arg(long)]
    pub quiet: bool,
}

/// A data set.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// The data set.
    #[command(flatten)]
    pub name: NameArgs,
    /// mnist and cifar10: folder for the files
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// mnist and cifar10: fetch them from this URL instead of the usual one
    #[arg(long, value_name = "URL", requires = "data_dir")]
    pub mirror: Option<String>,
}
