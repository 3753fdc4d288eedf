//! Closed formulas: how large an axis of ranks can become before its messages take longer than the products beside them,
//! and how long the ranks of a pipeline are idle.
//!
//! Input: the speeds of a rank and of its links, and the sizes of a layer. Output: numbers of ranks, and sentences. Sources: Stanford's
//! CS336, assignment 2 (2026), section 8; Austin and others, How to Scale Your Model (2025), part 5. Rings of N ranks send (N - 1) / N of
//! a tensor to gather or to reduce and scatter it, and twice as much to all-reduce it. Latency, attention scores and memory are left out.
//! This file runs nothing and knows no layout of ranks.

use paceline_model::{Layout, Param};
use paceline_table::table::grouped;

/// The speeds of one rank, above zero and finite.
#[derive(Clone, Copy, Debug)]
pub struct RankSpeeds {
    /// Floating-point operations per second.
    pub flop_per_s: f64,
    /// Bytes per second that a rank sends to those with other data (dp, fsdp).
    pub data_bytes_per_s: f64,
    /// Bytes per second that a rank sends to those with other parts of its layers (tp).
    pub tensor_bytes_per_s: f64,
}

/// The sizes of a layer, above zero and finite.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Tokens that all ranks share: those of the batch, or with fsdp those of a micro-batch of all ranks.
    pub tokens: f64,
    /// Width of the activations that the ranks of tp all-reduce.
    pub hidden: f64,
    /// Elements of the matrices, each of which multiplies every token.
    pub weights: f64,
    /// All-reduces of activations by the ranks of tp in a forward pass. The backward pass has as many.
    pub all_reduces: f64,
    /// Bytes of an element of weights, gradients and activations.
    pub element_bytes: f64,
}

impl LayerSizes {
    /// The layer of a model that the ranks of tp divide: the first block of a Llama, or two layers of an MLP. `None` for other models.
    pub fn of(model: &Layout, tokens: f64, element_bytes: f64) -> Option<Self> {
        let find = |end: &str| model.params().iter().find(|param| param.name.ends_with(end));
        let (hidden, weights, all_reduces) = if let Some(query) = find(".q_proj.weight") {
            let block = query.name.split_once("self_attn.")?.0;
            let own = model.params().iter().filter(|param| param.name.starts_with(block));
            let matrices = own.map(Param::whole_shape).filter(|shape| shape.dims().len() == 2);
            let weights = matrices.map(|shape| shape.num_elems()).sum();
            (query.whole_shape().dims()[1], weights, 2.0)
        } else {
            let [outputs, inputs] = *find("fc1.weight")?.whole_shape().dims() else { return None };
            (inputs, 2 * inputs * outputs, 1.0)
        };
        let [hidden, weights] = [hidden, weights].map(|elems| elems as f64);
        let layer = Self { tokens, hidden, weights, all_reduces, element_bytes };
        find("conv").is_none().then_some(layer)
    }

    /// FLOP per byte between two ranks with other data. Forward with fsdp, a rank of N multiplies 2 tokens weights / N and
    /// gathers bytes weights (N - 1) / N. Backward, of dp and of fsdp, both are twice that. So N ranks have 1 / (N - 1) of this.
    fn data_intensity(&self) -> f64 {
        2.0 * self.tokens / self.element_bytes
    }

    /// FLOP per byte between two ranks of tp, forward: 2 tokens weights / N beside 2 bytes tokens hidden (N - 1) / N for each all-reduce.
    fn tensor_intensity(&self) -> f64 {
        self.weights / (self.element_bytes * self.hidden * self.all_reduces)
    }
}

/// The largest axes with which a layer is compute-bound: its messages take no longer than the products of the same pass.
/// They are real numbers; a run has the next whole number below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Ranks of dp; ranks of fsdp, forward and backward.
    pub data: f64,
    /// Ranks of tp in the forward pass, which ends first.
    pub tensor: f64,
}

impl Limits {
    /// The limits of this layer at these speeds: 1 + FLOP per byte between two ranks x W / C.
    pub fn of(speeds: &RankSpeeds, layer: &LayerSizes) -> Self {
        let ranks = |intensity, bytes_per_s| 1.0 + intensity * bytes_per_s / speeds.flop_per_s;
        Self {
            data: ranks(layer.data_intensity(), speeds.data_bytes_per_s),
            tensor: ranks(layer.tensor_intensity(), speeds.tensor_bytes_per_s),
        }
    }

