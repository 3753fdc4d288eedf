//! Compares the loops with a plain recursion over one element at a time, for every type, operation, number of
//! inputs and length.

use ::half::{bf16, f16};
use paceline_memory::DType;
use paceline_numeric::{SimdLevel, tree};

use super::half::{narrow_f16, widen_f16};
use super::{ReduceOp, ReduceTask, Reduction};

const LENGTHS: [usize; 10] = [0, 1, 2, 3, 7, 100, 1023, 1024, 1025, 4099];

/// Bytes that start on a 64-byte boundary, like buffers.
struct Region {
    words: Vec<u64>,
    start: usize,
    len_bytes: usize,
}

impl Region {
    fn new(bytes: &[u8]) -> Self {
        let words = vec![0u64; bytes.len() / 8 + 9];
        let start = words.as_ptr().align_offset(64) * 8;
        let mut region = Region { words, start, len_bytes: bytes.len() };
        region.bytes_mut().copy_from_slice(bytes);
        region
    }

    fn zeroed(len_bytes: usize) -> Self {
        Region::new(&vec![0; len_bytes])
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the vector was made large enough for this range, and any byte is a value.
        unsafe { std::slice::from_raw_parts(self.input(), self.len_bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.output(), self.len_bytes) }
    }

    fn input(&self) -> *const u8 {
        self.words.as_ptr().cast::<u8>().wrapping_add(self.start)
    }

    fn output(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(self.start)
    }
}

impl Clone for Region {
    fn clone(&self) -> Self {
        // A copied vector would begin at a different distance from a 64-byte boundary.
        Region::new(self.bytes())
    }
}

/// A generator of bits that look random (xorshift64*).
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

/// One element: usually a number of moderate size, sometimes an extreme. It uses one NaN value, since
/// which of two NaNs a sum returns is not defined.
fn element(dtype: DType, bits: &mut Bits) -> Vec<u8> {
    let random = bits.next();
    let specials = [f64::NAN, f64::INFINITY, -0.0, 0.0, 1e-7, 6e4, -6e4, 1e-42, f64::MAX];
    let float = match bits.next() % 64 {
        at @ 0..9 => specials[at as usize],
        _ => (random >> 40) as f64 / f64::from(1 << 22) - 2.0,
    };
    match dtype {
        DType::F32 => (float as f32).to_ne_bytes().to_vec(),
        DType::F64 => float.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32_const(float as f32).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(float as f32).to_ne_bytes().to_vec(),
        DType::I32 => (random as i32 >> (random >> 59)).to_ne_bytes().to_vec(),
        DType::I64 => (random as i64 >> (bits.next() % 64)).to_ne_bytes().to_vec(),
        DType::U8 => vec![random as u8],
    }
}

fn inputs(dtype: DType, count: usize, elems: usize) -> Vec<Region> {
    let mut bits = Bits(0x9E37_79B9_7F4A_7C15 + count as u64 * 31 + elems as u64);
    let region = |_| {
        let bytes: Vec<u8> = (0..elems).flat_map(|_| element(dtype, &mut bits)).collect();
        Region::new(&bytes)
    };
    (0..count).map(region).collect()
}

/// The values of one element of every rank, in rank order.
fn column<T, const N: usize>(inputs: &[Region], at: usize, of: impl Fn([u8; N]) -> T) -> Vec<T> {
    let bytes = |input: &Region| input.bytes()[at * N..][..N].try_into().unwrap();
    inputs.iter().map(|input| of(bytes(input))).collect()
}

/// The tree over these values, by its definition: the left half has the largest power of two below their number.
fn tree_of<T: Copy>(values: &[T], combine: &impl Fn(T, T) -> T) -> T {
    match values {
        [only] => *only,
        _ => {
            let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
            combine(tree_of(left, combine), tree_of(right, combine))
        }
    }
}

