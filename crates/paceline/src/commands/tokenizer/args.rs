//! Flags of `paceline tokenizer`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

const EXAMPLES: &str = "\
Examples:
  paceline tokenizer train --data-dir my-folder --vocab 1000 --to tokenizer.json
  paceline train --recipe tiny-lm --data-dir my-folder --tokenizer tokenizer.json --vocab 1000
";

/// The actions on tokenizers.
#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    /// Train a tokenizer on texts: byte pair encoding, which makes frequent neighbors one token
    Train(TrainTokenizerArgs),
}

/// Flags of `paceline tokenizer train`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TrainTokenizerArgs {
    /// The texts: one file, or a folder of .txt, .md, .jsonl, .csv and .parquet files, as for paceline train
    #[arg(long, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Tokens at most; 256 of them are the bytes
    #[arg(long, value_name = "N")]
    pub vocab: usize,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// The column of tables that has the texts; without a header, its number from 1
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_column: String,
    /// The first line of CSV files is a row
    #[arg(long)]
    pub no_header: bool,
    /// Leave out and count rows that are empty or cannot be used, instead of refusing the file
    #[arg(long)]
    pub skip_bad_rows: bool,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}
