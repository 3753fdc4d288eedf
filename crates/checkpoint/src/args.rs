//! Flags of `paceline checkpoint`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The actions on a checkpoint.
#[derive(Debug, Subcommand)]
pub enum CheckpointCommand {
    /// Print where a checkpoint stands, its files, its tensors and the settings of its run
    Show(FolderArgs),
    /// Read all checkpoints in a folder as a whole, and compare them with their digests
    Verify(FolderArgs),
    /// Write the parameters and running statistics as one safetensors file
    Export(ExportArgs),
}

/// A folder.
#[derive(Debug, Args)]
pub struct FolderArgs {
    /// Folder of the checkpoints, as --save names it, or of one of them
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Flags of `paceline checkpoint export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Folder of the checkpoints, of which the latest is exported, or of one of them
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// The file, or with --hugging-face the folder
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Write the optimizer's state too
    #[arg(long, conflicts_with = "hugging_face")]
    pub optimizer: bool,
    /// Write a folder with config.json, model.safetensors and the tokenizer, which Hugging Face's transformers and paceline
    /// generate can load
    #[arg(long)]
    pub hugging_face: bool,
    /// Replace files that are there already
    #[arg(long)]
    pub force: bool,
}