/// The reference result: one element after the other.
fn reference(Reduction { dtype, op, ranks }: Reduction, inputs: &[Region]) -> Vec<u8> {
    let elems = inputs[0].len_bytes / dtype.size_bytes();
    macro_rules! floats {
        ($float:ty, $running:ty, $widen:expr, $narrow:expr) => {{
            let combine = |x: $running, y: $running| match op {
                ReduceOp::Sum | ReduceOp::Mean => x + y,
                ReduceOp::Product => x * y,
                ReduceOp::Min | ReduceOp::Max if x.is_nan() => x,
                ReduceOp::Min | ReduceOp::Max if y.is_nan() => y,
                ReduceOp::Min => [x, y][usize::from(y < x)],
                ReduceOp::Max => [x, y][usize::from(y > x)],
            };
            let element = |at| {
                let values = column(inputs, at, |bytes| $widen(<$float>::from_ne_bytes(bytes)));
                let result = tree_of(&values, &combine);
                let divisor = if op == ReduceOp::Mean { ranks as $running } else { 1.0 };
                $narrow(result / divisor).to_ne_bytes()
            };
            (0..elems).flat_map(element).collect()
        }};
    }
    macro_rules! integers {
        ($integer:ty) => {{
            let combine = |x: $integer, y: $integer| match op {
                ReduceOp::Sum | ReduceOp::Mean => x.wrapping_add(y),
                ReduceOp::Product => x.wrapping_mul(y),
                ReduceOp::Min => x.min(y),
                ReduceOp::Max => x.max(y),
            };
            let element = |at| {
                let values = column(inputs, at, <$integer>::from_ne_bytes);
                let result = tree_of(&values, &combine);
                let divisor = if op == ReduceOp::Mean { ranks as $integer } else { 1 };
                (result / divisor).to_ne_bytes()
            };
            (0..elems).flat_map(element).collect()
        }};
    }
    match dtype {
        DType::F32 => floats!(f32, f32, |x| x, |x: f32| x),
        DType::F64 => floats!(f64, f64, |x| x, |x: f64| x),
        DType::F16 => floats!(f16, f32, f16::to_f32_const, f16::from_f32_const),
        DType::BF16 => floats!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::I32 => integers!(i32),
        DType::I64 => integers!(i64),
        DType::U8 => integers!(u8),
    }
}

/// Whether the bits are the same, as far as they are defined: NaNs may differ.
fn agree(Reduction { dtype, op, .. }: Reduction, got: &[u8], want: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::BF16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::I32 | DType::I64 | DType::U8 => false,
    };
    let either_nan = !matches!(op, ReduceOp::Min | ReduceOp::Max);
    let size = dtype.size_bytes();
    got.len() == want.len()
        && got
            .chunks_exact(size)
            .zip(want.chunks_exact(size))
            .all(|(got, want)| got == want || either_nan && is_nan(got) && is_nan(want))
}

/// The levels of this machine. Prints those that cannot be tested here.
fn levels() -> Vec<SimdLevel> {
    for level in SimdLevel::ALL.iter().filter(|level| !level.is_available()) {
        println!("skipped: this processor has no {level:?}");
    }
    SimdLevel::available()
}

/// Calls `check` with every reduction, its inputs and the expected result.
fn every_case(check: impl Fn(Reduction, &[Region], &[u8], &str)) {
    for dtype in DType::ALL {
        for count in (1..=17).chain([24, 31, 63, 64]) {
            // Many inputs differ from few only in how the results of groups are merged.
            let lengths = if count <= 9 { &LENGTHS[..] } else { &[1, 1025] };
            for &elems in lengths {
                let inputs = inputs(dtype, count, elems);
                for op in ReduceOp::ALL {
                    let reduction = Reduction { dtype, op, ranks: count };
                    let case = format!("{} of {count} x {elems} {dtype}", op.name());
                    check(reduction, &inputs, &reference(reduction, &inputs), &case);
                }
            }
        }
    }
}

fn addresses(inputs: &[Region]) -> Vec<*const u8> {
    inputs.iter().map(Region::input).collect()
}

/// Runs the reduction on copies of `before`, whose first `num_inputs` are the inputs. Returns the contents of `outputs`
/// (indices into `before`).
fn run(
    reduction: Reduction,
    level: SimdLevel,
    before: &[Region],
    num_inputs: usize,
    outputs: &[usize],
) -> Vec<Region> {
    let mut regions: Vec<Region> = before.to_vec();
    let elems = regions[0].len_bytes / reduction.dtype.size_bytes();
    let all: Vec<*mut u8> = regions.iter_mut().map(Region::output).collect();
    let inputs: Vec<*const u8> = all[..num_inputs].iter().map(|at| at.cast_const()).collect();
    let chosen: Vec<*mut u8> = outputs.iter().map(|&at| all[at]).collect();
    let task = ReduceTask::Run { inputs: &inputs, outputs: &chosen };
    // SAFETY: all regions are `elems` long, aligned and distinct, and the level was asked for.
    unsafe { reduction.perform(level, task, elems) };
    for at in (0..regions.len()).filter(|at| !outputs.contains(at)) {
        assert_eq!(regions[at].bytes(), before[at].bytes(), "region {at} is no output");
    }
    let mut regions: Vec<Option<Region>> = regions.into_iter().map(Some).collect();
    outputs.iter().map(|&at| regions[at].take().unwrap()).collect()
}

