//! Tensors of two safetensors files, element by element: whether they have the same bits, and how far apart they are.
//!
//! Input: files that any program may have written. Output: the largest differences, and the first element. This file does not know what
//! the tensors are for.

use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use crate::Result;
use crate::pretrained::{CHUNK_BYTES, StoredTensor, stored_in};

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct FileTensor {
    /// Its name.
    pub name: String,
    stored: StoredTensor,
}

/// How far two tensors of one type and shape are apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// The elements of each tensor.
    pub elems: u64,
    /// The elements whose bits differ. Two that are both not a number count as the same.
    pub differing: u64,
    /// The indices of the first of them.
    pub first: Vec<usize>,
    /// Its values in both.
    pub values: [String; 2],
    /// The most values of the type that lie between two elements: units in the last place. As all figures below, of elements that are
    /// finite in both.
    pub ulps: u128,
    /// The largest absolute difference.
    pub absolute: f64,
    /// The norm of the difference, divided by the norm of the first tensor.
    pub relative: f64,
    /// The elements of each tensor that are NaN or infinite.
    pub not_finite: [u64; 2],
}

impl FileTensor {
    /// The tensors of a file, in the order of the names in its metadata under `order`, one per line. Without it they are sorted by name,
    /// where a part of a name that is a number counts as a number.
    ///
    /// # Errors
    /// If it cannot be read, or is no safetensors file.
    pub fn all(path: &Path) -> Result<Vec<Self>> {
        Ok(stored_in(path)?.into_iter().map(|(name, stored)| Self { name, stored }).collect())
    }

    /// Its type and shape, as in `F32 [2, 3]`.
    pub fn form(&self) -> String {
        format!("{:?} {:?}", self.stored.dtype, self.stored.shape)
    }

    /// The difference from a tensor of the same form; `None` if they are the same.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn difference(&self, other: &Self) -> Result<Option<Difference>> {
        let mut is_same = true;
        self.pieces(other, &mut |_, a, b| is_same &= a == b)?;
        if is_same {
            return Ok(None);
        }
        let StoredTensor { dtype, ref shape, .. } = self.stored;
        Difference::over(dtype, shape, |take| self.pieces(other, take))
    }

    /// Reads both, piece by piece: the first byte of the piece, and the piece of each.
    fn pieces(&self, other: &Self, take: TakePieces) -> Result<()> {
        let len = self.stored.num_bytes();
        let mut pieces = [vec![0; CHUNK_BYTES.min(len)], vec![0; CHUNK_BYTES.min(len)]];
        for begin in (0..len).step_by(CHUNK_BYTES) {
            let part = CHUNK_BYTES.min(len - begin);
            for (piece, stored) in pieces.iter_mut().zip([&self.stored, &other.stored]) {
                stored.read_bytes(begin, &mut piece[..part])?;
            }
            take(begin, &pieces[0][..part], &pieces[1][..part]);
        }
        Ok(())
    }
}

/// Takes two pieces of the same elements: the first byte of both, and the bytes of each.
type TakePieces<'a> = &'a mut dyn FnMut(usize, &[u8], &[u8]);

impl Difference {
    /// The difference of two tensors of a type, given as the name of the type in safetensors and as bytes; `None` if they are the same, or
    /// if the type is unknown or the lengths do not fit.
    pub fn between(dtype: &str, shape: &[usize], [a, b]: [&[u8]; 2]) -> Option<Self> {
        let dtype: Dtype = serde_json::from_value(dtype.into()).ok()?;
        let elems = shape.iter().try_fold(1usize, |all, extent| all.checked_mul(*extent));
        let len = elems?.checked_mul(dtype.bitsize() / 8)?;
        let compare = |take: TakePieces| {
            take(0, a, b);
            Ok(())
        };
        if [a.len(), b.len()] == [len; 2] { Self::over(dtype, shape, compare).ok()? } else { None }
    }

    /// The difference of all pieces that `read` passes on.
    fn over(
        dtype: Dtype,
        shape: &[usize],
        read: impl FnOnce(TakePieces) -> Result<()>,
    ) -> Result<Option<Self>> {
        let size = dtype.bitsize().div_ceil(8);
        let mut found = Self::default();
        let (mut squares, mut first_squares) = (0.0, 0.0);
        read(&mut |begin, a, b| {
            found.elems += (a.len() / size) as u64;
            let elems = a.chunks_exact(size).zip(b.chunks_exact(size));
            for (at, bytes) in elems.enumerate() {
                let [a, b] = [number(dtype, bytes.0), number(dtype, bytes.1)];
                let differs = bytes.0 != bytes.1 && !(a.1.is_nan() && b.1.is_nan());
                if differs && found.differing == 0 {
                    found.first = indices(shape, begin / size + at);
                    found.values = [words(dtype, a), words(dtype, b)];
                }
                found.differing += u64::from(differs);
                found.not_finite[0] += u64::from(!a.1.is_finite());
                found.not_finite[1] += u64::from(!b.1.is_finite());
                if a.1.is_finite() && b.1.is_finite() {
                    let apart = (a.1 - b.1).abs();
                    found.ulps = found.ulps.max(a.0.abs_diff(b.0));
                    found.absolute = found.absolute.max(apart);
                    squares += apart * apart;
                    first_squares += a.1 * a.1;
                }
            }
        })?;
        found.relative = if squares == 0.0 { 0.0 } else { (squares / first_squares).sqrt() };
        Ok((found.differing > 0).then_some(found))
    }
}

