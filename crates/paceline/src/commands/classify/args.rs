//! Flags of `paceline classify`.

use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  paceline classify --model ckpt 'what a film'
  paceline classify --model ckpt --file reviews.csv --text-column review > answers.csv
  cut -f 2 letters.tsv | paceline classify --model my-model --all
";

/// Flags of `paceline classify`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct ClassifyArgs {
    /// A checkpoint, the folder of --save or a run folder, as training has left it; or a folder with config.json,
    /// model.safetensors (or its index) and tokenizer.json, as Hugging Face stores them; or a model of the Hugging Face Hub
    /// (paceline fetch model)
    #[arg(long = "model", value_name = "DIR|NAME")]
    pub folder: PathBuf,
    /// The texts. Without any, and without --file, each line of standard input is a text
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    pub texts: Vec<String>,
    /// Read the texts from a file: the column --text-column of .csv, .jsonl and .parquet, or each line of any other file. Texts of a
    /// file or of standard input are answered with a CSV of their classes and probabilities, in their order
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The column of a table that has the texts; without a header, its number from 1
    #[arg(long, value_name = "NAME", default_value = "text", requires = "file")]
    pub text_column: String,
    /// The first line of a CSV file is a row
    #[arg(long, requires = "file")]
    pub no_header: bool,
    /// Also state the probabilities of all other classes
    #[arg(long)]
    pub all: bool,
}