#[test]
fn every_level_computes_what_a_plain_loop_does() {
    let levels = levels();
    every_case(|reduction, inputs, want, case| {
        let count = inputs.len();
        let mut regions = inputs.to_vec();
        regions.extend([(); 3].map(|()| Region::zeroed(want.len())));
        let in_place: Vec<usize> = (0..count).collect();
        let reversed: Vec<usize> = (0..count).rev().collect();
        let (one, several) = ([count], [count, count + 1, count + 2]);
        // The first output is new memory and a later one is an input, and the reverse.
        let (new_first, new_last) = ([count, 0], [count - 1, count + 2]);
        for &level in &levels {
            for outputs in [&in_place[..], &reversed, &one, &several, &new_first, &new_last] {
                for result in run(reduction, level, &regions, count, outputs) {
                    let same = agree(reduction, result.bytes(), want);
                    assert!(same, "{case} at {level:?} into {outputs:?}");
                }
            }
        }
    });
}

/// The result if groups of `local` neighbors are combined to nodes first, and then the nodes.
fn by_nodes(
    reduction: Reduction,
    level: SimdLevel,
    inputs: &[Region],
    local: usize,
) -> [Region; 2] {
    let running_size = reduction.running_dtype().size_bytes();
    let elems = inputs[0].len_bytes / reduction.dtype.size_bytes();
    let addresses = addresses(inputs);
    let groups = (0..inputs.len()).step_by(local);
    let groups = groups.map(|start| start..inputs.len().min(start + local));
    let nodes: Vec<_> = groups.flat_map(|ranks| tree::nodes(inputs.len(), ranks)).collect();
    let partial = |node: &std::ops::Range<usize>| {
        let mut running = Region::zeroed(elems * running_size);
        let task =
            ReduceTask::Partial { inputs: &addresses[node.clone()], running: running.output() };
        // SAFETY: all regions hold `elems` elements, are aligned and distinct.
        unsafe { reduction.perform(level, task, elems) };
        running
    };
    let mut running: Vec<Region> = nodes.iter().map(partial).collect();
    let merges = tree::merges(inputs.len(), &nodes);
    let mut result = Region::zeroed(inputs[0].len_bytes);
    let in_place: Vec<*mut u8> = running.iter_mut().map(Region::output).collect();
    let sources: Vec<*const u8> = in_place.iter().map(|at| at.cast_const()).collect();
    let outputs = [result.output(), in_place[0]];
    // A node can be replaced by the result only if both have elements of one size.
    let num_outputs = if running_size == reduction.dtype.size_bytes() { 2 } else { 1 };
    let outputs = &outputs[..num_outputs];
    let task = ReduceTask::Complete { nodes: &sources, merges: &merges, outputs };
    // SAFETY: as above.
    unsafe { reduction.perform(level, task, elems) };
    let other = if num_outputs == 2 { running[0].clone() } else { result.clone() };
    [result, other]
}

#[test]
fn nodes_that_are_combined_beforehand_leave_the_bits_alone() {
    let levels = levels();
    every_case(|reduction, inputs, want, case| {
        for local in [1, 2, 3, 4, 6, inputs.len()] {
            for &level in &levels {
                for result in by_nodes(reduction, level, inputs, local) {
                    let same = agree(reduction, result.bytes(), want);
                    assert!(same, "{case} at {level:?}, {local} at a time");
                }
            }
        }
    });
}

