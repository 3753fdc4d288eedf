//! Attention token by token against attention of the whole sequence, at every SIMD level of this machine, with one and three
//! threads; what is refused; the device without contents.

use crate::common::{computes, poisoned, tensor};
use half::bf16;
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{Compute, Real, cast};
use paceline_memory::{Allocator, Category, DType, Shape, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn table(allocator: &Allocator, spec: &AttentionSpec, dtype: DType) -> RotaryTable {
    let config = RotaryConfig { head_dim: spec.head_dim, theta: 10_000.0, scaling: None };
    RotaryTable::new(allocator, config, spec.seq, dtype).unwrap()
}

fn empty(compute: &Compute, dtype: DType, shape: impl Into<Shape>) -> Tensor {
    compute.allocator.tensor(dtype, shape, Category::Data).unwrap()
}

fn random(seed: u64, len: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| f64::from(rng.random_range(-1.0f32..1.0))).collect()
}

/// The output for all tokens at once.
fn whole<T: Real>(
    compute: &Compute,
    dtype: DType,
    spec: &AttentionSpec,
    elems: &[f64],
) -> Vec<f64> {
    let qkv = tensor(compute, dtype, spec.qkv_shape(), elems);
    let output = empty(compute, dtype, spec.output_shape());
    let log_sums = empty(compute, dtype, [spec.log_sums_len()]);
    let table = table(&compute.allocator, spec, dtype);
    attention::forward(compute, &qkv, None, &table, spec, &output, &log_sums).unwrap();
    output.read::<T>().unwrap().iter().map(|x| x.to_f64()).collect()
}

/// The same, token by token, with places of the cache behind the last token that stay NaN.
fn by_steps<T: Real>(
    compute: &Compute,
    dtype: DType,
    spec: &AttentionSpec,
    elems: &[f64],
) -> Vec<f64> {
    let cached = AttentionSpec { seq: spec.seq + 2, ..*spec };
    let ([_, columns], [_, width]) = (spec.qkv_shape(), spec.output_shape());
    let [keys, values] = [(); 2].map(|()| poisoned(compute, dtype, cached.cache_shape()));
    let table = table(&compute.allocator, spec, dtype);
    let mut all = vec![f64::NAN; spec.batch * spec.seq * width];
    for position in 0..spec.seq {
        let rows = (0..spec.batch).map(|row| row * spec.seq + position);
        let qkv: Vec<f64> =
            rows.clone().flat_map(|at| &elems[at * columns..][..columns]).copied().collect();
        let qkv = tensor(compute, dtype, [spec.batch, columns], &qkv);
        let output = poisoned(compute, dtype, [spec.batch, width]);
        attention::step(compute, &qkv, &table, &cached, position, &keys, &values, &output).unwrap();
        let output = output.read::<T>().unwrap();
        for (at, from) in rows.zip(output.chunks_exact(width)) {
            let to = &mut all[at * width..][..width];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f64());
        }
    }
    all
}

#[track_caller]
fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance, "{what}[{at}]: {got}, not {want}");
    }
}

#[test]
fn tokens_one_by_one_get_the_output_of_the_whole_sequence() {
    let computes = computes();
    let mut seed = 0;
    for (heads, kv_heads) in [(1, 1), (4, 1), (4, 2), (9, 3)] {
        for head_dim in [2, 16, 64, 80] {
            for seq in [1, 2, 33, 65] {
                let spec = AttentionSpec { batch: 2, seq, heads, kv_heads, head_dim };
                seed += 1;
                let elems = random(seed, 2 * seq * spec.qkv_shape()[1]);
                let want = whole::<f64>(&computes[0], DType::F64, &spec, &elems);
                let got = by_steps::<f64>(&computes[0], DType::F64, &spec, &elems);
                assert_close(&got, &want, 1e-12, &format!("{spec:?} f64"));
                for compute in &computes {
                    let got = by_steps::<f32>(compute, DType::F32, &spec, &elems);
                    let fast = whole::<f32>(compute, DType::F32, &spec, &elems);
                    let what = format!("{spec:?} {:?}", compute.simd());
                    // Sums of up to 80 products of numbers below one, in f32.
                    assert_close(&got, &want, 1e-5, &what);
                    assert_close(&got, &fast, 1e-5, &what);
                }
            }
        }
    }
}

/// The numbers of a tensor, of f32 or bf16.
fn elems(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        DType::F32 => tensor.read::<f32>().unwrap().to_vec(),
        _ => tensor.read::<bf16>().unwrap().iter().map(|x| x.to_f32()).collect(),
    }
}

