//! One order of sums: an operation has the same bits with any number of threads, and with all vector instructions that multiply
//! and add with one rounding; and a row of a layer against the product of matrices.

use crate::common;

use std::sync::{Arc, Barrier};
use std::thread;

use half::bf16;
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{
    Bf16Products, Compute, ImageLayout, Op, SimdLevel, cast, elementwise, embedding, rms_norm,
    scratch,
};
use paceline_memory::{Allocator, Category, DType, Shape, Tensor};
use paceline_trace::{Event, Recorder};

use self::common::numbers;

/// Rows and columns of matrices: more than one thread is woken for, and no multiple of their number.
const SHAPE: [usize; 2] = [301, 259];

struct Inputs {
    compute: Compute,
    dtype: DType,
}

impl Inputs {
    fn new(threads: usize, dtype: DType, level: SimdLevel) -> Self {
        let compute = Compute::new(threads, Allocator::new()).unwrap().with_simd(level).unwrap();
        let compute = compute.with_bf16_products(Bf16Products::Widened).unwrap();
        Self { compute, dtype }
    }

    fn tensor(&self, dtype: DType, shape: impl Into<Shape>) -> Tensor {
        self.compute.allocator.tensor(dtype, shape, Category::Data).unwrap()
    }

    /// The same numbers for the same seed.
    fn random(&self, seed: u64, dtype: DType, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let wide = self.tensor(DType::F32, shape);
        wide.write::<f32>().unwrap().copy_from_slice(&numbers(seed, shape.num_elems()));
        if dtype == DType::F32 {
            return wide;
        }
        let narrow = self.tensor(dtype, shape);
        cast::narrow(&self.compute, &wide, &narrow).unwrap();
        narrow
    }

    fn ids(&self, len: usize, rows: i64) -> Tensor {
        let ids = self.tensor(DType::I64, [len]);
        for (at, id) in ids.write::<i64>().unwrap().iter_mut().enumerate() {
            *id = (at as i64 * 7919) % rows;
        }
        ids
    }
}

/// All results of an operation, bit by bit.
fn bits(results: &[Tensor]) -> Vec<u32> {
    let of = |tensor: &Tensor| -> Vec<u32> {
        match tensor.dtype() {
            DType::BF16 => {
                tensor.read::<bf16>().unwrap().iter().map(|x| u32::from(x.to_bits())).collect()
            }
            DType::U8 => tensor.read::<u8>().unwrap().iter().map(|x| u32::from(*x)).collect(),
            _ => tensor.read::<f32>().unwrap().iter().map(|x| x.to_bits()).collect(),
        }
    };
    results.iter().flat_map(of).collect()
}

/// The operation gives the same bits with 1, 2, 3 and 7 threads and with AVX2 and AVX-512, in f32 and in bf16.
#[track_caller]
fn assert_alike(what: &str, operation: impl Fn(&Inputs) -> Vec<Tensor>) {
    let levels = SimdLevel::available();
    let is_fused = |level: &&SimdLevel| **level != SimdLevel::Portable || levels.len() == 1;
    for dtype in [DType::F32, DType::BF16] {
        let mut first = None;
        for level in levels.iter().filter(is_fused) {
            for threads in [1, 2, 3, 7] {
                let got = bits(&operation(&Inputs::new(threads, dtype, *level)));
                let want = first.get_or_insert_with(|| got.clone());
                assert!(got.iter().any(|x| *x != got[0]), "{what} {dtype}: all are equal");
                assert!(got == *want, "{what} {dtype} with {threads} threads and {level:?}");
            }
        }
    }
}

#[test]
fn elements_are_shared_by_the_threads() {
    assert_alike("relu", |on| {
        let (x, y) = (on.random(1, on.dtype, SHAPE), on.tensor(on.dtype, SHAPE));
        elementwise::relu(&on.compute, &x, &y).unwrap();
        let (dy, dx) = (on.random(2, on.dtype, SHAPE), on.tensor(on.dtype, SHAPE));
        elementwise::relu_backward(&on.compute, &y, &dy, &dx).unwrap();
        vec![y, dx]
    });
    assert_alike("add", |on| {
        let (x, y) = (on.random(1, on.dtype, SHAPE), on.random(2, on.dtype, SHAPE));
        elementwise::add(&on.compute, &x, &y).unwrap();
        vec![y]
    });
    assert_alike("divide", |on| {
        let x = on.random(1, DType::F32, SHAPE);
        elementwise::divide(&on.compute, &x, 3.0).unwrap();
        vec![x]
    });
}

