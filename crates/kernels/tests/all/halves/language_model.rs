//! The kernels of a language model with activations of `Half`, for each of the two types by `half_language_model.rs`.

use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::linear_cross_entropy::{self, Gradients, IGNORED, Then};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{Bf16Products, Compute, SimdLevel, embedding, reference, rms_norm, swiglu};
use paceline_memory::{Allocator, Category, DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Half;
use crate::common::{
    assert_close, instruction_sets, of, plain_linear_cross_entropy, plain_rms_norm, plain_swiglu,
    values,
};

const HALF: DType = <Half as paceline_memory::Element>::DTYPE;

/// Between -2 and 2, with the digits of `Half`.
fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| Half::from_f32(rng.random::<f32>() * 4.0 - 2.0).to_f64()).collect()
}

/// A compute handle of each form of products on this processor, with 1 and 3 threads.
fn computes() -> Vec<Compute> {
    [1, 3].into_iter().flat_map(instruction_sets).collect()
}

fn halves(elems: &[f64], shape: &[usize]) -> Tensor {
    of(&elems.iter().map(|x| Half::from_f64(*x)).collect::<Vec<_>>(), shape)
}

fn floats(elems: &[f64], shape: &[usize]) -> Tensor {
    of(&elems.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape)
}

/// What a kernel has to overwrite.
fn poison(dtype: DType, shape: &[usize]) -> Tensor {
    let nan = vec![f64::NAN; shape.iter().product()];
    if dtype == HALF { halves(&nan, shape) } else { floats(&nan, shape) }
}

/// Half of the distance between neighbors, relative to the smaller one.
const ROUNDING: f64 = Half::EPSILON.to_f64_const() / 2.0;

/// Each element may be off by its own rounding, if it is `Half`, and by `within` of the largest element or one.
#[track_caller]
fn close(got: &Tensor, want: &[f64], within: f64, what: &str) {
    let rounding = if got.dtype() == HALF { ROUNDING } else { 0.0 };
    assert_close(&values(got), want, within, rounding, what);
}

/// Of f32 arithmetic.
const FINE: f64 = 4e-6;

#[test]
fn rms_norm_reads_a_wide_stream_and_writes_a_rounded_one() {
    for (rows, columns) in [(1, 1), (5, 7), (3, 32), (9, 101), (0, 4)] {
        // The stream has more bits than `Half`.
        let x: Vec<f64> =
            random(rows * columns, 1).iter().map(|x| f64::from(*x as f32 / 3.0)).collect();
        let (w, dy) = (random(columns, 2), random(rows * columns, 3));
        let (eps, wide) = (1e-5, [rows, columns]);
        let [y, r, dx, dw] = plain_rms_norm(&x, &w, &dy, eps);
        for compute in &computes() {
            let (xs, ws) = (floats(&x, &wide), floats(&w, &[columns]));
            let (ys, rs) = (poison(HALF, &wide), poison(DType::F32, &[rows]));
            rms_norm::forward(compute, &xs, &ws, eps, &ys, &rs).unwrap();
            close(&ys, &y, FINE, "y");
            close(&rs, &r, FINE, "r");
            let (dys, dxs) = (halves(&dy, &wide), poison(DType::F32, &wide));
            rms_norm::backward_input(compute, &xs, &ws, &rs, &dys, None, &dxs).unwrap();
            // Where columns are few, r^3 is large.
            let largest = r.iter().fold(1.0f64, |most, r| most.max(r.powi(2)));
            close(&dxs, &dx, FINE * largest, "dx");
            let dws = poison(DType::F32, &[columns]);
            rms_norm::backward_weight(compute, &xs, &rs, &dys, &dws, false).unwrap();
            close(&dws, &dw, FINE, "dw");
        }
    }
}

#[test]
fn swiglu_computes_wide_and_rounds_once() {
    for (rows, columns) in [(1, 1), (4, 3), (7, 65), (0, 5)] {
        let x: Vec<f64> = random(rows * 2 * columns, 5).iter().map(|x| x * 4.0).collect();
        let dy = random(rows * columns, 6);
        let [y, dx] = plain_swiglu(&x, &dy, columns);
        for compute in &computes() {
            let (xs, dys) = (halves(&x, &[rows, 2 * columns]), halves(&dy, &[rows, columns]));
            let ys = poison(HALF, &[rows, columns]);
            swiglu::forward(compute, &xs, &ys).unwrap();
            close(&ys, &y, FINE, "y");
            let dxs = poison(HALF, &[rows, 2 * columns]);
            swiglu::backward(compute, &xs, &dys, &dxs).unwrap();
            close(&dxs, &dx, FINE, "dx");
        }
    }
}

