//! The checkpoint from which the flags ask a run to continue.
//!
//! This file knows neither the form of a checkpoint nor whether there is one.

use std::path::{Path, PathBuf};

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use serde::Serialize;

use super::spec::RunSpec;

/// The value of `--resume` that means the folder of `--save`, if that has a checkpoint.
const AUTO: &str = "auto";

/// The checkpoint from which a run continues.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resume {
    /// The checkpoint in this folder.
    From(PathBuf),
    /// The checkpoint in this folder, if there is one. If one command starts the run again and again, the
    /// run itself has written it.
    IfThere(PathBuf),
}

impl Resume {
    /// The checkpoint that the settings ask for.
    pub fn stated(spec: &RunSpec) -> Result<Option<Self>> {
        let folder = |key| spec.get(key).and_then(<[String]>::first).map(PathBuf::from);
        match (folder("resume"), folder("save")) {
            (Some(folder), Some(save)) if folder.as_os_str() == AUTO => {
                Ok(Some(Self::IfThere(save)))
            }
            (Some(folder), None) if folder.as_os_str() == AUTO => Err(Failure::Usage(
                "--resume auto continues from the folder of --save; pass --save DIR too (a folder \
                 that is called auto is --resume ./auto)"
                    .into(),
            )),
            (folder, _) => Ok(folder.map(Self::From)),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        match self {
            Self::From(folder) | Self::IfThere(folder) => folder,
        }
    }

    /// The words of the user, for messages.
    pub fn flag(&self) -> String {
        match self {
            Self::From(folder) => format!("--resume {}", folder.printable()),
            Self::IfThere(folder) => format!("--resume auto (--save {})", folder.printable()),
        }
    }
}