    /// Ranks of fsdp x tp, if the messages of both axes travel at the same time.
    pub fn overlapped(&self) -> f64 {
        self.data * self.tensor
    }

    /// The ranks of fsdp and of tp with the largest product, if both axes share a network, so that their times add up:
    /// (N_fsdp - 1) / (data - 1) + (N_tp - 1) / (tensor - 1) = 1.
    pub fn shared(&self) -> (f64, f64) {
        let (data, tensor) = (self.data - 1.0, self.tensor - 1.0);
        // The product is largest where N_fsdp / data and N_tp / tensor are equal, or at an end.
        let ranks = ((data + 1.0 + data / tensor) / 2.0).clamp(1.0, self.data);
        (ranks, 1.0 + tensor * (1.0 - (ranks - 1.0) / data))
    }
}

/// The messages of a step at the limit of dp, relative to the products of the step: those of the backward pass, two thirds.
/// At the limit of tp they are as much, a third in each pass.
pub const AT_LIMIT: f64 = 2.0 / 3.0;
/// The same for fsdp, whose messages take as long as the products of both passes.
pub const AT_LIMIT_FSDP: f64 = 1.0;

/// The ranks of an axis with which messages are this part of a step, from 0 to 1, if no product hides them. `at_limit` is
/// [`AT_LIMIT`] or [`AT_LIMIT_FSDP`].
pub fn not_overlapped(limit: f64, at_limit: f64, part: f64) -> f64 {
    1.0 + (limit - 1.0) * part / (1.0 - part) / at_limit
}

/// The part of a step in which the ranks of a pipeline are idle, from 0 to 1, with equal stages and messages that take no time. If ranks
/// have several stages each, these count as so many times the micro-batches. Source: Narayanan and others, Efficient Large-Scale Language
/// Model Training on GPU Clusters Using Megatron-LM (2021), section 2.2.
pub fn bubble(ranks: usize, micro_batches: usize) -> f64 {
    let filling = ranks.saturating_sub(1) as f64;
    filling / (filling + micro_batches as f64)
}

/// The formulas with the numbers put in, in lines of at most 80 columns.
pub fn lines(speeds: &RankSpeeds, layer: &LayerSizes, micro_batches: usize) -> Vec<String> {
    let RankSpeeds { flop_per_s, data_bytes_per_s, tensor_bytes_per_s } = *speeds;
    let limits = Limits::of(speeds, layer);
    let axis = |limit: f64, intensity: f64, bytes_per_s: f64| {
        let (intensity, needed) = (short(intensity), short(flop_per_s / bytes_per_s));
        format!("N up to {}: {intensity} / (N - 1) >= {needed} FLOP per byte", whole(limit))
    };
    let data = axis(limits.data, layer.data_intensity(), data_bytes_per_s);
    let tensor = axis(limits.tensor, layer.tensor_intensity(), tensor_bytes_per_s);
    let (x, y) = limits.shared();
    let [both, one, x, y] = [whole(limits.overlapped()), whole(x * y), short(x), short(y)];
    let [dp, fsdp, tp] =
        [(limits.data, AT_LIMIT), (limits.data, AT_LIMIT_FSDP), (limits.tensor, AT_LIMIT)]
            .map(|(limit, at_limit)| whole(not_overlapped(limit, at_limit, 0.1)));
    let [two, four, eight] = [2, 4, 8].map(|ranks| 100.0 * bubble(ranks, micro_batches));
    let text = format!(
        "\
Compute-bound while a pass has C / W or more FLOP for each byte that it sends:
C = {flop_per_s:.3e} FLOP/s; W = {data_bytes_per_s:.3e} bytes/s for dp and fsdp, {tensor_bytes_per_s:.3e} for tp
dp, fsdp   {data}
tp         {tensor}
fsdp x tp  N up to {both}; {one} ({x} x {y}) if both axes share one network
Not overlapped, 10 % of a step at most: N up to {dp} (dp), {fsdp} (fsdp), {tp} (tp)
pp         idle with {micro_batches} micro-batches: {two:.0} % of 2 ranks, {four:.0} % of 4, {eight:.0} % of 8"
    );
    text.lines().map(str::to_owned).collect()
}

