//! Operations on NCHW images against the same operations on NHWC images, bit for bit, on fresh random images, at every SIMD
//! level of this machine and with one and three threads.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::common::{computes, numbers, tensor};
use half::bf16;
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::{Compute, ImageLayout, conv_relu_pool, layout};
use paceline_memory::{Allocator, Category, DType, Tensor};

/// A seed that no other run has. A failing test prints it.
fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = u64::from(now.subsec_nanos());
    println!("seed {seed}");
    seed
}

/// A tensor of `dtype` of this shape. `elems` are in order of NHWC.
fn images(
    compute: &Compute,
    dtype: DType,
    layout: ImageLayout,
    [n, h, w, c]: [usize; 4],
    elems: &[f32],
) -> Tensor {
    let shape = layout.shape(n, [h, w, c]);
    tensor(compute, dtype, shape, &ordered(layout, [n, h, w, c], elems))
}

/// Elements in order of NHWC as elements in order of `layout`.
fn ordered<T: Copy>(layout: ImageLayout, [n, h, w, c]: [usize; 4], elems: &[T]) -> Vec<T> {
    match layout {
        ImageLayout::Nhwc => elems.to_vec(),
        ImageLayout::Nchw => {
            let at = |to: usize| {
                let (image, plane, position) = (to / (c * h * w), to / (h * w) % c, to % (h * w));
                (image * h * w + position) * c + plane
            };
            (0..n * h * w * c).map(|to| elems[at(to)]).collect()
        }
    }
}

/// The bits of each element, in order of NHWC.
fn bits(tensor: &Tensor, layout: ImageLayout) -> Vec<u64> {
    let bits: Vec<u64> = match tensor.dtype() {
        DType::F32 => tensor.read::<f32>().unwrap().iter().map(|x| x.to_bits().into()).collect(),
        DType::F64 => tensor.read::<f64>().unwrap().iter().map(|x| x.to_bits()).collect(),
        DType::BF16 => tensor.read::<bf16>().unwrap().iter().map(|x| x.to_bits().into()).collect(),
        _ => tensor.read::<u8>().unwrap().iter().map(|x| u64::from(*x)).collect(),
    };
    match (layout, tensor.dims()) {
        // Back: the planes are the positions of another image, whose channels are this one's positions.
        (ImageLayout::Nchw, &[n, c, h, w]) => ordered(ImageLayout::Nchw, [n, c, 1, h * w], &bits),
        _ => bits,
    }
}

fn geometries() -> Vec<Conv2d> {
    let conv = |[height, width]: [usize; 2], [c_in, c_out]: [usize; 2], kernel, stride, padding| {
        Conv2d { kernel, stride, padding, ..Conv2d::same3x3(height, width, c_in, c_out) }
    };
    let mut all = vec![
        conv([9, 8], [2, 4], (5, 3), 2, 1),
        conv([11, 12], [16, 20], (4, 4), 3, 2),
        conv([4, 4], [19, 2], (1, 1), 1, 0),
        conv([5, 6], [33, 16], (3, 3), 2, 0),
        conv([1, 1], [16, 3], (3, 3), 1, 1),
        conv([2, 17], [33, 70], (3, 3), 1, 1),
        Conv2d::same3x3(28, 28, 1, 32),
        Conv2d::same3x3(14, 14, 32, 64),
    ];
    for (at, channels) in [1, 3, 5, 16, 33].into_iter().enumerate() {
        all.push(Conv2d::same3x3(7 + at, 10 - at, channels, [33, 16, 5, 3, 1][at]));
        all.push(conv([9, 7 + at], [channels, channels], (3, 3), 2, 1));
    }
    all
}

/// Inputs of a convolution, random and in order of NHWC.
struct Case {
    conv: Conv2d,
    batch: usize,
    is_fused: bool,
    accumulate: bool,
    seed: u64,
}

