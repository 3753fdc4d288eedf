//! Which folder a flag means: an existing one, or the snapshot of a name in the cache.
//!
//! Nothing is fetched here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use paceline_data::text::TextFormat;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_model::pretrained::{
    CONFIG_FILE, MAX_INDEX_BYTES, WEIGHTS_FILE, WEIGHTS_INDEX_FILE, files_of_index,
};

use super::cache::{Cache, Snapshot, user_cache, variable};
use super::name::{Kind, MAIN, Name};

/// The meaning of the value of a flag.
#[derive(Clone, Debug)]
pub struct Found {
    /// The folder or file, which need not exist if the value is not a name.
    pub path: PathBuf,
    /// How a name was found, in words. `None` if the value is not a name.
    pub note: Option<String>,
    /// The flag, the name, and the commit found: the same for all who have found the same files.
    pub revision: Option<String>,
}

/// The files that a flag wants from a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The settings of a model, without its weights.
    Settings,
    /// The settings and weights of a model.
    Weights,
    /// The tokenizer of a model.
    Tokenizer,
    /// The texts of a data set.
    Texts,
}

impl Wanted {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Settings | Self::Weights | Self::Tokenizer => Kind::Model,
            Self::Texts => Kind::Data,
        }
    }

    /// A file that the snapshot lacks: other programs fetch single files.
    pub(super) fn missing(
        self,
        snapshot: &Snapshot,
        listed: Option<Vec<String>>,
    ) -> Option<String> {
        let lacks = |path: &str| !snapshot.folder.join(path).exists();
        match self {
            Self::Settings | Self::Weights if lacks(CONFIG_FILE) => Some(CONFIG_FILE.into()),
            Self::Settings => None,
            Self::Weights if !lacks(WEIGHTS_FILE) => None,
            Self::Weights if lacks(WEIGHTS_INDEX_FILE) => Some(WEIGHTS_FILE.into()),
            Self::Weights => match parts(&snapshot.folder.join(WEIGHTS_INDEX_FILE)) {
                Ok(parts) => parts.into_iter().find(|part| lacks(part)),
                Err(_) => Some(format!("a {WEIGHTS_INDEX_FILE} that can be read")),
            },
            Self::Tokenizer => lacks("tokenizer.json").then(|| "tokenizer.json".into()),
            Self::Texts => {
                let is_text = |path: &String| TextFormat::of_part(Path::new(path)).is_some();
                listed?.into_iter().find(|path| is_text(path) && lacks(path))
            }
        }
    }
}

/// The files that an index of weights names.
pub(super) fn parts(index: &Path) -> std::result::Result<BTreeSet<String>, String> {
    let text = paceline_files::read_text(index, MAX_INDEX_BYTES).map_err(|e| e.to_string())?;
    files_of_index(&text)
}

/// The model that `value` names at its usual revision, as `OWNER/NAME`.
pub fn model_at_main(value: &Path) -> Option<String> {
    let name = Name::parse(Kind::Model, value.to_str()?)?;
    (name.revision == MAIN).then_some(name.path)
}

/// The folder that `value` of `flag` means. An existing path counts before a name, and a value that cannot be a name is a path.
/// Fails only for a name that the cache lacks.
pub fn find(flag: &str, value: &Path, wanted: Wanted) -> Result<Found> {
    let kind = wanted.kind();
    let name = value.to_str().and_then(|text| Name::parse(kind, text));
    let name = match name {
        Some(name) if !value.exists() => name,
        _ => return Ok(Found { path: value.to_owned(), note: None, revision: None }),
    };
    let usage =
        |problem: String| Failure::Usage(format!("{flag} {}: {problem}", value.printable()));
    let cache = Cache::from_vars(variable).map_err(usage)?;
    let [words, command] = kind.names();
    let command = format!("paceline fetch {command} {name}");
    let Some(snapshot) = cache.snapshot(&name) else {
        let searched = cache.folder(&name);
        let lacks = if searched.exists() {
            format!(
                "the cache of Hugging Face has no complete revision {} of it ({})",
                name.revision,
                searched.printable()
            )
        } else {
            format!(
                "the cache of Hugging Face has no {words} of this name (there is no {})",
                searched.printable()
            )
        };
        return Err(usage(format!(
            "there is nothing at this path, and {lacks}; run `{command}`, or pass a folder with the files"
        )));
    };
    if let Some(missing) = wanted.missing(&snapshot, cache.listed(&name, &snapshot.commit)) {
        return Err(usage(format!(
            "the cache of Hugging Face has a part of it only, in {}, which lacks {missing}; run `{command}`",
            snapshot.folder.printable()
        )));
    }
    let Snapshot { folder, commit } = snapshot;
    let note = format!("{flag} {name}: {} (commit {})", folder.printable(), &commit[..12]);
    let revision = format!("{flag} {name} (commit {commit})");
    Ok(Found { path: folder, note: Some(note), revision: Some(revision) })
}

/// Where tokens are kept: a folder of this user, because the cache has only files of the Hub, and the texts may be another's.
pub fn tokens_folder() -> Result<PathBuf> {
    let cache = user_cache(&variable).map(|cache| cache.join("paceline/tokens"));
    cache.ok_or_else(|| {
        Failure::Usage("--token-cache: HOME is not set; pass a folder that keeps the tokens".into())
    })
}
