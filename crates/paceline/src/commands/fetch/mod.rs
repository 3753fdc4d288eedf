//! `paceline fetch`: a model or a data set by its name. Files of the Hugging Face Hub go into its cache; data sets that are
//! published elsewhere go into a folder, as with `--download`.

pub mod args;

use paceline_choices::data::DATA_SETS;
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::text::{say, say_unbroken};
use paceline_hub::published::Source;
use paceline_hub::{self as hub, Wanted};

use self::args::{DataArgs, FetchCommand, NameArgs};

/// Runs `paceline fetch`. Returns the exit code.
pub fn fetch(command: &FetchCommand) -> Result<u8> {
    let (wanted, NameArgs { name, revision, quiet }) = match command {
        FetchCommand::Model(args) => (Wanted::Weights, args),
        FetchCommand::Data(args) => match (published(&args.name.name), &args.data_dir) {
            (Some(source), _) => return of_folder(source, args),
            (None, None) => (Wanted::Texts, &args.name),
            (None, Some(_)) => {
                return usage(
                    "--data-dir: data sets of the Hub go into its cache; leave it out, and set HF_HOME for another place",
                );
            }
        },
    };
    hub::fetch(wanted, name, revision.as_deref(), *quiet)?;
    Ok(0)
}

/// A data set of `--data` that is published somewhere else than on the Hub.
fn published(name: &str) -> Option<&'static Source> {
    DATA_SETS.get(name).ok()?.of.source
}

/// Does the same as `--download`.
fn of_folder(source: &Source, args: &DataArgs) -> Result<u8> {
    let DataArgs { name: NameArgs { name, revision, quiet }, data_dir, mirror } = args;
    if revision.is_some() {
        return usage(format!("--revision: {name} has no revisions; leave it out"));
    }
    let Some(folder) = data_dir else {
        return usage(format!(
            "paceline fetch data {name} needs --data-dir, the folder for the files"
        ));
    };
    let address = mirror.as_deref().unwrap_or(source.address);
    source
        .fetch(address, folder, *quiet)
        .map_err(|problem| Failure::Usage(format!("paceline fetch data {name}: {problem}")))?;
    say_unbroken(&folder.display().to_string());
    if !quiet {
        say(&format!("Use it: paceline train --data {name} --data-dir {}", folder.printable()));
    }
    Ok(0)
}
