//! `--model llama`: a model of the Llama family, which predicts tokens or classifies sequences. Flags state its sizes, or a
//! folder of Hugging Face, which also has the weights.

mod size;
mod stated;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{ArgMatches, Args, ValueEnum};
use paceline_data::Dataset;
use paceline_failure::numbers::within;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_model::pretrained::{CONFIG_FILE, NewParam, Pretrained};
use paceline_model::{Divided, LlamaConfig, LlamaTask, Model, ModelError, Storage};
use serde::Serialize;
use serde_json::Value;

use self::size::Size;
use self::stated::Stated;
use super::{Defaults, ModelSettings, OfModel, Samples};
use crate::registry::{Choice, flags_of, read, width};

pub(super) const LLAMA: Choice<OfModel> = Choice {
    name: "llama",
    aliases: &[],
    about: "A language model of the Llama family, with random or with pretrained weights",
    flags: flags_of::<Flags>,
    of: OfModel { width_flags: &["width", "intermediate"], resolve },
};

/// The flags, which state the differences from the size.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
struct Flags {
    /// Llama: sizes by name; the flags below change single ones [default: tiny]
    #[arg(long, value_name = "SIZE", value_enum)]
    llama_size: Option<Size>,
    /// Llama: number of blocks [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = within(0, LlamaConfig::MAX_LAYERS))]
    layers: Option<usize>,
    /// Llama: width of the residual stream [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    width: Option<usize>,
    /// Llama: number of heads of queries [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    heads: Option<usize>,
    /// Llama: number of heads of keys and values [default: that of --llama-size, or as many as --heads]
    #[arg(long, value_name = "N", value_parser = width())]
    kv_heads: Option<usize>,
    /// Llama: width of a head, an even number [default: --width divided by --heads]
    #[arg(long, value_name = "N", value_parser = width())]
    head_dim: Option<usize>,
    /// Llama: width of the feed-forward layers [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    intermediate: Option<usize>,
    /// Llama: number of tokens that exist [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    vocab: Option<usize>,
    /// Llama: the head uses the weight of the embedding
    #[arg(long)]
    tie_embeddings: bool,
    /// Llama: weights as Hugging Face stores them, in a folder or by a name of its Hub (paceline fetch model); the config.json
    /// beside them states all sizes
    // A conflict, so that the flag takes the place of the size in a configuration file or a recipe.
    #[arg(long, value_name = "DIR|NAME", conflicts_with = "llama_size")]
    pretrained: Option<PathBuf>,
    /// Llama: where the first weights come from [default: pretrained, if there is a folder]. With random, --pretrained
    /// needs no weights
    #[arg(long, value_name = "FROM", value_enum)]
    init: Option<InitFrom>,
    /// Llama: put each sequence into one of N classes, instead of predicting tokens
    #[arg(long, value_name = "N", value_parser = width())]
    num_labels: Option<usize>,
    /// Llama: keep only the input of each block for the backward pass, and compute the rest again
    #[arg(long)]
    checkpoint_activations: bool,
}

/// Where the first weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum InitFrom {
    /// The folder of --pretrained
    Pretrained,
    /// The seed of the run
    Random,
}

fn resolve(settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>> {
    let flags: Flags = read(settings)?;
    let checkpoint_activations = flags.checkpoint_activations;
    let mut notes = Vec::new();
    let init = flags.init.unwrap_or(InitFrom::Pretrained);
    let stated = flags.pretrained.as_deref();
    let stated = stated.map(|stated| Stated::find(stated, init)).transpose()?;
    if stated.is_some() {
        check_no_sizes(&flags)?;
    }
    let mut class_names = Vec::new();
    let (mut config, found) = match stated {
        Some(Stated::Folder(found)) => {
            let (config, names) = of_folder(&found.path)?;
            class_names = names;
            (config, Some(found))
        }
        Some(Stated::Known { size, note }) => {
            notes.push(note);
            (size.config(), None)
        }
        None => (of_sizes(&flags)?, None),
    };
    let folder = found.as_ref().map(|found| found.path.clone());
    let revision = found.as_ref().and_then(|found| found.revision.clone());
    notes.extend(found.and_then(|found| found.note));
    if let Some(num_labels) = flags.num_labels {
        config.task = LlamaTask::Classification { num_labels };
        // The folder has no names for other classes.
        class_names.truncate(if class_names.len() == num_labels { num_labels } else { 0 });
    }
    config.check().map_err(|e| usage(format!("--model llama: {e}")))?;
    let weights = match (init, &folder) {
        (InitFrom::Random, _) => None,
        (InitFrom::Pretrained, Some(folder)) => Some(Weights::open(folder, &config)?),
        (InitFrom::Pretrained, None) if flags.init.is_some() => {
            return Err(usage("--init pretrained needs a folder; pass --pretrained DIR".into()));
        }
        (InitFrom::Pretrained, None) => None,
    };
    Ok(Arc::new(Settings {
        config,
        class_names,
        weights,
        folder,
        notes,
        revision,
        checkpoint_activations,
    }))
}

fn usage(problem: String) -> Failure {
    Failure::Usage(problem)
}

/// With `--pretrained`, no flag may state a size.
fn check_no_sizes(flags: &Flags) -> Result<()> {
    let sizes = [
        ("--layers", flags.layers.is_some()),
        ("--width", flags.width.is_some()),
        ("--heads", flags.heads.is_some()),
        ("--kv-heads", flags.kv_heads.is_some()),
        ("--head-dim", flags.head_dim.is_some()),
        ("--intermediate", flags.intermediate.is_some()),
        ("--vocab", flags.vocab.is_some()),
        ("--tie-embeddings", flags.tie_embeddings),
    ];
    match sizes.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => {
            Err(usage(format!("{flag}: the folder of --pretrained states it; leave it out")))
        }
        None => Ok(()),
    }
}

