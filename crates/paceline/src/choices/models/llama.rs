//! `--model llama`: a model of the Llama family, which predicts tokens or classifies sequences. The flags state its sizes, or a
//! folder of Hugging Face states them and has the weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgMatches, Args, ValueEnum};
use paceline_data::Dataset;
use paceline_model::pretrained::Pretrained;
use paceline_model::{LlamaConfig, LlamaTask, Model, ModelError, Storage};
use serde::Serialize;
use serde_json::Value;

use super::{Defaults, ModelChoice, ModelSettings, Samples};
use crate::checkpoint::HUGGING_FACE_CONFIG;
use crate::choices::registry::{Choice, flags_of, read, width};
use crate::{Failure, Result};

/// A larger number of blocks is taken for a mistake.
const MAX_LAYERS: usize = 10_000;

/// The choice.
pub(super) struct Llama;

/// The flags, which state what differs from the size.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
struct Flags {
    /// Llama: sizes by name; the flags below change single ones [default: tiny]
    #[arg(long, value_name = "SIZE", value_enum)]
    llama_size: Option<Size>,
    /// Llama: number of blocks [default: that of --llama-size]
    #[arg(long, value_name = "N")]
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
    /// Llama: width of the feed-forward layers [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    intermediate: Option<usize>,
    /// Llama: number of tokens that exist [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    vocab: Option<usize>,
    /// Llama: the head uses the weight of the embedding
    #[arg(long)]
    tie_embeddings: bool,
    /// Llama: a folder with a config.json and weights as Hugging Face stores them; it states all sizes
    // A conflict, so that the flag takes the place of the size in a configuration file or a recipe.
    #[arg(long, value_name = "DIR", conflicts_with = "llama_size")]
    pretrained: Option<PathBuf>,
    /// Llama: where the first weights come from [default: pretrained, if there is a folder]
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

/// Sizes by name. Small to xl are those of the language models of Stanford's course CS336.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Size {
    /// 4 blocks of width 256, vocabulary 8192
    Tiny,
    /// 12 blocks of width 768, vocabulary 10,000
    Small,
    /// 24 blocks of width 1024, vocabulary 10,000
    Medium,
    /// 36 blocks of width 1280, vocabulary 10,000
    Large,
    /// 48 blocks of width 1600, vocabulary 10,000
    Xl,
    /// SmolLM2-360M: 32 blocks of width 960, vocabulary 49,152, tied
    #[value(name = "smollm2-360m")]
    SmolLm2,
}

impl Size {
    fn config(self) -> LlamaConfig {
        let [layers, width, heads, kv_heads, intermediate, vocab] = match self {
            Self::Tiny => [4, 256, 4, 4, 688, 8192],
            Self::Small => [12, 768, 12, 12, 3072, 10_000],
            Self::Medium => [24, 1024, 16, 16, 4096, 10_000],
            Self::Large => [36, 1280, 20, 20, 5120, 10_000],
            Self::Xl => [48, 1600, 25, 25, 6400, 10_000],
            Self::SmolLm2 => [32, 960, 15, 5, 2560, 49_152],
        };
        LlamaConfig {
            vocab_size: vocab,
            hidden_size: width,
            intermediate_size: intermediate,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: width / heads,
            max_position_embeddings: 8192,
            rope_theta: if self == Self::SmolLm2 { 100_000.0 } else { 10_000.0 },
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: self == Self::SmolLm2,
            task: LlamaTask::LanguageModel,
        }
    }
}

impl Choice for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn about(&self) -> &'static str {
        "A language model of the Llama family, with random or with pretrained weights"
    }

    fn flags(&self) -> Vec<Arg> {
        flags_of::<Flags>()
    }
}

