//! Rows of a table, selected by numbers.

use half::bf16;
use paceline_memory::{DType, Device, Element, Tensor};

use crate::error::expect_shape;
use crate::meta::MetaScratch;
use crate::stored::{self, Stored};
use crate::{Compute, KernelError, Result};

const OP: &str = "embedding";

/// The sizes of the table: rows, columns. Checks the other shapes.
fn sizes(
    ids: &Tensor,
    table: &Tensor,
    rows: &Tensor,
    operand: &'static str,
) -> Result<(usize, usize)> {
    let &[len, width] = table.dims() else {
        let (expected, got) = ([0, 0].into(), table.shape());
        return Err(KernelError::Shape { op: OP, operand: "table", expected, got });
    };
    expect_shape(OP, operand, rows.shape(), [ids.num_elems(), width])?;
    Ok((len, width))
}

/// Errors if a number is not a row of the table.
fn check(ids: &[i64], len: usize) -> Result<()> {
    match ids.iter().find(|id| !(0..len as i64).contains(id)) {
        Some(&index) => Err(KernelError::Index { op: OP, index, len }),
        None => Ok(()),
    }
}

/// `output[i] = table[ids[i]]`. Shapes: ids of i64, any shape with n elements; table (len, width), output (n, width).
/// f32, f64 and bf16; overwrites.
pub fn forward(compute: &Compute, ids: &Tensor, table: &Tensor, output: &Tensor) -> Result<()> {
    let _time = compute.time_old("embedding_forward", [ids, table]);
    let (len, width) = sizes(ids, table, output, "output")?;
    match compute.device_of(OP, [ids, table, output])? {
        Device::Cpu => match table.dtype() {
            DType::F32 => gather::<f32>(ids, table, len, width, output),
            DType::F64 => gather::<f64>(ids, table, len, width, output),
            DType::BF16 => gather::<bf16>(ids, table, len, width, output),
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let (dtype, _) = stored::types(OP, table)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::I64, [ids])?;
            pretended.reads(dtype, [table])?.writes(dtype, [output])?;
            Ok(())
        }
    }
}

fn gather<T: Element>(
    ids: &Tensor,
    table: &Tensor,
    len: usize,
    width: usize,
    output: &Tensor,
) -> Result<()> {
    let (ids, table) = (ids.read::<i64>()?, table.read::<T>()?);
    check(&ids, len)?;
    let mut output = output.write::<T>()?;
    for (row, &id) in output.chunks_exact_mut(width.max(1)).zip(ids.iter()) {
        row.copy_from_slice(&table[id as usize * width..][..width]);
    }
    Ok(())
}

/// `d_table[ids[i]] += d_output[i]`, in order of `i`. All other rows are set to zero, or stay as they are if
/// `accumulate`. Shapes and types as in [`forward`]; a table of bf16 is rounded after each addition.
pub fn backward(
    compute: &Compute,
    ids: &Tensor,
    d_output: &Tensor,
    d_table: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time_old("embedding_backward", [ids, d_table]);
    let (len, width) = sizes(ids, d_table, d_output, "d_output")?;
    match compute.device_of(OP, [ids, d_output, d_table])? {
        Device::Cpu => match d_table.dtype() {
            DType::F32 => scatter::<f32>(ids, d_output, len, width, d_table, accumulate),
            DType::F64 => scatter::<f64>(ids, d_output, len, width, d_table, accumulate),
            DType::BF16 => scatter::<bf16>(ids, d_output, len, width, d_table, accumulate),
            dtype => Err(KernelError::DType { op: OP, dtype }),
        },
        Device::Meta => {
            let (dtype, _) = stored::types(OP, d_table)?;
            let pretended = MetaScratch::new(compute, OP).reads(DType::I64, [ids])?;
            pretended.reads(dtype, [d_output])?.writes(dtype, [d_table])?;
            Ok(())
        }
    }
}

fn scatter<T: Stored>(
    ids: &Tensor,
    d_output: &Tensor,
    len: usize,
    width: usize,
    d_table: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let (ids, d_output) = (ids.read::<i64>()?, d_output.read::<T>()?);
    check(&ids, len)?;
    let mut d_table = d_table.write::<T>()?;
    if !accumulate {
        d_table.fill(T::default());
    }
    for (row, &id) in d_output.chunks_exact(width.max(1)).zip(ids.iter()) {
        let sums = &mut d_table[id as usize * width..][..width];
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum = T::store(sum.load() + x.load());
        }
    }
    Ok(())
}

/// `rows[i] = i * seq + last`: the row of the last element of each sequence, where sequences of different lengths are padded
/// to `seq` rows each. `last` is `lengths[i] - 1`, or with a `pad` the last place before `lengths[i]` whose id is another
/// one; 0 if there is none. Shapes: ids (batch, seq), lengths and rows (batch), i64; overwrites. Errors if a length is not
/// among 1 to `seq`.
pub fn last_rows(
    compute: &Compute,
    ids: &Tensor,
    lengths: &Tensor,
    pad: Option<i64>,
    rows: &Tensor,
) -> Result<()> {
    let op = "last_rows";
    let &[n, seq] = ids.dims() else {
        let (expected, got) = ([0, 0].into(), ids.shape());
        return Err(KernelError::Shape { op, operand: "ids", expected, got });
    };
    expect_shape(op, "lengths", lengths.shape(), [n])?;
    expect_shape(op, "rows", rows.shape(), [n])?;
    match compute.device_of(op, [ids, lengths, rows])? {
        Device::Cpu => {
            let (ids, lengths) = (ids.read::<i64>()?, lengths.read::<i64>()?);
            let mut rows = rows.write::<i64>()?;
            for (at, (row, &length)) in rows.iter_mut().zip(lengths.iter()).enumerate() {
                if !(1..=seq as i64).contains(&length) {
                    return Err(KernelError::Index { op, index: length - 1, len: seq });
                }
                let ids = &ids[at * seq..][..length as usize];
                let last = match pad {
                    Some(pad) => ids.iter().rposition(|id| *id != pad).unwrap_or(0),
                    None => ids.len() - 1,
                };
                *row = (at * seq + last) as i64;
            }
        }
        Device::Meta => {
            let pretended = MetaScratch::new(compute, op).reads(DType::I64, [ids, lengths])?;
            pretended.writes(DType::I64, [rows])?;
        }
    }
    Ok(())
}