/// The output of the last token and the cache, if the tokens before it are kept at once or come one by one.
fn last_step(compute: &Compute, dtype: DType, spec: &AttentionSpec, at_once: bool) -> [Tensor; 3] {
    let (columns, tokens) = (spec.qkv_shape()[1], spec.seq - 1);
    let elems = random(5, spec.batch * spec.seq * columns);
    let rows = |count: usize, from: &dyn Fn(usize) -> usize| {
        let elems: Vec<f64> = (0..spec.batch)
            .flat_map(|row| (0..count).map(move |at| (row, at)))
            .flat_map(|(row, at)| {
                elems[(row * spec.seq + from(at)) * columns..][..columns].to_vec()
            })
            .collect();
        let wide = tensor(compute, DType::F32, [spec.batch * count, columns], &elems);
        if dtype == DType::F32 {
            return wide;
        }
        let narrow = empty(compute, dtype, wide.shape());
        cast::narrow(compute, &wide, &narrow).unwrap();
        narrow
    };
    let table = table(&compute.allocator, spec, DType::F32);
    let [keys, values] = [(); 2].map(|()| empty(compute, dtype, spec.cache_shape()));
    let output = empty(compute, dtype, [spec.batch, spec.output_shape()[1]]);
    let step = |qkv: &Tensor, position| {
        attention::step(compute, qkv, &table, spec, position, &keys, &values, &output).unwrap();
    };
    if at_once {
        let qkv = rows(tokens, &|at| at);
        attention::keep(compute, &qkv, &table, spec, tokens, &keys, &values).unwrap();
    } else {
        (0..tokens).for_each(|position| step(&rows(1, &|_| position), position));
    }
    step(&rows(1, &|_| tokens), tokens);
    [output, keys, values]
}

#[test]
fn tokens_that_are_kept_at_once_are_those_of_steps() {
    let spec = AttentionSpec { batch: 2, seq: 9, heads: 4, kv_heads: 2, head_dim: 16 };
    for compute in computes() {
        for dtype in [DType::F32, DType::BF16] {
            let [want, got] =
                [false, true].map(|at_once| last_step(&compute, dtype, &spec, at_once));
            assert_eq!(got.each_ref().map(elems), want.each_ref().map(elems));
        }
    }
    let compute = &computes()[0];
    let [keys, values] = [(); 2].map(|()| empty(compute, DType::F32, spec.cache_shape()));
    let qkv = empty(compute, DType::F32, [2 * 10, spec.qkv_shape()[1]]);
    let table = table(&compute.allocator, &spec, DType::F32);
    let error = attention::keep(compute, &qkv, &table, &spec, 10, &keys, &values).unwrap_err();
    assert!(error.to_string().contains("9 places, and 10 tokens"), "{error}");
}

#[test]
fn in_16_bits_a_step_is_near_that_of_f32() {
    let spec = AttentionSpec { batch: 2, seq: 9, heads: 4, kv_heads: 2, head_dim: 16 };
    for compute in computes() {
        let [want, got] = [DType::F32, DType::BF16]
            .map(|dtype| elems(&last_step(&compute, dtype, &spec, true)[0]));
        for (got, want) in got.iter().zip(&want) {
            let off = (got - want).abs();
            // Means of numbers below one, whose weights come from rounded products.
            assert!(off <= 0.03, "{:?}: {got}, not {want}", compute.simd());
        }
    }
}

#[test]
fn an_empty_batch_takes_a_step() {
    let spec = AttentionSpec { batch: 0, seq: 3, heads: 2, kv_heads: 1, head_dim: 4 };
    for compute in computes() {
        assert_eq!(by_steps::<f32>(&compute, DType::F32, &spec, &[]), []);
    }
}

/// Takes a step with a cache of four places and a table of `positions`.
fn step_at(compute: &Compute, position: usize, positions: usize, width: usize) -> Option<String> {
    let spec = AttentionSpec { batch: 3, seq: 4, heads: 4, kv_heads: 2, head_dim: 8 };
    let table = table(&compute.allocator, &AttentionSpec { seq: positions, ..spec }, DType::F32);
    let [keys, values] = [(); 2].map(|()| empty(compute, DType::F32, spec.cache_shape()));
    let (qkv, output) =
        (empty(compute, DType::F32, [3, 64]), empty(compute, DType::F32, [3, width]));
    let done = attention::step(compute, &qkv, &table, &spec, position, &keys, &values, &output);
    done.err().map(|error| error.to_string())
}

#[test]
fn positions_behind_the_cache_or_the_table_and_wrong_shapes_are_refused() {
    for allocator in [Allocator::new(), Allocator::meta()] {
        let compute = Compute::new(1, allocator).unwrap();
        assert_eq!(step_at(&compute, 3, 4, 32), None);
        for ((position, positions, width), expected) in [
            ((4, 5, 32), "the cache has 4 places, so it has no place 4"),
            ((3, 3, 32), "the rotary table has 3 positions, 4 are needed"),
            ((3, 4, 31), "output"),
        ] {
            let error = step_at(&compute, position, positions, width).unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn a_step_takes_the_scratch_memory_of_the_cpu() {
    let [cpu, meta] = [Allocator::new(), Allocator::meta()].map(|allocator| {
        let compute = Compute::new(1, allocator).unwrap();
        assert_eq!(step_at(&compute, 2, 4, 32), None);
        compute.allocator.end_phase("all")
    });
    assert_eq!(cpu, meta);
    // Scores of three tokens, and a query.
    assert_eq!(cpu.of(Category::Workspace).peak_bytes, 4 * (3 + 8));
}
