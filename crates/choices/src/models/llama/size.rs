//! Sizes of models by name.

use clap::ValueEnum;
use paceline_model::{LlamaConfig, LlamaTask, SpecialTokens};

/// Sizes by name. Small to xl are those of the language models of Stanford's course CS336.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Size {
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
    /// The sizes of a model of the Hugging Face Hub, if they are known.
    pub fn of_model(name: &str) -> Option<Self> {
        (name == "HuggingFaceTB/SmolLM2-360M-Instruct").then_some(Self::SmolLm2)
    }

    /// The settings of a language model.
    pub fn config(self) -> LlamaConfig {
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
            special_tokens: SpecialTokens::default(),
        }
    }
}
