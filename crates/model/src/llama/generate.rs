//! A Llama that reads a text to predict its next token. Keys and values of earlier tokens are kept. Several tokens that are
//! known, such as those of a prompt, are read in one pass over the weights.
//!
//! Input: the weights of a language model, and tokens. Output: the logits of the token that follows. The passes are
//! not those of training: there is one text, nothing is saved, and parameters are found by their names in Hugging Face's
//! files. This module does not know texts, nor how a token is chosen from its logits.

use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::rotary::RotaryTable;
use paceline_kernels::{Compute, cast, elementwise, embedding, rms_norm, swiglu};
use paceline_memory::{Allocator, Category, DType, Tensor};

use super::{LlamaConfig, LlamaTask};
use crate::{ModelError, Result, Storage};

/// Tokens that are read at once, so that what is computed for them takes little memory.
const MAX_ROWS: usize = 512;

/// A language model in the middle of a text.
#[derive(Debug)]
pub struct Generator<'a> {
    compute: &'a Compute,
    eps: f64,
    spec: AttentionSpec,
    table: RotaryTable,
    /// (vocabulary, width).
    embedding: Tensor,
    blocks: Vec<Block>,
    /// (width).
    norm: Tensor,
    /// (vocabulary, width).
    head: Tensor,
    /// (1, vocabulary).
    logits: Tensor,
    widths: Widths,
    /// Of one token; at the end of a pass the last one.
    rows: TokenActivations,
    position: usize,
}

/// Columns of what is computed for a token.
#[derive(Clone, Copy, Debug)]
struct Widths {
    stream: usize,
    qkv: usize,
    attended: usize,
    gated: usize,
    heads: usize,
}

/// The type of what is added up, if the weights have this type.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        dtype => dtype,
    }
}

/// The parameters of a block, and its part of the cache.
#[derive(Debug)]
struct Block {
    /// (width).
    attention_norm: Tensor,
    /// Those of queries, keys and values, one below the other: ((heads + 2 * kv_heads) * head_dim, width).
    qkv: Tensor,
    /// (width, heads * head_dim).
    out: Tensor,
    /// (width).
    feed_forward_norm: Tensor,
    /// Those of the gate and of its factor, one below the other: (2 * intermediate, width).
    gate_up: Tensor,
    /// (width, intermediate).
    down: Tensor,
    /// [`AttentionSpec::cache_shape`], rotated.
    keys: Tensor,
    /// [`AttentionSpec::cache_shape`].
    values: Tensor,
}

/// What is computed for tokens: one row each. Every pass overwrites them. With weights of 16 bits the operands of products have
/// 16 bits too, and the stream, what is added to it and statistics are f32, as in training.
#[derive(Debug)]
struct TokenActivations {
    /// (tokens), of i64.
    tokens: Tensor,
    /// The residual stream, (tokens, width).
    stream: Tensor,
    /// (tokens, width).
    normed: Tensor,
    /// (tokens), which only a backward pass would read.
    r: Tensor,
    /// Of several tokens, which only a backward pass would read.
    log_sums: Option<Tensor>,
    /// (tokens, (heads + 2 * kv_heads) * head_dim).
    qkv: Tensor,
    /// (tokens, heads * head_dim).
    attended: Tensor,
    /// (tokens, 2 * intermediate).
    gate_up: Tensor,
    /// (tokens, intermediate).
    gated: Tensor,
    /// What a layer adds to the stream, (tokens, width).
    change: Tensor,
}

