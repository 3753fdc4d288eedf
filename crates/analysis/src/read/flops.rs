//! How many floating-point operations an operator makes, and how many bytes it moves, from the shapes of its inputs.
//!
//! The name, shapes and values of an operator go in. Numbers come out, or `None` if the operator moves nothing, or its shapes are
//! not known. A multiplication and an addition count as one each, a function as 20. Of an operator that is not listed, only bytes are known.

use super::args::Args;

/// The part of an operator's name before that of attention.
const ATTENTION: &[u8] = b"_scaled_dot_product_";

/// Operators that move no elements.
const VIEWS: &str = "_reshape_alias _unsafe_view alias as_strided as_strided_ chunk contiguous detach detach_ expand flatten narrow \
                     permute reshape resize_ resolve_conj resolve_neg select slice split squeeze t to transpose unbind unfold unsqueeze view";

/// Operators whose output is one of the inputs, or small.
const REDUCTIONS: &str = "copy_ fill_ zero_ sum mean max min argmax argmin any all norm linalg_vector_norm nll_loss_forward mse_loss";

/// Operations for each element of the largest tensor, as our own kernels count them. Norms: two for the mean, one for the variance, and two to apply them.
const PER_ELEM: [(u64, &str); 7] = [
    (
        1,
        "add add_ sub sub_ rsub mul mul_ div div_ neg neg_ abs sqrt sqrt_ rsqrt reciprocal relu relu_ threshold_backward clamp clamp_ clamp_min \
         clamp_max maximum minimum eq ne lt le gt ge sum mean max min amax amin argmax argmin cumsum",
    ),
    (2, "addcmul addcmul_ addcdiv addcdiv_ norm linalg_vector_norm mse_loss"),
    (3, "lerp lerp_ tanh_backward sigmoid_backward"),
    (
        5,
        "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _fused_rms_norm",
    ),
    (
        9,
        "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward cudnn_batch_norm_backward \
         miopen_batch_norm_backward _fused_rms_norm_backward",
    ),
    (
        20,
        "exp exp_ log log_ pow pow_ tanh tanh_ sigmoid sigmoid_ gelu gelu_backward silu silu_ silu_backward erf sin cos softplus elu",
    ),
    (24, "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"),
];

/// The tensors that operators read. One more is that of `out=`, which is the output.
const NUM_INPUTS: [(usize, &str); 3] = [
    (1, "abs cos erf exp log neg reciprocal rsqrt sigmoid silu sin sqrt tanh"),
    (2, "add sub mul div maximum minimum mm bmm"),
    (3, "addmm baddbmm addcmul addcdiv"),
];

fn is_one_of(name: &[u8], names: &str) -> bool {
    names.split(' ').any(|of| of.as_bytes() == name)
}

/// Whether [`work`] may know this operator.
pub(super) fn has_work(name: &[u8]) -> bool {
    let aten = name.strip_prefix(b"aten::").filter(|name| !name.starts_with(b"empty"));
    name.starts_with(b"paceline::") || aten.is_some_and(|name| !is_one_of(name, VIEWS))
}

/// The floating-point operations and the bytes of an operator, as our recorder has written them or by its shapes. The output is not
/// recorded: it is taken to be like the largest input
/// where the operator has no rule of its own.
pub(super) fn work(name: &[u8], args: &Args) -> Option<(u64, u64)> {
    if let Some(flop) = args.flop {
        return Some((flop, args.bytes.unwrap_or(0)));
    }
    let aten = name.strip_prefix(b"aten::").filter(|_| has_work(name))?;
    // Without types only the arithmetic is known.
    let elem_bytes = |at: usize| args.elem_bytes.get(at).copied().unwrap_or(0);
    let tensors = args.shapes.iter().enumerate().filter(|(_, shape)| !shape.is_empty());
    let sizes = tensors.map(|(at, shape)| Some((multiplied(shape)?, elem_bytes(at))));
    let mut sizes = sizes.collect::<Option<Vec<(u64, u64)>>>()?;
    let inputs = NUM_INPUTS.iter().find(|(_, names)| is_one_of(aten, names));
    sizes.truncate(inputs.map_or(usize::MAX, |of| of.0));
    let (_, elem_bytes) = *sizes.first()?;
    let bytes = |&(elems, bytes): &(u64, u64)| elems.checked_mul(bytes);
    let all = sizes.iter().try_fold(0u64, |sum, of| sum.checked_add(bytes(of)?))?;
    if let Some((flops, out_elems)) = of(name, &args.shapes, &args.values) {
        return Some((flops, all.checked_add(out_elems.checked_mul(elem_bytes)?)?));
    }
    let out = match aten {
        aten if is_one_of(aten, REDUCTIONS) => 0,
        // Of the table only the rows that are named.
        b"index_select" => {
            let rows = args.shapes.last().filter(|shape| shape.len() == 1)?[0];
            let row = multiplied(args.shapes.first()?.get(1..)?)?;
            return Some((0, rows.checked_mul(row)?.checked_mul(2 * elem_bytes)?));
        }
        aten if aten.ends_with(b"_") => bytes(&sizes[0])?,
        _ => sizes.iter().filter_map(bytes).max()?,
    };
    let elems = sizes.iter().map(|of| of.0).max()?;
    let counted = PER_ELEM.iter().find(|(_, names)| is_one_of(aten, names));
    let flops = counted.map_or(Some(0), |(each, _)| elems.checked_mul(*each))?;
    Some((flops, all.checked_add(out)?)).filter(|(_, bytes)| *bytes > 0)
}