impl Case {
    /// The bits of the output, the winners, and the gradients of weight, bias and input.
    fn run(&self, compute: &Compute, layout: ImageLayout, types: [DType; 3]) -> [Vec<u64>; 5] {
        let conv = Conv2d { layout, ..self.conv };
        let [x_type, y_type, p_type] = types;
        let nhwc = Conv2d { layout: ImageLayout::Nhwc, ..conv };
        let out = if self.is_fused {
            conv_relu_pool::output_shape(&nhwc, self.batch)
        } else {
            nhwc.output_shape(self.batch)
        };
        let of = |dtype, shape: [usize; 4], seed: u64| {
            let elems = numbers(self.seed + seed, shape.iter().product());
            images(compute, dtype, layout, shape, &elems)
        };
        let parameter = |shape: [usize; 4], seed: u64| {
            let elems = numbers(self.seed + seed, shape.iter().product());
            images(compute, p_type, ImageLayout::Nhwc, shape, &elems)
        };
        let vector = |seed| parameter([1, 1, 1, conv.c_out], seed).view([conv.c_out]).unwrap();
        let (x, dx) = (
            of(x_type, nhwc.input_shape(self.batch), 1),
            of(x_type, nhwc.input_shape(self.batch), 2),
        );
        let (y, dy) = (of(y_type, out, 3), of(y_type, out, 4));
        let winners = of(DType::U8, out, 5);
        let (w, dw) = (parameter(conv.weight_shape(), 6), parameter(conv.weight_shape(), 7));
        let (b, db) = (vector(8), vector(9));
        let (win, accumulate) = (&winners, self.accumulate);
        if self.is_fused {
            conv_relu_pool::forward(compute, &conv, &x, &w, &b, &y, win).unwrap();
            conv_relu_pool::backward_weight(compute, &conv, &x, win, &dy, &dw, &db, accumulate)
                .unwrap();
            conv_relu_pool::backward_input(compute, &conv, &w, win, &dy, &dx).unwrap();
        } else {
            conv2d::forward(compute, &conv, &x, &w, &b, &y).unwrap();
            conv2d::backward_weight(compute, &conv, &x, &dy, &dw, &db, accumulate).unwrap();
            conv2d::backward_input(compute, &conv, &w, &dy, &dx).unwrap();
        }
        let parameters = [&dw, &db].map(|tensor| bits(tensor, ImageLayout::Nhwc));
        let [dw, db] = parameters;
        [bits(&y, layout), bits(win, layout), dw, db, bits(&dx, layout)]
    }
}

