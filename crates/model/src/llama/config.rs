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
    /// What the model predicts.
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

/// What a Llama predicts.
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
    /// A larger number of blocks is taken for a mistake.
    pub const MAX_LAYERS: usize = 10_000;

    /// The settings of the rotary positions.
    pub fn rotary(&self) -> RotaryConfig {
        RotaryConfig { head_dim: self.head_dim, theta: self.rope_theta, scaling: self.rope_scaling }
    }

    /// Errors if the sizes do not fit together. The message names the setting.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let problem = if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            format!("{name} must be above zero")
        } else if self.num_hidden_layers > Self::MAX_LAYERS {
            format!(
                "num_hidden_layers {} must be {} or less",
                self.num_hidden_layers,
                Self::MAX_LAYERS
            )
        } else if !heads.is_multiple_of(kv_heads) {
            format!(
                "num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        } else if !self.head_dim.is_multiple_of(2) {
            format!(
                "head_dim {} must be even, because rotary positions rotate pairs",
                self.head_dim
            )
        } else if self.rms_norm_eps.is_nan() || self.rms_norm_eps < 0.0 {
            format!("rms_norm_eps {} must not be negative", self.rms_norm_eps)
        } else if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            format!("rope_theta {} must be above zero", self.rope_theta)
        } else if let LlamaTask::Classification { num_labels: 0 } = self.task {
            "num_labels must be above zero".to_owned()
        } else {
            return Ok(());
        };
        Err(ModelError::Config(problem))
    }
}