/// The operations of a product, a convolution or attention, and the elements of its output.
fn of(name: &[u8], shapes: &[Vec<u64>], values: &[String]) -> Option<(u64, u64)> {
    let shape = |at: usize| shapes.get(at).map(Vec::as_slice);
    let name = name.strip_prefix(b"aten::")?;
    match name {
        b"mm" => product(shape(0)?, shape(1)?),
        b"addmm" | b"_addmm_activation" => product(shape(1)?, shape(2)?),
        b"bmm" => batched(shape(0)?, shape(1)?),
        b"baddbmm" => batched(shape(1)?, shape(2)?),
        b"linear" => {
            let (inputs, rows) = shape(0)?.split_last()?;
            let &[outputs, inner] = shape(1)? else { return None };
            let out = multiplied(rows)?.checked_mul(outputs)?;
            (inner == *inputs).then_some((multiplied(&[2, out, inner])?, out))
        }
        // Arguments: input, weight, in oneDNN and MIOpen bias, padding, stride, dilation, groups.
        b"cudnn_convolution" | b"miopen_convolution" | b"mkldnn_convolution" => {
            let (input, weight) = (shape(0)?, shape(1)?);
            let numbers = |at: usize| values.get(at).and_then(|words| list(words));
            let first = if name == b"cudnn_convolution" { 2 } else { 3 };
            let (padding, stride, dilation) =
                (numbers(first)?, numbers(first + 1)?, numbers(first + 2)?);
            let mut output = vec![*input.first()?, *weight.first()?];
            for (dim, size) in input.get(2..)?.iter().enumerate() {
                let of = |list: &[u64]| list.get(dim).or(list.first()).copied();
                let reach = of(&dilation)?.checked_mul(weight.get(dim + 2)?.checked_sub(1)?)?;
                let padded = size.checked_add(of(&padding)?.checked_mul(2)?)?;
                let room = padded.checked_sub(reach)?.checked_sub(1)?;
                output.push(room.checked_div(of(&stride)?)?.checked_add(1)?);
            }
            Some((convolution(&output, weight)?, multiplied(&output)?))
        }
        // Each element of the input, not of the output, is multiplied by all weights of its channel.
        b"cudnn_convolution_transpose" | b"miopen_convolution_transpose" => {
            Some((convolution(shape(0)?, shape(1)?)?, multiplied(shape(0)?)?))
        }
        // Arguments: the output's gradient, input, weight, ..., at 7 whether it is transposed, and which gradients are wanted.
        b"convolution_backward" => {
            let size = |at: usize| multiplied(shape(at)?.get(2..)?);
            let is_transposed = match values.get(7).filter(|words| !words.is_empty()) {
                Some(words) => words.contains("rue"),
                // The stride, if there is one, makes the other image the larger one.
                None => size(1)? < size(0)?,
            };
            let one = convolution(shape(usize::from(is_transposed))?, shape(2)?)?;
            let wanted = values.last().filter(|words| words.contains("rue"));
            let wants = |at: usize| {
                wanted.is_none_or(|of| of.split(',').nth(at).is_some_and(|of| of.contains("rue")))
            };
            let wanted = [1, 2].into_iter().filter(|at| wants(at - 1));
            wanted.into_iter().try_fold((0u64, 0u64), |(flops, out), at| {
                Some((flops.checked_add(one)?, out.checked_add(multiplied(shape(at)?)?)?))
            })
        }
        name => attention(name.strip_prefix(ATTENTION)?, shapes, values),
    }
}