#[test]
fn convolutions_have_the_same_bits() {
    use DType::{BF16, F32, F64};
    let seed = fresh_seed();
    for compute in computes() {
        for conv in geometries() {
            for (is_fused, batch, accumulate) in
                [(false, 3, true), (false, 0, false), (true, 4, false), (true, 1, true)]
            {
                if is_fused && conv_relu_pool::check(&conv).is_err() {
                    continue;
                }
                let case = Case { conv, batch, is_fused, accumulate, seed };
                for types in [[F32; 3], [F32, BF16, F32], [BF16, BF16, F32], [F64; 3]] {
                    let [nhwc, nchw] =
                        ImageLayout::ALL.map(|layout| case.run(&compute, layout, types));
                    let names = ["output", "winners", "d_weight", "d_bias", "d_input"];
                    for (name, (nhwc, nchw)) in names.iter().zip(nhwc.iter().zip(&nchw)) {
                        assert!(
                            nhwc == nchw,
                            "{name} of {conv:?}, batch {batch}, fused {is_fused}, {types:?}, {:?}, {} threads",
                            compute.simd(),
                            compute.threads().count()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn pools_have_the_same_bits() {
    let seed = fresh_seed();
    for compute in computes() {
        for (height, width, channels, window, stride) in [
            (6, 4, 5, 2, 2),
            (9, 8, 3, 3, 1),
            (7, 8, 33, 2, 3),
            (14, 15, 16, 2, 2),
            (5, 5, 1, 5, 1),
            (13, 40, 2, 3, 2),
        ] {
            for (batch, dtype) in
                [(0, DType::F32), (3, DType::F32), (2, DType::BF16), (2, DType::F64)]
            {
                let run = |layout| {
                    let pool = MaxPool2d { height, width, channels, window, stride, layout };
                    let nhwc = MaxPool2d { layout: ImageLayout::Nhwc, ..pool };
                    let (input, output) = (nhwc.input_shape(batch), nhwc.output_shape(batch));
                    let of = |dtype, shape: [usize; 4], seed| {
                        let mut elems = numbers(seed, shape.iter().product());
                        // Ties, and a NaN.
                        elems.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0);
                        elems.iter_mut().skip(7).step_by(101).for_each(|x| *x = f32::NAN);
                        images(&compute, dtype, layout, shape, &elems)
                    };
                    let (x, y) = (of(dtype, input, seed), of(dtype, output, seed + 1));
                    let (dx, dy) = (of(dtype, input, seed + 2), of(dtype, output, seed + 3));
                    let winners = of(DType::U8, output, seed + 4);
                    pool2d::forward(&compute, &pool, &x, &y, &winners).unwrap();
                    pool2d::backward(&compute, &pool, &winners, &dy, &dx).unwrap();
                    [&y, &winners, &dx].map(|tensor| bits(tensor, layout))
                };
                let [nhwc, nchw] = ImageLayout::ALL.map(run);
                assert!(nhwc == nchw, "{height} {width} {channels} {window} {stride} {dtype}");
            }
        }
    }
}

#[test]
fn conversions_move_every_element_and_change_no_bit() {
    let seed = fresh_seed();
    for compute in computes() {
        for [n, h, w, c] in [
            [1, 1, 1, 1],
            [2, 3, 4, 1],
            [3, 1, 1, 40],
            [2, 5, 7, 3],
            [1, 16, 16, 16],
            [3, 9, 8, 33],
            [0, 4, 4, 2],
        ] {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::U8] {
                let of = |layout: ImageLayout| {
                    let shape = layout.shape(n, [h, w, c]);
                    compute.allocator.tensor(dtype, shape, Category::Data).unwrap()
                };
                let [nhwc, nchw] = ImageLayout::ALL.map(of);
                // Any bits, those of signaling NaNs too.
                let bytes = numbers(seed, nhwc.num_bytes());
                let bytes: Vec<u8> = bytes.iter().map(|x| (x * 1e6) as i32 as u8).collect();
                nhwc.as_bytes().write::<u8>().unwrap().copy_from_slice(&bytes);
                layout::convert(&compute, ImageLayout::Nchw, &nhwc, &nchw).unwrap();
                let elems = bits(&nhwc, ImageLayout::Nhwc);
                let expected = ordered(ImageLayout::Nchw, [n, h, w, c], &elems);
                assert!(bits(&nchw, ImageLayout::Nhwc) == expected, "{dtype} {:?}", [n, h, w, c]);
                let back = of(ImageLayout::Nhwc);
                layout::convert(&compute, ImageLayout::Nhwc, &nchw, &back).unwrap();
                assert!(bits(&back, ImageLayout::Nhwc) == elems, "{dtype} {:?}", [n, h, w, c]);
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let of = |dims: &[usize]| compute.allocator.tensor(DType::F32, dims, Category::Data).unwrap();
    let nhwc = of(&[2, 3, 4, 5]);
    let error = layout::convert(&compute, ImageLayout::Nchw, &nhwc, &nhwc).unwrap_err().to_string();
    assert!(error.contains("[2, 5, 3, 4]"), "{error}");
    let error = layout::convert(&compute, ImageLayout::Nchw, &of(&[2, 3]), &nhwc).unwrap_err();
    assert!(error.to_string().contains("four extents"), "{error}");
    let conv = Conv2d { layout: ImageLayout::Nchw, ..Conv2d::same3x3(3, 4, 5, 2) };
    let (w, b, y) = (of(&conv.weight_shape()), of(&[2]), of(&conv.output_shape(2)));
    let error = conv2d::forward(&compute, &conv, &nhwc, &w, &b, &y).unwrap_err().to_string();
    assert!(error.contains("[2, 5, 3, 4]"), "{error}");
}
