//! `--pretrained`: a folder, or a name of the Hugging Face Hub.
//!
//! Input: the value of the flag. Output: the folder, or the sizes of a model whose files are missing. Reads no file.

use std::path::Path;

use clap::ValueEnum;
use paceline_failure::Result;
use paceline_files::Printable;
use paceline_hub::{self as hub, Found};

use super::InitFrom;
use super::size::Size;

/// The flag.
const FLAG: &str = "--pretrained";

/// The meaning of the value of `--pretrained`.
#[derive(Debug)]
pub(super) enum Stated {
    /// A folder. It may have no weights if they are not needed.
    Folder(Found),
    /// A model whose sizes are known, and whose files are missing.
    Known { size: Size, note: String },
}

impl Stated {
    /// Finds the folder or the sizes for `stated`, if the first weights come from there, or from the seed.
    pub fn find(stated: &Path, init: InitFrom) -> Result<Self> {
        if init == InitFrom::Pretrained {
            return hub::find(FLAG, stated, hub::Wanted::Weights).map(Self::Folder);
        }
        let found = hub::find(FLAG, stated, hub::Wanted::Settings);
        let size = hub::model_at_main(stated).and_then(|name| Size::of_model(&name));
        match (found, size) {
            // The search fails only if the name is not in the cache.
            (Err(_), Some(size)) => {
                let flag = size.to_possible_value();
                let note = format!(
                    "{FLAG} {}: the cache of Hugging Face does not have its config.json; its known sizes are used \
                     (--llama-size {})",
                    stated.printable(),
                    flag.as_ref().map_or("", |value| value.get_name())
                );
                Ok(Self::Known { size, note })
            }
            (found, _) => found.map(Self::Folder),
        }
    }
}