/// Queries by keys, and weights by values; twice as much in the backward pass, without what it computes again. Shapes: (batch,
/// heads, positions, width). Arguments: in the backward pass the output's gradient; queries, keys, values; somewhere whether the mask
/// is causal, after the rate of dropout.
fn attention(name: &[u8], shapes: &[Vec<u64>], values: &[String]) -> Option<(u64, u64)> {
    let is_backward = name.ends_with(b"_backward");
    let first = usize::from(is_backward);
    let shape = |at: usize| <&[u64; 4]>::try_from(shapes.get(first + at)?.as_slice()).ok();
    let (&[batch, heads, queries, width], keys, &[.., value_width]) =
        (shape(0)?, shape(1)?[2], shape(2)?);
    // `efficient` and `cudnn` have whether to keep the sums of the softmax before it, and `flash` whether to return the mask after.
    let mut words = values.iter().filter(|of| matches!(of.as_str(), "True" | "False"));
    let at = usize::from(!is_backward && !name.starts_with(b"flash"));
    let is_causal = words.nth(at).is_some_and(|of| of == "True");
    let pairs = if is_causal && queries == keys {
        queries.checked_mul(queries.checked_add(1)?)? / 2
    } else {
        queries.checked_mul(keys)?
    };
    let widths = width.checked_add(value_width)?;
    let flops = multiplied(&[2 << first, batch, heads, pairs, widths])?;
    let outputs = shapes.get(first..first + if is_backward { 3 } else { 1 })?;
    let out = outputs.iter().try_fold(0u64, |sum, of| sum.checked_add(multiplied(of)?))?;
    Some((flops, out))
}

/// Whether the images that go into a convolution lie in memory as NCHW, channel after channel.
pub(super) fn is_nchw(name: &[u8], shapes: &[Vec<u64>], strides: &[Vec<u64>]) -> bool {
    // The gradient of the output comes first in the backward pass.
    let at = usize::from(name == b"aten::convolution_backward");
    match (shapes.get(at).map(Vec::as_slice), strides.get(at).map(Vec::as_slice)) {
        (Some(&[_, channels, height, width]), Some(&[_, apart, _, 1])) => {
            let size = height.checked_mul(width);
            (name.ends_with(b"convolution") || name.ends_with(b"convolution_backward"))
                && channels > 1
                && size.is_some_and(|size| size > 1 && size == apart)
        }
        _ => false,
    }
}

fn product(a: &[u64], b: &[u64]) -> Option<(u64, u64)> {
    match (a, b) {
        (&[m, k], &[inner, n]) if k == inner => {
            Some((multiplied(&[2, m, k, n])?, multiplied(&[m, n])?))
        }
        _ => None,
    }
}

fn batched(a: &[u64], b: &[u64]) -> Option<(u64, u64)> {
    match (a, b) {
        (&[batch, m, k], &[same, inner, n]) if batch == same && k == inner => {
            Some((multiplied(&[2, batch, m, k, n])?, multiplied(&[batch, m, n])?))
        }
        _ => None,
    }
}

/// `image`: (batch, channels, size...), the output, or the input if the convolution is transposed. `weight`: (channels of this
/// image, channels of the other image in a group, kernel size...).
fn convolution(image: &[u64], weight: &[u64]) -> Option<u64> {
    if image.len() < 3 || image.len() != weight.len() || image[1] != weight[0] {
        return None;
    }
    multiplied(&[2])?.checked_mul(multiplied(image)?)?.checked_mul(multiplied(&weight[1..])?)
}

fn multiplied(numbers: &[u64]) -> Option<u64> {
    numbers.iter().try_fold(1u64, |product, number| product.checked_mul(*number))
}

/// The numbers of a list in words: `[1, 2]`.
fn list(words: &str) -> Option<Vec<u64>> {
    let inside = words.trim().strip_prefix('[')?.strip_suffix(']')?;
    let numbers = inside.split(',').map(|number| number.trim().parse().ok());
    numbers.collect::<Option<Vec<u64>>>().filter(|list| !list.is_empty())
}

