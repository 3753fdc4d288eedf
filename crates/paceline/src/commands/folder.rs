//! A folder with a language model or a classifier of texts: settings, weights, tokenizer, the tokens that end a text, the names of
//! classes. It is a folder as Hugging Face stores it, or one that training has left.
//!
//! Input: the name of the folder. Output: its contents, or the missing file and its origin. This module does not know the
//! use of the model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_checkpoint::Checkpoint;
use paceline_checkpoint::command::Carried;
use paceline_checkpoint::hugging_face::HuggingFace;
use paceline_data::text::Tokenizer;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::streams;
use paceline_hub as hub;
use paceline_kernels::{Compute, cast};
use paceline_memory::{Allocator, Category, DType};
use paceline_model::pretrained::{CONFIG_FILE, NewParam, Pretrained};
use paceline_model::{Layout, LlamaConfig, LlamaTask, ModelError, Storage};
use serde_json::Value;

/// Settings of generation, which not every folder has.
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
/// The key that names the tokens that end a text.
const END: &str = "eos_token_id";

/// The contents of a folder, except for the values of the weights.
pub(super) struct Folder {
    path: PathBuf,
    pub config: LlamaConfig,
    pub tokenizer: Tokenizer,
    /// The tokens that end a text.
    pub ends: Vec<u32>,
    /// The names of the classes of a classifier, or their numbers.
    pub class_names: Vec<String>,
    /// The tokens of a sequence that the model was trained on, if the folder says so; of a classifier, the most.
    pub trained_len: Option<usize>,
    layout: Arc<Layout>,
    weights: Weights,
}

/// Where the values of the weights are.
enum Weights {
    Files(Pretrained),
    Checkpoint(Box<Checkpoint>),
}

impl Folder {
    /// Reads all files but the values of the weights, and checks that they fit together and that the model is a
    /// classifier, or a language model if no classes are wanted. `carried` gives the tokenizer of a data set that the program carries. Prints how a model of the Hub was found.
    pub fn open(stated: &Path, wants_classes: bool, carried: Carried) -> Result<Self> {
        let found = hub::find("--model", stated, hub::Wanted::Weights)?;
        found.note.iter().for_each(|note| streams::stderr().line(note));
        let path = &found.path;
        if !path.is_dir() {
            return Err(refused(
                path,
                "there is no such folder; pass one with config.json, model.safetensors and tokenizer.json, or what --save \
                 of paceline train has written",
            ));
        }
        match saved_by_run(path)? {
            Some(saved) => Self::of_checkpoint(&saved, wants_classes, carried),
            None if paceline_checkpoint::is_in(path) => {
                Self::of_checkpoint(path, wants_classes, carried)
            }
            None => Self::of_files(path, wants_classes),
        }
    }

    /// A checkpoint, or the latest one of several.
    fn of_checkpoint(path: &Path, wants_classes: bool, carried: Carried) -> Result<Self> {
        let checkpoint = Checkpoint::open(path).map_err(|e| refused(path, e))?;
        let files = HuggingFace::of(&checkpoint.index().run, carried);
        let files = files.map_err(|e| refused(path, format!("{CONFIG_FILE} in its index: {e}")))?;
        let files = files.ok_or_else(|| {
            let model = checkpoint.setting("--model").unwrap_or("another model");
            refused(
                path,
                format!("the checkpoint is of {model}, which reads no texts; pass one of a Llama"),
            )
        })?;
        let (config, class_names) = settings(path, &files.config.to_string(), path, wants_classes)?;
        let tokenizer = files.copied(TOKENIZER).map_err(|reason| {
            refused(
                path,
                format!(
                    "{TOKENIZER} of the run is missing ({reason}); put it there again, or export the checkpoint (paceline \
                     checkpoint export {} --hugging-face --to DIR) and copy it into that folder",
                    path.printable()
                ),
            )
        })?;
        let tokenizer =
            Tokenizer::from_json(&path.join(TOKENIZER), tokenizer.unwrap_or_default().to_vec());
        let tokenizer = tokenizer.map_err(|e| Failure::Usage(format!("--model {e}")))?;
        let generation = files.copied(GENERATION_CONFIG).ok().flatten();
        let generation = generation.map(String::from_utf8_lossy);
        let ends = ends(&path.join(GENERATION_CONFIG), generation.as_deref(), &config)?;
        let layout = LlamaConfig { max_position_embeddings: 1, ..config.clone() }.build(1);
        let layout = layout.map_err(|e| refused(path, e.to_string()))?.layout;
        checkpoint.check_model(&layout).map_err(|e| refused(path, e))?;
        // A run has one of the two flags.
        let len = checkpoint.setting("--seq-len").or(checkpoint.setting("--max-length"));
        let trained_len = len.and_then(|len| len.parse().ok());
        let (path, weights) = (path.to_owned(), Weights::Checkpoint(Box::new(checkpoint)));
        Ok(Self { path, config, tokenizer, ends, class_names, trained_len, layout, weights })
    }