#[test]
fn columns_are_shared_by_the_threads() {
    let [rows, columns] = SHAPE;
    for accumulate in [false, true] {
        assert_alike("bias", |on| {
            let (x, dy) = (on.random(1, on.dtype, [rows, 4]), on.random(2, on.dtype, SHAPE));
            let (dw, db) =
                (on.random(3, DType::F32, [columns, 4]), on.random(4, DType::F32, [columns]));
            linear::backward_weight(&on.compute, &x, &dy, &dw, Some(&db), accumulate).unwrap();
            vec![db]
        });
        assert_alike("rms_norm", |on| {
            let (x, dy) = (on.random(1, DType::F32, SHAPE), on.random(2, on.dtype, SHAPE));
            let (r, dw) = (on.random(3, DType::F32, [rows]), on.random(4, DType::F32, [columns]));
            rms_norm::backward_weight(&on.compute, &x, &r, &dy, &dw, accumulate).unwrap();
            vec![dw]
        });
    }
}

#[test]
fn rows_of_a_table_are_shared_by_the_threads() {
    let [rows, columns] = SHAPE;
    for accumulate in [false, true] {
        assert_alike("embedding", |on| {
            let (ids, table) = (on.ids(2 * rows, rows as i64), on.random(1, on.dtype, SHAPE));
            let output = on.tensor(on.dtype, [2 * rows, columns]);
            embedding::forward(&on.compute, &ids, &table, &output).unwrap();
            let d_table = on.random(2, on.dtype, SHAPE);
            embedding::backward(&on.compute, &ids, &output, &d_table, accumulate).unwrap();
            vec![output, d_table]
        });
    }
}

#[test]
fn images_are_shared_by_the_threads() {
    for (layout, window, stride) in [
        (ImageLayout::Nhwc, 2, 2),
        (ImageLayout::Nhwc, 3, 2),
        (ImageLayout::Nchw, 2, 2),
        (ImageLayout::Nchw, 3, 1),
    ] {
        let pool = MaxPool2d { height: 17, width: 18, channels: 9, window, stride, layout };
        assert_alike(&format!("{pool:?}"), |on| {
            let (input, output) = (pool.input_shape(23), pool.output_shape(23));
            let (x, y) = (on.random(1, on.dtype, input), on.tensor(on.dtype, output));
            let winners = on.tensor(DType::U8, output);
            pool2d::forward(&on.compute, &pool, &x, &y, &winners).unwrap();
            let (dy, dx) = (on.random(2, on.dtype, output), on.tensor(on.dtype, input));
            pool2d::backward(&on.compute, &pool, &winners, &dy, &dx).unwrap();
            vec![y, winners, dx]
        });
    }
}

#[test]
fn convolutions_have_one_order_of_sums() {
    let strided = Conv2d { kernel: (5, 3), stride: 2, ..Conv2d::same3x3(9, 8, 16, 24) };
    let same = [(28, 28, 1, 32), (14, 15, 17, 33), (7, 7, 64, 128)];
    let same = same.map(|(height, width, c_in, c_out)| Conv2d::same3x3(height, width, c_in, c_out));
    for conv in same.into_iter().chain([strided]) {
        for accumulate in [false, true] {
            assert_alike(&format!("{conv:?}"), |on| {
                let (x, w) = (conv.input_shape(13), conv.weight_shape());
                let (x, w) = (on.random(1, on.dtype, x), on.random(2, DType::F32, w));
                let b = on.random(3, DType::F32, [conv.c_out]);
                let y = on.tensor(on.dtype, conv.output_shape(13));
                conv2d::forward(&on.compute, &conv, &x, &w, &b, &y).unwrap();
                let dy = on.random(4, on.dtype, conv.output_shape(13));
                let dw = on.random(5, DType::F32, conv.weight_shape());
                let db = on.random(6, DType::F32, [conv.c_out]);
                let dx = on.tensor(on.dtype, conv.input_shape(13));
                conv2d::backward_weight(&on.compute, &conv, &x, &dy, &dw, &db, accumulate).unwrap();
                conv2d::backward_input(&on.compute, &conv, &w, &dy, &dx).unwrap();
                vec![y, dw, db, dx]
            });
        }
    }
}

#[test]
fn products_have_one_order_of_sums() {
    // Up to 13 blocks of k, the last one whole or not.
    for (m, n, k) in [(64, 100, 100), (128, 70, 3136), (301, 259, 1000), (5, 3, 257), (9, 8, 1024)]
    {
        for accumulate in [false, true] {
            assert_alike(&format!("linear {m} x {n} x {k}"), |on| {
                let (x, w) = (on.random(1, on.dtype, [m, k]), on.random(2, DType::F32, [n, k]));
                let (b, y) = (on.random(3, DType::F32, [n]), on.tensor(on.dtype, [m, n]));
                linear::forward(&on.compute, &x, &w, Some(&b), Activation::Relu, &y).unwrap();
                let (dy, dx) = (on.random(4, on.dtype, [m, n]), on.tensor(on.dtype, [m, k]));
                let (dw, db) = (on.random(5, DType::F32, [n, k]), on.random(6, DType::F32, [n]));
                linear::backward_weight(&on.compute, &x, &dy, &dw, Some(&db), accumulate).unwrap();
                linear::backward_input(&on.compute, &w, &dy, &dx).unwrap();
                vec![y, dw, db, dx]
            });
        }
    }
}

