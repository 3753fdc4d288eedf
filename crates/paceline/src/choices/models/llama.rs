//! `--model llama`: a language model of the Llama family with random weights, whose sizes the flags state.

use std::sync::Arc;

use clap::{Arg, ArgMatches, Args, ValueEnum};
use paceline_data::Dataset;
use paceline_model::{LlamaConfig, LlamaTask, Model, ModelError};
use serde::Serialize;

use super::{Defaults, ModelChoice, ModelSettings, Samples};
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
    /// Llama: sizes by name; the flags below change single ones
    #[arg(long, value_name = "SIZE", value_enum, default_value_t = Size::Tiny)]
    llama_size: Size,
    /// Llama: number of blocks [default: that of --llama-size]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Llama: width of the residual stream [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    width: Option<usize>,
    /// Llama: number of heads of queries [default: that of --llama-size]
    #[arg(long, value_name = "N", value_parser = width())]
    heads: Option<usize>,
    /// Llama: number of heads of keys and values [default: as many as --heads]
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
    /// Llama: keep only the input of each block for the backward pass, and compute the rest again
    #[arg(long)]
    checkpoint_activations: bool,
}

/// Sizes by name. All but the first are those of the language models of Stanford's course CS336.
#[derive(Clone, Copy, Debug, ValueEnum, Serialize)]
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
}

impl Size {
    /// Blocks, width, heads, width of the feed-forward layers, vocabulary.
    fn numbers(self) -> [usize; 5] {
        match self {
            Self::Tiny => [4, 256, 4, 688, 8192],
            Self::Small => [12, 768, 12, 3072, 10_000],
            Self::Medium => [24, 1024, 16, 4096, 10_000],
            Self::Large => [36, 1280, 20, 5120, 10_000],
            Self::Xl => [48, 1600, 25, 6400, 10_000],
        }
    }
}

impl Choice for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn about(&self) -> &'static str {
        "A language model of the Llama family with random weights"
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
        let [layers, width, heads, intermediate, vocab] = flags.llama_size.numbers();
        let heads = flags.heads.unwrap_or(heads);
        let sizes = Sizes {
            layers: flags.layers.unwrap_or(layers),
            width: flags.width.unwrap_or(width),
            heads,
            kv_heads: flags.kv_heads.unwrap_or(heads),
            intermediate: flags.intermediate.unwrap_or(intermediate),
            vocab: flags.vocab.unwrap_or(vocab),
            tie_embeddings: flags.tie_embeddings,
            checkpoint_activations: flags.checkpoint_activations,
        };
        sizes.check()?;
        Ok(Arc::new(sizes))
    }
}

/// The settings.
#[derive(Clone, Debug, Serialize)]
struct Sizes {
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
    vocab: usize,
    tie_embeddings: bool,
    checkpoint_activations: bool,
}

impl Sizes {
    fn check(&self) -> Result<()> {
        let Self { layers, width, heads, kv_heads, intermediate, vocab, .. } = *self;
        let sizes = [
            ("--width", width),
            ("--heads", heads),
            ("--kv-heads", kv_heads),
            ("--intermediate", intermediate),
            ("--vocab", vocab),
        ];
        let problem = if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            format!("{flag} must be above zero")
        } else if layers > MAX_LAYERS {
            format!("--layers {layers}: pass {MAX_LAYERS} or less")
        } else if !width.is_multiple_of(heads) {
            format!("--width {width}: it is no multiple of --heads {heads}, so the heads have no width")
        } else if !(width / heads).is_multiple_of(2) {
            format!(
                "--width {width} makes --heads {heads} heads of width {}, which must be even, because rotary positions rotate pairs",
                width / heads
            )
        } else if !heads.is_multiple_of(kv_heads) {
            format!("--kv-heads {kv_heads}: --heads {heads} must be a multiple of it")
        } else {
            return Ok(());
        };
        Err(Failure::Usage(problem))
    }
}

impl ModelSettings for Sizes {
    fn samples(&self) -> Samples {
        Samples::Tokens { vocab: self.vocab, classes: None }
    }

    fn defaults(&self) -> Defaults {
        Defaults { epochs: 3, batch_size: 4, bucket_cap_mb: 25.0 }
    }

    fn build(
        &self,
        dataset: &dyn Dataset,
        world_size: usize,
    ) -> std::result::Result<Model, ModelError> {
        let config = LlamaConfig {
            vocab_size: self.vocab,
            hidden_size: self.width,
            intermediate_size: self.intermediate,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.width / self.heads,
            max_position_embeddings: dataset.input_shape()[0],
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: self.tie_embeddings,
            task: LlamaTask::LanguageModel,
        };
        let mut model = config.build(world_size)?;
        if self.checkpoint_activations {
            model = model.checkpointed();
        }
        Ok(model)
    }
}