/// The settings of a folder, and the names of its classes.
fn of_folder(folder: &Path) -> Result<(LlamaConfig, Vec<String>)> {
    let path = folder.join(CONFIG_FILE);
    let text = paceline_files::read_text(&path, LlamaConfig::MAX_FILE_BYTES)
        .map_err(|e| usage(format!("--pretrained {}: {e}", path.printable())))?;
    let config = LlamaConfig::from_json(&text)
        .map_err(|e| usage(format!("--pretrained {}: {e}", path.printable())))?;
    Ok((config, LlamaConfig::class_names(&text)))
}

/// The settings that the flags state.
fn of_sizes(flags: &Flags) -> Result<LlamaConfig> {
    let base = flags.llama_size.unwrap_or(Size::Tiny).config();
    let width = flags.width.unwrap_or(base.hidden_size);
    let heads = flags.heads.unwrap_or(base.num_attention_heads);
    let kv_heads = match (flags.kv_heads, flags.heads) {
        (Some(kv_heads), _) => kv_heads,
        (None, Some(heads)) => heads,
        (None, None) => base.num_key_value_heads,
    };
    let config = LlamaConfig {
        vocab_size: flags.vocab.unwrap_or(base.vocab_size),
        hidden_size: width,
        intermediate_size: flags.intermediate.unwrap_or(base.intermediate_size),
        num_hidden_layers: flags.layers.unwrap_or(base.num_hidden_layers),
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: flags.head_dim.unwrap_or(width / heads.max(1)),
        tie_word_embeddings: flags.tie_embeddings || base.tie_word_embeddings,
        ..base
    };
    let problem = if flags.head_dim.is_none() && !width.is_multiple_of(heads) {
        format!("--width {width} must be a multiple of --heads {heads}")
    } else if flags.head_dim.is_none() && !config.head_dim.is_multiple_of(2) {
        format!(
            "--width {width} gives each of --heads {heads} a width of {}, which must be even, because rotary \
             positions rotate pairs",
            config.head_dim
        )
    } else if !heads.is_multiple_of(kv_heads) {
        format!("--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    } else {
        return Ok(config);
    };
    Err(usage(problem))
}

#[derive(Debug)]
struct Settings {
    config: LlamaConfig,
    /// The names of the classes, if the folder of --pretrained has any.
    class_names: Vec<String>,
    weights: Option<Weights>,
    folder: Option<PathBuf>,
    /// How the folder was found, if it was stated by name.
    notes: Vec<String>,
    revision: Option<String>,
    checkpoint_activations: bool,
}

/// The checked weights of a folder.
#[derive(Debug)]
struct Weights {
    folder: PathBuf,
    file: Pretrained,
    /// Parameters that get new values.
    new: Vec<NewParam>,
}

impl Weights {
    fn open(folder: &Path, config: &LlamaConfig) -> Result<Self> {
        let refused = |e: ModelError| match e {
            // Inconsistent sizes come from the file of settings. Other errors name a file.
            ModelError::Config(problem) => {
                usage(format!("--pretrained {}: {problem}", folder.join(CONFIG_FILE).printable()))
            }
            other => usage(format!("--pretrained {other}")),
        };
        let file = Pretrained::open(folder).map_err(refused)?;
        let (_, new) = config.check_weights(&file).map_err(refused)?;
        Ok(Self { folder: folder.to_owned(), file, new })
    }
}

impl ModelSettings for Settings {
    fn samples(&self) -> Samples {
        let classes = match self.config.task {
            LlamaTask::LanguageModel => None,
            LlamaTask::Classification { num_labels } => Some(num_labels),
        };
        Samples::Tokens { vocab: self.config.vocab_size, classes }
    }

    fn defaults(&self) -> Defaults {
        Defaults { epochs: 3, batch_size: 4, bucket_cap_mb: 25.0 }
    }

    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        self.build_divided(dataset, world_size, Divided::NOT)
    }

    fn build_divided(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
        divided: Divided,
    ) -> std::result::Result<Model, ModelError> {
        let (longest, most) = (dataset.input_shape()[0], self.config.max_position_embeddings);
        if longest > most {
            return Err(ModelError::TooLong { longest, most });
        }
        // Positions that do not occur would only take memory.
        let config = LlamaConfig { max_position_embeddings: longest, ..self.config.clone() };
        let model = config.build_divided(world_size, divided)?;
        Ok(if self.checkpoint_activations { model.checkpointed() } else { model })
    }

    fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn revisions(&self) -> Vec<String> {
        self.revision.iter().cloned().collect()
    }

    fn notes_at_start(&self) -> Vec<String> {
        let Some(Weights { folder, new, .. }) = &self.weights else { return Vec::new() };
        let note = |NewParam { name, stored }: &NewParam| {
            let stored = match stored {
                Some(stored) => format!("has one of another kind, {stored}"),
                None => "has none".to_owned(),
            };
            format!("{name} is new and gets random values, because {} {stored}", folder.printable())
        };
        new.iter().map(note).collect()
    }

    fn hugging_face_config(&self) -> Option<Value> {
        Some(self.config.to_json())
    }

    fn load(&self, storage: &Storage) -> Result<()> {
        match &self.weights {
            Some(weights) => weights.file.load(storage, &weights.new).map_err(|e| {
                Failure::Run(format!("--pretrained {}: {e}", weights.folder.printable()))
            }),
            None => Ok(()),
        }
    }
}
