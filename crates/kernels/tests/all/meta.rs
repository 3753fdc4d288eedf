//! Operations on the device without contents: the checks and the scratch memory of the CPU.

use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::batch_norm::{self, BatchNorm};
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::linear_cross_entropy::{self, Gradients, Then};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{
    Compute, ImageLayout, Result, cast, conv_relu_pool, elementwise, embedding, loss, norm,
    rms_norm, swiglu,
};
use paceline_memory::{Access, Allocator, Category, DType, Device, PhaseUsage, Tensor};

/// Runs operations on fresh tensors on both devices with this number of threads. Returns the memory of each device.
fn on_both(
    num_threads: usize,
    run: impl Fn(&Compute, &dyn Fn(DType, &[usize]) -> Tensor) -> Result<()>,
) -> [PhaseUsage; 2] {
    [Allocator::new(), Allocator::meta()].map(|allocator| {
        let compute = Compute::new(num_threads, allocator).unwrap();
        let tensor = |dtype, dims: &[usize]| {
            compute.allocator.tensor(dtype, dims, Category::Activations).unwrap()
        };
        run(&compute, &tensor).unwrap();
        compute.allocator.end_phase("all")
    })
}

/// Convolutions with the sizes of their batches.
fn convolutions() -> [(Conv2d, usize); 5] {
    [
        (Conv2d::same3x3(7, 9, 3, 5), 6),
        (Conv2d::same3x3(8, 8, 16, 16), 1),
        (Conv2d::same3x3(7, 6, 32, 40), 40),
        (Conv2d { stride: 2, ..Conv2d::same3x3(9, 9, 20, 33) }, 300),
        (Conv2d { padding: 0, kernel: (5, 5), ..Conv2d::same3x3(12, 12, 1, 4) }, 0),
    ]
}

/// A convolution of f32 and its gradients.
fn convolve(
    compute: &Compute,
    tensor: &dyn Fn(DType, &[usize]) -> Tensor,
    conv: &Conv2d,
    batch: usize,
) -> Result<()> {
    let x = tensor(DType::F32, &conv.input_shape(batch));
    let y = tensor(DType::F32, &conv.output_shape(batch));
    let w = tensor(DType::F32, &conv.weight_shape());
    let b = tensor(DType::F32, &[conv.c_out]);
    conv2d::forward(compute, conv, &x, &w, &b, &y)?;
    conv2d::backward_weight(compute, conv, &x, &y, &w, &b, false)?;
    conv2d::backward_input(compute, conv, &w, &y, &x)
}

#[test]
fn operations_take_the_scratch_memory_of_the_cpu() {
    for (conv, batch) in convolutions() {
        let [cpu, meta] = on_both(1, |compute, tensor| convolve(compute, tensor, &conv, batch));
        assert_eq!(cpu, meta, "{conv:?}");
        assert!(cpu.of(Category::Workspace).peak_bytes > 0);
    }
    let [cpu, meta] = on_both(1, |compute, tensor| {
        let config = BatchNorm::new(6, Activation::Relu);
        let x = tensor(DType::F64, &[3000, 6]);
        let sums = tensor(DType::F64, &[config.sums_len()]);
        batch_norm::sums(compute, &config, &x, &sums)
    });
    assert_eq!(cpu, meta);
    let [cpu, meta] = on_both(1, |compute, tensor| {
        let grads = tensor(DType::F32, &[200_003]);
        let rows = norm::RowRanges::new([0..70_001, 70_016..200_003]);
        norm::squares(compute, &grads, 0, &rows, 5..rows.count()).map(drop)
    });
    assert_eq!(cpu, meta);
}

