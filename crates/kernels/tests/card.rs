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