#[test]
fn the_public_way_in_takes_the_best_level() {
    let inputs = inputs(DType::F16, 5, 1025);
    let reduction = Reduction { dtype: DType::F16, op: ReduceOp::Mean, ranks: 5 };
    let want = reference(reduction, &inputs);
    let (mut whole, mut split) = (Region::zeroed(want.len()), Region::zeroed(want.len()));
    let mut running = [(); 2].map(|()| Region::zeroed(want.len() * 2));
    let addresses = addresses(&inputs);
    // SAFETY: all regions hold 1025 elements, are aligned and distinct.
    unsafe {
        reduction.run(&addresses, &[whole.output()], 1025);
        reduction.partial(&addresses[..4], running[0].output(), 1025);
        reduction.partial(&addresses[4..], running[1].output(), 1025);
        let nodes = [running[0].input(), running[1].input()];
        reduction.complete(&nodes, &tree::merges(5, &[0..4, 4..5]), &[split.output()], 1025);
    }
    assert!(agree(reduction, whole.bytes(), &want));
    assert!(agree(reduction, split.bytes(), &want));
}

#[test]
fn means_of_integers_are_truncated_toward_zero() {
    let mean = |dtype, ranks, bytes: &[u8]| {
        let (input, mut output) = (Region::new(bytes), Region::zeroed(bytes.len()));
        let reduction = Reduction { dtype, op: ReduceOp::Mean, ranks };
        let elems = bytes.len() / dtype.size_bytes();
        // SAFETY: both regions hold `elems` elements, are aligned and distinct.
        unsafe { reduction.run(&[input.input()], &[output.output()], elems) };
        output.bytes().to_vec()
    };
    let mut bits = Bits(7);
    for ranks in (1..=64).chain([127, 128, 129, 255, 256, 300, 1023, 1024]) {
        let mut wide = vec![i64::MIN, i64::MIN + 1, i64::MAX, -7, -1, 0, 1, 7];
        wide.extend((0..1000).map(|_| bits.next() as i64 >> (bits.next() % 64)));
        // Multiples of the divisor and their neighbors, where wrong rounding would show.
        let mut narrow = vec![i32::MIN, i32::MIN + 1, i32::MAX, -7, -1, 0, 1, 7];
        let multiples = (0..1000).map(|_| bits.next() as i32 / ranks as i32 * ranks as i32);
        narrow.extend(multiples.flat_map(|x| [x.saturating_sub(1), x, x.saturating_add(1)]));
        let bytes: Vec<u8> = (0..=255).collect();
        let flat = |x: &[i64]| x.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        let want: Vec<i64> = wide.iter().map(|x| x / ranks as i64).collect();
        assert_eq!(mean(DType::I64, ranks, &flat(&wide)), flat(&want));
        let flat = |x: &[i32]| x.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        let want: Vec<i32> = narrow.iter().map(|x| x / ranks as i32).collect();
        assert_eq!(mean(DType::I32, ranks, &flat(&narrow)), flat(&want));
        let want: Vec<u8> = bytes.iter().map(|x| (usize::from(*x) / ranks) as u8).collect();
        assert_eq!(mean(DType::U8, ranks, &bytes), want);
    }
}

/// Bits of f32 values to convert: every sign, exponent and upper fraction with lower fractions around the
/// ties, and a million random values.
fn f32_bits() -> impl Iterator<Item = u32> {
    let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    let systematic = (0..=0xFFFF_u32).flat_map(move |upper| lower.map(|lower| upper << 16 | lower));
    let mut bits = Bits(1);
    systematic.chain((0..1_000_000).map(move |_| bits.next() as u32))
}

#[test]
fn f16_is_converted_as_by_half_at_every_level() {
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let singles: Vec<f32> = f32_bits().map(f32::from_bits).collect();
    for level in levels() {
        // One value less than whole vectors, so that a remainder is left.
        let halves = &halves[1..];
        let mut wide = vec![0.0; halves.len()];
        widen_f16(level, halves, &mut wide);
        for (x, y) in halves.iter().zip(&wide) {
            assert_eq!(y.to_bits(), x.to_f32_const().to_bits(), "{level:?} {:#x}", x.to_bits());
        }
        let mut narrow = vec![f16::ZERO; singles.len()];
        narrow_f16(level, &singles, &mut narrow);
        for (x, y) in singles.iter().zip(&narrow) {
            let want = f16::from_f32_const(*x).to_bits();
            assert_eq!(y.to_bits(), want, "{level:?} {:#x}", x.to_bits());
        }
    }
}