#[test]
fn images_of_bf16_take_the_scratch_memory_of_the_cpu() {
    for (conv, batch) in convolutions() {
        for input in [DType::F32, DType::BF16] {
            let [cpu, meta] = on_both(1, |compute, tensor| {
                let x = tensor(input, &conv.input_shape(batch));
                let w = tensor(DType::F32, &conv.weight_shape());
                let b = tensor(DType::F32, &[conv.c_out]);
                let y = tensor(DType::BF16, &conv.output_shape(batch));
                conv2d::forward(compute, &conv, &x, &w, &b, &y)?;
                conv2d::backward_weight(compute, &conv, &x, &y, &w, &b, false)?;
                conv2d::backward_input(compute, &conv, &w, &y, &x)?;
                let shape = conv_relu_pool::output_shape(&conv, batch);
                let (y, winners) = (tensor(DType::BF16, &shape), tensor(DType::U8, &shape));
                conv_relu_pool::forward(compute, &conv, &x, &w, &b, &y, &winners)?;
                conv_relu_pool::backward_weight(compute, &conv, &x, &winners, &y, &w, &b, true)?;
                conv_relu_pool::backward_input(compute, &conv, &w, &winners, &y, &x)
            });
            assert_eq!(cpu, meta, "{conv:?} {input}");
            assert!(cpu.of(Category::Workspace).peak_bytes > 0);
        }
    }
    let conv = Conv2d::same3x3(10, 10, 16, 24);
    for num_threads in [2, 3, 20] {
        let [cpu, meta] = on_both(num_threads, |compute, tensor| {
            let x = tensor(DType::BF16, &conv.input_shape(40));
            let y = tensor(DType::BF16, &conv.output_shape(40));
            let w = tensor(DType::F32, &conv.weight_shape());
            let b = tensor(DType::F32, &[conv.c_out]);
            conv2d::backward_weight(compute, &conv, &x, &y, &w, &b, false)
        });
        assert_eq!(cpu, meta, "{num_threads} threads");
    }
}

#[test]
fn rows_of_bf16_take_the_scratch_memory_of_the_cpu() {
    for batch in [0, 3] {
        let [cpu, meta] = on_both(1, |compute, tensor| {
            let layout = ImageLayout::Nhwc;
            let pool = MaxPool2d { height: 9, width: 8, channels: 6, window: 3, stride: 2, layout };
            let (input, output) = (pool.input_shape(batch), pool.output_shape(batch));
            let [x, y] = [input, output].map(|shape| tensor(DType::BF16, &shape));
            let winners = tensor(DType::U8, &output);
            pool2d::forward(compute, &pool, &x, &y, &winners)?;
            pool2d::backward(compute, &pool, &winners, &y, &x)?;

            let config = BatchNorm::new(6, Activation::Relu);
            let (w, b) = (tensor(DType::F32, &[6]), tensor(DType::F32, &[6]));
            let [sums, moments] = [(); 2].map(|()| tensor(DType::F64, &[config.sums_len()]));
            let gradient_sums = tensor(DType::F64, &[config.gradient_sums_len()]);
            let [y, dy, dx] = [(); 3].map(|()| tensor(DType::BF16, &input));
            batch_norm::sums(compute, &config, &x, &sums)?;
            batch_norm::moments(compute, &config, &sums, &moments)?;
            batch_norm::normalize(compute, &config, &x, &moments, &w, &b, &y)?;
            let (x, moments, w, b) = (&x, &moments, &w, &b);
            batch_norm::gradient_sums(compute, &config, x, moments, w, b, &dy, &gradient_sums)?;
            let (on, m, s, dx) = (compute, moments, &gradient_sums, &dx);
            batch_norm::backward_input(on, &config, x, m, w, b, &dy, s, dx)?;
            elementwise::relu(compute, x, &y)?;
            elementwise::add(compute, x, &y)?;

            let (logits, targets) =
                (tensor(DType::BF16, &[batch, 5]), tensor(DType::F32, &[batch, 5]));
            let (gradient, labels) =
                (tensor(DType::BF16, &[batch, 5]), tensor(DType::I64, &[batch]));
            let sums = tensor(DType::F64, &[loss::SUMS_LEN]);
            ids_are_zero(&labels)?;
            loss::cross_entropy(compute, &logits, &labels, 1.0, Some(&gradient), &sums)?;
            loss::mse(compute, &logits, &targets, 1.0, Some(&gradient), &sums)
        });
        assert_eq!(cpu, meta, "batch {batch}");
        // The sums of one image of the pool.
        assert!(cpu.of(Category::Workspace).peak_bytes >= 4 * 9 * 8 * 6);
    }
}

