//! Conversions between f32 and the two 16-bit float types.

use half::slice::HalfFloatSliceExt;
use paceline_cuda::Grid;
use paceline_memory::Tensor;

use crate::card::products::CARD;
use crate::stored::dispatch;
use crate::{Compute, Op, Processor, Result, read, write};

/// Number of elements that a thread converts at a time.
const BLOCK_ELEMS: usize = 1 << 16;

/// `rounded = x`, rounded to nearest, ties to even: f32 to f16 or bf16, of the same shape. Overwrites. Values
/// beyond the range of f16 become infinity.
pub fn narrow(compute: &Compute, x: &Tensor, rounded: &Tensor) -> Result<()> {
    let op = Op::new("cast_narrow");
    dispatch!(op.name, rounded.dtype(), H: f16 | bf16 => {
        let operands = (read::<f32>("x", x, x.shape()), write::<H>("rounded", rounded, x.shape()));
        let n = x.num_elems();
        compute.launch_with_card(op, operands, |cpu, (x, rounded)| {
            in_blocks(cpu, x, rounded, |x, rounded| rounded.convert_from_f32_slice(x));
            Ok(())
        }, move |card, (x, rounded)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(CARD.of::<H>("narrow"), (x, rounded, n as u64), Grid::fours(n)) }
        })
    })
}

/// `x = rounded`, exactly: f16 or bf16 to f32, of the same shape. Overwrites.
pub fn widen(compute: &Compute, rounded: &Tensor, x: &Tensor) -> Result<()> {
    let op = Op::new("cast_widen");
    dispatch!(op.name, rounded.dtype(), H: f16 | bf16 => {
        let operands = (
            read::<H>("rounded", rounded, rounded.shape()),
            write::<f32>("x", x, rounded.shape()),
        );
        let n = x.num_elems();
        compute.launch_with_card(op, operands, |cpu, (rounded, x)| {
            in_blocks(cpu, rounded, x, |rounded, x| rounded.convert_to_f32_slice(x));
            Ok(())
        }, move |card, (rounded, x)| {
            // SAFETY: both have `n` elements.
            unsafe { card.launch(CARD.of::<H>("widen"), (rounded, x, n as u64), Grid::fours(n)) }
        })
    })
}

/// Converts blocks of the same places of both slices, on all threads.
pub(crate) fn in_blocks<A: Sync, B: Send>(
    cpu: &Processor,
    from: &[A],
    to: &mut [B],
    convert: impl Fn(&[A], &mut [B]) + Send + Sync,
) {
    let blocks = from.chunks(BLOCK_ELEMS).zip(to.chunks_mut(BLOCK_ELEMS)).collect();
    cpu.threads.for_each(blocks, |(from, to)| convert(from, to));
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, Category, DType};

    use super::*;

    #[test]
    fn what_fits_comes_back_and_the_rest_is_rounded() {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let tensor = |dtype| compute.allocator.tensor(dtype, [6], Category::Communication).unwrap();
        let x = tensor(DType::F32);
        let there_and_back = |dtype| {
            let values = [1.0, -0.375, 0.0, 1.0 + 1.0 / 1024.0, 1.0 + 1.0 / 4096.0, 1e6];
            x.write::<f32>().unwrap().copy_from_slice(&values);
            let rounded = tensor(dtype);
            narrow(&compute, &x, &rounded).unwrap();
            widen(&compute, &rounded, &x).unwrap();
            x.read::<f32>().unwrap().to_vec()
        };
        let ours = there_and_back(DType::F16);
        assert_eq!(ours, [1.0, -0.375, 0.0, 1.0 + 1.0 / 1024.0, 1.0, f32::INFINITY]);
        assert_eq!(there_and_back(DType::BF16), [1.0, -0.375, 0.0, 1.0, 1.0, 999_424.0]);
        assert!(narrow(&compute, &x, &tensor(DType::I32)).is_err());
    }
}