/// The whole number of ranks below a limit.
fn whole(ranks: f64) -> String {
    grouped(ranks.floor(), 0)
}

/// A number in few digits.
fn short(number: f64) -> String {
    grouped(number, usize::from(number < 100.0))
}

#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod tests {
    use super::*;

    /// The layer and the speeds of the leaderboard of CS336, assignment 2: a feed-forward layer of 4096 and 11,008, two
    /// rows of 32,768 tokens, B200s.
    fn course() -> (RankSpeeds, LayerSizes) {
        let b200 =
            RankSpeeds { flop_per_s: 2.25e15, data_bytes_per_s: 9e11, tensor_bytes_per_s: 9e11 };
        (b200, gated(2.0 * 32_768.0, 4096.0, 11_008.0))
    }

    /// A feed-forward layer with a gate: three matrices of (hidden, ffn), elements of 16 bits. It is the layer of the course.
    pub fn gated(tokens: f64, hidden: f64, ffn: f64) -> LayerSizes {
        let weights = 3.0 * hidden * ffn;
        LayerSizes { tokens, hidden, weights, all_reduces: 1.0, element_bytes: 2.0 }
    }

    fn assert_close(left: f64, right: f64) {
        assert!((left / right - 1.0).abs() < 1e-12, "{left}, {right}");
    }

    /// Problems data_parallel_calcs, fsdp_calcs and tp_calcs: at the limits, messages take as long as products.
    #[test]
    fn at_each_limit_of_the_course_messages_take_as_long_as_products() {
        let (speeds, layer) = course();
        let (b, d, f, c, w) = (layer.tokens, layer.hidden, 11_008.0, 2.25e15, 9e11);
        let limits = Limits::of(&speeds, &layer);
        assert_close(limits.data, 1.0 + b * w / c);
        assert_close(limits.tensor, 1.0 + 3.0 * f * w / (2.0 * c));
        assert_close(2.0 * limits.tensor - 1.0, 1.0 + 3.0 * f * w / c);
        // Seconds of one of the three products, and to gather or to scatter these bytes. The backward pass has six products.
        let product = |ranks: f64| 2.0 * b * d * f / ranks / c;
        let gather = |bytes: f64, ranks: f64| bytes * (ranks - 1.0) / ranks / w;
        let (weights, sum) = (3.0 * 2.0 * d * f, 2.0 * b * d);
        let of = limits.data;
        // The weights of fsdp are gathered in both passes, and the gradients scattered in the backward pass.
        assert_close(gather(weights, of), 3.0 * product(of));
        assert_close(2.0 * gather(weights, of), 6.0 * product(of));
        assert_close(2.0 * gather(sum, limits.tensor), 3.0 * product(limits.tensor));
        let of = 2.0 * limits.tensor - 1.0;
        assert_close(2.0 * gather(sum, of), 6.0 * product(of));
    }

    /// The numbers of the page, worked by hand from B W / C = 26.2144 and 3 F W / (2 C) = 6.6048.
    #[test]
    fn the_numbers_of_the_course_are_right_to_the_digit() {
        let (speeds, layer) = course();
        let limits = Limits::of(&speeds, &layer);
        assert_close(limits.data, 27.2144);
        assert_close(limits.tensor, 7.6048);
        assert_close(2.0 * limits.tensor - 1.0, 14.2096);
        assert_close(limits.overlapped(), 206.960_069_12);
        let (data, tensor) = limits.shared();
        // (3 B F W / C + 3 F + 2 B)^2 / (24 B F), problem fsdp_tp_calcs (d).
        let (b, f) = (layer.tokens, 11_008.0);
        let root: f64 = 3.0 * b * f * 9e11 / 2.25e15 + 3.0 * f + 2.0 * b;
        assert_close(data * tensor, root.powi(2) / (24.0 * b * f));
        assert_eq!(
            format!("{data:.4} x {tensor:.4} = {:.4}", data * tensor),
            "15.5917 x 3.9284 = 61.2501"
        );
    }

    #[test]
    fn the_shared_split_is_the_best_one_also_at_its_ends() {
        for (data, tensor) in [(27.2, 7.6), (1.1, 40.0), (40.0, 1.1), (2.0, 2.0), (1e6, 1e6)] {
            let limits = Limits { data, tensor };
            let (n, t) = limits.shared();
            assert!(n >= 1.0 && t >= 1.0 && n <= data && t <= tensor, "{limits:?}: {n} {t}");
            for step in 0..=1000 {
                let other = 1.0 + (data - 1.0) * f64::from(step) / 1000.0;
                let beside = 1.0 + (tensor - 1.0) * (1.0 - (other - 1.0) / (data - 1.0));
                assert!(n * t >= other * beside * (1.0 - 1e-12), "{limits:?}: {other} {beside}");
            }
        }
    }

    /// The book's two matrices without a gate, and its numbers of TPU v5p: C / W = 2550 tokens per chip, F / 2550 of tp,
    /// 4 x 2550^2 / (2 F) tokens per chip with both. It leaves out that a ring sends (N - 1) / N: the 1 of each limit.
    #[test]
    fn the_numbers_of_the_book_follow() {
        let v5p = RankSpeeds {
            flop_per_s: 4.59e14,
            data_bytes_per_s: 1.8e11,
            tensor_bytes_per_s: 1.8e11,
        };
        let mut layer = gated(16e6, 8192.0, 30_000.0);
        layer.weights = 2.0 * layer.hidden * 30_000.0;
        let limits = Limits::of(&v5p, &layer);
        assert_close(layer.tokens / (limits.data - 1.0), 2550.0);
        assert_close(limits.tensor - 1.0, 30_000.0 / 2550.0);
        // Three axes of the network for data: 18,823 chips.
        let three = RankSpeeds { data_bytes_per_s: 3.0 * 1.8e11, ..v5p };
        assert_eq!((Limits::of(&three, &layer).data - 1.0).floor(), 18_823.0);
        // Two axes for data and one for tp, F = 32,768: about 400 tokens per chip.
        let two = RankSpeeds { data_bytes_per_s: 2.0 * 1.8e11, ..v5p };
        layer.weights = 2.0 * layer.hidden * 32_768.0;
        let limits = Limits::of(&two, &layer);
        let chips = (limits.data - 1.0) * (limits.tensor - 1.0) / 4.0;
        assert_eq!((layer.tokens / chips).round(), 397.0);
        let (data, tensor) = limits.shared();
        assert!((data * tensor / chips - 1.0).abs() < 0.17, "{data} {tensor} {chips}");
    }

    #[test]
    fn messages_that_nothing_hides_and_bubbles() {
        // At the limits: 2/3 of 1 + 2/3, and half.
        assert_close(not_overlapped(27.0, AT_LIMIT, 0.4), 27.0);
        assert_close(not_overlapped(27.0, AT_LIMIT_FSDP, 0.5), 27.0);
        assert_close(not_overlapped(27.0, AT_LIMIT, 0.1), 1.0 + 26.0 / 6.0);
        assert_eq!(bubble(1, 8), 0.0);
        assert_eq!(
            [bubble(4, 8), bubble(8, 8), bubble(8, 16)],
            [3.0 / 11.0, 7.0 / 15.0, 7.0 / 23.0]
        );
    }

    #[test]
    fn lines_have_the_numbers_put_in_and_fit_a_terminal() {
        let (speeds, layer) = course();
        let text = lines(&speeds, &layer, 8);
        insta::assert_snapshot!(text.join("\n"), @r"
        Compute-bound while a pass has C / W or more FLOP for each byte that it sends:
        C = 2.250e15 FLOP/s; W = 9.000e11 bytes/s for dp and fsdp, 9.000e11 for tp
        dp, fsdp   N up to 27: 65,536 / (N - 1) >= 2,500 FLOP per byte
        tp         N up to 7: 16,512 / (N - 1) >= 2,500 FLOP per byte
        fsdp x tp  N up to 206; 61 (15.6 x 3.9) if both axes share one network
        Not overlapped, 10 % of a step at most: N up to 5 (dp), 3 (fsdp), 2 (tp)
        pp         idle with 8 micro-batches: 11 % of 2 ranks, 27 % of 4, 47 % of 8
        ");
        let slow = RankSpeeds { data_bytes_per_s: 1.25e8, ..speeds };
        let large = LayerSizes { tokens: 16_777_216.0, element_bytes: 4.0, ..layer };
        for line in lines(&slow, &large, 4096).iter().chain(&text) {
            assert!(line.len() <= 80, "{} columns: {line}", line.len());
        }
    }
}
