//! Every operation on a card against the same operation on the processor, on fresh inputs, with odd sizes. What an operation
//! writes holds NaN before, and is compared whole.
//!
//! Needs a card, or one that is emulated, and the run-time compiler; without them each test says so and passes, unless
//! `PACELINE_CARD=1`.

mod on_card;

use on_card::{Pair, Promise};
use paceline_kernels::elementwise;
use paceline_memory::DType;

const STORED: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn sources_have_the_kernels_that_are_stated() {
    if on_card::compiler().is_none() {
        return;
    }
    for source in paceline_kernels::card::SOURCES {
        source.check().unwrap();
    }
}

/// The most registers of a thread: two blocks of 256 threads fit onto a multiprocessor.
const MOST_REGISTERS: u32 = 128;

#[test]
fn kernels_fit_into_the_registers_of_cards() {
    if on_card::compiler().is_none() {
        return;
    }
    let mut count = 0;
    for (source, architecture) in
        paceline_kernels::card::SOURCES.iter().flat_map(|source| [80, 90].map(|of| (source, of)))
    {
        let all = paceline_cuda::compiler::resources(source, architecture).unwrap();
        assert_eq!(all.len(), source.kernels.len(), "{}", source.file);
        for kernel in &all {
            assert_eq!(kernel.spilled_bytes, 0, "{kernel:?} for sm_{architecture}");
            assert!(kernel.registers <= MOST_REGISTERS, "{kernel:?} for sm_{architecture}");
        }
        count += all.len();
    }
    println!("COMPILE: {count} kernels for sm_80 and sm_90 fit");
}

#[test]
fn elementwise_operations_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, len) in STORED.into_iter().flat_map(|dtype| [1, 257, 1000].map(|len| (dtype, len)))
    {
        let (x, y) = (pair.random(dtype, &[len], 1), pair.random(dtype, &[len], 2));
        let out = pair.poisoned(dtype, &[len]);
        pair.run(|on, [x, out]| elementwise::relu(on, x, out), [&x, &out]);
        pair.compare(&out, Promise::Bits);
        let dx = pair.poisoned(dtype, &[len]);
        pair.run(|on, [y, dy, dx]| elementwise::relu_backward(on, y, dy, dx), [&out, &y, &dx]);
        pair.compare(&dx, Promise::Bits);
        pair.run(|on, [x, y]| elementwise::add(on, x, y), [&x, &y]);
        pair.compare(&y, Promise::Bits);
        if matches!(dtype, DType::F32 | DType::F64) {
            pair.run(|on, [y]| elementwise::divide(on, y, 3.0), [&y]);
            pair.compare(&y, Promise::Bits);
        }
    }
}
