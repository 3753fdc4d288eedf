//! Attention runs as products and a softmax, which write the scores of all pairs of tokens to memory and read them again.
//!
//! Seen: a softmax between two batched products of a step, forward or backward, with nothing but scales, masks, dropouts and copies
//! between them. These belong to them. Taken away: at least three fifths of the time that is not in products; at most all of it, and
//! half of the products on a card, a third on a processor.

use std::collections::BTreeMap;

use super::*;

/// The most calls between a softmax and one of its products.
const BETWEEN: usize = 16;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "attention",
    title: "Attention is not fused",
    gain: Known::Roughly,
    find: Find::Rank(find),
};

/// The part of attention that an operator computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Product,
    Softmax,
    Between,
    /// No attention goes beyond it: a fused one, a norm, a linear layer, an optimizer.
    Other,
}

/// Operators that may run between a product and a softmax, beside those that work element by element. Without underscores, they are
/// the names of the functions of the backward pass too.
const MAY_BE_BETWEEN: &str = "alias all as_strided bernoulli clone contiguous copy detach dropout empty empty_like eq expand fill full \
    ge gt isneginf le lift_fresh logical_not lt masked_fill native_dropout ne ones permute repeat reshape reshape_alias resolve_conj \
    scalar_tensor select slice squeeze t to to_copy transpose tril triu unsafe_view unsqueeze view where zeros";
/// PyTorch's attention, and the form of it that is not fused.
const ATTENTION: &str = "scaled_dot_product";
const MATH: &str = "aten::_scaled_dot_product_attention_math";

/// The work of a stream, or the calls of a thread, in a step: index and part.
type Row = Vec<(usize, Part)>;

/// The part that an operator computes: `aten::bmm`, or autograd's `BmmBackward0` on a processor.
fn part_of(name: &str) -> Option<Part> {
    let function = name.strip_prefix("autograd::engine::evaluate_function: ");
    let function = function.and_then(|of| Some(of.split_once("Backward")?.0.to_ascii_lowercase()));
    let plain = function.or_else(|| Some(name.strip_prefix("aten::")?.replace('_', "")));
    match plain.as_deref() {
        _ if name.starts_with(OPTIMIZER) => Some(Part::Other),
        // The form that is not fused calls the operators below.
        _ if name == MATH => None,
        _ if name.contains(ATTENTION) => Some(Part::Other),
        Some("bmm" | "baddbmm") => Some(Part::Product),
        Some("softmax" | "safesoftmax" | "softmaxbackwarddata") => Some(Part::Softmax),
        Some(plain) => {
            let is_plain = |of: &str| of.chars().filter(|letter| *letter != '_').eq(plain.chars());
            let is_between =
                names::is_elementwise(name) || MAY_BE_BETWEEN.split_whitespace().any(is_plain);
            is_between.then_some(Part::Between)
        }
        None => None,
    }
}

/// The work of each stream and step, by launch, or the operators of each thread of a processor.
fn rows(of: &Recorded) -> Vec<Row> {
    let parts: Vec<Option<Part>> = of.timeline.names.iter().map(part_of).collect();
    let part = |name: crate::timeline::NameId| parts[name.0 as usize];
    let around = |call: &Call| {
        let mut all = of.around(call).map(|frame| (part(frame.name), of.text(frame.name)));
        // PyTorch's operator is around its math form too.
        let mut innermost = None;
        let ends = all.any(|(part, name)| {
            innermost = innermost.or(part);
            part == Some(Part::Other) && !(name.contains(ATTENTION) && of.is_within(call, MATH))
        });
        if ends { Some(Part::Other) } else { innermost }
    };
    let mut rows: BTreeMap<(i64, Option<u32>), Row> = BTreeMap::new();
    if of.on_device() {
        for (at, work) in of.works.iter().enumerate() {
            let Some(call) = work.call else { continue };
            let is_simple = matches!(work.class, Class::Elementwise | Class::Move);
            let of_kernel = if is_simple { Part::Between } else { Part::Other };
            let own = around(&of.calls[call as usize]).unwrap_or(of_kernel);
            rows.entry((work.stream, work.step)).or_default().push((at, own));
        }
    } else {
        // `@` of Python is a product of any kind. Of batches, it calls this one.
        let batched =
            of.timeline.operators.iter().filter(|operator| of.text(operator.name) == "aten::bmm");
        let mut batched: Vec<_> = batched.map(|of| (of.lane, of.time.start_ns)).collect();
        batched.sort_unstable();
        for (at, call) in of.calls_of(CallKind::Operator) {
            let first = batched.partition_point(|of| *of < (call.lane, call.time.start_ns));
            let is_batched =
                || batched.get(first).is_some_and(|of| *of < (call.lane, call.time.end_ns()));
            let own = match of.text(call.name) {
                "aten::matmul" | "aten::einsum" if is_batched() => Part::Product,
                _ if around(call) == Some(Part::Other) => Part::Other,
                _ => part(call.name).unwrap_or(Part::Other),
            };
            let step = of.step_at(call.time.start_ns);
            rows.entry((i64::from(call.lane.0), step)).or_default().push((at, own));
        }
    }
    rows.into_values().collect()
}

