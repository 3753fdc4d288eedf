//! Rows of a table, selected by numbers.
//!
//! An id out of range is an error. A card cannot report errors: there it gives a row of NaN, and no gradient; lengths that are
//! too short or too long count as 1 and as the length of the sequence.

use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;

use crate::card::NUMBERS;
use crate::error::matrix_sizes;
use crate::operands::write_or_update;
use crate::stored::{Stored, dispatch};
use crate::threads::shares;
use crate::{Compute, KernelError, Op, Result, read, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("embedding.cu", include_str!("embedding.cu"), &[NUMBERS]);

/// Threads of a block of a card, which has a row of the table.
fn threads(width: usize) -> u32 {
    width.next_multiple_of(32).clamp(32, Grid::BLOCK as usize) as u32
}

/// Errors if a number is not a row of the table.
fn check(op: Op, ids: &[i64], len: usize) -> Result<()> {
    match ids.iter().find(|id| !(0..len as i64).contains(id)) {
        Some(&index) => Err(KernelError::Index { op: op.name, index, len }),
        None => Ok(()),
    }
}

/// `output[i] = table[ids[i]]`. Shapes: ids of i64, any shape with n elements; table (len, width), output (n, width).
/// f32, f64 and bf16; overwrites.
pub fn forward(compute: &Compute, ids: &Tensor, table: &Tensor, output: &Tensor) -> Result<()> {
    let op = Op::new("embedding_forward").touching(ids.num_bytes() + 2 * output.num_bytes());
    let [len, width] = matrix_sizes(op.name, "table", table)?;
    dispatch!(op.name, table.dtype(), S => {
        let operands = (
            read::<i64>("ids", ids, ids.shape()),
            read::<S>("table", table, table.shape()),
            write::<S>("output", output, [ids.num_elems(), width]),
        );
        let count = ids.num_elems();
        compute.launch_with_card(op, operands, move |cpu, (ids, table, output)| {
            check(op, ids, len)?;
            let touched = output.len();
            cpu.threads.for_each(shares(cpu, output, width, count, touched), |(first, output)| {
                for (row, &id) in output.chunks_exact_mut(width.max(1)).zip(&ids[first..]) {
                    row.copy_from_slice(&table[id as usize * width..][..width]);
                }
            });
            Ok(())
        }, move |card, (ids, table, output)| {
            let arguments = (ids, table, output, len as u64, width as u32);
            // SAFETY: there are `count` ids and rows of the output, and `len` rows of the table.
            unsafe { card.launch(CARD.of::<S>("embedding"), arguments, Grid::blocks(count as u32, threads(width))) }
        })
    })
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
    let cleared = if accumulate { 0 } else { d_table.num_bytes() };
    let op = Op::new("embedding_backward").elementwise([d_output.num_elems()]);
    let op = op.touching(ids.num_bytes() + 3 * d_output.num_bytes() + cleared);
    let [len, width] = matrix_sizes(op.name, "table", d_table)?;
    dispatch!(op.name, d_table.dtype(), S => {
        let operands = (
            read::<i64>("ids", ids, ids.shape()),
            read::<S>("d_output", d_output, [ids.num_elems(), width]),
            write_or_update::<S>(accumulate, "d_table", d_table, d_table.shape()),
        );
        let count = ids.num_elems();
        compute.launch_with_card(op, operands, move |cpu, (ids, d_output, d_table)| {
            check(op, ids, len)?;
            // Each thread has some rows of the table, and looks for them among all ids.
            let touched = d_output.len() + if accumulate { 0 } else { d_table.len() };
            cpu.threads.for_each(shares(cpu, d_table, width, len, touched), |(first, d_table)| {
                if !accumulate {
                    d_table.fill(S::default());
                }
                let own = first..first + d_table.len() / width.max(1);
                for (row, &id) in d_output.chunks_exact(width.max(1)).zip(ids) {
                    if !own.contains(&(id as usize)) {
                        continue;
                    }
                    let sums = &mut d_table[(id as usize - first) * width..][..width];
                    for (sum, x) in sums.iter_mut().zip(row) {
                        *sum = S::store(sum.load() + x.load());
                    }
                }
            });
            Ok(())
        }, move |card, (ids, d_output, d_table)| {
            let (ids_word, rows, width_word) = (count as u64, len as u64, width as u32);
            // SAFETY: there are `count` ids and rows of the gradient, and `len` rows of the table.
            unsafe {
                if !accumulate {
                    card.fill(d_table, 0, len * width)?;
                }
                let arguments = (ids, d_output, d_table, ids_word, rows, width_word);
                card.launch(CARD.of::<S>("embedding_backward"), arguments, Grid::blocks(count as u32, threads(width)))
            }
        })
    })
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
    let op = Op::new("last_rows");
    let [n, seq] = matrix_sizes(op.name, "ids", ids)?;
    let operands = (
        read::<i64>("ids", ids, [n, seq]),
        read::<i64>("lengths", lengths, [n]),
        write::<i64>("rows", rows, [n]),
    );
    compute.launch_with_card(
        op,
        operands,
        move |_, (ids, lengths, rows)| {
            for (at, (row, &length)) in rows.iter_mut().zip(lengths).enumerate() {
                if !(1..=seq as i64).contains(&length) {
                    return Err(KernelError::Index { op: op.name, index: length - 1, len: seq });
                }
                let ids = &ids[at * seq..][..length as usize];
                let last = match pad {
                    Some(pad) => ids.iter().rposition(|id| *id != pad).unwrap_or(0),
                    None => ids.len() - 1,
                };
                *row = (at * seq + last) as i64;
            }
            Ok(())
        },
        move |card, (ids, lengths, rows)| {
            let (has_pad, pad) = (u32::from(pad.is_some()), pad.unwrap_or_default());
            // SAFETY: there are `n` sequences of `seq` ids, `n` lengths and `n` rows.
            unsafe {
                card.launch(
                    CARD.kernel("last_rows"),
                    (ids, lengths, rows, n as u64, seq as u64, has_pad, pad),
                    Grid::elements(n),
                )
            }
        },
    )
}
