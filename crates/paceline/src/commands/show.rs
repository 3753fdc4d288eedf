//! `paceline show`: all that a run has reported, as `paceline train --verbose` prints it.

use std::path::PathBuf;

use clap::Args;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::say;
use paceline_observe::views::end_files::SUMMARY_TEXT as FILE_NAME;

use super::compare::folders;

/// The most bytes of a text. It has a line for each bucket, gather and phase of each rank.
const MAX_BYTES: u64 = 16 << 20;

/// Flags of `paceline show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Run folders, as the last lines of a run name them, or folders of run folders
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
}

/// Runs `paceline show`.
///
/// # Errors
///
/// If a folder does not belong to a run, or if its run has not come to its end.
pub fn show(args: &ShowArgs) -> Result<u8> {
    let runs = folders(&args.runs)?;
    let text = |folder: &PathBuf| {
        paceline_files::read_text(&folder.join(FILE_NAME), MAX_BYTES).map_err(|error| {
            Failure::Usage(format!(
                "{}: {FILE_NAME}: {error}; a run has it once it has come to its end",
                folder.printable()
            ))
        })
    };
    let texts = runs.iter().map(text).collect::<Result<Vec<String>>>()?;
    for (folder, text) in runs.iter().zip(&texts) {
        say(&format!("Run folder: {}/", folder.printable()));
        text.lines().for_each(say);
    }
    Ok(0)
}
