//! Where a run begins: anew, or where a checkpoint stands, and the same on every rank.
//!
//! It knows what was asked for; what a checkpoint is, [`checkpoint`] knows.

use std::path::{Path, PathBuf};

use paceline_model::{Model, Optimizer};
use paceline_strategies::Replica;
use serde::Serialize;

use crate::cli::TrainArgs;
use crate::config::TrainConfig;
use crate::run::progress::Progress;
use crate::{Failure, Result, checkpoint};

/// The value of `--resume` that stands for the folder of `--save`, if it has a checkpoint.
const AUTO: &str = "auto";

/// What a run is to continue from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resume {
    /// The checkpoint in this folder.
    From(PathBuf),
    /// The checkpoint in this folder if there is one; a run that is started again and again by one
    /// command makes it itself.
    IfThere(PathBuf),
}

impl Resume {
    /// What the flags ask for.
    pub fn resolve(args: &TrainArgs) -> Result<Option<Self>> {
        match (&args.resume, &args.save) {
            (Some(folder), Some(save)) if folder.as_os_str() == AUTO => {
                Ok(Some(Self::IfThere(save.clone())))
            }
            (Some(folder), None) if folder.as_os_str() == AUTO => Err(Failure::Usage(
                "--resume auto continues from the folder of --save; pass --save DIR too (a folder \
                 that is called auto is --resume ./auto)"
                    .into(),
            )),
            (folder, _) => Ok(folder.clone().map(Self::From)),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        match self {
            Self::From(folder) | Self::IfThere(folder) => folder,
        }
    }

    /// Whether there is something to continue from, as far as this process sees.
    fn is_given(&self) -> bool {
        match self {
            Self::From(_) => true,
            Self::IfThere(folder) => checkpoint::is_in(folder),
        }
    }

    /// What the user wrote, for messages.
    pub fn flag(&self) -> String {
        match self {
            Self::From(folder) => format!("--resume {}", folder.display()),
            Self::IfThere(folder) => format!("--resume auto (--save {})", folder.display()),
        }
    }
}

/// Checks before ranks start that the run can begin where it is to. Loads nothing.
pub fn check(config: &TrainConfig, model: &Model) -> Result<()> {
    match &config.resume {
        Some(resume) if resume.is_given() => {
            checkpoint::open(resume, config, model)?;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Puts parameters and optimizer where the run begins, and says where that is. Every rank calls it.
///
/// Ranks may look at different moments, or see a shared folder differently, so rank 0 looks for all
/// of them and tells the others which checkpoint it found; one that finds another does not go on.
pub fn begin(
    config: &TrainConfig,
    replica: &Replica,
    optimizer: &mut Optimizer,
) -> Result<Progress> {
    let Some(resume) = &config.resume else { return Ok(Progress::default()) };
    let Replica { group, model, storage, .. } = replica;
    let is_first = group.rank() == 0;
    let open = || checkpoint::open(resume, config, model);
    let first = if is_first && resume.is_given() { Some(open()?) } else { None };
    let found = first.as_ref().map(|file| file.digest().to_owned());
    let Some(digest) = group.broadcast_object(Some(&found), 0)? else {
        return Ok(Progress::default());
    };
    let file = first.map_or_else(open, Ok)?;
    if file.digest() != digest {
        return Err(Failure::Run(format!(
            "{}: rank {} finds another checkpoint there than rank 0; all ranks must see the same \
             folder",
            resume.flag(),
            group.rank()
        )));
    }
    checkpoint::restore(&file, storage, optimizer)
}
