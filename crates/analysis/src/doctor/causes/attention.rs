//! Attention runs as products and a softmax, which write the scores of all pairs of tokens to memory and read them again.
//!
//! Seen: a softmax between two batched products, forward or backward, outside of a fused kernel. The little that runs between them
//! (a scale, a mask, a dropout) belongs to them. Taken away: at least three fifths of the time that is not in products; at most all of
//! it, and half of the products on a card, a third on a processor.

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
    /// It computes all of it, and no attention goes beyond it.
    Fused,
}

/// The part that an operator computes: `aten::bmm`, or autograd's `BmmBackward0` on a processor.
fn part_of(name: &str) -> Option<Part> {
    let function = name.strip_prefix("autograd::engine::evaluate_function: ").unwrap_or_default();
    let is_one = |names: &[&str]| names.iter().any(|of| function.starts_with(of));
    match name {
        "aten::bmm" | "aten::baddbmm" => Some(Part::Product),
        "aten::softmax" | "aten::_softmax" | "aten::_softmax_backward_data" => Some(Part::Softmax),
        _ if is_one(&["BmmBackward", "BaddbmmBackward"]) => Some(Part::Product),
        _ if is_one(&["SoftmaxBackward"]) => Some(Part::Softmax),
        // Without a fused kernel, the same function computes all of this itself.
        _ if name.contains("scaled_dot_product") && !name.contains("math") => Some(Part::Fused),
        _ => None,
    }
}

/// The parts by name, in order of numbers.
fn parts_of_names(of: &Recorded) -> Vec<Option<Part>> {
    of.timeline.names.iter().map(part_of).collect()
}

/// The parts of the work of each stream, by launch, or of the operators of each thread of a processor: index and part.
fn rows(of: &Recorded) -> Vec<Vec<(usize, Part)>> {
    let parts = parts_of_names(of);
    let part = |name: crate::timeline::NameId| parts[name.0 as usize];
    let mut rows: BTreeMap<i64, Vec<(usize, Part)>> = BTreeMap::new();
    if of.on_device() {
        for (at, work) in of.works.iter().enumerate() {
            let Some(call) = work.call else { continue };
            let around = || of.around(&of.calls[call as usize]).filter_map(|of| part(of.name));
            let is_fused = around().any(|part| part == Part::Fused);
            let own = if is_fused { Some(Part::Fused) } else { around().next() };
            rows.entry(work.stream).or_default().push((at, own.unwrap_or(Part::Between)));
        }
    } else {
        for (at, call) in of.calls_of(CallKind::Operator) {
            // `@` of Python is a product of any kind: next to a softmax it is one of attention.
            let is_product = of.text(call.name) == "aten::matmul";
            let own = if is_product { Some(Part::Product) } else { part(call.name) };
            rows.entry(i64::from(call.lane.0))
                .or_default()
                .push((at, own.unwrap_or(Part::Between)));
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
    let kept_of_products = if of.on_device() { 0.5 } else { 2.0 / 3.0 };
    for row in rows(of) {
        let is_member = members(&row);
        for ((at, part), _) in row.iter().zip(is_member).filter(|(_, is_member)| *is_member) {
            softmaxes += usize::from(*part == Part::Softmax);
            let ns = if of.on_device() {
                tally.add_work(of, &of.works[*at]);
                &mut [&mut least.work_ns[*at], &mut most.work_ns[*at]]
            } else {
                tally.add_operator(of, &of.calls[*at]);
                &mut [&mut least.call_ns[*at], &mut most.call_ns[*at]]
            };
            let kept = if *part == Part::Product { [1.0, kept_of_products] } else { [0.4, 0.0] };
            if *part == Part::Product {
                products_ns += *ns[0];
            }
            for (ns, kept) in ns.iter_mut().zip(kept) {
                **ns = scaled(**ns, kept);
            }
        }
    }
    tally.longest?;
    let (_, ms) = tally.per_step(of);
    let text = format!(
        "{:.0} softmaxes per step with their products and masks take {ms:.2} ms, {:.2} of them in products",
        of.per_step(softmaxes as f64),
        of.per_step(products_ns as f64 / 1e6)
    );
    let change = "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n\
                  or, with a mask: attn_mask=mask; in transformers: attn_implementation=\"sdpa\"";
    Some(tally.found(text, change, [least, most]))
}
