//! How many floating-point operations an operator makes, from the shapes of its inputs.
//!
//! The name, shapes and values of an operator go in. A number comes out, or `None` if the operator is no product or convolution,
//! or its shapes do not say it. A multiplication and an addition count as one each.

/// Whether [`of`] may know this operator. Operators that only call one of these are left out, so that nothing counts twice.
pub(super) fn is_product(name: &[u8]) -> bool {
    matches!(
        name,
        b"aten::mm"
            | b"aten::addmm"
            | b"aten::bmm"
            | b"aten::baddbmm"
            | b"aten::cudnn_convolution"
            | b"aten::miopen_convolution"
            | b"aten::mkldnn_convolution"
            | b"aten::convolution_backward"
    )
}

/// The operations of an operator.
pub(super) fn of(name: &[u8], shapes: &[Vec<u64>], values: &[String]) -> Option<u64> {
    let shape = |at: usize| shapes.get(at).map(Vec::as_slice);
    match name {
        b"aten::mm" => product(shape(0)?, shape(1)?),
        b"aten::addmm" => product(shape(1)?, shape(2)?),
        b"aten::bmm" => batched(shape(0)?, shape(1)?),
        b"aten::baddbmm" => batched(shape(1)?, shape(2)?),
        // Arguments: input, weight, in oneDNN bias, padding, stride, dilation, groups.
        b"aten::cudnn_convolution" | b"aten::miopen_convolution" | b"aten::mkldnn_convolution" => {
            let (input, weight) = (shape(0)?, shape(1)?);
            let numbers = |at: usize| values.get(at).and_then(|words| list(words));
            let first = if name == b"aten::mkldnn_convolution" { 3 } else { 2 };
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
            convolution(&output, weight)
        }
        // Arguments: the output's gradient, input, weight, ..., and which gradients are wanted.
        b"aten::convolution_backward" => {
            let one = convolution(shape(0)?, shape(2)?)?;
            let wanted = values.last().filter(|words| words.contains("rue"));
            let parts = wanted.map_or(2, |words| {
                let parts = words.split(',').take(2);
                parts.filter(|part| part.contains("rue")).count() as u64
            });
            one.checked_mul(parts)
        }
        _ => None,
    }
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

fn product(a: &[u64], b: &[u64]) -> Option<u64> {
    match (a, b) {
        (&[m, k], &[inner, n]) if k == inner => multiplied(&[2, m, k, n]),
        _ => None,
    }
}

fn batched(a: &[u64], b: &[u64]) -> Option<u64> {
    match (a, b) {
        (&[batch, m, k], &[same, inner, n]) if batch == same && k == inner => {
            multiplied(&[2, batch, m, k, n])
        }
        _ => None,
    }
}

/// `output`: (batch, channels, size...). `weight`: (output channels, input channels of a group, kernel size...).
fn convolution(output: &[u64], weight: &[u64]) -> Option<u64> {
    if output.len() < 3 || output.len() != weight.len() || output[1] != weight[0] {
        return None;
    }
    multiplied(&[2])?.checked_mul(multiplied(output)?)?.checked_mul(multiplied(&weight[1..])?)
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
        assert_eq!(of(b"aten::mkldnn_convolution", &convolution, &values), Some(expected));
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
}
