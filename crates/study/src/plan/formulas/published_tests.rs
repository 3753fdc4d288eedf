//! The rows of docs/planning-formulas.md about published configurations, computed again from what their pages state.

use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{Batch, LlamaConfig, LlamaTask, Precision, Rehearsal, SpecialTokens};
use paceline_table::table::grouped;

use super::tests::gated;
use super::{LayerSizes, Limits, RankSpeeds, bubble, lines};

const PAGE: &str = include_str!("../../../../../docs/planning-formulas.md");
/// Dense 16-bit FLOP/s of an H100 SXM: in our table, in torchtitan's and in picotron's.
const PEAK: f64 = 989.4e12;
const TORCHTITAN_PEAK: f64 = 989e12;
const PICOTRON_PEAK: f64 = 989.5e12;
/// Bytes per second in one direction of an H100's links within a host, and of 400 Gbit/s between hosts.
const NVLINK: f64 = 450e9;
const BETWEEN_HOSTS: f64 = 50e9;

/// A published decoder and its sequence length.
#[derive(Clone, Copy)]
struct Decoder {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    vocab: usize,
    seq: usize,
}

const LLAMA_8B: Decoder = Decoder {
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    ffn: 14_336,
    vocab: 128_256,
    seq: 8192,
};
const LLAMA_70B: Decoder = Decoder { layers: 80, hidden: 8192, heads: 64, ffn: 28_672, ..LLAMA_8B };
const LLAMA_2_7B: Decoder =
    Decoder { kv_heads: 32, ffn: 11_008, vocab: 32_000, seq: 1024, ..LLAMA_8B };
const SMOLLM: Decoder = Decoder {
    layers: 24,
    hidden: 2048,
    kv_heads: 32,
    ffn: 8192,
    vocab: 49_152,
    seq: 1024,
    ..LLAMA_8B
};
const NANOTRON_3B: Decoder = Decoder {
    layers: 28,
    hidden: 3072,
    heads: 32,
    kv_heads: 32,
    ffn: 8192,
    vocab: 131_072,
    seq: 4096,
};

impl Decoder {
    /// Elements of a block's matrices.
    fn block(&self) -> usize {
        let kv = self.hidden / self.heads * self.kv_heads;
        2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.ffn
    }

    /// Elements of all matrices that multiply a token: the blocks and the head.
    fn matrices(&self) -> usize {
        self.layers * self.block() + self.vocab * self.hidden
    }

    /// Elements of the norms.
    fn norms(&self) -> usize {
        (2 * self.layers + 1) * self.hidden
    }

    /// FLOP per token of a step as the three projects count: 6 per weight, and attention to every position of the sequence.
    fn full_attention(&self, weights: usize) -> f64 {
        (6 * weights + 12 * self.layers * self.hidden * self.seq) as f64
    }

    /// FLOP per token of a step as paceline counts: attention to the positions that the causal mask leaves.
    fn causal_attention(&self) -> f64 {
        (6 * self.matrices() + 6 * self.layers * self.hidden * (self.seq + 1)) as f64
    }

    /// Microseconds per token of `count` ring all-reduces of 16-bit activations in each block, by `ranks` of tp: per rank, as tokens/s
    /// per card are, so the ranks' number cancels.
    fn all_reduces_us(&self, count: usize, ranks: usize, bytes_per_s: f64) -> f64 {
        let bytes = self.layers * count * 2 * 2 * self.hidden * (ranks - 1);
        1e6 * bytes as f64 / bytes_per_s
    }

    /// A whole block, with two all-reduces of tp per pass.
    fn layer(&self, tokens: f64) -> LayerSizes {
        let [hidden, weights] = [self.hidden, self.block()].map(|elements| elements as f64);
        LayerSizes { tokens, hidden, weights, all_reduces: 2.0, element_bytes: 2.0 }
    }
}

/// Fails if the page lacks this text, wherever its lines break.
fn assert_on_page(text: &str) {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(PAGE).contains(&words(text)), "docs/planning-formulas.md lacks\n{text}");
}

fn h100(flop_per_s: f64) -> RankSpeeds {
    RankSpeeds { flop_per_s, data_bytes_per_s: BETWEEN_HOSTS, tensor_bytes_per_s: NVLINK }
}

#[test]
fn our_count_is_that_of_the_rehearsed_model() {
    let of = LLAMA_8B;
    let config = LlamaConfig {
        vocab_size: of.vocab,
        hidden_size: of.hidden,
        intermediate_size: of.ffn,
        num_hidden_layers: of.layers,
        num_attention_heads: of.heads,
        num_key_value_heads: of.kv_heads,
        head_dim: of.hidden / of.heads,
        max_position_embeddings: of.seq,
        rope_theta: 5e5,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
        task: LlamaTask::LanguageModel,
        special_tokens: SpecialTokens::default(),
    };
    let compute = Compute::new(1, Allocator::meta()).unwrap();
    let ids = || compute.allocator.tensor(DType::I64, [1, of.seq], Category::Data).unwrap();
    let batch = Batch::of(vec![("inputs", ids()), ("targets", ids())]);
    let model = config.build(1).unwrap();
    assert_eq!(model.layout.num_params(), 8_030_261_248);
    assert_eq!(of.vocab * of.hidden + of.matrices() + of.norms(), 8_030_261_248);
    let rehearsal = Rehearsal::of(&model, Precision::F32, &compute, &[batch], None, false).unwrap();
    let flop = rehearsal.forward_flops + rehearsal.backward_flops;
    assert_eq!(flop as f64, of.causal_attention() * of.seq as f64);
}