impl ModelChoice for Llama {
    fn width_flags(&self) -> &'static [&'static str] {
        &["width", "intermediate"]
    }

    fn resolve(&self, settings: &ArgMatches) -> Result<Arc<dyn ModelSettings>> {
        let flags: Flags = read(settings)?;
        let checkpoint_activations = flags.checkpoint_activations;
        let (mut config, folder) = match &flags.pretrained {
            Some(folder) => (of_folder(&flags, folder)?, Some(folder)),
            None => (of_sizes(&flags)?, None),
        };
        if let Some(num_labels) = flags.num_labels {
            config.task = LlamaTask::Classification { num_labels };
        }
        config.check().map_err(|e| usage(format!("--model llama: {e}")))?;
        let init = flags.init.unwrap_or(InitFrom::Pretrained);
        let weights = match (init, folder) {
            (InitFrom::Random, _) => None,
            (InitFrom::Pretrained, Some(folder)) => Some(Weights::open(folder, &config)?),
            (InitFrom::Pretrained, None) if flags.init.is_some() => {
                return Err(usage(
                    "--init pretrained needs a folder; pass --pretrained DIR".into(),
                ));
            }
            (InitFrom::Pretrained, None) => None,
        };
        Ok(Arc::new(Settings { config, weights, checkpoint_activations }))
    }
}

fn usage(problem: String) -> Failure {
    Failure::Usage(problem)
}

/// The settings of a folder. No flag may state a size too.
fn of_folder(flags: &Flags, folder: &Path) -> Result<LlamaConfig> {
    let sizes = [
        ("--layers", flags.layers.is_some()),
        ("--width", flags.width.is_some()),
        ("--heads", flags.heads.is_some()),
        ("--kv-heads", flags.kv_heads.is_some()),
        ("--intermediate", flags.intermediate.is_some()),
        ("--vocab", flags.vocab.is_some()),
        ("--tie-embeddings", flags.tie_embeddings),
    ];
    if let Some((flag, _)) = sizes.iter().find(|(_, is_given)| *is_given) {
        return Err(usage(format!("{flag}: the folder of --pretrained states it; leave it out")));
    }
    let path = folder.join(HUGGING_FACE_CONFIG);
    let text = std::fs::read_to_string(&path)
        .map_err(|e| usage(format!("--pretrained {}: {e}", path.display())))?;
    LlamaConfig::from_json(&text)
        .map_err(|e| usage(format!("--pretrained {}: {e}", path.display())))
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
        head_dim: width / heads.max(1),
        tie_word_embeddings: flags.tie_embeddings || base.tie_word_embeddings,
        ..base
    };
    let sizes = [
        ("--width", width),
        ("--heads", heads),
        ("--kv-heads", kv_heads),
        ("--intermediate", config.intermediate_size),
        ("--vocab", config.vocab_size),
    ];
    let problem = if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        format!("{flag} must be above zero")
    } else if config.num_hidden_layers > MAX_LAYERS {
        format!("--layers {}: pass {MAX_LAYERS} or less", config.num_hidden_layers)
    } else if !width.is_multiple_of(heads) {
        format!("--width {width} must be a multiple of --heads {heads}")
    } else if !config.head_dim.is_multiple_of(2) {
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

/// The settings.
#[derive(Debug)]
struct Settings {
    config: LlamaConfig,
    /// The first weights, if they do not come from the seed.
    weights: Option<Weights>,
    checkpoint_activations: bool,
}

/// The weights of a folder, whose names and shapes are checked.
#[derive(Debug)]
struct Weights {
    folder: PathBuf,
    file: Pretrained,
}

impl Weights {
    fn open(folder: &Path, config: &LlamaConfig) -> Result<Self> {
        let refused = |e: ModelError| usage(format!("--pretrained {e}"));
        let file = Pretrained::open(folder).map_err(refused)?;
        config.check_weights(&file).map_err(refused)?;
        Ok(Self { folder: folder.to_owned(), file })
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
        let (longest, most) = (dataset.input_shape()[0], self.config.max_position_embeddings);
        if longest > most {
            return Err(ModelError::Config(format!(
                "the samples have up to {longest} tokens, and the model knows {most} positions"
            )));
        }
        // The positions that occur, since those behind them would only take memory.
        let config = LlamaConfig { max_position_embeddings: longest, ..self.config.clone() };
        let model = config.build(world_size)?;
        Ok(if self.checkpoint_activations { model.checkpointed() } else { model })
    }

    fn hugging_face_config(&self) -> Option<Value> {
        Some(self.config.to_json())
    }

    fn load(&self, storage: &Storage) -> Result<()> {
        match &self.weights {
            Some(weights) => weights.file.load(storage).map_err(|e| {
                Failure::Run(format!("--pretrained {}: {e}", weights.folder.display()))
            }),
            None => Ok(()),
        }
    }
}
