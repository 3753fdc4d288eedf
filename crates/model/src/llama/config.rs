//! The settings of a Llama, under the names of Hugging Face's `config.json`.

use paceline_kernels::rotary::{RotaryConfig, RotaryScaling};

use crate::{ModelError, Result};

/// A decoder of the Llama family: token embedding, blocks of attention and feed-forward layers with residual connections,
/// and a head. Sources: Touvron and others, LLaMA (2023), and the implementation of Hugging Face's `transformers`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Number of tokens that exist.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of heads of queries.
    pub num_attention_heads: usize,
    /// Number of heads of keys and values, each of which serves several heads of queries.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// Base of the rotary positions.
    pub rope_theta: f64,
    /// How the rotary positions are stretched for long sequences.
    pub rope_scaling: Option<RotaryScaling>,
    /// Added to the mean square that a row is normalized by.
    pub rms_norm_eps: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the head of a language model uses the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// The target of the predictions.
    pub task: LlamaTask,
    /// Tokens with a meaning of their own. The model computes the same without them.
    pub special_tokens: SpecialTokens,
}

/// The tokens that programs around a model have to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub begin: Option<u32>,
    /// Any of them ends a text.
    pub ends: Vec<u32>,
    /// Fills up a text in a batch.
    pub pad: Option<u32>,
}

/// The targets that a Llama predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlamaTask {
    /// A target for each token.
    LanguageModel,
    /// A class for each sequence.
    Classification {
        /// The number of classes.
        num_labels: usize,
    },
}

impl LlamaConfig {
    /// A larger `config.json` is taken for another file. Reading takes up to about 30 times as much memory, and
    /// published ones have a few KB, or up to 2 MB with the names of many classes.
    pub const MAX_FILE_BYTES: u64 = 4_000_000;
    /// A larger number of blocks is taken for a mistake.
    pub const MAX_LAYERS: usize = 10_000;
    /// A larger width, vocabulary or context is taken for a mistake: those of published models are at most about 2^23.
    pub const MAX_SIZE: usize = 1 << 24;
    /// A larger width of a head is taken for a mistake. The angle of each pair of its elements is computed before weights
    /// are read.
    pub const MAX_HEAD_DIM: usize = 1 << 16;
    /// A larger number of classes is taken for a mistake: `config.json` names each of them twice.
    pub const MAX_LABELS: usize = 1 << 16;
    /// A larger number of parameters, of 4 PiB, is taken for a mistake. Below it, no number of bytes that
    /// follows from the sizes overflows.
    pub const MAX_PARAMS: u128 = 1 << 50;

    /// The settings of the rotary positions.
    pub fn rotary(&self) -> RotaryConfig {
        RotaryConfig { head_dim: self.head_dim, theta: self.rope_theta, scaling: self.rope_scaling }
    }

    /// Errors if the sizes do not fit together, or are beyond these limits. The message names the setting.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, Self::MAX_SIZE),
            ("hidden_size", self.hidden_size, Self::MAX_SIZE),
            ("intermediate_size", self.intermediate_size, Self::MAX_SIZE),
            ("num_attention_heads", self.num_attention_heads, Self::MAX_SIZE),
            ("num_key_value_heads", self.num_key_value_heads, Self::MAX_SIZE),
            ("head_dim", self.head_dim, Self::MAX_HEAD_DIM),
            ("max_position_embeddings", self.max_position_embeddings, Self::MAX_SIZE),
        ];
        let labels = match self.task {
            LlamaTask::LanguageModel => None,
            LlamaTask::Classification { num_labels } => {
                Some(("num_labels", num_labels, Self::MAX_LABELS))
            }
        };
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let mut sizes = sizes.into_iter().chain(labels);
        let too_large = |name: &str, size: u128, most: u128| {
            format!("{name} {size} must be {most} or less; a larger one is taken for a mistake")
        };
        let problem = if let Some((name, _, _)) = sizes.clone().find(|(_, size, _)| *size == 0) {
            format!("{name} must be above zero")
        } else if let Some((name, size, most)) = sizes.find(|(_, size, most)| size > most) {
            too_large(name, size as u128, most as u128)
        } else if self.num_hidden_layers > Self::MAX_LAYERS {
            format!(
                "num_hidden_layers {} must be {} or less",
                self.num_hidden_layers,
                Self::MAX_LAYERS
            )
        } else if self.num_params() > Self::MAX_PARAMS {
            too_large("the number of parameters", self.num_params(), Self::MAX_PARAMS)
        } else if !heads.is_multiple_of(kv_heads) {
            format!(
                "num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        } else if !self.head_dim.is_multiple_of(2) {
            format!(
                "head_dim {} must be even, because rotary positions rotate pairs",
                self.head_dim
            )
        } else if !is_size(self.rms_norm_eps) {
            format!("rms_norm_eps {} must not be negative", self.rms_norm_eps)
        } else if !is_size(self.initializer_range) {
            format!("initializer_range {} must not be negative", self.initializer_range)
        } else if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            format!("rope_theta {} must be above zero", self.rope_theta)
        } else {
            return Ok(());
        };
        Err(ModelError::Config(problem))
    }

    /// The elements of all parameters, without padding.
    pub(super) fn num_params(&self) -> u128 {
        let [vocab, width, intermediate, layers, heads, kv_heads, head_dim] = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        ]
        .map(|size| size as u128);
        let attention = 2 * (heads + kv_heads) * head_dim * width;
        let layer = attention + 3 * intermediate * width + 2 * width;
        let head = match self.task {
            LlamaTask::LanguageModel if self.tie_word_embeddings => 0,
            LlamaTask::LanguageModel => vocab * width,
            LlamaTask::Classification { num_labels } => num_labels as u128 * width,
        };
        vocab * width + layers * layer + width + head
    }
}

fn is_size(number: f64) -> bool {
    number >= 0.0 && number.is_finite()
}