#[test]
fn products_take_the_scratch_memory_of_the_cpu() {
    // The last sizes have several blocks of the inner dimension, so sums are kept between the blocks.
    for (num_threads, (m, n, k)) in [
        (1, (5, 7, 9)),
        (3, (200, 300, 40)),
        (2, (0, 3, 4)),
        (1, (300, 1200, 1300)),
        (4, (130, 70, 1300)),
    ] {
        for (stored, bias) in [
            (DType::BF16, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F32),
            (DType::F32, DType::F32),
            (DType::F64, DType::F64),
        ] {
            let [cpu, meta] = on_both(num_threads, |compute, tensor| {
                let (x, y) = (tensor(stored, &[m, k]), tensor(stored, &[m, n]));
                let (w, dw) = (tensor(stored, &[n, k]), tensor(bias, &[n, k]));
                let b = tensor(bias, &[n]);
                linear::forward(compute, &x, &w, Some(&b), Activation::Relu, &y)?;
                elementwise::relu_backward(
                    compute,
                    &y.clone(),
                    &tensor(stored, &[m, n]),
                    &tensor(stored, &[m, n]),
                )?;
                linear::backward_weight(compute, &x, &y, &dw, Some(&b), true)?;
                linear::backward_input(compute, &w, &y, &x)
            });
            assert_eq!(cpu, meta, "{num_threads} threads: {m} {n} {k}");
            // Products in f64 pack nothing.
            let packs = cpu.of(Category::Workspace).peak_bytes > 0;
            assert!(m == 0 || packs == (stored != DType::F64), "{stored}");
        }
    }
}

#[test]
fn a_language_model_takes_the_scratch_memory_of_the_cpu() {
    // Two chunks of a head's outputs; and none.
    for (rows, stored) in [(700, DType::F32), (0, DType::F32), (700, DType::BF16), (0, DType::BF16)]
    {
        let [cpu, meta] = on_both(2, |compute, tensor| {
            let [x, y] = [(); 2].map(|()| tensor(stored, &[rows, 8]));
            let (w, r) = (tensor(DType::F32, &[8]), tensor(DType::F32, &[rows]));
            let stream = tensor(DType::F32, &[rows, 8]);
            rms_norm::forward(compute, &stream, &w, 1e-5, &y, &r)?;
            rms_norm::backward_weight(compute, &stream, &r, &y, &w, true)?;
            let d_stream = tensor(DType::F32, &[rows, 8]);
            rms_norm::backward_input(compute, &stream, &w, &r, &y, None, &d_stream)?;
            let half = tensor(stored, &[rows, 4]);
            swiglu::forward(compute, &x, &half)?;
            swiglu::backward(compute, &x, &half, &y)?;
            let table = tensor(DType::F32, &[11, 8]);
            let ids = tensor(DType::I64, &[rows]);
            ids_are_zero(&ids)?;
            embedding::forward(compute, &ids, &tensor(stored, &[11, 8]), &x)?;
            embedding::backward(compute, &ids, &x, &tensor(stored, &[11, 8]), true)?;
            let d_weight = tensor(DType::F32, &[11, 8]);
            let then = Then::Weight { d_weight: &d_weight, accumulate: false };
            let gradients = Gradients { d_input: &y, then };
            let sums = tensor(DType::F64, &[3]);
            let kept = tensor(DType::F32, &[rows, 11]);
            let keeps = Gradients { d_input: &y, then: Then::Keep(&kept) };
            linear_cross_entropy::differentiate(compute, &x, &table, &ids, 1.0, keeps, &sums)?;
            linear_cross_entropy::backward_weight(compute, &x, &kept, &d_weight, false)?;
            linear_cross_entropy::differentiate(compute, &x, &table, &ids, 1.0, gradients, &sums)
        });
        assert_eq!(cpu, meta, "{rows} rows of {stored}");
        let bytes = cpu.of(Category::Workspace).peak_bytes;
        let outputs = 4 * 11 * rows.min(512) as u64;
        // Products pack their operands.
        assert!(bytes > outputs || rows == 0, "{bytes} of {stored}");
    }
}

/// Fresh memory holds anything, and not every number is a row of a table.
fn ids_are_zero(ids: &Tensor) -> Result<()> {
    if ids.device() == Device::Cpu {
        ids.write::<i64>()?.fill(0);
    }
    Ok(())
}

