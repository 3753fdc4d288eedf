//! The Llama family of language models.
//!
//! | file | |
//! |---|---|
//! | `config.rs` | the settings |
//! | `config_file.rs` | `config.json` |
//! | `families.rs` | the same of other families, described by a Llama |
//! | `head.rs` | the objective of a language model |
//! | `classifier.rs` | the objective of a sequence classifier |
//! | `divided_head.rs` | the same, of which several ranks have a part each |
//! | `generate.rs` | the forward pass, token by token |
//! | `sample.rs` | a token, chosen from its logits |

mod classifier;
mod config;
mod config_file;
mod divided_head;
mod families;
mod generate;
mod head;
mod sample;

use std::sync::Arc;

use self::classifier::Classifier;
use self::divided_head::DividedHead;
use self::head::LanguageModelHead;
use crate::layers::{
    Attention, Embedding, Linear, Residual, RmsNorm, Rotary, Sequence, SwiGlu, TensorParallel,
};
use crate::pretrained::{NewParam, Pretrained};
use crate::{
    Block, Divided, Init, Layout, LayoutBuilder, Model, ModelError, Objective, ParamId, ParamPart,
    Result, UnitBuilder,
};

pub use config::{LlamaConfig, LlamaTask, SpecialTokens};
pub use families::Decoder;
pub use generate::Generator;
pub use sample::{Sampling, TokenSampler};