    /// A folder as Hugging Face stores it.
    fn of_files(path: &Path, wants_classes: bool) -> Result<Self> {
        let of_weights = |e: ModelError| Failure::Usage(format!("--model {e}"));
        let text = read(path, CONFIG_FILE)?.ok_or_else(|| {
            refused(path, format!("there is no {CONFIG_FILE}; pass a folder as Hugging Face stores it, or a checkpoint"))
        })?;
        let (config, class_names) = settings(path, &text, &path.join(CONFIG_FILE), wants_classes)?;
        let tokenizer = path.join(TOKENIZER);
        if !tokenizer.exists() {
            return Err(refused(
                path,
                format!(
                    "there is no {TOKENIZER}; copy it from the folder of the model that training began with"
                ),
            ));
        }
        let tokenizer =
            Tokenizer::load(&tokenizer).map_err(|e| Failure::Usage(format!("--model {e}")))?;
        let generation = read(path, GENERATION_CONFIG)?;
        let ends = ends(&path.join(GENERATION_CONFIG), generation.as_deref(), &config)?;
        let file = Pretrained::open(path).map_err(of_weights)?;
        let (layout, new) = config.check_weights(&file).map_err(of_weights)?;
        if let Some(NewParam { name, .. }) = new.first() {
            return Err(refused(
                path,
                format!("its weights have no {name} for these classes; train it first"),
            ));
        }
        let (path, weights, trained_len) = (path.to_owned(), Weights::Files(file), None);
        Ok(Self { path, config, tokenizer, ends, class_names, trained_len, layout, weights })
    }

    /// The weights, without memory for gradients. Those of 16 bits are rounded from f32, which takes memory for both.
    pub fn load(&self, dtype: DType, compute: &Compute) -> Result<Storage> {
        let storage = self.unread(DType::F32, &compute.allocator)?;
        match &self.weights {
            Weights::Files(file) => file
                .load(&storage, &[])
                .map_err(|e| Failure::Run(format!("--model {}: {e}", self.path.printable())))?,
            Weights::Checkpoint(checkpoint) => {
                checkpoint.restore_model(&storage, storage.values().ranges())?;
            }
        }
        if dtype == DType::F32 {
            return Ok(storage);
        }
        let rounded = self.unread(dtype, &compute.allocator)?;
        cast::narrow(compute, storage.values().tensor(), rounded.values().tensor())?;
        Ok(rounded)
    }

    /// Memory for the weights.
    fn unread(&self, dtype: DType, allocator: &Allocator) -> Result<Storage> {
        let values = allocator
            .allocate(self.layout.num_bytes(dtype), Category::Parameters)
            .map_err(|e| Failure::Run(format!("there is no memory for the weights: {e}")))?;
        let none = allocator.allocate(0, Category::Gradients)?;
        let all = 0..self.layout.len();
        let (values, grads) = ((values, vec![all]), (none, Vec::new()));
        Ok(Storage::of_ranges(self.layout.clone(), dtype, values, grads, allocator)?)
    }
}

fn refused(path: &Path, reason: impl std::fmt::Display) -> Failure {
    Failure::Usage(format!("--model {}: {reason}", path.printable()))
}

/// The settings of a classifier and the names of its classes, or the settings of a language model if no classes are wanted, from the
/// text of a `config.json`. Errors about settings name `file`.
fn settings(
    path: &Path,
    text: &str,
    file: &Path,
    wants_classes: bool,
) -> Result<(LlamaConfig, Vec<String>)> {
    let config = LlamaConfig::from_json(text).map_err(|e| refused(file, e))?;
    let names = LlamaConfig::class_names(text);
    match config.task {
        LlamaTask::LanguageModel if wants_classes => Err(refused(
            path,
            "this is a language model, which has no classes; pass the folder of a classifier (paceline train --num-labels N)",
        )),
        LlamaTask::Classification { num_labels } if !wants_classes => Err(refused(
            path,
            format!(
                "this is a classifier of {num_labels} classes, which predicts no tokens; pass the folder of a language model"
            ),
        )),
        LlamaTask::Classification { num_labels } if names.is_empty() => {
            Ok((config, (0..num_labels).map(|class| class.to_string()).collect()))
        }
        _ => Ok((config, names)),
    }
}

/// The folder of checkpoints of the run whose folder this is. `None` for other folders. Errors if the run has saved none.
fn saved_by_run(path: &Path) -> Result<Option<PathBuf>> {
    let Some(text) = read(path, CONFIG_FILE)? else { return Ok(None) };
    // Faults of another file are reported where it is read.
    let Ok(file) = serde_json::from_str::<Value>(&text) else { return Ok(None) };
    let Some(resolved) = file.get("stated").and(file.get("resolved")) else { return Ok(None) };
    let saved = resolved["save"].as_str().map(PathBuf::from);
    match saved {
        Some(saved) if paceline_checkpoint::is_in(&saved) => Ok(Some(saved)),
        Some(saved) => Err(refused(
            path,
            format!(
                "its run has saved to {}, and there is no checkpoint; pass the folder to which it was moved",
                saved.printable()
            ),
        )),
        None => Err(refused(path, "its run has saved no checkpoint; train with --save DIR")),
    }
}

/// The text of a file of the folder, if there is one.
fn read(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(None);
    }
    let text = paceline_files::read_text(&path, LlamaConfig::MAX_FILE_BYTES);
    text.map(Some).map_err(|e| Failure::Usage(format!("--model {}: {e}", path.printable())))
}

/// The tokens that end a text by the settings of generation: a number, or several. The model's own if there are no such
/// settings, or if they do not say.
fn ends(path: &Path, text: Option<&str>, config: &LlamaConfig) -> Result<Vec<u32>> {
    let Some(text) = text else { return Ok(config.special_tokens.ends.clone()) };
    let refused =
        |reason: String| Failure::Usage(format!("--model {}: {reason}", path.printable()));
    let file: Value =
        serde_json::from_str(text).map_err(|e| refused(format!("this is no JSON ({e})")))?;
    let stated = &file[END];
    let number = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let ends = match stated {
        Value::Null => return Ok(config.special_tokens.ends.clone()),
        Value::Array(all) => all.iter().map(number).collect::<Option<Vec<u32>>>(),
        one => number(one).map(|token| vec![token]),
    };
    let wrong = || refused(format!("{END} is {stated}, and must be a token or a list of tokens"));
    ends.ok_or_else(wrong)
}
