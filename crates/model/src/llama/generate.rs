//! A Llama that reads a text to predict its next token. Keys and values of earlier tokens are kept. Several known
//! tokens, such as those of a prompt, are read in one pass over the weights.
//!
//! Input: the weights of a language model, and tokens. Output: the logits of the token that follows.
//! This module knows no texts, and does not choose tokens.

use paceline_kernels::{Compute, linear};
use paceline_memory::{Category, DType, Tensor};

use super::{LlamaConfig, LlamaTask};
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
    /// All units, which stay open.
    units: OpenUnits,
    cache: KeyValueCache,
    /// The residual stream of the last token that was read, (1, width).
    stream: Option<Tensor>,
    /// (vocabulary, width).
    head: Tensor,
}

impl<'a> Generator<'a> {
    /// A generator for texts of at most `max_len` tokens. It computes in the element type of the storage's values, f32, f64 or
    /// bf16, whose sums are f32. The cache takes `2 * layers * kv_heads * head_dim * max_len` elements of this type from the
    /// start.
    ///
    /// Errors if the model is a classifier, if it does not know `max_len` positions, or if the storage lacks one of its
    /// parameters.
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
        for (at, param) in model.layout.params().iter().enumerate() {
            if stored.get(at).is_none_or(|stored| stored.name != param.name) {
                let reason = format!("the model has no parameter {}", param.name);
                return Err(ModelError::Config(reason));
            }
        }
        // The embedding is the first parameter, and a head of its own the last one.
        let head = if config.tie_word_embeddings { 0 } else { model.layout.params().len() - 1 };
        let head = storage.value(ParamId(head))?;
        let mut units = OpenUnits::new(storage.layout());
        Context::evaluation(compute, storage, &mut units, &mut |_| Ok(())).open_all()?;
        let cache = KeyValueCache { max_len, position: 0, layer: 0, layers: Vec::new() };
        Ok(Self { compute, storage, model, units, cache, stream: None, head })
    }

    /// The number of tokens that have been read.
    pub fn position(&self) -> usize {
        self.cache.position
    }

    /// Forgets the text, to begin another.
    pub fn forget(&mut self) {
        (self.cache.position, self.stream) = (0, None);
    }

    /// Reads the next token of the text. Errors as [`Generator::read_all`].
    pub fn read(&mut self, token: u32) -> Result<()> {
        self.read_all(&[token])
    }

    /// Reads the next tokens of the text, in one pass over the weights for every 512 of them. Errors if the model does not
    /// have one of the tokens, or if the text would have more than `max_len` tokens.
    pub fn read_all(&mut self, tokens: &[u32]) -> Result<()> {
        let Self { compute, storage, model, units, cache, .. } = self;
        for tokens in tokens.chunks(MAX_ROWS) {
            let len = tokens.len();
            let inputs = compute.allocator.tensor(DType::I64, [1, len], Category::Data)?;
            for (to, token) in inputs.write::<i64>()?.iter_mut().zip(tokens) {
                *to = i64::from(*token);
            }
            cache.layer = 0;
            let blocks = &model.blocks[..model.blocks.len() - 1];
            let stream = forward((compute, storage), units, blocks, inputs, Some(cache))?;
            let width = stream.dims()[1];
            self.stream = Some(stream.slice((len - 1) * width..len * width)?.view([1, width])?);
            cache.position += len;
        }
        Ok(())
    }

    /// The logits of the token that follows, (1, vocabulary), which take as long as several blocks. Errors if no token has been
    /// read.
    pub fn logits(&mut self) -> Result<Tensor> {
        let Some(stream) = self.stream.clone() else {
            return Err(ModelError::Config("a text must begin with a token".into()));
        };
        let Self { compute, storage, model, units, head, .. } = self;
        let norm = &model.blocks[model.blocks.len() - 1..];
        let (shape, dtype) = ([1, head.dims()[0]], stream.dtype());
        let logits = compute.allocator.tensor(dtype, shape, Category::Activations)?;
        let normed = forward((compute, storage), units, norm, stream, None)?;
        linear::forward_row(compute, &normed, head, &logits)?;
        Ok(logits)
    }
}

/// The output of these blocks. Nothing is saved.
fn forward(
    (compute, storage): (&Compute, &Storage),
    units: &mut OpenUnits,
    blocks: &[Block],
    input: Tensor,
    cache: Option<&mut KeyValueCache>,
) -> Result<Tensor> {
    let batch = Batch::of(vec![(Batch::INPUTS, input.clone())]);
    let mut hooks = |_: ParamId| Ok(());
    let cx = Context::evaluation(compute, storage, units, &mut hooks);
    let mut cx = cx.with_batch(&batch).with_cache(cache);
    blocks.iter().try_fold(input, |value, block| Ok(block.forward(&mut cx, value)?.0))
}