/// The shapes of the tensors in words: `8x512 512x256`.
pub(super) fn shape(shapes: &[Vec<u64>]) -> String {
    let words = |shape: &Vec<u64>| shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
    shapes.iter().filter(|shape| !shape.is_empty()).take(3).map(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The operations alone.
    fn of(name: &[u8], shapes: &[Vec<u64>], values: &[String]) -> Option<u64> {
        super::of(name, shapes, values).map(|of| of.0)
    }

    #[test]
    fn products_and_convolutions_are_counted() {
        let shapes = |all: &[&[u64]]| all.iter().map(|of| of.to_vec()).collect::<Vec<_>>();
        let words = |all: &[&str]| all.iter().map(|of| (*of).to_owned()).collect::<Vec<_>>();
        assert_eq!(of(b"aten::mm", &shapes(&[&[2, 3], &[3, 5]]), &[]), Some(60));
        assert_eq!(of(b"aten::addmm", &shapes(&[&[5], &[2, 3], &[3, 5]]), &[]), Some(60));
        assert_eq!(of(b"aten::bmm", &shapes(&[&[4, 2, 3], &[4, 3, 5]]), &[]), Some(240));
        assert_eq!(of(b"aten::mm", &shapes(&[&[2, 3], &[4, 5]]), &[]), None);
        // A 3x3 kernel with padding 1 and stride 2 on 8x8: 4x4 places.
        let convolution = shapes(&[&[2, 3, 8, 8], &[16, 3, 3, 3]]);
        let values = words(&["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]);
        let expected = 2 * (2 * 16 * 4 * 4) * (3 * 3 * 3);
        assert_eq!(of(b"aten::cudnn_convolution", &convolution, &values), Some(expected));
        assert_eq!(of(b"aten::cudnn_convolution", &convolution, &[]), None);
        // oneDNN has the bias among the arguments.
        let values = words(&["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]);
        for name in [&b"aten::mkldnn_convolution"[..], b"aten::miopen_convolution"] {
            assert_eq!(of(name, &convolution, &values), Some(expected));
        }
        let lies = |strides: &[u64]| {
            is_nchw(b"aten::mkldnn_convolution", &convolution, &shapes(&[strides, &[27, 9, 3, 1]]))
        };
        assert!(lies(&[192, 64, 8, 1]) && !lies(&[192, 1, 24, 3]) && !lies(&[]));
        let backward = shapes(&[&[2, 16, 4, 4], &[2, 3, 8, 8], &[16, 3, 3, 3]]);
        let strides = shapes(&[&[256, 1, 64, 16], &[192, 64, 8, 1], &[27, 9, 3, 1]]);
        assert!(is_nchw(b"aten::convolution_backward", &backward, &strides));
        let both = words(&["[True, True, False]"]);
        assert_eq!(of(b"aten::convolution_backward", &backward, &both), Some(2 * expected));
        let first = words(&["[False, True, False]"]);
        assert_eq!(of(b"aten::convolution_backward", &backward, &first), Some(expected));
        let huge = shapes(&[&[u64::MAX, 3], &[3, u64::MAX]]);
        assert_eq!(of(b"aten::mm", &huge, &[]), None);
        let no_stride = words(&["", "", "[1]", "[0]", "[1]"]);
        assert_eq!(of(b"aten::cudnn_convolution", &convolution, &no_stride), None);
        assert_eq!(shape(&convolution), "2x3x8x8 16x3x3x3");
    }

    #[test]
    fn the_smaller_image_of_a_convolution_meets_all_weights_of_its_channels() {
        // Sizes of a kernel do not depend on dilation. The larger image is twice as long in each dimension, by stride 2.
        for (groups, small, kernel) in [
            (1, &[5][..], &[3][..]),
            (1, &[4, 4], &[3, 3]),
            (4, &[4, 4], &[3, 3]),
            (16, &[4, 6], &[1, 3]),
            (2, &[2, 3, 4], &[2, 2, 2]),
        ] {
            let (images, channels) = (2, 16u64);
            let large: Vec<u64> = small.iter().map(|size| 2 * size).collect();
            let shape = |first: &[u64], rest: &[u64]| [first, rest].concat();
            let small_image = shape(&[images, channels], small);
            let large_image = shape(&[images, channels], &large);
            let weight = shape(&[channels, channels / groups], kernel);
            let weights: u64 = weight[1..].iter().product();
            let expected = 2 * small_image.iter().product::<u64>() * weights;
            let values = |is_transposed: &str| {
                let mut values = vec![String::new(); 11];
                values[7] = is_transposed.to_owned();
                values[10] = "[True, True, False]".to_owned();
                values
            };
            let backward = |output: &Vec<u64>, input: &Vec<u64>, values: &[String]| {
                let shapes = [output.clone(), input.clone(), weight.clone()];
                of(b"aten::convolution_backward", &shapes, values)
            };
            for (is_transposed, output, input) in
                [("True", &large_image, &small_image), ("False", &small_image, &large_image)]
            {
                for values in [values(is_transposed), values("")] {
                    let found = backward(output, input, &values);
                    assert_eq!(found, Some(2 * expected), "{is_transposed:?} {weight:?}");
                }
            }
            // Only the flag decides if both images have one size.
            assert_eq!(backward(&small_image, &small_image, &values("True")), Some(2 * expected));
            let shapes = [small_image.clone(), weight.clone()];
            for name in
                [&b"aten::cudnn_convolution_transpose"[..], b"aten::miopen_convolution_transpose"]
            {
                assert!(has_work(name));
                assert_eq!(of(name, &shapes, &[]), Some(expected));
            }
        }
        // Different numbers of channels, and one gradient only.
        let shapes = [vec![2, 8, 8, 8], vec![2, 16, 4, 4], vec![16, 8, 3, 3]];
        let mut values = vec![String::new(); 11];
        (values[7], values[10]) = ("True".to_owned(), "[False, True, False]".to_owned());
        let expected = 2 * (2 * 16 * 4 * 4) * (8 * 3 * 3);
        assert_eq!(of(b"aten::convolution_backward", &shapes, &values), Some(expected));
    }
}
