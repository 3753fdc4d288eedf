//! Inputs whose results are exact in every element type, and the expected results.
//!
//! Each rank's input repeats after a prime number of elements, so that shifts by a share, a page or a unit are noticed.
//! Results of up to 1024 ranks are exact even in bf16. Integers wrap around as in the operations.

use half::{bf16, f16};
use paceline_collectives::ReduceOp;
use paceline_memory::DType;

/// Elements after which an input repeats.
const PERIOD: usize = 1021;

/// A repeating sequence of elements, as bytes.
#[derive(Clone, Debug)]
pub struct Pattern {
    bytes: Vec<u8>,
    elem_bytes: usize,
}

impl Pattern {
    /// The input of `rank` for an operation that reduces by `redop`; `None` for one that does not reduce.
    pub fn input(dtype: DType, redop: Option<ReduceOp>, rank: usize) -> Self {
        Self::of(dtype, |at, out| encode(dtype, value(redop, rank, at) as f64, out))
    }

    /// The reduction of the inputs of `world` ranks.
    pub fn reduced(dtype: DType, redop: ReduceOp, world: usize) -> Self {
        Self::of(dtype, |at, out| {
            let values = (0..world).map(|rank| value(Some(redop), rank, at));
            let result = match redop {
                ReduceOp::Sum => values.sum::<i64>() as f64,
                ReduceOp::Product => values.product::<i64>() as f64,
                ReduceOp::Min => values.min().unwrap_or(0) as f64,
                ReduceOp::Max => values.max().unwrap_or(0) as f64,
                ReduceOp::Mean => mean(dtype, values.sum(), world),
            };
            encode(dtype, result, out);
        })
    }

    fn of(dtype: DType, mut element: impl FnMut(usize, &mut Vec<u8>)) -> Self {
        let elem_bytes = dtype.size_bytes();
        let mut bytes = Vec::with_capacity(PERIOD * elem_bytes);
        for at in 0..PERIOD {
            element(at, &mut bytes);
        }
        Self { bytes, elem_bytes }
    }

    /// Divides `len` bytes from element `start` on where the sequence starts again. Yields offset and expected bytes of
    /// each piece.
    fn pieces(&self, len: usize, start: usize) -> impl Iterator<Item = (usize, &[u8])> {
        let mut done = 0;
        let mut at = start % PERIOD * self.elem_bytes;
        std::iter::from_fn(move || {
            let piece = &self.bytes[at..self.bytes.len().min(at + len - done)];
            let begin = done;
            (done, at) = (done + piece.len(), 0);
            (!piece.is_empty()).then_some((begin, piece))
        })
    }

    /// Fills `bytes` with the sequence, beginning with element `start`.
    pub fn fill(&self, bytes: &mut [u8], start: usize) {
        for (at, piece) in self.pieces(bytes.len(), start) {
            bytes[at..at + piece.len()].copy_from_slice(piece);
        }
    }

    /// How many elements of `bytes` differ from the sequence that begins with element `start`.
    pub fn count_wrong(&self, bytes: &[u8], start: usize) -> u64 {
        let mut wrong = 0;
        for (at, piece) in self.pieces(bytes.len(), start) {
            let found = &bytes[at..at + piece.len()];
            if found != piece {
                let elements = found.chunks(self.elem_bytes).zip(piece.chunks(self.elem_bytes));
                wrong += elements.filter(|(found, expected)| found != expected).count() as u64;
            }
        }
        wrong
    }
}

/// An element of a rank's input.
fn value(redop: Option<ReduceOp>, rank: usize, at: usize) -> i64 {
    let mixed = at * 31 + rank * 17 + at * rank * 7;
    // The first ranks contribute most, and few of the others to each element, so that results stay small.
    let is_first = rank < 64;
    let is_one_of = |ranks: usize| (at + rank).is_multiple_of(ranks);
    let value = match redop {
        // The sum is at most 3 x 64 of the first ranks, and 64 of the other 960.
        Some(ReduceOp::Sum | ReduceOp::Mean) if is_first => mixed % 4,
        Some(ReduceOp::Sum | ReduceOp::Mean) => usize::from(is_one_of(15)),
        // The product is at most 2^9: eight of the first ranks have a two, and one of the others.
        Some(ReduceOp::Product) => 1 + usize::from(is_one_of(if is_first { 8 } else { 960 })),
        // Each 128 ranks differ from the ones before.
        Some(ReduceOp::Min | ReduceOp::Max) | None => (mixed + at * (rank / 128)) % 128,
    };
    value as i64
}

/// The mean: the sum is divided once and rounded. Sums of bytes wrap around before.
fn mean(dtype: DType, sum: i64, world: usize) -> f64 {
    match dtype {
        DType::F64 => sum as f64 / world as f64,
        DType::F32 | DType::F16 | DType::BF16 => f64::from(sum as f32 / world as f32),
        DType::I32 | DType::I64 => (sum / world as i64) as f64,
        DType::U8 => (i64::from(sum as u8) / world as i64) as f64,
    }
}

fn encode(dtype: DType, value: f64, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend((value as f32).to_ne_bytes()),
        DType::F64 => out.extend(value.to_ne_bytes()),
        DType::F16 => out.extend(f16::from_f32(value as f32).to_ne_bytes()),
        DType::BF16 => out.extend(bf16::from_f32(value as f32).to_ne_bytes()),
        DType::I32 => out.extend((value as i32).to_ne_bytes()),
        DType::I64 => out.extend((value as i64).to_ne_bytes()),
        DType::U8 => out.push(value as i64 as u8),
    }
}

#[cfg(test)]
mod tests {
    use paceline_collectives::MAX_RANKS;

    use super::*;

    #[test]
    fn what_was_filled_is_right_and_what_is_shifted_is_not() {
        for dtype in DType::ALL {
            let pattern = Pattern::input(dtype, None, 3);
            let mut bytes = vec![0; 3000 * dtype.size_bytes()];
            pattern.fill(&mut bytes, 77);
            assert_eq!(pattern.count_wrong(&bytes, 77), 0, "{dtype}");
            assert!(pattern.count_wrong(&bytes, 78) > 2000, "{dtype}");
            assert!(Pattern::input(dtype, None, 4).count_wrong(&bytes, 77) > 2000, "{dtype}");
            bytes[5 * dtype.size_bytes()] ^= 1;
            assert_eq!(pattern.count_wrong(&bytes, 77), 1, "{dtype}");
        }
    }

    #[test]
    fn no_two_ranks_have_the_same_input() {
        let input = |rank| Pattern::input(DType::U8, None, rank).bytes;
        let inputs: std::collections::BTreeSet<_> = (0..MAX_RANKS).map(input).collect();
        assert_eq!(inputs.len(), MAX_RANKS);
    }

    #[test]
    fn results_are_exact_in_every_type() {
        // Every type must hold the same value as f64.
        let decoded = |pattern: &Pattern, at: usize| {
            let bytes = &pattern.bytes[2 * at..2 * at + 2];
            f64::from(bf16::from_ne_bytes(bytes.try_into().unwrap()))
        };
        for redop in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let narrow = Pattern::reduced(DType::BF16, redop, MAX_RANKS);
            let wide = Pattern::reduced(DType::F64, redop, MAX_RANKS);
            for at in 0..PERIOD {
                let exact = f64::from_ne_bytes(wide.bytes[8 * at..8 * at + 8].try_into().unwrap());
                assert_eq!(decoded(&narrow, at), exact, "{redop:?} of element {at}");
            }
        }
    }
}