/// An element's place among all values of its type, and its value. Types without numbers here count as whole numbers.
fn number(dtype: Dtype, bytes: &[u8]) -> (i128, f64) {
    let mut all = [0; 8];
    all[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
    let bits = u64::from_le_bytes(all);
    let value = match dtype {
        Dtype::F64 => f64::from_bits(bits),
        Dtype::F32 => f64::from(f32::from_bits(bits as u32)),
        Dtype::F16 => f16::from_bits(bits as u16).to_f64(),
        Dtype::BF16 => bf16::from_bits(bits as u16).to_f64(),
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => {
            // The sign bit of the type becomes that of the number.
            let shift = 64 - 8 * bytes.len();
            let whole = (bits << shift) as i64 >> shift;
            return (i128::from(whole), whole as f64);
        }
        _ => return (i128::from(bits), bits as f64),
    };
    let sign = 1 << (8 * bytes.len() - 1);
    let place = i128::from(bits & !sign);
    (if bits & sign == 0 { place } else { -place }, value)
}

fn words(dtype: Dtype, (place, value): (i128, f64)) -> String {
    match dtype {
        Dtype::F64 => format!("{value:?}"),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => format!("{:?}", value as f32),
        _ => place.to_string(),
    }
}

/// The indices of an element.
fn indices(shape: &[usize], mut at: usize) -> Vec<usize> {
    let mut found: Vec<usize> = shape
        .iter()
        .rev()
        .map(|extent| {
            let index = at % extent;
            at /= extent;
            index
        })
        .collect();
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    fn file(folder: &Path, name: &str, tensors: &[(&str, Dtype, &[u8])]) -> Vec<FileTensor> {
        let view = |(name, dtype, bytes): &(&str, Dtype, &'static [u8])| {
            let shape = vec![1, bytes.len() * 8 / dtype.bitsize()];
            ((*name).to_owned(), TensorView::new(*dtype, shape, bytes).unwrap())
        };
        let leaked: Vec<(&str, Dtype, &'static [u8])> = tensors
            .iter()
            .map(|(name, dtype, bytes)| {
                (*name, *dtype, &*Box::leak(bytes.to_vec().into_boxed_slice()))
            })
            .collect();
        let order = [("order".to_owned(), "norm\nhead".to_owned())].into_iter().collect();
        let path = folder.join(name);
        let bytes = safetensors::serialize(leaked.iter().map(view), Some(order)).unwrap();
        std::fs::write(&path, bytes).unwrap();
        FileTensor::all(&path).unwrap()
    }

    /// The difference of two tensors of this type with these bytes.
    fn apart(dtype: Dtype, a: &[u8], b: &[u8]) -> Option<Difference> {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = [("a", a), ("b", b)]
            .map(|(name, bytes)| file(folder.path(), name, &[("t", dtype, bytes)]));
        a[0].difference(&b[0]).unwrap()
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn tensors_come_in_the_order_of_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let names =
            ["layers.10.w", "layers.9.w", "head", "norm"].map(|name| (name, Dtype::U8, &[1u8][..]));
        let found: Vec<String> =
            file(folder.path(), "a", &names).into_iter().map(|of| of.name).collect();
        assert_eq!(found, ["norm", "head", "layers.9.w", "layers.10.w"]);
    }

    #[test]
    fn differences_are_counted_and_measured() {
        let (a, next) = (1.5f32, f32::from_bits(1.5f32.to_bits() + 3));
        assert_eq!(apart(Dtype::F32, &f32s(&[a, f32::NAN]), &f32s(&[a, f32::NAN])), None);
        let found = apart(Dtype::F32, &f32s(&[0.0, a]), &f32s(&[0.0, next])).unwrap();
        assert_eq!((found.elems, found.differing, found.ulps), (2, 1, 3));
        assert_eq!(found.first, [0, 1]);
        assert_eq!(found.values, ["1.5".to_owned(), format!("{next:?}")]);
        assert_eq!(found.absolute, f64::from(next) - 1.5);
        assert_eq!(found.relative, found.absolute / 1.5);
        let found =
            apart(Dtype::F32, &f32s(&[-0.0, f32::MIN_POSITIVE]), &f32s(&[0.0, f32::INFINITY]))
                .unwrap();
        assert_eq!((found.differing, found.ulps, found.not_finite), (2, 0, [0, 1]));
        assert_eq!(found.relative, 0.0);
        let found = apart(Dtype::BF16, &[0x80, 0x3f], &[0x80, 0xbf]).unwrap();
        assert_eq!(found.values, ["1.0", "-1.0"]);
        assert_eq!(found.ulps, 2 * 0x3f80);
        let found = apart(Dtype::I16, &[0xff, 0xff], &[1, 0]).unwrap();
        assert_eq!((found.values, found.ulps), (["-1".to_owned(), "1".to_owned()], 2));
        let found = apart(Dtype::U64, &[0xff; 8], &[0; 8]).unwrap();
        assert_eq!(found.ulps, u128::from(u64::MAX));
        let found = apart(Dtype::F64, &1f64.to_le_bytes(), &f64::NAN.to_le_bytes()).unwrap();
        assert_eq!(found.values, ["1.0", "NaN"]);
    }
}
