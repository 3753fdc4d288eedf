//! Times matrix products on a card with each algorithm that cuBLASLt names for them: `cargo run --release -p paceline-cuda
//! --example card_products`.
//!
//! A line for each product: its type, sizes (rows, inner, columns) and orientation, then TFLOP/s of the algorithms in the library's
//! order. One in brackets gives other bits than the first. Errors if there is no card.

use paceline_cuda::{Card, Epilogue, Factor, Number, Product, Stream};

/// Rows, inner dimension and columns: layers of an MLP, of a small CNN, and of a language model with its head.
const SIZES: [[usize; 3]; 6] = [
    [4096, 4096, 4096],
    [512, 4096, 512],
    [512, 256, 768],
    [512, 256, 8192],
    [512, 704, 256],
    [8192, 2048, 8192],
];

fn main() -> paceline_cuda::Result<()> {
    let card = Card::open(0)?;
    let stream = Stream::new(&card)?;
    println!("{}", card.name());
    for number in [Number::Single, Number::Rounded, Number::Brain] {
        for [rows, inner, columns] in SIZES {
            // Patterns of bytes that are ordinary numbers in each type, and differ from place to place.
            let operand = |len: usize| -> paceline_cuda::Result<u64> {
                let bytes: Vec<u8> = (0..len * 4)
                    .map(|i| {
                        let mixed = (i as u64 / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                        if i % 2 == 1 { 0x3e | (mixed as u8 & 0x81) } else { mixed as u8 }
                    })
                    .collect();
                let address = card.allocate(bytes.len())?;
                // SAFETY: both have this length, and the stream is waited for.
                unsafe { stream.copy_to_card(bytes.as_ptr(), address, bytes.len()) }?;
                stream.synchronize()?;
                Ok(address)
            };
            let (a, b) = (operand(rows * inner)?, operand(inner * columns)?);
            let bias = operand(columns)?;
            for (name, is_a_transposed, is_b_transposed) in
                [("a b", false, false), ("a bT", false, true), ("aT b", true, false)]
            {
                let factor = |address, is_transposed, rows, columns| {
                    let stride = if is_transposed { rows } else { columns };
                    Factor { address, stride, batch_stride: 0, is_transposed }
                };
                let product = Product {
                    number,
                    result: number,
                    rows,
                    inner,
                    columns,
                    batch: 1,
                    a: factor(a, is_a_transposed, rows, inner),
                    b: factor(b, is_b_transposed, inner, columns),
                    c: factor(a, false, rows, columns),
                    scale: 1.0,
                    keep: 0.0,
                    epilogue: match name {
                        "a b" => Epilogue::BiasRelu(bias),
                        _ => Epilogue::None,
                    },
                };
                // SAFETY: the operands have these sizes; the result is not written.
                let trials = unsafe { stream.try_product(&product) }?;
                let operations = 2.0 * (rows * inner * columns) as f64;
                let speeds = trials.iter().map(|trial| {
                    let speed = format!("{:.1}", operations / trial.ns as f64 / 1e3);
                    if trial.has_first_bits { speed } else { format!("({speed})") }
                });
                let speeds: Vec<String> = speeds.collect();
                println!("{number:?} {rows}x{inner}x{columns} {name}: {}", speeds.join(" "));
            }
            for address in [a, b, bias] {
                // SAFETY: the stream is idle.
                unsafe { card.free(address) };
            }
        }
    }
    Ok(())
}
