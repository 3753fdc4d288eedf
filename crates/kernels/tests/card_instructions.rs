//! How many instructions kernels take. The emulated card counts those of the whole process, so this test has an executable of its own.

mod common;
mod on_card;

use on_card::Pair;
use paceline_emulated_card::for_tests::instructions;
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_memory::DType::{BF16, F32};

/// Instructions of threads in a forward and in a backward pass of one group of heads of SmolLM2-360M, in bf16.
#[test]
fn heads_of_smollm2_take_few_instructions() {
    let Some(pair) = Pair::new() else { return };
    let spec = AttentionSpec { batch: 1, seq: 256, heads: 3, kv_heads: 1, head_dim: 64 };
    let (qkv, dy) =
        (pair.random(BF16, &spec.qkv_shape(), 1), pair.random(BF16, &spec.output_shape(), 2));
    let (y, d_qkv) =
        (pair.poisoned(BF16, &spec.output_shape()), pair.poisoned(BF16, &spec.qkv_shape()));
    let log_sums = pair.poisoned(F32, &[spec.log_sums_len()]);
    let config = RotaryConfig { head_dim: spec.head_dim, theta: 1e5, scaling: None };
    let table = RotaryTable::new(&pair.card.allocator, config, spec.seq, F32).unwrap();
    let counted = |op: &dyn Fn()| {
        pair.card.synchronize().unwrap();
        let before = instructions()?;
        op();
        pair.card.synchronize().unwrap();
        Some(instructions()? - before)
    };
    let [qkv, y, log_sums, dy, d_qkv] = [&qkv, &y, &log_sums, &dy, &d_qkv].map(|of| &of.card);
    let on = &pair.card;
    let passes = [
        counted(&|| attention::forward(on, qkv, None, &table, &spec, y, log_sums).unwrap()),
        counted(&|| {
            attention::backward(on, qkv, None, &table, &spec, y, log_sums, dy, d_qkv).unwrap();
        }),
    ];
    let [Some(forward), Some(backward)] = passes else { return };
    println!("forward {forward}, backward {backward} instructions of threads");
    assert!(forward <= 6_500_000 && backward <= 18_500_000, "{forward}, {backward}");
}