#[test]
fn torchtitan_s_rows_follow_from_its_page() {
    let of = LLAMA_8B;
    let theirs = of.full_attention(of.matrices() + of.norms());
    for (cards, compiled, tokens) in
        [(8, "no", 5762.0), (8, "yes", 6667.0), (128, "no", 5605.0), (128, "yes", 6514.0)]
    {
        let [mfu, causal] = [theirs / TORCHTITAN_PEAK, of.causal_attention() / PEAK];
        let [mfu, causal] = [mfu, causal].map(|share| 100.0 * share * tokens);
        let tokens = grouped(tokens, 0);
        assert_on_page(&format!(
            "| {cards} | {compiled} | {tokens} | {mfu:.1} % | {causal:.1} % |"
        ));
    }
    let tokens = 128.0 * 2.0 * of.seq as f64;
    let [peak, reached] =
        [1.0, 0.381].map(|part| Limits::of(&h100(part * PEAK), &of.layer(tokens)).data);
    assert_on_page(&format!(
        "{peak:.0} cards at the peak and {reached:.0} at the 38.1 % that were reached"
    ));
    for (of, name, count, plain, hidden) in
        [(LLAMA_70B, "70B", 6, 597.3, 652.4), (LLAMA_8B, "8B", 4, 4378.0, 4809.4)]
    {
        let predicted = of.all_reduces_us(count, 8, NVLINK);
        let gained = 1e6 * (1.0 / plain - 1.0 / hidden);
        let limit = Limits::of(&h100(PEAK), &of.layer(tokens)).tensor;
        let part = 100.0 * gained / predicted;
        assert_on_page(&format!(
            "| {name} | {plain} | {hidden} | {gained:.1} | {predicted:.1} | {part:.0} % | {limit:.1} |"
        ));
    }
    let ratio =
        |micro_batches| (1.0 - bubble(8, 2 * micro_batches)) / (1.0 - bubble(8, micro_batches));
    assert_on_page(&format!("{:.2} with 8 micro-batches and {:.2} with 32", ratio(8), ratio(32)));
}

#[test]
fn nanotron_s_rows_follow_from_its_script() {
    let of = NANOTRON_3B;
    assert_eq!(of.matrices(), 3_573_547_008);
    let theirs = of.full_attention(of.matrices());
    let published = [
        (2, 363.66, 14_167.25),
        (4, 345.51, 13_460.16),
        (8, 279.50, 10_888.53),
        (16, 158.10, 6159.30),
        (32, 92.66, 3609.73),
    ];
    let us = |tokens: f64| 1e6 / tokens;
    // The time without messages, from the first row; the bandwidth between hosts, from the row of 16.
    let products = us(published[0].2) - of.all_reduces_us(4, 2, NVLINK);
    let fitted = NVLINK * of.all_reduces_us(4, 16, NVLINK) / (us(published[3].2) - products);
    assert_on_page(&format!("{:.0} GB/s per card", fitted / 1e9));
    for (ranks, tflops, tokens) in published {
        let counted = format!("{:.2}", theirs * tokens / 1e12);
        assert_eq!(counted, format!("{tflops:.2}"), "{ranks}");
        let mfu = 100.0 * of.causal_attention() * tokens / PEAK;
        let bytes_per_s = if ranks <= 8 { NVLINK } else { fitted };
        let predicted = 1e6 / (products + of.all_reduces_us(4, ranks, bytes_per_s));
        let off = match ranks {
            2 | 16 => "fitted".to_owned(),
            _ => format!("{:+.1} %", 100.0 * (predicted / tokens - 1.0)),
        };
        let [tokens, predicted] = [tokens, predicted].map(|tokens| grouped(tokens, 0));
        assert_on_page(&format!(
            "| {ranks} | {tokens} | {tflops:.2} | {counted} | {mfu:.1} % | {predicted} | {off} |"
        ));
    }
    let limit = Limits::of(&h100(PEAK), &of.layer(1.0)).tensor;
    assert_on_page(&format!("tp is compute-bound up to {limit:.1} ranks"));
}

#[test]
fn picotron_s_rows_follow_from_its_readme() {
    for (of, name, cards, mfu) in
        [(LLAMA_2_7B, "Llama-2-7B", 64, 0.38), (SMOLLM, "SmolLM-1.7B", 8, 0.5)]
    {
        // Its embedding and head are always two matrices, and its count has both.
        let params = of.matrices() + of.norms() + of.vocab * of.hidden;
        let theirs = of.full_attention(params);
        let tokens = mfu * PICOTRON_PEAK / theirs;
        let causal = 100.0 * of.causal_attention() * tokens / PEAK;
        assert_on_page(&format!(
            "| {name} | {cards} | {} | {:.0} % | {} | {causal:.1} % |",
            grouped(params as f64, 0),
            100.0 * mfu,
            grouped(tokens, 0)
        ));
    }
    let of = LLAMA_2_7B;
    let step_us = 1e6 * of.full_attention(of.matrices() + of.norms() + of.vocab * of.hidden)
        / (0.38 * PICOTRON_PEAK);
    let sums = 100.0 * of.all_reduces_us(4, 2, NVLINK) / step_us;
    let idle = 100.0 * bubble(2, 32);
    assert_on_page(&format!("tp takes {sums:.1} % of the step and the bubble {idle:.1} %"));
}

#[test]
fn the_page_shows_the_lines_of_the_course() {
    let b200 = RankSpeeds { flop_per_s: 2.25e15, data_bytes_per_s: 9e11, tensor_bytes_per_s: 9e11 };
    assert_on_page(&lines(&b200, &gated(65_536.0, 4096.0, 11_008.0), 8).join("\n"));
}