#[test]
fn attention_has_one_order_of_sums() {
    for (seq, head_dim, kv_heads) in [(50, 64, 2), (128, 32, 4), (300, 16, 1)] {
        let spec = AttentionSpec { batch: 3, seq, heads: 4, kv_heads, head_dim };
        let config = RotaryConfig { head_dim, theta: 10_000.0, scaling: None };
        assert_alike(&format!("{spec:?}"), |on| {
            let allocator = &on.compute.allocator;
            let table = RotaryTable::new(allocator, config, seq, DType::F32).unwrap();
            let qkv = on.random(1, on.dtype, spec.qkv_shape());
            let y = on.tensor(on.dtype, spec.output_shape());
            let sums = on.tensor(DType::F32, [spec.log_sums_len()]);
            attention::forward(&on.compute, &qkv, None, &table, &spec, &y, &sums).unwrap();
            let dy = on.random(2, on.dtype, spec.output_shape());
            let d_qkv = on.tensor(on.dtype, spec.qkv_shape());
            attention::backward(&on.compute, &qkv, None, &table, &spec, &y, &sums, &dy, &d_qkv)
                .unwrap();
            vec![y, sums, d_qkv]
        });
    }
}

#[test]
fn a_row_of_a_layer_is_a_row_of_the_product() {
    for level in SimdLevel::available() {
        for (n, k) in [(1, 1), (5, 31), (301, 259), (7, 0)] {
            let exact: Vec<f64> = {
                let (x, w) = (numbers(1, k), numbers(2, n * k));
                let row = |at: usize| (0..k).map(move |j| (at * k + j, j));
                (0..n)
                    .map(|at| row(at).map(|(i, j)| f64::from(w[i]) * f64::from(x[j])).sum())
                    .collect()
            };
            for (dtype, out, tolerance) in [
                (DType::F32, DType::F32, 1e-5),
                (DType::BF16, DType::F32, 0.02),
                (DType::BF16, DType::BF16, 0.05),
            ] {
                let on = Inputs::new(2, dtype, level);
                let (x, w) = (on.random(1, dtype, [1, k]), on.random(2, dtype, [n, k]));
                let y = on.tensor(out, [1, n]);
                linear::forward_row(&on.compute, &x, &w, &y).unwrap();
                let got: Vec<f64> = match out {
                    DType::F32 => y.read::<f32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
                    _ => y.read::<bf16>().unwrap().iter().map(|x| f64::from(x.to_f32())).collect(),
                };
                // Roundings of bf16 are off by 2^-9 of each operand, in sums of up to 259 terms below one.
                let scale = (k as f64).sqrt().max(1.0);
                for (got, want) in got.iter().zip(&exact) {
                    assert!(
                        (got - want).abs() <= tolerance * scale,
                        "{level:?} {dtype} {n} x {k}: {got}, not {want}"
                    );
                }
            }
        }
    }
    let on = Inputs::new(1, DType::F32, SimdLevel::Portable);
    let (x, w) = (on.random(1, DType::F32, [2, 4]), on.random(2, DType::F32, [3, 4]));
    let error = linear::forward_row(&on.compute, &x, &w, &on.tensor(DType::F32, [1, 3]));
    assert!(error.unwrap_err().to_string().contains("input"));
}

#[test]
fn operations_of_two_users_at_the_same_time_are_both_recorded() {
    let mut recorder = Recorder::new();
    let track = recorder.track("kernels", 8);
    recorder.set_on(true);
    let compute = Compute::new(1, Allocator::new()).unwrap().recorded(track.clone(), Vec::new());
    let both = Arc::new(Barrier::new(2));
    thread::scope(|scope| {
        for name in ["first", "second"] {
            let (compute, both) = (&compute, both.clone());
            scope.spawn(move || {
                let body = move |_: &_, _: &mut [f32]| {
                    both.wait();
                    Ok(())
                };
                compute.launch(Op::new(name), scratch(1), body).unwrap();
            });
        }
    });
    let kernels = track.events().filter(|event| matches!(event, Event::Kernel { .. }));
    assert_eq!(kernels.count(), 2);
}