/// Runs both passes of an attention on fresh tensors, and makes the table that they read.
fn attend(
    compute: &Compute,
    tensor: &dyn Fn(DType, &[usize]) -> Tensor,
    dtype: DType,
    spec: &AttentionSpec,
) -> Result<()> {
    let config = RotaryConfig { head_dim: spec.head_dim, theta: 1e4, scaling: None };
    let real = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let table = RotaryTable::new(&compute.allocator, config, spec.seq, real)?;
    let [qkv, d_qkv] = [(); 2].map(|()| tensor(dtype, &spec.qkv_shape()));
    let [output, d_output] = [(); 2].map(|()| tensor(dtype, &spec.output_shape()));
    let log_sums = tensor(real, &[spec.log_sums_len()]);
    let lengths = tensor(DType::I64, &[spec.batch]);
    let (on, x, n, t, y, l) = (compute, &qkv, Some(&lengths), &table, &output, &log_sums);
    attention::forward(on, x, n, t, spec, y, l)?;
    attention::backward(on, x, n, t, spec, y, l, &d_output, &d_qkv)
}

#[test]
fn attention_takes_the_scratch_memory_of_the_cpu() {
    let spec = |batch, seq| AttentionSpec { batch, seq, heads: 6, kv_heads: 3, head_dim: 40 };
    for spec in [spec(3, 70), spec(1, 1), spec(0, 64), spec(2, 0)] {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let [cpu, meta] = on_both(1, |compute, tensor| attend(compute, tensor, dtype, &spec));
            assert_eq!(cpu, meta, "{spec:?} {dtype}");
            let takes_scratch = cpu.of(Category::Workspace).peak_bytes > 0;
            assert_eq!(takes_scratch, dtype != DType::F64, "{spec:?} {dtype}");
        }
    }
    let bytes = |usage: PhaseUsage| usage.of(Category::Workspace).peak_bytes;
    let spec = spec(3, 70);
    for num_threads in [2, 3, 20] {
        let [cpu, meta] =
            on_both(num_threads, |compute, tensor| attend(compute, tensor, DType::F32, &spec));
        // At most one share for each thread, and there are nine pairs of a row and a head of keys.
        let one_thread = attention::backward_scratch(&spec) as u64 * 4;
        assert_eq!(bytes(meta), one_thread * num_threads.min(9) as u64);
        assert!((one_thread..=bytes(meta)).contains(&bytes(cpu)), "{cpu:?} {meta:?}");
    }
}

#[test]
fn threads_take_as_much_as_on_the_device_without_contents() {
    let conv = Conv2d::same3x3(10, 10, 16, 24);
    for num_threads in [2, 3] {
        let [cpu, meta] =
            on_both(num_threads, |compute, tensor| convolve(compute, tensor, &conv, 40));
        assert_eq!(cpu, meta, "{num_threads} threads");
    }
}

#[test]
fn operations_check_their_operands() {
    let compute = Compute::new(4, Allocator::meta()).unwrap();
    assert_eq!(compute.threads().count(), 4);
    let tensor = |dtype, dims: &[usize]| {
        compute.allocator.tensor(dtype, dims, Category::Activations).unwrap()
    };
    let (x, w) = (tensor(DType::F32, &[5, 4]), tensor(DType::F32, &[3, 4]));
    let y = tensor(DType::F32, &[5, 3]);
    let forward = |x: &Tensor, y: &Tensor| {
        linear::forward(&compute, x, &w, None, Activation::None, y).map_err(|e| e.to_string())
    };
    assert_eq!(forward(&x, &y), Ok(()));
    let error = forward(&x, &tensor(DType::F32, &[5, 2])).unwrap_err();
    assert!(error.contains("output must have shape [5, 3], got [5, 2]"), "{error}");
    let error = forward(&x, &tensor(DType::F64, &[5, 3])).unwrap_err();
    assert!(error.contains("expected elements of type f32, got f64"), "{error}");
    let claim = y.claim(Access::Write, "all_reduce").unwrap();
    let error = forward(&x, &y).unwrap_err();
    assert!(error.contains("claimed for all_reduce"), "{error}");
    drop(claim);
    let host = Allocator::new().tensor(DType::F32, [5, 3], Category::Activations).unwrap();
    let error = elementwise::relu(&compute, &host, &y).unwrap_err().to_string();
    assert!(error.contains("an operand lies on cpu, but meta computes"), "{error}");
    let halves = tensor(DType::F16, &[5, 3]);
    cast::narrow(&compute, &y, &halves).unwrap();
    assert!(cast::narrow(&compute, &y, &y).is_err());
    compute.copy(&y, &tensor(DType::F32, &[15])).unwrap();
    assert!(compute.copy(&y, &halves).is_err());
}