impl TokenActivations {
    fn new(allocator: &Allocator, dtype: DType, widths: Widths, len: usize) -> Result<Self> {
        let wide = wide(dtype);
        let rows = |dtype, columns| allocator.tensor(dtype, [len, columns], Category::Activations);
        let wide_row = |len: usize| allocator.tensor(wide, [len], Category::Activations);
        Ok(Self {
            tokens: allocator.tensor(DType::I64, [len], Category::Data)?,
            stream: rows(wide, widths.stream)?,
            normed: rows(dtype, widths.stream)?,
            r: wide_row(len)?,
            log_sums: (len > 1).then(|| wide_row(widths.heads * len)).transpose()?,
            qkv: rows(dtype, widths.qkv)?,
            attended: rows(dtype, widths.attended)?,
            gate_up: rows(dtype, 2 * widths.gated)?,
            gated: rows(dtype, widths.gated)?,
            change: rows(wide, widths.stream)?,
        })
    }
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
        storage: &Storage,
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
        let LlamaConfig { hidden_size: width, intermediate_size, vocab_size, head_dim, .. } =
            *config;
        let spec = AttentionSpec {
            batch: 1,
            seq: max_len,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim,
        };
        let dtype = storage.values().tensor().dtype();
        let [_, qkv_width] = spec.qkv_shape();
        let [_, attended_width] = spec.output_shape();
        let allocator = &compute.allocator;
        let cache = || allocator.tensor(dtype, spec.cache_shape(), Category::Activations);
        let norm = |name: &str| -> Result<Tensor> {
            let stored = rows_of(storage, &[name.to_owned()])?;
            if dtype == wide(dtype) {
                return Ok(stored);
            }
            let widened = allocator.tensor(wide(dtype), stored.shape(), Category::Parameters)?;
            cast::widen(compute, &stored, &widened)?;
            Ok(widened)
        };
        let block = |at: usize| -> Result<Block> {
            let param = |parts: &[&str], shape: [usize; 2]| {
                let names: Vec<String> =
                    parts.iter().map(|part| format!("model.layers.{at}.{part}.weight")).collect();
                Ok::<_, ModelError>(rows_of(storage, &names)?.view(shape)?)
            };
            let norm = |part: &str| norm(&format!("model.layers.{at}.{part}_layernorm.weight"));
            let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
            let gate_up = ["mlp.gate_proj", "mlp.up_proj"];
            Ok(Block {
                attention_norm: norm("input")?,
                qkv: param(&qkv, [qkv_width, width])?,
                out: param(&["self_attn.o_proj"], [width, attended_width])?,
                feed_forward_norm: norm("post_attention")?,
                gate_up: param(&gate_up, [2 * intermediate_size, width])?,
                down: param(&["mlp.down_proj"], [width, intermediate_size])?,
                keys: cache()?,
                values: cache()?,
            })
        };
        let blocks = (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?;
        let table_of = |name: &str| -> Result<Tensor> {
            Ok(rows_of(storage, &[name.to_owned()])?.view([vocab_size, width])?)
        };
        let embedding = table_of("model.embed_tokens.weight")?;
        let head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            table_of("lm_head.weight")?
        };
        let widths = Widths {
            stream: width,
            qkv: qkv_width,
            attended: attended_width,
            gated: intermediate_size,
            heads: config.num_attention_heads,
        };
        let rows = TokenActivations::new(allocator, dtype, widths, 1)?;
        let logits = allocator.tensor(wide(dtype), [1, vocab_size], Category::Activations)?;
        let table = RotaryTable::new(allocator, config.rotary(), max_len, wide(dtype))?;
        let norm = norm("model.norm.weight")?;
        let eps = config.rms_norm_eps;
        Ok(Self {
            compute,
            eps,
            spec,
            table,
            embedding,
            blocks,
            norm,
            head,
            logits,
            widths,
            rows,
            position: 0,
        })
    }

    /// The number of tokens that have been read.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Forgets the text. The next token is the first one of another.
    pub fn forget(&mut self) {
        self.position = 0;
    }

    /// Reads the next token of the text. Errors as [`Generator::read_all`].
    pub fn read(&mut self, token: u32) -> Result<()> {
        self.pass(&self.rows, &[token])?;
        self.position += 1;
        Ok(())
    }

    /// Reads the next tokens of the text, in one pass over the weights for every 512 of them. Errors if the model does not
    /// have one of the tokens, or if the text would have more than `max_len` tokens.
    pub fn read_all(&mut self, tokens: &[u32]) -> Result<()> {
        for tokens in tokens.chunks(MAX_ROWS) {
            let (len, width) = (tokens.len(), self.widths.stream);
            let dtype = self.embedding.dtype();
            let rows = TokenActivations::new(&self.compute.allocator, dtype, self.widths, len)?;
            self.pass(&rows, tokens)?;
            self.rows.stream.copy_from(&rows.stream.slice((len - 1) * width..len * width)?)?;
            self.position += len;
        }
        Ok(())
    }

    /// Computes the residual stream of the next tokens, and keeps their keys and values.
    fn pass(&self, rows: &TokenActivations, tokens: &[u32]) -> Result<()> {
        self.compute.on_threads(|| self.pass_here(rows, tokens))
    }

    fn pass_here(&self, rows: &TokenActivations, tokens: &[u32]) -> Result<()> {
        let Self { compute, spec, table, widths, .. } = self;
        let Widths { qkv: qkv_width, attended: attended_width, .. } = *widths;
        for (to, token) in rows.tokens.write::<i64>()?.iter_mut().zip(tokens) {
            *to = i64::from(*token);
        }
        if rows.stream.dtype() == self.embedding.dtype() {
            embedding::forward(compute, &rows.tokens, &self.embedding, &rows.stream)?
        } else {
            embedding::forward(compute, &rows.tokens, &self.embedding, &rows.normed)?;
            cast::widen(compute, &rows.normed, &rows.stream)?;
        }
        for block in &self.blocks {
            let Block { keys, values, .. } = block;
            let norm = &block.attention_norm;
            rms_norm::forward(compute, &rows.stream, norm, self.eps, &rows.normed, &rows.r)?;
            product(compute, &rows.normed, &block.qkv, &rows.qkv)?;
            match &rows.log_sums {
                Some(log_sums) if self.position == 0 => {
                    let spec = AttentionSpec { seq: tokens.len(), ..*spec };
                    attention::forward(
                        compute,
                        &rows.qkv,
                        None,
                        table,
                        &spec,
                        &rows.attended,
                        log_sums,
                    )?;
                    attention::keep(
                        compute,
                        &rows.qkv,
                        table,
                        &self.spec,
                        tokens.len(),
                        keys,
                        values,
                    )?;
                }
                // Each token attends to those before it, whose keys and values are in the cache by then.
                _ => {
                    for at in 0..tokens.len() {
                        let row = |of: &Tensor, width: usize| -> Result<Tensor> {
                            Ok(of.slice(at * width..(at + 1) * width)?.view([1, width])?)
                        };
                        let qkv = row(&rows.qkv, qkv_width)?;
                        let (place, output) =
                            (self.position + at, row(&rows.attended, attended_width)?);
                        attention::step(compute, &qkv, table, spec, place, keys, values, &output)?;
                    }
                }
            }
            product(compute, &rows.attended, &block.out, &rows.change)?;
            elementwise::add(compute, &rows.change, &rows.stream)?;

            let norm = &block.feed_forward_norm;
            rms_norm::forward(compute, &rows.stream, norm, self.eps, &rows.normed, &rows.r)?;
            product(compute, &rows.normed, &block.gate_up, &rows.gate_up)?;
            swiglu::forward(compute, &rows.gate_up, &rows.gated)?;
            product(compute, &rows.gated, &block.down, &rows.change)?;
            elementwise::add(compute, &rows.change, &rows.stream)?;
        }
        Ok(())
    }

    /// The logits of the token that follows, (1, vocabulary). They take as long as several blocks, so they are computed only
    /// where somebody asks. The next call overwrites them. Errors if no token has been read.
    pub fn logits(&self) -> Result<&Tensor> {
        if self.position == 0 {
            return Err(ModelError::Config("a text must begin with a token".into()));
        }
        let Self { compute, rows, .. } = self;
        rms_norm::forward(compute, &rows.stream, &self.norm, self.eps, &rows.normed, &rows.r)?;
        product(compute, &rows.normed, &self.head, &self.logits)?;
        Ok(&self.logits)
    }
}

fn product(compute: &Compute, input: &Tensor, weight: &Tensor, output: &Tensor) -> Result<()> {
    match input.dims() {
        [1, _] => linear::forward_row(compute, input, weight, output)?,
        _ => linear::forward(compute, input, weight, None, Activation::None, output)?,
    }
    Ok(())
}

/// The values of parameters that lie one behind the other, as those of a [`Linear::projection`](crate::layers::Linear::projection) do. Flat.
fn rows_of(storage: &Storage, names: &[String]) -> Result<Tensor> {
    let params = storage.layout().params();
    let (mut range, mut len) = (None, 0);
    for name in names {
        let Some(param) = params.iter().find(|param| param.name == *name) else {
            return Err(ModelError::Config(format!("the model has no parameter {name}")));
        };
        let start = range.map_or(param.start, |(start, _)| start);
        range = Some((start, param.range().end));
        len += param.range().len();
    }
    match range {
        Some((start, end)) if end - start == len => storage.values().slice(start..end),
        _ => Err(ModelError::Config(format!("{} do not lie side by side", names.join(", ")))),
    }
}
