//! A folder with a language model, as Hugging Face stores it: settings, weights, tokenizer, and the tokens that end a text.
//!
//! Input: the name of the folder. Output: its contents, or what is missing and where it comes from. This module does not
//! know what the model is used for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_data::text::Tokenizer;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::pretrained::{CONFIG_FILE, NewParam, Pretrained};
use paceline_model::{Layout, LlamaConfig, LlamaTask, ModelError, Storage};
use serde_json::Value;

use super::{failed, usage};

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
    layout: Arc<Layout>,
    weights: Pretrained,
    /// Parameters that the weights do not have. A language model has none.
    new: Vec<NewParam>,
}

impl Folder {
    /// Reads all files but the values of the weights, and checks that they fit together.
    pub fn open(path: &Path) -> Result<Self> {
        let refused = |reason: String| usage(format!("--model {}: {reason}", path.printable()));
        let of_weights = |e: ModelError| usage(format!("--model {e}"));
        if !path.is_dir() {
            return Err(refused(
                "there is no such folder; pass one with config.json, model.safetensors and tokenizer.json".into(),
            ));
        }
        let text = read(path, CONFIG_FILE)?.ok_or_else(|| {
            refused(format!("there is no {CONFIG_FILE}; pass a folder as Hugging Face stores it"))
        })?;
        let config = LlamaConfig::from_json(&text)
            .map_err(|e| usage(format!("--model {}: {e}", path.join(CONFIG_FILE).printable())))?;
        if let LlamaTask::Classification { num_labels } = config.task {
            return Err(refused(format!(
                "this is a classifier of {num_labels} classes, which predicts no tokens; pass the folder of a language model"
            )));
        }
        let tokenizer = path.join(TOKENIZER);
        if !tokenizer.exists() {
            return Err(refused(format!(
                "there is no {TOKENIZER}; copy it from the folder of the model that training began with"
            )));
        }
        let tokenizer = Tokenizer::load(&tokenizer).map_err(|e| usage(format!("--model {e}")))?;
        let ends = match read(path, GENERATION_CONFIG)? {
            Some(generation) => ends(&path.join(GENERATION_CONFIG), &generation)?,
            None => None,
        };
        let ends = ends.unwrap_or_else(|| config.special_tokens.ends.clone());
        let weights = Pretrained::open(path).map_err(of_weights)?;
        let (layout, new) = config.check_weights(&weights).map_err(of_weights)?;
        Ok(Self { path: path.to_owned(), config, tokenizer, ends, layout, weights, new })
    }

    /// The weights, without memory for gradients.
    pub fn load(&self, dtype: DType, allocator: &Allocator) -> Result<Storage> {
        let values = allocator
            .host(self.layout.num_bytes(dtype), Category::Parameters)
            .map_err(|e| Failure::Run(format!("there is no memory for the weights: {e}")))?;
        let none = allocator.host(0, Category::Gradients).map_err(failed)?;
        let all = 0..self.layout.len();
        let (values, grads) = ((values, vec![all]), (none, Vec::new()));
        let storage = Storage::of_ranges(self.layout.clone(), dtype, values, grads, allocator);
        let storage = storage.map_err(failed)?;
        self.weights
            .load(&storage, &self.new)
            .map_err(|e| Failure::Run(format!("--model {}: {e}", self.path.printable())))?;
        Ok(storage)
    }
}

/// The text of a file of the folder, if there is one.
fn read(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(None);
    }
    let text = paceline_files::read_text(&path, LlamaConfig::MAX_FILE_BYTES);
    text.map(Some).map_err(|e| usage(format!("--model {}: {e}", path.printable())))
}

/// The tokens that end a text by the settings of generation: a number, or several. `None` if they do not say.
fn ends(path: &Path, text: &str) -> Result<Option<Vec<u32>>> {
    let refused = |reason: String| usage(format!("--model {}: {reason}", path.printable()));
    let file: Value =
        serde_json::from_str(text).map_err(|e| refused(format!("this is no JSON ({e})")))?;
    let stated = &file[END];
    let number = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let ends = match stated {
        Value::Null => return Ok(None),
        Value::Array(all) => all.iter().map(number).collect::<Option<Vec<u32>>>(),
        one => number(one).map(|token| vec![token]),
    };
    let wrong = || refused(format!("{END} is {stated}, and must be a token or a list of tokens"));
    ends.map(Some).ok_or_else(wrong)
}