#[test]
fn rows_are_selected_and_put_back_exactly() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let table = random(7 * 5, 7);
    let (ids, rows) = (of(&[6i64, 0, 3], [3]), poison(HALF, &[3, 5]));
    embedding::forward(&compute, &ids, &halves(&table, &[7, 5]), &rows).unwrap();
    let row = |id: usize| table[id * 5..(id + 1) * 5].to_vec();
    assert_eq!(values(&rows), [row(6), row(0), row(3)].concat());
    let back = poison(HALF, &[7, 5]);
    embedding::backward(&compute, &ids, &rows, &back, false).unwrap();
    let zero = vec![0.0; 5];
    let of_row = |id| if [6, 0, 3].contains(&id) { row(id) } else { zero.clone() };
    assert_eq!(values(&back), (0..7).flat_map(of_row).collect::<Vec<_>>());
}

#[test]
fn a_head_has_wide_outputs_and_losses() {
    for (rows, inputs, classes) in [(1, 1, 1), (9, 5, 7), (70, 33, 40), (600, 3, 5), (0, 3, 4)] {
        let (x, w) = (random(rows * inputs, 8), random(classes * inputs, 9));
        let label = |row: usize| if row % 5 == 4 { IGNORED } else { (row * 7 % classes) as i64 };
        let labels: Vec<i64> = (0..rows).map(label).collect();
        let before = random(classes * inputs, 10);
        let scale = 1.0 / rows.max(1) as f64;
        let ([loss, ..], dx, dw) = plain_linear_cross_entropy(&x, &w, &labels, inputs, scale);
        let added: Vec<f64> = dw.iter().zip(&before).map(|(dw, before)| dw + before).collect();
        for compute in &computes() {
            let (xs, ws) = (halves(&x, &[rows, inputs]), floats(&w, &[classes, inputs]));
            let (ids, dxs) = (of(&labels, [rows]), poison(HALF, &[rows, inputs]));
            for (accumulate, dw) in [(false, &dw), (true, &added)] {
                let weight = || match accumulate {
                    true => floats(&before, &[classes, inputs]),
                    false => poison(DType::F32, &[classes, inputs]),
                };
                let dws = weight();
                let then = Then::Weight { d_weight: &dws, accumulate };
                let differentiate = |gradients| {
                    let (x, w, sums) = (&xs, &ws, of(&[0.0f64; 3], [3]));
                    linear_cross_entropy::differentiate(
                        compute, x, w, &ids, scale, gradients, &sums,
                    )
                    .unwrap();
                    values(&sums)
                };
                let sums = differentiate(Gradients { d_input: &dxs, then });
                let off = (sums[0] - loss).abs();
                assert!(off <= FINE * loss.max(1.0) * 4.0, "{} not {loss}", sums[0]);
                // Outputs become gradients, and each of these is rounded before it is multiplied: an element is off by that
                // share of the sum of the sizes of its products, which is at most two of the largest weights times scale.
                close(&dxs, &dx, ROUNDING * 4.0 * scale + FINE, "dx");
                close(&dws, dw, ROUNDING * 2.0 + FINE, "dw");
                // The same in halves, bit by bit.
                let kept = poison(DType::F32, &[rows, classes]);
                let apart = poison(HALF, &[rows, inputs]);
                differentiate(Gradients { d_input: &apart, then: Then::Keep(&kept) });
                let (x, weight) = (&xs, weight());
                linear_cross_entropy::backward_weight(compute, x, &kept, &weight, accumulate)
                    .unwrap();
                assert_eq!(*apart.read::<Half>().unwrap(), *dxs.read::<Half>().unwrap());
                assert_eq!(*weight.read::<f32>().unwrap(), *dws.read::<f32>().unwrap());
            }
            let sums = of(&[0.0f64; 3], [3]);
            linear_cross_entropy::evaluate(compute, &xs, &ws, &ids, &sums).unwrap();
            let off = (sums.read::<f64>().unwrap()[0] - loss).abs();
            assert!(off <= FINE * loss.max(1.0) * 4.0);
        }
    }
}

