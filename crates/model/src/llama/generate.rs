//! A Llama that reads a text to predict its next token. Keys and values of earlier tokens are kept. Several tokens that are
//! known, such as those of a prompt, are read in one pass over the weights.
//!
//! Input: the weights of a language model, and tokens. Output: the logits of the token that follows. This module does not
//! know texts, nor how a token is chosen from its logits.

use paceline_kernels::attention::AttentionSpec;
use paceline_kernels::{Compute, linear};
use paceline_memory::{Category, DType, Tensor};

use super::{EMBEDDING, HEAD, LlamaConfig, LlamaTask};
use crate::cache::KeyValueCache;
use crate::{Batch, Block, Context, Layer, Model, ModelError, OpenUnits, ParamId, Result, Storage};

/// Tokens that are read at once, so that the activations take little memory.
const MAX_ROWS: usize = 512;

/// A language model in the middle of a text.
#[derive(Debug)]
pub struct Generator<'a> {
    compute: &'a Compute,
    storage: &'a Storage,
    model: Model,
    cache: KeyValueCache,
    /// The residual stream of the last token that was read, (1, width).
    stream: Option<Tensor>,
    /// (vocabulary, width).
    head: Tensor,
    /// (1, vocabulary).
    logits: Tensor,
}

impl<'a> Generator<'a> {
    /// A generator for texts of at most `max_len` tokens. It computes in the element type of the storage's values, f32, f64 or
    /// bf16, whose sums are f32. It takes `2 * layers * kv_heads * head_dim * max_len` elements of this type for the cache.
    ///
    /// Errors if the model is a classifier, if it does not know `max_len` positions, if the storage lacks one of its
    /// parameters, or if there is no memory.
    pub fn new(
        compute: &'a Compute,
        config: &LlamaConfig,
        storage: &'a Storage,
        max_len: usize,
    ) -> Result<Self> {
        config.check()?;
        let positions = config.max_position_embeddings;
        if config.task != LlamaTask::LanguageModel {
            return Err(ModelError::Config("a classifier predicts no tokens".into()));
        }
        if max_len > positions {
            return Err(ModelError::Config(format!(
                "{max_len} tokens are wanted, and the model knows {positions} positions"
            )));
        }
        let model = LlamaConfig { max_position_embeddings: max_len, ..config.clone() }.build(1)?;
        let stored = storage.layout().params();
        let is_missing =
            |(at, name): &(usize, &str)| stored.get(*at).is_none_or(|stored| stored.name != *name);
        let mut names = model.layout.params().iter().map(|param| &*param.name).enumerate();
        if let Some((_, name)) = names.find(is_missing) {
            return Err(ModelError::Config(format!("the model has no parameter {name}")));
        }
        let head = if config.tie_word_embeddings { EMBEDDING } else { HEAD };
        let head = stored.iter().position(|param| param.name == head);
        let head = storage.value(ParamId(head.unwrap_or_default()))?;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let spec =
            AttentionSpec { batch: 1, seq: max_len, heads, kv_heads, head_dim: config.head_dim };
        let dtype = storage.values().dtype();
        let cache = KeyValueCache::new(compute, spec, config.num_hidden_layers, dtype)?;
        let (dtype, shape) = (storage.precision().wide(), [1, config.vocab_size]);
        let logits = compute.allocator.tensor(dtype, shape, Category::Activations)?;
        Ok(Self { compute, storage, model, cache, stream: None, head, logits })
    }

    /// The number of tokens that have been read.
    pub fn position(&self) -> usize {
        self.cache.position()
    }

    /// Forgets the text. The next token is the first one of another.
    pub fn forget(&mut self) {
        self.cache.set_position(0);
        self.stream = None;
    }

    /// Reads the next token of the text. Errors as [`Generator::read_all`].
    pub fn read(&mut self, token: u32) -> Result<()> {
        self.read_all(&[token])
    }

    /// Reads the next tokens of the text, in one pass over the weights for every 512 of them. Errors if the model does not
    /// have one of the tokens, or if the text would have more than `max_len` tokens.
    pub fn read_all(&mut self, tokens: &[u32]) -> Result<()> {
        for tokens in tokens.chunks(MAX_ROWS) {
            let (len, position) = (tokens.len(), self.cache.position());
            let inputs = self.compute.allocator.tensor(DType::I64, [1, len], Category::Data)?;
            for (to, token) in inputs.write::<i64>()?.iter_mut().zip(tokens) {
                *to = i64::from(*token);
            }
            self.cache.set_position(position);
            let Self { compute, storage, cache, .. } = self;
            let blocks = &self.model.blocks[..self.model.blocks.len() - 1];
            let stream = forward(compute, storage, blocks, inputs, Some(cache))?;
            let width = stream.dims()[1];
            self.stream = Some(stream.slice((len - 1) * width..len * width)?.view([1, width])?);
            self.cache.set_position(position + len);
        }
        Ok(())
    }

    /// The logits of the token that follows, (1, vocabulary). They take as long as several blocks, so they are computed only
    /// where somebody asks. The next call overwrites them. Errors if no token has been read.
    pub fn logits(&self) -> Result<&Tensor> {
        let Some(stream) = self.stream.clone() else {
            return Err(ModelError::Config("a text must begin with a token".into()));
        };
        let norm = &self.model.blocks[self.model.blocks.len() - 1..];
        let normed = forward(self.compute, self.storage, norm, stream, None)?;
        linear::forward_row(self.compute, &normed, &self.head, &self.logits)?;
        Ok(&self.logits)
    }
}

/// The output of these blocks. Nothing is saved.
fn forward(
    compute: &Compute,
    storage: &Storage,
    blocks: &[Block],
    input: Tensor,
    cache: Option<&mut KeyValueCache>,
) -> Result<Tensor> {
    let batch = Batch::of(vec![(Batch::INPUTS, input.clone())]);
    compute.on_threads(|| {
        let mut units = OpenUnits::new(storage.layout());
        let mut hooks = |_: ParamId| Ok(());
        let cx = Context::evaluation(compute, storage, &mut units, &mut hooks);
        let mut cx = cx.with_batch(&batch).with_cache(cache);
        cx.open_roots()?;
        blocks.iter().try_fold(input, |value, block| Ok(block.forward(&mut cx, value)?.0))
    })
}
