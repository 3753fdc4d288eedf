//! The Llama family of language models.
//!
//! | file | |
//! |---|---|
//! | `config.rs` | the settings |
//! | `config_file.rs` | `config.json` |
//! | `head.rs` | the objective of a language model |
//! | `classifier.rs` | the objective of a sequence classifier |
//! | `generate.rs` | the forward pass, token by token |
//! | `sample.rs` | a token, chosen from its logits |

mod classifier;
mod config;
mod config_file;
mod generate;
mod head;
mod sample;

use std::sync::Arc;

use self::classifier::Classifier;
use self::head::LanguageModelHead;
use crate::layers::{Attention, Embedding, Linear, Residual, RmsNorm, Rotary, Sequence, SwiGlu};
use crate::pretrained::{NewParam, Pretrained};
use crate::{
    Block, Init, Layout, LayoutBuilder, Model, ModelError, Objective, Result, UnitBuilder,
};

pub use config::{LlamaConfig, LlamaTask, SpecialTokens};
pub use generate::Generator;
pub use sample::{Sampling, TokenSampler};

/// The table of the tokens, and the head of a language model, in Hugging Face's files.
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

impl LlamaConfig {
    /// Builds the model for `world_size` ranks. Units and parameters have the names of Hugging Face's files:
    /// `model.embed_tokens`, `model.layers.0` and so on, `model.norm`, and `lm_head` or `score`.
    ///
    /// The residual stream has the type of the parameters; what goes from layer to layer within a block has the type of
    /// activations.
    ///
    /// Inputs are tokens (batch, seq) of i64, and the batch may have the `lengths` of its sequences, (batch). Errors if
    /// sizes do not fit together.
    pub fn build(&self, world_size: usize) -> Result<Model> {
        self.check()?;
        LayoutBuilder::check_world_size(world_size)?;
        let init = Init::Normal { std: self.initializer_range };
        let width = self.hidden_size;
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("model.embed_tokens");
        let embedding = Embedding::new(&mut unit, self.vocab_size, width, init);
        let table = embedding.weight();
        let mut blocks = vec![Block::new(unit.id, embedding)];
        let rotary = Arc::new(Rotary::new(self.rotary(), self.max_position_embeddings)?);
        for at in 0..self.num_hidden_layers {
            let mut unit = layout.unit(format!("model.layers.{at}"));
            let layer = self.layer(&mut unit, &rotary, init)?;
            blocks.push(Block::new(unit.id, layer));
        }
        let norm = |unit: &mut UnitBuilder| RmsNorm::new(unit, "weight", width, self.rms_norm_eps);
        blocks.push(layout.block("model.norm", norm));
        let objective: Box<dyn Objective> = match self.task {
            LlamaTask::LanguageModel if self.tie_word_embeddings => {
                Box::new(LanguageModelHead { unit: None, weight: layout.tie(table) })
            }
            LlamaTask::LanguageModel => {
                let mut unit = layout.unit("lm_head");
                let weight = unit.param("weight", [self.vocab_size, width], init);
                Box::new(LanguageModelHead { unit: Some(unit.id), weight })
            }
            LlamaTask::Classification { num_labels } => {
                let mut unit = layout.unit("score");
                let weight = unit.param("weight", [num_labels, width], init);
                let pad = self.special_tokens.pad.map(i64::from);
                Box::new(Classifier { unit: unit.id, weight, pad })
            }
        };
        let name = match self.task {
            LlamaTask::LanguageModel => "llama",
            LlamaTask::Classification { .. } => "llama classifier",
        };
        Ok(Model { name, blocks, objective, layout: Arc::new(layout.finish(world_size)) })
    }

    /// Checks the weights of a folder against this model. Returns the layout for one rank, and the parameters that are
    /// new, because the folder has none of this name and shape: a new head makes a classifier of a language model, or changes
    /// the number of classes. A head that is tied to the embedding may be stored too.
    ///
    /// Errors as [`LlamaConfig::build`] and [`Pretrained::check`].
    pub fn check_weights(&self, weights: &Pretrained) -> Result<(Arc<Layout>, Vec<NewParam>)> {
        // Of one position: nothing that grows with the sizes is made before the files have them.
        let layout = Self { max_position_embeddings: 1, ..self.clone() }.build(1)?.layout;
        let (replaced, ignored): (&[&str], &[&str]) = match self.task {
            LlamaTask::Classification { .. } => (&["score.weight"], &[HEAD]),
            LlamaTask::LanguageModel if self.tie_word_embeddings => (&[], &[HEAD]),
            LlamaTask::LanguageModel => (&[], &[]),
        };
        let new = weights.check(&layout, replaced, ignored)?;
        if self.task == LlamaTask::LanguageModel && self.tie_word_embeddings {
            self.check_tied(weights)?;
        }
        Ok((layout, new))
    }

    /// Errors if the files have another head than the embedding that it is tied to. Versions of `transformers`
    /// before 5 then used the embedding, and later ones use the head.
    fn check_tied(&self, weights: &Pretrained) -> Result<()> {
        match weights.are_equal(HEAD, EMBEDDING)? {
            None | Some(true) => Ok(()),
            Some(false) => Err(ModelError::Config(format!(
                "tie_word_embeddings is true, but the weights have a {HEAD} that differs from {EMBEDDING}, and versions of \
                 transformers differ in which they use; set it to false to use both, or remove {HEAD}"
            ))),
        }
    }

    /// A block: attention, then the feed-forward layer.
    fn layer(&self, unit: &mut UnitBuilder, rotary: &Arc<Rotary>, init: Init) -> Result<Sequence> {
        let Self { hidden_size: width, intermediate_size, head_dim, .. } = *self;
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let norm = RmsNorm::new(unit, "input_layernorm.weight", width, self.rms_norm_eps);
        let parts = [
            ("self_attn.q_proj.weight", heads * head_dim),
            ("self_attn.k_proj.weight", kv_heads * head_dim),
            ("self_attn.v_proj.weight", kv_heads * head_dim),
        ];
        let qkv = Linear::projection(unit, width, &parts, init)?;
        let attention = Attention::new(heads, kv_heads, rotary.clone());
        let parts = [("self_attn.o_proj.weight", width)];
        let out = Linear::projection(unit, heads * head_dim, &parts, init)?.into_residual();
        let attention = Sequence::new().then(norm).then(qkv).then(attention).then(out);

        let norm = RmsNorm::new(unit, "post_attention_layernorm.weight", width, self.rms_norm_eps);
        let parts = [
            ("mlp.gate_proj.weight", intermediate_size),
            ("mlp.up_proj.weight", intermediate_size),
        ];
        let gate_up = Linear::projection(unit, width, &parts, init)?;
        let parts = [("mlp.down_proj.weight", width)];
        let down = Linear::projection(unit, intermediate_size, &parts, init)?.into_residual();
        let feed_forward = Sequence::new().then(norm).then(gate_up).then(SwiGlu).then(down);
        Ok(Sequence::new().then(Residual(attention)).then(Residual(feed_forward)))
    }
}