#[test]
fn attention_is_wide_inside() {
    for (heads, kv_heads, head_dim, seq) in [
        (1, 1, 8, 1),
        (4, 2, 16, 65),
        (3, 1, 2, 63),
        (2, 2, 80, 30),
        (2, 1, 32, 64),
        (9, 3, 64, 129),
    ] {
        let spec = AttentionSpec { batch: 3, seq, heads, kv_heads, head_dim };
        let lengths = [seq as i64, 0, (seq as i64 * 2 + 2) / 3];
        let config = RotaryConfig { head_dim, theta: 10_000.0, scaling: None };
        let table = |dtype| RotaryTable::new(&Allocator::new(), config, seq, dtype).unwrap();
        let is_padding = |row: usize| row % seq >= lengths[row / seq] as usize;
        // Nothing reads padding.
        let padded = |[rows, columns]: [usize; 2], seed| {
            let mut values = random(rows * columns, seed);
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                if is_padding(row) {
                    values.fill(f64::NAN);
                }
            }
            values
        };
        let (qkv, dy) = (padded(spec.qkv_shape(), 11), padded(spec.output_shape(), 12));
        let wide = table(DType::F64);
        let angles = wide.values().read::<f64>().unwrap();
        let (mut y, mut log_sums) = (vec![0.0; dy.len()], vec![0.0; spec.log_sums_len()]);
        reference::attention_forward(&spec, &qkv, &lengths, &angles, &mut y, &mut log_sums);
        let mut bits: [Option<Vec<u8>>; 2] = [None, None];
        for compute in &computes() {
            // Tiles of AMX, which heads of these sizes fill, multiply in bf16.
            let has_tiles = HALF == DType::BF16
                && compute.bf16_products() == Bf16Products::Amx
                && head_dim.next_multiple_of(16).is_multiple_of(32);
            let within = if has_tiles { 4.0 / 256.0 } else { 1e-5 };
            let [qkvs, dys] = [(&qkv, spec.qkv_shape()), (&dy, spec.output_shape())]
                .map(|(elems, shape)| halves(elems, &shape));
            let (ids, narrow) = (of(&lengths, [3]), table(DType::F32));
            let ys = poison(HALF, &spec.output_shape());
            let sums = poison(DType::F32, &[spec.log_sums_len()]);
            attention::forward(compute, &qkvs, Some(&ids), &narrow, &spec, &ys, &sums).unwrap();
            close(&ys, &y, within, "output");
            close(&sums, &log_sums, within, "log_sums");
            // From the output as it is stored, so that its rounding does not count.
            let (stored, mut d_qkv) = (values(&ys), vec![0.0; qkv.len()]);
            let results = (&*stored, &*log_sums, &*dy);
            reference::attention_backward(&spec, &qkv, &lengths, &angles, results, &mut d_qkv);
            let d_qkvs = poison(HALF, &spec.qkv_shape());
            let (x, n, t, y, l, dy, dx) = (&qkvs, Some(&ids), &narrow, &ys, &sums, &dys, &d_qkvs);
            attention::backward(compute, x, n, t, &spec, y, l, dy, dx).unwrap();
            close(&d_qkvs, &d_qkv, within, "d_qkv");
            // The same instructions give the same bits on any number of threads.
            if compute.simd() == SimdLevel::available()[0] {
                let found = d_qkvs.as_bytes().read::<u8>().unwrap().to_vec();
                let bits = &mut bits[usize::from(has_tiles)];
                assert_eq!(bits.get_or_insert_with(|| found.clone()), &found);
            }
        }
    }
}

#[test]
fn mixtures_that_no_layer_makes_are_refused_on_both_devices() {
    for allocator in [Allocator::new(), Allocator::meta()] {
        let compute = Compute::new(1, allocator).unwrap();
        let tensor =
            |dtype, dims: &[usize]| compute.allocator.tensor(dtype, dims, Category::Data).unwrap();
        let (f, b) = (DType::F32, HALF);
        let (wide, half, w, r) =
            (tensor(f, &[2, 4]), tensor(b, &[2, 4]), tensor(f, &[4]), tensor(f, &[2]));
        assert!(rms_norm::forward(&compute, &half, &w, 1e-5, &half.clone(), &r).is_err());
        assert!(swiglu::forward(&compute, &half, &tensor(f, &[2, 2])).is_err());
        assert!(swiglu::forward(&compute, &wide, &tensor(b, &[2, 2])).is_err());
        let (ids, sums) = (tensor(DType::I64, &[2]), tensor(DType::F64, &[3]));
        let head = tensor(b, &[3, 4]);
        assert!(linear_cross_entropy::evaluate(&compute, &half, &head, &ids, &sums).is_err());
        assert!(embedding::forward(&compute, &ids, &head, &wide).is_err());
    }
}