/// The table of the tokens, and the head of a language model, in Hugging Face's files.
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const EMBEDDING_UNIT: &str = "model.embed_tokens";
const HEAD_UNIT: &str = "lm_head";

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
        self.build_divided(world_size, Divided::NOT)
    }

    /// The same model with layers in equal parts, of which each of several ranks can have some ([`TensorParallel`]): each has some heads,
    /// some of the feed-forward layer's width, and some of the vocabulary.
    ///
    /// Errors also if heads, widths or the vocabulary are no multiple of the parts, or if the model classifies.
    pub fn build_divided(&self, world_size: usize, divided: Divided) -> Result<Model> {
        self.check()?;
        self.check_parts(divided.parts)?;
        LayoutBuilder::check_world_size(world_size)?;
        let init = Init::Normal { std: self.initializer_range };
        let width = self.hidden_size;
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit(EMBEDDING_UNIT);
        let mut tables = Vec::new();
        let block = if divided.parts == 1 {
            let embedding = Embedding::new(&mut unit, self.vocab_size, width, init);
            tables.push(embedding.weight());
            Block::new(unit.id, embedding)
        } else {
            let mut layer = TensorParallel::new(divided.parts, |index| {
                let part = ParamPart { index, count: divided.parts, dim: 0 };
                let mut unit = unit.of_part(EMBEDDING_UNIT, Some(part));
                let embedding = Embedding::part(&mut unit, self.vocab_size, width, part, init);
                tables.push(embedding.weight());
                Ok(Sequence::new().then(embedding))
            })?;
            layer.gathers = false;
            Block::new(unit.id, layer)
        };
        let mut blocks = vec![block];
        let rotary = Arc::new(Rotary::new(self.rotary(), self.max_position_embeddings)?);
        for at in 0..self.num_hidden_layers {
            let name = format!("model.layers.{at}");
            let mut unit = layout.unit(&*name);
            let layer = self.layer(&mut unit, &name, divided.parts, &rotary, init)?;
            blocks.push(Block::new(unit.id, layer));
        }
        let norm = |unit: &mut UnitBuilder| RmsNorm::new(unit, "weight", width, self.rms_norm_eps);
        blocks.push(layout.block("model.norm", norm));
        let objective: Box<dyn Objective> = match self.task {
            LlamaTask::LanguageModel => self.head(&mut layout, divided.parts, tables, init),
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
        let layout = Arc::new(layout.finish_divided(world_size, divided));
        Ok(Model { name, blocks, objective, layout })
    }

    /// The head of a language model: of the table or its parts, or with a weight of its own.
    fn head(
        &self,
        layout: &mut LayoutBuilder,
        count: usize,
        tables: Vec<ParamId>,
        init: Init,
    ) -> Box<dyn Objective> {
        let (unit, weights) = if self.tie_word_embeddings {
            (None, tables.into_iter().map(|table| layout.tie(table)).collect::<Vec<_>>())
        } else {
            let mut unit = layout.unit(HEAD_UNIT);
            let shape = [self.vocab_size / count, self.hidden_size];
            let weights = (0..count).map(|index| {
                let part = (count > 1).then_some(ParamPart { index, count, dim: 0 });
                unit.of_part(HEAD_UNIT, part).param("weight", shape, init)
            });
            let weights = weights.collect();
            (Some(unit.id), weights)
        };
        match weights[..] {
            [weight] => Box::new(LanguageModelHead { unit, weight }),
            _ => Box::new(DividedHead { unit, weights, vocab: self.vocab_size }),
        }
    }

    /// Errors if the model cannot be divided into so many equal parts.
    fn check_parts(&self, parts: usize) -> Result<()> {
        let sizes = [
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
        ];
        if parts > 1 && self.task != LlamaTask::LanguageModel {
            return Err(ModelError::Config(
                "a classifier cannot be divided, only a language model".to_owned(),
            ));
        }
        match sizes.iter().find(|(_, size)| !size.is_multiple_of(parts)) {
            None => Ok(()),
            Some((name, size)) => {
                let all = |parts: &usize| sizes.iter().all(|(_, size)| size.is_multiple_of(*parts));
                let fits: Vec<String> =
                    (1..=self.num_key_value_heads).filter(all).map(|of| of.to_string()).collect();
                Err(ModelError::Config(format!(
                    "{name} {size} cannot be divided into {parts} equal parts; this model can be divided into {}",
                    fits.join(" or ")
                )))
            }
        }
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

    /// A block: attention, then the feed-forward layer, each in `count` parts.
    fn layer(
        &self,
        unit: &mut UnitBuilder,
        name: &str,
        count: usize,
        rotary: &Arc<Rotary>,
        init: Init,
    ) -> Result<Sequence> {
        let (width, eps) = (self.hidden_size, self.rms_norm_eps);
        let norm = RmsNorm::new(unit, "input_layernorm.weight", width, eps);
        let attention = Sequence::new().then(norm);
        let attention = in_parts(unit, name, count, attention, |sequence, unit| {
            self.attention(sequence, unit, count, rotary, init)
        })?;
        let norm = RmsNorm::new(unit, "post_attention_layernorm.weight", width, eps);
        let feed_forward = Sequence::new().then(norm);
        let feed_forward = in_parts(unit, name, count, feed_forward, |sequence, unit| {
            self.feed_forward(sequence, unit, count, init)
        })?;
        Ok(Sequence::new().then(Residual(attention)).then(Residual(feed_forward)))
    }

    /// Appends one of `count` parts of attention, with its projections.
    fn attention(
        &self,
        sequence: Sequence,
        unit: &mut UnitBuilder,
        count: usize,
        rotary: &Arc<Rotary>,
        init: Init,
    ) -> Result<Sequence> {
        let Self { hidden_size: width, head_dim, .. } = *self;
        let (heads, kv_heads) =
            (self.num_attention_heads / count, self.num_key_value_heads / count);
        let parts = [
            ("self_attn.q_proj.weight", heads * head_dim),
            ("self_attn.k_proj.weight", kv_heads * head_dim),
            ("self_attn.v_proj.weight", kv_heads * head_dim),
        ];
        unit.divide(0);
        let qkv = Linear::projection(unit, width, &parts, init)?;
        let attention = Attention::new(heads, kv_heads, rotary.clone());
        let parts = [("self_attn.o_proj.weight", width)];
        unit.divide(1);
        let out = Linear::projection(unit, heads * head_dim, &parts, init)?.into_residual();
        Ok(sequence.then(qkv).then(attention).then(out))
    }

    /// Appends one of `count` parts of the feed-forward layer.
    fn feed_forward(
        &self,
        sequence: Sequence,
        unit: &mut UnitBuilder,
        count: usize,
        init: Init,
    ) -> Result<Sequence> {
        let (width, own) = (self.hidden_size, self.intermediate_size / count);
        let parts = [("mlp.gate_proj.weight", own), ("mlp.up_proj.weight", own)];
        unit.divide(0);
        let gate_up = Linear::projection(unit, width, &parts, init)?;
        unit.divide(1);
        let parts = [("mlp.down_proj.weight", width)];
        let down = Linear::projection(unit, own, &parts, init)?.into_residual();
        Ok(sequence.then(gate_up).then(SwiGlu).then(down))
    }
}

/// Appends the layers of `make` to a sequence, as they are, or as parts of a divided layer.
fn in_parts(
    unit: &mut UnitBuilder,
    name: &str,
    count: usize,
    sequence: Sequence,
    mut make: impl FnMut(Sequence, &mut UnitBuilder) -> Result<Sequence>,
) -> Result<Sequence> {
    if count == 1 {
        return make(sequence, unit);
    }
    let layer = TensorParallel::new(count, |index| {
        make(Sequence::new(), &mut unit.of_part(name, Some(ParamPart { index, count, dim: 0 })))
    })?;
    Ok(sequence.then(layer))
}