/// The places of a row that belong to attention.
fn members(row: &[(usize, Part)]) -> Vec<bool> {
    let mut is_member = vec![false; row.len()];
    let softmaxes = (0..row.len()).filter(|at| row[*at].1 == Part::Softmax);
    for softmax in softmaxes {
        let product = |mut places: Box<dyn Iterator<Item = usize>>| {
            let near = places.by_ref().take(BETWEEN);
            let mut near = near.skip_while(|at| row[*at].1 == Part::Between);
            near.next().filter(|at| row[*at].1 == Part::Product)
        };
        let before = product(Box::new((0..softmax).rev()));
        let after = product(Box::new(softmax + 1..row.len()));
        let (Some(mut first), Some(mut last)) = (before, after) else { continue };
        // The backward pass of a product is two products.
        while first > 0 && row[first - 1].1 == Part::Product {
            first -= 1;
        }
        while last + 1 < row.len() && row[last + 1].1 == Part::Product {
            last += 1;
        }
        is_member[first..=last].fill(true);
    }
    is_member
}

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    let mut tally = Tally::default();
    let (mut softmaxes, mut products_ns) = (0usize, 0i64);
    let [mut least, mut most] = [base.clone(), base.clone()];
    for row in rows(of) {
        let is_member = members(&row);
        for ((at, part), _) in row.iter().zip(is_member).filter(|(_, is_member)| *is_member) {
            let counts = !of.on_device() || of.counts(of.works[*at].step);
            softmaxes += usize::from(counts && *part == Part::Softmax);
            let ns = if of.on_device() {
                tally.add_work(of, &of.works[*at]);
                &mut [&mut least.work_ns[*at], &mut most.work_ns[*at]]
            } else {
                tally.add_operator(of, &of.calls[*at]);
                &mut [&mut least.call_ns[*at], &mut most.call_ns[*at]]
            };
            let kept = if *part == Part::Product { [1.0, 0.5] } else { [0.4, 0.0] };
            if counts && *part == Part::Product {
                products_ns += *ns[0];
            }
            for (ns, kept) in ns.iter_mut().zip(kept) {
                **ns = scaled(**ns, kept);
            }
        }
    }
    if softmaxes + of.first_steps() < of.steps.len() {
        return None;
    }
    let (_, ms) = tally.per_step(of);
    let text = format!(
        "{:.0} softmaxes per step with their products and masks take {ms:.2} ms, {:.2} of them in products",
        of.per_step(softmaxes as f64),
        of.per_step(products_ns as f64 / 1e6)
    );
    let is_math = of.timeline.names.iter().any(|name| name == MATH);
    let change = if is_math {
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION): ...  (fails, and warns why this call has no fused kernel)\n\
         then change that: a mask that needs a gradient, for example; on a processor also dropout_p=0"
    } else {
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v)\n\
         with a mask: attn_mask=mask, or is_causal=True if it is causal; in transformers: attn_implementation=\"sdpa\"; in nn.MultiheadAttention: need_weights=False"
    };
    // A model may need what excludes the fused kernels.
    let least = if is_math { base.clone() } else { least };
    let found = tally.found(text, change, [least, most]);
    let title = is_math.then(|| "Attention falls back to PyTorch's math form".to_owned());
    Some(Found { title, ..found })
}
